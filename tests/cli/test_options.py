"""What commands print: one line for a mistake, the run folder when there is one, and what decides first."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mettle import cli
from mettle.cli.run import _print_metrics
from mettle.train.callbacks import Progress, describe_difficulty
from mettle.train.optim import Schedule
from mettle.train.trainer import TrainingState
from tests.command_line import mettle, refused
from tests.small_runs import small_run
from tests.train.conftest import make_npz, tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, a recipe of six steps with a difficulty, and what training it printed."""
    folder = tmp_path_factory.mktemp("messages")
    (folder / "small.toml").write_text(tiny(make_npz(folder / "patterns.npz"), steps=6, log_every=1).to_toml())
    said = mettle("train", folder / "small.toml", "--runs", folder / "runs", "--no-report")
    (folder / "said.txt").write_text(said)
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--stesp", "3"], "no option --stesp; known are --allow-import,"),
        (["train", "--steps", "3"], "no option --steps: it is a recipe key, write --set train.steps=..."),
        (["trian"], "No such command 'trian'."),
        (["embed"], "Missing argument"),
        (["recipes", "more"], "unexpected extra argument"),
        (["data", "check"], "(see mettle data check --help)"),
        (["report", "r", "-o"], "requires an argument"),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line_and_status_2(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mettle", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, line = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert line.startswith("mettle: ") and line.count("\n") == 1 and said in line


def test_exit_statuses_and_help_are_as_they_were(monkeypatch, capsys):
    for words, status, wanted in (["--version"], 0, "mettle "), (["train", "--help"], 0, "--set"), ([], 2, "Commands:"):
        monkeypatch.setattr(sys, "argv", ["mettle", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == status
        assert wanted in "".join(capsys.readouterr())


@pytest.mark.parametrize("words", [["recipes"], ["--version"], ["--help"], ["train", "--help"]])
def test_what_only_prints_does_not_load_torch(words):
    code = (
        "import sys; from mettle import cli; sys.argv[1:] = {!r}\n"
        "try: cli.main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code.format(words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "a/b", "a\\b", "/absolute"])
def test_a_name_does_not_leave_the_folder_of_runs(name, place, tmp_path):
    runs = tmp_path / "inner" / "runs"
    said = refused("train", place / "small.toml", "--runs", runs, "--name", name, "--no-report")
    assert "--name takes a plain name" in said and "--runs" in said
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_is_named_when_there_is_one(place, tmp_path, monkeypatch, capsys):
    lines = (place / "said.txt").read_text().splitlines()
    assert f"run folder: {place / 'runs' / 'small'}" in lines[:2]
    missing = ["train", "supcon", "--data", str(tmp_path / "nowhere"), "--runs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["mettle", *missing])
    with pytest.raises(SystemExit):
        cli.main()
    assert "run folder" not in capsys.readouterr().out


def test_lines_of_training_say_what_the_difficulty_did_and_nothing_without_one(place):
    steps = [line for line in (place / "said.txt").read_text().splitlines() if line.startswith("step ")]
    assert steps and all("(mean weight " in line or "no hard" in line for line in steps)
    plain = mettle(
        *("train", place / "small.toml", "--runs", place / "runs", "--name", "plain", "--no-report"),
        *("--set", "loss={kind='SupCon'}"),
    )
    steps = [line for line in plain.splitlines() if line.startswith("step ")]
    assert steps and not any("hard" in line or "in model and loss" in line for line in steps)


def told(capsys, busy: float) -> str:
    line = {"step": 10, "loss": 1.5, "seconds_per_step": 0.1, "share_in_model_and_loss": busy, "hard_positives": 0.0}
    state, show = (
        TrainingState(SimpleNamespace(loss=None), Schedule(10, 1e-3), step=10, line=line, logged=(line,)),
        Progress(2),
    )
    show.on_start(state)
    show.on_step(state)
    show.on_end(state)
    return capsys.readouterr().out


def test_waiting_for_data_is_told_where_it_is_long(capsys):
    assert told(capsys, 0.97) == "step 10/10  loss 1.500  0 s left\n"
    assert told(capsys, 0.77) == "step 10/10  loss 1.500  0 s left  waited for data 23%\n"


def side(name: str, hard: float, kept: float, weight: float) -> dict[str, float]:
    return {f"hard_{name}s": hard, f"kept_{name}s": kept, f"{name}_weight": weight}


@pytest.mark.parametrize(
    ("positive", "negative", "words"),
    [
        (
            (0.03, 1.0, 1.021),
            (0.52, 1.0, 4.1),
            "hard positives 3 % (mean weight of all positives 1.02), "
            "hard negatives 52 % (mean weight of all negatives 4.10)",
        ),
        (
            (0.0, 1.0, 1.0),
            (0.001, 1.0, 1.004),
            "no hard positives, hard negatives <1 % (mean weight of all negatives 1.00)",
        ),
        ((0.0, 1.0, 1.0), (0.0, 0.07, 0.07), "no hard positives, negatives kept 7 %"),
        ((0.0, 1.0, 1.0), (0.0, 1.0, 0.278), "no hard positives, negatives weighted down (mean weight 0.28)"),
    ],
)
def test_difficulty_in_words(positive, negative, words):
    assert describe_difficulty(side("positive", *positive) | side("negative", *negative)) == [words]
    assert describe_difficulty({"loss": 1.0}) == []


def test_training_that_has_not_helped_is_told_before_the_numbers(tmp_path, capsys):
    metrics = copy.deepcopy(small_run(tmp_path, steps=2).run.metrics())
    for values in metrics["baselines"].values():
        values["all"]["eer"] = 0.9
    _print_metrics(metrics)
    assert "Training has not helped" not in capsys.readouterr().out
    metrics["baselines"]["untrained network"]["all"]["eer"] = 0.0
    _print_metrics(metrics)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("WARNING: Training has not helped: all pairs, EER ")
    assert lines[1].endswith(" of this model against 0.00 % of the untrained network.")
    assert sum("not helped" in line for line in lines) == 1
    assert [line for line in lines[2:] if line.startswith("warning: ")], "the others come after the numbers"


def test_columns_of_a_table_are_named_by_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"p{k // 4},{'ab'[k % 2]},{k // 4 + k % 3},{k % 5}" for k in range(64)]
    (tmp_path / "t.csv").write_text("\n".join(["who,where,x,y", *rows]))
    less = ["model.backbone=mlp", "train.steps=1", "batch.classes=4", "batch.samples=2"]
    words = [word for value in less for word in ("--set", value)]
    mettle("train", "supcon", "--data", "t.csv", "--label", "who", "--domain", "where", "--no-report", *words)
    recipe = (tmp_path / "runs" / "supcon" / "recipe.toml").read_text()
    assert 'label = "who"' in recipe and 'domain = "where"' in recipe
    assert "did you mean 'who'" in refused("train", "supcon", "--data", "t.csv", "--label", "whoo", *words)
