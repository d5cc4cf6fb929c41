"""The fused kernels on the device, against float64: precisions x losses x difficulties x ragged shapes x temperatures.

``pytest tests/gpu`` runs one after another; ``python tests/gpu/test_kernel_accuracy.py 14`` runs the matrix in 14
processes: most of the time is compiling.
"""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mettle.difficulty import Hardest, Importance, MultiSimilarityMining, Relative, Threshold
from mettle.losses import Circle, Contrastive, InfoNCE, MultiSimilarity, NPair, SupCon, Triplet
from mettle.pairs import pair_loss
from mettle.pairs.kernels import LoweredSpec, available, lower_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the kernels' logic is tested in tests/pairs"),
    pytest.mark.skipif(not available(), reason="triton is not installed"),
]

LOSSES = {
    "supcon": SupCon(0.1),
    "supcon in": SupCon(0.1, "in"),
    "da-supcon": SupCon(0.1, difficulty=Threshold(negative=0.1)),
    "da-supcon live": SupCon(0.1, difficulty=Threshold(negative=0.1, detach=False)),
    "infonce": InfoNCE(0.5),
    "debiased": InfoNCE(0.5, 0.1),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
    "hard, other power": InfoNCE(0.5, 0.1, Importance(0.7)),
    "relative": InfoNCE(0.5, 0.1, Relative()),
    "relative raw": InfoNCE(0.5, 0.1, Relative("raw")),
    "contrastive": Contrastive(0.4, 1.3),
    "multi-similarity": MultiSimilarity(),
    "circle": Circle(),
    "supcon mined": SupCon(0.1, difficulty=MultiSimilarityMining()),
    "multi-similarity mined": MultiSimilarity(difficulty=MultiSimilarityMining()),
}
ONCE = ("supcon", "da-supcon", "hard", "relative", "relative raw", "contrastive", "multi-similarity", "circle")
MANY = ("supcon", "da-supcon live", "hard", "relative", "relative raw", "multi-similarity", "circle", "supcon mined")
SHAPES = [(1000, 128), (517, 64), (769, 100), (1025, 256), (300, 384), (260, 512), (200, 1024), (4097, 128)]
PRECISIONS = ("bf16x3", "fp16")
TEMPERATURES = [1.0, 0.2, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005]


def matrix():
    """(name, loss, n, d, precision, how much embeddings have in common)."""
    found = [(name, loss, 1000, 128, precision) for name, loss in LOSSES.items() for precision in PRECISIONS]
    found += [(f"supcon {n}x{d}", SupCon(0.1), n, d, precision) for n, d in SHAPES for precision in PRECISIONS]
    found += [(f"da-supcon {n}x{d}", LOSSES["da-supcon"], n, d, "bf16x3") for n, d in SHAPES[1:6]]
    # From 8192 rows on each pair is visited once, for both of its ends; wide embeddings take several blocks of h.
    found += [(f"{name}, once", LOSSES[name], 9001, 128, precision) for name in ONCE for precision in PRECISIONS]
    found += [
        (f"supcon, once, {d} wide", SupCon(0.1), 9001, d, precision) for d in (64, 256) for precision in PRECISIONS
    ]
    found += [(f"supcon, {n}x512", SupCon(0.1), n, 512, precision) for n in (9001, 17000) for precision in PRECISIONS]
    found += [("relative, 9001x512", LOSSES["relative"], 9001, 512, "bf16x3")]
    # From 16384 rows on blocks come through tensor descriptors.
    found += [(f"{name}, many", LOSSES[name], 17000, 128, precision) for name in MANY for precision in PRECISIONS]
    found += [
        (f"supcon, many, {d} wide", SupCon(0.1), 17000, d, precision) for d in (64, 256) for precision in PRECISIONS
    ]
    found += [(f"supcon at {t}", SupCon(t), 1000, 128, "bf16x3") for t in TEMPERATURES]
    found += [(f"supcon at {t}", SupCon(t), 1000, 128, "fp16") for t in TEMPERATURES if t >= 0.05]
    found += [(f"infonce at {t}", InfoNCE(t, 0.1), 600, 64, "bf16x3") for t in TEMPERATURES]
    found = [(*case, 0.0) for case in found if not (case[4] == "fp16" and isinstance(case[1], Contrastive))]
    # All cosines near 0.9, as early in a training: what negatives and positives send is large and nearly the same.
    sizes = ((6000, 128), (17000, 64), (17000, 128), (17000, 256), (17000, 512))
    found += [
        (f"supcon, in common, {d}", SupCon(0.1), n, d, precision, 5.0) for n, d in sizes for precision in PRECISIONS
    ]
    return [*found, ("hard, in common", LOSSES["hard"], 17000, 128, "bf16x3", 5.0)]


def bound(loss, precision, common):
    """Relative error of the gradient that is accepted: what the operands' precision gives, times how steep a loss is.

    Of mined pairs, one that lies at a threshold up to rounding may be in on one side and out on the other.
    """
    steepness = {MultiSimilarity: 50.0, Circle: 112.0}.get(type(loss), 1 / loss.temperature)
    found = (3e-6 if precision == "bf16x3" else 1.5e-4) * max(1.0, 0.1 * steepness) * (12 if common else 1)
    return found + (2e-2 if isinstance(loss.difficulty, MultiSimilarityMining) else 0)


def lower(loss, z, ref=None, biased=None):
    """What the kernels compute for a loss, None where they cannot."""
    found = lower_loss(loss, loss.difficulty, SimpleNamespace(z=z, ref=ref, biased=biased, self_column=None))
    return found if isinstance(found, LoweredSpec) else None


def batch(n, d, seed, each=4, common=0.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    y = (torch.arange(n, device="cuda") // each)[torch.randperm(n, generator=generator, device="cuda")]
    centres = torch.randn(n // each + 1, d, generator=generator, device="cuda")
    all_of_them = common * torch.randn(1, d, generator=generator, device="cuda")
    return centres[y] + 1.5 * torch.randn(n, d, generator=generator, device="cuda") + all_of_them, y


def reference(n):
    """Processes share the memory of the device: large batches by tiles, which elsewhere are held against the dense."""
    return "dense" if n <= 10000 else "tiled"


def errors(loss, n, d, precision, seed, common=0.0):
    """Relative error of mean and gradient."""
    from mettle.pairs.kernels.function import evaluate_spec

    z, y = batch(n, d, seed, common=common)
    biased = second = None
    if isinstance(loss.difficulty, Relative):
        second = torch.randn(n, 64, device="cuda")
        biased = (second, second)
    form = lower(loss, z, biased=biased)
    assert form is not None
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    double = None if second is None else second.double()
    wanted = pair_loss(loss, exact, y, difficulty=loss.difficulty, engine=reference(n), biased=double)
    found = evaluate_spec(form, leaf, y, biased=biased, precision=precision)
    unlike = float((found.defined != wanted.defined).float().mean())
    assert unlike <= (1e-3 if isinstance(loss.difficulty, MultiSimilarityMining) else 0)
    (a,), (b,) = torch.autograd.grad(found.mean, leaf), torch.autograd.grad(wanted.mean(), exact)
    value = float((found.mean.detach() - wanted.mean().detach()).abs() / wanted.mean().detach().abs().clamp(min=1e-3))
    return value, float((a - b).norm() / b.norm()) / conditioned(loss, z, y, b)


def conditioned(loss, z, y, exact):
    """How much worse than usual a gradient may be: a debiased loss subtracts, and near its clamp that amplifies.

    Measured in float64, by what a rounding of the embeddings to float32 does there.
    """
    if not getattr(loss, "prior", 0):
        return 1.0
    if isinstance(loss.difficulty, Relative):
        return 1.0
    generator, worst = torch.Generator("cuda").manual_seed(0), 1.0
    for _ in range(5):  # which anchors come near the clamp is a matter of luck
        noise = torch.randn(z.shape, generator=generator, device="cuda", dtype=torch.float64)
        moved = (z.double() * (1 + 6e-8 * noise)).requires_grad_()
        (g,) = torch.autograd.grad(loss(moved, y, engine=reference(len(z))), moved)
        worst = max(worst, float((g - exact).norm() / exact.norm()) / 6e-8)
    return worst


def fresh():
    return int.from_bytes(os.urandom(4), "little")


@pytest.mark.parametrize("case", matrix(), ids=lambda case: f"{case[0]}-{case[4]}")
def test_accuracy(case):
    _, loss, n, d, precision, common = case
    seed, most = fresh(), bound(loss, precision, common)
    value, gradient = errors(loss, n, d, precision, seed, common)
    assert gradient < most, f"gradient error {gradient:.1e} with seed {seed}"
    assert value < 10 * most, f"error of the mean {value:.1e} with seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_of_every_type(dtype):
    from mettle.pairs.kernels.function import evaluate_spec

    z, y = batch(700, 128, fresh())
    z = z.to(dtype)
    form = lower(SupCon(0.1), z)
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    a = torch.autograd.grad(evaluate_spec(form, leaf, y).mean * 1000, leaf)[0]  # above the smallest float16
    b = torch.autograd.grad(SupCon(0.1)(exact, y, engine="dense") * 1000, exact)[0]
    assert a.dtype == dtype
    assert float((a - b).norm() / b.norm()) < {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("loss", [SupCon(0.1), SupCon(0.01), InfoNCE(0.5, 0.1, Importance(1.0)), NPair()], ids=repr)
@pytest.mark.parametrize(("n", "m"), [(700, 1100), (1500, 20000)])
def test_a_reference_set(loss, n, m):
    from mettle.pairs.kernels.function import evaluate_spec

    (z, y), (r, labels) = batch(n, 128, fresh()), batch(m, 128, fresh())
    if isinstance(loss, NPair):
        z, r = z / 16, r / 16
    form = lower(loss, z, ref=r)
    exact, leaves = [x.double().requires_grad_() for x in (z, r)], [x.clone().requires_grad_() for x in (z, r)]
    wanted = pair_loss(loss, exact[0], y, ref=(exact[1], labels), difficulty=loss.difficulty, engine="dense")
    found = evaluate_spec(form, leaves[0], y, (leaves[1], labels))
    for a, b in zip(torch.autograd.grad(found.mean, leaves), torch.autograd.grad(wanted.mean(), exact), strict=True):
        assert float((a - b).norm() / b.norm()) < max(5e-6, 5e-7 / loss.temperature)


def run(form, z, y):
    from mettle.pairs.kernels.function import evaluate_spec

    leaf = z.clone().requires_grad_()
    mean = evaluate_spec(form, leaf, y).mean
    mean.backward()
    return mean.detach(), leaf.grad


@pytest.mark.parametrize("d", [128, 512])
@pytest.mark.parametrize("n", [5000, 17000])
def test_deterministic_runs_are_identical_bit_for_bit(n, d):
    z, y = batch(n, d, fresh())
    form = lower(SupCon(0.1), z)
    torch.use_deterministic_algorithms(True)
    try:
        first = run(form, z, y)
        for _ in range(20):
            again = run(form, z, y)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("n", [1023, 5000, 9001, 17000])
def test_repeated_runs_agree(n):
    """A race would show as a run that differs by more than the order of additions."""
    z, y = batch(n, 128, fresh())
    form = lower(SupCon(0.1), z)
    first = run(form, z, y)
    for _ in range(50):
        again = run(form, z, y)
        torch.testing.assert_close(again[0], first[0], rtol=1e-6, atol=0)
        assert float((again[1] - first[1]).norm() / first[1].norm()) < 1e-6


@pytest.mark.parametrize("n", [4096, 17000])
def test_a_graph_can_be_captured(n):
    from mettle.pairs.kernels.function import evaluate_spec

    z, y = batch(n, 128, fresh())
    form = lower(SupCon(0.1), z)
    wanted = run(form, z, y)
    leaf = z.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(evaluate_spec(form, leaf, y).mean, leaf)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mean = evaluate_spec(form, leaf, y).mean
        (gradient,) = torch.autograd.grad(mean, leaf)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(mean.detach(), wanted[0], rtol=1e-6, atol=0)
    assert float((gradient - wanted[1]).norm() / wanted[1].norm()) < 1e-5


def test_calls_that_are_alike_and_calls_that_are_not():
    """Launches are remembered by what a call looks like: here calls look alike in turns, with new numbers each time."""
    z, y = batch(700, 128, fresh())
    views = (lambda x: x, lambda x: x[3:], lambda x: x[:, :125], lambda x: x.half(), lambda x: x.T.contiguous().T)
    for _ in range(3):
        for view in views:
            leaf = view(z + 0.1 * torch.randn_like(z)).detach().requires_grad_()
            labels = y[-len(leaf) :]
            exact = leaf.detach().double().requires_grad_()
            (a,) = torch.autograd.grad(1000 * SupCon(0.1)(leaf, labels), leaf)
            (b,) = torch.autograd.grad(1000 * SupCon(0.1)(exact, labels, engine="dense"), exact)
            assert float((a - b).norm() / b.norm()) < (1e-3 if leaf.dtype == torch.float16 else 3e-6)
    odd = torch.stack([torch.zeros((), device="cuda"), torch.ones((), device="cuda")])[1]  # a gradient off the grid
    leaf = z.clone().requires_grad_()
    first, second = SupCon(0.1)(leaf, y), SupCon(0.1)(leaf, y)
    (a,), (b,) = torch.autograd.grad(first, leaf, odd), torch.autograd.grad(second, leaf)
    torch.testing.assert_close(a, b)


class Subclass(SupCon):
    """Nothing of its own."""


class Doubled(SupCon):
    """Another formula, which the kernels do not know."""

    def row_loss(self, rows):
        return 2 * super().row_loss(rows)


def test_a_subclass_is_fused_and_one_that_overrides_the_maths_is_not():
    z, y = batch(700, 128, fresh())
    wanted, found = SupCon(0.1).output(z, y), Subclass(0.1).output(z, y)
    assert (wanted.engine, found.engine) == ("triton", "triton")
    assert torch.equal(found.values, wanted.values)
    facts = Subclass(0.1).statistics(z, y)
    assert (facts.engine, facts.not_fused) == ("triton", "")
    found = Doubled(0.1).output(z, y)
    assert found.engine == "tiled"
    torch.testing.assert_close(found.mean(), 2 * wanted.mean(), rtol=1e-4, atol=0)
    assert Doubled(0.1).statistics(z, y).not_fused == "Doubled overrides row_loss and does not restate kernel_spec"


def test_a_label_out_of_range_is_told_and_the_device_lives_on():
    from mettle.errors import InputError
    from mettle.losses import ArcFace

    loss, z = ArcFace(10, 32).cuda(), torch.randn(64, 32, device="cuda", requires_grad=True)
    y = torch.randint(0, 10, (64,), device="cuda")
    for wrong in (10, -1, 2**40):
        bad = y.clone()
        bad[7] = wrong
        assert torch.isnan(loss(z, bad))  # a GPU is not waited for: the next call says why
        torch.cuda.synchronize()
        with pytest.raises(InputError, match="out of range"):
            loss(z, y)
    loss(z, y).backward()
    assert torch.isfinite(z.grad).all()


@pytest.mark.parametrize("loss", [Triplet(0.3, "hardest"), Triplet(0.3, difficulty=Hardest())], ids=repr)
@pytest.mark.parametrize(("n", "d"), [(1000, 128), (517, 300)])
def test_batch_hard(loss, n, d):
    from mettle.pairs.kernels.mining import batch_hard_rows

    z, y = batch(n, d, fresh())
    exact, leaf = z.double().requires_grad_(), z.clone().requires_grad_()
    wanted, rows = replace(loss).output(exact, y, engine="dense"), batch_hard_rows(loss, leaf, y)
    a, b = loss.row_loss(rows).mean(), wanted.values.mean()
    assert float(((a - b).abs() / b).detach()) < 1e-6
    (a,), (b,) = torch.autograd.grad(a, leaf), torch.autograd.grad(b, exact)
    assert float((a - b).norm() / b.norm()) < 2e-2  # a near-tie may mine the other pair


def test_counts_of_scores():
    from mettle.pairs.kernels.histograms import score_histogram

    z, y = batch(3001, 128, fresh())
    genuine, impostor = score_histogram(z, y, bins=1000)
    unit = torch.nn.functional.normalize(z.double())
    i, j = torch.triu_indices(3001, 3001, 1, device="cuda")
    at = ((unit @ unit.T)[i, j].add(1).mul(500)).floor().long().clamp(0, 999)
    same = y[i] == y[j]
    for found, wanted in ((genuine, at[same]), (impostor, at[~same])):
        wanted = torch.bincount(wanted, minlength=1000)
        assert int(found.sum()) == int(wanted.sum())
        moved = int((found - wanted).cumsum(0).abs().max())  # scores within a rounding of an edge of a bin
        assert moved <= 2e-5 * int(wanted.sum()) + 3


@pytest.mark.parametrize(("precision", "within"), [("bf16x3", 1e-4), ("fp16", 6e-3)])
@pytest.mark.parametrize("c", [1000, 70_001])
def test_own_class_and_the_others(precision, within, c):
    from mettle.pairs.kernels.class_softmax import class_softmax

    z, w, y = torch.randn(300, 128, device="cuda"), torch.randn(c, 128, device="cuda"), torch.randint(0, c, (300,))
    y = y.cuda()
    exact, leaves = [x.double().requires_grad_() for x in (z, w)], [x.clone().requires_grad_() for x in (z, w)]
    cosines = torch.nn.functional.normalize(exact[0]) @ torch.nn.functional.normalize(exact[1]).T
    target = cosines.gather(1, y[:, None])[:, 0]
    wanted = target, (64 * cosines).scatter(1, y[:, None], -torch.inf).logsumexp(1)
    found = class_softmax(*leaves, y, 64.0, normalize=True, precision=precision)
    assert float((found[0] - wanted[0]).detach().abs().max()) < 1e-6
    assert float((found[1] - wanted[1]).detach().abs().max()) < 64 * within
    a, b = (torch.autograd.grad((x[1] - 30 * x[0]).mean(), of) for x, of in ((found, leaves), (wanted, exact)))
    for x, y in zip(a, b, strict=True):
        assert float((x - y).norm() / y.norm()) < within


@pytest.mark.parametrize("d", [128, 512])
def test_verification_on_the_device_is_that_of_the_cpu(d):
    from mettle.evaluate import verification

    generator = torch.Generator().manual_seed(d)
    y = torch.arange(6000) // 4
    x = torch.randn(1500, d, generator=generator)[y] + 1.6 * torch.randn(6000, d, generator=generator)
    there, here = (verification(z, y, mode="histogram") for z in (x.cuda(), x))
    assert there.eer == here.eer
    assert there.operating_point(1e-3) == here.operating_point(1e-3)
    assert abs(there.auc - here.auc) < 1e-4


def _one(case):
    name, loss, n, d, precision, common = case
    try:
        value, gradient = errors(loss, n, d, precision, fresh(), common)
        most = bound(loss, precision, common)
        verdict = "ok" if gradient < most and value < 10 * most else "BAD"
        return f"{verdict:5s} {name:28s} {precision:6s} n={n:<5d} d={d:<5d} value {value:.1e}  gradient {gradient:.1e}"
    except Exception as error:
        return f"ERROR {name} {precision} n={n} d={d}: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(int(sys.argv[1]) if len(sys.argv) > 1 else 8) as pool:
        for line in pool.imap_unordered(_one, matrix()):
            print(line, flush=True)
