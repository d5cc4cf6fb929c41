"""Another kind of loss or difficulty by an override: keys of the old one that do not apply are left out, and told."""

import pytest

from mettle.errors import RecipeError
from mettle.losses import ArcFace, InfoNCE, SphereFace, SupCon, Triplet
from mettle.train import load


def loaded(name, *overrides):
    notes = []
    return load(name, overrides, on_note=notes.append), notes


@pytest.mark.parametrize(
    ("name", "kind", "left_out"),
    [
        ("arcface", SphereFace, ["scale = 16.0", "margin = 0.3"]),  # a margin is a whole number there
        ("supcon", ArcFace, ["temperature = 0.05"]),
        ("supcon", SupCon, []),
        ("supcon", InfoNCE, []),
    ],
)
def test_the_new_loss_is_built(name, kind, left_out):
    recipe, notes = loaded(name, f"loss.kind={kind.__name__}")
    assert isinstance(recipe.build_loss(), kind)
    suffix = f"of the recipe does not apply to {kind.__name__} and was left out"
    assert notes == [f"loss.{key} {suffix}" for key in left_out]
    assert load(name).loss["kind"] in recipe.title() or kind.__name__ in recipe.title()


def test_what_the_new_loss_takes_is_kept():
    recipe, notes = loaded("da-supcon", "loss.kind=Triplet")
    assert (
        isinstance(recipe.build_loss(), Triplet) and recipe.loss["difficulty"] == load("da-supcon").loss["difficulty"]
    )
    assert [note.partition(" ")[0] for note in notes] == ["loss.temperature"]
    assert loaded("supcon", "loss.kind=InfoNCE")[0].build_loss().temperature == 0.05


def test_the_difficulty_can_be_changed_too():
    recipe, notes = loaded("da-supcon", "loss.difficulty.kind=Importance")
    assert recipe.loss["difficulty"] == {"kind": "Importance", "beta": 10.0}
    assert [note.partition(" ")[0] for note in notes] == [
        f"loss.difficulty.{k}" for k in ("alpha", "momentum", "quantile")
    ]


@pytest.mark.parametrize(
    "overrides", [("loss.kind=ArcFace", "loss.temperature=0.1"), ("loss.temperature=0.1", "loss.kind=ArcFace")]
)
def test_keys_that_are_given_explicitly_remain_errors(overrides):
    with pytest.raises(RecipeError, match=r"unknown recipe key 'loss\.temperature'"):
        load("supcon", overrides)


def test_an_explicit_value_that_does_not_fit_remains_an_error():
    with pytest.raises(RecipeError, match="margin"):
        load("arcface", ["loss.kind=SphereFace", "loss.margin=0.3"])
    assert load("arcface", ["loss.kind=SphereFace", "loss.margin=3"]).build_loss().margin == 3


def test_an_unknown_kind_is_told_as_before():
    with pytest.raises(RecipeError, match="did you mean 'ArcFace'"):
        load("supcon", ["loss.kind=ArkFace"])
