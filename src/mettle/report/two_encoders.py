"""What two encoders make of the same samples: negatives by relative difficulty, its means by group, maps of both."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mettle.atomic_files import write_text
from mettle.data.dataset import Column, Samples
from mettle.evaluate.run.probes import BIASED, MODEL
from mettle.evaluate.run.scenarios import ScenarioResults
from mettle.model import embed
from mettle.pairs import pair_weights
from mettle.report.embedding_map import (
    MapLayout,
    compute_layout,
    layout_of_same_samples,
    round_positions,
)
from mettle.report.format import GAP, format_percent
from mettle.report.pair_cards import describe_sample
from mettle.rng import permutation
from mettle.train.run_folder import RunFolder

SOME = 256  # samples that are compared with each other
ANCHORS = 4
EACH = 5  # easiest and hardest negatives of an anchor
LATE = 3  # means over the last third of the log
FORMAT = 1  # of map.json


def has_second_encoder(run: RunFolder) -> bool:
    """Whether the run has a second encoder."""
    return run.has_biased_model


def watched_column(run: RunFolder, samples: Samples) -> tuple[str, Column] | None:
    """The column that the run watches: as its recipe says, else the domain."""
    name = run.recipe.evaluate.spurious or "domain"
    found = samples.columns().get(name)
    return None if found is None else (name, found)


def negatives_by_difficulty(run: RunFolder, samples: Samples) -> dict[str, Any] | None:
    """The easiest and the hardest negatives of a few anchors by w, and what the hardest of all anchors have in common.

    Samples are drawn from the validation split, or from the training split where that is small; they are compared as
    they are, each once, by both encoders in eval mode.
    """
    part, name = samples.part("val"), "validation"
    if len(part) < 8 * EACH:
        part, name = samples.part("train"), "training"
    part = part.take(np.sort(permutation(len(part), 0, 0, stream=37)[:SOME]))
    if len(part) < 2 * EACH + 1:
        return None
    loss = run.recipe.build_loss()
    z, b = (torch.from_numpy(embed(model, part)) for model in (run.model(), run.biased_model()))
    w = pair_weights(loss, z, torch.from_numpy(part.ids), difficulty=loss.difficulty, biased=b).double().numpy()
    np.fill_diagonal(w, np.nan)
    order = np.argsort(w, axis=1, kind="stable")[:, : len(part) - 1]  # NaN, the anchor itself, comes last
    easy, hard = order[:, :EACH], order[:, ::-1][:, :EACH]
    watched = watched_column(run, part)
    found = [
        {"anchor": describe_sample(part, at)}
        | {
            kind: [_negative_card(part, at, j, w[at, j]) for j in rows[at]]
            for kind, rows in (("easy", easy), ("hard", hard))
        }
        for at in choose_anchors(part.labels, None if watched is None else watched[1].codes)
    ]
    columns = [("label", part.label), *([] if watched is None else [watched])]
    return {
        "anchors": found,
        "count": len(part),
        "split": name,
        "mean": f"{np.nanmean(w):.3f}",
        "spread": f"{np.nanstd(w, ddof=1):.3f}",
        "control": run.recipe.biased.weights,
        "alike": [_shared_attribute_row(title, column.codes, easy, hard) for title, column in columns],
    }


def choose_anchors(labels: np.ndarray, groups: np.ndarray | None, count: int = ANCHORS) -> list[int]:
    """Positions of a few samples: different labels, and groups in turn."""
    found: list[int] = []
    for at in permutation(len(labels), 0, 0, stream=41).tolist():
        used = [] if groups is None else [groups[k] for k in found]
        turn = groups is None or used.count(groups[at]) <= min((used.count(g) for g in np.unique(groups)), default=0)
        if turn and labels[at] not in labels[found]:
            found.append(at)
        if len(found) == count:
            break
    return found


def _negative_card(part: Samples, anchor: int, other: int, w: float) -> dict[str, Any]:
    return {
        **describe_sample(part, int(other)),
        "w": f"{w:.2f}",
        "same": bool(part.labels[anchor] == part.labels[other]),
    }


def _shared_attribute_row(title: str, codes: np.ndarray, easy: np.ndarray, hard: np.ndarray) -> dict[str, Any]:
    """How many negatives share something with their anchor: of all, of the easiest, of the hardest."""
    same = codes[:, None] == codes[None, :]
    n = len(codes)
    shares = [(same.sum() - n) / (n * (n - 1))]
    shares += [np.take_along_axis(same, rows, axis=1).mean() for rows in (easy, hard)]
    return {"name": f"same {title}", "shares": [format_percent(float(x), 1) for x in shares]}


def weights_by_group(run: RunFolder, samples: Samples, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Mean w by the groups of anchor and negative, over the last third of the log lines that have them."""
    known = [line["weight_by_group"] for line in lines if line.get("weight_by_group")]
    watched = watched_column(run, samples)
    if not known or watched is None:
        return None
    late = known[-max(1, len(known) // LATE) :]
    name, column = watched
    means = {key: float(np.mean([line[key] for line in late if key in line])) for line in late for key in line}
    names = [a for a in column.names if any(f"{a} / {b}" in means for b in column.names)]
    low, high = min(means.values()), max(means.values())

    def cell(key: str) -> dict[str, Any]:
        if key not in means:
            return {"text": "–", "shade": 0}
        return {"text": f"{means[key]:.3f}", "shade": round(45 * (means[key] - low) / ((high - low) or 1))}

    rows = [{"name": a, "cells": [cell(f"{a} / {b}") for b in names]} for a in names]
    return {"column": name, "names": names, "rows": rows, "lines": len(late)} if names else None


def encoder_maps(
    run: RunFolder, results: ScenarioResults, *, by_class: bool = False, synthetic: np.ndarray | None = None
) -> dict[str, MapLayout]:
    """Where test samples lie for the model, and for its second encoder where it has one; empty: too little to draw.

    ``by_class`` and ``synthetic`` are those of `compute_layout`.
    """
    first = compute_layout(results, by_class=by_class, synthetic=synthetic)
    if first is None:
        return {}
    if not has_second_encoder(run):
        return {"model": first}
    second = layout_of_same_samples(first, embed(run.biased_model(), results.samples.take(first.rows)))
    return {MODEL: first} | ({} if second is None else {BIASED: second})


def encoder_title(name: str) -> str:
    """What to call an encoder on a page."""
    return {MODEL: f"E_d,{GAP}the model", BIASED: f"E_b,{GAP}the biased encoder"}.get(name, name)


def write_maps(
    run: RunFolder, found: Mapping[str, MapLayout], results: ScenarioResults, metrics: Mapping[str, Any]
) -> None:
    """Write ``map.json``: places on the maps, so that runs can be laid side by side without their data."""
    path = run.folder / "map.json"
    if not found:
        path.unlink(missing_ok=True)
        return
    first, *others = found.items()
    marked = [results.samples.label.names[label] for label in first[1].marked]
    content = {
        "format": FORMAT,
        "weights": metrics["weights"],
        "data": metrics["data"]["fingerprint"],
        "first": first[0],
        **first[1].as_dict(),
        "marked_names": marked,
        "others": {name: round_positions(one.place) for name, one in others},
    }
    write_text(path, json.dumps(content, separators=(",", ":")))


def read_maps(run: RunFolder, metrics: Mapping[str, Any]) -> tuple[dict[str, MapLayout], list[str]] | None:
    """The maps in ``map.json`` and the names of the marked identities, if they are of these weights and these data."""
    try:
        kept = json.loads((run.folder / "map.json").read_text(encoding="utf-8"))
        current = (FORMAT, metrics["weights"], metrics["data"]["fingerprint"])
        if (kept["format"], kept["weights"], kept["data"]) != current:
            return None
        first = MapLayout.of(kept)
        places = {name: np.asarray(place, float).reshape(-1, 2) for name, place in kept["others"].items()}
        if any(len(place) != len(first.rows) for place in (first.place, *places.values())):
            return None
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return {kept["first"]: first} | {name: first.moved(place) for name, place in places.items()}, kept["marked_names"]
