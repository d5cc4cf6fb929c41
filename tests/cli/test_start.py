"""`mettle start`: from a folder of photographs to a report whose baseline is the pretrained network, and refusals."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mettle.model.backbones import import_timm, import_torchvision
from mettle.model.weights import save_state_dict
from mettle.train import load, open_run_folder
from tests.command_line import mettle, refused

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from photo_folder import write_folder

NETWORK = "mobilenet_v3_small"


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "photos"
    write_folder(folder, classes=8, each=4)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Weights of a network of torchvision under the name that torchvision gives such files."""
    path = tmp_path_factory.mktemp("weights") / f"{NETWORK}-047dcff4.pth"
    torch.manual_seed(0)
    torch.save(import_torchvision().models.get_model(NETWORK, weights=None).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def first(photos, weights):
    """What the command prints, and where its runs are."""
    runs = photos.parent / "runs"
    printed = mettle("start", photos, "--weights", weights, "--runs", runs, "--minutes", 0.05)
    return printed, runs


def test_it_ends_in_a_report_with_the_pretrained_backbone_as_its_baseline(first):
    printed, runs = first
    run = open_run_folder(runs / "start")
    assert (run.folder / "report.html").is_file()
    found = run.metrics()
    assert set(found["baselines"]) == {"raw inputs", "pretrained backbone"}
    before = found["baselines"]["pretrained backbone"]["all"]
    # What the command measured before training is what the report compares with.
    said = printed.partition("as it is")[2].splitlines()[1]
    assert f"EER {before['eer']:.2%}" in said and f"Recall@1 {before['recall@1']:.1%}" in said
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "EER, pretrained backbone" in page and "Recall@1, pretrained backbone" in page
    assert run.contract()["pretrained"]["origin"].endswith(".pth")


def test_it_gives_an_account_of_the_data_and_three_suggestions(first):
    printed, runs = first
    assert "32 images of 8 labels, 4 to 4 of each (median 4)" in printed
    assert "machine: " in printed
    after = printed.partition("what to try next:\n")[2].splitlines()
    assert [line.split()[0] for line in after] == ["1.", "2.", "3."]
    assert f"mettle train {runs / 'start.toml'} --set " in printed


def test_the_recipe_is_complete_says_why_and_is_the_one_that_was_trained(first):
    _, runs = first
    text = (runs / "start.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    lines = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert all("  # " in line or '" # ' in line for line in lines), "every key has its reason beside it"
    assert content["model"]["backbone"] == f"torchvision/{NETWORK}" and content["model"]["head"] == "none"
    assert content["data"]["size"] == 128 and content["train"]["freeze"] and content["train"]["epochs"] >= 1
    assert "training is expected to take" in text
    own = open_run_folder(runs / "start").recipe
    assert own == load(runs / "start.toml").with_values({"train.steps": own.train.steps, "auto": []})


def test_only_the_last_stage_moves(first, weights):
    _, runs = first
    model = open_run_folder(runs / "start").model()
    given = torch.load(weights, weights_only=True)
    moved = {name for name, tensor in model.backbone.state_dict().items() if not torch.equal(tensor, given[name])}
    frozen = tomllib.loads((runs / "start.toml").read_text())["train"]["freeze"]
    names = list(model.backbone.state_dict())
    last = max(k for k, name in enumerate(names) if name.startswith(f"{frozen}."))
    assert moved and min(names.index(name) for name in moved) > last


def test_a_dry_run_writes_the_recipe_alone(photos, weights, tmp_path):
    printed = mettle("start", photos, "--weights", weights, "--runs", tmp_path, "--dry-run", "--name", "dry")
    assert [path.name for path in tmp_path.iterdir()] == ["dry.toml"]
    assert f"next: mettle train {tmp_path / 'dry.toml'} --runs {tmp_path} --name dry" in printed
    # Edited, it is trained as any other.
    where = ("--runs", tmp_path, "--name", "dry", "--no-report")
    mettle("train", tmp_path / "dry.toml", *where, "--set", "train.epochs=1")
    assert (tmp_path / "dry" / "model.safetensors").is_file()


def test_from_scratch_only_if_asked(photos, tmp_path):
    printed = mettle("start", photos, "--from-scratch", "--runs", tmp_path, "--minutes", 0.02)
    found = open_run_folder(tmp_path / "start").metrics()
    assert set(found["baselines"]) == {"raw inputs", "untrained network"}
    assert "start from pretrained weights (--weights FILE" in printed
    assert "pretrained" not in (tmp_path / "start.toml").read_text()


def test_without_weights_and_network_one_line_says_what_is_missing(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("mettle.model.backbones.is_reachable", lambda address: False)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    said = refused("start", photos, "--runs", tmp_path / "runs")
    assert "torchvision/mobilenet_v2" in said and "--weights FILE" in said and "--from-scratch" in said
    assert not (tmp_path / "runs").exists()


def write_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        pixels = np.random.default_rng(k).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png")


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ({"": 3}, "has no label"),
        ({"cup": 4}, "all 4 images have one label"),
        ({"cup": 4, "lamp": 4}, "too few to hold out"),
        ({name: 1 for name in "abcdefgh"}, "fewer than two labels have two images"),
        ({}, "no pictures in"),
    ],
    ids=["no labels", "one label", "two labels", "one image of each", "nothing"],
)
def test_data_that_nothing_can_be_trained_on_are_refused(tmp_path, weights, layout, wanted):
    source = tmp_path / "data"
    source.mkdir()
    for name, count in layout.items():
        write_images(source / name, count)
    said = refused("start", source, "--weights", weights, "--runs", tmp_path / "runs")
    assert wanted in said and f"`mettle data check {source}`" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--minutes", 0), "--minutes must be above 0"),
        (("--from-scratch", "--weights", "x.pth"), "leave out --weights"),
        (("--backbone", "timm/resnet18"), "--backbone says which network"),
        (("--weights", "nowhere.pth"), "no such file or run"),
        (("--name", "a/b", "--from-scratch"), "--name takes a plain name"),
    ],
)
def test_options_that_contradict_are_refused(photos, tmp_path, words, wanted):
    assert wanted in refused("start", photos, "--runs", tmp_path / "runs", *words)


def test_a_file_whose_name_says_no_network_needs_one(photos, weights, tmp_path):
    nameless = tmp_path / "best.pth"
    shutil.copy(weights, nameless)
    where = ("start", photos, "--weights", nameless, "--runs", tmp_path / "runs", "--dry-run")
    assert "name it with --backbone" in refused(*where)
    assert "next: mettle train" in mettle(*where, "--backbone", f"torchvision/{NETWORK}")


def test_what_is_there_is_not_touched(first, photos, weights):
    _, runs = first
    where = ("start", photos, "--weights", weights, "--runs", runs)
    assert "start.toml is there already" in refused(*where, "--name", "x", "--recipe", runs / "start.toml")
    assert "runs/start is there already" in refused(*where, "--name", "start")


def test_rows_of_numbers_are_refused(tmp_path, weights):
    table = tmp_path / "rows.csv"
    table.write_text("label,a,b\n" + "".join(f"{k % 5},{k},{k + 1}\n" for k in range(20)))
    assert "takes images" in refused("start", table, "--weights", weights, "--runs", tmp_path / "runs")


def test_embed_takes_a_pretrained_network_without_any_run(photos, weights, tmp_path):
    output = tmp_path / "vectors.npz"
    said = mettle("embed", weights, photos, "-o", output)
    assert "32 embeddings of dimension 576" in said
    found = np.load(output)
    assert found["embeddings"].shape == (32, 576) and len(set(found["label"].tolist())) == 8
    assert "Recall@1" in mettle("audit", output, "-o", tmp_path / "audit.html")
    found = json.dumps(mettle("embed", weights, photos, "-o", tmp_path / "small.npz", "--dim", 8))
    assert "dimension 8" in found


def test_a_folder_that_timm_wrote_is_a_backbone(photos, tmp_path):
    net = import_timm().create_model("test_resnet", num_classes=5)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text(json.dumps({"architecture": "test_resnet"}))
    save_state_dict(tmp_path / "net" / "model.safetensors", net.state_dict())
    named = f"local-dir:{tmp_path / 'net'}"
    assert "32 embeddings of dimension" in mettle("embed", named, photos, "-o", tmp_path / "vectors.npz")
    said = refused("embed", f"local-dir:{tmp_path / 'gone'}", photos, "-o", tmp_path / "vectors.npz")
    assert "has no config.json" in said


def test_embed_refuses_what_is_neither_run_nor_weights(photos, first, weights, tmp_path):
    _, runs = first
    output = tmp_path / "vectors.npz"
    assert "no such file or run" in refused("embed", "gone.pth", photos, "-o", output)
    assert "is not a run of mettle" in refused("embed", "gone", photos, "-o", output)
    assert "did you mean 'mobilenet_v2'" in refused("embed", "torchvision/mobilenet_v22", photos, "-o", output)
    assert "leave it out" in refused("embed", runs / "start", photos, "-o", output, "--backbone", "timm/resnet18")


@pytest.mark.slow
def test_fine_tuning_beats_the_backbone_that_another_run_trained(tmp_path):
    """The whole road on drawn photographs: weights from some classes, a first report on others."""
    write_folder(tmp_path / "known", classes=40, each=12, seed=0)
    write_folder(tmp_path / "new", classes=40, each=12, seed=1)
    known = ("--data", tmp_path / "known", "--runs", tmp_path / "runs", "--name", "known", "--set", "train.rate=1e-3")
    mettle("train", "photos", *known, "--set", "train.epochs=6", "--set", "data.size=64", "--no-report")
    runs = tmp_path / "runs"
    mettle("start", tmp_path / "new", "--weights", runs / "known", "--runs", runs, "--minutes", 2)
    found = open_run_folder(runs / "start").metrics()
    way, before = found["scenarios"]["all"], found["baselines"]["pretrained backbone"]["all"]
    assert way["verification"]["eer"]["value"] < before["eer"]
    assert way["retrieval"]["metrics"]["recall@1"]["value"] >= before["recall@1"]
