"""What all parts of one service share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mettle.service.counters import Counters
from mettle.service.keys import Keys
from mettle.service.limits import Buckets, Limits
from mettle.service.point import Point
from mettle.service.pool import Pool
from mettle.service.sessions import Sessions
from mettle.service.trail import Trail

if TYPE_CHECKING:
    from mettle.match.gallery import Gallery
    from mettle.train.artifact import Run


@dataclass(frozen=True)
class State:
    """One service."""

    gallery: "Gallery"
    runs: "Sequence[Run]"
    keys: Keys | None  # None: whoever uses this machine may do everything, and nobody else anything
    limits: Limits
    trail: Trail | None
    hosts: frozenset[str]
    point: Point  # where answers are given
    pictures: bool  # whether the gallery's model takes pictures
    pool: Pool
    per_key: Buckets
    per_target: Buckets
    identify_daily: Buckets
    refusals: Buckets
    counters: Counters = field(default_factory=Counters)
    sessions: Sessions = field(default_factory=Sessions)
