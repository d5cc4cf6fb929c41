"""How far a curriculum rises; and counts that are no whole numbers."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laws.members import batch
from mettle.difficulty import Product, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import ArcFace, Softmax, SupCon
from mettle.train.methods.hardness_aware import Synthesis
from mettle.train.recipe import parse_recipe

share = st.floats(0, 1)


@given(strength=share, progress=share, start=st.floats(0, 0.4), rise=st.floats(0.1, 0.5))
def test_a_curriculum_rises_to_its_strength_and_stays(strength, progress, start, rise):
    one = curriculum(Threshold(), start=start, end=start + rise, strength=strength)
    assert one.at(0.0).current_strength == one.at(start).current_strength == 0
    assert one.at(start + rise).current_strength == one.at(1.0).current_strength == one.current_strength == strength
    now = one.at(progress)
    assert 0 <= now.current_strength <= strength
    assert now.current_strength == pytest.approx(strength * min(max((progress - start) / rise, 0), 1), abs=1e-9)
    assert now.settings == one.settings, "a point of training is no setting"
    assert now.at(1.0).current_strength == strength, "a point of training does not forget where it goes"
    assert now.at(0.0).at(progress).current_strength == now.current_strength


def test_a_part_of_a_threshold_is_a_smaller_threshold():
    z, y = batch()
    part = SupCon(0.2, difficulty=curriculum(Threshold(1.0, 5.0), end=0.5, strength=0.4))
    smaller = {1.0: Threshold(0.4, 2.0), 0.5: Threshold(0.4, 2.0), 0.25: Threshold(0.2, 1.0)}
    for progress, same in smaller.items():
        found, wanted = part.per_anchor(z, y, progress=progress), SupCon(0.2, difficulty=same).per_anchor(z, y)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)
    full = SupCon(0.2, difficulty=smaller[1.0]).per_anchor(z, y)
    torch.testing.assert_close(part.per_anchor(z, y), full, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_inside_a_product_too():
    both = Product(curriculum(Threshold(), end=0.5, strength=0.3), Threshold())
    assert both.at(0.25).first.current_strength == pytest.approx(0.15)
    assert both.at(1.0).first.current_strength == both.first.current_strength == 0.3
    assert both.at(0.25).settings == both.at(1.0).settings == both.settings


def test_a_recipe_that_writes_it_is_read_and_told_as_it_was_written():
    hard = {"kind": "curriculum", "end": 0.5, "strength": 0.3, "difficulty": {"kind": "Threshold"}}
    recipe = parse_recipe({"loss": {"kind": "SupCon", "difficulty": hard}})
    assert recipe.build_loss().difficulty.at(1.0).current_strength == 0.3
    assert "curriculum(end=0.5, strength=0.3, difficulty=Threshold())" in recipe.title()
    plain = {"kind": "curriculum", "difficulty": {"kind": "Threshold"}}
    assert "strength" not in parse_recipe({"loss": {"kind": "SupCon", "difficulty": plain}}).title()
    with pytest.raises(Exception, match="unknown recipe key 'loss.difficulty.most'"):
        parse_recipe({"loss": {"kind": "SupCon", "difficulty": {**plain, "most": 1.0}}})


def test_it_is_shown_and_changed_like_any_other_setting():
    one = curriculum(Threshold(), strength=0.5)
    assert repr(one).endswith("strength=0.5)")
    assert dataclasses.replace(one, strength=0.2).at(1.0).current_strength == 0.2
    for wrong in (-0.1, 1.1, float("nan"), "x"):
        with pytest.raises(InputError, match="strength"):
            curriculum(Threshold(), strength=wrong)
    with pytest.raises(InputError, match="finite"):
        one.at(float("nan"))


@pytest.mark.parametrize("value", [3.5, 3.0, "3", True, float("nan"), None, torch.tensor(3)])
@pytest.mark.parametrize("name", ["num_classes", "dim"])
@pytest.mark.parametrize("kind", [ArcFace, Softmax])
def test_a_number_of_classes_is_a_whole_number(kind, name, value):
    with pytest.raises(InputError, match=f"{name} must be a"):
        kind(**({"num_classes": 3, "dim": 4} | {name: value}))


@pytest.mark.parametrize("name", ["window", "hidden"])
def test_so_are_counts_of_a_synthesis(name):
    with pytest.raises(InputError, match=f"{name} must be a whole number, got 2.5"):
        Synthesis(**{name: 2.5})
