"""train, evaluate and report as a user meets them: what they claim, where they look, what they leave behind."""

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mettle.atomic_files import sha256
from mettle.train import open_run_folder
from mettle.train.recipe import parse_recipe
from tests.command_line import mettle, refused
from tests.processes import run_mettle, start_mettle
from tests.train.conftest import make_npz, tiny


def unsplit(path: Path, name: str = "{}", **options) -> Path:
    """Patterns without a split column, their identities called as said."""
    make_npz(path, **options)
    with np.load(path) as z:
        found = {key: z[key] for key in ("images", "domain")}
        found["label"] = np.asarray([name.format(k) for k in z["label"]])
    np.savez(path, **found)
    return path


def people(root: Path, count: int, each: int = 6, start: int = 0) -> Path:
    """A folder per person."""
    for k in range(start, start + count):
        rng = np.random.default_rng(k)
        base = np.kron(rng.integers(0, 200, (4, 4, 3)), np.ones((3, 3, 1), int))
        (root / f"person {k:02d}").mkdir(parents=True)
        for j in range(each):
            noisy = (base + rng.integers(0, 40, base.shape)).astype(np.uint8)
            Image.fromarray(noisy).save(root / f"person {k:02d}" / f"{j}.png")
    return root


def give_up_rights() -> None:
    """Who may write anywhere (CAP_DAC_OVERRIDE) no longer may."""
    if os.geteuid() == 0:
        head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # this process; what it may do
        assert ctypes.CDLL(None).capget(head, sets) == 0
        sets[0], sets[1] = sets[0] & ~2, sets[1] & ~2  # what is in force, and what may be taken back
        assert ctypes.CDLL(None).capset(head, sets) == 0


def state(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data, a recipe and a run on an unsplit folder of people, trained from there by relative paths."""
    folder = tmp_path_factory.mktemp("cli runs")
    people(folder / "my data", 20)
    (folder / "small.toml").write_text(tiny(Path("my data"), steps=6).to_toml())
    before = Path.cwd()
    os.chdir(folder)
    try:
        said = mettle("train", "small.toml")
    finally:
        os.chdir(before)
    (folder / "said.txt").write_text(said)
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch) -> Path:
    """A copy of that run, seen from another folder."""
    shutil.copytree(place / "runs" / "small", tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    return Path("small")


def protocol(text: str) -> str:
    return next(line for line in text.splitlines() if " set" in line)


class TestProtocol:
    """Who was trained on is what the run kept, never what the data at hand suggest."""

    def test_own_data_are_an_open_set(self, place, run):
        assert protocol(mettle("evaluate", run)).startswith("open set: no test identity was trained on; ")

    def test_the_training_people_in_another_set_are_noticed(self, place, run, tmp_path):
        """All of them are judged, and none of the split that this set would get if it were trained on."""
        contract = json.loads((run / "contract.json").read_text())
        trained = [name for name in os.listdir(place / "my data") if in_training(run, name)]
        for name in sorted(trained)[:3]:
            shutil.copytree(place / "my data" / name, tmp_path / "other" / name)
        people(tmp_path / "other", 2, start=50)
        mettle("evaluate", run, "--data", "other", "-o", "m.json")
        facts = json.loads((tmp_path / "m.json").read_text())["data"]
        assert (facts["shared_identities"], facts["test_identities"], facts["test_samples"]) == (3, 5, 30)
        assert facts["training_identities"] == len(trained) == 12
        assert facts["protocol"] == "mixed set: 3 of 5 test identities were trained on, going by names"
        shutil.rmtree(tmp_path / "other" / "person 50")
        shutil.rmtree(tmp_path / "other" / "person 51")
        assert protocol(mettle("evaluate", run, "--data", "other")).startswith("closed set: every test identity")
        assert json.loads((run / "contract.json").read_text()) == contract

    def test_three_new_people_are_enough_and_all_are_judged(self, run, tmp_path):
        people(tmp_path / "new", 3, start=60)
        text = protocol(mettle("evaluate", run, "--data", "new"))
        assert text == "open set: no test identity was trained on, going by names; 18 test samples of 3 identities"

    def test_a_split_of_other_data_is_kept(self, run, tmp_path):
        for part, count, start in (("train", 4, 60), ("test", 3, 70)):
            people(tmp_path / "new" / part, count, start=start)
        assert "18 test samples of 3 identities" in mettle("evaluate", run, "--data", "new")

    def test_a_run_of_an_older_version_does_not_know(self, run, tmp_path):
        people(tmp_path / "new", 3, start=60)
        (run / "trained.safetensors").unlink()
        mettle("evaluate", run, "--data", "new", "-o", "m.json")
        facts = json.loads((tmp_path / "m.json").read_text())["data"]
        assert facts["protocol"].startswith("open or closed set unknown")
        assert facts["shared_identities"] is None and facts["training_identities"] is None
        assert protocol(mettle("evaluate", run)).startswith("open set: ")  # of its own, unchanged data it does

    def test_one_more_person_in_the_folder_is_noticed_and_nothing_is_rewritten(self, place, run, tmp_path):
        shutil.copytree(place / "my data", tmp_path / "grown")
        found = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(found | {"paths": {"source": str(tmp_path / "grown")}}))
        assert protocol(mettle("evaluate", run)).startswith("open set: ")
        people(tmp_path / "grown", 1, start=90)
        before = state(run)
        for command in ("evaluate", "report"):
            assert "have changed since it was trained" in refused(command, run)
        assert state(run) == before
        text = mettle("evaluate", run, "--data", "grown")
        assert protocol(text).startswith("mixed set: 12 of 21 test identities were trained on")
        assert state(run) == before


def in_training(run: Path, name: str) -> bool:
    return bool(open_run_folder(run).training_identities().contains([name])[0])


class TestPlaces:
    def test_a_run_works_from_another_folder(self, place, run):
        before = json.loads((run / "metrics.json").read_text())
        mettle("evaluate", run)
        assert json.loads((run / "metrics.json").read_text()) == before
        assert 'source = "my data"' in (run / "recipe.toml").read_text()

    def test_data_that_moved_can_be_named_and_are_known_again(self, place, run, tmp_path):
        shutil.copytree(place / "my data", tmp_path / "moved")
        found = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(found | {"paths": {"source": "/nowhere/my data"}}))
        assert "no data at '/nowhere/my data': there they were when small was trained" in refused("evaluate", run)
        assert protocol(mettle("evaluate", run, "--data", "moved")).startswith(
            "open set: no test identity was trained on;"
        )
        assert "report: small/report.html" in mettle("report", run, "--data", "moved")
        with np.load(embedded(run, "moved")) as z:
            assert set(z["split"]) == {"train", "val", "test"}

    def test_a_page_of_other_data_goes_elsewhere(self, run, tmp_path):
        people(tmp_path / "new", 4, start=60)
        before = state(run)
        assert "needs -o FILE" in refused("report", run, "--data", "new")
        mettle("report", run, "--data", "new", "-o", "new.html")
        assert (tmp_path / "new.html").is_file() and state(run) == before
        assert "report of one run" in refused("report", run, run, "--data", "new")

    @pytest.mark.parametrize("command", ["evaluate {} -o", "report {} -o", "embed {} new -o", "export {} --onnx"])
    def test_a_folder_that_is_not_there_is_told_first(self, command, run):
        text = refused(*command.format(run).split(), "no/such/file.npz")
        assert text.startswith("cannot write no/such/file.npz: there is no folder no/such")
        assert ".mettle-tmp-" not in text

    def test_every_file_that_is_written_is_named(self, run, tmp_path):
        text = mettle("evaluate", run, "-o", "b1.json")
        assert "metrics: small/metrics.json" in text and "metrics: b1.json" in text
        assert (tmp_path / "b1.json").read_bytes() == (run / "metrics.json").read_bytes()


def embedded(run: Path, data: object) -> Path:
    mettle("embed", run, data, "-o", "z.npz")
    return Path("z.npz")


def test_other_data_without_a_split_are_embedded_without_one(run, tmp_path):
    with np.load(embedded(run, people(tmp_path / "new", 4, start=60))) as z:
        assert "split" not in z or set(z["split"]) == {""}
        assert len(z["embeddings"]) == 24


def test_a_model_of_pictures_that_are_no_squares_takes_other_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(12), 4)
    base = rng.integers(0, 256, (12, 16, 8))
    images = np.clip(base[label] + rng.normal(0, 20, (48, 16, 8)), 0, 255).astype(np.uint8)
    np.savez("tall.npz", images=images, label=label)
    (tmp_path / "small.toml").write_text(tiny(Path("tall.npz"), steps=2).to_toml())
    mettle("train", "small.toml", "--no-report")
    assert json.loads((tmp_path / "runs/small/contract.json").read_text())["input"]["shape"] == [1, 16, 8]
    people(tmp_path / "squares", 3, start=60)
    with np.load(embedded(Path("runs/small"), "squares")) as z:
        assert z["embeddings"].shape == (18, 8)
    with np.load(embedded(Path("runs/small"), "tall.npz")) as z:
        assert z["embeddings"].shape == (48, 8)


class TestConsole:
    def test_a_refused_rate_is_no_number_and_warnings_are_printed(self, place, run):
        text = mettle("evaluate", run)
        metrics = json.loads((run / "metrics.json").read_text())
        points = metrics["scenarios"]["all"]["verification"]["tar"]
        held = [p for p in points if p["status"] in ("refused as headline", "not measurable")]
        assert any(p["status"] == "refused as headline" and p["tar"] is not None for p in held), "nothing to see"
        line = next(line for line in text.splitlines() if "AUC" in line)
        for p in points:
            assert (f"% at FAR {p['far']:g}" in line) == (p not in held)
        assert f"({held[0]['impostors']:,} impostor pairs are too few)" in line
        assert "warning: Only 6 test identities" in text and "warning: The data name no domains" in text
        assert "warning: Only 6 test identities" in (place / "said.txt").read_text()

    def test_copies_between_training_and_test_are_told_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        source = unsplit(Path("p.npz"))
        with np.load(source) as z:
            found = dict(z)
        found["images"][:] = found["images"][0]
        np.savez(source, **found)
        (tmp_path / "small.toml").write_text(tiny(source, steps=1).to_toml())
        text = mettle("train", "small.toml")
        assert text.count("exact copies of training samples") == 1
        assert text.index("exact copies") < text.index("AUC")
        assert "exact copies" in mettle("evaluate", "runs/small")

    def test_a_mistyped_network_does_not_print_a_thousand_names(self, place, monkeypatch):
        monkeypatch.chdir(place)
        text = refused("train", "small.toml", "--name", "t", "--set", "model.backbone=timm/nope")
        assert "timm has no model 'nope'" in text and len(text) < 200
        assert "'resnet18'" in refused("train", "small.toml", "--name", "t", "--set", "model.backbone=timm/resnet_18")
        assert not (place / "runs" / "t").exists()

    @pytest.mark.parametrize(
        "key", ["loss.difficulty=Threshold", "evaluate.fars=[2]", "seed=-1", "loss.temperature=inf"]
    )
    def test_what_would_fail_later_is_refused_before_a_folder_is_made(self, key, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        refused("train", "supcon", "--set", key)
        assert list(tmp_path.iterdir()) == []


class TestResume:
    def test_the_hint_after_a_signal_continues_that_very_run(self, place, tmp_path):
        """A process, asked to stop; then what it printed, typed in again."""
        folder = tmp_path / "my runs"
        start = ["train", "small.toml", "--runs", folder, "--name", "int", "--no-report"]
        process = start_mettle(*start, "--set", "train.steps=100000", "--set", "train.rate=1e-4", cwd=place)
        log = folder / "int" / "log.jsonl"
        deadline = time.monotonic() + 200
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        text = "".join(process.communicate(timeout=200))
        assert process.returncode == 1, text
        hint = shlex.split(re.search(r"continue with: (mettle train .*)", text).group(1))
        assert hint[0] == "mettle" and str(folder) in hint and "--no-report" in hint
        steps = [int(p.name[5:]) for p in (folder / "int" / "checkpoints").iterdir()]
        again = start_mettle(*hint[1:], cwd=place)
        lines = [again.stdout.readline() for _ in range(3)]
        assert lines[1] == f"run folder: {folder / 'int'}\n"
        assert f"step-{max(steps):08d}" in lines[2]
        again.kill()
        again.communicate()
        assert os.listdir(folder) == ["int"]

    def test_without_a_recipe_the_run_keeps_its_own(self, place, run, tmp_path):
        before = sha256(run / "model.safetensors")
        text = mettle("train", "--runs", tmp_path, "--name", "small", "--resume", "--no-report")
        assert "newest checkpoint checkpoints/step-00000006" in text and "my data" in text
        assert sha256(run / "model.safetensors") == before
        assert "train.rate differ" in refused(
            "train", "--runs", ".", "--name", "small", "--resume", "--set", "train.rate=0.5"
        )

    def test_nothing_to_continue_is_not_a_new_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "no run runs/int to continue" in refused("train", "--name", "int", "--resume")
        assert list(tmp_path.iterdir()) == []

    def test_starting_over_is_said(self, run, tmp_path):
        shutil.rmtree(run / "checkpoints")
        text = mettle("train", "--runs", tmp_path, "--name", "small", "--resume", "--no-report")
        assert "no checkpoint yet, so from the first step" in text and "measuring" not in text


def test_measuring_is_said_before_it_begins(place, run):
    said = (place / "said.txt").read_text().splitlines()
    (at,) = (i for i, line in enumerate(said) if line.startswith("measuring on "))
    assert said[at] == "measuring on 36 test samples ..."
    assert any(line.startswith("step 6/6") for line in said[:at]) and said[at + 1].startswith("open set: ")
    process = start_mettle("evaluate", run)
    assert process.stdout.readline().startswith("measuring on ")
    told = time.time_ns()  # through a pipe: not held back until the end
    assert "EER" in process.communicate()[0]
    assert process.returncode == 0 and told < (run / "metrics.json").stat().st_mtime_ns


def test_a_folder_that_cannot_be_written_is_told_first_and_a_page_can_go_elsewhere(run, tmp_path):
    """Processes of their own: who may write anywhere gives that up first."""
    for path in run.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    run.chmod(0o555)
    before = state(run)
    try:
        done = run_mettle("evaluate", run, before=give_up_rights)
        assert done.returncode == 2 and "cannot write into small" in done.stderr and "EER" not in done.stdout
        done = run_mettle("report", run, "-o", "page.html", before=give_up_rights)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "page.html").is_file() and "cannot be written" in done.stdout
        assert state(run) == before
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(0o755)


def test_a_model_of_a_table_finds_its_columns_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        (f"{k + rng.normal():.3f}", f"{rng.normal() - k:.3f}", ("red", "green", "blue")[k % 3], f"id {k}")
        for k in np.repeat(np.arange(16), 4)
    ]

    def write(name: str, header: str, order: tuple[int, ...], swap: str = "red") -> str:
        lines = [",".join(row[k] for k in order).replace("red", swap) for row in rows]
        (tmp_path / name).write_text("\n".join([header, *lines]) + "\n")
        return name

    write("table.csv", "a,b,colour,label", (0, 1, 2, 3))
    plain = tiny(Path("table.csv"), steps=2).model_dump()
    plain["model"] |= {"backbone": "mlp"}
    plain["batch"] |= {"augment": "none"}
    (tmp_path / "small.toml").write_text(parse_recipe(plain).to_toml())
    mettle("train", "small.toml", "--no-report")
    with np.load(embedded(Path("runs/small"), "table.csv")) as z:
        wanted = z["embeddings"]
    for name in (
        write("turned.csv", "label,colour,b,a", (3, 2, 1, 0)),
        write("nobody.csv", "colour,b,a", (2, 1, 0)),  # without labels there is still something to embed
    ):
        with np.load(embedded(Path("runs/small"), name)) as z:
            np.testing.assert_array_equal(z["embeddings"], wanted)
    other = write("other.csv", "a,b,colour,label", (0, 1, 2, 3), swap="amber")
    assert "'amber' is a category that the model was not trained on" in refused(
        "embed", "runs/small", other, "-o", "z.npz"
    )
