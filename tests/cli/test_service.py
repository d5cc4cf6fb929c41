"""`mettle serve`, `mettle keys`, `mettle audit-log`, `mettle --version` and the words of `mettle gallery`, as typed."""

import asyncio
import re
import signal
import socket
import time

import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import mettle as package
from mettle.cli import app
from mettle.data.image_decoding import MAX_PIXELS
from mettle.gallery import Gallery
from mettle.service import AuditLog, Limits
from tests.command_line import mettle
from tests.free_port import free_port
from tests.processes import start_mettle
from tests.small_runs import small_run

ROWS = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)


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
    assert token.split("_", 2)[2] not in listed + file.read_text()  # a secret may hold more of them
    assert mettle("keys", "revoke", file, "front desk") == "revoked front desk\n"
    assert mettle("keys", "list", file) == ""
    assert "did you mean 'identify'" in mettle("keys", "create", file, "x", "--scope", "identfy", status=2)


def test_serve_answers_and_stops(trained, picture, tmp_path):
    port = free_port()
    words = ["serve", trained.run.folder, "--gallery", tmp_path / "g.mettle", "--create", "--threshold", "0.25"]
    server = start_mettle(*words, "--megapixels", "0.001", "--megabytes", "1", "--port", port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            end = time.monotonic() + 200
            while time.monotonic() < end:
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert server.poll() is None, server.communicate()
                time.sleep(0.2)
            sent = {"image": (picture.name, picture.read_bytes(), "image/png")}
            enrolled = client.post("/v1/enrol", data={"identity": "anna"}, files=sent)
            assert enrolled.status_code == 200, enrolled.text
            found = client.post("/v1/identify", files=sent).json()
            assert found["candidates"][0]["identity"] == "anna"
            assert (found["threshold"], found["far"], found["false_matches"]) == (0.25, None, None)
            limits = client.get("/v1/info").json()["limits"]
            assert (limits["pixels"], limits["body"]) == (1000, 1 << 20)
            assert client.get("/workbench/").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.communicate()
    assert mettle("gallery", "ids", tmp_path / "g.mettle") == "anna\n"


def test_a_gallery_is_served_without_a_run(tmp_path, monkeypatch):
    with Gallery.open(tmp_path / "g", dim=8) as gallery:
        gallery.enrol_many((f"person {k}", row) for k, row in enumerate(ROWS))
    asked = {}

    def answer(service, host, port, listening):
        listening("http://here")
        transport = httpx.ASGITransport(service, client=("127.0.0.1", 5))

        async def ask():
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                asked["found"] = await client.post("/v1/identify", json={"embedding": ROWS[3].tolist()})
                picture = {"image": ("a.png", b"x", "image/png")}
                asked["picture"] = await client.post("/v1/identify", files=picture)
                asked["start"] = await client.get("/")

        asyncio.run(ask())

    monkeypatch.setattr("mettle.service.serve", answer)
    said = mettle("serve", "--gallery", tmp_path / "g", "--threshold", 0.9)
    assert said == f"{tmp_path / 'g'}: 40 people; http://here/docs\n"
    found = asked["found"].json()
    assert (found["match"], found["threshold"]) == ("person 3", 0.9)
    assert asked["start"].headers["location"] == "/docs", "without a run there is no workbench"
    refused = asked["picture"]
    assert refused.status_code == 422 and "no model for pictures: send embeddings" in refused.json()["error"]["message"]
    said = mettle("serve", "--gallery", tmp_path / "g")
    assert "note: not calibrated, so no answer will be a match: no threshold was measured" in said
    found = asked["found"].json()
    assert (found["match"], found["verdict"], found["threshold"]) == (None, "not calibrated", None)
    assert found["candidates"][0]["identity"] == "person 3"


def test_a_service_of_nothing_is_refused(tmp_path):
    assert "give a run folder, or --gallery" in mettle("serve", status=2)
    said = mettle("serve", "--gallery", tmp_path / "g", "--create", status=2)
    assert "--create makes a gallery of a run" in said and not (tmp_path / "g").exists()
    assert "no gallery at" in mettle("serve", "--gallery", tmp_path / "g", status=2)


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


def test_the_service_says_at_its_start_that_a_calibration_is_stale(trained, tmp_path):
    with Gallery.open(tmp_path / "g", model=trained.run) as gallery:
        gallery.enrol_many((f"person {k}", row) for k, row in enumerate(ROWS))
        gallery.calibrate(0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it ends by itself
        words = ["serve", trained.run.folder, "--gallery", tmp_path / "g", "--port", taken.getsockname()[1]]
        started = [CliRunner().invoke(app, list(map(str, words)))]
        mettle("gallery", "delete", tmp_path / "g", "person 1")
        with Gallery.open(tmp_path / "g") as gallery:
            gallery.enrol_many((f"other {k}", -row) for k, row in enumerate(ROWS[:5]))
        started.append(CliRunner().invoke(app, list(map(str, words))))
    assert all("cannot listen" in str(one.exception) for one in started)
    assert all("http:" not in one.output for one in started), "an address is told once it can be connected to"
    assert "stale" not in started[0].output
    assert "note: the calibration is stale: measured on 40 people, 44 are enrolled now" in started[1].output


def test_answers_of_a_calibrated_gallery_say_that_their_rate_is_per_person(tmp_path):
    for name, row in (("rows", ROWS), ("one", ROWS[:1])):
        np.save(tmp_path / f"{name}.npy", row)
    with Gallery.open(tmp_path / "g", dim=8, thresholds={0.1: 0.9}) as gallery:
        gallery.enrol_many((f"person {k}", row) for k, row in enumerate(ROWS))
    verify = ("gallery", "verify", tmp_path / "g", "person 0", "--embeddings", tmp_path / "one.npy")
    identify = ("gallery", "identify", tmp_path / "g", "--embeddings", tmp_path / "one.npy")
    assert "(false-accept rate 0.1 a comparison, at most 0.1 of strangers accepted as this person;" in mettle(*verify)
    mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.1)
    assert "(false-accept rate 0.1 a person, at most 0.1 of strangers accepted as this person;" in mettle(*verify)
    assert "(false-accept rate 0.1 a person, at most 1 of strangers given a name;" in mettle(*identify)
    said = mettle(*verify, "--threshold", 0.5)
    assert "(false-accept rate unknown;" in said and "person," not in said and "None" not in said


def test_a_deletion_that_is_tried_again_says_that_it_was_served(tmp_path):
    with Gallery.open(tmp_path / "g", dim=8) as gallery:
        gallery.enrol("Jos\u00e9", ROWS[:2])
    first = mettle("gallery", "delete", tmp_path / "g", "Jose\u0301", "--request", "r1")
    assert first.endswith(": 2 templates, change 2\n")
    again = mettle("gallery", "delete", tmp_path / "g", "Jose\u0301", "--request", "r1")
    assert again == first.rstrip("\n") + " (this request was served before)\n"


def test_the_service_takes_pictures_as_large_as_training_does():
    assert Limits().pixels == MAX_PIXELS


def test_an_audit_log_is_checked_and_searched(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append("desk", "verify", "match", subject="Jos\u00e9")
    log.append("desk", "verify", "no match", subject="ben")
    log.close()
    assert mettle("audit-log", "check", path) == "2 lines, sound\n"
    said = mettle("audit-log", "uses", path, "Jose\u0301")
    assert said.count("\n") == 1 and '"outcome": "match"' in said
    path.write_text(path.read_text().replace("no match", "match"))
    said = mettle("audit-log", "check", path, status=1)
    assert "line 2 was changed" in said and "1 problems" in said
    assert "cannot be checked" in mettle("audit-log", "check", tmp_path / "none.jsonl", status=2)
