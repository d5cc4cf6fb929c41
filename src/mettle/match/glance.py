"""A gallery at a glance: what its record, its index and its thresholds say of themselves."""

from pathlib import Path

from mettle.match.answer import Info
from mettle.match.calibration import summary
from mettle.match.place import bytes_of, is_server
from mettle.match.record import Record
from mettle.match.search import Search
from mettle.match.thresholds import Thresholds


def glance(where: str, record: Record, search: Search, thresholds: Thresholds) -> Info:
    """What is there, under which model, found how, and answered at which thresholds."""
    size, bound, server = record.size(), record.binding, is_server(where)
    table, kept = thresholds.shown()
    return Info(
        where=where,
        kind="postgresql" if server else "sqlite",
        identities=size.identities,
        templates=size.templates,
        dim=bound.dim,
        model=bound.model,
        fusion=bound.fusion,
        sequence=record.sequence(),
        index=search.facts(),
        thresholds=table,
        calibration=None if kept is None else summary(kept),
        bytes=None if server else bytes_of(Path(where)),
    )
