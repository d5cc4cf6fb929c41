import pytest
import torch

from laws.members import batch, value_and_gradient
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Product, Relative, SemiHard, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import InfoNCE, SupCon, Triplet
from mettle.pairs.declarations import iterate_parts


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_a_curriculum_fades_in():
    z, y = batch()
    hard = curriculum(Threshold(1.0, 5.0), start=0.2, end=0.6)
    loss = SupCon(0.2, difficulty=hard)
    plain, full = SupCon(0.2), SupCon(0.2, difficulty=Threshold(1.0, 5.0))
    close(loss.per_anchor(z, y, progress=0.0), plain.per_anchor(z, y))
    close(loss.per_anchor(z, y, progress=0.2), plain.per_anchor(z, y))
    close(loss.per_anchor(z, y, progress=0.6), full.per_anchor(z, y))
    close(loss.per_anchor(z, y, progress=1.0), full.per_anchor(z, y))
    close(loss.per_anchor(z, y), full.per_anchor(z, y))
    middle = SupCon(0.2, difficulty=Threshold(0.5, 2.5))  # half the excess
    close(loss.per_anchor(z, y, progress=0.4), middle.per_anchor(z, y))
    close(plain.per_anchor(z, y, progress=0.5), plain.per_anchor(z, y))


def test_a_product_multiplies_and_keeps_each_parts_gradient():
    z, y = batch()
    both = InfoNCE(0.5, difficulty=Product(Threshold(), Importance(1.0)))
    one = InfoNCE(0.5, difficulty=Product(Threshold(0.0, 0.0), Importance(1.0)))
    for a, b in zip(
        value_and_gradient(one, z, y), value_and_gradient(InfoNCE(0.5, difficulty=Importance(1.0)), z, y), strict=True
    ):
        close(a, b)
    assert not torch.allclose(both.per_anchor(z, y), one.per_anchor(z, y), equal_nan=True)


def test_batch_hard_is_the_hardest_difficulty():
    z, y = batch()
    for squared in (True, False):
        named = Triplet(0.3, "hardest", squared=squared)
        made = Triplet(0.3, difficulty=Hardest(), squared=squared)
        for engine in ("dense", "tiled"):
            for a, b in zip(
                value_and_gradient(named, z, y, engine=engine),
                value_and_gradient(made, z, y, engine=engine),
                strict=True,
            ):
                close(a, b)


def test_mining_both_sides_equals_mining_each():
    z, y = batch()
    both = SupCon(0.2, difficulty=Hardest()).per_anchor(z, y)
    each = SupCon(0.2, difficulty=Product(Hardest("positives"), Hardest("negatives"))).per_anchor(z, y)
    close(both, each)


def test_semi_hard_keeps_negatives_just_beyond_the_hardest_positive():
    z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [0.5, 0.866], [-1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 2, 3])
    # anchor 0: positive at 0.6, negatives at 0.8 (too hard), 0.5 (just beyond), -1 (too easy)
    found = InfoNCE(1.0, difficulty=SemiHard(0.2)).per_anchor(z, y)[0]
    unit = torch.nn.functional.normalize(z)
    close(found, torch.nn.functional.softplus(unit[0] @ unit[3] - unit[0] @ unit[1]))


def test_what_is_inside_a_product_or_a_curriculum_is_not_forgotten():
    z, y = batch(28, 6)
    other = torch.randn(28, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same = InfoNCE(0.5, 0.1, Product(Relative(), Threshold(0.0, 0.0)))
    close(same.per_anchor(z, y, biased=other), InfoNCE(0.5, 0.1, Relative()).per_anchor(z, y, biased=other))
    inner = AdaptiveThreshold(momentum=0.5)
    for outer in (curriculum(inner, end=0.5), Product(inner, Threshold()), curriculum(Product(inner, Threshold()))):
        before = float(inner.positive)
        SupCon(0.2, difficulty=outer)(z, y, progress=0.3)
        assert float(inner.positive) != before
        assert inner in list(iterate_parts(outer))
    fading = Product(curriculum(Threshold(), end=0.5), Threshold(0.0, 0.0))
    close(SupCon(0.2, difficulty=fading).per_anchor(z, y, progress=0.0), SupCon(0.2).per_anchor(z, y))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Importance(-1.0), "beta"),
        (lambda: Hardest("left"), "side must be"),
        (lambda: SemiHard(0.0), "margin"),
        (lambda: Threshold(form="soft"), "form must be"),
        (lambda: curriculum(Threshold(), start=0.5, end=0.5), "start < end"),
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_curriculum_and_an_adaptive_threshold_train_and_resume(tmp_path):
    from mettle.atomic_files import sha256
    from mettle.train.from_recipe import train
    from mettle.train.recipe import parse_recipe
    from train.conftest import make_npz, tiny

    source = make_npz(tmp_path / "p.npz")
    for k, hard in enumerate(
        (
            {"kind": "curriculum", "end": 0.5, "difficulty": {"kind": "Threshold", "beta": 5.0}},
            {"kind": "AdaptiveThreshold", "momentum": 0.5},
            {"kind": "Product", "first": {"kind": "AdaptiveThreshold"}, "second": {"kind": "Importance", "beta": 0.1}},
        )
    ):
        content = tiny(source).model_dump()
        content["loss"] = {"kind": "SupCon", "temperature": 0.1, "difficulty": hard}
        recipe = parse_recipe(content)

        class Stop(Exception):
            pass

        def halt(step, line):
            if step == 7:
                raise Stop

        train(recipe, tmp_path / f"whole{k}", tensorboard=False)
        with pytest.raises(Stop):
            train(recipe, tmp_path / f"cut{k}", tensorboard=False, on_step=halt)
        train(recipe, tmp_path / f"cut{k}", resume=True, tensorboard=False)
        assert sha256(tmp_path / f"whole{k}" / "model.safetensors") == sha256(
            tmp_path / f"cut{k}" / "model.safetensors"
        )
