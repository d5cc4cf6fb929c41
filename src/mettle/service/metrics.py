"""What the service counts, for Prometheus.

Labels are routes, statuses and reasons: never an identity, a key or an address.
"""

import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Since when each series exists: the client library adds it, as a gauge that nobody here asks for.
_CREATED = re.compile(r"(?:# (?:HELP|TYPE) )?\w+_created[ {]")
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ServiceMetrics:
    """The numbers of one service, in a registry of its own: two in one process do not share them."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.requests = self._counter("mettle_requests", "Requests by route and status.", "route", "status")
        self.verdicts = self._counter("mettle_verdicts", "Answers by route and verdict.", "route", "verdict")
        self.refusals = self._counter("mettle_refusals", "Requests that were not served, by reason.", "route", "reason")
        self.seconds = Histogram(
            "mettle_request_seconds",
            "Seconds from the first byte to the answer.",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )

    def add_gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Offer a number that is read when somebody asks."""
        Gauge(name, help, registry=self._registry).set_function(read)

    def text(self) -> str:
        """All of it, in the text format of Prometheus."""
        lines = generate_latest(self._registry).decode().splitlines(keepends=True)
        return "".join(line for line in lines if not _CREATED.match(line))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self._registry)
