"""A real server on a free port, and a client that remembers what it was told."""

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
from PIL import Image

from mettle.service.server import make_server

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
