"""LoRA as far as it is told without peft; with it, see tests/integrations."""

import sys

import pytest

from mettle.errors import InputError, MissingExtra, RecipeError
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised
from mettle.train.lora import LoraSettings, find_targets
from mettle.train.recipe import parse_recipe


def embedder():
    return Embedder(EmbedderSpec(width=4, depth=2, dim=8), (3, 16, 16))


def test_without_peft_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r'train\.lora needs peft: pip install "mettle-ml\[lora\]"'):
        Supervised(embedder(), SupCon(), lora=LoraSettings(rank=2))


def test_settings_are_checked_when_the_recipe_is_read():
    assert parse_recipe({"train": {"lora": 4}}).build_lora() == LoraSettings(rank=4)
    for table, message in (
        ({"lora": {"rnak": 4}}, r"unknown recipe key 'train\.lora\.rnak'; did you mean 'rank'"),
        ({"lora": {"rank": 0}}, "rank is at least 1"),
        ({"lora": 4, "freeze": "all"}, "leave train.freeze out"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe({"train": table})
    with pytest.raises(InputError, match="leave freeze out"):
        Supervised(embedder(), SupCon(), lora=LoraSettings(), freeze="all")


def test_layers_that_an_addition_is_put_on():
    assert find_targets(embedder().backbone, None) == ("0", "4")
    assert find_targets(embedder().backbone, ["0"]) == ("0",)
    with pytest.raises(RecipeError, match=r"named \['qkv'\]; it has 0, 4"):
        find_targets(embedder().backbone, ["qkv"])
