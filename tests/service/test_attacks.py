"""No request freezes the service: each of these once held it for seconds to minutes, or took gigabytes."""

import asyncio
import json
import os
import resource
import signal
import threading
import tracemalloc
from dataclasses import replace

import httpx
import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from mettle.gallery import Gallery
from mettle.service import create_app, serve
from mettle.service.errors import ApiError
from mettle.service.rate_limits import Limits
from mettle.service.request_body import read_form, read_json
from mettle.service.schemas import Enrolment, VerifyQuestion
from tests.http_service import DIM, PATIENCE, WIDE, directions, error, near, send
from tests.processes import start_mettle
from tests.service.hostile_uploads import large_png, slow_jpeg, small_picture

JSON_LIMIT = Limits().json
HOSTILE_JSON = {
    "unknown fields": b"{" + b",".join(b'"%x":0' % i for i in range(25_000)) + b"}",
    "wrong numbers": b'{"identity":"a","embedding":[' + b",".join([b'"a"'] * 60_000) + b"]}",
    "wrong templates": b'{"identity":"a","embeddings":[' + b",".join([b'["a"]'] * 40_000) + b"]}",
    "templates of wrong numbers": b'{"identity":"a","embeddings":[[' + b",".join([b'"a"'] * 60_000) + b"]]}",
    "a whole number of 250 kB": b'{"identity":"a","embedding":[' + b"9" * 250_000 + b"]}",
    "nested lists": b"[" * 250_000,
    "nested objects": b'{"a":' * 50_000,
}


@pytest.mark.parametrize("body", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
@pytest.mark.parametrize("shape", [VerifyQuestion, Enrolment])
def test_hostile_json_is_refused_at_its_first_mistake(shape, body):
    assert len(body) <= JSON_LIMIT
    with pytest.raises(ApiError):  # what is imported and cached
        read_json(shape, body)
    tracemalloc.start()
    with pytest.raises(ApiError) as told:
        read_json(shape, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told.value.status in (400, 422) and len(told.value.message) < 200
    assert peak < 16 << 20, f"{peak} bytes for a body of {len(body)}"


def test_only_the_first_wrong_number_is_an_error():
    with pytest.raises(ValidationError) as found:
        Enrolment.model_validate({"identity": "a", "embeddings": [["a"] * 1000] * 1000})
    assert found.value.error_count() == 1


def test_a_body_of_json_is_limited_and_one_with_pictures_is_not_by_that(service, key):
    asked = service()(key("verify"))
    question = {"identity": "anna", "embedding": near(directions(1)[0])}
    content = json.dumps(question).encode()
    fits = content + b" " * (JSON_LIMIT - len(content))
    head = {"content-type": "application/json"}
    assert asked.post("/v1/verify", content=fits, headers=head).json()["match"] is True
    assert error(asked.post("/v1/verify", content=fits + b" ", headers=head)) == "too-large"
    large = b"{" + b",".join(b'"%x":0' % i for i in range(1_400_000))
    assert len(large) > 12 << 20
    assert error(asked.post("/v1/verify", content=large, headers=head)) == "too-large"
    form = asked.post("/v1/verify", data={"identity": "anna"}, files={"image": ("p.png", bytes(1 << 20))})
    assert error(form) == "no-model"


def test_a_limit_of_json_can_be_set(service, key):
    asked = service(replace(WIDE, json=50))(key("verify"))
    assert error(asked.post("/v1/verify", json={"identity": "anna", "embedding": [0.0] * DIM})) == "too-large"


def test_other_requests_have_their_turn_while_a_large_form_is_parsed():
    mark = b"--b\r\n"
    body = (
        mark + b'Content-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + bytes(4 << 20) + b"\r\n--b--\r\n"
    )
    turns = 0

    async def parse() -> None:
        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        headers = Headers({"content-type": "multipart/form-data; boundary=b"})
        await read_form(headers, body, Limits(), texts=(), pictures=1)
        task.cancel()

    asyncio.run(parse())
    assert turns >= (4 << 20) // (1 << 16)


@pytest.fixture
def pictured(service, key, trained, tmp_path):
    """A service that takes pictures and gives each half a second and 100 MB."""
    run, pictures = trained
    with Gallery.open(tmp_path / "pictured.mettle", model=run, create=True, thresholds={0.001: 0.5}) as gallery:
        gallery.enrol("anna", [pictures[0, 0]])
        start = service(replace(WIDE, read_seconds=0.5, read_megabytes=100), gallery=gallery)
        start.token = key("verify", "enrol", name="asker")
        yield start


@pytest.mark.parametrize("upload", [slow_jpeg, large_png])
def test_a_picture_that_costs_too_much_is_refused_and_the_next_is_served(pictured, upload):
    content, asked = upload(), pictured(pictured.token)
    assert len(content) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = []

    def ask() -> None:
        answers.append(
            pictured(pictured.token).post("/v1/verify", data={"identity": "anna"}, files={"image": ("p", content)})
        )

    threads = [threading.Thread(target=ask) for _ in range(2)]  # as many as there are workers
    for thread in threads:
        thread.start()
    assert asked.get("/health").json()["live"]
    for thread in threads:
        thread.join()
    assert [(answer.status_code, error(answer)) for answer in answers] == [(413, "too-costly")] * 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # in units of 1024 bytes
    fine = asked.post("/v1/verify", data={"identity": "anna"}, files={"image": ("p.png", small_picture())})
    assert fine.status_code == 200
    assert asked.get("/health").json()["ready"]


def test_a_service_that_is_told_to_stop_does_not_wait_for_pictures(pictured):
    """Its processes are killed, so that the requests that wait for them end."""
    context = pictured.app.state.mettle
    context.readers.close()
    answer = pictured(pictured.token).post(
        "/v1/verify", data={"identity": "anna"}, files={"image": ("p.png", small_picture())}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert pictured().get("/health").json() == {"live": True, "ready": False}


def test_a_service_is_not_ready_without_its_audit_log(service, key, monkeypatch):
    start = service()
    context = start.app.state.mettle
    monkeypatch.setattr(context.audit_log, "is_writable", lambda: False)
    assert start().get("/health").status_code == 503


def test_a_service_is_not_ready_while_no_request_would_be_taken(service, key):
    start = service(replace(WIDE, workers=1, queue=0))
    context = start.app.state.mettle
    assert start().get("/health").json()["ready"]
    context.pool.pending += 1
    assert not start().get("/health").json()["ready"]
    context.pool.pending -= 1
    assert start().get("/health").json()["ready"]


def test_a_signal_to_stop_right_after_the_address_is_told_is_obeyed(people):
    """It once came between that and the moment when uvicorn listens for signals, and was lost."""
    app = create_app(people, threshold=0.5)
    late = threading.Timer(PATIENCE, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()
    try:
        for _ in range(20):
            serve(app, port=0, listening=lambda _: os.kill(os.getpid(), signal.SIGTERM))
            assert late.is_alive(), "the signal was lost"
    finally:
        late.cancel()


@pytest.mark.slow
def test_a_process_obeys_a_signal_to_stop_whenever_it_comes(drawn):
    for _ in range(20):
        server = start_mettle("serve", "--gallery", drawn, "--port", "0")
        try:
            assert "http://" in server.stdout.readline()
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
            server.communicate()


def test_the_head_of_a_request_alone_holds_nothing(service):
    """A client that never sends its body is told so, and others are served meanwhile."""
    start = service(replace(WIDE, body_seconds=0.2))
    status, _ = send(start.url, "POST /v1/verify HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10")
    assert status in (401, 408)
    assert httpx.get(f"{start.url}/health", trust_env=False).status_code == 200
