"""All studies by name."""

from collections.abc import Callable

from benchmarks.evidence import birds, cifar, market, spurious, tables
from benchmarks.evidence.pool import Study

STUDIES: dict[str, Callable[[bool], Study]] = {
    "market": market.study,
    "birds": birds.study,
    "cifar": cifar.cifar,
    "tiny": cifar.tiny,
    "coloured": spurious.colour_study,
    "waterbirds": spurious.water_study,
    "tables": tables.study,
}


def study_of(name: str, quick: bool) -> Study:
    """A study; ``quick`` is a minute on a CPU that only shows that everything runs."""
    return STUDIES[name](quick)
