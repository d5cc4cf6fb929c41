"""Matryoshka representation learning: a loss on several prefixes of the embedding, each a usable embedding."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self

from torch import Tensor, nn

from mettle.difficulty.settings import validate_integers
from mettle.errors import InputError
from mettle.losses.cross_batch_memory import takes_references
from mettle.losses.weighted_sum import Weight, WeightedSum


class Matryoshka(WeightedSum):
    r"""One loss at several lengths of the embedding, so that its first numbers alone are an embedding too.

    Formula:
        L = Σ_d w_d L_d(z[:, :d], y),   d from ``dims`` (Kusupati et al. 2022)
    Needs:
        what the loss needs. Prefixes are not scaled to length 1 here: losses on the sphere do that themselves.
    Use when:
        one model should give long embeddings where accuracy counts and short ones where memory or time does.
    Relations:
        dims = (d,) with the whole length d: the loss itself. A `WeightedSum` otherwise, weights and log included.

    Args:
        loss: one for all prefixes, or a list with one for each. A module is copied for each prefix, so that what it
            learns or remembers belongs to that length. Losses with class vectors come as a list, ``[ArcFace(C, 16),
            ArcFace(C, 64)]``: each length has a classifier of its own, as in the paper.
        dims: lengths of the prefixes, ascending.
        weights: one for each, as for `WeightedSum`; all 1 by default, as in the paper.
        dim: length of the whole embedding, to refuse longer prefixes at once; recipes know it.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
        dims: Sequence[int],
        weights: Sequence[Weight] | None = None,
        *,
        dim: int | None = None,
    ):
        dims = _check_dims(dims, dim)
        losses = _match_losses(loss, dims)
        super().__init__({f"dim {d}": PrefixLoss(one, d) for one, d in zip(losses, dims, strict=True)}, weights)
        self.dims = dims


class PrefixLoss(nn.Module):
    """A loss of the first ``dim`` numbers of each embedding."""

    def __init__(self, loss: Callable[..., Tensor], dim: int):
        super().__init__()
        self.loss, self.dim = loss, dim

    @property
    def takes_progress(self) -> bool:
        """As the loss."""
        return getattr(self.loss, "takes_progress", False)

    @property
    def takes_references(self) -> bool:
        """As the loss."""
        return takes_references(self.loss)

    @property
    def num_classes(self) -> int:
        """As the loss; an attribute that is not there where it has no class vectors."""
        if not hasattr(self.loss, "num_classes"):
            raise AttributeError("this loss has no class vectors")
        return self.loss.num_classes  # type: ignore[attr-defined]

    @property
    def start_from(self) -> Callable[..., Self]:
        """Start the class vectors of the loss at means of prefixes; not there where it has none."""
        if not hasattr(self.loss, "start_from"):
            raise AttributeError("this loss has no class vectors")
        return self._start_class_vectors

    def _start_class_vectors(self, embeddings: Tensor, labels: Tensor, **options: Any) -> Self:
        self.loss.start_from(self._cut(embeddings), labels, **options)  # type: ignore[attr-defined]
        return self

    def _cut(self, embeddings: Tensor) -> Tensor:
        if embeddings.ndim != 2 or embeddings.shape[1] < self.dim:
            raise InputError(
                f"a prefix of {self.dim} numbers needs embeddings (n, {self.dim}) or longer, got "
                f"{tuple(embeddings.shape)}: leave {self.dim} out of dims"
            )
        return embeddings[:, : self.dim]

    def forward(self, embeddings: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """The loss of the prefixes, against those of a reference set where one is given."""
        if options.get("ref") is not None:
            reference, *others = options["ref"]
            options["ref"] = (self._cut(reference), *others)
        return self.loss(self._cut(embeddings), labels, **options)


def _check_dims(dims: Any, whole: int | None) -> tuple[int, ...]:
    if isinstance(dims, str) or not isinstance(dims, Sequence) or not dims:
        raise InputError(f"dims must be the lengths of the prefixes, such as (16, 32, 64), got {dims!r}")
    for dim in dims:
        validate_integers(dims=dim)
    found = tuple(int(dim) for dim in dims)
    if found[0] < 1 or any(b <= a for a, b in pairwise(found)):
        raise InputError(f"dims must ascend and begin at 1 or more, got {found}")
    if whole is not None and found[-1] > whole:
        raise InputError(f"dims reach {found[-1]}, the embeddings have {whole} numbers: leave longer prefixes out")
    return found


def _match_losses(loss: Any, dims: tuple[int, ...]) -> list[Callable[..., Tensor]]:
    """A loss for each prefix."""
    if isinstance(loss, Sequence):
        if len(loss) != len(dims):
            raise InputError(f"{len(loss)} losses for {len(dims)} prefixes: give one for each, or one for all")
        found = list(loss)
    else:
        found = [copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss for _ in dims]
    for one, dim in zip(found, dims, strict=True):
        name = type(one).__name__
        if not callable(one) or isinstance(one, type):
            raise InputError(f"loss must be callable on (embeddings, labels), got {one!r}")
        if getattr(one, "takes_after", False) is True:
            raise InputError(
                "a sum with losses after a neck has two embeddings to cut: put Matryoshka around its parts"
            )
        length = getattr(one, "dim", dim)
        if hasattr(one, "num_classes") and length != dim:
            raise InputError(
                f"{name} has class vectors of {length} numbers, the prefix has {dim}: give a list with a loss for "
                f"each prefix, such as {name}({one.num_classes}, {dim})"  # type: ignore[attr-defined]
            )
    return found
