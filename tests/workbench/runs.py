"""Small runs for the workbench, a server in a thread, and answers computed in the plainest way."""

from pathlib import Path

import numpy as np
import torch

from mettle.data.dataset import Column, Samples
from mettle.evaluate.diagnostics.label_errors import sample_difficulty
from mettle.evaluate.run import evaluate_run
from mettle.service import create_app
from mettle.train import RunFolder, train
from mettle.train.recipe import parse_recipe
from mettle.workbench import routes
from mettle.workbench.run_data import RunData
from tests.http_service import running

HOSTILE = "<img src=x onerror=alert(1)>"
PEOPLE, EACH = 24, 8


def pictures(path: Path) -> None:
    """24 people x 2 rooms x 4 pictures; the last 8 people are the test, one of them with a hostile name."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(PEOPLE), EACH)
    room = np.tile(np.repeat([0, 1], EACH // 2), PEOPLE)
    base = rng.integers(0, 256, (PEOPLE, 12, 12, 1))
    noise = rng.normal(0, 45, (len(person), 12, 12, 1)) + 30 * room[:, None, None, None]
    np.savez(
        path,
        images=np.clip(base[person] + noise, 0, 255).astype(np.uint8),
        label=np.asarray([f"person {k:02d}" for k in range(PEOPLE - 1)] + [HOSTILE])[person],
        domain=np.asarray(["indoors", "out & about"])[room],
        hand=np.asarray(["left", "right"])[person % 2],
        split=np.select([person < 12, person < 16], [0, 1], 2),
    )


def rows(path: Path) -> None:
    """16 identities x 6 rows of numbers, no domains."""
    rng = np.random.default_rng(1)
    identity = np.repeat(np.arange(16), 6)
    x = rng.normal(size=(16, 8))[identity] + 0.4 * rng.normal(size=(96, 8))
    np.savez(path, x=x.astype(np.float32), label=identity)


def trained(folder: Path, source: Path, name: str, seed: int = 0, **loss) -> RunFolder:
    """A run of a few steps, evaluated."""
    backbone = "mlp" if source.stem == "rows" else "convnet"
    recipe = parse_recipe(
        {
            "seed": seed,
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 2, "augment": "none"},
            "model": {"backbone": backbone, "width": 4, "depth": 2, "dim": 8, "pool": "flatten"},
            "loss": {"kind": "SupCon", "difficulty": {"kind": "Threshold"}} | loss,
            "train": {"steps": 12, "log_every": 2, "device": "cpu"},
            "evaluate": {"ks": [1], "fars": [0.1, 0.05]},
        }
    )
    outcome = train(recipe, folder / name, tensorboard=False)
    evaluate_run(outcome.run, outcome.samples, model=outcome.model)
    return outcome.run


def serving(runs, gallery):
    """A service without keys that mounts the workbench, on a free port."""
    return running(create_app(gallery, runs=runs, routers=[routes(runs)]))


def raw_scores(run: RunFolder, source: Path) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, float, bool]]]:
    """Genuine and impostor scores of a run's test pictures of two rooms, one pair at a time, in float64.

    Pixels come from the file and go through the network by hand; cosines are NumPy's.
    """
    with np.load(source) as file:
        test = file["split"] == 2
        images, label, domain = (file[name][test] for name in ("images", "label", "domain"))
    with torch.inference_mode():
        x = torch.from_numpy(images.astype(np.float32) / 255).permute(0, 3, 1, 2)
        z = run.model()(x).numpy().astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    pairs = [
        (i, j, float(z[i] @ z[j]), bool(label[i] == label[j]))
        for i in range(len(z))
        for j in range(i + 1, len(z))
        if domain[i] != domain[j]
    ]
    genuine = np.asarray([s for *_, s, same in pairs if same])
    impostor = np.asarray([s for *_, s, same in pairs if not same])
    return genuine, impostor, pairs


class Grey:
    """Pictures made of nothing, for tables whose pictures do not matter."""

    kind = "image"
    shape = (8, 8, 1)
    resident = True

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def read(self, at: np.ndarray) -> np.ndarray:
        return np.zeros((len(at), 8, 8, 1), np.uint8)

    def fingerprint(self) -> str:
        return "grey"


def drawn(mode: str, n: int = 60, labels: int = 8, seed: int = 0, run: RunFolder | None = None) -> RunData:
    """A scene without a trained run: every pair ("all"), pairs of two domains ("across"), queries ("roles")."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, labels, n)
    domain = rng.integers(0, 3, n) if mode != "all" else None
    role = np.where(np.arange(n) < n // 2, "query", "gallery") if mode == "roles" else None
    groups = {"hand": rng.integers(0, 2, n)}
    z = (rng.normal(size=(labels, 6))[y] + rng.normal(size=(n, 6))).astype(np.float32)
    if mode == "ties":
        z = np.round(z)
        z[~z.any(1), 0] = 1  # now and then all of a row is rounded to zero, which has no cosine
    samples = Samples.of(Grey(n), y, domain=domain, groups=groups, role=role)
    columns = samples.columns()
    label = Column.of(y)
    return RunData(run, "key", samples, z, label, columns, sample_difficulty(z, label.codes))  # type: ignore[arg-type]
