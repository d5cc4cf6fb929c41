"""Which pairs a call uses, where that is not said by one label per sample.

| given | positives | negatives | how often a pair counts |
|---|---|---|---|
| `ListedPairs`: index tensors of pairs or triplets | listed as such | listed as such | as often as it is listed |
| `MaskedPairs`: a table of booleans | where it is true | the rest, or another table | once |
| `LabelSets`: several classes per sample | at least one class in common | none in common | once |
| `SoftTargets`: a table of numbers t in [0, 1] | t > 0, by t | t < 1, by 1 − t | as the loss defines it |

A selection is asked tile by tile, in the order of the batch: no table is made that was not given. A pair that is
neither positive nor negative is absent. A row is never paired with itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.interface import Reduction
from mettle.pairs.validation import Reference

CHUNK_ROWS = 512  # rows of a label-set product when positives are counted

IndicesTuple = Sequence[Tensor]
"""Pairs (anchors, positives, anchors, negatives) or triplets (anchors, positives, negatives), (p,) positions each."""


@dataclass(frozen=True)
class TileRelation:
    """What a selection says of one tile, (a, b) each."""

    positive: Tensor
    negative: Tensor
    repeats: Tensor | None = None  # how often a pair is listed; None: once
    target: Tensor | None = None  # a soft target


@dataclass(frozen=True)
class PairSelection:
    """The pairs of one call. ``same_set``: both sides are the same rows, so the diagonal is left out."""

    same_set: bool

    description = "the pairs of the call are given"  # completes "not fused because"
    symmetric = False  # pair (i, j) is what (j, i) is, so that one tile serves the rows at both of its ends
    soft = False

    def relation(self, i: slice, j: slice) -> TileRelation:
        """The anchors ``i`` against the references ``j``."""
        raise NotImplementedError

    def is_empty(self, i: slice, j: slice) -> bool:
        """Whether a tile is known to hold no pair at all."""
        return False

    def max_positives(self) -> int:
        """The most positives that any anchor has."""
        raise NotImplementedError

    def _leave_out_self(self, mask: Tensor, i: slice, j: slice) -> Tensor:
        """Without the pairs of a row with itself."""
        if not self.same_set or i.stop <= j.start or j.stop <= i.start:
            return mask
        rows, columns = (torch.arange(x.start, x.stop, device=mask.device) for x in (i, j))
        return mask & (rows[:, None] != columns)


@dataclass(frozen=True)
class ListedPairs(PairSelection):
    """Pairs sorted by anchor, then reference; in memory O(pairs), each tile looks its own up."""

    anchors: Tensor  # (p,)
    references: Tensor  # (p,)
    counts: Tensor  # (p,) how often each is listed: above 0 for positives, below 0 for negatives
    rows: int

    description = "indices_tuple= lists the pairs of the call"

    @classmethod
    def from_tuple(cls, given: IndicesTuple, rows: int, columns: int, *, same_set: bool) -> "ListedPairs":
        """Of a validated tuple; a triplet lists two pairs."""
        a1, p, a2, n = given if len(given) == 4 else (given[0], given[1], given[0], given[2])
        positive, times_positive = torch.unique(a1 * columns + p, return_counts=True)
        negative, times_negative = torch.unique(a2 * columns + n, return_counts=True)
        key, order = torch.sort(torch.cat([positive, negative]))
        both = (key[1:] == key[:-1]).nonzero()
        if len(both):
            i, j = divmod(int(key[both[0, 0]]), columns)
            raise InputError(f"indices_tuple lists anchor {i} with {j} as a positive and as a negative: list it once")
        counts = torch.cat([times_positive, -times_negative])[order]
        return cls(same_set, key // columns, key % columns, counts, rows)

    @cached_property
    def _row_start(self) -> Tensor:
        """(rows + 1,) on the host: where the pairs of an anchor begin."""
        bounds = torch.arange(self.rows + 1, device=self.anchors.device)
        return torch.searchsorted(self.anchors, bounds).cpu()

    @cached_property
    def _repeats(self) -> bool:
        return bool((self.counts.abs() > 1).any())

    def _find(self, i: slice, j: slice) -> tuple[slice, Tensor]:
        """The pairs of some anchors, and which of those have a reference in ``j``."""
        found = slice(int(self._row_start[i.start]), int(self._row_start[i.stop]))
        reference = self.references[found]
        return found, (reference >= j.start) & (reference < j.stop)

    def is_empty(self, i: slice, j: slice) -> bool:
        """Whether no pair of the tile is listed."""
        return not bool(self._find(i, j)[1].any())

    def relation(self, i: slice, j: slice) -> TileRelation:
        """The listed pairs, scattered into the tile."""
        found, inside = self._find(i, j)
        count = self.counts.new_zeros(i.stop - i.start, j.stop - j.start)
        at = self.anchors[found][inside] - i.start, self.references[found][inside] - j.start
        count[at] = self.counts[found][inside]
        return TileRelation(count > 0, count < 0, count.abs() if self._repeats else None)

    def max_positives(self) -> int:
        """Different positives of one anchor."""
        anchors = self.anchors[self.counts > 0]
        return int(torch.bincount(anchors).max()) if len(anchors) else 0


@dataclass(frozen=True)
class MaskedPairs(PairSelection):
    """Positives where a table says so; negatives are the rest, or what a second table says."""

    positives: Tensor  # (n, m) bool
    negatives: Tensor | None = None

    description = "positives= gives the pairs of the call"

    def relation(self, i: slice, j: slice) -> TileRelation:
        """Both tables, cut to the tile."""
        positive = self.positives[i, j]
        negative = ~positive if self.negatives is None else self.negatives[i, j]
        return TileRelation(self._leave_out_self(positive, i, j), self._leave_out_self(negative, i, j))

    def max_positives(self) -> int:
        """By the table, itself included."""
        return int(self.positives.sum(1).max())


@dataclass(frozen=True)
class LabelSets(PairSelection):
    """Samples of several classes: positive if two share at least one."""

    left: Tensor  # (n, C) bool
    right: Tensor  # (m, C) bool

    description = "labels are sets of classes"

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Sharing a class is mutual."""
        return self.same_set

    def _shares(self, i: slice, j: slice) -> Tensor:
        """A product counts the common classes: whole numbers, which float32 holds exactly."""
        return self.left[i].float() @ self.right[j].float().T > 0

    def relation(self, i: slice, j: slice) -> TileRelation:
        """Whether two samples have a class in common."""
        positive = self._shares(i, j)
        return TileRelation(self._leave_out_self(positive, i, j), self._leave_out_self(~positive, i, j))

    def max_positives(self) -> int:
        """Counted in tiles."""
        return max(int(sum(self._shares(i, j).sum(1) for j in _cut(self.right)).max()) for i in _cut(self.left))  # type: ignore[union-attr]


@dataclass(frozen=True)
class SoftTargets(PairSelection):
    """How alike two samples are, from 0 to 1; a pair in between is on both sides in part."""

    targets: Tensor  # (n, m)

    description = "targets= are soft"
    soft = True

    def relation(self, i: slice, j: slice) -> TileRelation:
        """The table, cut to the tile."""
        t = self.targets[i, j]
        return TileRelation(self._leave_out_self(t > 0, i, j), self._leave_out_self(t < 1, i, j), target=t)

    def max_positives(self) -> int:
        """By the table, itself included."""
        return int((self.targets > 0).sum(1).max())


def _cut(x: Tensor) -> Iterator[slice]:
    for start in range(0, len(x), CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, len(x)))


def count_repeats(acc: Reduction, repeats: Tensor | None) -> Reduction:
    """A reduction in which every pair counts as often as it is listed, whatever the difficulty makes of it.

    A maximum does not change; of gathered entries their weights do, so that an entry stands for its copies.
    """
    if repeats is None or acc.kind == "max" or (acc.kind == "gather" and acc.weighting == "none"):
        return acc
    x = acc.values
    k = repeats if not isinstance(x, Tensor) or x.ndim == 2 else repeats[..., None]
    if acc.kind == "logsumexp":
        return replace(acc, values=x + k.clamp(min=1).log())  # a count of 0 is masked
    return replace(acc, values=x * k)


def select_pairs(
    z: Tensor,
    ref: Reference | None,
    *,
    indices_tuple: IndicesTuple | None = None,
    positives: Tensor | None = None,
    negatives: Tensor | None = None,
    targets: Tensor | None = None,
) -> PairSelection | None:
    """The selection that the arguments of a call describe; None where its labels say everything."""
    given = {"indices_tuple": indices_tuple, "positives": positives, "targets": targets}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InputError(f"{' and '.join(f'{name}=' for name in names)} both say which pairs there are: give one")
    if negatives is not None and positives is None:
        raise InputError("negatives= is the other half of positives=: give both, or list the pairs by indices_tuple=")
    if not names:
        return None
    if not isinstance(z, Tensor) or z.ndim != 2:
        raise InputError(f"embeddings must be (n, d), got {tuple(z.shape) if isinstance(z, Tensor) else type(z)}")
    columns, same_set = len(z) if ref is None else len(ref[0]), ref is None
    if indices_tuple is not None:
        pairs = validate_indices(indices_tuple, z, columns, same_set=same_set)
        return ListedPairs.from_tuple(pairs, len(z), columns, same_set=same_set)
    shape = len(z), columns
    if targets is not None:
        return SoftTargets(same_set, _validate_targets(targets, z, shape))
    assert positives is not None
    _validate_mask("positives", positives, z, shape)
    if negatives is not None:
        _validate_mask("negatives", negatives, z, shape)
        both = positives & negatives
        both = both & ~torch.eye(len(z), dtype=torch.bool, device=z.device) if same_set else both
        if bool(both.any()):
            i, j = both.nonzero()[0].tolist()
            raise InputError(
                f"positives and negatives both hold the pair ({i}, {j}): a pair is one of them, or neither"
            )
    return MaskedPairs(same_set, positives, negatives)


def validate_indices(given: Any, z: Tensor, columns: int, *, same_set: bool) -> tuple[Tensor, ...]:
    """The index tensors of a miner as int64; refuses what lists no pairs of this call."""
    if not isinstance(given, tuple | list) or len(given) not in (3, 4):
        came = f"{len(given)} entries" if isinstance(given, tuple | list) else type(given).__name__
        raise InputError(
            "indices_tuple must be pairs (anchors, positives, anchors, negatives) or triplets (anchors, positives, "
            f"negatives), as miners return them, got {came}"
        )
    found = []
    for k, x in enumerate(given):
        name = f"indices_tuple[{k}]"
        if not isinstance(x, Tensor) or x.ndim != 1:
            came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} must be a tensor (p,) of positions, got {came}")
        if len(x) and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            raise InputError(f"{name} must hold whole numbers, got {x.dtype}: positions, not a mask")
        if x.device != z.device:
            raise InputError(f"{name} is on {x.device}, embeddings on {z.device}: move it there")
        is_anchor = k == 0 or (k == 2 and len(given) == 4)
        size = len(z) if is_anchor else columns
        if len(x) and not (int(x.min()) >= 0 and int(x.max()) < size):
            what = "embeddings" if is_anchor or same_set else "references"
            raise InputError(
                f"{name} must hold positions of {size} {what}, 0 to {size - 1}, got {int(x.min())} to {int(x.max())}"
            )
        found.append(x.long())
    groups = ((0, 1), (2, 3)) if len(given) == 4 else ((0, 1), (0, 2))
    for a, b in groups:
        if len(found[a]) != len(found[b]):
            raise InputError(
                f"indices_tuple[{a}] and [{b}] list pairs together and must have one length, got "
                f"{len(found[a])} and {len(found[b])}"
            )
        if same_set and bool((found[a] == found[b]).any()):
            row = int(found[a][found[a] == found[b]][0])
            raise InputError(f"indices_tuple pairs sample {row} with itself: a row is never compared with itself")
    return tuple(found)


def _validate_mask(name: str, given: Any, z: Tensor, shape: tuple[int, int]) -> None:
    if not isinstance(given, Tensor) or given.dtype != torch.bool or tuple(given.shape) != shape:
        came = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{name} must be a boolean tensor, one entry per pair, {shape}, got {came}")
    if given.device != z.device:
        raise InputError(f"{name} is on {given.device}, embeddings on {z.device}: move it there")


def _validate_targets(given: Any, z: Tensor, shape: tuple[int, int]) -> Tensor:
    if not isinstance(given, Tensor) or not given.is_floating_point() or tuple(given.shape) != shape:
        came = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"targets must be a floating point tensor, one entry per pair, {shape}, got {came}")
    if given.device != z.device:
        raise InputError(f"targets are on {given.device}, embeddings on {z.device}: move them there")
    if given.requires_grad:
        raise InputError("targets want a gradient, and get none: pass targets.detach()")
    if not bool(((given >= 0) & (given <= 1)).all()):
        raise InputError("targets must lie between 0 and 1, and some are outside or NaN")
    return given


def resolve_labels(
    z: Tensor, labels: Tensor | None, ref: Reference | None, selection: PairSelection | None
) -> tuple[Tensor, Reference | None, PairSelection | None]:
    """Labels with one number per sample, as the engine has them, and the selection of a call.

    Sets of classes, (n, C), become a selection; where a selection says everything, labels may be None.
    """
    sets = isinstance(labels, Tensor) and labels.ndim == 2
    if selection is None and not sets:
        if labels is None:
            raise InputError(
                "labels are None: give them, or say by indices_tuple=, positives= or targets= what is alike"
            )
        return labels, ref, None
    if not isinstance(z, Tensor) or z.ndim != 2:
        return labels, ref, selection  # type: ignore[return-value]  # refused by `validate_inputs`
    if sets and selection is None:
        left = _as_label_sets(labels, z, "labels")  # type: ignore[arg-type]
        right = left if ref is None else _as_label_sets(ref[1], ref[0], "reference labels")
        if right.shape[1] != left.shape[1]:
            raise InputError(
                f"labels are sets of {left.shape[1]} classes, reference labels of {right.shape[1]}: give one number"
            )
        selection = LabelSets(ref is None, left, right)
    if labels is None or sets:
        labels = torch.zeros(len(z), dtype=torch.long, device=z.device)
    if ref is not None and isinstance(ref, tuple | list) and len(ref) > 1:
        own = ref[1]
        if own is None or (isinstance(own, Tensor) and own.ndim == 2):
            own = torch.zeros(len(ref[0]), dtype=torch.long, device=z.device)
        ref = (ref[0], own, *ref[2:])  # type: ignore[assignment]
    return labels, ref, selection  # type: ignore[return-value]


def _as_label_sets(given: Any, z: Tensor, name: str) -> Tensor:
    """(n, C) as booleans."""
    if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != len(z):
        came = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{name} must be sets of classes, ({len(z)}, C), like those of the other side, got {came}")
    if given.shape[1] < 2:
        raise InputError(
            f"{name} must have one entry per embedding, or be sets of at least two classes, (n, C): got "
            f"{tuple(given.shape)}. If they are one label each, pass labels.flatten()"
        )
    if given.device != z.device:
        raise InputError(f"{name} are on {given.device}, embeddings on {z.device}: move them to one device")
    if given.dtype != torch.bool and not bool(((given == 0) | (given == 1)).all()):
        raise InputError(
            f"{name} of shape {tuple(given.shape)} are sets of classes and must hold 0 and 1 only; the embeddings of "
            "two towers are compared by CLIP or SigLIP"
        )
    return given.bool()
