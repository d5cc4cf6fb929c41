"""Protocols as data: a small JSON file that names sample ids, so that everybody measures the same thing.

    {"format": 1, "name": "left to right", "kind": "verification",
     "gallery": [ids], "probes": [ids], "calibration": [ids], "training": [ids], "trials": [[id, id, 0 or 1]]}

| kind | what is done |
|---|---|
| verification | probes with each other, with the gallery where there is one, or the listed trials |
| identification | probes searched in the gallery; probes whose subject is not enrolled are the unknown ones |
| retrieval | probes ranked in the gallery, or in themselves |

Makers: :func:`class_disjoint`, :func:`cross_domain`, :func:`k_shot`, :func:`known_unknown`. They are pure functions of
what they are given and a seed. A plan is checked for leaks before anything is measured.

Embeddings and what is known about them, found by sample id, as protocols name them.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_text
from mettle.data.arrays import integers, names
from mettle.errors import DataError, InputError, nearest
from mettle.evaluate.calibration import TransferredThreshold, calibrate
from mettle.evaluate.diagnostics.leakage import SplitSide, assert_no_leakage
from mettle.evaluate.identification import Identification, identification
from mettle.evaluate.inputs import NotMeasurable, check_int
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments

KINDS = ("verification", "identification", "retrieval")
FORMAT = 1
_LISTS = ("gallery", "probes", "calibration", "training")


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Embeddings and what is known about them, found by id."""

    embeddings: Any
    labels: np.ndarray
    ids: np.ndarray
    domains: np.ndarray | None
    hashes: np.ndarray | None
    looks: Any
    order: np.ndarray

    @classmethod
    def from_columns(
        cls, embeddings: Any, labels: Any, ids: Any, domains: Any, hashes: Any = None, looks: Any = None
    ) -> "SampleIndex":
        """Check the columns; the rest are found by id.

        Raises:
            InputError: an id occurs twice, or a column does not fit.
        """
        n = len(embeddings)
        known = integers(ids, "ids", n)
        order = np.argsort(known, kind="stable")
        if (np.diff(known[order]) == 0).any():
            raise InputError("ids must be unique: a protocol names samples by them")
        return cls(
            embeddings,
            names(labels, "labels", n),
            known,
            None if domains is None else names(domains, "domains", n),
            None if hashes is None else names(hashes, "hashes", n),
            looks,
            order,
        )

    def positions_of(self, ids: tuple[int, ...]) -> np.ndarray:
        """Where these samples are.

        Raises:
            DataError: one is not there.
        """
        wanted = np.asarray(ids, np.int64)
        place = np.minimum(np.searchsorted(self.ids[self.order], wanted), len(self.ids) - 1)
        rows = self.order[place]
        missing = self.ids[rows] != wanted
        if missing.any():
            raise DataError(
                f"the protocol names id {wanted[missing][0]}, one of {missing.sum()} that have no embedding: embed "
                "all of its samples, and count failures as failed templates"
            )
        return rows

    def metric_arguments(self, ids: tuple[int, ...]) -> tuple[Any, ...]:
        """These samples as metrics take them: embeddings, labels, domains, ids."""
        at = self.positions_of(ids)
        domains = None if self.domains is None else self.domains[at]
        return self.embeddings[at], self.labels[at], domains, self.ids[at]

    def leakage_side(self, ids: tuple[int, ...]) -> SplitSide:
        """These samples as the search for leaks takes them."""
        at = self.positions_of(ids)
        hashes, looks = (None if column is None else column[at] for column in (self.hashes, self.looks))
        return SplitSide(self.ids[at], self.labels[at], hashes, looks=looks)


@dataclass(frozen=True)
class Protocol:
    """Who is compared with whom, by sample id.

    Attributes:
        name: for people.
        kind: "verification", "identification" or "retrieval".
        probes: ids.
        gallery: ids, or none to compare probes with each other.
        calibration: ids of people that thresholds are set on.
        training: ids that were trained on; none of their subjects may be tested.
        trials: (id, id, target), or none for all pairs.
    """

    name: str
    kind: str
    probes: tuple[int, ...]
    gallery: tuple[int, ...] = ()
    calibration: tuple[int, ...] = ()
    training: tuple[int, ...] = ()
    trials: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"no kind of protocol named {self.kind!r}{nearest(self.kind, KINDS)}")
        if not self.probes:
            raise InputError(f"protocol {self.name!r} names no probes")
        if self.kind == "identification" and not self.gallery:
            raise InputError(f"protocol {self.name!r} identifies nobody: it needs a gallery")
        for column in _LISTS:
            ids = getattr(self, column)
            if len(set(ids)) != len(ids):
                raise InputError(f"protocol {self.name!r} names an id twice in {column}")

    @property
    def fingerprint(self) -> str:
        """A short hash that changes when the protocol does, to be written beside every number."""
        text = json.dumps({**asdict(self), "name": ""}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(self, path: Path | str) -> Path:
        """Write the file, whole or not at all."""
        write_text(Path(path), json.dumps({"format": FORMAT, **asdict(self)}))
        return Path(path)

    @classmethod
    def read(cls, path: Path | str) -> "Protocol":
        """Read a file.

        Raises:
            DataError: not there, no JSON, another format, unknown keys, ids that are no whole numbers.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as e:
            raise DataError(f"cannot read the protocol {path}: {e.strerror}") from e
        except ValueError as e:
            raise DataError(f"the protocol {path} is no JSON: {e}") from e
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise DataError(f"the protocol {path} must be an object with format {FORMAT}")
        fields = {k: v for k, v in content.items() if k != "format"}
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise DataError(f"the protocol {path} has an unknown key {unknown[0]!r}{_suggest_id(unknown[0], cls)}")
        for column in _LISTS:
            fields[column] = tuple(_parse_int(v, path, column) for v in fields.get(column, ()))
        fields["trials"] = tuple(tuple(_parse_int(v, path, "trials") for v in t) for t in fields.get("trials", ()))
        if any(len(t) != 3 for t in fields["trials"]):
            raise DataError(f"trials of the protocol {path} must be [id, id, target]")
        try:
            return cls(**fields)
        except (TypeError, InputError) as e:
            raise DataError(f"the protocol {path} is not usable: {e}") from e

    def run(
        self,
        embeddings: Any,
        labels: Any,
        ids: Any,
        *,
        domains: Any = None,
        hashes: Any = None,
        looks: Any = None,
        fail_on_similar: bool = False,
        **options: Any,
    ) -> Verification | Identification | Retrieval:
        """Check the protocol against the data and measure.

        Args:
            embeddings: (n, d), of at least every sample that the protocol names.
            labels: (n,) integers or text.
            ids: (n,) integers.
            domains: (n,), optional.
            hashes: (n,) hash of each sample's file, optional; the same file on both sides is then a leak.
            looks: (n, 143) look of each sample's picture, optional (see :func:`mettle.evaluate.picture_looks`);
                pictures of both sides that look alike are then warned about.
            fail_on_similar: whether such pictures are leaks.
            options: for the metric, such as ``k`` of retrieval or ``fusion`` of identification.

        Raises:
            DataError: an id that is not there, or a leak.
        """
        table = SampleIndex.from_columns(embeddings, labels, ids, domains, hashes, looks)
        self._check_leakage(table, fail_on_similar)
        probe, shelf = (
            table.metric_arguments(self.probes),
            table.metric_arguments(self.gallery) if self.gallery else None,
        )
        if self.kind == "identification":
            assert shelf is not None
            return identification(shelf, probe, **options)
        values, y, d, known = probe
        if self.kind == "retrieval":
            return retrieval(values, y, domains=d, ids=known, gallery=shelf, **options)
        if self.trials:
            options["trials"] = np.asarray(self.trials, np.int64)
        return verification(values, y, domains=d, ids=known, gallery=shelf, **options)

    def transfer(
        self, embeddings: Any, labels: Any, ids: Any, far: float, *, domains: Any = None, conservative: bool = False
    ) -> TransferredThreshold:
        """Set the threshold for a rate on the calibration people and judge it on the test pairs."""
        if self.kind != "verification" or not self.calibration:
            raise NotMeasurable(f"protocol {self.name!r} has no calibration people to set a threshold on")
        table = SampleIndex.from_columns(embeddings, labels, ids, domains)
        values, y, d, known = table.metric_arguments(self.calibration)
        set_on = calibrate(verification(values, y, domains=d, ids=known), far, conservative=conservative)
        test = self.run(embeddings, labels, ids, domains=domains)
        assert isinstance(test, Verification)
        return set_on.transfer(test)

    def _check_leakage(self, table: SampleIndex, fail_on_similar: bool) -> None:
        test = tuple(dict.fromkeys((*self.probes, *self.gallery)))
        sides = [(name, getattr(self, name), "test", test, True) for name in ("training", "calibration")]
        if self.kind == "identification":
            sides.append(("gallery", self.gallery, "probes", self.probes, False))
        for one, first, two, second, disjoint in sides:
            if not first:
                continue
            parts = table.leakage_side(first), table.leakage_side(second)
            similar = assert_no_leakage(
                *parts, names=(one, two), disjoint_subjects=disjoint, fail_on_similar=fail_on_similar
            )
            if similar:
                i, j = similar[0].what
                warnings.warn(
                    f"{len(similar)} pictures of {two} look like one of {one}: id {parts[1].ids[j]} like "
                    f"{parts[0].ids[i]}, say; look at them, or pass fail_on_similar=True",
                    stacklevel=3,
                )


def class_disjoint(
    ids: Any, labels: Any, *, test: float = 0.3, calibration: float = 0.0, seed: int = 0, name: str = "class-disjoint"
) -> Protocol:
    """Verification among people who were never trained on; a further share of the people for calibration."""
    known, y = _check_columns(ids, labels)
    people = np.random.default_rng(seed).permutation(np.unique(y))
    n_test, n_cal = round(test * len(people)), round(calibration * len(people))
    if n_test < 2 or n_test + n_cal > len(people) or (calibration and n_cal < 2):
        raise InputError(f"{len(people)} subjects are too few for shares of {test:g} and {calibration:g}")
    parts = people[:n_test], people[n_test : n_test + n_cal], people[n_test + n_cal :]
    chosen, cal, train = (tuple(known[np.isin(y, p)].tolist()) for p in parts)
    return Protocol(name, "verification", chosen, (), cal, train)


def cross_domain(
    ids: Any, labels: Any, domains: Any, *, enrol: Any, probe: Any, kind: str = "verification", name: str = ""
) -> Protocol:
    """Samples of one domain against those of another."""
    known, y = _check_columns(ids, labels)
    d = names(domains, "domains", len(y))
    sides = []
    for wanted in (enrol, probe):
        at = d == wanted
        if not at.any():
            raise InputError(f"no domain {wanted!r}{nearest(str(wanted), map(str, np.unique(d)))}")
        sides.append(tuple(known[at].tolist()))
    return Protocol(name or f"{enrol} to {probe}", kind, sides[1], sides[0])


def k_shot(
    ids: Any, labels: Any, *, k: int = 1, seed: int = 0, kind: str = "identification", name: str = ""
) -> Protocol:
    """K samples of everybody enrolled, the rest are probes; who has no sample to spare is left out."""
    known, y = _check_columns(ids, labels)
    gallery, probes = _split_enrolled(known, y, np.unique(y), k, seed)
    return Protocol(name or f"{k}-shot", kind, probes, gallery)


def known_unknown(
    ids: Any, labels: Any, *, known: float = 0.5, k: int = 1, seed: int = 0, name: str = "open set"
) -> Protocol:
    """K samples of some people enrolled; their other samples, and all of the other people's, are probes."""
    every, y = _check_columns(ids, labels)
    people = np.random.default_rng(seed).permutation(np.unique(y))
    count = round(known * len(people))
    if not 0 < count < len(people):
        raise InputError(f"a share of {known:g} of {len(people)} people leaves nobody on one side")
    gallery, probes = _split_enrolled(every, y, people[:count], k, seed)
    strangers = every[np.isin(y, people[count:])].tolist()
    return Protocol(name, "identification", (*probes, *strangers), gallery)


def _split_enrolled(
    ids: np.ndarray, labels: np.ndarray, people: np.ndarray, k: int, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    check_int(k, "k", 1)
    order = np.lexsort((ids, labels))
    ids, labels = ids[order], labels[order]
    people = np.sort(people)
    starts, stops = (np.searchsorted(labels, people, side=side).tolist() for side in ("left", "right"))
    rng = np.random.default_rng((seed, 1))
    gallery: list[int] = []
    probes: list[int] = []
    for start, stop in zip(starts, stops, strict=True):
        own = rng.permutation(ids[start:stop])
        if len(own) > k:
            gallery += own[:k].tolist()
            probes += own[k:].tolist()
    if not gallery:
        raise InputError(f"nobody has more than {k} samples: enrol fewer")
    return tuple(gallery), tuple(probes)


def _check_columns(ids: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    n = len(ids)
    return integers(ids, "ids", n), names(labels, "labels", n)


def _parse_int(value: Any, path: Any, column: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"the protocol {path} must name whole numbers in {column}: got {value!r}")
    return value


def _suggest_id(name: str, cls: type) -> str:
    return nearest(name, cls.__dataclass_fields__)  # type: ignore[attr-defined]


@explain_arguments
def read_trials(path: Path | str) -> np.ndarray:
    """Integers (m, 3) of (id, id, target) from a file.

    Raises:
        DataError: names the line that is wrong.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path must be that of a trials file, got {type(path).__name__}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read the trials {path}: {e}") from e
    found: list[tuple[int, int, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").replace(";", " ").split()
        if not words or words[0].startswith("#"):
            continue
        try:
            first, second, target = (int(w) for w in words)
        except ValueError:
            if not found and not any(w.lstrip("-").isdigit() for w in words):
                continue  # a header
            raise DataError(
                f"{path} line {number}: a trial is two whole numbers and 0 or 1, got {line[:60]!r}"
            ) from None
        if target not in (0, 1):
            raise DataError(f"{path} line {number}: the target must be 0 or 1, got {target}")
        if not all(-(2**63) <= v < 2**63 for v in (first, second)):
            raise DataError(f"{path} line {number}: ids must fit in int64")
        found.append((first, second, target))
    if not found:
        raise DataError(f"{path} holds no trials")
    return np.asarray(found, np.int64)
