"""Which thresholds a gallery answers by, as its record stands now.

    1. given when the gallery was opened: these alone
    2. for each false-accept rate that it measured, the calibration kept in the record
    3. for the other rates, those that the gallery was made with, or the contract of its model, except where the
       calibration contradicts them: it found a stricter threshold needed for a rate that allows as much or more

A calibration counts people, a contract comparisons: the answer says which, and where a rate was not calibrated though
others were. What others keep or forget is seen at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mettle.errors import GalleryError, GalleryUnavailable
from mettle.match.calibration import Calibration, Standing, strange
from mettle.match.operating import CONTRADICTED, Operating, operating
from mettle.match.record import Record


class Thresholds:
    """The table of one gallery, read anew when its record has changed."""

    def __init__(self, record: Record, given: Mapping[str, Any], model: Mapping[str, Any]):
        self._record, self._given, self._model = record, given, model
        self._seen: tuple[int, Standing | None, Mapping[str, Any]] | None = None  # as of a change of the record

    def point(self, far: float | None, threshold: float | None) -> Operating:
        """The point that an answer is given at."""
        if threshold is not None or self._given:
            return operating({} if threshold is not None else self._given, far, threshold)
        standing, table = self._now()
        found = operating(table, far)
        if standing is None or found.far not in standing.calibration.rates or self._strange(standing):
            return found
        return replace(found, people=standing.calibration.people, came=standing.came)  # measured here: more is known

    def table(self) -> Mapping[str, Any]:
        """Thresholds by rate, each with what must be said of it."""
        return self._given or self._now()[1]

    def standing(self) -> Standing | None:
        """The calibration that the record keeps, used or not."""
        return self._now()[0]

    def shown(self) -> tuple[Mapping[str, Any], Standing | None]:
        """Table and calibration to look at: where that is damaged, which stops answers, the table without it."""
        if not self._damage():
            return self.table(), self.standing()
        if self._given:
            return self._given, None
        return {
            rate: {**entry, "remark": "not used while the calibration is damaged"}
            for rate, entry in self._model.items()
        }, None

    def notes(self) -> list[str]:
        """What is odd about the calibration, in words."""
        if damage := self._damage():
            return [damage]
        standing = self.standing()
        if standing is None:
            return []
        if other := self._strange(standing):
            return [other]
        return [f"the calibration is {standing.stale}"] if standing.stale else []

    def _damage(self) -> str:
        try:
            self._now()
        except GalleryUnavailable:
            raise
        except GalleryError as damaged:
            return str(damaged)
        return ""

    def _strange(self, standing: Standing) -> str:
        bound = self._record.binding
        return strange(standing.calibration, bound.fusion, bound.model)

    def _now(self) -> tuple[Standing | None, Mapping[str, Any]]:
        sequence, seen = self._record.sequence(), self._seen
        if seen is None or seen[0] != sequence:
            standing = self._record.standing()
            seen = self._seen = (sequence, standing, self._model if standing is None else self._joined(standing))
        return seen[1], seen[2]

    def _joined(self, standing: Standing) -> Mapping[str, Any]:
        found, other = standing.calibration, self._strange(standing)
        if other:
            return {rate: {**entry, "remark": other} for rate, entry in self._model.items()}
        rates = ", ".join(f"{rate:g}" for rate in found.rates)
        aside = f"the gallery was calibrated for {rates} per person, not for this rate"
        table: dict[str, Any] = {}
        for rate, entry in self._model.items():
            if _contradicted(float(rate), entry, found):
                table[repr(float(rate))] = {**entry, "threshold": None, "status": CONTRADICTED}
            else:
                table[repr(float(rate))] = {**entry, "remark": aside}
        for rate, entry in found.table.items():
            if entry.get("threshold") is not None:
                table[rate] = {**entry, "remark": standing.stale} if standing.stale else dict(entry)
            else:
                table.setdefault(rate, dict(entry))
        return table


def _contradicted(rate: float, entry: Mapping[str, Any], found: Calibration) -> bool:
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
