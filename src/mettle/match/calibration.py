"""What was measured on the people of a gallery, as its record keeps it: thresholds, and on whom they were measured.

A calibration goes stale by a clear rule: once the number of people differs by more than a tenth from what it was, or
more than a tenth as many templates have come, or gone, as it was measured on. A stale one is still used, since nothing
better was measured, and every answer that rests on it says so. One of another model or fusion rule is never used.

How low a rate can be measured depends on the pairs of people that there are. If none of P pairs reaches a threshold,
the rate of strangers is at most ``far`` with confidence 0.95 where (1 - far)^P <= 0.05: `pairs_needed`, `lowest_rate`.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mettle.errors import GalleryError
from mettle.match.operating import as_thresholds

CONFIDENCE = 0.95  # that the rate of strangers is not above the one that is told
SHARE = 0.1  # of people or templates that may change before it is stale


@dataclass(frozen=True)
class Calibration:
    """Thresholds that were measured on the people of a gallery."""

    table: Mapping[str, Any]  # in the form of a contract's, by false-accept rate
    people: int  # on whom it was measured,
    templates: int  # with how many templates,
    sequence: int  # after which change of the record
    fusion: str
    model: str | None  # sha256 of the weights
    came: int = 0  # templates that had come since when all was copied into this record

    @property
    def rates(self) -> list[float]:
        """The false-accept rates that could be measured, from the lowest."""
        return sorted(float(rate) for rate, entry in self.table.items() if entry.get("threshold") is not None)


@dataclass(frozen=True)
class Standing:
    """A calibration, and what has become of the gallery since."""

    calibration: Calibration
    people: int  # enrolled now
    templates: int  # enrolled now
    new: int  # of these, how many are from changes after the calibration's

    @property
    def came(self) -> int:
        """Templates that came since it was measured."""
        return self.calibration.came + self.new

    @property
    def gone(self) -> int:
        """Templates that it was measured on and that are no longer there."""
        return max(0, self.calibration.templates + self.came - self.templates)

    @property
    def stale(self) -> str:
        """Why it should be measured again; empty where it need not be."""
        then, most = self.calibration, SHARE * self.calibration.templates
        if max(self.came, self.gone) <= most and abs(self.people - then.people) <= SHARE * then.people:
            return ""
        return (
            f"stale: measured on {then.people} people, {self.people} are enrolled now, {self.came} templates came and "
            f"{self.gone} went since: calibrate again"
        )


def count_pairs(people: int) -> int:
    """How many pairs so many people make."""
    return people * (people - 1) // 2


def pairs_needed(far: float) -> int:
    """How many pairs of people a false-accept rate needs to be measured: 29 for 0.1, 299 for 0.01, 2995 for 0.001."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-far))


def people_needed(far: float) -> int:
    """How many people make as many pairs: 9 for 0.1, 25 for 0.01, 78 for 0.001."""
    people = math.isqrt(2 * pairs_needed(far))
    return next(n for n in (people, people + 1, people + 2) if count_pairs(n) >= pairs_needed(far))


def lowest_rate(pairs: int) -> float:
    """The lowest false-accept rate that can be measured on so many pairs of people."""
    return -math.expm1(math.log(1 - CONFIDENCE) / pairs)


def summary(standing: Standing) -> dict[str, Any]:
    """A calibration at a glance: on what it was measured, for which rates, what changed since."""
    found = standing.calibration
    return {
        "rates": found.rates,
        "people": found.people,
        "templates": found.templates,
        "sequence": found.sequence,
        "fusion": found.fusion,
        "model": found.model,
        "came": standing.came,
        "gone": standing.gone,
        "stale": standing.stale or None,
    }


def strange(found: Calibration, fusion: str, model: str | None) -> str:
    """Why a calibration is not of this gallery; empty where it is."""
    if found.fusion != fusion:
        return f"the calibration kept here is for fusion={found.fusion!r} and not used: calibrate again"
    if found.model != model:
        return "the calibration kept here is of another model and not used: calibrate again"
    return ""


def to_json(found: Calibration) -> str:
    """A calibration as text to be kept in the record, under its own checksum."""
    facts = asdict(found) | {"table": as_thresholds(found.table)}
    return json.dumps(facts | {"mark": _mark(facts)}, sort_keys=True, allow_nan=False)


def from_json(text: str) -> Calibration:
    """The calibration that `to_json` wrote."""
    try:
        facts = json.loads(text)
        mark = facts.pop("mark")
        if mark != _mark(facts):
            raise ValueError
        known = {field.name for field in fields(Calibration)}
        return Calibration(**{key: value for key, value in facts.items() if key in known})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise GalleryError(
            "the calibration in the record is damaged: calibrate again, or forget it (`mettle gallery calibrate "
            "--forget`) to answer by the model's thresholds"
        ) from None


def _mark(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
