"""`mine`: triplets of an anchor, a positive and hard negatives over a whole set, with an account of what was left out.

The rules, in this order, each of which may drop a candidate; it is counted at the first one that does:

    copies            its embedding equals the anchor's number for number: one sample under two labels, most likely
    margin            s(a, n) > s(a, p) − margin
    relative margin   s(a, n) > s(a, p) − relative_margin · |s(a, p)|
    maximum score     s(a, n) > max_score
    minimum score     s(a, n) < min_score
    second model      t(a, n) > t(a, p) − second_margin, where t is the cosine under the second model

where s is the cosine, a the anchor, p its positive and n the candidate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from mettle.data.arrays import check_matrix, names
from mettle.errors import InputError
from mettle.evaluate.diagnostics.duplicates import hash_rows
from mettle.evaluate.inputs import EmbeddingSet, code_labels, one_label_per_id
from mettle.mining.neighbors import Nearest, NegativeSearch, Search, SearchFacts, combine_facts, score_pairs
from mettle.mining.positives import PositivePairs, Positives, choose_positives
from mettle.rng import hash_bits
from mettle.unknown_names import explain_arguments

Sampling = Literal["top", "random"]

CANDIDATES = 1 << 22  # pairs of a positive pair and a candidate that are judged at a time
STREAM = 37
WIDE = 10  # candidates for each negative that is wanted, where no depth is given
COPY = 1 - 1e-4  # of the cosine of equal rows: rounding, and no more


@dataclass(frozen=True)
class Guards:
    """What keeps probable positives from being taken for negatives; None switches a rule off.

    Attributes:
        margin: a negative is less similar than the positive by at least so much.
        relative_margin: a negative is less similar than the positive by at least this share of its similarity.
        max_score: a negative is at most so similar.
        min_score: a negative is at least so similar: what is easy anyway is left out.
        second_margin: under the second model a negative is less similar than the positive by at least so much.
    """

    margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    second_margin: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value: Any = getattr(self, entry.name)
            if value is None and entry.default is None:
                continue
            if isinstance(value, bool) or not (isinstance(value, Real) and -2 <= float(value) <= 2):  # NaN fails too
                raise InputError(f"{entry.name} must be a number between -2 and 2, as cosines differ by: got {value!r}")
        if self.relative_margin is not None and self.relative_margin < 0:
            raise InputError(
                f"relative_margin must be a share of the positive's score, from 0: got {self.relative_margin}"
            )
        if None not in (self.min_score, self.max_score) and self.min_score > self.max_score:  # type: ignore[operator]
            raise InputError(f"min_score {self.min_score} is above max_score {self.max_score}: nothing is between them")


@dataclass(frozen=True)
class Account:
    """What was looked at, and what became of it.

    Attributes:
        rows: rows that might be anchors.
        without_positive: rows that no other sample can be a positive of.
        pairs: pairs of an anchor and a positive.
        candidates: pairs of such a pair and a row of another label that were looked at.
        dropped: how many of the candidates each rule dropped; one is counted at the first rule that drops it.
        spare: candidates that no rule dropped and that were not needed.
        mined: candidates that became negatives: the triplets.
        pairs_without_negative: pairs that no candidate was left for.
        without_negative: anchors that no candidate was left for.
    """

    rows: int
    without_positive: int
    pairs: int
    candidates: int
    dropped: Mapping[str, int]
    spare: int
    mined: int
    pairs_without_negative: int
    without_negative: int

    def lines(self) -> tuple[str, ...]:
        """The account in whole lines, for people."""
        rules = [f"{name} dropped {count:,} ({_share(count, self.candidates)})" for name, count in self.dropped.items()]
        return (
            f"{self.rows:,} rows, of which {self.without_positive:,} have no positive; {self.pairs:,} pairs of an "
            "anchor and a positive",
            f"{self.candidates:,} candidates for negatives were looked at: {'; '.join(rules)}",
            f"{self.mined:,} triplets; {self.spare:,} more candidates would do; {self.without_negative:,} anchors are "
            "left without a negative",
        )


@dataclass(frozen=True, eq=False)
class MinedTriplets:
    """Triplets, by rising anchor, the most similar negative first; with the account.

    Attributes:
        anchors: (t,) rows.
        positives: (t,) rows.
        negatives: (t,) rows.
        positive_scores: (t,) cosines of anchor and positive.
        negative_scores: (t,) cosines of anchor and negative.
        account: what was looked at and dropped.
        search: how neighbours were found.
        positive_pairs: all pairs of an anchor and a positive, those without a negative among them.
        copies: (m, 2) rows that are equal number for number and have two labels.
    """

    anchors: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    positive_scores: np.ndarray
    negative_scores: np.ndarray
    account: Account
    search: SearchFacts
    positive_pairs: PositivePairs
    copies: np.ndarray

    def __len__(self) -> int:
        return len(self.anchors)

    def pairs(self) -> "MinedPairs":
        """The pairs that the triplets hold, each once in whichever order."""
        first, second = np.tile(self.anchors, 2), np.concatenate([self.positives, self.negatives])
        scores = np.concatenate([self.positive_scores, self.negative_scores])
        return MinedPairs(first, second, np.repeat([1, 0], len(self)), scores).unique()

    def hardest_positives(self, count: int) -> "MinedPairs":
        """The least similar pairs of one label, whether a negative was found for them or not."""
        p = self.positive_pairs
        return MinedPairs(p.anchors, p.positives, np.ones(len(p.anchors), np.int64), p.scores).unique().hardest(count)

    def hardest_negatives(self, count: int) -> "MinedPairs":
        """The most similar pairs of two labels that were mined."""
        target = np.zeros(len(self), np.int64)
        return MinedPairs(self.anchors, self.negatives, target, self.negative_scores).unique().hardest(count)


@dataclass(frozen=True, eq=False)
class MinedPairs:
    """Pairs of rows (p,) and (p,), the target 1 for one label and 0 for two, and their cosines."""

    first: np.ndarray
    second: np.ndarray
    target: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.target)

    def take(self, at: np.ndarray) -> "MinedPairs":
        """Some of the pairs, by position."""
        return MinedPairs(self.first[at], self.second[at], self.target[at], self.scores[at])

    def unique(self) -> "MinedPairs":
        """Each pair once, in whichever order its rows come."""
        both = np.sort(np.stack([self.first, self.second], 1), 1)
        return self.take(np.sort(np.unique(both, axis=0, return_index=True)[1]))

    def hardest(self, count: int, each: int = 2) -> "MinedPairs":
        """The hardest pairs, hardest first; no row is in more than ``each``, so that one cannot fill the list."""
        seen: dict[int, int] = {}
        found: list[int] = []
        for at in np.argsort(np.where(self.target == 1, self.scores, -self.scores), kind="stable").tolist():
            rows = int(self.first[at]), int(self.second[at])
            if all(seen.get(row, 0) < each for row in rows):
                found.append(at)
                seen |= {row: seen.get(row, 0) + 1 for row in rows}
            if len(found) == count:
                break
        return self.take(np.asarray(found, np.int64))


@explain_arguments
def mine(
    embeddings: Any,
    labels: Any,
    *,
    ids: Any = None,
    across: Any = None,
    second: Any = None,
    positives: Positives = "hardest",
    negatives: int = 1,
    skip: int = 0,
    depth: int | None = None,
    guards: Guards | None = None,
    sampling: Sampling = "top",
    seed: int = 0,
    search: Search = "auto",
    recall: float = 0.95,
) -> MinedTriplets:
    """Mine hard positives and hard negatives over a whole set. Similarity is the cosine.

    Args:
        embeddings: (n, d) array or tensor, finite, without zero rows.
        labels: (n,) integers or text.
        ids: (n,) integers or text: rows of one id are one sample and are never compared.
        across: (n,) integers or text, cameras say: positives differ from the anchor in it, negatives do not.
        second: (n, e) embeddings of the same rows by another model, which is asked about every candidate.
        positives: of each anchor the ``hardest`` (least similar), one at ``random``, or ``all``.
        negatives: how many for each pair of an anchor and a positive, at most.
        skip: how many of the nearest rows of other labels are passed over.
        depth: how many of the nearest rows of other labels are looked at, the skipped ones among them; by default ten
            for each negative, after the skipped ones.
        guards: rules against false negatives.
        sampling: ``top`` takes the most similar candidates that are left, ``random`` draws among them.
        seed: of what is drawn; each draw is a pure function of it and the rows.
        search: ``exact`` compares every row with every other, ``approximate`` looks into cells, ``auto`` chooses by
            the size.
        recall: share of the nearest rows that the approximate search must find.

    Raises:
        InputError: rows that are not finite, one label only, no label with two samples, an option out of range.
        MissingExtra: approximate search is asked for, or needed, and Faiss is not installed.
    """
    values = check_matrix(embeddings)
    n = len(values)
    label = code_labels(labels, "labels", n)[0]
    sample = np.arange(n) if ids is None else code_labels(ids, "ids", n)[0]
    one_label_per_id(EmbeddingSet(values, label, sample))
    domain = None if across is None else np.unique(names(across, "across", n), return_inverse=True)[1].reshape(-1)
    guards = guards or Guards()
    check_options(positives, negatives, skip, sampling, seed, search, recall)
    depth = _choose_depth(label, domain, negatives, skip, depth)
    other = None if second is None else _unit_rows(_check_second(second, n))
    unit, copy = _unit_rows(values), np.unique(hash_rows(values), return_inverse=True)[1].reshape(-1)
    pairs = choose_positives(unit, label, sample, domain, positives, int(seed))
    if not len(pairs.anchors):
        where = "" if domain is None else " in two of the values of across"
        raise InputError(f"no label has two samples{where}: there is no positive to mine")
    chooser = _NegativeChooser(unit, other, copy, guards, negatives, skip, sampling, seed)
    is_anchor = np.zeros(n, bool)
    is_anchor[pairs.anchors] = True
    parts, facts = [_ChosenNegatives.empty()], []
    for rows in [np.arange(n)] if domain is None else [np.flatnonzero(domain == k) for k in range(domain.max() + 1)]:
        if not is_anchor[rows].any():
            continue
        finder = NegativeSearch(unit, label, rows, depth, search, recall)
        for found in finder.blocks(is_anchor):
            parts += chooser.choose(found, pairs)
        facts.append(finder.measure_recall(is_anchor))
    return _build_result(pairs, _ChosenNegatives.join(parts), n, combine_facts(facts), _find_copies(copy, label))


@dataclass(frozen=True, eq=False)
class _ChosenNegatives:
    """Negatives for some pairs: (t,) pairs, rows and cosines, and how many candidates came to which end."""

    pair: np.ndarray
    negative: np.ndarray
    score: np.ndarray
    counts: Mapping[str, int]

    @classmethod
    def empty(cls) -> "_ChosenNegatives":
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), {})

    @classmethod
    def join(cls, parts: "list[_ChosenNegatives]") -> "_ChosenNegatives":
        """All of them, by rising pair, the most similar negative first."""
        counts: dict[str, int] = {}
        for part in parts:
            for name, count in part.counts.items():
                counts[name] = counts.get(name, 0) + count
        pair, negative, score = (np.concatenate([getattr(p, k) for p in parts]) for k in ("pair", "negative", "score"))
        order = np.lexsort((negative, -score, pair))
        return cls(pair[order], negative[order], score[order], counts)


@dataclass(frozen=True, eq=False)
class _NegativeChooser:
    """Applies the rules to the nearest rows of other labels, and takes the negatives that are wanted."""

    unit: np.ndarray
    second: np.ndarray | None
    copy: np.ndarray  # equal for rows that are equal number for number
    guards: Guards
    negatives: int
    skip: int
    sampling: Sampling
    seed: int

    def choose(self, found: Nearest, pairs: PositivePairs) -> list[_ChosenNegatives]:
        """The negatives of all pairs of these anchors, piece by piece."""
        first = np.searchsorted(pairs.anchors, found.anchors, "left")
        count = np.searchsorted(pairs.anchors, found.anchors, "right") - first
        row = np.repeat(np.arange(len(found.anchors)), count)
        pair = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        step = max(1, CANDIDATES // found.rows.shape[1])
        pieces = [slice(a, a + step) for a in range(0, len(row), step)]
        rows, scores = found.rows[:, self.skip :], found.scores[:, self.skip :]
        return [self._choose(pair[s], rows[row[s]], scores[row[s]], pairs) for s in pieces]

    def _choose(self, pair: np.ndarray, rows: np.ndarray, scores: np.ndarray, pairs: PositivePairs) -> _ChosenNegatives:
        left = rows >= 0
        counts = {"candidates": int(left.sum())}
        for name, drops in self._rules(pairs.anchors[pair], pairs.positives[pair], pairs.scores[pair]):
            dropped = np.zeros_like(left)
            at = np.nonzero(left)
            dropped[at] = drops(at[0], rows[at], scores[at])
            counts[name] = int(dropped.sum())
            left &= ~dropped
        if self.sampling == "random":
            drawn = hash_bits(self.seed, STREAM, pairs.anchors[pair][:, None], pairs.positives[pair][:, None], rows)
            order = np.argsort(np.where(left, drawn >> np.uint64(1), np.uint64(1) << np.uint64(63)), 1, kind="stable")
            place = np.argsort(order, 1)
        else:
            place = np.cumsum(left, 1) - 1
        taken = left & (place < self.negatives)
        counts["spare"] = int(left.sum() - taken.sum())
        at = np.nonzero(taken)
        return _ChosenNegatives(pair[at[0]], rows[at], scores[at], counts)

    def _rules(self, anchor: np.ndarray, positive: np.ndarray, score: np.ndarray) -> list[tuple[str, Any]]:
        """Each rule's name and what says which candidates it drops, given their pairs, rows and scores."""
        g, copy = self.guards, self.copy
        rules: list[tuple[str, Any]] = [
            ("copies", lambda k, row, s: (copy[row] == copy[anchor[k]]) & (s > COPY)),
        ]
        if g.margin is not None:
            rules.append(("margin", lambda k, row, s: s > score[k] - g.margin))
        if g.relative_margin is not None:
            rules.append(("relative margin", lambda k, row, s: s > score[k] - g.relative_margin * np.abs(score[k])))
        if g.max_score is not None:
            rules.append(("maximum score", lambda k, row, s: s > g.max_score))
        if g.min_score is not None:
            rules.append(("minimum score", lambda k, row, s: s < g.min_score))
        if (second := self.second) is not None:
            limit = score_pairs(second, anchor, positive) - g.second_margin
            rules.append(("second model", lambda k, row, s: score_pairs(second, anchor[k], row) > limit[k]))
        return rules


def _build_result(
    pairs: PositivePairs, chosen: _ChosenNegatives, rows: int, search: SearchFacts, copies: np.ndarray
) -> MinedTriplets:
    """The result with its account."""
    dropped = {name: count for name, count in chosen.counts.items() if name not in ("candidates", "spare")}
    anchors = np.unique(pairs.anchors)
    served = np.unique(chosen.pair)
    account = Account(
        rows=rows,
        without_positive=rows - len(anchors),
        pairs=len(pairs.anchors),
        candidates=chosen.counts.get("candidates", 0),
        dropped=MappingProxyType(dropped),
        spare=chosen.counts.get("spare", 0),
        mined=len(chosen.pair),
        pairs_without_negative=len(pairs.anchors) - len(served),
        without_negative=len(anchors) - len(np.unique(pairs.anchors[served])),
    )
    return MinedTriplets(
        pairs.anchors[chosen.pair],
        pairs.positives[chosen.pair],
        chosen.negative,
        pairs.scores[chosen.pair],
        chosen.score,
        account,
        search,
        pairs,
        copies,
    )


def _find_copies(copy: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(m, 2) the first row of each vector that occurs under several labels, with each row of another label."""
    order = np.argsort(copy, kind="stable")
    starts = np.append(True, np.diff(copy[order]) != 0)
    first = order[starts][np.cumsum(starts) - 1]
    torn = label[first] != label[order]
    return np.stack([first[torn], order[torn]], 1)


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """Rows of unit length in float32, made piece by piece."""
    unit = np.empty(values.shape, np.float32)
    step = max(1, (1 << 23) // values.shape[1])
    for start in range(0, len(values), step):
        part = values[start : start + step].astype(np.float64)
        part /= np.abs(part).max(1, keepdims=True)  # so that no square overflows
        unit[start : start + step] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return unit


def _check_second(second: Any, n: int) -> np.ndarray:
    values = check_matrix(second, "second ")
    if len(values) != n:
        raise InputError(f"second must hold the same rows as the embeddings: got {len(values)} rows for {n}")
    return values


def check_options(
    positives: str = "hardest",
    negatives: int = 1,
    skip: int = 0,
    sampling: str = "top",
    seed: int = 0,
    search: str = "auto",
    recall: float = 0.95,
) -> None:
    """Refuse options of `mine` that are wrong for any set, before the work of embedding one."""
    for name, value, known in (
        ("positives", positives, get_args(Positives)),
        ("sampling", sampling, get_args(Sampling)),
        ("search", search, get_args(Search)),
    ):
        if value not in known:
            raise InputError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")
    for name, value, least in (("negatives", negatives, 1), ("skip", skip, 0), ("seed", seed, 0)):
        if isinstance(value, bool) or not (isinstance(value, Integral) and least <= int(value) < 1 << 63):
            raise InputError(f"{name} must be a whole number from {least} on: got {value!r}")
    if not isinstance(recall, Real) or not 0 < recall <= 1:
        raise InputError(f"recall must lie in (0, 1], got {recall!r}")


def _choose_depth(label: np.ndarray, domain: np.ndarray | None, negatives: int, skip: int, depth: int | None) -> int:
    """How many of the nearest rows of other labels are looked at; refuses a set without any, and what is too many."""
    n = len(label)
    sizes = np.unique(label, return_counts=True)[1]
    if len(sizes) < 2:
        raise InputError(f"all {n} rows have one label: there is no negative to mine")
    if domain is not None and domain.max() == 0:
        raise InputError("all rows have one value of across: there is no positive in another one; leave it out")
    most = int(n - sizes.min())
    if depth is None:
        depth = min(skip + WIDE * negatives, most)
        if skip >= depth:
            raise InputError(f"skip={skip} passes over all of the {most} rows of other labels: take fewer")
    elif isinstance(depth, bool) or not isinstance(depth, Integral) or not skip + negatives <= depth <= most:
        raise InputError(
            f"depth must be a whole number from skip + negatives = {skip + negatives} to the {most} rows of other "
            f"labels: got {depth!r}"
        )
    return int(depth)


def _share(count: int, of: int) -> str:
    return f"{count / max(of, 1):.1%}"
