"""The closed form of small declared losses equals the reference, value and gradient."""

from dataclasses import replace

import pytest
import torch

from mettle.difficulty import Hardest, Threshold
from mettle.losses import DASupCon, InfoNCE, SupCon, Triplet
from mettle.pairs import closed_form

LOSSES = {
    "supcon": SupCon(0.2),
    "supcon sum": SupCon(0.2, normalise="sum"),
    "supcon scaled": SupCon(0.2, base_temperature=0.07),
    "supcon all anchors": SupCon(0.2, mean_all=True),
    "da-supcon": DASupCon(0.2, positive=0.6, negative=0.1),
    "da-supcon everywhere": DASupCon(0.2, positive=0.6, negative=0.1, pos_weight="everywhere"),
    "da-supcon by weight": DASupCon(0.2, positive=0.6, negative=0.1, normalise="weight"),
    "da-supcon positives": SupCon(0.2, difficulty=Threshold(1.5, 0, 0.6, 0.1)),
    "da-supcon negatives": SupCon(0.2, difficulty=Threshold(0, 3, 0.6, 0.1)),
    "da-supcon unweighted negatives": DASupCon(0.2, positive=0.6, negative=0.1, neg_weight="none"),
    "infonce": InfoNCE(0.3),
    "infonce weighted": InfoNCE(0.3, difficulty=Threshold(positive=0.6, negative=0.1)),
    "batch-hard": Triplet(0.2, "hardest"),
    "batch-hard squared": Triplet(0.2, "hardest", squared=True),
    "batch-hard soft": Triplet(0.2, "hardest", soft=True),
    "batch-hard by weights": Triplet(0.2, "all", difficulty=Hardest()),
}
LABELS = {
    "fours": torch.arange(10).repeat(4),
    "two views": torch.arange(20).repeat(2),
    "uneven": torch.tensor([0] * 5 + [1] * 2 + [2] * 3 + list(range(10, 40))),
    "one class": torch.zeros(40, dtype=torch.long),
}


def evaluate(loss, z, y, **options):
    z = z.clone().requires_grad_()
    output = loss.output(z, y, **options)
    weights = torch.linspace(0.5, 1.5, len(output.values), dtype=z.dtype)
    value = 2 * output.mean() + (torch.where(output.defined, output.values, 0) * weights).sum()
    return output, value, torch.autograd.grad(value, z)[0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("batch", LABELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_closed_form_equals_the_reference(name, batch, dtype):
    loss, y = LOSSES[name], LABELS[batch]
    z = torch.randn(len(y), 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    ours, value, gradient = evaluate(loss, z, y)
    reference, expected, expected_gradient = evaluate(loss, z, y, engine="dense")
    assert ours.engine == "closed-form"
    assert reference.engine == "dense"
    assert torch.equal(ours.defined, reference.defined)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    scale = max(1.0, float(expected_gradient.abs().max()))
    torch.testing.assert_close(
        ours.per_anchor(), reference.per_anchor(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=tolerance, atol=tolerance)
    # The mean alone takes shortcuts.
    gradient, expected_gradient = (
        torch.autograd.grad(3 * loss(leaf, y, **options), leaf)[0]
        for leaf, options in ((z.clone().requires_grad_(), {}), (z.clone().requires_grad_(), {"engine": "dense"}))
    )
    torch.testing.assert_close(gradient / scale, expected_gradient / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_second_derivatives_by_finite_differences(name):
    loss, y = LOSSES[name], torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
    # Far from the thresholds' kinks: finite differences see no corner there.
    if "da" in name or "weighted" in name:
        loss = replace(loss, difficulty=None)
    z = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    assert loss.output(z, y).engine == "closed-form"
    assert torch.autograd.gradcheck(lambda z: loss(z, y), (z,))
    assert torch.autograd.gradgradcheck(lambda z: loss(z, y), (z,))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_embedding_gives_nan_and_never_a_number(broken):
    z = torch.randn(8, 3)
    z[2, 1] = broken
    for loss in LOSSES.values():
        assert torch.isnan(loss(z, torch.arange(4).repeat(2)))


@pytest.mark.parametrize("length", [0.0, 1e-25, 1e25])
def test_rows_of_odd_length_take_the_other_road(length):
    z = torch.randn(8, 3, dtype=torch.float64)
    z[3] *= length
    y = torch.arange(4).repeat(2)
    output = SupCon().output(z, y)
    assert output.engine == "dense"
    torch.testing.assert_close(output.mean(), SupCon()(z, y, engine="tiled"))


def test_pairs_that_tie_or_nearly_coincide_take_the_other_road():
    z, y, loss = torch.randn(12, 6, dtype=torch.float64), torch.arange(4).repeat(3), Triplet(0.2, "hardest")
    assert loss.output(z, y).engine == "closed-form"
    tied = torch.cat([z, z])  # every pair twice
    assert loss.output(tied, torch.cat([y, y])).engine == "dense"
    close = z.clone()
    close[4] = close[1] + 1e-4
    assert loss.output(close, y).engine == "dense"


def test_what_has_no_closed_form_here_is_left_to_the_others():
    z, y = torch.randn(8, 3), torch.arange(4).repeat(2)
    assert SupCon(form="in").output(z, y).engine == "dense"
    assert InfoNCE(prior=0.1).output(z, y).engine == "dense"
    assert DASupCon(preset="literal").output(z, y).engine == "dense"  # such weights may be 0
    assert SupCon().output(z, y, ref=(z, y)).engine == "dense"
    assert closed_form.find_spec(SupCon(), None, torch.randn(513, 3)) is None
