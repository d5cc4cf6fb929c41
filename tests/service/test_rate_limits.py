"""Limits: how much, how fast, how often. S7 and S10 of the catalogue, over real sockets."""

import json
import socket
import struct
import subprocess
import sys
import time
import zlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.service import Limits, Rate
from mettle.service.auth import SCOPES
from mettle.service.rate_limits import RateLimiter
from tests.free_port import free_port
from tests.http_service import NAMES, PATIENCE, answer, directions, error, near, picture, send

ANNA = directions(1)[0]


# Rates.


@given(
    count=st.integers(1, 20),
    seconds=st.floats(0.1, 1000),
    steps=st.lists(st.floats(0, 50), min_size=1, max_size=60),
)
def test_a_rate_never_lets_more_through_than_it_says(count, seconds, steps):
    """Over any stretch of time: at most the full bucket and what refilled meanwhile."""
    now = 0.0
    buckets, taken = RateLimiter(Rate(count, seconds), clock=lambda: now), []
    for step in steps:
        now += step
        wait = buckets.acquire("x")
        if wait == 0.0:
            taken.append(now)
        else:
            assert 0 < wait <= seconds / count + 1e-6
    for i, start in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= count + (taken[j] - start) * count / seconds + 1e-6


def test_a_bucket_is_full_at_first_refills_and_tells_how_long_to_wait():
    now = 100.0
    buckets = RateLimiter(Rate(3, 60), clock=lambda: now)
    assert [buckets.acquire("a") for _ in range(3)] == [0.0] * 3
    assert buckets.acquire("a") == pytest.approx(20)
    assert buckets.acquire("b") == 0.0, "another name has its own"
    now += 20.001
    assert buckets.acquire("a") == 0.0 and buckets.acquire("a") > 19
    now += 1000
    assert [buckets.acquire("a") for _ in range(3)] == [0.0] * 3 and buckets.acquire("a") > 0


def test_buckets_do_not_grow_without_end():
    now = 0.0
    buckets = RateLimiter(Rate(2, 60), most=100, clock=lambda: now)
    for k in range(10_000):
        buckets.acquire(k)
    assert len(buckets) <= 100
    now += 120
    for _ in range(200):
        buckets.acquire("x")
        now += 40
    assert len(buckets) <= 2, "full buckets are forgotten"


@pytest.mark.parametrize("wrong", [{"body": 0}, {"workers": 0}, {"queue": -1}, {"work_seconds": 0}, {"digits": -1}])
def test_limits_that_serve_nobody_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Limits(**wrong)
    with pytest.raises(InputError, match="rate"):
        Rate(0)


def test_s10_a_hundred_tries_at_one_identity_are_stopped_whoever_tries(service, key):
    start = service(Limits(per_target=Rate(10, 6000), per_key=Rate(1000)))
    one, two = start(key("verify", "identify", name="one")), start(key("verify", name="two"))
    body = {"identity": "anna", "embedding": near(ANNA)}
    statuses = [(one if k % 2 else two).post("/v1/verify", json=body).status_code for k in range(100)]
    assert statuses.count(200) == 10 and statuses.count(429) == 90 and statuses[:10] == [200] * 10
    sent = two.post("/v1/verify", json=body)
    assert error(sent) == "target-rate" and 1 <= int(sent.headers["retry-after"]) <= 600
    assert one.post("/v1/verify", json=body | {"identity": "ben"}).status_code == 200, "others are not affected"
    spelt = [one.post("/v1/verify", json=body | {"identity": name}) for name in ("Jos\u00e9", "Jose\u0301") * 6]
    assert [sent.status_code for sent in spelt] == [200] * 10 + [429] * 2, "another spelling is no other identity"


def test_s10_a_key_that_asks_too_often_waits(service, key):
    start = service(Limits(per_key=Rate(5, 600)))
    fast, other = start(key("identify", name="fast")), start(key("identify", name="other"))
    statuses = [fast.post("/v1/identify", json={"embedding": near(ANNA)}).status_code for _ in range(8)]
    assert statuses == [200] * 5 + [429] * 3
    assert other.post("/v1/identify", json={"embedding": near(ANNA)}).status_code == 200
    assert fast.get("/health").status_code == 200


def test_s10_identifications_have_a_daily_quota(service, key):
    asked = service(Limits(identify_daily=Rate(3, 86_400)))(key("identify", "verify"))
    sent = [asked.post("/v1/identify", json={"embedding": near(ANNA)}) for _ in range(5)]
    assert [s.status_code for s in sent] == [200] * 3 + [429] * 2 and error(sent[-1]) == "quota"


def test_s10_hill_climbing_on_scores_gets_nowhere(service, key):
    """A key that may only verify sees no score below the threshold, and others see a rounded one, a few times."""
    start = service(Limits(per_target=Rate(30, 3600), digits=2))
    blind, rng = start(key("verify")), np.random.default_rng(3)
    probe = directions(16)[9].astype(float)
    answers = [
        blind.post("/v1/verify", json={"identity": "anna", "embedding": (probe + 0.05 * rng.normal(size=16)).tolist()})
        for _ in range(60)
    ]
    served = [a.json() for a in answers if a.status_code == 200]
    assert len(served) == 30 and {a["score"] for a in served} == {None}
    seeing = start(key("verify", "identify"))
    body = {"identity": "ben", "embedding": (probe + 0.3 * rng.normal(size=16)).tolist()}
    score = seeing.post("/v1/verify", json=body).json()["score"]
    assert round(score, 2) == score


# Bodies.


DISPOSITION = b'Content-Disposition: form-data; name="k"\r\n\r\n'
POST = "POST /v1/verify HTTP/1.1\r\nContent-Type: application/json"


def test_s7_a_long_body_is_refused_by_its_length_before_it_is_sent(service, key):
    start = service(Limits(body=100_000))
    started, token = time.perf_counter(), key("verify")
    status, body = send(start.url, f"{POST}\r\nContent-Length: {1 << 30}", token=token)
    assert (status, body["error"]["code"]) == (413, "too-large") and time.perf_counter() - started < 60
    for length in ("9" * 30, "-1", "1e3", "0x10", "5, 5, 6"):
        status, _ = send(start.url, f"{POST}\r\nContent-Length: {length}", token=token)
        assert status in (0, 400, 413)


def test_s7_strangers_are_refused_before_a_byte_of_their_body_is_read(service):
    status, body = send(service().url, f"{POST}\r\nContent-Length: {1 << 30}", token="nobody")
    assert (status, body["error"]["code"]) == (401, "unauthorized")


SERVER = """
import sys
from mettle.gallery import Gallery
from mettle.service import Limits, create_app, serve
with Gallery.open(sys.argv[1], dim=16) as gallery:
    serve(create_app(gallery, keys=sys.argv[2], limits=Limits(body=1 << 20)), port=int(sys.argv[3]))
print("closed" if gallery.closed else "open")
"""


def peak(pid: int) -> int:
    """Most memory that a process ever held, in MiB."""
    with open(f"/proc/{pid}/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) // 1024


def test_s7_a_gigabyte_in_chunks_is_refused_early_with_flat_memory(tmp_path, key, keyfile):
    """A process of its own, so that its memory can be measured; chunked, so that no length gives it away."""
    token, port = key("verify"), free_port()
    command = [sys.executable, "-c", SERVER, str(tmp_path / "g"), str(keyfile), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 200
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        before, block = peak(server.pid), b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as wire:
            head = f"{POST}\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nTransfer-Encoding: chunked\r\n\r\n"
            wire.sendall(head.encode())
            sent = 0
            try:
                while sent < 1024:
                    wire.sendall(block)
                    sent += 1
                status = answer(wire)[0]
            except OSError:  # it has hung up while we were still sending: what it said is still there to read
                status = answer(wire)[0]
        assert status in (0, 413)
        status, body = send(
            f"http://127.0.0.1:{port}", f"{POST}\r\nTransfer-Encoding: chunked", block, block, token=token
        )
        assert (status, body["error"]["code"]) == (413, "too-large")
        assert peak(server.pid) - before < 64, "memory stays flat"
        assert server.poll() is None
        status, _ = send(f"http://127.0.0.1:{port}", "GET /health HTTP/1.1", token="")
        assert status == 200
    finally:
        server.terminate()
        said, _ = server.communicate(timeout=PATIENCE)
    assert (server.returncode, said) == (0, "closed\n"), "it stops when asked to, and closes what it opened"


def test_s7_a_slow_body_is_refused_in_time(service, key):
    start = service(Limits(body_seconds=0.5))
    started = time.perf_counter()
    status, body = send(start.url, f"{POST}\r\nContent-Length: 100", *[b"x"] * 20, token=key("verify"), wait=0.1)
    assert (status, body["error"]["code"]) == (408, "slow") and time.perf_counter() - started < 60


def test_s7_a_body_shorter_than_its_length_is_dropped_without_an_answer(service, key, told):
    start = service(Limits(body_seconds=5))
    host, port = start.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as wire:
        head = f"{POST}\r\nHost: {host}\r\nAuthorization: Bearer {key('verify')}\r\nContent-Length: 500\r\n\r\n"
        wire.sendall(head.encode() + b"{}")
    assert start().get("/health").status_code == 200


def test_s7_a_body_longer_than_its_length_is_not_read_as_part_of_it(service, key):
    start = service()
    good = json.dumps({"identity": "anna", "embedding": near(ANNA)}).encode()
    status, body = send(start.url, f"{POST}\r\nContent-Length: {len(good)}", good + b"GARBAGE", token=key("verify"))
    assert status == 200 and body["match"] is True
    status, _ = send(start.url, f"{POST}\r\nContent-Length: {len(good) - 5}", good, token=key("verify", name="b"))
    assert status == 400
    both = f"{POST}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked"
    status, _ = send(start.url, both, b"0\r\n\r\n", token=key("verify", name="c"))
    assert status in (0, 400)


def test_s7_a_slow_head_is_cut_off(service, monkeypatch):
    monkeypatch.setattr("mettle.service.server.HEAD_SECONDS", 0.4)
    start = service()
    host, port = start.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        started = time.perf_counter()
        try:
            for letter in b"GET /health HTTP/1.1\r\nX: " + b"y" * 200:
                wire.sendall(bytes([letter]))
                time.sleep(0.02)
            assert wire.recv(10) == b""
        except OSError:
            pass
        assert time.perf_counter() - started < 60
    monkeypatch.undo()  # this client is in no hurry, and a busy machine may be slower than that
    assert start().get("/health").status_code == 200


def test_s7_ten_thousand_parts_are_refused(service, key):
    asked = service()(key("verify", "enrol"))
    for part in ('name="identity"\r\n\r\nanna', 'name="image"; filename="x"\r\n\r\nx'):
        body = "".join(f"--b\r\nContent-Disposition: form-data; {part}\r\n" for _ in range(10_000)) + "--b--\r\n"
        started = time.perf_counter()
        sent = asked.post("/v1/enrol", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert (sent.status_code, error(sent)) == (413, "too-many-parts") and time.perf_counter() - started < 60


MISFITS = [
    ("multipart/form-data", b"--b\r\n"),
    ("multipart/form-data; boundary=", b"--b\r\n"),
    ("multipart/form-data; boundary=" + "b" * 5000, b"--b\r\n"),
    ("multipart/form-data; boundary=b", b""),
    ("multipart/form-data; boundary=b", b"\0" * 1000),
    ("multipart/form-data; boundary=b", b"--b\r\n\r\n\r\n--b--"),
    ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
    (
        "multipart/form-data; boundary=b; charset=hex",
        b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\nx\r\n--b--\r\n',
    ),
    ("multipart/form-data; boundary=b", b"--b\r\n" + b"X: y\r\n" * 20_000 + b"\r\nx\r\n--b--\r\n"),
    ("multipart/form-data; boundary=b", b"--b\r\nX: " + b"y" * 500_000 + b"\r\n\r\nx\r\n--b--\r\n"),
    ("multipart/form-data; boundary=b", b"--b\r\n" + DISPOSITION + b"9" * 9999),
    ("application/json", b""),
    ("application/json", b"[" * 200_000),
    ("application/json", b'{"a":' * 50_000),
    ("application/json", b'{"identity": "anna", "embedding": [NaN]}'),
    ("application/json", b'{"identity": "\\ud800", "embedding": [1]}'),
    ("application/json", b"\xff\xfe{}"),
    ("application/json", b'{"k": ' + b"9" * 100_000 + b"}"),
    ("application/xml", b"<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><x>&e;</x>"),
    ("text/plain", b"{}"),
    ("", b"{}"),
]


def test_s7_bodies_that_are_not_what_they_say_are_refused(service, key):
    asked = service(audit_log=None)(key(*SCOPES, name="all"))
    for (kind, content), path in product(MISFITS, ("verify", "identify", "enrol", "embed", "delete")):
        sent = asked.post(f"/v1/{path}", content=content, headers={"Content-Type": kind})
        assert sent.status_code in (400, 413, 415, 422), (path, kind, content[:50], sent.text)
        error(sent)


def test_s7_a_compressed_body_is_not_inflated(service, key):
    asked = service()(key("verify"))
    bomb = zlib.compress(b" " * 50_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    sent = asked.post("/v1/verify", content=bomb, headers=headers)
    assert (sent.status_code, error(sent)) == (415, "encoding")


# Pictures.


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few bytes of pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.fixture
def faces(service, key, trained, tmp_path):
    """A client of a service that takes pictures."""
    from mettle.gallery import Gallery

    with Gallery.open(tmp_path / "faces", model=trained[0]) as gallery:
        yield service(Limits(pixels=1_000_000), gallery=gallery)(key(*SCOPES, name="all"))


def test_pictures_beyond_the_limits_are_refused_by_their_headers(faces, trained):
    def embedded(content: bytes):
        return faces.post("/v1/embed", files={"image": content})

    assert embedded(picture(trained[1][0, 0])).status_code == 200
    sent = embedded(png_header(60_000, 60_000))
    assert (sent.status_code, error(sent)) == (413, "too-many-pixels")
    assert error(embedded(png_header(1001, 1000))) == "too-many-pixels"
    assert error(embedded(png_header(100, 100))) == "bad-image"
    whole = picture(trained[1][0, 0])
    for cut in (0, 4, 20, len(whole) // 2):
        assert embedded(whole[:cut]).status_code in (415, 422)


def test_only_jpeg_png_and_webp_are_taken(faces, trained):
    for kind in ("GIF", "BMP", "TIFF", "ICO", "PDF", "PPM"):
        sent = faces.post("/v1/embed", files={"image": ("x.png", picture(trained[1][0, 0], kind), "image/png")})
        assert (sent.status_code, error(sent)) == (415, "image-format")


def test_exif_turns_the_picture_and_goes_no_further(faces, trained):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 3, "taken at home"
    upright, turned = trained[1][0, 0], np.rot90(trained[1][0, 0], 2)
    plain = faces.post("/v1/embed", files={"image": picture(upright)}).json()["embeddings"]
    other = faces.post("/v1/embed", files={"image": picture(np.ascontiguousarray(turned), exif=exif)}).json()
    assert np.allclose(plain, other["embeddings"], atol=1e-6) and "home" not in str(other)


def test_too_many_pictures_or_templates_are_refused(faces, service, key, trained):
    files = [("image", ("x", picture(trained[1][0, 0])))] * 17
    assert error(faces.post("/v1/enrol", data={"identity": "x"}, files=files)) == "bad-fields"
    assert error(faces.post("/v1/verify", data={"identity": "x"}, files=files[:2])) == "bad-fields"
    embeddings = [near(ANNA[:8], seed=k) for k in range(17)]
    assert error(faces.post("/v1/enrol", json={"identity": "x", "embeddings": embeddings})) == "bad-fields"


def test_requests_beyond_those_in_hand_are_told_to_come_back(service, key):
    start = service(Limits(active=2, body_seconds=PATIENCE))
    token = key("verify")
    host, port = start.url.removeprefix("http://").split(":")
    held = []
    for _ in range(2):
        wire = socket.create_connection((host, int(port)))
        head = f"{POST}\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nContent-Length: 50\r\n\r\n"
        wire.sendall(head.encode())
        held.append(wire)
    asked, end = start(token), time.monotonic() + PATIENCE / 2

    def until(status: int):
        while True:
            sent = asked.post("/v1/verify", json={"identity": NAMES[0], "embedding": near(ANNA)})
            if sent.status_code == status:
                return sent
            assert sent.status_code in (200, 503) and time.monotonic() < end
            time.sleep(0.02)

    assert error(until(503)) == "busy"  # from when both are in hand
    assert [asked.post("/v1/verify", json={}).status_code for _ in range(5)] == [503] * 5, "as long as they are"
    for wire in held:
        wire.close()
    until(200)
