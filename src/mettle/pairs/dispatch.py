"""Where a pairwise loss is evaluated: validate the inputs, choose an engine, return one value per anchor."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import closed_form, reference, tiled
from mettle.pairs.interface import (
    Difficulty,
    Measure,
    PairLoss,
    Pass,
    Reduction,
    RowValues,
    Tile,
    sum_over,
    temperature_of,
)
from mettle.pairs.kernel_spec import BatchHardSpec, NoKernel
from mettle.pairs.kernels import (
    KernelInputs,
    collect_inputs,
    evaluate_fused,
    evaluate_fused_rank,
    explain_unavailable,
)
from mettle.pairs.loss_reduction import LossReduction, count_of_anchors, divide_total
from mettle.pairs.problem import STATISTIC, build_problem, raise_missing_row
from mettle.pairs.selection import PairSelection, resolve_labels
from mettle.pairs.self_normalized import CannotFold, fold_weights
from mettle.pairs.similarity import can_read, transforms_active
from mettle.pairs.validation import Reference, validate_inputs

Engine = Literal["auto", "dense", "tiled", "triton"]

DENSE_UP_TO = 256 * 256  # pairs; beyond this, tiles are faster and smaller
DENSE_UNWEIGHTED_UP_TO = 512 * 512  # the same for a loss of one pass in which all pairs count alike


@dataclass(frozen=True)
class PairOutput:
    """What a pairwise loss gives: one value per anchor, where it is defined, and which engine computed it."""

    values: Tensor
    defined: Tensor
    anchor_weight: Tensor | None  # None: every anchor counts alike
    engine: str
    mean_value: Tensor | None = None  # the mean, where the engine has computed it on the way
    known_defined: bool = False  # the engine has seen that the loss is defined for every anchor
    positives: Tensor | None = None  # (n,) how many positive pairs each anchor has; None where nobody counted them

    def per_anchor(self) -> Tensor:
        """(n,) with NaN where the loss is not defined."""
        return torch.where(self.defined, self.values, torch.nan)

    def is_empty(self) -> bool:
        """Whether the loss is defined for no anchor; waits for a GPU."""
        return not (self.all_defined or bool(self.defined.any()))

    @cached_property
    def all_defined(self) -> bool:
        """Whether the loss is defined for every anchor; waits for a GPU."""
        return self.known_defined or bool(self.defined.all())

    def mean(self) -> Tensor:
        """Mean over the anchors for which the loss is defined; NaN when there are none."""
        if self.mean_value is not None:
            return self.mean_value
        if self.anchor_weight is None and can_read(self.defined) and self.all_defined:
            return self.values.mean()
        weight = self.weight_of("mean")
        return (torch.where(self.defined, self.values, 0) * weight).sum() / weight.sum()

    def mean_or_zero(self) -> Tensor:
        """The mean; 0 with zero gradient where the loss is defined for no anchor. Broken embeddings still give NaN."""
        weight = self.weight_of("mean")
        total = (self.defined_values() * weight).sum()
        return total / torch.where(self.defined.any(), weight.sum(), 1)

    def weight_of(self, reduction: LossReduction) -> Tensor:
        """(n,) how much each anchor counts in a reduction to one number: 0 where the loss is not defined."""
        if reduction == "pairs" and self.positives is None:
            raise InputError("nobody counted the positive pairs of this output: build the loss with reduction='pairs'")
        return count_of_anchors(self.values, self.defined, self.anchor_weight, self.positives, reduction)

    def defined_values(self) -> Tensor:
        """(n,) with 0 where the loss is not defined; broken embeddings make every value NaN, defined or not."""
        return torch.where(self.defined, self.values, self.values.detach() * 0)

    def reduce(self, reduction: LossReduction, *, zero_if_empty: bool = False) -> Tensor:
        """What a loss with this reduction returns: one number, or with ``none`` (n,) values.

        Where the loss is defined for no anchor it is NaN, or 0 with zero gradient.
        """
        if reduction == "mean":
            return self.mean_or_zero() if zero_if_empty else self.mean()
        values, is_empty = self.defined_values(), ~self.defined.any()
        if reduction == "none":
            return values if zero_if_empty else torch.where(is_empty, torch.nan, values)
        weight = self.weight_of(reduction)
        total = (values * weight).sum()
        return divide_total(total, weight.sum(), is_empty, reduction, zero_if_empty=zero_if_empty)


def pair_loss(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor | None,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    difficulty: Difficulty | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    selection: PairSelection | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> PairOutput:
    """Evaluate ``loss`` on a batch, against itself or against ``ref``.

    Args:
        loss: what each row accumulates and how it ends.
        z: (n, d) embeddings.
        labels: (n,) whole numbers; equal labels are positives. Or (n, C) sets of classes: a common class makes a
            positive. None where a selection says what is alike.
        ref: compare with these embeddings and labels (and ids) instead of with the batch itself.
        ids: (n,) sample ids; pairs of equal id are left out when ``ref`` has ids too.
        difficulty: how much each pair counts.
        biased: a second encoder's embeddings of the batch (and of ``ref``).
        selection: which pairs there are (`mettle.pairs.selection.select_pairs`), in place of what labels say.
        engine: ``auto`` chooses by device and size; ``dense``, ``tiled`` and ``triton`` insist.
        tile: rows of a tile; chosen by size when left out.
    """
    labels, ref, selection = resolve_labels(z, labels, ref, selection)
    options: Any = {"ref": ref, "ids": ids, "biased": biased, "selection": selection, "tile": tile}

    def with_counts(output: PairOutput) -> PairOutput:
        if output.positives is not None or getattr(loss, "reduction", "mean") != "pairs":
            return output
        return replace(output, positives=count_positive_pairs(loss, z, labels, difficulty=difficulty, **options))

    if engine in ("auto", "triton"):
        fused = _try_kernels(loss, z, labels, ref, ids, difficulty, biased, selection, insist=engine == "triton")
        if fused is not None:
            return with_counts(fused)
    validate_inputs(z, labels, ref, ids, biased, tile)
    plain = ref is None and selection is None
    if engine == "auto" and plain and not torch.compiler.is_compiling() and not transforms_active():
        found = _try_closed_form(loss, z, labels, difficulty)
        if found is not None:
            return with_counts(found)
    options["engine"] = engine
    folded, left = fold_weights(loss, difficulty)
    try:
        rows, name = reduce_rows(folded, z, labels, difficulty=left, **options)
        loss = folded
    except CannotFold:
        rows, name = reduce_rows(loss, z, labels, difficulty=difficulty, **options)
    with autocast_disabled(z.device.type):
        try:
            values, defined, anchor_weight = loss.row_loss(rows), loss.is_defined(rows), loss.anchor_weight(rows)
        except KeyError as error:
            raise_missing_row(
                loss, error, rows, "override row_loss, is_defined or anchor_weight, whichever asks for it"
            )
            raise
        for given in (z, *(ref or ())[:1], *(biased if isinstance(biased, tuple) else (biased,))):
            if given is not None and not is_known_finite(given):
                values = values + nan_if_not_finite(given).to(values.dtype)
    return with_counts(PairOutput(values, defined, anchor_weight, name, positives=rows.get("positives")))


@dataclass(frozen=True)
class _PositiveCount:
    """A loss that only counts the positive pairs of each row, those that the difficulty leaves in."""

    measure: Measure
    temperature: float | Tensor

    def passes(self) -> tuple[Pass, ...]:
        return (Pass(self.reductions, over="positives"),)

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        return {"positives": sum_over(1.0, tile.positive, weighting="mask")}


@torch.no_grad()
def count_positive_pairs(loss: PairLoss, z: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """(n,) how many positive pairs each anchor has, for engines that do not say. Options as for `reduce_rows`."""
    counting: Any = _PositiveCount(loss.measure, temperature_of(loss))
    return reduce_rows(counting, z.detach(), labels, **options)[0]["positives"]


def _try_closed_form(loss: PairLoss, z: Tensor, labels: Tensor, difficulty: Difficulty | None) -> PairOutput | None:
    """On a CPU, for a small batch of a loss that declares a spec: value and gradient as written down. Else None."""
    spec = closed_form.find_spec(loss, difficulty, z)
    if spec is None:
        return None
    if isinstance(spec, BatchHardSpec):
        rows = closed_form.batch_hard_rows(loss, z, labels)
        if rows is None:
            return None
        return PairOutput(loss.row_loss(rows), loss.is_defined(rows), loss.anchor_weight(rows), "closed-form")

    found = closed_form.softmax_loss(spec, z, labels, _reference_loss(loss, labels, difficulty))
    if found is None:
        return None
    values, mean, defined, everywhere = found
    return PairOutput(values, defined, None, "closed-form", mean, everywhere)


def _reference_loss(
    loss: PairLoss,
    labels: Tensor,
    difficulty: Difficulty | None,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Values and mean with a graph, of embeddings and reference embeddings: what engines take second derivatives of."""

    def evaluate_dense(z: Tensor, embeddings: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given: Any = None if ref is None or embeddings is None else (embeddings, *ref[1:])
        output = pair_loss(loss, z, labels, ref=given, ids=ids, difficulty=difficulty, biased=biased, engine="dense")
        return output.values, output.mean()

    return evaluate_dense


def _try_kernels(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    ref: Reference | None,
    ids: Tensor | None,
    difficulty: Difficulty | None,
    biased: Tensor | tuple[Tensor, Tensor] | None,
    selection: PairSelection | None,
    *,
    insist: bool,
) -> PairOutput | None:
    """On a GPU, with triton, where the loss declares a kernel spec: all of it at once. Else None."""
    if not insist and not (isinstance(z, Tensor) and z.is_cuda):
        return None  # the other engines look at the same things anyway
    if not insist and (transforms_active() or torch.compiler.is_compiling()):
        return None  # torch differentiates, batches and compiles what it can see
    validate_inputs(z, labels, ref, ids, biased)
    reason = explain_unavailable(z.device) if selection is None else selection.description
    if not reason:
        with autocast_disabled("cuda"), _explained_memory(z):
            inputs = collect_inputs(z, labels, ref, ids, biased)
            reference_loss = _reference_loss(loss, labels, difficulty, ref, ids, biased)
            found = evaluate_fused(loss, difficulty, inputs, reference_loss)
        if not isinstance(found, NoKernel):
            return PairOutput(found.values, found.defined, found.anchor_weight, "triton", found.mean)
        reason = found.reason
    if insist:
        raise InputError(
            "engine='triton' needs embeddings on a GPU, triton, and a loss and data that its kernels compute; "
            f"not fused because {reason}: use engine='auto', which falls back to tiles"
        )
    return None


def runs_fused(device: torch.device) -> bool:
    """Whether the fused kernels run on a device, and torch does not want to see what is computed."""
    return not (explain_unavailable(device) or transforms_active() or torch.compiler.is_compiling())


@dataclass(frozen=True)
class RankColumns:
    """What the anchors of one rank are compared with: the embeddings of all ranks.

    Attributes:
        z: (m, d) embeddings of all ranks, without gradient.
        labels: (m,) theirs.
        own: where the rows of this rank are among them.
        gather: (n, k) numbers of this rank's rows -> (m, k) of all; the backward pass of every rank calls it once.
    """

    z: Tensor
    labels: Tensor
    own: slice
    gather: Callable[[Tensor], Tensor]


def pair_loss_of_rank(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    columns: RankColumns,
    *,
    difficulty: Difficulty | None = None,
    biased: tuple[Tensor, Tensor] | None = None,
) -> PairOutput:
    """`pair_loss` of one rank's anchors in the fused kernels, with the whole gradient of its embeddings.

    Args:
        loss: what each row accumulates and how it ends.
        z: (n, d) embeddings of this rank.
        labels: (n,) theirs.
        columns: what they are compared with.
        difficulty: how much each pair counts.
        biased: a second encoder's embeddings of this rank and of all.
    """
    ref = columns.z, columns.labels
    validate_inputs(z, labels, ref, None, biased)
    with autocast_disabled("cuda"), _explained_memory(z):
        found = evaluate_fused_rank(loss, difficulty, KernelInputs(z, labels, *ref, biased), columns)
    return PairOutput(*found, None, "triton")


@contextmanager
def _explained_memory(z: Tensor) -> Iterator[None]:
    """Say in one line that a GPU has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the GPU has no memory left for a loss over {len(z)} embeddings of width {z.shape[1]}: free what is "
            "held there, make the batch smaller, or give half precision"
        ) from error


def autocast_disabled(device: str) -> AbstractContextManager:
    """Without autocast on this kind of device; where none is on, nothing is switched, which would cost microseconds."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def reduce_rows(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    difficulty: Difficulty | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    selection: PairSelection | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> tuple[dict[str, Tensor], str]:
    """What every anchor accumulates, (n,) each with gradient, and the engine that did it. Arguments as above."""
    name = choose_engine(engine, len(z) * (len(z) if ref is None else len(ref[0])), loss, difficulty)
    with autocast_disabled(z.device.type):
        sort = name == "tiled"
        problem, order = build_problem(loss, z, labels, ref, ids, difficulty, biased, sort=sort, selection=selection)
        rows = tiled.reduce_problem(problem, tile) if name == "tiled" else reference.reduce_problem(problem)
        rows = {k: v for k, v in rows.items() if not k.startswith(STATISTIC)}
        if order is not None:
            back = torch.argsort(order)
            rows = {k: v[back] for k, v in rows.items()}
    return rows, name


def is_known_finite(z: Tensor) -> bool:
    """Whether all of ``z`` is finite, if that can be told without waiting; False where it cannot."""
    return can_read(z) and math.isfinite(float(z.detach().sum()))


def nan_if_not_finite(z: Tensor) -> Tensor:
    """0 when all of ``z`` is finite, NaN otherwise: added to a loss, it never lets a broken embedding pass."""
    return (z.detach() - z.detach()).sum()


def choose_engine(engine: Engine, pairs: int, loss: PairLoss, difficulty: Difficulty | None) -> Engine:
    """Dense for small batches and for measures that only it has, tiled beyond."""
    if engine not in ("auto", "dense", "tiled", "triton"):
        raise InputError(f"no engine {engine!r}: choose auto, dense, tiled or triton")
    if loss.measure == "l1":
        if engine == "tiled":
            raise InputError("the L1 measure has a dense form only: use engine='dense', or another measure")
        return "dense"
    if engine != "auto":
        return engine
    if transforms_active() or torch.compiler.is_compiling():
        return "dense"  # torch differentiates, batches and compiles what it can see
    alike = difficulty is None and len(loss.passes()) == 1
    return "dense" if pairs <= (DENSE_UNWEIGHTED_UP_TO if alike else DENSE_UP_TO) else "tiled"
