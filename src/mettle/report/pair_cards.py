"""The hardest pairs of a test split as a page shows them: names, pictures, and what the threshold makes of them."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mettle.data.dataset import Samples
from mettle.evaluate.diagnostics.hard_pairs import HardPair, PairKind, PairQuery
from mettle.evaluate.run.scenarios import ScenarioResults
from mettle.report.format import format_rate

COUNT = 12  # pairs in a list
EACH = 2  # of them for one pair of identities
FAR = 1e-3  # the operating point that pairs are shown against
SMALL, LARGE = 64, 128  # pictures up to SMALL are kept as they are; larger ones shrink to LARGE


@dataclass(frozen=True)
class PairThreshold:
    """The threshold that pairs are shown against."""

    threshold: float
    title: str


def hardest_pairs(results: ScenarioResults, kind: PairKind, *, count: int = COUNT, each: int = EACH) -> list[HardPair]:
    """The hardest pairs of the headline scenario, hardest first.

    Args:
        results: what was measured.
        kind: ``genuine`` for the lowest scores of one identity, ``impostor`` for the highest of two.
        count: how many pairs.
        each: how many of them may show the same two identities.
    """
    z, samples, query = results.embeddings, results.samples, PairQuery.hardest(kind)
    return results.headline.search_pairs(z, samples, query, count=count, each=each)


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
    pairs: list[HardPair], samples: Samples, decided: PairThreshold | None, kind: PairKind
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
