"""Settings that every test shares."""

import importlib.util
import json
import os
import random
import shutil
import sys
from collections import Counter
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
    if importlib.util.find_spec("triton") is not None:
        from interpreter import speed_up

        speed_up()


DURATIONS = Path(__file__).with_name("durations.json")  # seconds of every file of tests, on one core


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="count a skipped test as a failure")
    parser.addoption("--store-durations", action="store_true", help=f"write {DURATIONS.name} anew from this run")


def pytest_configure(config):
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StoredDurations())


class StoredDurations:
    """Adds up what the tests of every file took."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self):
        found = {file: round(spent, 1) for file, spent in sorted(self.seconds.items())}
        DURATIONS.write_text(json.dumps(found, indent=1) + "\n")


def pytest_collection_modifyitems(items):
    """The longest files first: what is left for the end is short, so that no process waits long for the other."""
    known = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -known.get(item.nodeid.split("::")[0], 0))


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


BROWSER_FLAGS = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]
BROWSER_FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(
    scope="module"
)  # no longer: what drives it keeps an event loop running, which other tests start theirs in
def browser():
    where = shutil.which("chromium")
    if where is None:
        pytest.skip("no browser: install chromium (apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # milliseconds: what a busy machine delays is no failure
        opened = playwright.chromium.launch(executable_path=where, args=BROWSER_FLAGS, timeout=120_000)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Embedded data are drawn once for all tests of a machine's user, like for any other user."""
    return Path("~/.cache/mettle").expanduser()
