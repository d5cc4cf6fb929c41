"""The door to the engines: check what came, lay out the job, choose an engine, give back one value per anchor."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import dense, tiled
from mettle.pairs.checks import Reference, check_all
from mettle.pairs.checks import check as check  # losses ask for it here
from mettle.pairs.contract import Difficulty, PairLoss
from mettle.pairs.job import Job, refuse_missing
from mettle.pairs.kernel_spec import NoKernel
from mettle.pairs.kernels import collect_inputs, evaluate_fused, explain_unavailable
from mettle.pairs.relation import Side
from mettle.pairs.similarity import ready
from mettle.pairs.tilt import CannotFold, tilted

Engine = Literal["auto", "dense", "tiled", "triton"]

DENSE_UP_TO = 256 * 256  # pairs; beyond this, tiles are faster and smaller
DENSE_ALIKE_UP_TO = 512 * 512  # the same for a loss of one pass in which all pairs count alike


@dataclass(frozen=True)
class PairOutput:
    """What a pairwise loss gives: one value per anchor, where it is defined, and which engine computed it."""

    values: Tensor
    defined: Tensor
    share: Tensor
    engine: str
    whole: Tensor | None = None  # the mean, where the engine has computed it on the way

    def per_anchor(self) -> Tensor:
        """(n,) with NaN where the loss is not defined."""
        return torch.where(self.defined, self.values, torch.nan)

    def mean(self) -> Tensor:
        """Mean over the anchors for which the loss is defined; NaN when there are none."""
        if self.whole is not None:
            return self.whole
        share = self.share * self.defined
        return (torch.where(self.defined, self.values, 0) * share).sum() / share.sum()


def pair_loss(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    difficulty: Difficulty | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> PairOutput:
    """Evaluate ``loss`` on a batch, against itself or against ``ref``.

    Args:
        loss: what each row accumulates and how it ends.
        z: (n, d) embeddings.
        labels: (n,) whole numbers; equal labels are positives.
        ref: compare with these embeddings and labels (and ids) instead of with the batch itself.
        ids: (n,) sample ids; pairs of equal id are left out when ``ref`` has ids too.
        difficulty: how much each pair counts.
        biased: a second encoder's embeddings of the batch (and of ``ref``).
        engine: ``auto`` chooses by device and size; ``dense``, ``tiled`` and ``triton`` insist.
        tile: rows of a tile; chosen by size when left out.
    """
    if engine in ("auto", "triton"):
        fused = _fused(loss, z, labels, ref, ids, difficulty, biased, insist=engine == "triton")
        if fused is not None:
            return fused
    options: Any = {"ref": ref, "ids": ids, "biased": biased, "engine": engine, "tile": tile}
    folded, left = tilted(loss, difficulty)
    try:
        rows, name = row_sums(folded, z, labels, difficulty=left, **options)
        loss = folded
    except CannotFold:
        rows, name = row_sums(loss, z, labels, difficulty=difficulty, **options)
    with torch.autocast(z.device.type, enabled=False):
        try:
            values, defined, share = loss.finish(rows), loss.defined(rows), loss.share(rows)
        except KeyError as error:
            refuse_missing(loss, error, rows, "override the method that asks for it (finish, defined or share)")
            raise
        for given in (z, *(ref or ())[:1], *(biased if isinstance(biased, tuple) else (biased,))):
            if given is not None:
                values = values + broken(given).to(values.dtype)
    return PairOutput(values, defined, share, name)


def _fused(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    ref: Reference | None,
    ids: Tensor | None,
    difficulty: Difficulty | None,
    biased: Tensor | tuple[Tensor, Tensor] | None,
    *,
    insist: bool,
) -> PairOutput | None:
    """On a GPU, with triton, where the loss declares a kernel spec: all of it at once. Else None."""
    if not insist and not (isinstance(z, Tensor) and z.is_cuda):
        return None  # the other engines look at the same things anyway
    check_all(z, labels, ref, ids, biased)
    reason = explain_unavailable(z.device)
    if not reason:
        try:
            with plainly():
                found = evaluate_fused(loss, difficulty, collect_inputs(z, labels, ref, ids, biased))
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"the GPU has no memory left for a loss over {len(z)} embeddings of width {z.shape[1]}: free what is "
                "held there, make the batch smaller, or give half precision"
            ) from error
        if not isinstance(found, NoKernel):
            return PairOutput(found.values, found.defined, found.share, "triton", found.mean)
        reason = found.reason
    if insist:
        raise InputError(
            "engine='triton' needs embeddings on a GPU, triton, and a loss and data that its kernels compute; "
            f"not fused because {reason}: use engine='auto', which falls back to tiles"
        )
    return None


def plainly() -> AbstractContextManager:
    """Without autocast on a GPU; where none is on, nothing is switched (which costs as much as a small launch)."""
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext()


def row_sums(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    difficulty: Difficulty | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> tuple[dict[str, Tensor], str]:
    """What every anchor accumulates, (n,) each with gradient, and the engine that did it. Arguments as above."""
    check_all(z, labels, ref, ids, biased, tile)
    name = choose(engine, len(z) * (len(z) if ref is None else len(ref[0])), loss, difficulty)
    with torch.autocast(z.device.type, enabled=False):
        job, order = layout(loss, z, labels, ref, ids, difficulty, biased, sort=name == "tiled")
        rows = tiled.rows(job, tile) if name == "tiled" else dense.rows(job)
        rows = {k: v for k, v in rows.items() if not k.startswith("difficulty.")}
        if order is not None:
            back = torch.argsort(order)
            rows = {k: v[back] for k, v in rows.items()}
    return rows, name


def broken(z: Tensor) -> Tensor:
    """0 when all of ``z`` is finite, NaN otherwise: added to a loss, it never lets a broken embedding pass."""
    return (z.detach() - z.detach()).sum()


def layout(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    ref: Reference | None,
    ids: Tensor | None,
    difficulty: Difficulty | None,
    biased: Tensor | tuple[Tensor, Tensor] | None,
    *,
    sort: bool,
) -> tuple[Job, Tensor | None]:
    """The job for an engine, rows sorted by label when asked for, and the order they were put in."""
    order = torch.argsort(labels, stable=True) if sort else None

    def put(x: Tensor | None, by: Tensor | None) -> Tensor | None:
        return x if x is None or by is None else x[by]

    own = ready(z, loss.measure)
    left = _side(labels, ids, order)
    if ref is None:
        second = None if biased is None else ready(_single(biased), loss.measure).detach().to(own.dtype)
        both = None if second is None else (_must(put(second, order)), _must(put(second, order)))
        return Job(loss, difficulty, left, left, _must(put(own, order)), None, both), order
    by = torch.argsort(ref[1], stable=True) if sort else None
    right = _side(ref[1], ref[2] if len(ref) == 3 else None, by)
    other = ready(ref[0], loss.measure)
    kind = torch.promote_types(own.dtype, other.dtype)  # of two precisions the better one
    own, other = own.to(kind), _must(put(other.to(kind), by))
    both = None
    if biased is not None:
        if isinstance(biased, Tensor):
            raise InputError("with ref=, biased must be a pair: the second encoder's batch and reference embeddings")
        first, second = (ready(b, loss.measure).detach().to(kind) for b in biased)
        both = (_must(put(first, order)), _must(put(second, by)))
    return Job(loss, difficulty, left, right, _must(put(own, order)), other, both), order


def choose(engine: Engine, pairs: int, loss: PairLoss, difficulty: Difficulty | None) -> Engine:
    """Dense for small batches and for measures that only it has, tiled beyond."""
    if engine not in ("auto", "dense", "tiled", "triton"):
        raise InputError(f"no engine {engine!r}: choose auto, dense, tiled or triton")
    if loss.measure == "l1":
        if engine == "tiled":
            raise InputError("the L1 measure has a dense form only: use engine='dense', or another measure")
        return "dense"
    if engine != "auto":
        return engine
    alike = difficulty is None and len(loss.sweeps()) == 1
    return "dense" if pairs <= (DENSE_ALIKE_UP_TO if alike else DENSE_UP_TO) else "tiled"


def _side(labels: Tensor, ids: Tensor | None, order: Tensor | None) -> Side:
    if order is None:
        return Side(labels, torch.arange(len(labels), device=labels.device), ids)
    return Side(labels[order], order, None if ids is None else ids[order])


def _single(biased: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    if isinstance(biased, Tensor):
        return biased
    raise InputError("biased must be one tensor when the batch is compared with itself")


def _must(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
