"""Which pairs a call uses: lists of a miner, tables of positives, sets of classes, soft targets."""

import math

import pytest
import torch

from mettle import losses
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Threshold
from mettle.errors import InputError
from mettle.losses import MCML
from mettle.pairs.distributed.handshake import CallTensors

MEMBERS = {
    "supcon": losses.SupCon(0.2),
    "supcon in": losses.SupCon(0.2, form="in"),
    "supcon threshold": losses.DASupCon(),
    "supcon linear": losses.DASupCon(preset="author"),
    "supcon penalty": losses.SupCon(0.2, difficulty=Threshold(), neg_weight="penalty"),
    "infonce": losses.InfoNCE(0.3),
    "infonce prior": losses.InfoNCE(0.3, prior=0.1),
    "infonce importance": losses.InfoNCE(0.3, prior=0.1, difficulty=Importance(1.0)),
    "contrastive": losses.Contrastive(),
    "contrastive hardest": losses.Contrastive(difficulty=Hardest()),
    "triplet": losses.Triplet(),
    "triplet soft": losses.Triplet(soft=True, normalise=False),
    "triplet hardest": losses.Triplet(mining="hardest"),
    "triplet semihard": losses.Triplet(mining="semihard"),
    "multi-similarity": losses.MultiSimilarity(),
    "circle": losses.Circle(),
    "margin": losses.Margin(),
    "smooth ap": losses.SmoothAP(0.1),
    "mcml": MCML(),
    "self-triplet": losses.SelfTriplet(),
    "lifted": losses.LiftedStructure(),
}
ENGINES = ({"engine": "dense"}, {"engine": "tiled", "tile": 5}, {"engine": "tiled", "tile": 64})


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(17, 5, dtype=torch.float64, generator=generator)
    return z.requires_grad_(), torch.tensor([0, 1, 2, 3] * 4 + [0])


def all_pairs(y):
    """(a1, p, a2, n) by plain loops."""
    n = len(y)
    alike = [(i, j) for i in range(n) for j in range(n) if i != j and y[i] == y[j]]
    unlike = [(i, j) for i in range(n) for j in range(n) if y[i] != y[j]]
    return tuple(torch.tensor(x) for pairs in (alike, unlike) for x in zip(*pairs, strict=True))


def some_pairs(y, seed=0):
    """A part of all pairs, which is not symmetric; anchor 0 keeps a pair of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    a1, p, a2, n = all_pairs(y)
    one, two = (torch.rand(len(x), generator=generator) < 0.5 for x in (a1, a2))
    one[0] = two[0] = True
    return a1[one], p[one], a2[two], n[two]


def value_and_gradient(loss, z, *args, **options):
    value = loss(z, *args, **options)
    return value, *torch.autograd.grad(value, z)


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MEMBERS)
def test_all_pairs_listed_masked_or_as_sets_are_the_labels(name, batch):
    z, y = batch
    loss = MEMBERS[name]
    wanted = value_and_gradient(loss, z, y, engine="dense")
    sets = torch.nn.functional.one_hot(y)
    for engine in ENGINES[:2]:
        assert_same(value_and_gradient(loss, z, None, all_pairs(y), **engine), wanted)
        assert_same(value_and_gradient(loss, z, None, positives=y[:, None] == y, **engine), wanted)
        assert_same(value_and_gradient(loss, z, sets, **engine), wanted)


@pytest.mark.parametrize("name", MEMBERS)
def test_engines_agree_on_listed_pairs_and_weight_zero_is_a_pair_that_is_not_listed(name, batch):
    z, y = batch
    loss, pairs = MEMBERS[name], some_pairs(y)
    wanted = value_and_gradient(loss, z, y, pairs, engine="dense")
    for engine in ENGINES[1:]:
        assert_same(value_and_gradient(loss, z, y, pairs, **engine), wanted)
    if getattr(loss, "difficulty", None) is None:
        table = torch.zeros(len(z), len(z), dtype=z.dtype)
        table[pairs[:2]] = table[pairs[2:]] = 1.0
        assert_same(value_and_gradient(loss, z, y, weights=table, engine="dense"), wanted)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "lifted"])
def test_a_pair_listed_twice_is_a_pair_with_a_copy_of_its_reference(name, batch):
    """Independent of how repeats are counted: the second listing points at a copy of the row."""
    z, y = batch
    loss, n = MEMBERS[name], len(z)
    a1, p, a2, q = some_pairs(y)
    twice = slice(0, None, 3)
    repeated = tuple(torch.cat([x, x[twice]]) for x in (a1, p, a2, q))
    copied = tuple(torch.cat([x, x[twice] + shift]) for x, shift in ((a1, 0), (p, n), (a2, 0), (q, n)))
    wanted = value_and_gradient(lambda z: loss(z, None, copied, ref=(torch.cat([z, z]), None), engine="dense"), z)
    for engine in ENGINES[:2]:
        found = value_and_gradient(loss, z, None, repeated, **engine)
        if "supcon penalty" in name or "semihard" in name:  # a maximum that copies share
            torch.testing.assert_close(found[0], wanted[0])
        else:
            assert_same(found, wanted)


def test_a_triplet_lists_its_two_pairs_again_and_again(batch):
    z, _ = batch
    triplets = torch.tensor([[0, 4, 1], [0, 4, 2], [1, 5, 0], [0, 8, 1]]).T.unbind(0)
    loss = losses.Contrastive(form="linear")
    unit = torch.nn.functional.normalize(z.detach(), dim=1)

    def d(i, j):
        return math.dist(unit[i].tolist(), unit[j].tolist())

    first = (2 * d(0, 4) + d(0, 8)) / 3 + (2 * max(1 - d(0, 1), 0) + max(1 - d(0, 2), 0)) / 3
    second = d(1, 5) + max(1 - d(1, 0), 0)
    assert loss(z, None, triplets).item() == pytest.approx((first + second) / 2)
    rows = loss.per_anchor(z, None, triplets).detach()
    assert rows[:2].tolist() == pytest.approx([first, second]) and bool(rows[2:].isnan().all())


@pytest.mark.parametrize("options", [{}, {"squared": True}, {"normalise": False}, {"average": "all"}, {"soft": True}])
def test_given_triplets_are_used_exactly(options, batch):
    z, _ = batch
    loss = losses.Triplet(margin=0.3, **options)
    rows = [(0, 4, 1), (0, 4, 1), (0, 8, 2), (3, 7, 0), (3, 11, 0), (5, 6, 7)]
    points = z.detach() if loss.normalise is False else torch.nn.functional.normalize(z.detach(), dim=1)

    def d(i, j):
        far = math.dist(points[i].tolist(), points[j].tolist())
        return far**2 if loss.squared else far

    values = {}
    for a, p, n in rows:
        gap = d(a, p) - d(a, n) + 0.3
        values.setdefault(a, []).append(math.log1p(math.exp(gap)) if loss.soft else max(gap, 0.0))
    means = [sum(v) / max(sum(x > 0 for x in v) if loss.average == "active" else len(v), 1) for v in values.values()]
    triplets = torch.tensor(rows).T.unbind(0)
    assert loss(z, None, triplets).item() == pytest.approx(sum(means) / len(means))
    assert torch.autograd.gradcheck(lambda z: loss(z, None, triplets), (z,))
    wide = z.new_zeros(17, 60)  # few pairs of few columns come from rows, many from the whole matrix
    wide[:, :5] = z.detach()
    torch.testing.assert_close(loss(wide, None, triplets), loss(z.detach(), None, triplets))


def test_listed_pairs_of_references_and_ids(batch):
    z, _ = batch
    loss = losses.SupCon(0.2)
    other = torch.randn(9, 5, dtype=z.dtype)
    pairs = torch.tensor([0, 0, 2]), torch.tensor([8, 3, 5]), torch.tensor([0, 2, 2]), torch.tensor([1, 0, 7])
    x = torch.nn.functional.normalize(z.detach(), dim=1) @ torch.nn.functional.normalize(other, dim=1).T / 0.2
    x = x.tolist()
    first = [math.exp(x[0][j]) for j in (8, 3, 1)]
    second = [math.exp(x[2][j]) for j in (5, 0, 7)]
    wanted = [-(x[0][8] + x[0][3]) / 2 + math.log(sum(first)), -x[2][5] + math.log(sum(second))]
    for engine in ENGINES:
        found = loss.per_anchor(z, None, pairs, ref=(other, None), **engine)
        assert found[[0, 2]].tolist() == pytest.approx(wanted)
    ids, ref_ids = torch.arange(17), torch.tensor([90, 91, 92, 93, 94, 95, 96, 97, 0])  # leaves out (0, 8)
    found = loss.per_anchor(z, None, pairs, ref=(other, None, ref_ids), ids=ids)
    assert found[0].item() == pytest.approx(-x[0][3] + math.log(sum(first[1:])))


def test_a_difficulty_acts_among_listed_pairs_and_with_given_weights(batch):
    """The hardest of the listed pairs, and weights beside a list."""
    z, y = batch
    a1, p, a2, q = some_pairs(y)
    s = torch.nn.functional.normalize(z.detach(), dim=1)
    s = (s @ s.T).tolist()
    wanted = []
    for i in range(len(z)):
        near = [s[i][int(j)] for k, j in zip(a1, p, strict=True) if k == i]
        far = [s[i][int(j)] for k, j in zip(a2, q, strict=True) if k == i]
        if near:
            pull = math.sqrt(2 - 2 * min(near))
            wanted.append(pull + (max(1 - math.sqrt(2 - 2 * max(far)), 0) if far else 0))
    loss = losses.Contrastive(form="linear", difficulty=Hardest())
    assert loss(z, y, (a1, p, a2, q)).item() == pytest.approx(sum(wanted) / len(wanted))
    plain, twice = losses.SupCon(), torch.full((17, 17), 2.0, dtype=z.dtype)
    doubled = tuple(torch.cat([x, x]) for x in (a1, p, a2, q))
    torch.testing.assert_close(plain(z, y, (a1, p, a2, q), weights=twice), plain(z, y, doubled))


def test_masks_leave_pairs_out(batch):
    z, y = batch
    positives, negatives = (torch.zeros(17, 17, dtype=torch.bool) for _ in range(2))
    pairs = some_pairs(y, seed=2)
    positives[pairs[:2]] = negatives[pairs[2:]] = True
    for engine in ENGINES:
        found = value_and_gradient(
            losses.MultiSimilarity(), z, None, positives=positives, negatives=negatives, **engine
        )
        assert_same(found, value_and_gradient(losses.MultiSimilarity(), z, None, pairs))


def test_samples_of_several_classes(batch):
    z, _ = batch
    generator = torch.Generator().manual_seed(1)
    sets = torch.rand(17, 6, generator=generator) < 0.3
    shared = [
        [i != j and any(a and b for a, b in zip(sets[i], sets[j], strict=True)) for j in range(17)] for i in range(17)
    ]
    wanted = value_and_gradient(losses.SupCon(), z, None, positives=torch.tensor(shared))
    for labels in (sets, sets.long(), sets.double()):
        for engine in ENGINES:
            assert_same(value_and_gradient(losses.SupCon(), z, labels, **engine), wanted)
    ref = torch.randn(11, 5, dtype=z.dtype), sets[:11]
    mask = (sets.double() @ sets[:11].double().T) > 0
    wanted = value_and_gradient(losses.Triplet(), z, None, positives=mask, ref=(ref[0], None))
    assert_same(value_and_gradient(losses.Triplet(), z, sets, ref=ref, engine="tiled", tile=4), wanted)
    views = torch.stack([z.detach(), z.detach() + 0.1], 1)
    stacked = losses.SupCon()(torch.cat([views[:, 0], views[:, 1]]), torch.cat([sets, sets]))
    torch.testing.assert_close(losses.SupCon()(views, sets, views=True), stacked)


def soft_targets(n=17, m=17):
    t = torch.rand(n, m, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return torch.where(t < 0.3, 0, torch.where(t > 0.8, 1, t))


def test_supcon_with_soft_targets_is_a_cross_entropy(batch):
    z, _ = batch
    t = soft_targets()
    unit = torch.nn.functional.normalize(z, dim=1)
    others = ~torch.eye(17, dtype=torch.bool)
    x = (unit @ unit.T / 0.2).masked_fill(~others, -torch.inf)
    q = t * others
    q = q / q.sum(1, keepdim=True)
    value = -(q * torch.log_softmax(x, 1).masked_fill(~others, 0)).sum(1).mean()
    wanted = value, *torch.autograd.grad(value, z)
    for engine in ENGINES:
        assert_same(value_and_gradient(losses.SupCon(0.2), z, None, targets=t, **engine), wanted)


def test_infonce_with_soft_targets_counts_a_pair_on_both_sides(batch):
    z, _ = batch
    t = soft_targets().tolist()
    unit = torch.nn.functional.normalize(z.detach(), dim=1)
    x = (unit @ unit.T / 0.3).tolist()
    rows = []
    for i in range(17):
        negatives = sum((1 - t[i][j]) * math.exp(x[i][j]) for j in range(17) if j != i)
        parts = [t[i][j] * -math.log(math.exp(x[i][j]) / (math.exp(x[i][j]) + negatives)) for j in range(17) if j != i]
        rows.append(sum(parts) / sum(t[i][j] for j in range(17) if j != i))
    for engine in ENGINES:
        found = losses.InfoNCE(0.3).per_anchor(z, None, targets=torch.tensor(t, dtype=z.dtype), **engine)
        assert found.tolist() == pytest.approx(rows)


@pytest.mark.parametrize(
    "loss", [losses.SupCon(0.2), losses.SupCon(0.2, "in"), losses.InfoNCE(0.3, prior=0.1)], ids=repr
)
def test_hard_targets_are_labels_and_soft_ones_have_the_right_gradient(loss, batch):
    z, y = batch
    targets = (y[:, None] == y).to(z.dtype)
    for engine in ENGINES:
        wanted = value_and_gradient(loss, z, y, **engine)
        assert_same(value_and_gradient(loss, z, y, targets=targets, **engine), wanted)
    small, t = z.detach()[:6].requires_grad_(), soft_targets(6, 6)
    assert torch.autograd.gradcheck(lambda z: loss(z, None, targets=t, engine="tiled", tile=4), (small,))


@pytest.mark.filterwarnings("ignore:create_graph=True computes")
def test_listed_pairs_have_the_right_first_and_second_derivatives(batch):
    z, y = batch
    small = z.detach()[:9].requires_grad_()
    pairs = some_pairs(y[:9])
    pairs = tuple(torch.cat([x, x[:3]]) for x in pairs)
    for loss in (losses.SupCon(0.5), losses.Triplet(soft=True, squared=True), losses.MultiSimilarity(beta=5.0)):
        assert torch.autograd.gradcheck(lambda z, loss=loss: loss(z, None, pairs, engine="tiled", tile=4), (small,))
    dense, tiled = (losses.SupCon(0.5)(small, None, pairs, engine=engine) for engine in ("dense", "tiled"))
    seconds = []
    for value in (dense, tiled):
        (first,) = torch.autograd.grad(value, small, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), small)[0])
    torch.testing.assert_close(*seconds)


def test_an_empty_list_is_zero_and_broken_embeddings_stay_broken(batch):
    z, y = batch
    nothing = (torch.empty(0, dtype=torch.long),) * 4
    for loss in (losses.SupCon(), losses.MultiSimilarity(), losses.Triplet()):
        for lists in (nothing, nothing[:3]):
            value, gradient = value_and_gradient(loss, z, y, lists)
            assert value.item() == 0 and not bool(gradient.any())
            assert math.isnan(loss(z.detach() * torch.nan, y, lists))


def test_statistics_count_listed_pairs_and_name_the_reason(batch):
    z, y = batch
    found = losses.SupCon().statistics(z.float(), y, indices_tuple=some_pairs(y))
    assert found.not_fused == "indices_tuple= lists the pairs of the call" and found.engine == "dense"
    assert losses.InfoNCE().statistics(z.float(), None, targets=soft_targets()).not_fused == "targets= are soft"
    one = losses.SupCon().statistics(z, None, indices_tuple=torch.tensor([[0], [4], [1]]).unbind(0))
    assert one.anchors_without_positives == 16 and one.effective_negatives == 1


REFUSED = {
    "lists a tuple": (losses.SupCon(), {"indices_tuple": torch.zeros(3)}, "indices_tuple must be pairs"),
    "two of them": (losses.SupCon(), {"indices_tuple": (torch.tensor([0]),) * 2}, "got 2 entries"),
    "a mask": (losses.SupCon(), {"indices_tuple": (torch.ones(17, dtype=torch.bool),) * 3}, "positions, not a mask"),
    "out of range": (losses.SupCon(), {"indices_tuple": torch.tensor([[0], [17], [1]]).unbind(0)}, "0 to 16, got 17"),
    "itself": (losses.SupCon(), {"indices_tuple": torch.tensor([[5], [5], [1]]).unbind(0)}, "sample 5 with itself"),
    "lengths": (
        losses.SupCon(),
        {"indices_tuple": (torch.tensor([0]), torch.tensor([4, 8]), torch.tensor([1]))},
        "one length, got 1 and 2",
    ),
    "both": (losses.SupCon(), {"indices_tuple": torch.tensor([[2], [6], [6]]).unbind(0)}, "anchor 2 with 6 as a pos"),
    "mask shape": (losses.SupCon(), {"positives": torch.ones(17, 16, dtype=torch.bool)}, r"\(17, 17\), got"),
    "negatives alone": (
        losses.SupCon(),
        {"negatives": torch.ones(17, 17, dtype=torch.bool)},
        "other half of positives=",
    ),
    "overlap": (
        losses.SupCon(),
        {"positives": torch.ones(17, 17, dtype=torch.bool), "negatives": torch.ones(17, 17, dtype=torch.bool)},
        r"both hold the pair \(0, 1\)",
    ),
    "two ways": (
        losses.SupCon(),
        {"positives": torch.ones(17, 17, dtype=torch.bool), "targets": torch.ones(17, 17)},
        "positives= and targets= both say",
    ),
    "targets range": (losses.SupCon(), {"targets": torch.full((17, 17), 1.5)}, "between 0 and 1"),
    "targets NaN": (losses.SupCon(), {"targets": torch.full((17, 17), torch.nan)}, "between 0 and 1"),
    "targets loss": (losses.Triplet(), {"targets": torch.ones(17, 17)}, "Triplet has no form for soft targets="),
    "targets weighed": (losses.DASupCon(), {"targets": torch.ones(17, 17)}, "without a difficulty"),
    "nothing": (losses.SupCon(), {"labels": None}, "labels are None"),
    "column": (losses.SupCon(), {"labels": torch.zeros(17, 1, dtype=torch.long)}, r"labels.flatten\(\)"),
    "no sets": (losses.SupCon(), {"labels": torch.full((17, 3), 2)}, "must hold 0 and 1 only"),
    "views": (losses.SupCon(), {"views": True, "positives": torch.ones(17, 17, dtype=torch.bool)}, "stack the views"),
    "n-pair": (losses.NPair(), {"indices_tuple": (torch.tensor([0]),) * 3}, "indices_tuple= does not apply"),
    "mined triplets": (
        losses.Triplet(mining="hardest"),
        {"indices_tuple": torch.tensor([[0], [4], [1]]).unbind(0)},
        "with mining='all'",
    ),
    "weighed triplets": (
        losses.Triplet(),
        {"indices_tuple": torch.tensor([[0], [4], [1]]).unbind(0), "weights": torch.ones(17, 17)},
        "weights= does not apply",
    ),
    "following": (losses.SupCon(difficulty=AdaptiveThreshold()), {"labels": torch.ones(17, 3)}, "follows the pairs"),
    "class boundary": (losses.Margin(boundary="class", num_classes=4), {"labels": torch.ones(17, 3)}, "for each class"),
    "kernels": (
        losses.SupCon(),
        {"indices_tuple": torch.tensor([[0], [4], [1]]).unbind(0), "engine": "triton"},
        "indices_tuple= lists the pairs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(name, batch):
    z, y = batch
    loss, options, wanted = REFUSED[name]
    with pytest.raises(InputError, match=wanted):
        loss(z, **{"labels": y} | options)


def test_across_ranks_refuses_lists_in_one_line(batch):
    z, y = batch
    for args, options in (((z, y, all_pairs(y)), {}), ((z, y), {"targets": torch.ones(17, 17)})):
        with pytest.raises(InputError, match="is not known across ranks"):
            CallTensors.from_call(args, options)
