"""Miners keep the pairs that their papers keep: held against plain loops, in every engine and as lists."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tests.oracles import miners as oracle
from torch import Tensor

from mettle.difficulty import (
    Angular,
    DistanceWeighted,
    DistanceWeightedSampling,
    EasyHard,
    Hardest,
    MultiSimilarityMining,
    PairMargin,
    Product,
    SemiHard,
    Threshold,
    TripletMarginMining,
    mine_pairs,
)
from mettle.errors import InputError
from mettle.losses import (
    Contrastive,
    CrossBatchMemory,
    InfoNCE,
    MinedLoss,
    MultiSimilarity,
    SoftTriple,
    SupCon,
    Triplet,
)
from mettle.pairs import Traits, as_pair_list_loss, pair_weights

SIZES = [(12, 4, 5), (25, 8, 6), (40, 3, 12)]
EASY_HARD = [
    (p, n)
    for p in ("easy", "semihard", "hard", "all")
    for n in ("easy", "semihard", "hard", "all")
    if "semihard" not in (p, n) or {p, n} & {"easy", "hard"}
]


def unit(z: Tensor) -> Tensor:
    return torch.nn.functional.normalize(z, dim=1)


def draw(seed, n, d, classes, dtype=torch.float64):
    """Classes of different sizes, some of one sample."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=generator)
    z = torch.randn(classes, d, generator=generator, dtype=torch.float64)[y]
    return (z + torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype), y


def as_sets(listed):
    """Pairs of a tuple as two sets, each pair once."""
    sets = tuple(set(zip(a.tolist(), b.tolist(), strict=True)) for a, b in (listed[:2], listed[2:]))
    assert [len(x) for x in sets] == [len(listed[0]), len(listed[2])]
    return sets


def kept_by_weights(difficulty, z, y):
    """The positives and negatives of weight 1, all others being of weight 0."""
    same = y[:, None] == y
    masks = same & ~torch.eye(len(y), dtype=torch.bool), ~same
    w = pair_weights(Contrastive(difficulty=difficulty), z, y, difficulty=difficulty)
    assert set(w[masks[0] | masks[1]].tolist()) <= {0.0, 1.0}
    return tuple({(int(i), int(j)) for i, j in ((w > 0) & mask).nonzero()} for mask in masks)


def of_triplets(found):
    return {(i, p) for i, p, _ in found}, {(i, n) for i, _, n in found}


def by_cosine(rule, *arguments):
    """An oracle on a table of cosines, as one on rows."""

    def keep(z, ref, y, ref_y, same_set):
        return rule((z @ ref.T).tolist(), y, ref_y, same_set, *arguments)

    return keep


def by_triplets(wanted):
    def keep(z, ref, y, ref_y, same_set):
        return of_triplets(oracle.triplets(z.tolist(), ref.tolist(), y, ref_y, same_set, wanted))

    return keep


MINERS = {
    "hardest": (Hardest(), by_cosine(oracle.hardest)),
    "semi-hard": (SemiHard(0.4), by_cosine(oracle.semi_hard, 0.4)),
    "pair margin": (PairMargin(0.6, 0.1), by_cosine(oracle.pair_margin, 0.6, 0.1)),
    "angular 20": (Angular(), by_triplets(lambda *rows: oracle.angle(*rows) > 20)),
    "angular 50": (Angular(50), by_triplets(lambda *rows: oracle.angle(*rows) > 50)),
    "triplets": (TripletMarginMining(0.1), by_triplets(lambda *rows: oracle.gap(*rows) <= 0.1)),
    "triplets hard": (TripletMarginMining(0.1, "hard"), by_triplets(lambda *rows: oracle.gap(*rows) <= 0)),
    "triplets semihard": (
        TripletMarginMining(0.1, "semihard"),
        by_triplets(lambda *rows: 0 < oracle.gap(*rows) <= 0.1),
    ),
    "triplets easy": (TripletMarginMining(0.4, "easy"), by_triplets(lambda *rows: oracle.gap(*rows) > 0.4)),
}
MINERS |= {f"epsilon {e}": (MultiSimilarityMining(e), by_cosine(oracle.multi_similarity, e)) for e in (0.0, 0.1, 0.6)}
MINERS |= {f"{p} {n}": (EasyHard(p, n), by_cosine(oracle.easy_hard, p, n)) for p, n in EASY_HARD}


def as_pairs(listed):
    """Triplets as pairs, each once."""
    if len(listed) == 4:
        return as_sets(listed)
    assert len(listed[0]) == len(set(zip(*(x.tolist() for x in listed), strict=True)))
    return of_triplets(set(zip(*(x.tolist() for x in listed), strict=True)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", MINERS)
def test_miners_equal_plain_loops(name, size):
    miner, keep = MINERS[name]
    kept = 0
    for seed in range(2):
        z, y = draw(seed, *size)
        wanted = keep(unit(z), unit(z), y.tolist(), y.tolist(), True)
        assert kept_by_weights(miner, z, y) == wanted
        assert as_sets(mine_pairs(miner, z, y)) == wanted
        assert as_pairs(miner(z, y)) == wanted
        kept += len(wanted[0]) + len(wanted[1])
    assert kept


@pytest.mark.parametrize("name", MINERS)
def test_miners_against_a_reference_set(name):
    miner, keep = MINERS[name]
    (z, y), (ref, ref_y) = draw(3, 15, 4, 5), draw(4, 22, 4, 5)
    wanted = keep(unit(z), unit(ref), y.tolist(), ref_y.tolist(), False)
    listed = miner(z, y, ref, ref_y)
    assert as_pairs(listed) == wanted
    for same in (miner(z, y, ref_emb=ref, ref_labels=ref_y), miner(z, y, ref=(ref, ref_y))):
        assert all(torch.equal(a, b) for a, b in zip(same, listed, strict=True))
    # The batch once more as a reference set with its ids: its own rows are left out.
    ids = torch.arange(len(z))
    listed = miner(z, y, ref=(z, y, ids), ids=ids)
    assert all(torch.equal(a, b) for a, b in zip(listed, miner(z, y), strict=True))


@pytest.mark.parametrize("name", MINERS)
def test_a_loss_over_the_list_is_the_loss_with_the_difficulty(name):
    """What a miner lists and what the same object weighs inside of a loss are the same pairs."""
    miner, _ = MINERS[name]
    z, y = draw(5, 30, 5, 6)
    pairs = mine_pairs(miner, z, y)
    for loss in (SupCon(0.2, empty="zero"), Contrastive(empty="zero"), MultiSimilarity(empty="zero")):
        leaves = [z.clone().requires_grad_() for _ in range(2)]
        values = loss(leaves[0], y, pairs), replace(loss, difficulty=miner)(leaves[1], y, engine="tiled", tile=7)
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(x, z)[0] for x, z in zip(values, leaves, strict=True)))


def test_lists_are_ordered_int64_and_without_gradient():
    z, y = draw(0, 20, 4, 5, torch.float32)
    z.requires_grad_()
    for miner, _ in MINERS.values():
        for listed in (miner(z, y), mine_pairs(miner, z, y)):
            assert all(x.dtype == torch.int64 and not x.requires_grad and x.is_contiguous() for x in listed)
            for pairs in (listed[:2], listed[2:]) if len(listed) == 4 else (listed,):
                keys = list(zip(*(x.tolist() for x in pairs), strict=True))
                assert keys == sorted(keys)


@pytest.mark.parametrize("measure", ["squared", "dot", "euclidean", "l1"])
def test_miners_compare_as_the_loss_does(measure):
    """On raw rows a miner sees minus squared distances or products; triplets, raw distances."""
    z, y = draw(1, 18, 4, 5)
    d = torch.cdist(z, z)
    s = {"squared": -d.square(), "dot": z @ z.T, "euclidean": -d, "l1": -torch.cdist(z, z, p=1)}[measure]
    wanted = oracle.multi_similarity(s.tolist(), y.tolist(), y.tolist(), True, 0.5)
    assert as_sets(MultiSimilarityMining(0.5)(z, y, measure=measure)) == wanted
    rows = z.tolist()
    angles = oracle.triplets(rows, rows, y.tolist(), y.tolist(), True, lambda *rows: oracle.angle(*rows) > 30)
    assert set(zip(*(x.tolist() for x in Angular(30)(z, y, measure=measure)), strict=True)) == angles
    pairs = MultiSimilarityMining(0.5)(z, y, measure=measure)
    loss = SupCon(0.5, measure=measure, empty="zero")
    torch.testing.assert_close(loss(z, y, pairs), replace(loss, difficulty=MultiSimilarityMining(0.5))(z, y))


def test_miners_inside_of_a_memory_and_of_a_mined_loss():
    z, y = draw(1, 16, 4, 4)
    miner = MultiSimilarityMining(0.3)
    memory = CrossBatchMemory(MultiSimilarity(), size=64, dim=4, miner=miner).double()
    for _ in range(2):
        leaf = z.clone().requires_grad_()
        memory(leaf, y).backward()
        assert leaf.grad.abs().sum() > 0
    mined = MinedLoss(MultiSimilarity(), miner)
    torch.testing.assert_close(mined(z, y), MultiSimilarity(difficulty=miner)(z, y))


def test_several_classes_per_sample():
    z, _ = draw(2, 12, 4, 5)
    sets = torch.randint(0, 2, (12, 4), generator=torch.Generator().manual_seed(0)).bool()
    share = (sets.double() @ sets.double().T) > 0
    s = (unit(z) @ unit(z).T).tolist()
    positives, negatives = as_sets(MultiSimilarityMining(0.2)(z, sets))
    for i in range(12):
        p = [j for j in range(12) if j != i and share[i, j]]
        n = [j for j in range(12) if j != i and not share[i, j]]
        assert {j for a, j in positives if a == i} == {j for j in p if any(s[i][j] - 0.2 < s[i][k] for k in n)}
        assert {j for a, j in negatives if a == i} == {j for j in n if any(s[i][j] + 0.2 > s[i][k] for k in p)}


def test_a_negative_that_copies_the_positive_is_hard_and_three_copies_have_no_angle():
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    for seed in range(40):  # rounding differs from one to the next
        z = torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))
        z[2] = z[1]
        hard, semi = (
            {tuple(t) for t in torch.stack(TripletMarginMining(triplets=how)(z, y), 1).tolist()}
            for how in ("hard", "semihard")
        )
        assert (0, 1, 2) in hard and (0, 1, 2) not in semi
        z[0] = z[1]
        assert (0, 1, 2) not in {tuple(t) for t in torch.stack(Angular()(z, y), 1).tolist()}


@pytest.mark.parametrize(
    "miner", [EasyHard(), EasyHard("semihard", "hard"), EasyHard("hard", "easy"), Hardest()], ids=str
)
def test_copies_stay_or_go_together(miner):
    """Every sample three times: what stays does not depend on the order of rows or on roundings."""
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(14, 33, generator=generator).repeat_interleave(3, 0)
    y = torch.arange(42) // 9
    wanted = as_sets(miner(z, y))
    assert len(wanted[0]) > 42 or len(wanted[1]) > 42
    for side in wanted:
        assert all((i, j // 3 * 3 + k) in side or i == j // 3 * 3 + k for i, j in side for k in range(3))
    for seed in range(3):
        order = torch.randperm(42, generator=torch.Generator().manual_seed(seed))
        found = as_sets(miner(z[order], y[order]))
        assert tuple({(int(order[i]), int(order[j])) for i, j in side} for side in found) == wanted


@dataclass(frozen=True)
class Repeats:
    """Weights of a user: whole numbers, or not."""

    unit: float
    detach: bool = True
    traits = Traits(symmetric=True)

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, row_values):
        return self.unit * ((tile.anchor_index + tile.reference_index) % 3).to(tile.similarity.dtype)


def test_a_pair_of_weight_two_is_listed_twice():
    z, y = draw(0, 12, 4, 3)
    pairs = mine_pairs(Repeats(1.0), z, y)
    assert sorted(set((pairs[0] + pairs[1]).tolist())) and not ((pairs[0] + pairs[1]) % 3 == 0).any()
    counts = {(a, b): 0 for a, b in zip(*(x.tolist() for x in pairs[2:]), strict=True)}
    for pair in zip(*(x.tolist() for x in pairs[2:]), strict=True):
        counts[pair] += 1
    assert all(count == sum(pair) % 3 for pair, count in counts.items()) and set(counts.values()) == {1, 2}
    torch.testing.assert_close(SupCon()(z, y, pairs), SupCon(difficulty=Repeats(1.0))(z, y))
    for difficulty in (Repeats(0.5), Threshold(), DistanceWeighted(), Product(Hardest(), Threshold())):
        with pytest.raises(InputError, match="a list repeats a pair a whole number of times"):
            mine_pairs(difficulty, z, y)


def test_a_miner_that_finds_nothing():
    z, y = draw(0, 6, 4, 3)
    for labels in (torch.zeros_like(y), torch.arange(6)):
        for miner in (
            EasyHard(),
            MultiSimilarityMining(),
            Angular(),
            TripletMarginMining(),
            DistanceWeightedSampling(),
        ):
            listed = miner(z, labels)
            assert all(x.shape == (0,) and x.dtype == torch.int64 for x in listed)
            assert SupCon()(z, labels, listed) == 0


def test_memory_is_that_of_the_list():
    """Two million pairs in tiles of 512 rows: hardest pairs of each anchor only are held."""
    z, y = torch.randn(1500, 4, dtype=torch.float64), torch.arange(1500) // 4
    anchors, positives, _, negatives = Hardest()(z, y)
    assert len(anchors) == len(positives) == len(negatives) == 1500
    s = (unit(z) @ unit(z).T).masked_fill(y[:, None] == y, -2)
    torch.testing.assert_close(s[torch.arange(1500), negatives], s.amax(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MultiSimilarityMining(-0.1), "epsilon must be at least 0"),
        (lambda: EasyHard("semihard", "semihard"), "semihard looks for pairs beyond the one of the other side"),
        (lambda: EasyHard("all", "semihard"), "semihard looks for pairs beyond the one of the other side"),
        (lambda: EasyHard("middle"), "positives must be one of"),
        (lambda: Angular(0), "angle must lie between 0 and 90"),
        (lambda: Angular(90.0), "angle must lie between 0 and 90"),
        (lambda: TripletMarginMining(-1.0), "margin must be at least 0"),
        (lambda: TripletMarginMining(triplets="medium"), "triplets must be one of"),
        (lambda: DistanceWeighted(0.0), "0 < cutoff < limit < 2"),
        (lambda: DistanceWeighted(1.5, 1.4), "0 < cutoff < limit < 2"),
        (lambda: DistanceWeighted(limit=2.0), "0 < cutoff < limit < 2"),
        (lambda: DistanceWeighted(dim=1), "dim must be at least 2"),
        (lambda: DistanceWeightedSampling(random=3), "random must be a torch.Generator"),
        (lambda: Hardest()(torch.full((4, 2), torch.nan), torch.tensor([0, 0, 1, 1])), "NaN or infinity"),
        (lambda: Angular()(torch.full((4, 2), torch.nan), torch.tensor([0, 0, 1, 1])), "NaN or infinity"),
        (
            lambda: Hardest()(torch.ones(4, 2), torch.zeros(4).long(), measure="chebyshev"),
            "measure must be one of cosine, dot, euclidean, squared, l1, snr, got 'chebyshev'",
        ),
        (
            lambda: Angular()(torch.randn(4, 3), torch.arange(4) // 2, measure="snr"),
            "Angular compares Euclidean distances, which the signal-to-noise measure has none of",
        ),
        (
            lambda: SupCon(measure="snr", difficulty=TripletMarginMining())(torch.randn(4, 3), torch.arange(4) // 2),
            "TripletMarginMining compares Euclidean distances, which the signal-to-noise measure has none of",
        ),
        (lambda: Hardest()(torch.ones(4, 2), torch.zeros(3).long()), "one entry per embedding"),
        (lambda: Hardest()(torch.ones(4, 2), torch.zeros(4).long(), torch.ones(4, 2)), "belong together"),
        (
            lambda: Hardest()(
                torch.ones(4, 2),
                torch.zeros(4).long(),
                torch.ones(4, 2),
                torch.zeros(4).long(),
                ref=(torch.ones(4, 2), torch.zeros(4).long()),
            ),
            "both say what to compare with",
        ),
        (
            lambda: Contrastive(normalise=False, difficulty=DistanceWeighted())(
                torch.randn(4, 3), torch.arange(4) // 2
            ),
            "distance weighting is about distances on the unit sphere",
        ),
        (
            lambda: SoftTriple(2, 3, difficulty=Angular())(torch.randn(4, 3), torch.arange(4) // 2),
            "Angular compares embeddings with one another, and here are class vectors or given pairs",
        ),
        (
            lambda: SoftTriple(2, 3, difficulty=DistanceWeighted())(torch.randn(4, 3), torch.arange(4) // 2),
            "give distance weighting dim=",
        ),
        (
            lambda: as_pair_list_loss(Contrastive(difficulty=TripletMarginMining()))(
                torch.randn(4, 3), torch.randn(4, 3), torch.arange(4) // 2
            ),
            "TripletMarginMining compares embeddings with one another, and here are class vectors or given pairs",
        ),
    ],
)
def test_what_is_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


# ------------------------------------------------------------------------------------------- distance weighting


@pytest.mark.parametrize("dim", [3, 8, 128, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distance_weights_equal_plain_loops(dim, dtype):
    generator = torch.Generator().manual_seed(dim)
    z, y = torch.randn(20, 6, generator=generator, dtype=torch.float64), torch.arange(20) // 4
    w = pair_weights(Contrastive(), z.to(dtype), y, difficulty=DistanceWeighted(dim=dim))
    d = torch.cdist(unit(z), unit(z))
    assert (d < 0.5).any() and (d > 1.4).any()
    for i in range(20):
        negatives = (y != y[i]).nonzero().squeeze(1)
        wanted = torch.tensor(oracle.distance_weights(d[i, negatives].tolist(), 0.5, 1.4, dim), dtype=torch.float64)
        tolerance = 1e-9 if dtype == torch.float64 else 1e-2 if dim > 1000 else 1e-3
        torch.testing.assert_close(w[i, negatives].double(), wanted, rtol=tolerance, atol=1e-12)
        assert float(w[i, negatives].mean()) == pytest.approx(1.0 if wanted.any() else 0.0, rel=1e-3)
        assert (w[i, (y == y[i]) & (torch.arange(20) != i)] == 1).all()
    assert torch.isfinite(w).all()


def test_the_dimension_is_that_of_the_embeddings():
    z, y = draw(0, 20, 9, 4)
    assert torch.equal(*(pair_weights(Contrastive(), z, y, difficulty=DistanceWeighted(dim=k)) for k in (None, 9)))


def test_a_draw_follows_the_weights():
    """Frequencies over many draws, against the deterministic weights of the same negatives."""
    z, y = draw(2, 16, 5, 3)
    share = pair_weights(Contrastive(), z, y, difficulty=DistanceWeighted())
    share = share * (y[:, None] != y)
    share = share / share.sum(1, keepdim=True).clamp(min=1e-12)
    miner, counts = DistanceWeightedSampling(random=torch.Generator().manual_seed(0)), torch.zeros(16, 16)
    for _ in range(150):
        anchors, positives, negatives = miner(z, y)
        assert (y[anchors] == y[positives]).all() and (y[anchors] != y[negatives]).all()
        counts.index_put_((anchors, negatives), torch.ones(()), accumulate=True)
    drawn = counts.sum(1, keepdim=True)
    per_draw = torch.bincount(anchors, minlength=16)  # one negative for each positive, in every draw
    positives_of = torch.tensor([(int((y == y[i]).sum()) - 1) * bool(share[i].any()) for i in range(16)])
    assert torch.equal(per_draw, positives_of) and torch.equal(drawn.squeeze(1).long(), 150 * positives_of)
    expected = share * drawn
    chi = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 5].sum() / (expected > 5).sum()
    assert chi < 1.5
    assert (counts[share == 0] == 0).all()


def sampled(seed):
    return Contrastive(difficulty=DistanceWeightedSampling(random=torch.Generator().manual_seed(seed)), empty="zero")


def test_engines_draw_alike_and_calls_draw_anew():
    z, y = draw(2, 30, 5, 6)
    values = []
    for engine, tile in (("dense", None), ("tiled", 7), ("tiled", 30)):
        leaf = z.clone().requires_grad_()
        loss = sampled(1)
        first = loss(leaf, y, engine=engine, tile=tile)
        values.append((first.detach(), torch.autograd.grad(first, leaf)[0]))
        assert loss(leaf, y, engine=engine, tile=tile) != first
    for found in values[1:]:
        torch.testing.assert_close(found, values[0])


@pytest.mark.filterwarnings("ignore:create_graph=True")
def test_second_derivatives_meet_the_same_draw():
    """The tiled engine computes the matrix again for them, with the draw of the forward pass."""
    z, y = draw(2, 12, 4, 4)
    found = []
    for engine in ("dense", "tiled"):
        leaf = z.clone().requires_grad_()
        (first,) = torch.autograd.grad(sampled(1)(leaf, y, engine=engine), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found)


def test_draws_go_on_where_they_were_saved():
    z, y = draw(2, 30, 5, 6)
    loss, other = sampled(1), sampled(2)
    loss(z, y)
    other.load_state_dict(loss.state_dict())
    assert [loss(z, y) for _ in range(3)] == [other(z, y) for _ in range(3)]


def test_sampling_inside_of_other_losses():
    """A sampled negative counts as often as it is drawn; a product keeps its draw through all passes."""
    z, y = draw(2, 30, 5, 6)
    for loss in (SupCon(0.2), InfoNCE(0.2), Triplet(0.2), MultiSimilarity()):
        for difficulty in (DistanceWeightedSampling(), Product(DistanceWeightedSampling(), EasyHard("all", "hard"))):
            leaf = z.clone().requires_grad_()
            value = replace(loss, difficulty=difficulty, empty="zero")(leaf, y)
            assert math.isfinite(value.detach()) and torch.isfinite(torch.autograd.grad(value, leaf)[0]).all()
