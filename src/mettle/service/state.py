"""What all parts of one service share; `stand` puts it together around a gallery."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mettle.errors import InputError
from mettle.service.counters import Counters
from mettle.service.keys import Keys
from mettle.service.limits import Buckets, Limits
from mettle.service.point import Point
from mettle.service.pool import Pool
from mettle.service.sessions import Sessions
from mettle.service.trail import Trail

if TYPE_CHECKING:
    from mettle.gallery.gallery import Gallery
    from mettle.train.run_folder import RunFolder


@dataclass(frozen=True)
class State:
    """One service."""

    gallery: "Gallery"
    runs: "Sequence[RunFolder]"
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


def stand(
    gallery: "Gallery",
    limits: Limits,
    point: Point,
    *,
    runs: "Sequence[RunFolder]" = (),
    keys: Keys | None = None,
    trail: Trail | None = None,
    hosts: Iterable[str] = (),
) -> State:
    """A service at its start: nobody has asked for anything yet."""
    return State(
        gallery=gallery,
        runs=tuple(runs),
        keys=keys,
        limits=limits,
        trail=trail,
        hosts=frozenset(hosts),
        point=point,
        pictures=_takes_pictures(gallery),
        pool=Pool(limits.workers, limits.queue, limits.work_seconds),
        per_key=Buckets(limits.per_key),
        per_target=Buckets(limits.per_target),
        identify_daily=Buckets(limits.identify_daily),
        refusals=Buckets(limits.refusals, most=1),
    )


def _takes_pictures(gallery: "Gallery") -> bool:
    try:
        return gallery.run.contract()["input"]["kind"] == "image"
    except InputError:  # embeddings from elsewhere
        return False
