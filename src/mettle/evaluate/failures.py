"""Failures to acquire and to enrol: the error rates of a whole system, not of comparisons alone.

    FTA   probes without a template / all probes                FAR = FMR·(1−FTA)·(1−FTE)
    FTE   enrolments without a template / all enrolments        FRR = FTE + (1−FTE)·(FTA + FNMR·(1−FTA))

FMR and FNMR are here those of pairs that have both templates. A pair with a failed template can be kept with a score
of −∞: it is never accepted and stays in every denominator, so that ``rates(τ)`` of such scores are FAR and FRR already,
and what is missing is how much of them the failures are. Or failed samples were left out, as embeddings must be, and
are told as FTA and FTE. One way or the other: a failure that is told twice counts twice.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mettle.errors import InputError
from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.several import numbers


@dataclass(frozen=True)
class SystemRates:
    """Error rates at one threshold, of comparisons and of the whole system.

    Attributes:
        threshold: accept iff s ≥ τ.
        fmr: share of impostor pairs accepted, of those with both templates.
        fnmr: share of genuine pairs rejected, of those with both templates.
        fta_impostor: share of impostor pairs without a probe's template; FTA where that was given.
        fta_genuine: share of genuine pairs without one; the same where FTA was given.
        fte: share of enrolments without a template; 0 where failures are scores of −∞, whichever side failed.
        far: share of impostor attempts that are accepted.
        frr: share of genuine attempts that are not, whatever the reason.
    """

    threshold: float
    fmr: float
    fnmr: float
    fta_impostor: float
    fta_genuine: float
    fte: float
    far: float
    frr: float


def system_rates(
    threshold: float,
    errors: tuple[int, int],
    pairs: tuple[int, int],
    failed: tuple[int, int],
    fta: float | None,
    fte: float | None,
) -> SystemRates:
    """FAR and FRR from counts; of two numbers the first is of impostor pairs, the second of genuine ones.

    Args:
        threshold: what the errors were counted at.
        errors: pairs accepted, and pairs rejected, those that failed among them.
        pairs: how many there are.
        failed: how many have a failed template.
        fta: share of the probes that are in no pair because they gave no template.
        fte: share of the enrolments that are in no pair because they gave none.
    """
    if any(failed) and not (fta is None and fte is None):
        raise InputError(
            f"fta and fte are of samples left out, but {sum(failed)} failed pairs (−inf) are counted already: "
            "leave fta and fte out, or leave out those pairs"
        )
    for kind, n, bad in zip(("impostor", "genuine"), pairs, failed, strict=True):
        if bad == n:
            raise NotMeasurable(f"every {kind} pair has a failed template (−inf): no comparison is left to rate")
    fmr = Fraction(errors[0], pairs[0] - failed[0])
    fnmr = Fraction(errors[1] - failed[1], pairs[1] - failed[1])
    missed, unenrolled = _share(fta, "fta"), _share(fte, "fte")
    lost = [Fraction(bad, n) if any(failed) else missed for bad, n in zip(failed, pairs, strict=True)]
    far = fmr * (1 - lost[0]) * (1 - unenrolled)
    frr = unenrolled + (1 - unenrolled) * (lost[1] + fnmr * (1 - lost[1]))
    found = (float(rate) for rate in (fmr, fnmr, lost[0], lost[1], unenrolled, far, frr))
    return SystemRates(threshold, *found)


def _share(value: Any, name: str) -> Fraction:
    """A share as the exact number that came; none is 0."""
    if value is None:
        return Fraction(0)
    found = numbers(value)
    if found is None or len(found) != 1 or not 0 <= found[0] <= 1:
        raise InputError(f"{name} must be a share between 0 and 1, failed samples / all of them: got {value!r}")
    return Fraction(found[0])
