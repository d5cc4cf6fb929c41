"""The fused kernels in triton's interpreter: value and gradient equal to dense, on small odd shapes, in float32."""

import dataclasses
from itertools import product
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from interpreted import ask_for_interpreter

if (problem := ask_for_interpreter()) is not None:
    pytest.skip(problem, allow_module_level=True)

from covering import cover_axes, mark_slow_except
from mettle.difficulty import (
    AdaptiveThreshold,
    Hardest,
    Importance,
    MultiSimilarityMining,
    Product,
    Relative,
    SemiHard,
    Threshold,
    curriculum,
)
from mettle.difficulty.settings import view_with
from mettle.errors import InputError
from mettle.losses import (
    ArcFace,
    Circle,
    Contrastive,
    CosFace,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    MultiSimilarity,
    NormFace,
    NPair,
    ProxyAnchor,
    SubCenterArcFace,
    SupCon,
    Triplet,
)
from mettle.losses.arcface import Mode
from mettle.pairs import BatchHardSpec, NoKernel, Queue, pair_loss
from mettle.pairs.class_softmax import class_reductions
from mettle.pairs.kernel_spec import declared_margin
from mettle.pairs.kernels import LoweredSpec, collect_inputs, config, evaluate_fused, launch, lower_loss
from mettle.pairs.kernels.backward import _add_product
from mettle.pairs.kernels.class_softmax import ClassSoftmaxCall, GradientBuffer, class_softmax
from mettle.pairs.kernels.config import SUMMED_COLUMNS, flush_interval, most_gradient_splits, select_config
from mettle.pairs.kernels.function import evaluate_spec, mean_and_gradient
from mettle.pairs.kernels.histograms import score_histogram
from mettle.pairs.kernels.margin_loss import margin_loss
from mettle.pairs.kernels.mining import batch_hard_rows
from mettle.pairs.kernels.operands import padded_head_dim, prepare_operands
from mettle.pairs.kernels.spec import choose_precision, lower_spec

# The interpreter computes with NumPy, which warns where a masked entry divides by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HARD = Threshold(positive=0.6, negative=0.1)
LIVE = Threshold(positive=0.6, negative=0.1, detach=False)
MINED = MultiSimilarityMining(0.05)

FORMS = {
    "supcon": SupCon(0.1),
    "supcon in": SupCon(0.2, "in"),
    "supcon cold": SupCon(0.01),
    "supcon sum, all anchors": SupCon(0.1, normalise="sum", base_temperature=0.07, mean_all=True),
    "da-supcon": SupCon(0.1, difficulty=HARD),
    "da-supcon live": SupCon(0.1, difficulty=LIVE),
    "da-supcon live everywhere": SupCon(0.1, difficulty=LIVE, pos_weight="everywhere"),
    "da-supcon in": SupCon(0.1, "in", difficulty=HARD),
    "da-supcon in live everywhere": SupCon(0.1, "in", difficulty=LIVE, pos_weight="everywhere"),
    "da-supcon cold": SupCon(0.01, difficulty=HARD),
    "da-supcon literal": DASupCon(0.1, preset="literal"),
    "da-supcon curriculum": SupCon(0.1, difficulty=curriculum(HARD, end=0.5).at(0.25)),
    "da-supcon adaptive": SupCon(0.1, difficulty=AdaptiveThreshold(negative=0.1)),
    "infonce": InfoNCE(0.5),
    "infonce cold": InfoNCE(0.01),
    "infonce threshold": InfoNCE(0.5, difficulty=LIVE),
    "debiased": InfoNCE(0.5, 0.1),
    "debiased threshold": InfoNCE(0.5, 0.1, difficulty=HARD),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
    "hard, other power": InfoNCE(0.5, 0.1, Importance(0.7)),
    "hard detached": InfoNCE(0.5, 0.1, Importance(0.7, detach=True)),
    "supcon hard": SupCon(0.1, difficulty=Importance(1.0)),
    "relative": InfoNCE(0.5, 0.1, Relative()),
    "relative raw": InfoNCE(0.5, 0.1, Relative("raw")),
    "supcon relative": SupCon(0.1, difficulty=Relative()),
    "contrastive squared": Contrastive(0.4, 1.3, "squared"),
    "contrastive hadsell": Contrastive(0.4, 1.3, "hadsell"),
    "contrastive linear": Contrastive(0.4, 1.3, "linear"),
    "multi-similarity": MultiSimilarity(2.0, 20.0, 0.3),
    "multi-similarity cold": MultiSimilarity(2.0, 90.0),
    "multi-similarity live": MultiSimilarity(2.0, 20.0, 0.3, difficulty=LIVE),
    "multi-similarity hard": MultiSimilarity(2.0, 20.0, 0.3, difficulty=Importance(3.0)),
    "multi-similarity mined": MultiSimilarity(2.0, 20.0, 0.3, difficulty=MINED),
    "supcon mined": SupCon(0.1, difficulty=MINED),
    "supcon in mined": SupCon(0.2, "in", difficulty=MINED, normalise="count"),
    "infonce mined": InfoNCE(0.5, difficulty=MINED),
    "circle": Circle(0.25, 32.0),
    "circle cold": Circle(0.25, 200.0),
    "circle live": Circle(0.4, 80.0, stop_gradient=False),
    "circle mined": Circle(0.25, 32.0, difficulty=MINED),
}


def batch(n, d, each=4, seed=0):
    """Labels in mixed order and far apart; the last class may be incomplete."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(n) // each)[torch.randperm(n, generator=generator)]
    labels[labels == 0] = 2**40
    return torch.randn(n, d, generator=generator), labels


def lower(loss, z, ref=None, biased=None):
    """What the kernels compute for a loss on such data, None where they cannot."""
    data = SimpleNamespace(z=z, ref=ref, biased=biased, self_column=None)
    found = lower_loss(loss, loss.difficulty, data)
    return found if isinstance(found, LoweredSpec) else None


def gap(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def options(loss, z, ref=None):
    if not isinstance(loss.difficulty, Relative):
        return None
    generator = torch.Generator().manual_seed(9)
    return tuple(torch.randn(len(x), 12, generator=generator) for x in (z, z if ref is None else ref))


def compare(loss, z, y, within=2e-6, **how):
    biased = options(loss, z)
    biased = biased if biased is None else (biased[0], biased[0])
    form = lower(loss, z, biased=biased)
    assert form is not None
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    wanted = pair_loss(loss, exact, y, difficulty=loss.difficulty, engine="dense",
                       biased=None if biased is None else biased[0].double())  # fmt: skip
    found = evaluate_spec(form, leaf, y, biased=biased, **how)
    assert torch.equal(found.defined, wanted.defined)
    values = torch.where(wanted.defined, wanted.values, 0)
    torch.testing.assert_close(torch.where(found.defined, found.values, 0).double(), values, rtol=within, atol=within)
    torch.testing.assert_close(found.mean.double(), wanted.mean(), rtol=within, atol=within)
    (a,) = torch.autograd.grad(found.mean, leaf, retain_graph=True)
    (b,) = torch.autograd.grad(wanted.mean(), exact, retain_graph=True)
    assert gap(a, b) < within
    by = torch.randn(len(z), generator=torch.Generator().manual_seed(3))  # a gradient of its own for every anchor
    (a,) = torch.autograd.grad((found.values * by).sum() + found.mean, leaf)
    (b,) = torch.autograd.grad((values * by).sum() + wanted.mean(), exact)
    assert gap(a, b) < within


@pytest.mark.parametrize("name", FORMS)
def test_value_and_gradient_equal_dense(name):
    compare(FORMS[name], *batch(37, 20), within=4e-5 if "cold" in name else 4e-6)


SHAPES = [(1, 3, 1), (2, 3, 2), (17, 2, 3), (33, 64, 5), (53, 5, 7), (20, 300, 3)]


@pytest.mark.parametrize(("n", "d", "each", "name"), cover_axes(SHAPES, ["supcon", "da-supcon live", "hard"]))
def test_odd_shapes(name, n, d, each):
    if n == 1:
        z, y = batch(n, d, each)
        form = lower(FORMS[name], z)
        assert not evaluate_spec(form, z, y).defined.any()
        return
    compare(FORMS[name], *batch(n, d, each), within=1e-5)


@pytest.mark.parametrize("name", mark_slow_except(["supcon", "hard", "relative", "contrastive linear"], ["relative"]))
def test_wide_embeddings_in_several_blocks(monkeypatch, name):
    """A block of h away from the diagonal serves the rows of both its sides."""
    monkeypatch.setattr("mettle.pairs.kernels.backward.BLOCK_ROWS", 32)
    compare(FORMS[name], *batch(37, 261, 5), within=2e-5)


@pytest.mark.parametrize("name", mark_slow_except(["supcon", "relative"], ["supcon"]))
def test_blocks_that_are_taller_than_wide(monkeypatch, name):
    """As where memory is short; several of them cover the diagonal of one block of rows."""
    for what, value in {"BLOCK_ROWS": 32, "PAD": 16, "BLOCK_BYTES": 0, "BYTES_PER_ENTRY": {"ieee": 0}}.items():
        monkeypatch.setattr(f"mettle.pairs.kernels.backward.{what}", value)
    compare(FORMS[name], *batch(40, 261, 5), within=2e-5)


def test_wide_references_in_several_blocks(monkeypatch):
    monkeypatch.setattr("mettle.pairs.kernels.backward.BLOCK_ROWS", 32)
    (z, y), (r, labels) = batch(35, 262), batch(45, 262, seed=3)
    loss = FORMS["supcon"]
    exact, leaves = [x.double().requires_grad_() for x in (z, r)], [x.clone().requires_grad_() for x in (z, r)]
    wanted = pair_loss(loss, exact[0], y, ref=(exact[1], labels), engine="dense").mean()
    found = evaluate_spec(lower(loss, z, ref=r), leaves[0], y, ref=(leaves[1], labels)).mean
    for a, b in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, exact), strict=True):
        assert gap(a, b) < 1e-5


def test_a_call_remembers_its_launches_and_not_its_numbers():
    for seed in range(3):
        compare(FORMS["da-supcon live"], *batch(41, 24, seed=seed), within=4e-6)
    z, y = batch(42, 24)
    compare(FORMS["supcon"], z[1:], y[1:])  # begins between two multiples of 16 bytes where d is odd
    compare(FORMS["supcon"], z.T.contiguous().T[:41], y[:41])


def test_numbers_of_a_loss_are_no_part_of_what_is_remembered(monkeypatch):
    """A threshold that adapts has a new value in every step: it is passed at launch."""
    monkeypatch.setattr(launch, "_caches", {})
    z, y = batch(6, 3, each=2)
    for k in range(12):
        loss = SupCon(0.1, difficulty=Threshold(positive=0.6, negative=k / 1000))
        evaluate_spec(lower(loss, z), z, y)
    assert len(launch._caches) == 1
    for temperature, negative in ((0.1, 0.2), (0.3, -0.5)):
        compare(SupCon(temperature, difficulty=Threshold(positive=0.4, negative=negative)), z, y, within=1e-5)
    assert len(launch._caches) == 1
    for beta in (0.3, 0.5, 1.0):  # 1 is a kernel of its own
        evaluate_spec(lower(InfoNCE(0.5, 0.1, Importance(beta)), z), z, y)
    assert len(launch._caches) == 3
    for scale in (8.0, 9.0, 10.0, 100.0):  # the last one needs a running maximum
        class_softmax(z, torch.randn(4, 3), y % 4, scale, normalize=True)
    assert len(launch._caches) == 5


def test_labels_may_lie_apart_in_memory():
    z, y = batch(37, 20)
    apart = torch.stack([y, -y], 1)[:, 0]
    form = lower(FORMS["supcon"], z)
    assert torch.equal(evaluate_spec(form, z, apart).mean, evaluate_spec(form, z, y).mean)
    w, names = torch.randn(9, 20), torch.arange(37) % 9
    found = class_softmax(z, w, torch.stack([names, -names], 1)[:, 0], 8.0, normalize=True)
    torch.testing.assert_close(found, class_softmax(z, w, names, 8.0, normalize=True), rtol=0, atol=0)


def test_class_vectors_of_samples_that_begin_anywhere():
    """A copy of a view that begins off the grid has other strides: it must not be taken for the view."""
    held, w, y = torch.randn(24, 17), torch.randn(9, 16), torch.arange(24) % 9
    for z in (held[:, :16], held[:, 1:]):
        found, wanted = class_softmax(z, w, y, 8.0, normalize=True), class_softmax(z.clone(), w, y, 8.0, normalize=True)
        torch.testing.assert_close(found, wanted)


def test_long_samples_do_not_overflow():
    z, w, y = 150 * torch.nn.functional.normalize(torch.randn(6, 4)), torch.randn(5, 4), torch.arange(6) % 5
    logits = z.double() @ torch.nn.functional.normalize(w.double()).T
    _, far = class_softmax(z, w, y, 1.0)
    wanted = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    torch.testing.assert_close(far.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["supcon", "infonce", "da-supcon", "contrastive hadsell"])
@pytest.mark.parametrize("each", [1, 20])
def test_nothing_but_negatives_or_nothing_but_positives(name, each):
    z, y = batch(20, 5, each)
    if each == 20:
        compare(FORMS[name], z, y)
        return
    leaf = z.requires_grad_()
    found = evaluate_spec(lower(FORMS[name], z), leaf, y)
    assert not found.defined.any() and torch.isnan(found.mean)
    (gradient,) = torch.autograd.grad(found.values.sum(), leaf)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize(
    "loss",
    [SupCon(0.1), SupCon(0.01), SupCon(0.1, "in", difficulty=HARD), InfoNCE(0.5, 0.1, Importance(1.0)),
     InfoNCE(0.5, 0.1, Relative()), Contrastive(0.4, 1.3), NPair(), MultiSimilarity(2.0, 20.0, 0.3, difficulty=MINED),
     Circle(0.25, 32.0)],
    ids=lambda loss: f"{type(loss).__name__}-{type(loss.difficulty).__name__}-{loss.temperature}",
)  # fmt: skip
@pytest.mark.parametrize("d", [20])
def test_against_a_reference_set(loss, d):
    (z, y), (r, labels) = batch(37, d), batch(50, d, seed=5)
    if isinstance(loss, NPair):
        z, r = z / d**0.5, r / d**0.5
    biased = options(loss, z, r)
    form = lower(loss, z, r, biased)
    exact, leaves = [x.double().requires_grad_() for x in (z, r)], [x.clone().requires_grad_() for x in (z, r)]
    wide = None if biased is None else tuple(b.double() for b in biased)
    wanted = pair_loss(
        loss, exact[0], y, ref=(exact[1], labels), difficulty=loss.difficulty, biased=wide, engine="dense"
    )
    found = evaluate_spec(form, leaves[0], y, (leaves[1], labels), biased)
    assert torch.equal(found.defined, wanted.defined)
    torch.testing.assert_close(found.mean.double(), wanted.mean(), rtol=2e-5, atol=2e-5)
    for a, b in zip(torch.autograd.grad(found.mean, leaves), torch.autograd.grad(wanted.mean(), exact), strict=True):
        assert gap(a, b) < 2e-5


WITH_IDS = [SupCon(0.1), SupCon(0.1, "in", difficulty=LIVE), InfoNCE(0.5, 0.1, Importance(1.0)), InfoNCE(0.01),
            Contrastive(0.4, 1.3), SupCon(0.1, difficulty=MINED), Circle(0.25, 32.0)]  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "d"),
    mark_slow_except([(x, d) for x in WITH_IDS for d in (20, 261)], [*((x, 20) for x in WITH_IDS), (WITH_IDS[2], 261)]),
    ids=repr,
)
def test_pairs_of_equal_id_are_left_out(loss, d):
    """As of a queue that holds the batch, or of one rank's anchors among the embeddings of all."""
    z, y = batch(23, d)
    more, others = batch(30, d, seed=5)
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(53, generator=generator)
    ids, ref_ids = torch.arange(23) + 100, torch.cat([torch.arange(23) + 100, torch.arange(30)])[order]
    ids[5] = 999  # one that is not among the references
    r, labels = torch.cat([z, more])[order], torch.cat([y, others])[order]
    exact, leaves = [x.double().requires_grad_() for x in (z, r)], [x.clone().requires_grad_() for x in (z, r)]
    wanted = pair_loss(
        loss, exact[0], y, ref=(exact[1], labels, ref_ids), ids=ids, difficulty=loss.difficulty, engine="tiled"
    )
    inputs = collect_inputs(leaves[0], y, (leaves[1], labels, ref_ids), ids, None)
    found = evaluate_fused(loss, loss.difficulty, inputs)
    assert torch.equal(found.defined, wanted.defined)
    torch.testing.assert_close(found.mean.double(), wanted.mean(), rtol=2e-5, atol=2e-5)
    for a, b in zip(torch.autograd.grad(found.mean, leaves), torch.autograd.grad(wanted.mean(), exact), strict=True):
        assert gap(a, b) < 4e-5


def test_class_vectors_as_anchors():
    """Proxy-Anchor: most anchors have no positive and keep their second term."""
    torch.manual_seed(0)
    loss, (z, y) = ProxyAnchor(40, 12), (torch.randn(23, 12), torch.arange(23) % 9)
    pairs, anchors, classes, ref = loss._class_pairs(z, loss.weight.detach(), y)
    pairs = view_with(pairs, positive_factor=torch.tensor(40 / len(y.unique())))
    exact, leaves = ([x.to(t).requires_grad_() for x in (anchors, z)] for t in (torch.float64, torch.float32))
    wanted = pair_loss(pairs, exact[0], classes, ref=(exact[1], y), engine="dense")
    found = evaluate_spec(lower_loss(pairs, None, collect_inputs(anchors, classes, ref, None, None)),
                          leaves[0], classes, (leaves[1], y))  # fmt: skip
    assert found.defined.all()
    torch.testing.assert_close(found.values.double(), wanted.values, rtol=1e-5, atol=1e-5)
    by = torch.randn(40)
    for a, b in zip(torch.autograd.grad((found.values * by).sum(), leaves),
                    torch.autograd.grad((wanted.values * by).sum(), exact), strict=True):  # fmt: skip
        assert gap(a, b) < 1e-5


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("loss", [SupCon(0.1), InfoNCE(0.2), Contrastive(0.0, 1.0)], ids=repr)
def test_the_arguments_of_a_queue_are_fused(loss, momentum):
    """A queue that has wrapped around, against the batch itself or the keys of another encoder."""
    z, y = batch(23, 20)
    queue, keys = Queue(40, 20), batch(23, 20, seed=3)[0] if momentum else None
    for k in range(3):
        queue.push(*batch(17, 20, seed=5 + k))
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    wide = None if keys is None else keys.double()
    wanted = loss.output(exact, y, **queue.against(exact, y, keys=wide), engine="tiled").mean()
    options = queue.against(leaf, y, keys=keys)
    found = evaluate_fused(loss, None, collect_inputs(leaf, y, options["ref"], options["ids"], None))
    assert not isinstance(found, NoKernel)
    torch.testing.assert_close(found.mean.double(), wanted, rtol=2e-5, atol=2e-5)
    assert gap(torch.autograd.grad(found.mean, leaf)[0], torch.autograd.grad(wanted, exact)[0]) < 4e-5


def test_every_way_of_cutting_gives_the_same():
    z, y = batch(37, 20)
    plain = select_config("ieee", 32)
    once = dataclasses.replace(plain.forward, symmetric=False)
    cuts = [
        dataclasses.replace(plain, forward=once),
        dataclasses.replace(plain, scores_in_memory=True),
        dataclasses.replace(plain, forward=dataclasses.replace(once, block_n=32)),
        dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, block_m=32)),
        dataclasses.replace(plain, backward=dataclasses.replace(plain.backward, block_m=32, block_n=64)),
        dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, use_tma=True)),
        dataclasses.replace(plain, backward=dataclasses.replace(plain.backward, use_tma=True)),
        dataclasses.replace(plain, forward=dataclasses.replace(plain.forward, use_tma=True, rows_in_registers=True)),
        dataclasses.replace(plain, backward=dataclasses.replace(plain.backward, use_tma=True, rows_in_registers=True)),
        dataclasses.replace(plain, forward=once, one_sided=dataclasses.replace(once, block_n=64)),
    ]
    for cut in cuts:
        compare(SupCon(0.1), z, y, within=4e-6, config=cut)


@pytest.mark.parametrize(
    ("name", "d"),
    mark_slow_except(
        [(name, d) for name in ("supcon", "hard", "relative") for d in (20, 200)],
        [("supcon", 20), ("hard", 200), ("relative", 20)],
    ),
)
def test_sums_that_are_begun_anew_come_to_the_same(monkeypatch, name, d):
    monkeypatch.setattr(launch, "_caches", {})  # calls alike remember how often
    monkeypatch.setattr("mettle.pairs.kernels.function.flush_interval", lambda precision, tiles, block_n: 2)
    compare(FORMS[name], *batch(70, d), within=4e-6)


def test_long_sums_in_float32_accuracy_are_begun_anew():
    block_n = select_config("bf16x3", 128).backward.block_n
    assert flush_interval("bf16x3", 17, block_n) == 16 == SUMMED_COLUMNS // block_n
    assert flush_interval("bf16x3", 16, block_n) == 0
    assert flush_interval("fp16", 1000, block_n) == 0


def test_blocks_of_padding_look_at_no_columns(monkeypatch):
    """They once went through all of them, one after the other."""
    from mettle.pairs.kernels import forward

    asked, similar = [], forward.similarity_float32

    def seen(z, c, row, column, *rest):
        asked.append([x if isinstance(x, int) else x.handle.data.item() for x in (row, column)])
        return similar(z, c, row, column, *rest)

    z, y = batch(130, 20, each=2)
    form = lower(SupCon(0.1), z)
    assert form is not None
    monkeypatch.setattr(forward, "similarity_float32", seen)
    evaluate_spec(form, z, y)
    assert asked and max(row for row, _ in asked) < 130
    assert all(abs(row - column) <= 16 for row, column in asked)


@pytest.mark.parametrize("tiles", [3, 4, 30, 133, 157, 512, 5000])
@pytest.mark.parametrize("blocks", [1, 16, 264, 265, 313, 512, 1500])
@pytest.mark.parametrize("most", [1, 3, 64])
def test_parts_leave_no_multiprocessor_idle_for_long(monkeypatch, tiles, blocks, most):
    monkeypatch.setattr(config, "count_multiprocessors", lambda device: 132)
    config.balance_waves.cache_clear()

    def time(parts):
        return -(-blocks * parts // 264) * (tiles / parts + config.START_TILES)

    found = config.balance_waves(blocks, tiles, torch.device("cuda", 0), 2, most)
    allowed = range(1, max(1, min(most, tiles // config.LEAST_TILES, config.MOST_SPLITS)) + 1)
    assert found in allowed
    assert time(found) <= 1.02 * min(map(time, allowed))
    assert all(time(parts) > 1.02 * min(map(time, allowed)) for parts in range(1, found))


@pytest.mark.parametrize(
    ("d", "second"), [(16, 0), (33, 0), (65, 0), (128, 0), (129, 0), (256, 0), (128, 128), (64, 128)]
)
@pytest.mark.parametrize("precision", ["fp16", "bf16x3"])
def test_a_step_stays_within_its_memory(monkeypatch, d, second, precision):
    """Float32 rows, their operands, partial gradients and the result, as they lie in memory on the way back."""
    monkeypatch.setattr(config, "count_multiprocessors", lambda device: 132)
    config.balance_waves.cache_clear()
    wide, other = padded_head_dim(d), padded_head_dim(second) if second else 0
    for n in [*range(300, 60_000, 997), *range(60_000, 1_100_000, 19_997)]:
        padded = -(-n // 256) * 256
        tile = select_config(precision, wide, second_head_dim=other, large=n >= 16384).backward
        tiles, most = -(-n // tile.block_n), most_gradient_splits(d, wide, other, padded)
        splits = config.balance_waves(-(-n // tile.block_m), tiles, torch.device("cuda", 0), tile.programs_per_sm, most)
        operands = 4 if precision == "bf16x3" else 2
        taken = padded * (wide + other) * (4 + operands) + splits * padded * wide * 4 + n * d * operands + 52 * padded
        assert taken <= 8 * n * d * 4 + 64 * 2**20


def test_deterministic_runs_are_identical():
    z, y = batch(70, 20)
    form = lower(SupCon(0.1), z)
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            leaf = z.clone().requires_grad_()
            mean = evaluate_spec(form, leaf, y).mean
            mean.backward()
            found.append((mean.detach(), leaf.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


FAMILIES = ["supcon", "da-supcon in", "infonce", "hard", "relative", "contrastive hadsell"]


@pytest.mark.parametrize(
    ("name", "bad"),
    mark_slow_except(
        [(name, bad) for name in FORMS for bad in ("nan", "inf")],
        [*((name, "nan") for name in FORMS), *((name, "inf") for name in FAMILIES)],
    ),
)
def test_a_broken_embedding_never_gives_a_finite_loss(name, bad):
    z, y = batch(20, 5)
    z[7, 2] = float(bad)
    biased = options(FORMS[name], z)
    form = lower(FORMS[name], z, biased=biased)
    assert not torch.isfinite(evaluate_spec(form, z, y, biased=biased).mean)


@pytest.mark.parametrize("name", ["debiased", "hard", "relative"])
@pytest.mark.parametrize("where", ["alone", "second"])
def test_a_broken_row_that_only_others_see(name, where):
    """One that has no positives, or is broken in the second encoder only: a floor must not hide it."""
    loss, (z, y) = FORMS[name], batch(21, 5)
    biased = options(loss, z)
    if where == "alone":
        y[7] = -5
        z[7, 2] = float("nan")
    elif biased is None:
        return
    else:
        biased[0][7, 2] = float("nan")
    biased = biased and (biased[0], biased[0])
    form = lower(loss, z, biased=biased)
    assert not torch.isfinite(evaluate_spec(form, z, y, biased=biased).mean)


FAR = [(0.1, "fp16"), (0.01, "ieee"), (0.005, "ieee")]


@pytest.mark.parametrize(
    ("n", "d", "temperature", "precision"),
    mark_slow_except(
        [(*shape, *how) for shape in ((30, 8), (37, 261)) for how in FAR],
        [*((30, 8, *how) for how in FAR), (37, 261, 0.01, "ieee")],
    ),
)
def test_negatives_that_are_far_away_leave_the_gradient_finite(n, d, temperature, precision):
    """Two opposite classes: what a negative adds is tiny, and a row that is not there would add 1."""
    z, y = batch(n, d, n // 2 + 1)
    z = torch.where((y == y[0])[:, None], z.abs() + 1, -z.abs() - 1)
    form = lower(SupCon(temperature), z)
    leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    (found,) = torch.autograd.grad(evaluate_spec(form, leaf, y, precision=precision).mean, leaf)
    (wanted,) = torch.autograd.grad(pair_loss(SupCon(temperature), exact, y, engine="dense").mean(), exact)
    assert torch.isfinite(found).all()
    assert gap(found, wanted) < (2e-2 if precision == "fp16" else 1e-3)


@pytest.mark.parametrize(("precision", "scale"), [("fp16", 64.0), ("ieee", 300.0)])
def test_classes_that_are_far_away_leave_the_gradient_finite(precision, scale):
    """As those of a model that has learned its few classes: close to the corners of a simplex."""
    w = torch.eye(10) - 0.1 + 0.01 * torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 10
    z = w[y] + 0.01 * torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
    leaves = [z.requires_grad_(), w.requires_grad_()]
    target, far = class_softmax(z, w, y, scale, normalize=True, precision=precision)
    assert (far < 0).all()
    for g in torch.autograd.grad((far - target).sum(), leaves):
        assert torch.isfinite(g).all()


@pytest.mark.parametrize(("d", "other"), mark_slow_except([(20, 300), (300, 20), (5, 520)], [(20, 300), (300, 20)]))
def test_encoders_of_unlike_widths(d, other):
    z, y = batch(21, d)
    loss, second = FORMS["relative"], torch.randn(21, other, generator=torch.Generator().manual_seed(4))
    form = lower(loss, z, biased=(second, second))
    found = evaluate_spec(form, z, y, biased=(second, second))
    wanted = pair_loss(loss, z.double(), y, difficulty=loss.difficulty, engine="dense", biased=second.double())
    torch.testing.assert_close(found.mean.double(), wanted.mean(), rtol=2e-5, atol=2e-5)


def test_rows_without_direction_get_no_gradient():
    z, y = batch(20, 5)
    z[3] = 0
    z[5] *= 1e-20
    z[6] *= 1e20
    compare(SupCon(0.1), z, y)


def test_a_second_derivative_is_refused():
    z, y = batch(20, 5)
    leaf = z.requires_grad_()
    found = evaluate_spec(lower(SupCon(0.1), z), leaf, y)
    with pytest.raises(InputError, match="first derivatives only"):
        torch.autograd.grad(found.mean, leaf, create_graph=True)


@pytest.mark.parametrize(
    "loss",
    [SupCon(0.1, neg_weight="penalty"), SupCon(0.1, difficulty=SemiHard()), SupCon(0.1, difficulty=Hardest()),
     SupCon(0.1, difficulty=Product(HARD, HARD)), SupCon(0.005, difficulty=Importance(1.0)),
     InfoNCE(0.5, 0.1, Relative("distance")), InfoNCE(0.5, 0.1, LIVE), Triplet(), LiftedStructure(),
     Contrastive(normalise=False), NPair(difficulty=HARD)],
    ids=repr,
)  # fmt: skip
def test_what_has_no_fused_form_is_told(loss):
    z, _ = batch(20, 5)
    biased = (z, z) if isinstance(loss.difficulty, Relative) else None
    assert lower(loss, z, biased=biased) is None


def test_no_fused_form_for_double_precision_or_a_missing_second_encoder():
    z, _ = batch(20, 5)
    assert lower(SupCon(0.1), z.double()) is None
    assert lower(InfoNCE(0.5, 0.1, Relative()), z) is None


def test_precision_follows_input_and_temperature():
    warm, cold = (lower(SupCon(t), torch.zeros(2, 2)) for t in (0.1, 0.02))
    assert choose_precision(warm, torch.float32) == choose_precision(cold, torch.bfloat16) == "bf16x3"
    assert choose_precision(warm, torch.bfloat16) == choose_precision(warm, torch.float16) == "fp16"


@pytest.mark.parametrize(
    ("n", "d", "each", "loss"),
    cover_axes(
        [(37, 20, 4), (20, 300, 3), (20, 5, 20), (6, 5, 1)],
        [Triplet(0.3, "hardest"), Triplet(0.3, difficulty=Hardest()), Triplet(0.3, "hardest", True, True)],
    ),
    ids=repr,
)
def test_batch_hard_equals_dense(n, d, each, loss):
    z, y = batch(n, d, each)
    assert lower_loss(loss, loss.difficulty, collect_inputs(z, y, None, None, None)) == BatchHardSpec()
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    wanted, rows = loss.output(exact, y, engine="dense"), batch_hard_rows(loss, leaf, y)
    defined = loss.is_defined(rows)
    assert torch.equal(defined, wanted.defined)
    a, b = torch.where(defined, loss.row_loss(rows), 0), torch.where(defined, wanted.values, 0)
    torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
    (a,), (b,) = torch.autograd.grad(a.sum(), leaf), torch.autograd.grad(b.sum(), exact)
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_batch_hard_against_a_reference_set():
    (z, y), (r, labels), loss = batch(37, 20), batch(50, 20, seed=5), Triplet(0.3, "hardest")
    rows = batch_hard_rows(loss, z, y, (r, labels))
    wanted = pair_loss(loss, z.double(), y, ref=(r.double(), labels), engine="dense")
    found = torch.where(loss.is_defined(rows), loss.row_loss(rows), 0).double()
    torch.testing.assert_close(found, torch.where(wanted.defined, wanted.values, 0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "each"), [(2, 1), (37, 4), (50, 50)])
def test_counts_of_scores_are_exact(n, each):
    z, y = batch(n, 7, each)
    genuine, impostor = score_histogram(z, y, bins=50)
    unit = torch.nn.functional.normalize(z.double())
    i, j = torch.triu_indices(n, n, 1)
    at = ((unit @ unit.T)[i, j].add(1).mul(25)).floor().long().clamp(0, 49)
    same = y[i] == y[j]
    assert torch.equal(genuine, torch.bincount(at[same], minlength=50))
    assert torch.equal(impostor, torch.bincount(at[~same], minlength=50))


CHUNKED = list(product((16.0, 64.0, 100.0), (False, True), (torch.float32, torch.float16)))


@pytest.mark.parametrize(
    ("scale", "unit", "kind"),
    mark_slow_except(
        CHUNKED,  # every two of the three settings meet in a quick case
        [case for k, case in enumerate(CHUNKED) if k in (0, 3, 5, 6, 8, 11)],
    ),
)
def test_own_class_and_the_others_over_chunks_of_classes(monkeypatch, scale, unit, kind):
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.FORWARD_CLASSES", 40)
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.SCORES_IN_MEMORY", 0)
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.LEAST_CLASSES", 24)
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(21, 20, generator=generator), torch.randint(0, 75, (21,), generator=generator)
    y[3] = y[4]  # two samples of one class
    w = (3 * torch.randn(75, 20, generator=generator)).to(kind)
    z = z if unit else torch.nn.functional.normalize(z)
    exact, leaves = [x.double().requires_grad_() for x in (z, w)], [x.clone().requires_grad_() for x in (z, w)]
    cosines = (torch.nn.functional.normalize(exact[0]) if unit else exact[0]) @ torch.nn.functional.normalize(
        exact[1]
    ).T
    target = cosines.gather(1, y[:, None])[:, 0]
    wanted = target, (scale * cosines).scatter(1, y[:, None], -torch.inf).logsumexp(1)
    found = class_softmax(*leaves, y, scale, normalize=unit)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=2e-5)
    by = torch.randn(2, 21, generator=generator)
    for a, b in zip(
        torch.autograd.grad((torch.stack(found) * by).sum(), leaves),
        torch.autograd.grad((torch.stack(wanted) * by).sum(), exact),
        strict=True,
    ):
        assert gap(a, b) < (5e-6 if a.dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(
    ("classes", "d", "waiting"),
    [(192, 64, [True, True]), (256, 64, [True, True]), (200, 64, [True, False]), (192, 40, [False, False])],
)
def test_normalised_vectors_wait_where_their_gradient_will_be(monkeypatch, classes, d, waiting):
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.FORWARD_CLASSES", 128)
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.SCORES_IN_MEMORY", 0)
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.LEAST_CLASSES", 64)
    kept, room = [], GradientBuffer.allocate

    def told(self, *args):
        kept.append(found := room(self, *args))
        return found

    monkeypatch.setattr(GradientBuffer, "allocate", told)
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, classes, (21,), generator=generator)
    z, w = (x.requires_grad_() for x in (torch.randn(21, d), torch.randn(classes, d)))
    found, wanted = [], class_reductions(z.double(), w.double(), y, 16.0, unit_features=True)
    rows = class_softmax(z, w, y, 16.0, normalize=True)
    for out in (rows, rows, wanted):  # a second time back has nothing left to read
        found.append(torch.autograd.grad(out[0].sum() + 2 * out[1].sum(), [z, w], retain_graph=True))
    assert [x is not None for x in kept] == waiting
    for a, b, exact in zip(*found, strict=True):
        assert torch.equal(a, b) and gap(a, exact.double()) < 5e-6
    with torch.no_grad():  # and where no gradient will be, nothing is held for one
        class_softmax(z, w, y, 16.0, normalize=True)
    assert len(kept) == 2


def test_a_way_back_that_broke_off_can_be_gone_again(monkeypatch):
    for name, value in {"FORWARD_CLASSES": 128, "SCORES_IN_MEMORY": 0, "LEAST_CLASSES": 64}.items():
        monkeypatch.setattr(f"mettle.pairs.kernels.class_softmax.{name}", value)
    z, w, y = torch.randn(9, 64, requires_grad=True), torch.randn(256, 64, requires_grad=True), torch.arange(9) * 20
    rows, project, calls = class_softmax(z, w, y, 16.0, normalize=True), ClassSoftmaxCall.normalize_classes_backward, []

    def full(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise torch.cuda.OutOfMemoryError("no room")
        project(self, *args)

    monkeypatch.setattr(ClassSoftmaxCall, "normalize_classes_backward", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.autograd.grad(rows[1].sum(), [z, w], retain_graph=True)
    again = torch.autograd.grad(rows[1].sum(), [z, w])
    fresh = torch.autograd.grad(class_softmax(z, w, y, 16.0, normalize=True)[1].sum(), [z, w])
    assert len(calls) == 11 and all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))


def test_products_of_two_halves_in_parts_are_the_whole_product(monkeypatch):
    monkeypatch.setattr("mettle.pairs.kernels.backward.SUMMED_COLUMNS", 10)
    generator = torch.Generator().manual_seed(0)
    z = prepare_operands(torch.randn(37, 20, generator=generator), torch.arange(37), None, "bf16x3", normalize=True)
    h = torch.randn(16, 30, generator=generator)
    high = h.bfloat16()
    g = torch.ones(16, z.head_dim)
    _add_product(g, high, (h - high.float()).bfloat16(), z, slice(15, 45), "bf16x3")  # of 45 columns there are 37
    assert gap(g, 1 + h[:, :22].double() @ (z.hi.double() + z.lo.double())[15:37]) < 1e-5


def test_a_single_class_has_no_others():
    z, w = torch.randn(5, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    target, far = class_softmax(z, w, torch.zeros(5, dtype=torch.long), 8.0, normalize=True)
    assert torch.isfinite(target).all() and (far == -torch.inf).all()
    for g in torch.autograd.grad(target.sum() + far.masked_fill(far == -torch.inf, 0).sum(), [z, w]):
        assert torch.isfinite(g).all()


@pytest.mark.parametrize(
    ("scale", "unit", "kind", "many"),
    mark_slow_except(
        [
            (s, u, k, m)
            for s in (16.0, 300.0)
            for u in (True, False)
            for k in (torch.float32, torch.float16)
            for m in (2, 3)
        ],
        [(16.0, True, torch.float32, 3), (300.0, False, torch.float16, 2)],
    ),
)
def test_the_nearest_vector_of_a_class_over_chunks_of_classes(monkeypatch, scale, unit, kind, many):
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.SCORES_IN_MEMORY", 0)
    monkeypatch.setattr("mettle.pairs.kernels.class_softmax.LEAST_CLASSES", 64)
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(21, 20, generator=generator), torch.randint(0, 75, (21,), generator=generator)
    y[3] = y[4]  # two samples of one class
    w = (3 * torch.randn(75 * many, 20, generator=generator)).to(kind)
    z = z if unit else torch.nn.functional.normalize(z)
    exact, leaves = [x.double().requires_grad_() for x in (z, w)], [x.clone().requires_grad_() for x in (z, w)]
    unit_z = torch.nn.functional.normalize(exact[0]) if unit else exact[0]
    cosines = (unit_z @ torch.nn.functional.normalize(exact[1]).T).view(21, 75, many).amax(2)
    wanted = cosines.gather(1, y[:, None])[:, 0], (scale * cosines).scatter(1, y[:, None], -torch.inf).logsumexp(1)
    found = class_softmax(*leaves, y, scale, normalize=unit, vectors_per_class=many)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=3e-5)
    by = torch.randn(2, 21, generator=generator)
    for a, b in zip(
        torch.autograd.grad((torch.stack(found) * by).sum(), leaves),
        torch.autograd.grad((torch.stack(wanted) * by).sum(), exact),
        strict=True,
    ):
        assert gap(a, b) < (max(5e-6, 1e-7 * scale) if a.dtype == torch.float32 else 1e-3)


def test_one_class_of_several_vectors_has_no_others():
    z, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    target, far = class_softmax(z, w, torch.zeros(5, dtype=torch.long), 8.0, normalize=True, vectors_per_class=3)
    assert torch.isfinite(target).all() and (far == -torch.inf).all()
    for g in torch.autograd.grad(target.sum() + far.masked_fill(far == -torch.inf, 0).sum(), [z, w]):
        assert torch.isfinite(g).all()


MARGINS = [ArcFace(9, 4, margin=0.5, mode=mode) for mode in get_args(Mode)]
MARGINS += [ArcFace(9, 4, 8.0, 0.3, subtract=0.1), CosFace(9, 4), NormFace(9, 4), SubCenterArcFace(9, 4)]


@pytest.mark.parametrize("loss", MARGINS, ids=repr)
def test_a_declared_margin_is_that_of_the_loss(loss):
    """Law: where a loss declares a margin, the kernel gives its value and slopes, also at both ends of the range."""
    c = torch.cat([torch.linspace(-0.999, 0.999, 41), torch.tensor([1.0, -1.0, torch.nan])])
    far = torch.linspace(-20.0, 90.0, 44).roll(7)
    far[5] = -torch.inf

    def plain(own, others):
        return loss.sample_loss(others, loss.logit(own, own))

    found_leaves, leaves = ([x.clone().requires_grad_() for x in (c, far)] for _ in range(2))
    found, wanted = margin_loss(*found_leaves, declared_margin(loss), plain), plain(*leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    by = torch.linspace(0.5, 2, len(c))
    gradients = torch.autograd.grad((found * by).sum(), found_leaves), torch.autograd.grad((wanted * by).sum(), leaves)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a[:-1], b[:-1], rtol=2e-4, atol=1e-4)
    assert found[-1].isnan()


def test_a_margin_that_is_overridden_is_not_declared():
    class Wider(ArcFace):
        def target(self, cosine):
            return super().target(cosine) - 0.1

    class Named(ArcFace):
        pass

    assert declared_margin(Named(9, 4)) == declared_margin(ArcFace(9, 4)) is not None
    assert declared_margin(Wider(9, 4)) is None and declared_margin(ArcFace(9, 4, mode="none", multiply=2.0)) is None


def test_a_margin_can_be_differentiated_twice():
    c, far = torch.linspace(-0.9, 0.9, 7, requires_grad=True), torch.zeros(7)
    loss = ArcFace(9, 4, 4.0, mode="none")

    def plain(own, others):
        return loss.sample_loss(others, loss.logit(own, own))

    values = margin_loss(c, far, declared_margin(loss), plain)
    (first,) = torch.autograd.grad(values.sum(), c, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), c)
    step = 1e-3
    slopes = []
    for shift in (step, -step):
        moved = (c.detach() + shift).requires_grad_()
        slopes.append(torch.autograd.grad(plain(moved, far).sum(), moved)[0])
    torch.testing.assert_close(second, (slopes[0] - slopes[1]) / (2 * step), rtol=2e-2, atol=2e-2)


def test_class_vectors_changed_in_place_are_noticed():
    z, w = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    _, far = class_softmax(z, w, torch.arange(5), 8.0)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        far.sum().backward()


def test_class_vectors_that_do_not_fit_are_refused():
    z, w, y = torch.randn(3, 4), torch.randn(5, 6), torch.zeros(3, dtype=torch.long)
    with pytest.raises(InputError, match="class vectors must be"):
        class_softmax(z, w, y, 16.0)


@pytest.mark.parametrize(("each", "kind"), [(3, torch.int64), (40, torch.int32), (40, torch.uint8)])
@pytest.mark.parametrize("sort", [False, True])
def test_large_batches_are_grouped_or_sorted_instead_of_ranked(monkeypatch, each, kind, sort):
    monkeypatch.setattr("mettle.pairs.kernels.operands.COUNTED_ROWS", 0)
    z, y = batch(70, 20, each)
    y = y if kind == torch.int64 else torch.where(y > 100, 0, y).to(kind)
    torch.use_deterministic_algorithms(sort)
    try:
        compare(SupCon(0.1, difficulty=HARD), z, y, within=4e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_groups_keep_each_label_together(monkeypatch):
    """Labels that share their low or high bits, the smallest and the largest, many in one place of the table."""
    monkeypatch.setattr("mettle.pairs.kernels.operands.COUNTED_ROWS", 0)
    ends = torch.iinfo(torch.int64)
    names = torch.cat([torch.tensor([ends.min, ends.max, -1, 0]), torch.arange(1, 60) << 40, torch.arange(1, 60)])
    y = names[torch.randint(0, len(names), (300,))]
    rows = prepare_operands(torch.randn(300, 4), y, None, "ieee", True, hash_grouped=True)
    order, lo, hi = (x[:300].long() for x in (rows.order, rows.positive_begin, rows.positive_end))
    assert torch.equal(order.sort().values, torch.arange(300))
    found = y[order]
    for i, (a, b) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        assert a <= i < b
        assert (found[a:b] == found[i]).all()
        assert b - a == int((y == found[i]).sum())
    assert (lo.diff() >= 0).all()


def test_large_batches_find_their_positives_among_references(monkeypatch):
    """Labels far apart, of which some are on one side only, down to the smallest and up to the largest."""
    monkeypatch.setattr("mettle.pairs.kernels.operands.COUNTED_ROWS", 0)
    z, r = torch.randn(37, 20), torch.randn(41, 20)
    ends = torch.iinfo(torch.int64)
    names = torch.tensor([ends.min, -(1 << 40), -1, 0, 7, 1 << 33, (1 << 33) + 1, ends.max])
    y, labels = names[torch.randint(0, 8, (37,))], names[torch.randint(1, 7, (41,))]
    wanted = pair_loss(SupCon(0.1), z.double(), y, ref=(r.double(), labels), engine="dense")
    found = evaluate_spec(lower(SupCon(0.1), z, ref=r), z, y, ref=(r, labels))
    assert torch.equal(found.defined, wanted.defined)
    torch.testing.assert_close(found.mean.double(), wanted.mean(), rtol=1e-5, atol=1e-5)


def test_what_the_engine_asks():
    z, y = batch(20, 5)
    r, labels = batch(20, 5, seed=2)
    refused = evaluate_fused(SupCon(0.1), None, collect_inputs(z.double(), y, None, None, None))
    assert refused == NoKernel("embeddings are float64, the kernels compute in float32 at most")
    refused = evaluate_fused(SupCon(0.1), None, collect_inputs(z, y, (r, labels, y), y, None))
    assert refused == NoKernel("an id occurs twice in the reference set, or with two labels")
    found = evaluate_fused(SupCon(0.1), None, collect_inputs(z, y, (r, labels, y), None, None))
    wanted = SupCon(0.1).output(z, y, ref=(r, labels), engine="dense")
    torch.testing.assert_close(found.mean, wanted.mean(), rtol=1e-5, atol=1e-5)
    found = evaluate_fused(Triplet(0.2, "hardest"), None, collect_inputs(z, y, None, None, None))
    assert found.mean is None
    torch.testing.assert_close(found.values, Triplet(0.2, "hardest").output(z, y, engine="dense").values)
    z[3, 1] = float("nan")
    assert torch.isnan(
        evaluate_fused(Triplet(0.2, "hardest"), None, collect_inputs(z, y, None, None, None)).values
    ).all()
    found = evaluate_fused(InfoNCE(0.5, 0.1, Relative()), Relative(), collect_inputs(r, y, None, None, z.nan_to_num()))
    wanted = InfoNCE(0.5, 0.1, Relative()).output(r, y, biased=z.nan_to_num(), engine="dense")
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-5, atol=1e-5)


def test_two_devices_are_refused():
    z, y = batch(20, 5)
    form = lower(SupCon(0.1), z)
    with pytest.raises(InputError, match="use one"):
        evaluate_spec(form, z, y.to("meta"))


@pytest.mark.parametrize("scale", [8.0, 200.0])
def test_own_class_and_the_others_in_one_backward(scale):
    from mettle.pairs.class_softmax import class_reductions

    torch.manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(21, 20)).requires_grad_()
    w, y = torch.randn(50, 20, requires_grad=True), torch.randint(0, 50, (21,))
    mix = torch.randn(2, 21)
    found, wanted = class_softmax(z, w, y, scale, False), class_reductions(z, w, y, scale)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad((torch.stack(found) * mix).sum(), [z, w]),
        torch.autograd.grad((torch.stack(wanted) * mix).sum(), [z, w]),
        strict=True,
    ):
        assert (a - b).norm() / b.norm() < 1e-5


LEARNED = {
    "supcon": SupCon(0.2, learn_temperature=True),
    "supcon in": SupCon(0.2, "in", learn_temperature=True),
    "da-supcon": SupCon(0.2, difficulty=HARD, learn_temperature=True),
    "infonce": InfoNCE(0.5, learn_temperature=True),
    "relative raw": InfoNCE(0.5, difficulty=Relative("raw"), learn_temperature=True),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_temperature_has_its_gradient(name):
    loss = LEARNED[name]
    z, y = batch(37, 20)
    compare(loss, z, y, within=4e-6)
    biased = options(loss, z)
    found = evaluate_spec(lower(loss, z, biased=biased), z, y, biased=biased)
    weights = torch.randn(len(z), generator=torch.Generator().manual_seed(3))
    second = None if biased is None else biased[0]
    dense = pair_loss(loss, z, y, difficulty=loss.difficulty, biased=second, engine="dense")
    sums = [(torch.where(x.defined, x.values, 0) * weights).sum() for x in (found, dense)]
    for a, b in ((found.mean, dense.mean()), sums):
        (ga,), (gb,) = (torch.autograd.grad(x, loss.log_temperature, retain_graph=True) for x in (a, b))
        torch.testing.assert_close(ga, gb, rtol=2e-5, atol=1e-6)


def test_a_learned_temperature_against_a_reference_set():
    loss, (z, y), (r, labels) = LEARNED["da-supcon"], batch(37, 20), batch(50, 20, seed=5)
    found = evaluate_spec(lower(loss, z, r), z, y, (r, labels)).mean
    dense = pair_loss(loss, z, y, ref=(r, labels), difficulty=loss.difficulty, engine="dense").mean()
    (a,), (b,) = (torch.autograd.grad(x, loss.log_temperature) for x in (found, dense))
    torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("d", [20, 261])
def test_numbers_may_lie_on_the_device(d):
    """Thresholds as tensors, which kernels read where they are, give what numbers give."""
    fixed = AdaptiveThreshold(negative=0.1).kernel_weights()
    names = ("negative_slope", "negative_threshold", "positive_slope", "positive_threshold")
    moved = dataclasses.replace(fixed, **{name: torch.tensor(getattr(fixed, name)) for name in names})
    (z, y), loss = batch(37, d), SupCon(0.1, difficulty=HARD)
    results = []
    for weights in (fixed, moved):
        leaf = z.clone().requires_grad_()
        mean = evaluate_spec(lower_spec(loss.kernel_spec(weights)), leaf, y).mean
        results.append((mean, *torch.autograd.grad(mean, leaf)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mean_and_gradient_without_autograd(dtype):
    """As a compiled function has them: in float32 whatever the embeddings are in, on the same launch cache."""
    (z, y), loss = batch(37, 20), SupCon(0.1)
    leaf = z.to(dtype).requires_grad_()
    mean = evaluate_spec(lower(loss, z), leaf, y).mean
    (expected,) = torch.autograd.grad(mean, leaf)
    found, gradient, defined = mean_and_gradient(lower(loss, z), leaf.detach(), y, True)
    torch.testing.assert_close(found, mean.detach())
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.to(dtype), expected)
    assert int(defined.sum()) == 36
