"""The kernels with rows of one rank and columns of all, in triton's interpreter: what one process gets from dense."""

import json
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from interpreted import ask_for_interpreter

if (problem := ask_for_interpreter()) is not None:
    pytest.skip(problem, allow_module_level=True)

from covering import mark_slow_except
from mettle.difficulty import Relative, Threshold
from mettle.losses import InfoNCE, SupCon
from mettle.pairs import across_ranks, pair_loss
from mettle.pairs.kernels.function import default_precision
from mettle.pairs.kernels.rank_rows import RankRowsCall
from processes import Forked

from test_kernels import FORMS, LEARNED, batch, gap, lower, options  # isort: skip

# The interpreter computes with NumPy, which warns where a masked entry divides by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
QUICK = ("supcon", "supcon cold", "da-supcon live", "hard", "relative", "contrastive squared", "multi-similarity mined")
SIZES = (9, 3, 14)  # of the parts of three ranks


def one_process(loss, z, y, g, biased):
    """Values and the gradient of Σ g_i·value_i, dense and in float64."""
    exact = z.double().requires_grad_()
    wide = None if biased is None else biased[0].double()
    wanted = pair_loss(loss, exact, y, difficulty=loss.difficulty, engine="dense", biased=wide)
    values = torch.where(wanted.defined, wanted.values, 0)
    parameters = [p for p in loss.parameters() if p.requires_grad]
    return values.detach(), wanted.defined, torch.autograd.grad((values * g).sum(), [exact, *parameters])


def all_ranks(loss, z, y, g, biased):
    """The same by one call for each rank, which hand each other what they must."""
    spec = lower(loss, z, biased=biased)
    starts = [sum(SIZES[:k]) for k in range(len(SIZES) + 1)]
    parts = [slice(*ends) for ends in pairwise(starts)]
    calls, values, defined = [], [], []
    for part in parts:
        both = None if biased is None else (biased[0][part].contiguous(), biased[0])
        own = torch.arange(part.start, part.stop, dtype=torch.int32)
        precision = default_precision(spec, z)
        call = RankRowsCall(
            spec, y[part].contiguous(), y, both if spec.has_second_encoder else None, precision, None, own
        )
        found, _ = call.forward(z[part].contiguous(), z)
        calls.append(call)
        values.append(found)
        defined.append(call.defined)
    states = torch.cat([call.gradient_state(g[part]) for call, part in zip(calls, parts, strict=True)])
    learned = spec.log_temperature is not None
    grads = [call.gradient(states, z[part], learned) for call, part in zip(calls, parts, strict=True)]
    gradient = [torch.cat([dz for dz, _ in grads])]
    if learned:
        gradient.append(sum(d for _, d in grads))
    return torch.cat(values), torch.cat(defined), gradient


def compare(loss, d, each=4, within=2e-6):
    z, y = batch(sum(SIZES), d, each)
    g = torch.rand(len(z), generator=torch.Generator().manual_seed(5)) + 0.1
    given = options(loss, z)
    biased = None if given is None else (given[0], given[0])
    wanted, found = one_process(loss, z, y, g.double(), biased), all_ranks(loss, z, y, g, biased)
    assert torch.equal(found[1], wanted[1]) and wanted[1].any()
    values = torch.where(found[1], found[0], 0).double()
    torch.testing.assert_close(values, wanted[0], rtol=within, atol=within)
    for a, b in zip(found[2], wanted[2], strict=True):
        assert gap(a, b) < 20 * within, (gap(a, b), a, b)


@pytest.mark.parametrize("name", mark_slow_except(FORMS, QUICK))
def test_the_gradient_of_a_ranks_rows_is_whole(name):
    compare(FORMS[name], 12)


@pytest.mark.parametrize("name", ["da-supcon live", "supcon relative"])
def test_wide_embeddings_go_through_memory(name):
    compare(FORMS[name], 260)


def test_a_rank_may_have_no_positive_and_a_class_may_be_on_one_rank():
    compare(SupCon(0.1, difficulty=Threshold(positive=0.6, negative=0.1)), 12, each=2)
    compare(InfoNCE(0.5, 0.1), 12, each=13)


@pytest.mark.parametrize("name", mark_slow_except(LEARNED, ("da-supcon", "relative raw")))
def test_every_rank_has_a_part_of_the_gradient_of_a_learned_temperature(name):
    compare(LEARNED[name], 12, within=4e-6)


def run_rank(rank: int, size: int, folder: Path) -> None:
    """A rank of a real process group whose embeddings count as ones on a GPU."""
    torch.set_num_threads(1)
    import mettle.pairs.distributed.wrapper as wrapper

    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    wrapper.runs_fused = lambda device: True
    fused = wrapper.pair_loss_of_rank
    calls = []
    wrapper.pair_loss_of_rank = lambda *args, **options: (calls.append(1), fused(*args, **options))[1]
    found = {}
    for name, loss in losses().items():
        z, y, biased = inputs(loss)
        part = split(rank, size, len(z))
        leaf = z[part].clone().requires_grad_()
        wrapped = across_ranks(loss)
        given = {} if biased is None else {"biased": biased[part]}
        value = wrapped(leaf, y[part], **given)
        gradient, *own = torch.autograd.grad(value, [leaf, *wrapped.parameters()])
        row = wrapped.per_anchor(leaf, y[part], **given)
        weight = torch.arange(1.0, len(z) + 1)[part]
        (of_rows,) = torch.autograd.grad((torch.nan_to_num(row) * weight).sum(), leaf)
        assert len(calls) == 2 * (len(found) + 1), "it went through the kernels"
        # The gradients of embeddings count for their mean over ranks, those of parameters as they are.
        means = [(x / size).tolist() for x in (gradient, of_rows)]
        found[name] = [value.item(), *means, [x.item() for x in own]]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def losses():
    return {"learned": LEARNED["da-supcon"], "relative": InfoNCE(0.5, 0.1, Relative())}


def inputs(loss):
    z, y = batch(22, 12)
    given = options(loss, z)
    return z, y, None if given is None else given[0]


def split(rank: int, size: int, n: int) -> slice:
    ends = [0, *(n * (k + 1) // size + (k + 1) % 2 for k in range(size - 1)), n]
    return slice(ends[rank], ends[rank + 1])


def test_real_ranks_agree_with_one_process(tmp_path):
    size = 2
    started = [Forked(run_rank, rank, size, tmp_path) for rank in range(size)]
    said = [one.communicate(timeout=300) for one in started]
    assert [one.returncode for one in started] == [0] * size, said
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for name, loss in losses().items():
        z, y, biased = inputs(loss)
        exact = z.double().requires_grad_()
        wide = None if biased is None else biased.double()
        out = pair_loss(loss, exact, y, difficulty=loss.difficulty, engine="dense", biased=wide)
        gradient, *own = torch.autograd.grad(out.mean(), [exact, *loss.parameters()], retain_graph=True)
        rows = (torch.where(out.defined, out.values, 0) * torch.arange(1.0, len(z) + 1)).sum()
        (of_rows,) = torch.autograd.grad(rows, exact)
        for rank in range(size):
            part = split(rank, size, len(z))
            value, of_mean, own_rows, of_parameters = found[rank][name]
            assert value == pytest.approx(out.mean().item(), rel=3e-6)
            assert gap(torch.tensor(of_mean), gradient[part]) < 4e-5
            assert of_parameters == pytest.approx([x.item() for x in own], rel=1e-4)
            assert gap(torch.tensor(own_rows), of_rows[part]) < 4e-5
