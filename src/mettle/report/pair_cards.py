"""The hardest pairs of a test split: genuine ones that look different, impostors that look alike.

The search walks through tiles of rows and keeps a short list. It is exact: what a tile drops could not have
made the final list, because the pairs that beat it are in the tile's own list.
"""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from mettle.data.dataset import Samples
from mettle.evaluate.diagnostics.hard_pairs import HardPair
from mettle.evaluate.run.scenarios import ScenarioResults
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.report.format import format_rate

COUNT = 12  # pairs in a list
EACH = 2  # of them for one pair of identities
CELLS = 1 << 20  # scores in one tile
FAR = 1e-3  # the operating point that pairs are shown against
SMALL, LARGE = 64, 128  # pictures up to SMALL are kept as they are; larger ones shrink to LARGE


Kind = Literal["genuine", "impostor"]


@dataclass(frozen=True)
class PairThreshold:
    """The threshold that pairs are shown against."""

    threshold: float
    title: str


def hardest_pairs(
    results: ScenarioResults, kind: Kind, *, count: int = COUNT, each: int = EACH, cells: int = CELLS
) -> list[HardPair]:
    """The hardest pairs of the headline scenario, hardest first.

    Args:
        results: what was measured.
        kind: ``genuine`` for the lowest scores of one identity, ``impostor`` for the highest of two.
        count: how many pairs.
        each: how many of them may show the same two identities.
        cells: scores held at a time; it changes memory, never the result.
    """
    scenario, z, labels = results.headline, results.embeddings, results.samples.labels
    probe, other = scenario.probe, scenario.probe if scenario.gallery is None else scenario.gallery
    units = ExactUnitVectors.from_rows(z[probe]), ExactUnitVectors.from_rows(z[other])
    capacity = min(count, each * _count_identity_pairs(labels[probe], labels[other], kind))
    step = max(1, cells // len(other))
    kept = np.empty((0, 2), np.int64), np.empty(0)
    for start in range(0, len(probe), step):
        rows = np.arange(start, min(start + step, len(probe)))
        cosine = units[0].take(rows).cosine(units[1]).astype(np.float64)
        hardness = cosine if kind == "impostor" else -cosine
        mask = _pair_mask(results, rows) & ((labels[probe[rows], None] == labels[other]) == (kind == "genuine"))
        if len(kept[1]) == capacity:  # a full list: only what beats its last entry is of interest
            mask &= hardness > kept[1][-1]
        i, j = np.nonzero(mask)
        at = np.column_stack([probe[rows[i]], other[j]])
        kept = _merge_pairs(kept, (at, hardness[i, j]), labels, count, each)
    sign = 1 if kind == "impostor" else -1
    return [HardPair(int(a), int(b), float(sign * h)) for (a, b), h in zip(*kept, strict=True)]


def choose_threshold(metrics: Mapping[str, Any], far: float = FAR) -> PairThreshold | None:
    """The threshold for a false-accept rate: as it was set for use, otherwise as measured on the test pairs.

    A rate that could not be measured is replaced by the next larger one.
    """
    chosen = metrics.get("thresholds", {}).get("set", {})
    usable = [(float(f), e["threshold"], e["measured_on"]) for f, e in chosen.items() if e["threshold"] is not None]
    if not usable:
        name, scenario = list(metrics["scenarios"].items())[-1]
        points = scenario["verification"]["tar"]
        usable = [
            (p["far"], p["threshold"], "test pairs" if name == "all" else f"{name} test pairs")
            for p in points
            if p["threshold"] is not None
        ]
    usable = sorted(u for u in usable if u[0] >= far)
    if not usable:
        return None
    found, threshold, where = usable[0]
    return PairThreshold(threshold, f"FAR {format_rate(found)}, set on {where.partition(':')[0]}")


def pair_rows(
    pairs: list[HardPair], samples: Samples, decided: PairThreshold | None, kind: Kind
) -> list[dict[str, Any]]:
    """Pairs as the page shows them: names, domains, pictures, and what the threshold makes of them."""
    found = []
    for pair in pairs:
        accepted = None if decided is None else pair.score >= decided.threshold
        verdict = {None: "", True: "accepted", False: "rejected"}[accepted]
        wrong = accepted is not None and accepted == (kind == "impostor")
        sides = [describe_sample(samples, at) for at in (pair.first, pair.second)]
        found.append({"score": f"{pair.score:.3f}", "verdict": verdict, "wrong": wrong, "sides": sides})
    return found


def describe_sample(samples: Samples, at: int) -> dict[str, Any]:
    """One sample: what to call it (its file where it has one), its names, its picture if it is one."""
    picture = None
    if samples.inputs.kind == "image":
        picture = encode_thumbnail(samples.read(np.asarray([at]))[0])
    domain = "" if samples.domain is None else str(samples.domain.names[samples.domain.codes[at]])
    label = str(samples.label.names[samples.labels[at]])
    return {"id": int(samples.ids[at]), "name": samples.name(at), "label": label, "domain": domain, "picture": picture}


def encode_thumbnail(pixels: np.ndarray, largest: int = LARGE) -> str:
    """A picture (h, w, c) as a data address: small ones exactly, those beyond ``largest`` shrunk and compressed."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    small = max(image.size) <= SMALL
    if not small:
        image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "PNG", "optimize": True} if small else {"format": "JPEG", "quality": 85}))
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _pair_mask(results: ScenarioResults, rows: np.ndarray) -> np.ndarray:
    """Which cells of these probe rows the headline scenario compares."""
    scenario, samples = results.headline, results.samples
    other = scenario.probe if scenario.gallery is None else scenario.gallery
    mine = scenario.probe[rows]
    mask = samples.ids[mine, None] != samples.ids[other]
    if scenario.gallery is None:
        mask &= rows[:, None] < np.arange(len(other))  # every unordered pair once
    if scenario.trials != "all" and samples.domain is not None:
        same = samples.domain.codes[mine, None] == samples.domain.codes[other]
        mask &= same if scenario.trials == "within" else ~same
    return mask


def _count_identity_pairs(first: np.ndarray, second: np.ndarray, kind: Kind) -> int:
    """At most how many different pairs of identities there are."""
    if kind == "genuine":
        return len(np.intersect1d(first, second))
    everybody = len(np.union1d(first, second))
    return everybody * (everybody - 1) // 2


RankedPairs = tuple[np.ndarray, np.ndarray]  # (n, 2) positions and (n,) hardness


def _merge_pairs(kept: RankedPairs, new: RankedPairs, labels: np.ndarray, count: int, each: int) -> RankedPairs:
    """The best of both lists: at most ``count``, at most ``each`` for one pair of identities."""
    at, hardness = np.concatenate([kept[0], new[0]]), np.concatenate([kept[1], new[1]])
    size = 64 * count
    while True:
        floor = -np.inf if size >= len(hardness) else np.partition(hardness, -size)[-size]
        few = np.flatnonzero(hardness >= floor)  # ties at the floor included
        a, h = at[few], hardness[few]
        order = np.lexsort((a[:, 1], a[:, 0], -h))  # hardest first, then by position, so that ties have an order
        a, h = a[order], h[order]
        two = np.sort(labels[a], axis=1)
        _, group = np.unique(two, axis=0, return_inverse=True)
        picked = np.flatnonzero(_rank_in_group(group.reshape(-1)) < each)[:count]
        if len(picked) == count or size >= len(hardness):
            return a[picked], h[picked]
        size *= 8


def _rank_in_group(group: np.ndarray) -> np.ndarray:
    """How many entries of the same group stand before each one."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(group) else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, len(group)))
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group)) - np.repeat(starts, lengths)
    return place
