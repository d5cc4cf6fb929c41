"""A real server on a free port, and a client that remembers what it was told."""

import io
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from mettle.gallery import Gallery
from mettle.service import Limits, Rate, create_app, create_key
from mettle.service.server import make_server
from mettle.train import train
from mettle.train.recipe import parse_recipe

DIM = 16
THRESHOLD = 0.6
NAMES = ("anna", "ben", "carl", "dora", "emil")
PATIENCE = 120  # seconds for an answer: what a busy machine delays is no failure


@dataclass
class Told:
    """Everything that left the services of this session, for the search for secrets at its end."""

    texts: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)


@contextmanager
def running(app) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def client(url: str, told: Told, token: str | None = None, **headers: str) -> httpx.Client:
    def remember(response: httpx.Response) -> None:
        response.read()
        if response.status_code >= 400 or response.request.url.path == "/metrics":
            told.texts.append(response.text)

    given = {"Authorization": f"Bearer {token}"} if token else {}
    hooks = {"response": [remember]}  # no TLS here, so no certificates need be read
    limits = httpx.Limits(keepalive_expiry=2)  # sooner than the server's, or both may give a connection up at a time
    return httpx.Client(
        base_url=url, headers=given | headers, event_hooks=hooks, timeout=PATIENCE, limits=limits, verify=False
    )


def directions(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    """Orthogonal unit vectors, as long as there is room, so that nobody looks like anybody else."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))
    return q[:count].astype(np.float32)


def near(vector: np.ndarray, amount: float = 0.1, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(size=vector.shape)
    mixed = vector + amount * noise / np.linalg.norm(noise)
    return (mixed / np.linalg.norm(mixed)).tolist()


def picture(array: np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def error(response: httpx.Response) -> str:
    """The code of a refusal, whose shape is always the same."""
    body = response.json()
    assert set(body) == {"error", "match"} and body["match"] is None
    assert set(body["error"]) == {"code", "message"} and all(isinstance(v, str) for v in body["error"].values())
    assert len(body["error"]["message"]) < 200 and "\n" not in body["error"]["message"]
    return body["error"]["code"]


def send(url: str, head: str, *chunks: bytes, token: str = "", wait: float = 0.0) -> tuple[int, dict]:
    """Raw bytes to the server: the status and the body of its answer, or (0, {}) where it just hung up."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as wire:
        wire.sendall(f"{head}\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        try:
            for chunk in chunks:
                wire.sendall(chunk)
                time.sleep(wait)
        except OSError:
            pass
        return answer(wire)


def answer(wire: socket.socket) -> tuple[int, dict]:
    data = b""
    try:
        while piece := wire.recv(1 << 16):
            data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            if body.endswith(b"}"):
                break
    except OSError:
        pass
    if not data:
        return 0, {}
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


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
    """Starts a service over the five people, with keys and an audit log, and returns a function that makes clients."""
    opened = []
    key("metrics", name="first")

    def start(limits: Limits = WIDE, **options):
        stack = ExitStack()
        chosen = {"keys": keyfile, "audit_log": tmp_path / "audit.jsonl"} | options
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
