"""The one door: every public function of this room passes its arguments through here first.

The core behind it assumes clean data: finite, of equal lengths, integer labels and ids, no zero vectors. Labels may
come as text: they are coded here, in ascending order and over both sides together, so that every number is the one
that integer codes give.
What cannot be judged is refused with a one-line error; no metric is ever computed on it.
"""

from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from mettle.errors import DataError, InputError, MettleError
from mettle.evaluate.rows import Rows

MISSING = ("NAType", "NaTType")  # what pandas and others put where a value is missing


class NotMeasurable(MettleError):
    """The data cannot support the number that was asked for: too few impostors, subjects or templates."""


def check_embeddings(embeddings: Any, labels: Any, *, ids: Any = None, domains: Any = None, side: str = "") -> Rows:
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
    rows = Rows(
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


def check_matrix(embeddings: Any, side: str = "") -> np.ndarray:
    """A sound (n, d) matrix in main memory, float64 if that came, else float32: finite, no zero vectors."""
    values = to_numpy(embeddings, f"{side}embeddings")
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"{side}embeddings must be a non-empty (n, d) matrix: got shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise InputError(f"{side}embeddings must be real numbers: got dtype {values.dtype}")
    if values.dtype != np.float64:
        values = values.astype(np.float32, copy=False)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{side}embeddings must be finite: {np.count_nonzero(~finite)} of {len(values)} rows hold NaN or "
            f"infinity, the first is row {np.argmin(finite)}; find out why the model produced them"
        )
    zero = ~values.any(axis=1)
    if zero.any():
        raise InputError(
            f"{side}embeddings must not be zero vectors (their cosine is undefined): {np.count_nonzero(zero)} of "
            f"{len(values)} rows are zero vectors, the first is row {np.argmax(zero)}; drop them and count them as "
            "failed templates"
        )
    return values


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


def check_gallery(gallery: tuple[Any, ...], probe: Rows) -> tuple[Rows, Rows]:
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


def check_tuple(given: Any, name: str) -> Rows:
    """Check ``(embeddings, labels[, domains[, ids]])``."""
    if not isinstance(given, tuple) or not 2 <= len(given) <= 4:
        raise InputError(f"{name} must be a tuple (embeddings, labels[, domains[, ids]])")
    values, labels, domains, ids = (*given, None, None)[:4]
    return check_embeddings(values, labels, domains=domains, ids=ids, side=f"{name} ")


def share_label_codes(first: Rows, second: Rows, one: str, two: str) -> tuple[Rows, Rows]:
    """Two sides whose equal labels have equal codes; sides with integer labels stay as they are."""
    if first.names is None and second.names is None:
        return first, second
    if first.names is None or second.names is None:
        text = one if second.names is None else two
        raise InputError(f"labels must be of one kind on both sides: those of {text} are text, the others integers")
    every = np.unique(np.concatenate([first.names, second.names]))

    def recode(rows: Rows, names: np.ndarray) -> Rows:
        return replace(rows, labels=np.searchsorted(every, names)[rows.labels], names=every)

    return recode(first, first.names), recode(second, second.names)


def check_apart(first: Rows, second: Rows, one: str, two: str) -> None:
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


def whole(value: Any, name: str, lowest: int) -> int:
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


def one_label_per_id(*tables: Rows) -> None:
    """Refuse a sample id that carries two labels, in one table or across several."""
    known = [r for r in tables if r.ids is not None]
    if not known:
        return
    ids = np.concatenate([r.ids for r in known if r.ids is not None])
    labels = np.concatenate([r.given_labels for r in known])
    order = np.lexsort((labels, ids))
    ids, labels = ids[order], labels[order]
    clash = (ids[1:] == ids[:-1]) & (labels[1:] != labels[:-1])
    if clash.any():
        at = int(np.argmax(clash))
        raise InputError(
            f"sample id {ids[at]} carries two labels, {labels[at]} and {labels[at + 1]}: one id is one sample"
        )


def integers(values: Any, name: str, n: int) -> np.ndarray:
    """One int64 per row, whatever integer type came; never through floats, so ids above 2^24 stay exact."""
    a = to_numpy(values, name)
    if a.dtype.kind not in "iu":
        raise InputError(
            f"{name} must be integers: got dtype {a.dtype}; code other values with "
            f"numpy.unique(values, return_inverse=True)[1]"
        )
    return as_int64(_one_per_row(a, name, n), name)


def as_int64(a: np.ndarray, name: str) -> np.ndarray:
    """Integers as int64; those of uint64 that are too large would turn negative."""
    if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name} must fit in int64: got {a.max()}")
    return a.astype(np.int64)


def names(values: Any, name: str, n: int) -> np.ndarray:
    """One integer or text per row, from integers, text or any hashable objects.

    Objects are named by their ``str``, which must differ where they do. Floats are refused because NaN and rounding
    make bad names, and so is what stands for a missing value.
    """
    return as_names(_one_per_row(to_numpy(values, name), name, n), name)


def as_names(a: np.ndarray, name: str) -> np.ndarray:
    """An array of any shape as integers or text; see :func:`names`."""
    if a.dtype.kind in "iuU":
        return a
    if a.dtype.kind == "S":
        try:
            return np.char.decode(a, "utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{name} must be UTF-8 where they are bytes: {e}") from e
    if a.dtype.kind == "T":  # strings of variable width
        return a.astype(str)
    if a.dtype.kind != "O":
        raise InputError(f"{name} must be integers or text: got dtype {a.dtype}; code numbers as integers")
    flat = a.ravel().tolist()
    if all(isinstance(v, Integral) and not isinstance(v, bool) for v in flat):
        return np.asarray(flat, np.int64).reshape(a.shape)
    for at, value in enumerate(flat):
        if value is None or type(value).__name__ in MISSING or isinstance(value, Real) > isinstance(value, Integral):
            raise InputError(f"{name} must be integers or text: got {value!r} at position {at}")
    texts = [v if isinstance(v, str) else v.decode() if isinstance(v, bytes) else str(v) for v in flat]
    try:
        distinct = len(set(flat))
    except TypeError as e:
        raise InputError(f"{name} must be integers, text or hashable objects: {e}") from e
    if len(set(texts)) != distinct:
        raise InputError(
            f"{name} must be told apart by their text: {distinct} different values have {len(set(texts))} texts; "
            "code them as integers"
        )
    return np.asarray(texts, str).reshape(a.shape)


def code_labels(values: Any, name: str, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """One int64 per row: integers as they are, text as codes from 0 in ascending order with the text they stand for."""
    found = names(values, name, n)
    if found.dtype.kind != "U":
        return as_int64(found, name), None
    texts, coded = np.unique(found, return_inverse=True)
    return coded.reshape(-1).astype(np.int64), texts


def to_numpy(values: Any, name: str) -> np.ndarray:
    """A NumPy view or copy of an array, a tensor on any device, or a sequence."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as e:
        raise InputError(f"{name} must be an array or a tensor: got {type(values).__name__} ({e})") from e


def codes(*columns: np.ndarray) -> list[np.ndarray]:
    """Number the distinct values of several columns together: equal values get equal codes from 0 up."""
    if len({c.dtype.kind == "U" for c in columns}) > 1:
        raise InputError("domains must be of one kind on both sides: got integers on one and text on the other")
    coded = np.unique(np.concatenate(columns), return_inverse=True)[1].reshape(-1).astype(np.int32)
    return np.split(coded, np.cumsum([len(c) for c in columns])[:-1])


def _one_per_row(a: np.ndarray, name: str, n: int) -> np.ndarray:
    if a.shape != (n,):
        raise InputError(f"{name} must have one entry per embedding: got shape {a.shape} for {n} embeddings")
    return a


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
