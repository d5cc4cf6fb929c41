"""Training for a chapter: a shipped recipe becomes a run folder, and what was trained is at hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data import Samples
from mettle.errors import RunError
from mettle.evaluate import Verification, retrieval, verification
from mettle.evaluate.run.pair_tables import write_pair_metrics
from mettle.model import embed
from mettle.notes.chapter import BuildSettings
from mettle.train import Callback, RunFolder, TrainingState, load, prepare_samples, train
from mettle.train.callbacks import read_log
from mettle.train.from_recipe import GivenObjects, build_model


class _KeepMethod(Callback):
    """Remembers the method, with all of its networks, beyond the end of training."""

    method: Any = None

    def on_start(self, state: TrainingState) -> None:
        self.method = state.method


@dataclass(frozen=True, eq=False)
class ChapterRun:
    """A run of a chapter: its folder, its networks, its data and its log."""

    run: RunFolder
    model: Any
    method: Any
    samples: Samples
    log: Sequence[Mapping[str, Any]]

    def test_embeddings(self) -> np.ndarray:
        """(n, d) of the test split."""
        return embed(self.model, self.samples.part("test"))

    def log_line(self, key: str) -> tuple[list[int], list[float]]:
        """The steps and the values of a number that the log has."""
        lines = [line for line in self.log if line.get(key) is not None]
        return [int(line["step"]) for line in lines], [float(line[key]) for line in lines]


def train_recipe(
    settings: BuildSettings, chapter: int, name: str, recipe: str, overrides: Sequence[str] = (), loss: Any = None
) -> ChapterRun:
    """Train a shipped recipe in the folder of a chapter, or take the run that is there already.

    Args:
        settings: of the chapter.
        chapter: its number.
        name: of the run.
        recipe: name of a shipped recipe.
        overrides: as ``--set`` takes them.
        loss: a loss that recipes have no name for, in place of the recipe's.
    """
    folder = settings.folder / "runs" / f"chapter-{chapter}-{settings.choose('quick', 'full')}" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    plan = load(recipe, ["train.device=cpu", "train.log_every=5", *overrides])
    data = None
    if loss is not None:
        data = prepare_samples(plan, settings.cache)
    keep = _KeepMethod()
    settings.say(f"{'found' if folder.exists() else 'training'} {name}: {plan.title()}, {plan.train.steps} steps")
    try:
        found = train(
            plan,
            folder,
            resume=True,
            cache=settings.cache,
            callbacks=[keep],
            tensorboard=False,
            given=None if loss is None else GivenObjects(samples=data, loss=loss),
        )
    except RunError as error:
        raise RunError(f"{error}; or remove {folder}, and the chapter trains it again") from None
    if not found.finished:
        raise RunError(f"training of {folder} was stopped: the same command goes on with it")
    write_pair_metrics(found)
    return ChapterRun(found.run, found.model, keep.method, found.samples, read_log(folder / "log.jsonl"))


def untrained_model(run: ChapterRun) -> Any:
    """The network of a run before its first step."""
    return build_model(run.run.recipe, run.samples)


def raw_inputs(samples: Samples) -> np.ndarray:
    """(n, d) pictures of 16 x 16 as they are, the mean of every 2 x 2 pixels."""
    pictures = samples.read(np.arange(len(samples))).astype(np.float32)
    n, height, width, channels = pictures.shape
    small = pictures.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))
    return (small - small.mean()).reshape(n, -1)


def verify_across(z: np.ndarray, samples: Samples) -> Verification:
    """Pairs of different domains, query against gallery; identities and domains of ``samples``."""
    assert samples.domain is not None
    return verification(z, samples.labels, domains=samples.domain.codes, trials="across")


def recall_at_1(z: np.ndarray, labels: np.ndarray) -> float:
    """Recall@1 in percent."""
    return 100 * float(retrieval(z, labels, k=1).recall[1])


def within_and_between(z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every class the mean cosine to its own mean direction, and its mean direction's cosine to the nearest other.

    Higher within is tighter, lower between is wider apart.
    """
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    names, codes = np.unique(labels, return_inverse=True)
    means = np.zeros((len(names), z.shape[1]))
    np.add.at(means, codes, unit)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    within = np.bincount(codes, (unit * means[codes]).sum(1)) / np.bincount(codes)
    between = means @ means.T
    np.fill_diagonal(between, -1)
    return within, between.max(1)


def write_pictures(path: Path, samples: Samples, rows: np.ndarray, split: np.ndarray, **columns: Any) -> Path:
    """Some samples as a ``.npz`` file that recipes read, written once."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = samples.take(rows)
        named = {"label": part.label.values().astype(str), "split": split}
        np.savez_compressed(path, images=part.read(np.arange(len(part))), **named, **columns)
    return path
