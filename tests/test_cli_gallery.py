"""`mettle gallery`, `mettle keys` and `mettle serve` as a user types them."""

import json
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
from typer.testing import CliRunner

from mettle.cli import app
from mettle.errors import MettleError
from small_runs import small_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pictures(trained, tmp_path_factory):
    """Two files of each of the five test identities."""
    folder, test = tmp_path_factory.mktemp("pictures"), trained.samples.part("test")
    names = np.asarray(test.label.names, dtype=object)[test.labels]
    for name in np.unique(names):
        for k, at in enumerate(np.flatnonzero(names == name)[:2]):
            Image.fromarray(test.read(np.array([at]))[0][..., 0]).save(folder / f"{name}-{k}.png")
    return folder


def mettle(*words, status: int = 0) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words])
    if isinstance(done.exception, MettleError):
        assert status == 2, done.exception
        return str(done.exception)
    assert done.exit_code == status, f"{done.output}{done.exception!r}"
    return done.output


def test_from_pictures_to_an_answer(trained, pictures, tmp_path):
    gallery, files = tmp_path / "people.mettle", sorted(pictures.iterdir())
    for file in files[::2]:
        said = mettle("gallery", "enrol", gallery, file.stem[:-2], file, "--model", trained.run.folder)
        assert "1 templates" in said
    assert mettle("gallery", "ids", gallery).split("\n")[:-1] == [file.stem[:-2] for file in files[::2]]
    found = json.loads(mettle("gallery", "identify", gallery, *files[::2], "--json"))
    assert [answer["candidates"][0]["identity"] for answer in found] == [file.stem[:-2] for file in files[::2]]
    assert all(answer["candidates"][0]["score"] == pytest.approx(1) for answer in found)
    who = files[0].stem[:-2]
    assert mettle("gallery", "verify", gallery, who, files[0]).startswith(f"match: {who}  score 1.0000")
    assert mettle("gallery", "verify", gallery, who, files[0], "--threshold", "0.999", "--json")
    said = mettle("gallery", "verify", gallery, who, files[3], "--threshold", "0.9999", status=1)
    assert said.startswith("no match")
    assert "5 people, 5 templates" in mettle("gallery", "info", gallery)
    mettle("gallery", "delete", gallery, who)
    assert "nobody called" in mettle("gallery", "verify", gallery, who, files[0], status=2)
    mettle("gallery", "compact", gallery)
    assert mettle("gallery", "check", gallery) == "sound\n"


def test_everybody_of_a_data_set_and_of_a_table(trained, tmp_path):
    source = trained.samples.origin
    said = mettle(
        "gallery", "enrol", tmp_path / "a", "--model", trained.run.folder, "--data", source, "--split", "test"
    )
    assert "5 people enrolled, 40 templates added" in said
    mettle("embed", trained.run.folder, source, "-o", tmp_path / "z.npz")
    said = mettle(
        "gallery", "enrol", tmp_path / "b", "--dim", 8, "--table", tmp_path / "z.npz", "--where", "split=test"
    )
    assert "5 people enrolled, 40 templates added" in said
    assert "exact index of 40" in mettle("gallery", "index", tmp_path / "b", "--kind", "exact")
    moved = mettle("gallery", "move", tmp_path / "b", tmp_path / "c")
    assert "5 people, 40 templates" in moved
    assert mettle("gallery", "ids", tmp_path / "c") == mettle("gallery", "ids", tmp_path / "b")
    mettle("gallery", "snapshot", tmp_path / "c", tmp_path / "d")
    assert "5 people" in mettle("gallery", "info", tmp_path / "d")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enrol", "GALLERY", "anna"], "--embeddings"),
        (["enrol", "GALLERY"], "one of the three"),
        (["verify", "GALLERY", "anna", "none.png"], "No such file"),
        (["info", "elsewhere"], "no gallery"),
        (["index", "GALLERY", "--kind", "hnws"], "did you mean 'hnsw'"),
        (["identify", "GALLERY", "none.png", "-k", "0"], "k must be"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, words, message):
    gallery = tmp_path / "g"
    mettle("gallery", "enrol", gallery, "--model", trained.run.folder, "--data", trained.samples.origin)
    said = mettle("gallery", *[str(gallery) if w == "GALLERY" else w for w in words], status=2)
    assert message in said
    assert "\n" not in said


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


def test_serve_answers_and_stops(trained, pictures, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mettle", "serve", trained.run.folder, "--gallery", tmp_path / "g.mettle"]
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
            file = sorted(pictures.iterdir())[0]
            picture = {"image": (file.name, file.read_bytes(), "image/png")}
            enrolled = client.post("/v1/enrol", data={"identity": "anna"}, files=picture)
            assert enrolled.status_code == 200, enrolled.text
            found = client.post("/v1/identify", files=picture).json()
            assert found["candidates"][0]["identity"] == "anna"
            assert client.get("/workbench/").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.stdout.close()
        server.wait()
    assert mettle("gallery", "ids", tmp_path / "g.mettle") == "anna\n"
