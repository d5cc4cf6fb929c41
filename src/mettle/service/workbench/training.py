"""Training curves: the panels of the report, as numbers."""

from typing import Any

from mettle.report.training_plots import PANELS, Panel, series, validation_panels
from mettle.train import RunFolder
from mettle.train.callbacks import read_log

Log = list[dict[str, Any]]


def training(run: RunFolder) -> list[dict[str, Any]]:
    """Every panel for which the log of a run has something to tell."""
    log = read_log(run.folder / "log.jsonl")
    return [_facts(panel, log) for panel in (*validation_panels([log]), *PANELS) if _tells(panel, log)]


def _facts(panel: Panel, log: Log) -> dict[str, Any]:
    lines = [{"name": name, "points": series(log, key).tolist()} for key, name in panel.lines]
    return {"title": panel.title, "caption": panel.caption, "share": panel.share, "lines": lines}


def _tells(panel: Panel, log: Log) -> bool:
    """Whether there is a line that moves, and no other panel that says it better."""
    if panel.unless and len(series(log, panel.unless)) > 1:
        return False
    found = [series(log, key) for key, _ in panel.lines]
    return any(len(line) > 1 and (panel.still is None or (line[:, 1] != panel.still).any()) for line in found)
