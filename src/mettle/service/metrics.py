"""What the service counts, in the text format that Prometheus reads.

Labels are routes, statuses and reasons: never an identity, a key or an address.
"""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_HELP = {
    "mettle_requests_total": "Requests by route and status.",
    "mettle_verdicts_total": "Answers by route and verdict.",
    "mettle_refusals_total": "Requests that were not served, by reason.",
}

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Numbers that only rise, gauges that are asked for when they are read, and one histogram of seconds."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, int]] = {name: defaultdict(int) for name in _HELP}
        self._seconds: dict[str, list[int]] = defaultdict(lambda: [0] * (len(EDGES) + 1))
        self._total: dict[str, float] = defaultdict(float)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def count(self, name: str, **labels: str) -> None:
        """One more."""
        with self._lock:
            self._counts[name][tuple(sorted(labels.items()))] += 1

    def took(self, route: str, seconds: float) -> None:
        """A request of this route took so long."""
        with self._lock:
            self._seconds[route][bisect_left(EDGES, seconds)] += 1
            self._total[route] += seconds

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Offer a number that is read when somebody asks."""
        self._gauges[name] = (help, read)

    def text(self) -> str:
        """All of it."""
        lines: list[str] = []
        with self._lock:
            for name, help in _HELP.items():
                lines += [f"# HELP {name} {help}", f"# TYPE {name} counter"]
                lines += [f"{name}{_shown(labels)} {value}" for labels, value in sorted(self._counts[name].items())]
            name = "mettle_request_seconds"
            lines += [f"# HELP {name} Seconds from the first byte to the answer.", f"# TYPE {name} histogram"]
            for route, counts in sorted(self._seconds.items()):
                sofar = 0
                for edge, count in zip((*map(str, EDGES), "+Inf"), counts, strict=True):
                    sofar += count
                    lines.append(f"{name}_bucket{_shown((('route', route), ('le', edge)))} {sofar}")
                lines.append(f"{name}_sum{_shown((('route', route),))} {self._total[route]:.6f}")
                lines.append(f"{name}_count{_shown((('route', route),))} {sofar}")
        for name, (help, read) in self._gauges.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} gauge", f"{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _shown(labels: Labels) -> str:
    def quoted(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels) + "}" if labels else ""
