"""The one door: every public function of this room passes its arguments through here first.

The core behind it assumes clean data: finite, of equal lengths, integer labels and ids, no zero vectors. Labels may
come as text: they are coded here, in ascending order and over both sides together, so that every number is the one
that integer codes give.
What cannot be judged is refused with a one-line error; no metric is ever computed on it.

Checked embeddings, wherever they are, with what is known about each row.

Arguments that take one number or many: rates, ranks, thresholds, cuts. One number is a list of one, everywhere.

Lists of trials: pairs of samples named one by one, checked before anything is scored.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch

from mettle.data.arrays import as_int64, as_names, check_matrix, check_one_label_per_id, integers, names, to_numpy
from mettle.errors import DataError, InputError, MettleError


class NotMeasurable(MettleError):
    """The data cannot support the number that was asked for: too few impostors, subjects or templates."""


@dataclass(frozen=True, eq=False)
class EmbeddingSet:
    """Checked embeddings with what is known about each row.

    Attributes:
        given: (n, d) float64 if float64 came, float32 otherwise; a tensor if it came on an accelerator.
        labels: (n,) int64, who or what each row is; codes where the labels came as text.
        ids: (n,) int64 sample ids, or None when none were given.
        domains: (n,) how each row was captured (integers or text), or None.
        names: the text that each code of ``labels`` stands for, ascending, or None where labels came as integers.
    """

    given: np.ndarray | torch.Tensor
    labels: np.ndarray
    ids: np.ndarray | None = None
    domains: np.ndarray | None = None
    names: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def given_labels(self) -> np.ndarray:
        """(n,) the labels as they came: integers or text."""
        return self.labels if self.names is None else self.names[self.labels]

    @cached_property
    def values(self) -> np.ndarray:
        """The embeddings in main memory, copied there when first needed."""
        return self.given if isinstance(self.given, np.ndarray) else self.given.cpu().numpy()

    @property
    def is_float64(self) -> bool:
        """Whether the embeddings are float64."""
        return self.given.dtype in (np.float64, torch.float64)

    @property
    def dim(self) -> int:
        """Components of an embedding."""
        return self.given.shape[1]

    def take(self, mask: np.ndarray) -> "EmbeddingSet":
        """Some of the rows, wherever they are."""

        def take_column(a: np.ndarray | None) -> np.ndarray | None:
            return None if a is None else a[mask]

        at = mask if isinstance(self.given, np.ndarray) else torch.from_numpy(mask).to(self.given.device)
        return EmbeddingSet(
            self.given[at], self.labels[mask], take_column(self.ids), take_column(self.domains), self.names
        )


def check_embeddings(
    embeddings: Any, labels: Any, *, ids: Any = None, domains: Any = None, side: str = ""
) -> EmbeddingSet:
    """Check one set of embeddings and everything that goes with its rows.

    Args:
        embeddings: (n, d) NumPy array or tensor on any device.
        labels: (n,) integers or text, see :func:`names`.
        ids: (n,) integer sample ids: "the same picture" means the same id.
        domains: (n,) integers or text.
        side: prefix for messages, such as ``"gallery "``.

    Returns:
        The rows, float64 if float64 came and float32 otherwise, labels and ids int64.

    Raises:
        InputError: empty, non-finite, zero vectors, wrong shape or length, labels that are floats or missing.
    """
    values = _sound_tensor(embeddings)
    values = check_matrix(embeddings, side) if values is None else values
    n = len(values)
    coded, texts = code_labels(labels, f"{side}labels", n)
    rows = EmbeddingSet(
        values,
        coded,
        None if ids is None else integers(ids, f"{side}ids", n),
        None if domains is None else names(domains, f"{side}domains", n),
        texts,
    )
    one_label_per_id(rows)
    return rows


def _sound_tensor(embeddings: Any) -> torch.Tensor | None:
    """A matrix on an accelerator that nothing is wrong with, left where it is; None for all others."""
    if not isinstance(embeddings, torch.Tensor) or embeddings.device.type != "cuda":
        return None
    x = embeddings.detach()
    if x.ndim != 2 or 0 in x.shape or not x.is_floating_point():
        return None
    x = x if x.dtype == torch.float64 else x.float()
    sound = torch.isfinite(x).all() & (x != 0).any(1).all()
    return x if bool(sound) else None


def check_scores(scores: Any, target: Any, subjects: Any = None) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """Check scores that came from anywhere, one per pair, higher meaning more alike.

    Args:
        scores: (m,) finite numbers, or −∞ for a pair with a failed template (never a match).
        target: (m,) truth values or 0/1: 1 for a genuine pair.
        subjects: (m, 2) labels of the two sides, integers or text, or None.

    Returns:
        Scores (float64 if float64 or integers came, else float32), target as bool, subjects as int64 or None,
        and the text that these stand for, or None.

    Raises:
        InputError: NaN or +∞, wrong lengths, one class only, subjects that contradict the target.
    """
    s = to_numpy(scores, "scores")
    if s.ndim != 1 or s.dtype.kind not in "fiu":
        raise InputError(f"scores must be a vector of real numbers: got shape {s.shape}, dtype {s.dtype}")
    s = s.astype(np.float64 if s.dtype.kind in "iu" or s.dtype == np.float64 else np.float32, copy=False)
    bad = np.isnan(s) | np.isposinf(s)
    if bad.any():
        raise InputError(
            f"scores must be finite (or −inf for a failed template): {np.count_nonzero(bad)} of {len(s)} are "
            f"NaN or +inf, the first at position {np.argmax(bad)}"
        )
    t = to_numpy(target, "target")
    if t.shape != s.shape or t.dtype.kind not in "biu" or not np.isin(t, (0, 1)).all():
        raise InputError(f"target must hold one 0 or 1 per score: got shape {t.shape}, dtype {t.dtype}")
    t = t.astype(bool)
    both_kinds(int(np.count_nonzero(t)), int(np.count_nonzero(~t)))
    return (s, t, None, None) if subjects is None else (s, t, *_subject_pairs(subjects, t))


def check_gallery(gallery: tuple[Any, ...], probe: EmbeddingSet) -> tuple[EmbeddingSet, EmbeddingSet]:
    """Check ``(embeddings, labels[, domains[, ids]])`` against the probes it will be compared with.

    Returns:
        The probes and the gallery, with labels coded over both.
    """
    if not isinstance(gallery, tuple) or not 2 <= len(gallery) <= 4:
        raise InputError("gallery must be a tuple (embeddings, labels[, domains[, ids]])")
    values, labels, domains, ids = (*gallery, None, None)[:4]
    rows = check_embeddings(values, labels, domains=domains, ids=ids, side="gallery ")
    if rows.dim != probe.dim:
        raise InputError(f"gallery embeddings must have the probes' dimension {probe.dim}: got {rows.dim}")
    if (rows.ids is None) != (probe.ids is None):
        raise InputError("sample ids must be given on both sides or on none: pass ids= and the gallery's fourth entry")
    probe, rows = share_label_codes(probe, rows, "the probes", "the gallery")
    one_label_per_id(probe, rows)
    return probe, rows


def check_tuple(given: Any, name: str) -> EmbeddingSet:
    """Check ``(embeddings, labels[, domains[, ids]])``."""
    if not isinstance(given, tuple) or not 2 <= len(given) <= 4:
        raise InputError(f"{name} must be a tuple (embeddings, labels[, domains[, ids]])")
    values, labels, domains, ids = (*given, None, None)[:4]
    return check_embeddings(values, labels, domains=domains, ids=ids, side=f"{name} ")


def share_label_codes(
    first: EmbeddingSet, second: EmbeddingSet, one: str, two: str
) -> tuple[EmbeddingSet, EmbeddingSet]:
    """Two sides whose equal labels have equal codes; sides with integer labels stay as they are."""
    if first.names is None and second.names is None:
        return first, second
    if first.names is None or second.names is None:
        text = one if second.names is None else two
        raise InputError(f"labels must be of one kind on both sides: those of {text} are text, the others integers")
    every = np.unique(np.concatenate([first.names, second.names]))

    def recode_labels(rows: EmbeddingSet, names: np.ndarray) -> EmbeddingSet:
        return replace(rows, labels=np.searchsorted(every, names)[rows.labels], names=every)

    return recode_labels(first, first.names), recode_labels(second, second.names)


def check_apart(first: EmbeddingSet, second: EmbeddingSet, one: str, two: str) -> None:
    """Refuse two sides of different dimensions, and a sample that is on both."""
    if first.dim != second.dim:
        raise InputError(f"{two} must have the dimension of {one}, {first.dim}: got {second.dim}")
    if first.ids is None or second.ids is None:
        return
    one_label_per_id(first, second)
    shared = np.intersect1d(first.ids, second.ids)
    if len(shared):
        raise DataError(
            f"leak: {len(shared)} samples are in {one} and in {two}, the first has id {shared[0]}; a sample compared "
            "with itself is always right, so take it out of one side"
        )


def check_int(value: Any, name: str, lowest: int) -> int:
    """A whole number from a lowest one up; True is none, nor is 2.5."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < lowest:
        raise InputError(f"{name} must be a whole number from {lowest} up: got {value!r}")
    return int(value)


def both_kinds(genuine: int, impostor: int) -> None:
    """Refuse a set of pairs that lacks one of the two kinds: no error rate is defined on it."""
    if genuine == 0 or impostor == 0:
        kind, need = ("a genuine", "two samples of one label") if genuine == 0 else ("an impostor", "two labels")
        raise InputError(
            f"verification needs genuine and impostor pairs: got {genuine} genuine and {impostor} impostor; "
            f"{kind} pair needs {need} among the compared samples"
        )


def one_label_per_id(*tables: EmbeddingSet) -> None:
    """Refuse a sample id that carries two labels, in one table or across several."""
    known = [r for r in tables if r.ids is not None]
    if not known:
        return
    ids = np.concatenate([r.ids for r in known if r.ids is not None])
    check_one_label_per_id(ids, np.concatenate([r.given_labels for r in known]))


def code_labels(values: Any, name: str, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """One int64 per row: integers as they are, text as codes from 0 in ascending order with the text they stand for."""
    found = names(values, name, n)
    if found.dtype.kind != "U":
        return as_int64(found, name), None
    texts, coded = np.unique(found, return_inverse=True)
    return coded.reshape(-1).astype(np.int64), texts


def is_label_sets(labels: Any) -> bool:
    """Whether rows have several labels each: collections, or an (n, c) array of truth values."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        return labels.ndim == 2 and labels.dtype in (bool, torch.bool)
    if not isinstance(labels, Iterable) or isinstance(labels, str | bytes | Mapping):
        return False
    return isinstance(next(iter(labels), None), list | tuple | set | frozenset | np.ndarray)


def check_label_sets(*sides: Any) -> tuple[list[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """One code per row for each side, equal for equal sets of labels, and which codes have a label in common.

    Args:
        sides: collections of integers or text, one per row, or arrays (n, c) of truth values over c labels.

    Returns:
        The codes, and those that share a label with each code: starts and codes of a CSR matrix.
    """
    from scipy.sparse import csr_matrix

    rows = [[frozenset(one) for one in _read_label_sets(side)] for side in sides]
    distinct = {labels: code for code, labels in enumerate(dict.fromkeys(s for side in rows for s in side))}
    known = {label: at for at, label in enumerate(dict.fromkeys(x for labels in distinct for x in labels))}
    if len({isinstance(label, str) for label in known}) > 1:
        raise InputError("labels must be of one kind: got integers and text in the same collections")
    members = [(code, known[label]) for labels, code in distinct.items() for label in labels]
    if not members:
        raise InputError("labels are empty collections: no candidate is relevant to anybody")
    at, label = np.array(members).T
    has = csr_matrix((np.ones(len(members), np.int64), (at, label)), shape=(len(distinct), len(known)))
    shared = (has @ has.T).tocsr()
    coded = [np.array([distinct[s] for s in side], np.int64) for side in rows]
    return coded, (shared.indptr.astype(np.int64), shared.indices.astype(np.int64))


def _read_label_sets(labels: Any) -> list[list[Any]]:
    if isinstance(labels, np.ndarray | torch.Tensor):
        return [np.flatnonzero(row).tolist() for row in to_numpy(labels, "labels")]
    found = []
    for at, one in enumerate(labels):
        if not isinstance(one, list | tuple | set | frozenset | np.ndarray):
            raise InputError(f"labels must be collections in every row: got {one!r} at position {at}")
        found.append(as_names(np.asarray(list(one), object), f"labels of row {at}").tolist() if len(one) else [])
    return found


def joint_codes(*columns: np.ndarray) -> list[np.ndarray]:
    """Number the distinct values of several columns together: equal values get equal codes from 0 up."""
    if len({c.dtype.kind == "U" for c in columns}) > 1:
        raise InputError("domains must be of one kind on both sides: got integers on one and text on the other")
    coded = np.unique(np.concatenate(columns), return_inverse=True)[1].reshape(-1).astype(np.int32)
    return np.split(coded, np.cumsum([len(c) for c in columns])[:-1])


def _subject_pairs(subjects: Any, target: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    a = to_numpy(subjects, "subjects")
    if a.shape != (len(target), 2):
        raise InputError(
            f"subjects must be of shape ({len(target)}, 2), the label of each side: got shape {a.shape}, "
            f"dtype {a.dtype}"
        )
    coded, texts = code_labels(a.ravel(), "subjects", a.size)
    a = coded.reshape(a.shape)
    wrong = (a[:, 0] == a[:, 1]) != target
    if wrong.any():
        raise InputError(
            f"subjects contradict target at pair {np.argmax(wrong)}: a genuine pair is of one subject, an "
            "impostor pair of two"
        )
    return a, texts


@dataclass(frozen=True, eq=False)
class VerificationSource:
    """What a verification was computed from, so that groups and comparisons can pair the same rows again."""

    probe: EmbeddingSet
    gallery: EmbeddingSet | None
    arguments: Mapping[str, Any]


Numbers = Iterable[float] | float


Wholes = Iterable[int] | int


def check_rates(given: Any, name: str = "fars", least: int = 1, *, below_one: bool = False) -> tuple[float, ...]:
    """Rates above 0 and at most 1, in the order given; ``below_one``: 1 has no threshold, for it accepts everybody."""
    found = as_numbers(given)
    if found is None or len(found) < least or not all(0 < x <= 1 for x in found):
        raise InputError(f"{name} must be rates between 0 and 1, such as 0.001 or (0.01, 0.001): got {given!r}")
    if below_one and 1 in found:
        raise InputError(f"{name} must be above 0 and below 1: got {given!r}")
    return tuple(float(x) for x in found)


def check_ints(given: Any, name: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, sorted, each once."""
    found = as_numbers(given)
    if not found or not all(isinstance(x, int) and x >= 1 for x in found):
        raise InputError(f"{name} must be whole numbers from 1 up, such as 4 or (1, 2, 4, 8): got {given!r}")
    return tuple(sorted({int(x) for x in found}))


def check_thresholds(given: Any, name: str = "thresholds", least: int = 1) -> tuple[float, ...]:
    """Thresholds, in the order given; infinite ones accept all or none."""
    found = as_numbers(given)
    if found is None or len(found) < least or any(math.isnan(x) for x in found):
        raise InputError(f"{name} must be numbers, such as 0.4 or (0.4, 0.5): got {given!r}")
    return tuple(float(x) for x in found)


def as_numbers(given: Any) -> tuple[int | float, ...] | None:
    """The numbers themselves, as Python's own so that they print as typed.

    None for text, truth values and nothing, and for whole numbers that are too large for a float.
    """
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    many = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    found: list[Any] = [x.item() if isinstance(x, np.generic) else x for x in (given if many else (given,))]
    return tuple(found) if all(map(_is_number, found)) else None


def _is_number(x: Any) -> bool:
    if not isinstance(x, int | float) or isinstance(x, bool):
        return False
    try:
        float(x)
    except OverflowError:
        return False
    return True


def check_trials(
    trials: Any, probe: EmbeddingSet, gallery: EmbeddingSet | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check integers (m, 3) of (id, id, target): both exist, are two samples, labels confirm the target, none repeats.

    Without sample ids an id is a row number. A set that is compared with itself has (a, b) and (b, a) as one pair.

    Returns:
        Rows of the first side, rows of the second, and the target.
    """
    a = to_numpy(trials, "trials")
    if a.ndim != 2 or a.shape[1] != 3 or a.dtype.kind not in "iu" or len(a) == 0:
        raise InputError(f"trials must be integers (m, 3) of (id, id, target): got shape {a.shape}, dtype {a.dtype}")
    i, j, target = as_int64(a, "trials").T
    other = probe if gallery is None else gallery
    i, j = _rows_of(i, probe, "first"), _rows_of(j, other, "second")
    own = i == j if gallery is None else np.zeros(len(i), bool)
    if probe.ids is not None and other.ids is not None:
        own |= probe.ids[i] == other.ids[j]
    if own.any():
        raise InputError(f"trial {np.argmax(own)} compares a sample with itself: take such trials out")
    wrong = (probe.labels[i] == other.labels[j]) != target
    if wrong.any():
        raise InputError(f"trial {np.argmax(wrong)} contradicts the labels: target must be 1 for equal labels, else 0")
    _check_distinct_pairs(i, j, a, gallery is None, len(other))
    return i, j, target.astype(bool)


def _check_distinct_pairs(i: np.ndarray, j: np.ndarray, trials: np.ndarray, own: bool, width: int) -> None:
    """Refuse a pair that is listed twice: repeats would make a rate look measurable on pairs that are not there."""
    low, high = (np.minimum(i, j), np.maximum(i, j)) if own else (i, j)
    pair = low * width + high
    seen = np.sort(pair)
    twice = seen[1:][seen[1:] == seen[:-1]]
    if not len(twice):
        return
    again = np.isin(pair, twice)
    places = np.flatnonzero(again)
    _, first = np.unique(pair[places], return_index=True)
    second = int(np.setdiff1d(places, places[first])[0])
    before = int(np.argmax(pair == pair[second]))
    raise InputError(
        f"trial {second} repeats trial {before}, ids {trials[second, 0]} and {trials[second, 1]}: a pair counts once, "
        f"and {len(twice)} of {len(pair)} trials are repeats; take them out"
    )


def _rows_of(ids: np.ndarray, rows: EmbeddingSet, side: str) -> np.ndarray:
    """Where samples are, by id, or by row number where rows have no ids."""
    if rows.ids is None:
        if ids.min() < 0 or ids.max() >= len(rows):
            raise InputError(
                f"trials must name rows 0 … {len(rows) - 1} as their {side} id: got {ids.min()} … {ids.max()}; "
                "pass ids= if they name samples"
            )
        return ids
    order = np.argsort(rows.ids, kind="stable")
    known = rows.ids[order]
    if (known[1:] == known[:-1]).any():
        raise InputError("trials name samples by id, but some ids occur twice: give every row its own id")
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    missing = known[at] != ids
    if missing.any():
        first = int(np.argmax(missing))
        raise InputError(f"trial {first} names id {ids[first]} on its {side} side, which no embedding has")
    return order[at]
