"""One group and all groups of an attribute: what slicing finds, who is worst off, and as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mettle.errors import InputError, nearest
from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.intervals import Interval, stated
from mettle.evaluate.verification import Verification

LOWER_IS_BETTER = ("eer", "fmr", "fnmr")


@dataclass(frozen=True, eq=False)
class Group:
    """One group.

    Attributes:
        name: the attribute's value.
        samples: rows in it.
        subjects: subjects in it that the metric rests on; test samples for a probe.
        values: by metric; None where the group cannot support it.
        verification: the group's own result, for curves and intervals; None for per-item metrics.
        why_not: why a value is missing, or why the group is not ranked.
        people: by metric, subjects that it rests on, where that is not ``subjects`` for all of them.
    """

    name: str
    samples: int
    subjects: int
    values: Mapping[str, float | None]
    verification: Verification | None = None
    why_not: str = ""
    people: Mapping[str, int] = field(default_factory=dict)

    def interval(self, metric: str = "eer", level: float = 0.95, *, replicates: int = 1000, seed: int = 0) -> Interval:
        """The interval of the group's own number; see :meth:`Verification.interval`."""
        if self.verification is None:
            raise NotMeasurable(
                f"group {self.name!r} has no interval: {self.why_not or 'its metric is a mean by item'}"
            )
        return self.verification.interval(metric, level, replicates=replicates, seed=seed)


@dataclass(frozen=True, eq=False)
class Groups:
    """All groups of an attribute.

    Attributes:
        groups: by name.
        metric: what groups are ranked by.
        minimum: subjects that a group needs to be called the worst.
        threshold: the global threshold, for verification.
        far: the rate it was set for, or None.
    """

    groups: Mapping[str, Group]
    metric: str
    minimum: int
    threshold: float | None = None
    far: float | None = None

    def __repr__(self) -> str:
        ranked = self.ranked()
        worst = f"worst={ranked[0].name!r} {ranked[0].values[self.metric]:.4g}, " if ranked else ""
        return f"Groups({self.metric}: {worst}groups={len(self.groups)}, ranked={len(ranked)})"

    def __getitem__(self, name: Any) -> Group:
        return self.groups[str(name)]

    def __iter__(self) -> Any:
        return iter(self.groups.values())

    @property
    def small(self) -> tuple[str, ...]:
        """Groups too small to be ranked."""
        return tuple(g.name for g in self if g.subjects < self.minimum)

    def ranked(self, metric: str | None = None) -> tuple[Group, ...]:
        """Groups that have the number and enough subjects that it rests on, worst first."""
        metric = metric or self.metric
        known = {m for g in self for m in g.values}
        if metric not in known:
            raise InputError(f"no metric named {metric!r}{nearest(metric, known)}")
        sign = -1 if metric in LOWER_IS_BETTER else 1
        able = [
            g for g in self if g.people.get(metric, g.subjects) >= self.minimum and g.values.get(metric) is not None
        ]
        return tuple(sorted(able, key=lambda g: (sign * g.values[metric], g.name)))  # type: ignore[operator]

    @property
    def worst(self) -> Group:
        """The worst group by the metric.

        Raises:
            NotMeasurable: no group has enough subjects.
        """
        found = self.ranked()
        if not found:
            sizes = ", ".join(f"{g.name}: {g.subjects}" for g in self)
            raise NotMeasurable(
                f"no group has {self.minimum} subjects, so none can be called the worst ({sizes}); lower minimum= to "
                "rank them all the same"
            )
        return found[0]

    @property
    def gap(self) -> float:
        """Difference between the worst and the best ranked group."""
        found = self.ranked()
        values = [float(g.values[self.metric]) for g in found]  # type: ignore[arg-type]
        return abs(values[0] - values[-1]) if values else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before comparing groups."""
        found = []
        if self.small:
            found.append(f"groups with fewer than {self.minimum} subjects are not ranked: {', '.join(self.small)}")
        found += [f"group {g.name}: {g.why_not}" for g in self if g.why_not]
        return tuple(found)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        ranked = self.ranked()
        rows = []
        for g in self:
            known = {"name": g.name, "samples": g.samples, "subjects": g.subjects, **g.values}
            rows.append({**known, "interval": _stated(g, self.metric)})
        return {
            "metric": self.metric,
            "minimum": self.minimum,
            "threshold": self.threshold,
            "far": self.far,
            "groups": rows,
            "worst": ranked[0].name if ranked else None,
            "gap": self.gap,
            "warnings": list(self.warnings),
        }


def _stated(group: Group, metric: str) -> dict[str, Any] | None:
    if group.verification is None or metric not in ("eer", "auc"):
        return None
    return stated(lambda: group.interval(metric))
