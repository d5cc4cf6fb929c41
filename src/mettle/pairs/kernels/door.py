"""The door that the engine knocks at: a fused evaluation where there is one, else the reason why there is not."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernel_spec import NoKernel
from mettle.pairs.kernels.spec import Form, find_form


@dataclass(frozen=True)
class Call:
    """What the engine was called with."""

    z: Tensor
    labels: Tensor
    ref: Tensor | None
    ref_labels: Tensor | None
    biased: tuple[Tensor, Tensor] | None
    ids: Tensor | None


@dataclass(frozen=True)
class Found:
    """One value per anchor, where it is defined, how much it counts, and the mean where it came along."""

    values: Tensor
    defined: Tensor
    share: Tensor
    mean: Tensor | None


def call(z: Tensor, labels: Tensor, ref: Any, ids: Tensor | None, biased: Any) -> Call:
    """The engine's arguments, a second encoder's always as a pair; ids count only where both sides have them."""
    other, names = (None, None) if ref is None else (ref[0], ref[1])
    both = biased
    if biased is not None and isinstance(biased, tuple) == (ref is None):
        raise InputError("biased must be one tensor, or with ref= a pair: the second encoder's batch and references")
    if isinstance(biased, Tensor):
        both = (biased, biased)
    known = ids if ref is not None and len(ref) == 3 else None
    return Call(z, labels, other, names, both, known)


def attempt(loss: Any, difficulty: Any, given: Call) -> Found | NoKernel:
    """Evaluate where the kernels can."""
    form = find_form(loss, difficulty, given)
    if isinstance(form, NoKernel):
        return form
    ref = None if given.ref is None or given.ref_labels is None else (given.ref, given.ref_labels)
    if isinstance(form, Form):
        from mettle.pairs.kernels.call import fused

        found = fused(form, given.z, given.labels, ref, given.biased)
        # Every defined anchor counts alike; the mask itself says so without another launch.
        return Found(found.values, found.defined, found.defined, found.mean)
    from mettle.pairs.kernels.mining import hardest_rows

    rows = hardest_rows(loss, given.z, given.labels, ref)
    values = loss.finish(rows)
    for x in (given.z, given.ref):  # a maximum overlooks NaN; a loss must not
        if x is not None:
            values = values + (x.detach() - x.detach()).sum().to(values.dtype)
    return Found(values, loss.defined(rows), loss.share(rows), None)
