"""At which threshold a gallery says yes, and the false-accept rate that it stands for.

- A ``threshold`` given with the question is taken as it is, 0 included; its rate is not known.
- Of the gallery's `thresholds` (calibrated on its people, in the model's contract, or given by hand), the one for
  ``far`` is taken: by default 1e-3, or the lowest rate that could be measured.
- Where there are none, there is no threshold: the verdict is "not calibrated", whatever the score. Nothing is assumed
  about vectors that nobody has measured: those of most models share a mean, so that strangers are close, too.

A contract's rate is per comparison: one probe with one template. A person has several templates and a gallery many
people, so strangers have more chances than one; `most` bounds them. `calibrate` measures rates per person instead.

Which thresholds a gallery answers by, as its storage stands now.

    1. given when the gallery was opened: these alone
    2. for each false-accept rate that it measured, the calibration kept in the storage
    3. for the other rates, those that the gallery was made with, or the contract of its model, except where the
       calibration contradicts them: it found a stricter threshold needed for a rate that allows as much or more

A calibration counts people, a contract comparisons: the answer says which, and where a rate was not calibrated though
others were. What others keep or forget is seen at once.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, InputError

if TYPE_CHECKING:
    from mettle.gallery.calibration import CalibrationStatus, GalleryCalibration
    from mettle.gallery.storage.base import Storage


DEFAULT_FAR = 1e-3


NOT_CALIBRATED = (
    "no threshold was measured for this gallery: measure one (Gallery.calibrate, `mettle gallery calibrate`), or give "
    "one (threshold=, --threshold)"
)


TOO_FEW_MEASURED = (
    "the thresholds of the model rest on too few validation identities: measure one on the people enrolled "
    "(Gallery.calibrate, `mettle gallery calibrate`), ask for one of them (far=, --far), or give one (threshold=, "
    "--threshold)"
)


LAXEST_DEFAULT = 0.01


CONTRADICTED = "contradicted by the calibration"  # status of a threshold that is laxer than its rate allows here


@dataclass(frozen=True)
class DecisionThreshold:
    """A threshold and what is known of it."""

    threshold: float | None  # None: none was measured and none was given
    far: float | None
    basis: str
    per: str = "comparison"  # what ``far`` counts: "comparison" with one template, or with a whole "person"
    templates: float = 1.0  # of a person, on average, where ``far`` counts people
    people: int | None = None  # on how many it was measured, and
    came: int = 0  # how many of the templates that are there now came since; both where it is known

    @property
    def counts(self) -> str | None:
        """What ``far`` counts, None where there is none."""
        return None if self.far is None else self.per

    def accepts(self, score: float) -> bool:
        """Whether a score is a match; without a threshold none is."""
        return self.threshold is not None and score >= self.threshold


def false_accept_bound(point: DecisionThreshold, rule: str, people: int, templates: int) -> float | None:
    """The largest share of strangers that at least one of these people, with so many templates in all, accepts.

    Whoever is accepted by `best` or `mean` has reached the threshold with one template or more, which per template
    happens at rate ``far`` at most: the sum over all templates bounds it, however they depend on each other. A
    `centroid` may reach it where no template does: None, unless everybody has one template.

    A rate per person holds while people have no more templates than when it was measured; beyond that, other rules
    than `best` have no bound. By `best`, whoever is given a name has reached the threshold with a template that was
    measured, and then somebody measured accepts them, which the rate sums up to ``far`` times the people measured; or
    with one that came since, which alone accepts no more than a person with it and others did: ``far`` for each. Where
    it is not known what came, every template counts alone. Several that came are not taken together as one person's:
    what was measured may have been near-copies, which strangers reach together, and what came may not be.
    """
    if point.far is None:
        return None
    if point.per == "person" and templates <= people * point.templates:
        chances = people
    elif point.per == "person" and rule != "best":
        return None
    elif point.people is not None:
        chances = min(templates, point.people + point.came)
    elif rule == "centroid" and templates > people:
        return None
    else:
        chances = templates
    return min(1.0, point.far * chances)


def decision_threshold(
    thresholds: Mapping[str, Any], far: float | None = None, threshold: float | None = None
) -> DecisionThreshold:
    """The point that an answer is given at."""
    if threshold is not None:
        value = _check_number(threshold, "threshold is a cosine, between -1 and 1")
        if not -1 <= value <= 1:
            raise InputError(f"threshold is a cosine, between -1 and 1: got {threshold!r}")
        return DecisionThreshold(value, None, "threshold given with the question")
    if far is not None and not 0 < _check_number(far, "far is a rate between 0 and 1") < 1:
        raise InputError(f"far is a rate between 0 and 1: got {far!r}")
    known = {float(rate): entry for rate, entry in thresholds.items() if entry.get("threshold") is not None}
    if not known:
        return DecisionThreshold(None, None, NOT_CALIBRATED)
    sound = [rate for rate, entry in known.items() if _is_default(rate, entry)]
    if far is None and not sound:
        return DecisionThreshold(None, None, TOO_FEW_MEASURED)
    wanted = (DEFAULT_FAR if DEFAULT_FAR in sound else min(sound)) if far is None else far
    at = next((rate for rate in known if math.isclose(rate, wanted)), None)
    if at is None:
        listed = ", ".join(f"{rate:g}" for rate in sorted(known))
        same = (entry for rate, entry in thresholds.items() if math.isclose(float(rate), wanted))
        if any(entry.get("status") == CONTRADICTED for entry in same):
            why = f"the threshold for far={wanted:g} is {CONTRADICTED}"
        else:
            why = f"no threshold was measured for far={wanted:g}"
        raise InputError(f"{why}; known are {listed}: ask for one of these")
    entry = known[at]
    basis = (
        str(entry.get("measured_on", "given when the gallery was made"))
        + weak_evidence_note(at, entry)
        + threshold_note(entry)
    )
    more = {"per": "person", "templates": float(entry["templates"])} if entry.get("per") == "person" else {}
    return DecisionThreshold(float(entry["threshold"]), at, basis, **more)


def _is_default(rate: float, entry: Mapping[str, Any]) -> bool:
    """Whether answers may be given at this rate without being asked for it.

    Not at one that was measured on too few false accepts to be told, nor at one that was measured and lets in more than
    a stranger in a hundred. What somebody set by hand is theirs to judge, and a calibration keeps only what the people
    enrolled suffice for.
    """
    if "status" not in entry or entry.get("per") == "person":
        return True
    return entry["status"] != "refused as headline" and rate <= LAXEST_DEFAULT


def weak_evidence_note(far: float, entry: Mapping[str, Any]) -> str:
    """What must be said of a threshold that rests on too few comparisons; empty where nothing must."""
    status = entry.get("status")
    if status not in ("refused as headline", "flagged"):
        return ""
    count = entry.get("impostors")
    few = "few" if not isinstance(count, int) else f"only {math.floor(far * count + 1e-9)}"
    return f"; uncertain: it rests on {few} false accepts ({status})"


def threshold_note(entry: Mapping[str, Any]) -> str:
    """What has become of a threshold since it was measured, to be put behind its basis; mostly empty."""
    return f"; {entry['remark']}" if entry.get("remark") else ""


def as_thresholds(given: Mapping[Any, Any] | None) -> dict[str, Any]:
    """``{far: threshold}`` or the table of a contract, in the contract's form."""
    if given is not None and not isinstance(given, Mapping):
        raise InputError(
            f"thresholds must be a table by false-accept rate, such as {{1e-3: 0.42}}: got {type(given).__name__}"
        )
    found: dict[str, Any] = {}
    for rate, entry in (given or {}).items():
        try:
            far = float(rate)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"thresholds are keyed by false-accept rates: got {rate!r:.80}") from None
        if not 0 < far < 1:
            raise InputError(f"thresholds are keyed by false-accept rates between 0 and 1: got {rate!r}")
        table = dict(entry) if isinstance(entry, Mapping) else {"threshold": entry}
        if not isinstance(entry, Mapping) and entry is None:
            raise InputError(f"the threshold for far {far:g} is a cosine, between -1 and 1: got None")
        value, wanted = table.get("threshold"), f"the threshold for far {far:g} is a cosine, between -1 and 1"
        if value is not None and not -1 <= _check_number(value, wanted) <= 1:
            raise InputError(f"{wanted}: got {value!r}")
        if table.get("per") == "person" and not _check_number(table.get("templates"), "templates of a person") >= 1:
            raise InputError(f"the threshold for far {far:g} is per person, and templates of a person are 1 or more")
        found[repr(far)] = table | ({} if value is None else {"threshold": float(value)})
    _check_order(found)
    return found


def check_fusion(table: Mapping[str, Any], rule: str) -> None:
    """Refuse thresholds that were calibrated for people fused by another rule."""
    for entry in table.values():
        if entry.get("fusion", rule) != rule:
            raise InputError(
                f"thresholds were calibrated for fusion={entry['fusion']!r}, the gallery has {rule!r}: calibrate it"
            )


def _check_order(table: Mapping[str, Any]) -> None:
    """A lower rate needs a threshold at least as high: anything else has two of them mixed up."""
    known = sorted((float(r), e["threshold"]) for r, e in table.items() if e.get("threshold") is not None)
    for (low, strict), (high, lax) in itertools.pairwise(known):
        if strict < lax:
            raise InputError(
                f"thresholds must not rise with the false-accept rate: got {strict:g} for {low:g} and {lax:g} for "
                f"{high:g}; are two of them swapped?"
            )


def _check_number(value: Any, wanted: str) -> float:
    if isinstance(value, bool | np.bool_):
        raise InputError(f"{wanted}: got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{wanted}: got {value!r:.80}") from None


@dataclass
class _TableAt:
    """Thresholds as of a change of the storage, and the one that is used where none is asked for, once it is known."""

    sequence: int
    standing: "CalibrationStatus | None"
    table: Mapping[str, Any]
    default: DecisionThreshold | None = None


class ThresholdTable:
    """The table of one gallery, read anew when its storage has changed."""

    def __init__(self, storage: "Storage", given: Mapping[str, Any], model: Mapping[str, Any]):
        self._storage, self._given, self._model = storage, given, model
        self._seen: _TableAt | None = None

    def threshold_at(self, far: float | None, threshold: float | None) -> DecisionThreshold:
        """The point that an answer is given at."""
        if threshold is not None or self._given:
            return decision_threshold({} if threshold is not None else self._given, far, threshold)
        seen = self._current()
        if far is None and seen.default is not None:
            return seen.default
        standing, found = seen.standing, decision_threshold(seen.table, far)
        if standing is not None and found.far in standing.calibration.rates and not self._mismatch_reason(standing):
            # Measured here: more is known.
            found = replace(found, people=standing.calibration.people, came=standing.templates_added)
        if far is None:
            seen.default = found
        return found

    def to_table(self) -> Mapping[str, Any]:
        """Thresholds by rate, each with what must be said of it."""
        return self._given or self._current().table

    def calibration_status(self) -> "CalibrationStatus | None":
        """The calibration that the storage keeps, used or not."""
        return self._current().standing

    def table_and_calibration(self) -> "tuple[Mapping[str, Any], CalibrationStatus | None]":
        """Table and calibration to look at: where that is damaged, which stops answers, the table without it."""
        if not self._describe_damage():
            return self.to_table(), self.calibration_status()
        if self._given:
            return self._given, None
        return {
            rate: {**entry, "remark": "not used while the calibration is damaged"}
            for rate, entry in self._model.items()
        }, None

    def notes(self) -> list[str]:
        """What is odd about the calibration, in words."""
        if damage := self._describe_damage():
            return [damage]
        standing = self.calibration_status()
        if standing is None:
            return []
        if other := self._mismatch_reason(standing):
            return [other]
        return [f"the calibration is {standing.stale_reason}"] if standing.stale_reason else []

    def _describe_damage(self) -> str:
        try:
            self._current()
        except GalleryUnavailable:
            raise
        except GalleryError as damaged:
            return str(damaged)
        return ""

    def _mismatch_reason(self, standing: "CalibrationStatus") -> str:
        bound = self._storage.binding
        return mismatch_reason(standing.calibration, bound.fusion, bound.model)

    def _current(self) -> "_TableAt":
        sequence, seen = self._storage.sequence(), self._seen
        if seen is None or seen.sequence != sequence:
            standing = self._storage.calibration_status()
            table = self._model if standing is None else self._join_tables(standing)
            seen = self._seen = _TableAt(sequence, standing, table)
        return seen

    def _join_tables(self, standing: "CalibrationStatus") -> Mapping[str, Any]:
        found, other = standing.calibration, self._mismatch_reason(standing)
        if other:
            return {rate: {**entry, "remark": other} for rate, entry in self._model.items()}
        rates = ", ".join(f"{rate:g}" for rate in found.rates)
        aside = f"the gallery was calibrated for {rates} per person, not for this rate"
        table: dict[str, Any] = {}
        for rate, entry in self._model.items():
            if _is_contradicted(float(rate), entry, found):
                table[repr(float(rate))] = {**entry, "threshold": None, "status": CONTRADICTED}
            else:
                table[repr(float(rate))] = {**entry, "remark": aside}
        for rate, entry in found.table.items():
            if entry.get("threshold") is not None:
                table[rate] = {**entry, "remark": standing.stale_reason} if standing.stale_reason else dict(entry)
            else:
                table.setdefault(rate, dict(entry))
        return table


def _is_contradicted(rate: float, entry: Mapping[str, Any], found: "GalleryCalibration") -> bool:
    """Whether people of this gallery need a stricter threshold than this one for a rate that allows as much or more."""
    if entry.get("threshold") is None:
        return False
    for allowed, measured in found.table.items():
        if measured.get("threshold") is None:
            continue
        templates = measured.get("templates", 1.0)
        alike = entry.get("per") == "person" and templates <= entry["templates"]
        said = rate * (1 if alike else templates)  # what it promises of a person, at most
        if said <= float(allowed) * (1 + 1e-9) and entry["threshold"] < measured["threshold"]:
            return True
    return False


def mismatch_reason(found: "GalleryCalibration", fusion: str, model: str | None) -> str:
    """Why a calibration is not of this gallery; empty where it is."""
    if found.fusion != fusion:
        return f"the calibration kept here is for fusion={found.fusion!r} and not used: calibrate again"
    if found.model != model:
        return "the calibration kept here is of another model and not used: calibrate again"
    return ""
