"""Mistakes in a recipe that used to end in a traceback; and the page about recipes names every key."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from command_line import refused
from mettle.errors import InputError, RecipeError
from mettle.losses import SelfTriplet, Triplet
from mettle.model import EmbedderSpec
from mettle.train.from_recipe import resolve_device, train
from mettle.train.methods.hardness_aware import Synthesis
from mettle.train.recipe import Recipe, load, parse_recipe

from .conftest import tiny

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["gpu", "GPU", "cuda:", "cuda:x", "cuda:-1", "cuda:99", "cpu0", "mps", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(RecipeError) as caught:
        resolve_device(name)
    said = str(caught.value)
    assert said.startswith(f"train.device = {name!r}") and "\n" not in said
    assert "'auto'" in said and "'cpu'" in said
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert ("'cuda'" in said) == (count > 0) and all(f"'cuda:{k}'" in said for k in range(count))


def test_devices_on_machines_with_and_without_gpus(monkeypatch):
    def machine(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    machine(0)
    assert resolve_device("mps") == "mps" and resolve_device("auto") == "cpu"  # untested, so never chosen
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(RecipeError, match="no CUDA device"):
        resolve_device("cuda")
    machine(1)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    with pytest.raises(RecipeError, match="1 CUDA device here: .*'cuda:0'$"):
        resolve_device("cuda:1")
    machine(2)
    assert [resolve_device(name) for name in ("cpu", "cuda:0", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]
    with pytest.raises(RecipeError, match="2 CUDA devices"):
        resolve_device("gpu")


def test_nothing_is_written_for_a_device_that_is_not_there(source, tmp_path):
    with pytest.raises(RecipeError, match="train.device = 'gpu'"):
        train(tiny(source, device="gpu"), tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()


TABLES = ("data", "batch", "model", "loss", "biased", "synthesis", "jtt", "train", "evaluate", "tune")


@pytest.mark.parametrize("key", TABLES)
@pytest.mark.parametrize("value", ['"glyphs"', "5", "true", "[]", '[{source = "glyphs"}]'])
def test_a_value_in_place_of_a_table_is_refused_in_one_line(key, value, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f"{key} = {value}\n")
    for given in ({}, {"data": {"source": "other"}}):
        with pytest.raises(RecipeError, match=rf"recipe key {key}: a table is wanted, \[{key}\] .*, got") as caught:
            load(file, **given)
        assert "\n" not in str(caught.value)


def test_the_command_says_the_same(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('data = "glyphs"\n')
    for more in ([], ["--data", "glyphs"], ["--set", "data.source=glyphs"]):
        assert "recipe key data: a table is wanted" in refused("train", file, "--runs", tmp_path / "runs", *more)
    assert "recipe key loss: a table is wanted" in refused("train", "supcon", "--set", "loss=SupCon")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", ["x", 5, 0, True, 1.5, ["x"], {"seed": 1}])
@pytest.mark.parametrize(
    "loss", [{"kind": "Triplet"}, {"kind": "Triplet", "mining": "random"}, {"kind": "SelfTriplet"}]
)
def test_what_nothing_can_be_drawn_from_is_refused(loss, value):
    with pytest.raises(RecipeError, match=r"\[loss\] random must be a torch.Generator") as caught:
        parse_recipe({"loss": {**loss, "random": value}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Triplet, SelfTriplet])
def test_generators_are_taken(kind):
    generator = torch.Generator()
    assert kind(random=generator).random is generator and kind(random=None).random is None
    with pytest.raises(InputError, match="random must be a torch.Generator"):
        kind(random="x")


@pytest.mark.parametrize("loss", [Triplet(mining="random"), SelfTriplet(form="one_neg")])
def test_a_seed_draws_the_same_negatives_again(loss):
    z = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    y = torch.arange(16) // 4

    def values(seed, **options):
        again = dataclasses.replace(loss, random=torch.Generator().manual_seed(seed))
        return again.per_anchor(z, y, **options)

    torch.testing.assert_close(values(0), values(0), rtol=0, atol=0)
    assert not torch.equal(values(0), values(1))
    torch.testing.assert_close(values(0, engine="tiled", tile=5), values(0, engine="dense"))


def named(table: str) -> set[str]:
    """The keys of a table of a recipe as the page lists them."""
    keys = (DOCS / "recipes.md").read_text().partition("| table | keys |")[2].partition("\n\n")[0]
    (line,) = (line for line in keys.splitlines() if line.startswith(f"| `{table}` |"))
    listed = re.sub(r"\([^()]*\)", "", line.split("|")[2]).partition(":")[0]  # without values and explanations
    return set(re.findall(r"`(\w+)`", listed))


@pytest.mark.parametrize("table", [name for name in TABLES if name != "loss"])
def test_the_page_lists_every_key_and_no_other(table):
    spec = {"model": EmbedderSpec, "synthesis": Synthesis}.get(table)
    if spec is None:
        wanted = set(Recipe.model_fields[table].annotation.model_fields)
    else:
        wanted = {field.name for field in dataclasses.fields(spec)}
    assert named(table) == wanted


def test_the_page_about_commands_lists_what_a_run_folder_holds():
    page = (DOCS / "commands.md").read_text()
    listed = page.partition("## The run folder")[2].partition("\n## ")[0]
    files = [
        *("recipe.toml", "run.json", "model.safetensors", "contract.json", "trained.safetensors", "metrics.json"),
        *("pairs.json", "classes.safetensors", "biased.safetensors", "log.jsonl", "report.html", "card.md", "map.json"),
        "test_embeddings.safetensors",
        *("checkpoints/", "first/", "tensorboard/", "workbench-*.npz"),
    ]
    assert [name for name in files if f"`{name}`" not in listed] == []
