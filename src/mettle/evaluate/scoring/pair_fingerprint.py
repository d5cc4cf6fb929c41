"""What a result was measured on, in a few numbers: two results are compared only where these are equal.

Rows and pairs are told by a sum of their hashes, so that their order does not show where it does not matter. Which
sample is which is told by ids where both results have them, else by the rows where their labels come in one order.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mettle.evaluate.inputs import EmbeddingSet, VerificationSource, check_trials


@dataclass(frozen=True, eq=False)
class PairFingerprint:
    """What a result was measured on; numbers by what they are called in a message.

    Attributes:
        facts: what must be equal in any case.
        ids: what must be equal where both results have sample ids; None without.
        rows: what must be equal where not both have ids but labels come in one order.
        order: of the labels.
    """

    facts: Mapping[str, Any]
    ids: Mapping[str, Any] | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)
    order: Any = None

    def difference(self, other: "PairFingerprint") -> str | None:
        """What differs first, or None."""
        found = [(self.facts, other.facts)]
        if self.ids is not None and other.ids is not None:
            found.append((self.ids, other.ids))
        elif self.order == other.order:
            found.append((self.rows, other.rows))
        return next((name for a, b in found for name in a if a[name] != b.get(name)), None)


def of_pairs(v: Any) -> PairFingerprint:
    """What a verification of embeddings compared: kind of trials, labels, domains, pairs, ids."""
    assert v.source is not None
    facts = {"trials": v.trials, "numbers of pairs": (v.genuine, v.impostor)}
    return (
        _fingerprint_list(v.source, facts)
        if v.trials == "listed"
        else _fingerprint_design(v.source, facts, v.trials != "all")
    )


def _fingerprint_design(source: VerificationSource, facts: dict[str, Any], by_domain: bool) -> PairFingerprint:
    sides = [rows for rows in (source.probe, source.gallery) if rows is not None]
    order = [_in_order(_hash_labels(rows)) for rows in sides]
    facts["labels"] = [_any_order(_hash_labels(rows)) for rows in sides]
    named = all(rows.ids is not None for rows in sides)
    ids: dict[str, Any] | None = {"sample ids": [_any_order(_hash_labels(r), r.ids) for r in sides]} if named else None
    if not by_domain:
        return PairFingerprint(facts, ids, {}, order)
    domains = [_hash_domains(rows.domains) for rows in sides]
    facts["domains"] = [_any_order(_hash_labels(r), d) for r, d in zip(sides, domains, strict=True)]
    if ids is not None:
        ids["domains"] = [_any_order(r.ids, d) for r, d in zip(sides, domains, strict=True)]
    return PairFingerprint(facts, ids, {"domains": [_in_order(d) for d in domains]}, order)


def _fingerprint_list(source: VerificationSource, facts: dict[str, Any]) -> PairFingerprint:
    probe, other, turned = source.probe, source.gallery or source.probe, source.gallery is None
    i, j, _ = check_trials(source.arguments["trials"], probe, source.gallery)
    facts["subjects of the trials"] = _hash_pairs(_hash_labels(probe)[i], _hash_labels(other)[j], turned)
    ids = None
    if probe.ids is not None and other.ids is not None:
        ids = {"samples of the trials": _hash_pairs(probe.ids[i], other.ids[j], turned)}
    order = _in_order(_hash_labels(probe)), _in_order(_hash_labels(other))
    return PairFingerprint(facts, ids, {"samples of the trials": _hash_pairs(i, j, turned)}, order)


def of_subjects(v: Any) -> PairFingerprint:
    """Which subjects were compared how often, genuine and impostor, from a walk through the pairs."""
    who, sums = subject_labels(v), [0, 0]
    who = _hash_domains(who) if who.dtype.kind == "U" else who
    for block in v.scores.stream(True):
        own, (a, b) = who[block.genuine_subject], np.broadcast_arrays(*block.impostor_subjects)
        for kind, pair in enumerate(((own, own), (who[a.ravel()], who[b.ravel()]))):
            sums[kind] = (sums[kind] + _hash_pairs(*pair, turned=True)) % 2**64
    return PairFingerprint({"numbers of pairs": (v.genuine, v.impostor), "subjects of the pairs": sums})


def of_ranking(query: EmbeddingSet, gallery: EmbeddingSet, *, named: bool, trials: str) -> PairFingerprint:
    """What a retrieval ranked: queries in their order, candidates in any, and which of them were left out.

    Args:
        query: the queries.
        gallery: the candidates.
        named: whether ids came from outside; numbers of rows name nobody.
        trials: whether candidates of the query's own domain were left out (``"across"``), or others (``"within"``).
    """
    both = query.ids is not None and gallery.ids is not None
    facts: dict[str, Any] = {
        "queries": _in_order(_hash_labels(query)),
        "gallery labels": _any_order(_hash_labels(gallery)),
        "exclude_same_domain": trials == "across",
        "only_same_domain": trials == "within",
        "rules of who is a candidate": trials,
        "numbers of candidates that are the query itself": _count_shared(query.ids, gallery.ids) if both else 0,
    }
    ids: dict[str, Any] | None = None
    if named and both:
        ids = {"query ids": _in_order(query.ids), "gallery ids": _any_order(_hash_labels(gallery), gallery.ids)}
    if trials == "all":
        return PairFingerprint(facts, ids, {}, _in_order(_hash_labels(gallery)))
    domains = _hash_domains(gallery.domains)
    facts |= {
        "query domains": _in_order(_hash_domains(query.domains)),
        "gallery domains": _any_order(_hash_labels(gallery), domains),
    }
    if ids is not None:
        ids["gallery domains"] = _any_order(gallery.ids, domains)
    return PairFingerprint(facts, ids, {"gallery domains": _in_order(domains)}, _in_order(_hash_labels(gallery)))


def subject_labels(v: Any) -> np.ndarray:
    """Labels of everybody who takes part, ascending, as subjects are numbered; empty where they are not known."""
    if v.people is not None:
        return v.people
    if v.source is None:
        return np.empty(0, np.int64)
    return np.unique(np.concatenate([r.given_labels for r in (v.source.probe, v.source.gallery) if r is not None]))


def _count_shared(one: Any, two: Any) -> int:
    """Pairs of one id."""
    (a, n), (b, m) = (np.unique(ids, return_counts=True) for ids in (one, two))
    _, i, j = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return int(n[i] @ m[j])


def _hash_labels(rows: EmbeddingSet) -> np.ndarray:
    """A number for each label that depends on the label alone, not on which others are there."""
    return rows.labels if rows.names is None else _hash_domains(rows.given_labels)


def _hash_domains(domains: np.ndarray | None) -> np.ndarray:
    """A number for each domain that depends on its name alone."""
    assert domains is not None
    names, at = np.unique(domains, return_inverse=True)
    digests = [hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(digests), np.uint64)[at.reshape(-1)]


def _hash_pairs(a: np.ndarray, b: np.ndarray, turned: bool) -> int:
    """Of pairs in any order; where ``turned``, (a, b) is (b, a)."""
    return _any_order(np.minimum(a, b), np.maximum(a, b)) if turned else _any_order(a, b)


def _in_order(column: Any) -> int:
    return _any_order(np.arange(len(column)), column)


def _any_order(*columns: Any) -> int:
    """A sum of one hash per row."""
    state = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        state = _mix_bits(state ^ np.ascontiguousarray(column).view(np.uint64))
    return int(state.sum(dtype=np.uint64))


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Another number for each, one to one, with every bit depending on all: multiply and fold, twice."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))
