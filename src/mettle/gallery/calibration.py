"""What was measured on the people of a gallery, as its storage keeps it: thresholds, and on whom they were measured.

A calibration goes stale by a clear rule: once the number of people differs by more than a tenth from what it was, or
more than a tenth as many templates have come, or gone, as it was measured on. A stale one is still used, since nothing
better was measured, and every answer that rests on it says so. One of another model or fusion rule is never used.

How low a rate can be measured depends on the pairs of people that there are. If none of P pairs reaches a threshold,
the rate of strangers is at most ``far`` with confidence 0.95 where (1 - far)^P <= 0.05: `lowest_rate`.

How near strangers come to the people of a gallery: thresholds whose false-accept rate is per person.

Every template is tried on everybody else who is enrolled, fused by the gallery's own rule. So the rate counts people as
they are enrolled, with as many templates as they have, where a contract's rate counts single templates.

It is to hold for strangers who come later, so fewer than a share ``far`` of these scores may reach the threshold. Of
P pairs of people k may, with P(Beta(k + 1, P - k) <= far) >= 0.95, and of the scores a share k / P: templates of the
same two people are no further evidence.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.errors import GalleryError
from mettle.gallery.scoring import TemplateMatrix, check_rule, read_everybody
from mettle.gallery.thresholds import as_thresholds

if TYPE_CHECKING:
    from mettle.gallery.storage.base import Storage


SHARE = 0.1  # of people or templates that may change before it is stale


@dataclass(frozen=True)
class GalleryCalibration:
    """Thresholds that were measured on the people of a gallery."""

    table: Mapping[str, Any]  # in the form of a contract's, by false-accept rate
    people: int  # on whom it was measured,
    templates: int  # with how many templates,
    sequence: int  # after which change of the storage
    fusion: str
    model: str | None  # sha256 of the weights
    came: int = 0  # templates that had come since when all was copied into this storage

    @property
    def rates(self) -> list[float]:
        """The false-accept rates that could be measured, from the lowest."""
        return sorted(float(rate) for rate, entry in self.table.items() if entry.get("threshold") is not None)


@dataclass(frozen=True)
class CalibrationStatus:
    """A calibration, and what has become of the gallery since."""

    calibration: GalleryCalibration
    people: int  # enrolled now
    templates: int  # enrolled now
    new: int  # of these, how many are from changes after the calibration's

    @property
    def templates_added(self) -> int:
        """Templates that came since it was measured."""
        return self.calibration.came + self.new

    @property
    def templates_removed(self) -> int:
        """Templates that it was measured on and that are no longer there."""
        return max(0, self.calibration.templates + self.templates_added - self.templates)

    @property
    def stale_reason(self) -> str:
        """Why it should be measured again; empty where it need not be."""
        then, most = self.calibration, SHARE * self.calibration.templates
        if (
            max(self.templates_added, self.templates_removed) <= most
            and abs(self.people - then.people) <= SHARE * then.people
        ):
            return ""
        return (
            f"stale: measured on {then.people} people, {self.people} are enrolled now, "
            f"{self.templates_added} templates came and {self.templates_removed} went since: calibrate again"
        )


def count_pairs(people: int) -> int:
    """How many pairs so many people make."""
    return people * (people - 1) // 2


def people_needed(far: float) -> int:
    """How many people make as many pairs: 9 for 0.1, 25 for 0.01, 78 for 0.001."""
    from mettle.evaluate.calibration import pairs_needed

    people = math.isqrt(2 * pairs_needed(far))
    return next(n for n in (people, people + 1, people + 2) if count_pairs(n) >= pairs_needed(far))


def lowest_rate(pairs: int) -> float:
    """The lowest false-accept rate that can be measured on so many pairs of people."""
    from mettle.evaluate.calibration import CONFIDENCE

    return -math.expm1(math.log(1 - CONFIDENCE) / pairs)


def summarize_calibration(standing: CalibrationStatus) -> dict[str, Any]:
    """A calibration at a glance: on what it was measured, for which rates, what changed since."""
    found = standing.calibration
    return {
        "rates": found.rates,
        "people": found.people,
        "templates": found.templates,
        "sequence": found.sequence,
        "fusion": found.fusion,
        "model": found.model,
        "came": standing.templates_added,
        "gone": standing.templates_removed,
        "stale": standing.stale_reason or None,
    }


def calibration_to_json(found: GalleryCalibration) -> str:
    """A calibration as text to be kept in the storage, under its own checksum."""
    facts = asdict(found) | {"table": as_thresholds(found.table)}
    return json.dumps(facts | {"mark": _checksum(facts)}, sort_keys=True, allow_nan=False)


def calibration_from_json(text: str) -> GalleryCalibration:
    """The calibration that `calibration_to_json` wrote; values that none can have are refused."""
    try:
        facts = json.loads(text)
        mark = facts.pop("mark")
        if mark != _checksum(facts):
            raise ValueError
        found = GalleryCalibration(**facts)
        counts = (found.people, found.templates, found.sequence, found.came)
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError
        check_rule(found.fusion)
        as_thresholds(found.table)
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise GalleryError(
            "the calibration in the storage is damaged: calibrate again, or forget it (`mettle gallery calibrate "
            "--forget`) to answer by the model's thresholds"
        ) from None


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


PAIRS = 10_000_000  # scores of a probe with a person, at most: 40 MB


def measure_calibration(storage: "Storage", fars: Sequence[float] | float, seed: int = 0) -> GalleryCalibration:
    """A table of thresholds in the form of a contract's, with ``per`` "person"; above `PAIRS`, from a sample."""
    from mettle.evaluate import inputs

    fars = inputs.check_rates(fars, below_one=True)
    sequence = storage.sequence()  # before they are read: what comes in between counts as having come since
    found = read_everybody(storage)
    vectors, people = found.vectors, len(found.names)
    if people < 2:
        raise GalleryError(f"calibration tries people on each other, and {people} are enrolled: enrol two or more")
    rule = storage.binding.fusion
    tried = np.arange(len(vectors))
    if len(tried) * (people - 1) > PAIRS:
        tried = np.sort(np.random.default_rng(seed).choice(len(tried), max(1, PAIRS // (people - 1)), replace=False))
    scores = _impostor_scores(found, tried, rule)
    pairs = min(count_pairs(people), len(scores))
    about = {
        "per": "person",
        "fusion": rule,
        "templates": len(vectors) / people,
        "impostors": pairs,
        "measured_on": f"the {people} people enrolled, with {len(vectors)} templates: each tried on the others",
    }
    table = {repr(float(far)): _threshold_entry(scores, float(far), pairs) | about for far in fars}
    return GalleryCalibration(table, people, len(vectors), sequence, rule, storage.binding.model)


def _threshold_entry(scores: np.ndarray, far: float, pairs: int) -> dict[str, Any]:
    from mettle.evaluate import roc
    from mettle.evaluate.calibration import count_allowed_errors, threshold_above

    allowed = count_allowed_errors(far, pairs, conservative=True)
    if allowed >= 0:
        threshold = threshold_above(scores, allowed * len(scores) // pairs)
        if threshold <= 1:
            status = roc.sample_size_status(float(roc.allowed_errors(far, pairs)))
            return {"threshold": max(-1.0, threshold), "status": status}
    return {"threshold": None, "status": "not measurable"}  # too few, or too many are enrolled under two names


def _impostor_scores(found: TemplateMatrix, tried: np.ndarray, rule: str) -> np.ndarray:
    """(p·(people - 1),) fused scores of each of these templates with everybody but its own person."""
    people = np.arange(len(found.names))
    return np.concatenate([scores[people != found.owner[at, None]] for at, scores in found.score_blocks(tried, rule)])
