"""One recipe trained with several seeds: the mean of every headline number and its interval over seeds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mettle.atomic_files import write_text
from mettle.evaluate.bootstrap import mean_interval
from mettle.report.comparison_page import write_comparison
from mettle.report.headline import question_name, sort_rows
from mettle.report.metric_tables import is_shown, metric_cells
from mettle.train.run_folder import RunFolder

ENOUGH = 5  # seeds below which an interval says little


def summarize_seeds(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Mean and 95 % interval over the runs (Student's t) of each headline number, by scenario.

    Numbers of the question come first.
    A number that a run could not measure, or only on too few impostor pairs, is left out for all of them.
    """
    measured = [run.metrics() for run in runs]
    scenarios: dict[str, Any] = {}
    for name in measured[0]["scenarios"]:
        tables = [{entry["name"]: entry for entry in metric_cells(m["scenarios"][name])} for m in measured]
        rows = {}
        for entry in sort_rows(list(tables[0].values()), question_name(measured[0])):
            title = entry["name"]
            if not is_shown(entry, "tile"):
                continue
            found = [table.get(title, {"value": None, "status": ""}) for table in tables]
            if any(one["value"] is None or one["status"] == "refused as headline" for one in found):
                continue
            values = [one["value"] for one in found]
            mean, half = mean_interval(values)
            ends = {"low": max(0.0, mean - half), "high": min(1.0, mean + half)}  # all of them are rates
            rows[" ".join(title.split())] = {"mean": mean, **ends, "values": values}
        scenarios[name] = rows
    return {"format": 1, "seeds": [run.recipe.seed for run in runs], "scenarios": scenarios}


def describe_seeds(summary: dict[str, Any]) -> list[str]:
    """The table as lines of text, and what to know before trusting it."""
    count = len(summary["seeds"])
    lines = [f"mean over {count} seeds [95 % interval over seeds, Student's t]"]
    for name, rows in summary["scenarios"].items():
        for title, row in rows.items():
            lines.append(f"  {name:<13} {title:<18} {row['mean']:.4f} [{row['low']:.4f}, {row['high']:.4f}]")
    if count < ENOUGH:
        lines.append(
            f"warning: {count} seeds leave {count - 1} degrees of freedom, so intervals are wide: train 5 or more"
        )
    return lines


def write_seeds(runs: Sequence[RunFolder], folder: Path) -> dict[str, Any]:
    """Write ``seeds.json`` and the page that lays the runs beside each other, ``seeds.html``."""
    summary = summarize_seeds(runs)
    write_text(folder / "seeds.json", json.dumps(summary, indent=1))
    write_comparison(runs, folder / "seeds.html", over_seeds=describe_seeds(summary))
    return summary
