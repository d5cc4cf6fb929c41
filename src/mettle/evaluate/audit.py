"""Audit: everything this room can say about embeddings with labels, from any model, in one frozen result.

    Embedded ─┬─ scenarios   all pairs; within and across domains where there are some: verification, retrieval
              ├─ domains     enrol domain x probe domain
              ├─ groups      each attribute: own error, error at the global threshold, the worst
              ├─ use         thresholds carried to other people, open-set identification, clustering, probes
              └─ sample      slices by difficulty and class size, hardest pairs, confusion, geometry

What grows with the square of the rows and is not streamed runs on whole identities drawn at random, at most ``MOST``
rows; ``limits`` says so. What the data cannot support is named in ``missing`` with the reason, and is no number.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate import copies, plan, use
from mettle.evaluate.audited import Audit, Way
from mettle.evaluate.calibrate import Carried, calibrate
from mettle.evaluate.checks import whole
from mettle.evaluate.geometry import geometry
from mettle.evaluate.groups import Groups, bands, class_size
from mettle.evaluate.groups import groups as slice_by
from mettle.evaluate.partial import Parts, sampled
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.several import Numbers, rates
from mettle.evaluate.suspects import HardPair, confusion, difficulty, hardest
from mettle.evaluate.suspects import label_errors as find_label_errors
from mettle.evaluate.suspects import same_subject as find_same_subject
from mettle.evaluate.table import Embedded
from mettle.evaluate.trials import Matrix, domain_matrix
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments

FARS = (1e-1, 1e-2, 1e-3)
KS = (1, 2, 4, 8)
MOST = 12_000  # rows of what is not streamed
LISTED = 24  # domains in the matrix


@explain_arguments
def audit(
    table: Embedded | Any,
    labels: Any = None,
    *,
    domains: Any = None,
    groups: Mapping[str, Any] | None = None,
    ids: Any = None,
    fars: Numbers = FARS,
    count: int = 24,
    most: int = MOST,
    seed: int = 0,
) -> Audit:
    """Judge embeddings in every way that their columns allow.

    Args:
        table: (n, d) array or tensor; or a whole table of :func:`mettle.evaluate.read_embeddings`, without the four
            arguments that follow.
        labels: (n,) integers or text: who or what each row is.
        domains: (n,) integers or text: device, session, camera.
        groups: other attributes to slice by, each (n,) integers or text, by name.
        ids: (n,) integers or text; rows of one id are one sample.
        fars: false-accept rates, or one.
        count: pairs and twins in each list.
        most: rows of what is not streamed.
        seed: of every draw.

    Raises:
        InputError: no genuine or no impostor pair, a rate outside (0, 1).

    Example:
        >>> import numpy as np
        >>> y = np.repeat(np.arange(8), 4)
        >>> x = np.eye(8)[y] + 0.1 * np.random.default_rng(0).normal(size=(32, 8))
        >>> found = audit(x, y)
        >>> found.headline.verification.eer, found.missing["groups"]
        (0.0, 'the file has no column to slice by')
    """
    chosen = _rates(fars)
    whole(count, "count", 1)
    whole(most, "most", 2)
    whole(seed, "seed", 0)
    table = _table(table, labels, {"domains": domains, "groups": groups, "ids": ids})
    x, y, ids = table.values, table.label.codes, table.ids
    domain = None if table.domain is None else table.domain.codes
    part = Parts()
    ways = _ways(x, y, ids, domain, chosen, part)
    everything = ways["all"].verification
    entire = len(y) <= most and ways["all"].retrieval is not None
    at = _threshold(everything, chosen)
    single = np.unique(ids, return_index=True)[1]  # a protocol names every sample once
    cut = sampled(y, most, seed)
    if len(cut) < len(y):
        part.limits.append(
            f"Slices by difficulty and class size, hardest pairs, confusion and geometry rest on {len(cut):,} rows of "
            f"{len(np.unique(y[cut])):,} identities drawn at random (whole identities), of {len(y):,} rows."
        )
    attributes = dict(table.groups)
    if table.domain is not None:
        attributes = {table.columns.get("domain") or "domain": table.domain} | attributes
    if not attributes:
        part.missing["groups"] = "the file has no column to slice by"
    known = (everything, ways["all"].retrieval) if entire else (None, None)
    sliced, recalled = _slices(x[cut], y[cut], ids[cut], at, part, *known)
    return Audit(
        table,
        chosen,
        ways,
        _domains(x, y, ids, table, part),
        {
            key: found
            for key, column in attributes.items()
            if (found := part.attempt(key, lambda c=column: slice_by(everything, c.values().astype(str), **at)))
        },
        sliced,
        recalled,
        _carried(x[single], y[single], chosen, seed, part),
        part.attempt("identification", lambda: use.identified(x[single], y[single], seed)),
        part.attempt("clustering", lambda: use.clustered(x, y, seed, part)),
        part.attempt("probe", lambda: use.probed(table, seed, part)),
        part.attempt("label errors", lambda: find_label_errors(x, y)),
        tuple(part.attempt("same subject", lambda: find_same_subject(x, y, count)) or ()),
        {kind: _hardest(x, y, ids, cut, kind, count, part) for kind in ("genuine", "impostor")},
        tuple(part.attempt("confusion", lambda: confusion(x[cut], y[cut])) or ()),
        part.attempt("geometry", lambda: geometry(x[cut], y[cut], seed=seed)),
        cut,
        copies.within(x, y, ids),
        part.missing,
        tuple(part.limits),
    )


def _rates(fars: Any) -> tuple[float, ...]:
    """False-accept rates, the largest first."""
    return tuple(sorted(set(rates(fars, below_one=True)), reverse=True))


def _table(given: Any, labels: Any, others: Mapping[str, Any]) -> Embedded:
    """A table, made of arrays if those came."""
    if isinstance(given, Embedded):
        extra = [name for name, value in (("labels", labels), *others.items()) if value is not None]
        if extra:
            raise InputError(f"{extra[0]} goes with arrays: got a table too, which holds its own columns")
        return given
    if isinstance(given, str | PathLike):
        raise InputError(f"audit takes arrays or a table: read the file first, audit(read_embeddings({str(given)!r}))")
    if labels is None:
        raise InputError("labels are missing: audit(embeddings, labels), one integer or text per row")
    return Embedded.of(given, labels, **others)


def _ways(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, domain: np.ndarray | None, fars: Sequence[float], part: Parts
) -> dict[str, Way]:
    rows: dict[str, Any] = {"ids": ids, "domains": domain}
    ks = tuple(k for k in KS if k < len(y)) or (1,)

    def way(name: str, title: str, trials: str) -> Way:
        v = verification(x, y, trials=trials, **rows)
        v.look_at(fars)
        apart = trials == "across"
        near = None
        if trials != "within":  # the nearest of one's own domain is what "all" mostly finds anyway
            near = part.attempt(f"retrieval, {name}", lambda: retrieval(x, y, k=ks, exclude_same_domain=apart, **rows))
        return Way(title, v, near)

    found = {"all": way("all", "every pair", "all")}
    if domain is not None:
        for name, title, trials in (
            ("in-domain", "pairs of one domain", "within"),
            ("cross-domain", "pairs of two domains", "across"),
        ):
            one = part.attempt(name, lambda n=name, t=title, k=trials: way(n, t, k))
            if one is not None:
                found[name] = one
    return found


def _threshold(v: Verification, fars: Sequence[float]) -> dict[str, Any]:
    """The global threshold of groups: of the lowest rate that can be relied on, else where both errors are equal."""
    usable = [p for p in (v.operating_point(far) for far in fars) if p.usable is not None]
    good = [p for p in usable if p.status == "ok" and p.far <= 1e-2] or [p for p in usable if p.status == "ok"]
    if good:
        return {"far": max(p.far for p in good)}
    return {"far": usable[0].far} if usable else {"threshold": v.eer_bracket.above[0]}


def _domains(x: np.ndarray, y: np.ndarray, ids: np.ndarray, table: Embedded, part: Parts) -> Matrix | None:
    if table.domain is None:
        part.missing["domains"] = "the file has no domain column with two domains"
        return None
    values, counts = np.unique(table.domain.codes, return_counts=True)
    keep = np.isin(table.domain.codes, values[np.argsort(-counts, kind="stable")][:LISTED])
    if len(values) > LISTED:
        part.limits.append(f"The matrix of domains shows the {LISTED} largest of {len(values)} domains.")
    text = table.domain.values().astype(str)[keep]
    return part.attempt("domains", lambda: domain_matrix(x[keep], y[keep], text, ids=ids[keep]))


def _slices(
    x: np.ndarray,
    y: np.ndarray,
    ids: np.ndarray,
    at: Mapping[str, Any],
    part: Parts,
    v: Verification | None,
    near: Retrieval | None,
) -> tuple[dict[str, Groups], dict[str, Groups]]:
    """The sampled rows by how hard they are and by how many samples their class has."""
    if v is None or near is None:
        v = part.attempt("slices", lambda: verification(x, y, ids=ids))
        near = part.attempt("slices of retrieval", lambda: retrieval(x, y, k=(1,), ids=ids))
    if v is None or near is None:
        return {}, {}
    pairs: dict[str, Groups] = {}
    recalls: dict[str, Groups] = {}
    alone = np.isin(y, *_singles(y))
    hard = difficulty(x, y)
    hard[alone] = hard[~alone].max() if (~alone).any() else 0  # no relative: as hard as the hardest
    made = {"difficulty": lambda: bands(hard, 4), "class size": lambda: class_size(y)}
    for name, make in made.items():
        kind = make()
        one = part.attempt(name, lambda k=kind: (slice_by(v, k, **at), slice_by(near, k)))
        if one is not None:
            pairs[name], recalls[name] = one
    return pairs, recalls


def _singles(y: np.ndarray) -> tuple[np.ndarray]:
    values, counts = np.unique(y, return_counts=True)
    return (values[counts == 1],)


def _carried(x: np.ndarray, y: np.ndarray, fars: Sequence[float], seed: int, part: Parts) -> tuple[Carried, ...]:
    """Thresholds set on half of the people and judged on the other half."""
    ids = np.arange(len(y))
    halves = part.attempt("thresholds", lambda: plan.class_disjoint(ids, y, test=0.5, calibration=0.5, seed=seed))
    if halves is None:
        return ()
    sides = [np.isin(ids, side) for side in (halves.calibration, halves.probes)]
    pair = part.attempt("thresholds", lambda: [verification(x[side], y[side]) for side in sides])
    if pair is None:
        return ()
    pair[0].look_at(fars)
    sets = {far: part.attempt(f"threshold for FAR {far:g}", lambda f=far: calibrate(pair[0], f)) for far in fars}
    chosen = {far: one for far, one in sets.items() if one is not None}
    levels = [one.threshold for one in chosen.values()]
    pair[1].look_at((), levels)
    part.attempt("intervals of thresholds", lambda: pair[1].resample_at(levels) if levels else None)
    carried = [
        part.attempt(f"threshold for FAR {far:g}", lambda o=one: o.carry(pair[1])) for far, one in chosen.items()
    ]
    return tuple(one for one in carried if one is not None)


def _hardest(
    x: np.ndarray, y: np.ndarray, ids: np.ndarray, cut: np.ndarray, kind: Any, count: int, part: Parts
) -> tuple[HardPair, ...]:
    """The hardest pairs of the sampled rows, by position in the file; two rows of one sample are no pair."""
    first = np.sort(np.unique(ids[cut], return_index=True)[1])
    at = cut[first]
    found = part.attempt(f"hardest {kind}", lambda: hardest(x[at], y[at], kind, count=count))
    return tuple(HardPair(int(at[p.first]), int(at[p.second]), p.score) for p in found or ())
