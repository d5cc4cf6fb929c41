"""A batch that several ranks share: what each has made of its rows put together, and gradients averaged over ranks.

    gather_batch(x, rows)          -> the rows of all ranks in the order of the batch, with gradient
    select_own_rows(x, rows)       -> this rank's rows of that, for a loss across ranks
    average_gradients(parameters)  -> every gradient becomes its mean over ranks

The convention is that of `DistributedDataParallel`: the gradient of a parameter is the mean over ranks. What every rank
computes alike from gathered rows (a loss, a head) thus counts once, and the gradient of a rank's own rows is multiplied
by the number of ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from mettle.pairs.distributed.collectives import pad_and_gather
from mettle.pairs.distributed.handshake import control_device

BUCKET = 1 << 25  # bytes of gradients that are sent at a time


def gather_batch(x: Tensor, rank_rows: Sequence[np.ndarray]) -> Tensor:
    """The rows of all ranks in the order of the batch; whatever follows is to be computed alike on every rank.

    Args:
        x: this rank's rows.
        rank_rows: of each rank, which rows of the batch it has.
    """
    found: Any = _GatherBatchFunction.apply(x, rank_rows)
    return found


class _GatherBatchFunction(torch.autograd.Function):
    """All ranks compute the same from all rows, so that each knows the whole gradient of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, rank_rows: Sequence[np.ndarray]):  # type: ignore[override]
        ctx.own = torch.from_numpy(rank_rows[dist.get_rank()]).to(x.device)
        ctx.ranks = len(rank_rows)
        found = pad_and_gather(x.detach(), [len(rows) for rows in rank_rows])
        places = torch.from_numpy(np.argsort(np.concatenate(rank_rows))).to(x.device)
        return found[places]

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        return g[ctx.own] * ctx.ranks, None


def select_own_rows(x: Tensor, rank_rows: Sequence[np.ndarray]) -> Tensor:
    """This rank's rows of a gathered tensor, for `across_ranks`, which multiplies their gradient by itself."""
    found: Any = _SelectOwnRowsFunction.apply(x, rank_rows)
    return found


class _SelectOwnRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rank_rows: Sequence[np.ndarray]):  # type: ignore[override]
        ctx.own, ctx.shape = torch.from_numpy(rank_rows[dist.get_rank()]).to(x.device), x.shape
        ctx.ranks = len(rank_rows)
        return x[ctx.own]

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        found = g.new_zeros(ctx.shape)
        found[ctx.own] = g / ctx.ranks
        return found, None


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Every gradient becomes its mean over ranks, which is the same bits on all of them.

    A parameter of which every rank holds another part says so by an attribute ``is_sharded``, and is left as it is.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in dict.fromkeys(parameters):
        if p.grad is not None and not getattr(p, "is_sharded", False):
            groups.setdefault((p.grad.device, p.grad.dtype), []).append(p.grad)
    for gradients in groups.values():
        for bucket in _fill_buckets(gradients):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)])


def _fill_buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for g in gradients:
        if bucket and sum(one.nbytes for one in bucket) + g.nbytes > BUCKET:
            yield bucket
            bucket = []
        bucket.append(g)
    if bucket:
        yield bucket


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the values that rank 0 has; what is sharded stays as it is."""
    for x in tensors:
        if getattr(x, "is_sharded", False) or x.numel() == 0:
            continue
        first = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, 0)
        x.copy_(first)


def is_any_rank(flag: bool) -> bool:
    """Whether this is so on some rank; every rank has to ask."""
    found = torch.tensor(int(flag), device=control_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def broadcast_text(text: str) -> str:
    """The text of rank 0, on every rank."""
    device = control_device()
    content = text.encode()
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, 0)
    mine = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else mine
    mine = mine.to(device)
    if len(mine):
        dist.broadcast(mine, 0)
    return bytes(mine.cpu().numpy().tobytes()).decode()
