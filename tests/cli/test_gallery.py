"""`mettle gallery` as a user types it."""

import json
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mettle.cli import app
from mettle.train import open_run_folder
from mettle.train.run_folder import set_thresholds
from tests.command_line import mettle
from tests.small_runs import small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pictures(trained, tmp_path_factory):
    """Two files of each of the five test identities."""
    folder, test = tmp_path_factory.mktemp("pictures"), trained.samples.part("test")
    names = np.asarray(test.label.names, dtype=object)[test.labels]
    for name in np.unique(names):
        for k, at in enumerate(np.flatnonzero(names == name)[:2]):
            Image.fromarray(test.read(np.array([at]))[0][..., 0]).save(folder / f"{name}-{k}.png")
    return folder


def test_from_pictures_to_an_answer(trained, pictures, tmp_path):
    gallery, files = tmp_path / "people.mettle", sorted(pictures.iterdir())
    for file in files[::2]:
        said = mettle("gallery", "enrol", gallery, file.stem[:-2], file, "--model", trained.run.folder)
        assert "1 templates" in said
    assert mettle("gallery", "ids", gallery).split("\n")[:-1] == [file.stem[:-2] for file in files[::2]]
    found = json.loads(mettle("gallery", "identify", gallery, *files[::2], "--json"))
    assert [answer["candidates"][0]["identity"] for answer in found] == [file.stem[:-2] for file in files[::2]]
    assert all(answer["candidates"][0]["score"] == pytest.approx(1) for answer in found)
    who = files[0].stem[:-2]
    said = mettle("gallery", "verify", gallery, who, files[0], status=3)  # few validation identities: none by itself
    assert said.startswith("not calibrated  score 1.0000  the thresholds of the model rest on too few validation")
    asked = mettle("gallery", "verify", gallery, who, files[0], "--far", 0.1)
    assert asked.startswith(f"match: {who}  score 1.0000")
    assert mettle("gallery", "verify", gallery, who, files[0], "--threshold", "0.999", "--json")
    said = mettle("gallery", "verify", gallery, who, files[3], "--threshold", "0.9999", status=1)
    assert said.startswith("no match")
    assert "5 people, 5 templates" in mettle("gallery", "info", gallery)
    mettle("gallery", "delete", gallery, who)
    assert "nobody called" in mettle("gallery", "verify", gallery, who, files[0], status=2)
    mettle("gallery", "compact", gallery)
    assert mettle("gallery", "check", gallery) == "sound\n"


def test_answers_say_what_the_threshold_means_for_a_person_and_for_everybody(trained, pictures, tmp_path):
    gallery, file = tmp_path / "people.mettle", sorted(pictures.iterdir())[0]
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(4, 8)))
    mettle("gallery", "enrol", gallery, "anna", "--embeddings", tmp_path / "rows.npy", "--model", trained.run.folder)
    mettle("gallery", "enrol", gallery, "ben", file)
    said = CliRunner().invoke(app, ["gallery", "verify", str(gallery), "anna", str(file), "--far", "0.1"]).output
    assert "false-accept rate 0.1 a comparison, at most 0.4 of strangers accepted as this person" in said
    found = json.loads(mettle("gallery", "identify", gallery, file, "--far", "0.1", "--json"))[0]
    assert found["false_matches"] == pytest.approx(0.5) and found["templates"] == 5
    assert "at most 0.5 of strangers given a name" in mettle("gallery", "identify", gallery, file, "--far", "0.1")


def write_table(path, people: int, templates: int = 3, dim: int = 16, seed: int = 0):
    """People of another model: their vectors share a mean. Returns a probe of each, and as many strangers."""
    rng = np.random.default_rng(seed)
    own = 1 + rng.normal(size=(2 * people, 1, dim))
    rows = own + 0.3 * rng.normal(size=(2 * people, templates + 1, dim))
    label = np.repeat([f"person {i}" for i in range(people)], templates)
    np.savez(path, embeddings=rows[:people, 1:].reshape(-1, dim).astype(np.float32), label=label)
    return rows[:people, 0], rows[people:, 0]


@pytest.mark.parametrize(
    ("people", "far", "known", "lowest"),
    [
        (25, 0.01, "0.01", "0.0099"),
        (77, 0.01, "0.01", "0.001"),
        (78, 0.001, "0.01, 0.001", "0.001"),
        (250, 0.001, "0.01, 0.001, 0.0001", "9.6e-05"),
    ],
)
def test_a_table_of_enough_people_is_calibrated_on_and_says_on_how_many(tmp_path, people, far, known, lowest):
    probes, strangers = write_table(tmp_path / "z.npz", people)
    said = mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz")  # as long as they are: no --dim
    pairs = people * (people - 1) // 2
    assert f"calibrated on {people} people, {pairs} impostor pairs of people (enough for false-accept rates" in said
    assert f"from {lowest}), for {known}; without --far answers are given at {far:g}, threshold 0." in said
    assert f"at most {people * far:g} of strangers are given a name" in said
    np.save(tmp_path / "probes.npy", probes)
    np.save(tmp_path / "strangers.npy", strangers)
    said = mettle("gallery", "identify", tmp_path / "g", tmp_path / "probes.npy", status=2)
    assert said.endswith(
        f"probes.npy is a file of embeddings, not a picture: give it as --embeddings {tmp_path}/probes.npy"
    )
    found = json.loads(mettle("gallery", "identify", tmp_path / "g", "--embeddings", tmp_path / "probes.npy", "--json"))
    assert np.mean([one["match"] == f"person {i}" for i, one in enumerate(found)]) > 0.9
    found = json.loads(
        mettle("gallery", "identify", tmp_path / "g", "--embeddings", tmp_path / "strangers.npy", "--json")
    )
    assert (
        np.mean([one["match"] is not None for one in found]) <= found[0]["false_matches"] == pytest.approx(people * far)
    )
    again = mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz")
    assert "calibrated" not in again, "there is a threshold now, and it does not move by itself"


def test_a_table_of_too_few_people_is_not_calibrated_and_nobody_matches(tmp_path):
    probes, _ = write_table(tmp_path / "z.npz", 24)
    said = mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz")
    assert (
        "not calibrated: 24 people make 276 impostor pairs, and a false-accept rate of 0.01 takes 299 (25 people)"
        in said
    )
    assert "`mettle gallery calibrate`" in said and "--threshold" in said
    np.save(tmp_path / "one.npy", probes[:1])
    verify = ("gallery", "verify", tmp_path / "g", "person 0", "--embeddings", tmp_path / "one.npy")
    said = mettle(*verify, status=3)
    assert said.startswith("not calibrated  score 0.9") and "`mettle gallery calibrate`" in said
    found = json.loads(mettle(*verify, "--json", status=3))
    assert (found["verdict"], found["match"], found["threshold"], found["far"]) == ("not calibrated", False, None, None)
    assert found["score"] > 0.9
    assert mettle(*verify, "--threshold", 0.5).startswith("match: person 0")
    said = mettle("gallery", "identify", tmp_path / "g", "--embeddings", tmp_path / "one.npy", "-k", 2)
    assert said.startswith("probe 0: not calibrated") and "'person 0'" in said and "below" not in said
    assert "not calibrated: no threshold was measured" in mettle("gallery", "info", tmp_path / "g")
    assert "rates from 0.011, unless" in mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.01)
    mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.1)  # a rate that somebody has chosen
    assert mettle(*verify).startswith("match: person 0")


def test_a_table_whose_people_share_templates_is_not_calibrated(tmp_path):
    rows = np.repeat(np.random.default_rng(0).normal(size=(5, 8)), 6, axis=0)
    np.savez(tmp_path / "z.npz", embeddings=rows, label=np.arange(30))
    said = mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz")
    assert "not calibrated: among 30 people too many share a template" in said and "`mettle gallery audit`" in said
    assert "75 pairs of people of 435 share a template" in mettle("gallery", "audit", tmp_path / "g")


def test_a_second_table_leaves_the_thresholds_and_says_that_they_are_stale(tmp_path):
    write_table(tmp_path / "z.npz", 30)
    mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz")
    before = json.loads(mettle("gallery", "info", tmp_path / "g", "--json"))["calibration"]
    rows = np.random.default_rng(5).normal(size=(20, 16))
    np.savez(tmp_path / "more.npz", embeddings=rows, label=np.arange(20))
    said = mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "more.npz")
    assert "note: the calibration is stale: measured on 30 people, 50 are enrolled now" in said
    assert json.loads(mettle("gallery", "info", tmp_path / "g", "--json"))["calibration"]["people"] == before["people"]


def test_data_of_a_model_without_thresholds_are_enrolled_and_not_calibrated_on(trained, tmp_path):
    """They may be those that it was trained on: whether they can stand for strangers is for the user to say."""
    shutil.copytree(trained.run.folder, tmp_path / "run")
    set_thresholds(open_run_folder(tmp_path / "run"), {})
    enrol = ("gallery", "enrol", tmp_path / "g", "--model", tmp_path / "run", "--data", trained.samples.source_name)
    assert "\nnot calibrated: no threshold was measured for this gallery" in mettle(*enrol)
    assert json.loads(mettle("gallery", "info", tmp_path / "g", "--json"))["calibration"] is None
    evaluated = mettle(*enrol[:3], "--model", trained.run.folder, *enrol[5:])
    assert "not calibrated: the thresholds of the model rest on too few validation identities" in evaluated


def test_the_length_of_embeddings_is_read_from_them(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(2, 12)))
    mettle("gallery", "enrol", tmp_path / "g", "anna", "--embeddings", tmp_path / "rows.npy")
    assert "1 people, 2 templates of 12 numbers" in mettle("gallery", "info", tmp_path / "g")
    write_table(tmp_path / "z.npz", 5)
    assert "(n, 12)" in mettle("gallery", "enrol", tmp_path / "g", "--table", tmp_path / "z.npz", status=2)
    said = mettle("gallery", "enrol", tmp_path / "h", "--table", tmp_path / "z.npz", "--dim", 12, status=2)
    assert "(n, 12)" in said and not (tmp_path / "h").exists()


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(1, 8)))
    mettle("gallery", "enrol", tmp_path / "g", "Anna Meier", "--embeddings", tmp_path / "rows.npy")
    said = mettle("gallery", "delete", tmp_path / "g", "anna maier", status=2)
    assert said.endswith("nothing was deleted; did you mean 'Anna Meier'?")
    verify = ("gallery", "verify", tmp_path / "g", "Ana Meier", "--embeddings", tmp_path / "rows.npy")
    assert mettle(*verify, status=2).endswith("did you mean 'Anna Meier'?")


def test_looking_at_a_gallery_needs_no_torch(trained, pictures, tmp_path):
    """Importing torch takes seconds: what answers without a model does not wait for it, also where there is one."""
    gallery, file = tmp_path / "g", sorted(pictures.iterdir())[0]
    mettle("gallery", "enrol", gallery, "anna", file, "--model", trained.run.folder)
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(2, 8)))
    given = ["--embeddings", str(tmp_path / "rows.npy")]
    commands = [
        ["info"],
        ["ids"],
        ["check"],
        ["enrol", "ben", *given],
        ["identify", *given],
        ["index"],
        ["delete", "ben"],
        ["compact"],
    ]
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom mettle.cli import app\n"
        "for verb, *words in json.loads(sys.argv[2]):\n"
        "    done = CliRunner().invoke(app, ['gallery', verb, sys.argv[1], *words])\n"
        "    assert done.exit_code == 0, (verb, done.output, done.exception)\n"
        "    assert 'torch' not in sys.modules, verb\n"
    )
    words = [sys.executable, "-c", code, str(gallery), json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_thresholds_for_people_as_they_are_enrolled(tmp_path):
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(40), 3)
    rows = rng.normal(size=(40, 16))[label] + rng.normal(size=(120, 16))
    np.savez(tmp_path / "z.npz", embeddings=rows.astype(np.float32), label=label)
    mettle("gallery", "enrol", tmp_path / "g", "--dim", 16, "--table", tmp_path / "z.npz")
    said = mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.1, "--far", 0.00001)
    assert "false-accept rate 0.1 per person: threshold 0." in said
    assert "false-accept rate 1e-05 per person: not measurable" in said
    assert "measured on the 40 people enrolled, with 120 templates: each tried on the others; kept" in said
    found = json.loads(mettle("gallery", "calibrate", tmp_path / "g", "--json"))
    assert found["0.1"]["per"] == "person" and found["0.1"]["threshold"] < 1


def test_info_says_which_thresholds_rest_on_little(trained, tmp_path):
    mettle("gallery", "enrol", tmp_path / "g", "--model", trained.run.folder, "--data", trained.samples.source_name)
    said = mettle("gallery", "info", tmp_path / "g")
    for far, entry in trained.run.contract()["thresholds"].items():
        line = next(line for line in said.splitlines() if f"false-accept rate {float(far)!r} per comparison" in line)
        assert ("uncertain" in line) == (entry["status"] in ("flagged", "refused as headline"))
        assert ("not measurable" in line) == (entry["threshold"] is None)


def test_everybody_of_a_data_set_and_of_a_table(trained, tmp_path):
    source = trained.samples.source_name
    said = mettle(
        "gallery", "enrol", tmp_path / "a", "--model", trained.run.folder, "--data", source, "--split", "test"
    )
    assert "5 people enrolled, 40 templates added; 5 people are enrolled in all" in said
    said = mettle(
        "gallery", "enrol", tmp_path / "a", "--model", trained.run.folder, "--data", source, "--split", "test"
    )
    assert "5 people enrolled, 0 templates added, 40 skipped that were there already; 5 people" in said
    said = mettle("gallery", "enrol", tmp_path / "a", "--data", source, "--split", "val")
    others = len(np.unique(trained.samples.part("val").labels))
    assert f"{others} people enrolled, {len(trained.samples.part('val'))} templates added; {5 + others} people" in said
    mettle("embed", trained.run.folder, source, "-o", tmp_path / "z.npz")
    said = mettle(
        "gallery", "enrol", tmp_path / "b", "--dim", 8, "--table", tmp_path / "z.npz", "--where", "split=test"
    )
    assert "5 people enrolled, 40 templates added" in said
    assert "exact index of 40" in mettle("gallery", "index", tmp_path / "b", "--kind", "exact")
    moved = mettle("gallery", "move", tmp_path / "b", tmp_path / "c")
    assert "5 people, 40 templates" in moved
    assert mettle("gallery", "ids", tmp_path / "c") == mettle("gallery", "ids", tmp_path / "b")
    mettle("gallery", "snapshot", tmp_path / "c", tmp_path / "d")
    assert "5 people" in mettle("gallery", "info", tmp_path / "d")


def test_a_table_that_another_model_made_is_refused(trained, tmp_path):
    rows = {"embeddings": np.random.default_rng(0).normal(size=(6, 8)), "label": np.repeat(np.arange(3), 2)}
    own = trained.run.contract()["weights"]
    for name, more in (("other", {"model": np.asarray("0" * 64)}), ("own", {"model": np.asarray(own)}), ("none", {})):
        np.savez(tmp_path / f"{name}.npz", **rows, **more)
    enrol = ("gallery", "enrol", tmp_path / "g", "--model", trained.run.folder, "--table")
    for _ in range(2):  # for a new gallery, and for one that is there
        assert "another model (weights 000000000000" in mettle(*enrol, tmp_path / "other.npz", status=2)
        assert "3 people" in mettle(*enrol, tmp_path / "own.npz")
    assert "3 people" in mettle(*enrol, tmp_path / "none.npz")
    assert "3 people" in mettle("gallery", "enrol", tmp_path / "free", "--dim", 8, "--table", tmp_path / "other.npz")


@pytest.mark.parametrize(
    "mistake", ["picture", "rows", "length", "data", "split", "table", "name", "fusion", "nothing"]
)
def test_an_enrolment_that_fails_leaves_nothing_behind(trained, tmp_path, mistake):
    place = tmp_path / "made"
    place.mkdir()
    (place / "bad.png").write_bytes(b"no picture")
    np.save(place / "nan.npy", np.full((1, 8), np.nan))
    np.save(place / "long.npy", np.ones((1, 9)))
    np.save(place / "good.npy", np.ones((1, 8)))
    before, gallery = sorted(place.iterdir()), place / "new.mettle"
    words = {
        "picture": ["anna", place / "bad.png"],
        "rows": ["anna", "--embeddings", place / "nan.npy"],
        "length": ["anna", "--embeddings", place / "long.npy"],
        "data": ["--data", place / "none"],
        "split": ["--data", trained.samples.source_name, "--split", "tset"],
        "table": ["--table", place / "none.npz"],
        "name": ["two\nlines", "--embeddings", place / "good.npy"],
        "fusion": ["anna", "--embeddings", place / "good.npy", "--fusion", "bset"],
        "nothing": ["anna", "--embeddings", place / "good.npy", "--dim", 8],
    }[mistake]
    mettle("gallery", "enrol", gallery, *words, "--model", trained.run.folder, status=2)
    assert sorted(place.iterdir()) == before


def test_data_need_a_model(tmp_path, trained):
    said = mettle("gallery", "enrol", tmp_path / "g", "--dim", 8, "--data", trained.samples.source_name, status=2)
    assert "--model RUN" in said and not (tmp_path / "g").exists()


@pytest.mark.parametrize("index", [True, False])
def test_damage_is_told_and_ends_with_status_1(tmp_path, index):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(4, 8)))
    mettle("gallery", "enrol", tmp_path / "g", "anna", "--dim", 8, "--embeddings", tmp_path / "rows.npy")
    with sqlite3.connect(tmp_path / "g" / "record.sqlite") as record:
        record.execute("UPDATE templates SET checksum = checksum + 1 WHERE number = 2")
    record.close()
    if not index:  # then it is built from the record, which cannot be read
        shutil.rmtree(tmp_path / "g" / "index")
    said = mettle("gallery", "check", tmp_path / "g", status=1)
    assert "template 2 fails its checksum" in said and "1 problems" in said
    assert "no gallery" in mettle("gallery", "check", tmp_path / "elsewhere", status=2)


def test_a_damaged_calibration_is_told_and_can_be_measured_again(tmp_path):
    gallery, label = tmp_path / "g", np.repeat(np.arange(40), 2)
    np.savez(tmp_path / "z.npz", embeddings=np.random.default_rng(0).normal(size=(80, 8)), label=label)
    mettle("gallery", "enrol", gallery, "--dim", 8, "--table", tmp_path / "z.npz")
    mettle("gallery", "calibrate", gallery, "--far", 0.1)
    with sqlite3.connect(gallery / "record.sqlite") as record:
        record.execute("UPDATE metadata SET value = replace(value, '40', '41') WHERE key = 'calibration'")
    record.close()
    said = mettle("gallery", "info", gallery)
    assert said.startswith("note: the calibration in the storage is damaged") and "40 people, 80 templates" in said
    told = json.loads(mettle("gallery", "info", gallery, "--json"))
    assert told["calibration"] is None and told["thresholds"] == {} and "damaged" in told["notes"][0]
    measured = "measured on the 40 people enrolled, with 80 templates: each tried on the others; "
    assert f"{measured}not kept" in mettle("gallery", "calibrate", gallery, "--far", 0.1, "--no-keep")
    assert f"{measured}nothing could be measured" in mettle("gallery", "calibrate", gallery, "--far", 1e-6)
    assert "note: the calibration" in mettle("gallery", "info", gallery), "nothing was kept, so it is still there"
    assert f"{measured}kept" in mettle("gallery", "calibrate", gallery, "--far", 0.1)
    assert "note:" not in mettle("gallery", "info", gallery)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enrol", "GALLERY", "anna"], "--embeddings"),
        (["enrol", "GALLERY"], "one of the three"),
        (["verify", "GALLERY", "anna", "none.png"], "No such file"),
        (["info", "elsewhere"], "`mettle gallery enrol`"),
        (["enrol", "elsewhere", "anna", "x.png"], "--model RUN or --dim N"),
        (["info", "mysql://host/people"], "neither"),
        (["index", "GALLERY", "--kind", "hnws"], "did you mean 'hnsw'"),
        (["identify", "GALLERY", "none.png", "-k", "0"], "k must be"),
        (["identify", "GALLERY", "--embeddings", "none.npy"], "cannot read none.npy: No such file or directory"),
        (["identify", "GALLERY", "--embeddings", "."], "cannot read .: Is a directory"),
        (["identify", "GALLERY", "--embeddings", __file__], "is not an .npy file of numbers"),
        (["calibrate", "GALLERY", "--far", "1"], "fars must be above 0 and below 1: got [1.0]"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, words, message):
    gallery = tmp_path / "g"
    mettle("gallery", "enrol", gallery, "--model", trained.run.folder, "--data", trained.samples.source_name)
    said = mettle("gallery", *[str(gallery) if w == "GALLERY" else w for w in words], status=2)
    assert message in said
    assert "\n" not in said
