"""The reduction table of the methods, row by row, in value and gradient where a row speaks of losses."""

import math
from dataclasses import replace

import pytest
import torch

from laws.members import Given, batch, frozen, pairs_batch, second, value_and_gradient, with_difficulty
from mettle.difficulty import Importance, Relative, Threshold
from mettle.losses import DASupCon, InfoNCE, NPair, SelfTriplet, SupCon, Triplet
from mettle.pairs import Tile
from mettle.pairs.problem import build_problem
from mettle.pairs.reference import reduce_tile


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def same(a, b, z, y, engine="tiled", **options):
    for x, w in zip(
        value_and_gradient(a, z, y, engine=engine, tile=4, **options),
        value_and_gradient(b, z, y, engine=engine, tile=4),
        strict=True,
    ):
        close(x, w)


def test_row_01_no_difficulty_is_supcon():
    z, y = batch()
    same(DASupCon(0.2, alpha=0.0, beta=0.0), SupCon(0.2), z, y)


def test_row_02_ids_as_labels_make_supcon_nt_xent():
    z, y = pairs_batch()
    same(SupCon(0.3), InfoNCE(0.3), z, y)


def test_row_03_in_is_below_out_and_equal_for_one_positive():
    z, y = batch()
    inner, outer = SupCon(0.3, "in").per_anchor(z, y), SupCon(0.3).per_anchor(z, y)
    positives = (y[:, None] == y[None]).sum(1) - 1
    many = positives > 1
    assert (inner[many] < outer[many]).all()
    close(inner[positives == 1], outer[positives == 1])


@pytest.mark.parametrize("loss", [SupCon(0.3), SupCon(0.3, "in"), DASupCon(0.3), InfoNCE(0.3)], ids=repr)
def test_row_04_gradients_of_a_row_of_similarities_sum_to_zero(loss):
    """Shifting all similarities of an anchor by a constant changes nothing: tried by moving the references along it."""
    z, y = batch()
    unit = torch.nn.functional.normalize(z.detach())
    anchor = 3
    table = None
    if loss.difficulty is not None:  # detached weights stay where they are
        s = unit @ unit.T
        same_label = y[:, None] == y[None]
        at = torch.arange(len(y))
        table = loss.difficulty.weights(Tile(s, same_label, ~same_label, at, at), {})
        loss = with_difficulty(loss, Given(table, "numerator"))

    def value(shift):
        class Shifted(type(loss)):
            def reductions(self, tile, rows):
                return super().reductions(replace(tile, similarity=tile.similarity + shift), rows)

            def positives(self, tile, rows):
                return super().positives(replace(tile, similarity=tile.similarity + shift), rows)

        moved = Shifted(**{f: getattr(loss, f) for f in loss.__dataclass_fields__})
        return moved.output(unit, y, engine="dense").values[anchor]

    close(value(0.0), value(0.123), 1e-9)


def test_row_05_hcl_without_beta_is_dcl_and_dcl_without_prior_is_simclr():
    z, y = pairs_batch()
    same(InfoNCE(0.5, 0.1, Importance(0.0)), InfoNCE(0.5, 0.1), z, y)
    same(InfoNCE(0.5, 0.0), SupCon(0.5), z, y)
    assert InfoNCE(0.5, 0.0).statistics(z, y).clamp_fraction == 0


def test_row_06_hcl_with_huge_beta_counts_the_hardest_negative_n_times():
    z, y = pairs_batch()
    found = InfoNCE(0.5, 0.0, Importance(2000.0)).per_anchor(z, y)
    unit = torch.nn.functional.normalize(z)
    s = (unit @ unit.T / 0.5).masked_fill(y[:, None] == y[None], -torch.inf)
    pos = (unit @ unit.T / 0.5)[(y[:, None] == y[None]) & ~torch.eye(14, dtype=torch.bool)]
    close(found, torch.nn.functional.softplus(s.amax(1) + math.log(12) - pos), 1e-6)


def test_row_07_wcl_with_constant_one_is_dcl_and_with_equal_encoders_is_not():
    z, y = pairs_batch()
    same(InfoNCE(0.5, 0.1, Given(torch.ones(14, 14))), InfoNCE(0.5, 0.1), z, y)
    half = InfoNCE(0.5, 0.1, Given(torch.full((14, 14), 1.5), negatives="plain"))
    same(InfoNCE(0.5, 0.1, Relative()), half, z, y, biased=z.detach())
    a, b = InfoNCE(0.5, 0.1, Relative()).per_anchor(z, y, biased=z.detach()), InfoNCE(0.5, 0.1).per_anchor(z, y)
    assert not torch.allclose(a, b)


def test_row_08_a_constant_weight_is_another_prior_and_a_constant():
    """N_g(w, prior) = w (1 − prior/w)/(1 − prior) × N_g(1, prior/w), before the clamp."""
    z, y = pairs_batch()
    w, prior = 1.5, 0.1
    heavy = InfoNCE(0.5, prior, Given(torch.full((14, 14), w), negatives="plain"))
    light = InfoNCE(0.5, prior / w)

    def log_g(loss):  # value = softplus(log G − x)
        value = loss.per_anchor(z, y).detach()
        return value.expm1().log()

    factor = w * (1 - prior / w) / (1 - prior)
    close(log_g(heavy), log_g(light) + math.log(factor), 1e-9)


def test_row_09_relative_weight_is_one_plus_a_sigmoid_of_normalised_logits():
    z, y = pairs_batch()
    other = second(z)
    t = 0.5
    unit, unit_b = torch.nn.functional.normalize(z.detach()), torch.nn.functional.normalize(other)
    e, eb = (unit @ unit.T / t).exp(), (unit_b @ unit_b.T / t).exp()
    neg = y[:, None] != y[None]
    hat, hat_b = ((x * neg) / ((x * neg) ** 2).sum(1, keepdim=True).sqrt() for x in (e, eb))
    wanted = 1 + hat / (hat + hat_b)
    found = frozen(InfoNCE(t, 0.1, Relative()), z, y, biased=other).difficulty.table
    close(found[neg], wanted[neg])


def test_row_10_debiasing_the_mean_form_only_rescales():
    z, y = pairs_batch()
    for prior in (0.1, 0.5):
        a, ga = value_and_gradient(SelfTriplet(prior, "mean"), z, y)
        b, gb = value_and_gradient(SelfTriplet(0.0, "mean"), z, y)
        close(a, b / (1 - prior))
        close(ga, gb / (1 - prior))


def test_row_13_n_pair_is_infonce_without_temperature_or_norm():
    z, y = pairs_batch()
    order = torch.argsort(y, stable=True)
    a, p = z[order[0::2]], z[order[1::2]]
    wanted = torch.nn.functional.cross_entropy(a @ p.T, torch.arange(7))
    close(NPair(0.0)(z, y), wanted)


def test_row_14_soft_triplet_is_a_softmax_of_two_distances():
    z = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 0, 1])
    d = torch.cdist(z, z)
    value = Triplet(0.0, soft=True, normalise=False).per_anchor(z, y)[0]
    close(value, -torch.log_softmax(-torch.stack([d[0, 1], d[0, 2]]), 0)[0])


def test_unit_vectors_make_a_squared_soft_triplet_a_supcon_of_one_positive_and_one_negative():
    """softplus((d²_ap − d²_an)/2τ) = SupCon at τ; τ = ½ needs no factor."""
    z = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 0, 1])
    close(Triplet(0.0, squared=True, soft=True).per_anchor(z, y)[0], SupCon(0.5).per_anchor(z, y)[0])


def test_claim_2_the_literal_preset_ignores_beta():
    z, y = batch()
    same(DASupCon(0.2, beta=50.0, preset="literal"), DASupCon(0.2, beta=0.0, preset="literal"), z, y)


def test_claim_3_hard_pairs_get_a_larger_share_of_the_gradient():
    """Share of |∂L/∂s| on positives below and negatives above the thresholds, against plain SupCon."""
    z, y = batch(28, 6, seed=8)
    unit = torch.nn.functional.normalize(z.detach())
    same_label = (y[:, None] == y[None]) & ~torch.eye(28, dtype=torch.bool)
    hard = (same_label & (unit @ unit.T < 0.7)) | ((y[:, None] != y[None]) & (unit @ unit.T > 0.3))

    def share(loss):
        problem, _ = build_problem(loss, unit, y, None, None, loss.difficulty, None, sort=False)
        tile = problem.tile(*problem.whole_blocks())
        s = tile.similarity.clone().requires_grad_()
        held, rows = replace(tile, similarity=s), {}
        for step in problem.resolve_passes():
            w = step.weights(held, rows)
            found = step.reductions(held, rows)
            rows |= {k: reduce_tile(a, w, held, problem.max_positives).squeeze(1) for k, a in found.items()}
        g = torch.autograd.grad(loss.row_loss(rows)[loss.is_defined(rows)].mean(), s)[0].abs()
        return float(g[hard].sum() / g.sum())

    assert share(DASupCon(0.1, 1.0, 10.0)) > share(SupCon(0.1)) + 0.005


@pytest.mark.parametrize("beta", [1.0, 5.0])
def test_a_negative_weight_is_a_bounded_margin(beta):
    """In the denominator w multiplies e^{s/τ}: an additive margin of τ·log w, at most τ·log(1 + β)."""
    hard, at = Threshold(0.0, beta, 0.7, 0.3), torch.arange(1)
    s = torch.linspace(-1, 1, 201)[:, None]
    w = hard.weights(Tile(s, False, True, torch.arange(201), at), {})
    margin = 0.1 * w.log()
    assert margin.min() == 0 and float(margin.max()) == pytest.approx(0.1 * math.log(1 + beta), rel=1e-5)
