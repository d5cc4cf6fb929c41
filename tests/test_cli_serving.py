"""`mettle serve`, `mettle keys`, `mettle trail` and `mettle --version` as a user types them."""

import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from PIL import Image

import mettle as package
from command_line import mettle
from mettle.data.decode import PIXELS
from mettle.service import Limits, Trail
from small_runs import small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def picture(trained, tmp_path_factory):
    """A file of one test picture."""
    path, test = tmp_path_factory.mktemp("pictures") / "one.png", trained.samples.part("test")
    Image.fromarray(test.read(np.array([0]))[0][..., 0]).save(path)
    return path


def test_version():
    assert mettle("--version") == f"mettle {package.__version__}\n"


def test_keys(tmp_path):
    file = tmp_path / "keys.json"
    token = mettle(
        "keys", "create", file, "front desk", "--scope", "verify", "--scope", "identify", "--days", 30
    ).strip()
    assert re.fullmatch(r"mettle_[0-9a-f]{12}_[\w-]{43}", token)
    listed = mettle("keys", "list", file)
    assert listed.startswith("front desk  identify, verify  until 20")
    assert token.split("_")[2] not in listed + file.read_text()
    assert mettle("keys", "revoke", file, "front desk") == "revoked front desk\n"
    assert mettle("keys", "list", file) == ""
    assert "did you mean 'identify'" in mettle("keys", "create", file, "x", "--scope", "identfy", status=2)


def test_serve_answers_and_stops(trained, picture, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mettle", "serve", trained.run.folder, "--gallery", tmp_path / "g.mettle"]
    command += ["--create", "--threshold", "0.25", "--megapixels", "0.001", "--megabytes", "1"]
    server = subprocess.Popen(
        [*map(str, command), "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(300):
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert server.poll() is None, server.stdout.read()
                    time.sleep(0.2)
            sent = {"image": (picture.name, picture.read_bytes(), "image/png")}
            enrolled = client.post("/v1/enrol", data={"identity": "anna"}, files=sent)
            assert enrolled.status_code == 200, enrolled.text
            found = client.post("/v1/identify", files=sent).json()
            assert found["candidates"][0]["identity"] == "anna"
            assert (found["threshold"], found["far"], found["false_matches"]) == (0.25, None, None)
            limits = client.get("/v1/info").json()["limits"]
            assert (limits["pixels"], limits["body"]) == (1000, 1 << 20)
            asked = client.post(
                "/workbench/api/identify", content=picture.read_bytes(), headers={"Content-Type": "image/png"}
            )
            assert asked.json()["threshold"] == 0.25, "the page answers at the service's threshold"
            assert client.get("/workbench/").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait()
    assert mettle("gallery", "ids", tmp_path / "g.mettle") == "anna\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", 99999], "port must be"),
        (["--port", -1], "port must be"),
        (["--host", "0.0.0.0"], "no keys"),
        (["--host", "0.0.0.0", "--keys", "nowhere.json"], "no file of keys"),
        (["--gallery", "nope.mettle"], "no gallery at nope.mettle"),
        (["--megapixels", 0], "--megapixels"),
        (["--megabytes", -3], "--megabytes"),
    ],
)
def test_a_service_that_cannot_start_makes_nothing(trained, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(trained.run.folder.iterdir())
    said = mettle("serve", trained.run.folder, *words, status=2)
    assert message in said
    assert list(tmp_path.iterdir()) == [] and sorted(trained.run.folder.iterdir()) == before


def test_the_service_takes_pictures_as_large_as_training_does():
    assert Limits().pixels == PIXELS


def test_a_trail_is_checked_and_searched(tmp_path):
    path = tmp_path / "trail.jsonl"
    trail = Trail(path)
    trail.append("desk", "verify", "match", subject="Jos\u00e9")
    trail.append("desk", "verify", "no match", subject="ben")
    trail.close()
    assert mettle("trail", "check", path) == "2 lines, sound\n"
    said = mettle("trail", "uses", path, "Jose\u0301")
    assert said.count("\n") == 1 and '"outcome": "match"' in said
    path.write_text(path.read_text().replace("no match", "match"))
    said = mettle("trail", "check", path, status=1)
    assert "line 2 was changed" in said and "1 problems" in said
    assert "cannot be checked" in mettle("trail", "check", tmp_path / "none.jsonl", status=2)
