"""All studies by name."""

from collections.abc import Callable

from benchmarks.evidence import cifar, cub200, market, spurious, tabular
from benchmarks.evidence.worker_pool import Study

STUDIES: dict[str, Callable[[bool], Study]] = {
    "market": market.study,
    "birds": cub200.study,
    "cifar": cifar.cifar,
    "tiny": cifar.tiny,
    "coloured": spurious.colour_study,
    "waterbirds": spurious.water_study,
    "tables": tabular.study,
}


def study_of(name: str, quick: bool) -> Study:
    """A study; ``quick`` is a minute on a CPU that only shows that everything runs."""
    return STUDIES[name](quick)
