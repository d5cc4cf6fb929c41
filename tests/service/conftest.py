"""Services over small galleries: one of embeddings, one of a model that was just trained."""

import logging
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from serving import DIM, NAMES, THRESHOLD, Told, client, directions, running

from mettle.gallery import Gallery
from mettle.service import Limits, Rate, create_app, create_key
from mettle.train import train
from mettle.train.recipe import parse_recipe

WIDE = Limits(per_key=Rate(100_000), per_target=Rate(100_000), refusals=Rate(100_000))


@pytest.fixture(scope="session", autouse=True)
def told():
    """S12: after all tests of this folder, no output of any service holds a secret."""
    told, records = Told(), logging.Handler(logging.DEBUG)
    records.emit = lambda record: told.texts.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("mettle", "uvicorn", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(records)
    logging.getLogger("mettle").setLevel(logging.INFO)
    yield told
    for logger in loggers:
        logger.removeHandler(records)
    everything = "\n".join(told.texts)
    for token in told.tokens:
        assert token not in everything and token.split("_", 2)[2] not in everything, "a key was told"
    assert "Traceback" not in everything and "site-packages" not in everything and "/mettle/" not in everything


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    """Five people, a template each, in orthogonal directions."""
    folder = tmp_path_factory.mktemp("drawn") / "people.mettle"
    with Gallery.open(folder, dim=DIM, thresholds={0.001: THRESHOLD}) as gallery:
        for name, vector in zip(NAMES, directions(len(NAMES)), strict=True):
            gallery.enrol(name, vector)
    return folder


@pytest.fixture
def people(drawn, tmp_path):
    """A copy of these people to play with."""
    shutil.copytree(drawn, tmp_path / "people.mettle")
    with Gallery.open(tmp_path / "people.mettle") as gallery:
        yield gallery


@pytest.fixture
def keyfile(tmp_path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(keyfile, told):
    """Makes a key and returns its token."""

    def make(*scopes: str, name: str | None = None, **options) -> str:
        token = create_key(keyfile, name or "-".join(sorted(scopes)), scopes, **options)
        told.tokens.append(token)
        return token

    return make


@pytest.fixture
def service(people, keyfile, key, tmp_path, told):
    """Starts a service over the five people, with keys and a trail, and returns a function that makes clients."""
    opened = []
    key("metrics", name="first")

    def start(limits: Limits = WIDE, **options):
        stack = ExitStack()
        chosen = {"keys": keyfile, "trail": tmp_path / "trail.jsonl"} | options
        app = create_app(chosen.pop("gallery", people), limits=limits, **chosen)
        url = stack.enter_context(running(app))
        opened.append(stack)

        def connect(token: str | None = None, **headers: str):
            return stack.enter_context(client(url, told, token, **headers))

        connect.url, connect.app, connect.stop = url, app, stack.close
        return connect

    yield start
    for stack in opened:
        stack.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run on small pictures of ten identities: its run folder and eight pictures of each."""
    folder = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(10), 8)
    base = rng.integers(0, 256, (10, 12, 12, 1))
    images = np.clip(base[identity] + rng.normal(0, 20, (80, 12, 12, 1)), 0, 255).astype(np.uint8)
    split = np.select([identity < 6, identity < 8], [0, 1], 2)
    np.savez(folder / "pictures.npz", images=images, label=identity, split=split)
    recipe = parse_recipe(
        {
            "data": {"source": str(folder / "pictures.npz")},
            "batch": {"classes": 4, "samples": 2, "augment": "none"},
            "model": {"backbone": "convnet", "width": 4, "depth": 2, "dim": 8, "pool": "flatten"},
            "loss": {"kind": "SupCon"},
            "train": {"steps": 6, "log_every": 3, "device": "cpu"},
        }
    )
    outcome = train(recipe, folder / "run", tensorboard=False)
    return outcome.run, images.reshape(10, 8, 12, 12)
