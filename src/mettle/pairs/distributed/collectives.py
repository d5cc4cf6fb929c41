"""Tensors that go between ranks: rows of all ranks with gradient, sums over ranks.

    distribute(...)      -> tensors    gathered, local or replicated; one node of the graph, so one backward exchange
    sum_over_ranks(...)  -> numbers    summed over ranks, or the error of all

Every rank back-propagates. The gradient of a rank's own rows is multiplied by the number of ranks, because
`DistributedDataParallel` then takes the mean over ranks of what must be a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from mettle.errors import InputError
from mettle.pairs.distributed.handshake import RankInfo, raise_everywhere

Kind = Literal["gather", "local", "replicated"]
"""Rows of all ranks; a rank's own rows; something that all ranks have alike, such as class vectors."""


@dataclass(frozen=True)
class _DistributePlan:
    """What becomes of every tensor, forward and backward."""

    ranks: RankInfo
    kinds: list[Kind]
    places: list[str]
    reduce_gradients: bool  # whether ranks have different parts of the gradient, to be summed over them


def distribute(
    ranks: RankInfo, tensors: dict[str, Tensor], kind: Kind, shared: Sequence[Tensor] = (), *, reduce_gradients: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """All tensors ``gather``-ed or each rank's ``local``, and ``shared`` ones as they are; with gradient where wanted.

    ``reduce_gradients``: every rank computes a part of the whole, so gradients are summed over ranks. Else every rank
    computes the whole and has all of the gradient by itself.
    """
    wanted = [place for place in tensors if place in ranks.wanted]
    found = {p: x for p, x in tensors.items() if p not in wanted}
    if kind == "gather":
        found = {place: pad_and_gather(x.detach(), ranks.rows[place]) for place, x in found.items()}
    given = [tensors[place] for place in wanted]
    if not torch.is_grad_enabled() or not (given or shared):
        found |= {
            p: pad_and_gather(x, ranks.rows[p]) if kind == "gather" else x for p, x in zip(wanted, given, strict=True)
        }
        return found, list(shared)
    kinds: list[Kind] = [kind for _ in given]
    kinds.extend("replicated" for _ in shared)
    plan = _DistributePlan(ranks, kinds, wanted, reduce_gradients)
    # A rank whose own rows want no gradient still has to take part in the backward exchange.
    seed = torch.zeros((), requires_grad=True)
    made: Any = _DistributeFunction.apply(plan, seed, *given, *shared)
    return found | dict(zip(wanted, made[: len(given)], strict=True)), list(made[len(given) :])


class _DistributeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: _DistributePlan, seed: Tensor, *tensors: Tensor):  # type: ignore[override]
        ctx.plan = plan
        rows = [plan.ranks.rows[place] for place in plan.places]
        found = [
            pad_and_gather(x.detach(), n)
            for x, n, kind in zip(tensors, rows, plan.kinds, strict=False)
            if kind == "gather"
        ]
        return tuple([*found, *(x.view_as(x) for x in tensors[len(found) :])])

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # a second derivative would miss what other ranks add
            raise InputError("across ranks there are first derivatives only: do not pass create_graph=True")
        plan, found = ctx.plan, []
        for k, (g, kind) in enumerate(zip(grads, plan.kinds, strict=True)):
            g = _sum_gradient(g) if plan.reduce_gradients and kind != "local" else g
            if kind == "gather":
                g = g[plan.ranks.span(plan.places[k])]
            found.append(g if kind == "replicated" else g * plan.ranks.size)
        return None, None, *found


def _sum_gradient(g: Tensor) -> Tensor:
    """A gradient summed over ranks, in float32 or better; one that holds some rows only stays so."""
    rows = g.sparse_dim() if g.is_sparse else None
    wide = g.to_dense() if g.is_sparse else g
    wide = wide.float() if g.dtype in (torch.float16, torch.bfloat16) else wide
    wide = wide.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(wide)
    wide = wide.to(g.dtype)
    return wide if rows is None else wide.to_sparse(rows)


def pad_and_gather(x: Tensor, rows: list[int]) -> Tensor:
    """The rows of all ranks in rank order; ranks may have different numbers of them."""
    most = max(rows)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    found = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(found, padded)
    return torch.cat([part[:n] for part, n in zip(found, rows, strict=True)])


def gather_rows(x: Tensor, ranks: RankInfo, place: str) -> Tensor:
    """The rows of all ranks, without gradient."""
    return pad_and_gather(x.detach(), ranks.rows[place])


def sum_over_ranks(validate_numbers: list[Tensor], device: torch.device) -> Tensor:
    """Each number summed over ranks, in float64, with gradient; raises on every rank where one has failed."""
    fine = torch.zeros((), dtype=torch.float64, device=device)
    found: Any = _SumOverRanksFunction.apply(torch.stack([*(x.double() for x in validate_numbers), fine]))
    if bool(found[-1] > 0):
        raise_everywhere(None)
    return found[:-1]


def fail_everywhere(count: int, device: torch.device, error: Exception | None) -> NoReturn:
    """Instead of `sum_over_ranks` of so many numbers: raise this rank's error on every rank."""
    flags = torch.zeros(count + 1, dtype=torch.float64, device=device)
    flags[-1] = 1
    dist.all_reduce(flags)
    raise_everywhere(error)


class _SumOverRanksFunction(torch.autograd.Function):
    """A sum over ranks; every rank back-propagates the same whole, so each number gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor):  # type: ignore[override]
        found = x.detach().clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        return g
