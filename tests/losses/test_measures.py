"""Losses of similarities other than the cosine, against the same formula on a matrix written out."""

import warnings
from dataclasses import replace

import pytest
import torch

from laws.members import Given
from mettle.difficulty import Hardest, Importance
from mettle.errors import InputError
from mettle.losses import InfoNCE, MultiSimilarity, SmoothAP, SupCon
from mettle.pairs.similarity import topk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_metric_learning import distances
    from pytorch_metric_learning import losses as peers

N = 14
MEASURES = ("dot", "euclidean", "squared", "l1", "snr")
LOSSES = {
    "SupCon": SupCon(0.5),
    "SupCon in": SupCon(0.5, "in"),
    "InfoNCE": InfoNCE(0.5),
    "MultiSimilarity": MultiSimilarity(2.0, 3.0),
    "SmoothAP": SmoothAP(0.3),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
every_measure = pytest.mark.parametrize("measure", MEASURES)


def batch(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor([0, 0, 1, 2, 0, 1, 3, 1, 3, 4, 3, 2, 5, 3])[:n]
    return torch.randn(n, 5, generator=generator, dtype=torch.float64).requires_grad_(), y


def measured(a, b, measure):
    """Pair by pair."""

    def one(x, y):
        gap = x - y
        return {
            "dot": lambda: x @ y,
            "euclidean": lambda: -gap.norm(),
            "squared": lambda: -(gap @ gap),
            "l1": lambda: -gap.abs().sum(),
            "snr": lambda: -gap.var() / x.var(),
        }[measure]()

    own = a is b  # a row and itself have no direction to move in
    rows = [[x.sum() * 0 if own and i == j else one(x, y) for j, y in enumerate(b)] for i, x in enumerate(a)]
    return torch.stack([torch.stack(row) for row in rows])


def values_of_rows(loss, s, y, y_ref, own):
    """(n,) one value per row of a matrix of similarities, NaN without positives; a row never meets itself."""
    values = []
    for k in range(len(s)):
        others = [j for j in range(len(y_ref)) if not (own and j == k)]
        near = torch.stack([s[k, j] for j in others if y_ref[j] == y[k]] or [s.new_tensor(torch.nan)])
        if near.isnan().any():
            values.append(near[0])
            continue
        far = torch.stack([s[k, j] for j in others if y_ref[j] != y[k]])
        if isinstance(loss, MultiSimilarity):
            pull = (1 + (-loss.alpha * (near - loss.base)).exp().sum()).log() / loss.alpha
            values.append(pull + (1 + (loss.beta * (far - loss.base)).exp().sum()).log() / loss.beta)
            continue
        near, far = near / loss.temperature, far / loss.temperature
        if isinstance(loss, InfoNCE):
            values.append(torch.stack([torch.cat([p[None], far]).logsumexp(0) - p for p in near]).mean())
        elif isinstance(loss, SmoothAP):
            before = torch.sigmoid(near[None] - near[:, None]).sum(1) + 0.5
            behind = torch.sigmoid(far[None] - near[:, None]).sum(1)
            values.append(1 - (before / (before + behind)).mean())
        else:
            mean = near.mean() if loss.form == "out" else near.logsumexp(0) - torch.tensor(float(len(near))).log()
            values.append(torch.cat([near, far]).logsumexp(0) - mean)
    return torch.stack(values)


def assert_alike(found, wanted, inputs, tolerance=1e-8):
    known = ~wanted.isnan()
    assert torch.equal(~found.isnan(), known)
    found, wanted = found[known], wanted[known]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    share = torch.linspace(0.5, 1.5, len(found), dtype=found.dtype)
    mine, other = (torch.autograd.grad((x * share).sum(), inputs, retain_graph=True) for x in (found, wanted))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def engines(measure):
    return [{}, {"engine": "dense"}] + ([] if measure == "l1" else [{"engine": "tiled", "tile": t} for t in (1, 5)])


@every_measure
@every_loss
def test_values_and_gradients_are_those_of_the_matrix_in_every_engine(name, measure):
    loss, (z, y) = replace(LOSSES[name], measure=measure), batch()
    wanted = values_of_rows(loss, measured(z, z, measure), y, y, own=True)
    for options in engines(measure):
        assert_alike(loss.per_anchor(z, y, **options), wanted, [z])


@every_measure
@every_loss
def test_against_a_reference_set(name, measure):
    loss, (z, y), (zr, yr) = replace(LOSSES[name], measure=measure), batch(n=8), batch(3)
    wanted = values_of_rows(loss, measured(z, zr, measure), y, yr, own=False)
    for options in engines(measure):
        assert_alike(loss.per_anchor(z, y, ref=(zr, yr), **options), wanted, [z, zr])


@every_measure
def test_named_pairs_and_weights(measure):
    z, y = batch()
    alike = (y[:, None] == y) & ~torch.eye(N, dtype=torch.bool)
    loss = SupCon(0.5, measure=measure)
    plain = loss.per_anchor(z, y)
    table = Given(torch.ones(N, N, dtype=torch.float64))
    for options in engines(measure):
        assert_alike(loss.per_anchor(z, None, positives=alike, **options), plain, [z])
        assert_alike(replace(loss, difficulty=table).per_anchor(z, y, **options), plain, [z])
        hard = replace(loss, difficulty=Hardest())
        assert_alike(hard.per_anchor(z, y, **options), hard.per_anchor(z, y, engine="dense"), [z])


@pytest.mark.parametrize("measure", ["dot", "euclidean", "snr"])
def test_second_derivatives_and_transforms(measure):
    z, y = batch()
    loss = SupCon(0.5, measure=measure)
    assert torch.autograd.gradcheck(lambda x: loss(x, y), (z,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, y, engine="dense"), (z,), fast_mode=True)
    plain = z.detach()
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, y))(plain), torch.autograd.grad(loss(z, y), z)[0])
    both = torch.func.vmap(lambda x: loss(x, y))(torch.stack([plain, plain.flip(0)]))
    torch.testing.assert_close(both, torch.stack([loss(plain, y), loss(plain.flip(0), y)]))


def test_weights_that_are_folded_into_cosines_stay_apart_from_other_measures():
    """The bound of exponential weights is that of cosines: a dot product of 60 would not be within it."""
    z, y = batch()
    loss = InfoNCE(0.5, measure="dot", difficulty=Importance(1.0))
    large = (6 * z.detach()).requires_grad_()
    for x in (z, large):
        assert_alike(loss.per_anchor(x, y, engine="tiled", tile=5), loss.per_anchor(x, y, engine="dense"), [x])


@pytest.mark.parametrize("measure", ["euclidean", "squared", "snr"])
@pytest.mark.parametrize("options", engines("dot"), ids=str)
def test_coincident_points_have_no_direction_and_finite_gradients(measure, options):
    z, y = batch()
    with torch.no_grad():
        z[1], z[7], z[3] = z[0], z[5], 0.0
    (gradient,) = torch.autograd.grad(SupCon(0.5, measure=measure)(z, y, **options), z)
    assert gradient.isfinite().all()


@every_measure
def test_float32_and_broken_embeddings(measure):
    z, y = batch()
    loss = SupCon(0.5, measure=measure)
    torch.testing.assert_close(loss(z.detach().float(), y).double(), loss(z, y), rtol=1e-5, atol=1e-5)
    broken = z.detach().clone()
    broken[2, 1] = torch.nan
    assert loss.per_anchor(broken, y).isnan().all()


PEERS = {
    "dot": distances.DotProductSimilarity(normalize_embeddings=False),
    "euclidean": distances.LpDistance(normalize_embeddings=False),
    "squared": distances.LpDistance(normalize_embeddings=False, power=2),
    "l1": distances.LpDistance(normalize_embeddings=False, p=1),
    "snr": distances.SNRDistance(normalize_embeddings=False),
}


@every_measure
def test_matrices_are_those_of_pytorch_metric_learning(measure):
    z, _ = batch()
    theirs = PEERS[measure](z, z) if measure != "snr" else PEERS[measure].compute_mat(z, z)
    sign = 1 if measure == "dot" else -1
    off = ~torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(measured(z, z, measure)[off], sign * theirs[off], rtol=1e-6, atol=1e-6)
    scores, found = topk(z.detach(), z.detach(), N, measure=measure)
    wanted = measured(z.detach(), z.detach().clone(), measure)
    torch.testing.assert_close(scores, wanted.gather(1, found), rtol=1e-6, atol=1e-6)


@every_measure
def test_losses_are_those_of_pytorch_metric_learning(measure):
    z, y = batch()
    y = torch.arange(N) % 5
    s = 1 if measure == "dot" else -1  # theirs are distances, so that the boundary of multi-similarity changes its sign
    for ours, theirs in (
        (SupCon(0.5, measure=measure), peers.SupConLoss(0.5, distance=PEERS[measure])),
        (
            MultiSimilarity(2.0, 3.0, s * 0.5, measure=measure),
            peers.MultiSimilarityLoss(2.0, 3.0, 0.5, distance=PEERS[measure]),
        ),
    ):
        a, b = ours(z, y), theirs(z, y)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        mine, other = (torch.autograd.grad(x, z)[0] for x in (a, b))
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_settings():
    loss = SupCon(0.5, measure="dot")
    assert "measure='dot'" in repr(loss) and loss.settings["measure"] == "dot" and "measure" not in repr(SupCon(0.5))
    with pytest.raises(InputError, match=r"measure must be one of \('cosine', 'dot'"):
        SupCon(measure="manhattan")
    with pytest.raises(InputError, match="measure must be 'cosine', got 'dot'"):
        InfoNCE(prior=0.1, measure="dot")
    with pytest.raises(InputError, match="L1 measure has a dense form only"):
        SupCon(measure="l1")(*batch(), engine="tiled")
