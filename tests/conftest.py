"""Settings that every test shares."""

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one test process per core
sys.path.insert(0, str(Path(__file__).parent))  # tests/oracles and tests/laws as `oracles`, `laws`

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# Machines are shared: slow is not wrong.
settings.register_profile("mettle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mettle")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="count a skipped test as a failure")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "mettle_lines" not in item.name)  # minutes each: last, one of them would run alone


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _draws(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _draws(2)


def _draws(seed: int) -> None:
    """What a test draws without a seed of its own is the same whichever tests ran before it in this process."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips does not allow: {report.longrepr}"


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Embedded data are drawn once for all tests of a machine's user, like for any other user."""
    return Path("~/.cache/mettle").expanduser()
