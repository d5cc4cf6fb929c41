"""The API over a real socket: answers, refusals and the failing-closed rule."""

import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mettle.errors import GalleryError, GalleryUnavailable, MissingExtra
from mettle.gallery import Gallery
from mettle.service import Limits, create_app, entries_about, verify_audit_log
from mettle.service.auth import SCOPES
from tests.gallery.proxy import Proxy
from tests.gallery.storage_fixtures import Server, memory
from tests.http_service import DIM, NAMES, PATIENCE, THRESHOLD, directions, error, near, picture

ANNA, BEN, CARL, *_ = directions(len(NAMES))
STRANGER = directions(DIM)[10]


def cosine(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_verify_answers_with_score_threshold_rate_and_verdict(service, key):
    asked = service()(key("verify"))
    probe = near(ANNA, 0.3)
    found = asked.post("/v1/verify", json={"identity": "anna", "embedding": probe})
    assert found.status_code == 200
    body = found.json()
    assert body["match"] is True and body["verdict"] == "match: anna"
    assert body["score"] == pytest.approx(cosine(ANNA, probe), abs=0.00051)
    assert round(body["score"], 3) == body["score"]
    assert (body["threshold"], body["far"]) == (THRESHOLD, 0.001)


def test_a_key_that_may_only_verify_cannot_tell_unknown_from_different(service, key):
    start = service()
    asked = start(key("verify"))
    wrong = asked.post("/v1/verify", json={"identity": "ben", "embedding": near(ANNA)}).json()
    nobody = asked.post("/v1/verify", json={"identity": "zoe", "embedding": near(ANNA)}).json()
    assert wrong | {"identity": ""} == nobody | {"identity": ""}
    assert wrong["match"] is False and wrong["verdict"] == "no match" and wrong["score"] is None
    more = start(key("verify", "identify")).post("/v1/verify", json={"identity": "ben", "embedding": near(ANNA)}).json()
    assert more["match"] is False and more["score"] == pytest.approx(cosine(BEN, near(ANNA)), abs=0.00051)


def test_identify_ranks_and_says_no_match_to_strangers(service, key):
    asked = service()(key("identify"))
    probe = near(CARL, 0.3, seed=4)
    body = asked.post("/v1/identify", json={"embedding": probe, "k": 3}).json()
    assert body["match"] == "carl" and body["verdict"] == "match: carl"
    order = sorted(zip(NAMES, directions(5), strict=True), key=lambda pair: -cosine(pair[1], probe))
    assert [c["identity"] for c in body["candidates"]] == [name for name, _ in order][:3]
    assert [c["score"] for c in body["candidates"]] == pytest.approx([cosine(v, probe) for _, v in order][:3], abs=6e-4)
    nobody = asked.post("/v1/identify", json={"embedding": STRANGER.tolist()}).json()
    assert nobody["match"] is None and nobody["verdict"] == "no match"
    assert not any(c["match"] for c in nobody["candidates"]) and nobody["false_matches"] == pytest.approx(0.005)


def test_answers_count_every_template(service, key, people):
    people.enrol("anna", np.stack([near(ANNA, 0.4, seed=seed) for seed in range(3)]))
    start = service()
    asked = start(key("verify", "identify"))
    found = asked.post("/v1/verify", json={"identity": "anna", "embedding": near(ANNA)}).json()
    assert found["far"] == 0.001 and found["false_accepts"] == pytest.approx(0.004)
    found = asked.post("/v1/identify", json={"embedding": near(ANNA)}).json()
    assert found["far"] == 0.001 and found["false_matches"] == pytest.approx(0.008)
    shy = start(key("verify"))
    missed = shy.post("/v1/verify", json={"identity": "anna", "embedding": near(BEN)}).json()
    assert missed["match"] is False and missed["false_accepts"] is None, "it would tell how many templates there are"


def test_the_same_template_twice_is_one_and_a_name_is_one_however_it_is_spelt(service, key, people):
    asked = service()(key("enrol", "verify", "delete"))
    body = {"identity": "Jos\u00e9", "embeddings": [near(STRANGER), near(STRANGER, 0.3, seed=1)]}
    first = asked.post("/v1/enrol", json=body).json()
    assert (first["templates"], first["skipped"]) == (2, 0)
    again = asked.post("/v1/enrol", json=body | {"identity": "Jose\u0301"}).json()
    assert (again["templates"], again["skipped"]) == (0, 2)
    assert sorted(people.ids()) == sorted([*NAMES, "Jos\u00e9"])
    found = asked.post("/v1/verify", json={"identity": "Jose\u0301", "embedding": near(STRANGER)}).json()
    assert found["match"] is True
    assert asked.post("/v1/delete", json={"identity": "Jose\u0301"}).json()["templates"] == 2


def test_k_is_capped(service, key):
    asked = service(Limits(k=2))(key("identify"))
    body = asked.post("/v1/identify", json={"embedding": near(ANNA), "k": 10**30}).json()
    assert len(body["candidates"]) == 2


def test_enrol_then_identify_then_delete_then_never_again(service, key, people, tmp_path):
    asked = service()(key("enrol", "identify", "delete", "verify"))
    two = [near(STRANGER, 0.2, seed) for seed in (1, 2)]
    done = asked.post("/v1/enrol", json={"identity": "zoe", "embeddings": two, "request": "r1"}).json()
    assert done["templates"] == 2 and done["repeated"] is False and "zoe" in people
    again = asked.post("/v1/enrol", json={"identity": "zoe", "embeddings": two, "request": "r1"}).json()
    assert again["repeated"] is True and again["sequence"] == done["sequence"]
    assert asked.post("/v1/identify", json={"embedding": near(STRANGER)}).json()["match"] == "zoe"
    gone = asked.post("/v1/delete", json={"identity": "zoe"})
    assert gone.status_code == 200 and gone.json()["templates"] == 2
    assert asked.post("/v1/identify", json={"embedding": near(STRANGER)}).json()["match"] is None
    assert asked.post("/v1/verify", json={"identity": "zoe", "embedding": near(STRANGER)}).json()["match"] is False
    assert error(asked.post("/v1/delete", json={"identity": "zoe"})) == "unknown-identity"
    outcomes = [(line["what"], line["outcome"]) for line in entries_about(tmp_path / "audit.jsonl", "zoe")]
    assert outcomes[:2] == [("enrol", "begun"), ("enrol", "enrolled")]
    assert ("delete", "deleted") in outcomes and ("identify", "match") in outcomes


def test_replace_takes_the_former_templates_away(service, key):
    asked = service()(key("enrol", "verify"))
    asked.post("/v1/enrol", json={"identity": "anna", "embeddings": [STRANGER.tolist()], "replace": True})
    assert not asked.post("/v1/verify", json={"identity": "anna", "embedding": near(ANNA)}).json()["match"]
    assert asked.post("/v1/verify", json={"identity": "anna", "embedding": near(STRANGER)}).json()["match"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_embedded_by_the_gallerys_model(service, key, trained, tmp_path, kind):
    run, images = trained
    with Gallery.open(tmp_path / "faces", model=run, thresholds={0.01: 0.9999}) as gallery:
        asked = service(gallery=gallery)(key(*SCOPES, name="all"))
        lossless = {"WEBP": {"lossless": True}}.get(kind, {})
        files = [("image", ("x", picture(images[k, 0], kind, **lossless))) for k in range(3)]
        for k in range(3):
            sent = asked.post("/v1/enrol", data={"identity": f"p{k}"}, files=[files[k]])
            assert sent.status_code == 200, sent.text
        body = asked.post("/v1/identify", data={"k": "2"}, files=[files[1]]).json()
        assert body["match"] == "p1" and len(body["candidates"]) == 2 and body["candidates"][0]["score"] == 1.0
        assert asked.post("/v1/verify", data={"identity": "p2"}, files=[files[2]]).json()["match"] is True
        got = asked.post("/v1/embed", files=files).json()
        assert np.allclose(got["embeddings"], gallery.embed([f[1][1] for f in files]), atol=1e-6)
        assert asked.get("/v1/info").json()["images"] is True


def test_a_gallery_without_a_model_refuses_pictures_kindly(service, key):
    asked = service()(key(*SCOPES, name="all"))
    image = picture(np.zeros((8, 8, 3), np.uint8))
    for path, data in (("verify", {"identity": "anna"}), ("identify", {}), ("enrol", {"identity": "x"}), ("embed", {})):
        sent = asked.post(f"/v1/{path}", data=data, files={"image": image})
        assert (sent.status_code, error(sent)) == (422, "no-model")


def test_info_tells_what_is_taken_and_what_the_key_may_do(service, key, trained):
    start = service(runs=[trained[0]])
    body = start(key("verify")).get("/v1/info").json()
    assert (body["dim"], body["identities"], body["scopes"], body["runs"]) == (DIM, 5, ["verify"], ["run"])
    assert start(key("verify", name="t", tenant="acme")).get("/v1/info").json()["identities"] is None


def test_health_and_metrics(service, key, people):
    start = service()
    anonymous = start()
    assert anonymous.get("/health").json() == {"live": True, "ready": True}
    start(key("verify")).post("/v1/verify", json={"identity": "anna", "embedding": near(ANNA)})
    text = anonymous.get("/metrics").text  # from this machine no key is needed
    assert 'mettle_requests_total{route="/v1/verify",status="200"} 1.0' in text
    assert 'mettle_verdicts_total{route="/v1/verify",verdict="match"} 1.0' in text
    assert 'mettle_request_seconds_count{route="/v1/verify"} 1.0' in text and "mettle_identities 5.0" in text
    assert "anna" not in text and "_created" not in text


def test_metrics_behind_a_proxy_need_the_scope(service, key):
    start = service()
    assert start(None, **{"X-Forwarded-For": "203.0.113.9"}).get("/metrics").status_code == 401
    assert start(key("verify")).get("/metrics").status_code == 403
    assert start(key("metrics"), **{"X-Forwarded-For": "203.0.113.9"}).get("/metrics").status_code == 200


def test_the_reference_page_needs_nothing_from_elsewhere(service):
    page = service()().get("/docs")
    assert page.status_code == 200 and "POST /v1/verify" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text


class Fails:
    """A gallery whose answers are errors, however they are asked for."""

    def __init__(self, gallery, error):
        self._gallery, self._error = gallery, error

    def __getattr__(self, name):
        if name in ("verify", "identify", "identify_many", "enrol", "delete"):

            def fail(*_, **__):
                raise self._error

            return fail
        return getattr(self._gallery, name)

    def __len__(self):
        raise self._error


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (GalleryUnavailable("disk /var/secret is full"), 503),
        (GalleryError("/home/secret is damaged"), 503),
        (MissingExtra("secret"), 503),
        (RuntimeError("secret 0.123"), 500),
        (MemoryError("secret"), 500),
    ],
)
def test_an_error_accepts_nobody_and_tells_nothing(service, key, people, problem, status, tmp_path):
    start = service(gallery=Fails(people, problem))
    asked = start(key(*SCOPES, name="all"))
    for path, body in {
        "verify": {"identity": "anna", "embedding": near(ANNA)},
        "identify": {"embedding": near(ANNA)},
        "enrol": {"identity": "zoe", "embeddings": [near(STRANGER)]},
        "delete": {"identity": "anna"},
    }.items():
        sent = asked.post(f"/v1/{path}", json=body)
        assert sent.status_code == status
        error(sent)
        assert "secret" not in sent.text and "anna" not in sent.text
    assert asked.get("/health").status_code == 503 and asked.get("/health").json()["live"] is True
    assert "mettle_identities NaN" in asked.get("/metrics").text
    assert "match" not in [line["outcome"] for line in entries_about(tmp_path / "audit.jsonl", "anna")]


def test_g14_a_slow_record_is_a_503_and_the_queue_stays_bounded(service, key, people):
    """The gallery hangs: the first requests run out of time, the next find the queue full, none is accepted."""
    release = threading.Event()

    class Slow(Fails):
        def __getattr__(self, name):
            if name != "verify":
                return getattr(self._gallery, name)
            return lambda *a, **k: (release.wait(PATIENCE), self._gallery.verify(*a, **k))[1]

        def __len__(self):
            return len(self._gallery)

    start = service(Limits(workers=1, queue=2, work_seconds=3), gallery=Slow(people, None))
    token, claim = key("verify"), {"identity": "anna", "embedding": near(ANNA)}
    clients = [start(token) for _ in range(4)]
    pool = start.app.state.mettle.pool
    answers = {"timeout": [], "busy": []}

    def ask(which: str, client) -> None:
        sent = client.post("/v1/verify", json=claim)
        answers[which].append((sent.status_code, error(sent), "retry-after" in sent.headers))

    threads = [threading.Thread(target=ask, args=("timeout", client)) for client in clients[:3]]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE
    while pool.pending < 3 and time.monotonic() < end:
        time.sleep(0.005)
    for _ in range(5):
        ask("busy", clients[3])
    assert pool.pending == 3
    for thread in threads:
        thread.join()
    for code, told in answers.items():
        assert set(told) == {(503, code, True)}
    release.set()
    assert served(clients[3], "verify", claim)["match"] is True, "it serves again once the gallery does"


@pytest.fixture
def far_away(tmp_path):
    """A gallery on a real PostgreSQL, behind a line that can freeze."""
    folder = Path(tempfile.mkdtemp(prefix="mettle-pg-", dir=memory()))
    server = Server(folder)
    (tmp_path / "line").mkdir()
    proxy = Proxy(tmp_path / "line", Path(server.socket))
    url = server.url("people", host=str(proxy.folder))
    with Gallery.open(url, dim=DIM, thresholds={0.001: THRESHOLD}) as gallery:
        for name, vector in zip(NAMES, directions(len(NAMES)), strict=True):
            gallery.enrol(name, vector)
        yield gallery, server, proxy
        proxy.fault = ""
    proxy.close()
    server.control("-m", "immediate", "stop")
    server.server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def test_g14_a_database_that_freezes_or_goes_away_is_a_503_and_nothing_is_acknowledged(service, key, far_away):
    gallery, server, proxy = far_away
    asked = service(Limits(work_seconds=1.0), gallery=gallery)(key(*SCOPES, name="all"))
    claim = {"identity": "anna", "embedding": near(ANNA)}
    zoe = {"identity": "zoe", "embeddings": [STRANGER.tolist()], "request": "once"}
    assert served(asked, "verify", claim)["match"] is True

    proxy.fault = "freeze"
    for path, body in (("verify", claim), ("identify", {"embedding": near(ANNA)}), ("enrol", zoe)):
        began = time.perf_counter()
        sent = asked.post(f"/v1/{path}", json=body)
        assert (sent.status_code, error(sent)) in ((503, "timeout"), (503, "unavailable"))
        assert time.perf_counter() - began < 60
    assert asked.get("/health").json() == {"live": True, "ready": False}
    proxy.fault = ""
    assert served(asked, "enrol", zoe)["templates"] == 1 and served(asked, "enrol", zoe)["repeated"] is True
    assert gallery.info().templates == len(NAMES) + 1, "asked for many times, enrolled once"

    server.control("-m", "immediate", "stop")
    for path, body in (("verify", claim), ("delete", {"identity": "zoe"})):
        sent = asked.post(f"/v1/{path}", json=body)
        assert sent.status_code == 503 and "postgres" not in sent.text.lower()
    server.start()
    assert served(asked, "verify", claim)["match"] is True and "zoe" in gallery


def served(asked, path, body):
    """The answer, once there is one."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        sent = asked.post(f"/v1/{path}", json=body)
        if sent.status_code == 200:
            return sent.json()
        assert sent.status_code == 503
        time.sleep(0.05)
    raise AssertionError("it never served again")


def test_an_audit_log_that_cannot_be_written_refuses_the_answer(service, key, people):
    start = service()
    asked = start(key(*SCOPES, name="all"))
    start.app.state.mettle.audit_log.close()
    sent = asked.post("/v1/verify", json={"identity": "anna", "embedding": near(ANNA)})
    assert (sent.status_code, error(sent)) == (503, "unavailable")
    sent = asked.post("/v1/enrol", json={"identity": "zoe", "embeddings": [near(STRANGER)]})
    assert sent.status_code == 503 and "zoe" not in people


def test_the_audit_log_of_a_service_is_sound_when_it_stops(service, key, tmp_path):
    start = service()
    asked = start(key("verify"))
    for k in range(5):
        asked.post("/v1/verify", json={"identity": NAMES[k], "embedding": near(ANNA)})
    start.stop()
    found = verify_audit_log(tmp_path / "audit.jsonl")
    assert found.sound and found.lines == 5


def test_an_explicit_threshold_of_zero_is_honoured(service, key):
    asked = service(threshold=0.0)(key("verify", "identify"))
    body = asked.post("/v1/verify", json={"identity": "anna", "embedding": near(ANNA, 3.0, seed=1)}).json()
    assert body["threshold"] == 0.0 and body["far"] is None and body["match"] is (body["score"] >= 0)


def test_a_rate_that_was_never_measured_is_said_at_start(people):
    with pytest.raises(ValueError, match="no threshold was measured for far=0.5"):
        create_app(people, far=0.5)


def test_a_service_without_keys_serves_this_machine_only(service):
    start = service(keys=None)
    body = {"identity": "anna", "embedding": near(ANNA)}
    assert start().post("/v1/verify", json=body).json()["match"] is True
    sent = start(None, **{"X-Forwarded-For": "203.0.113.9"}).post("/v1/verify", json=body)
    assert (sent.status_code, error(sent)) == (403, "forbidden")


def test_many_clients_at_once_get_their_own_answers(service, key):
    start = service()
    token, wrong = key("identify"), []

    def ask(k):
        asked = start(token)
        for seed in range(10):
            probe = near(directions(5)[k], 0.2, seed)
            if asked.post("/v1/identify", json={"embedding": probe}).json().get("match") != NAMES[k]:
                wrong.append(k)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_workbench_is_served_behind_the_same_door(service, key, trained, tmp_path):
    from mettle.workbench import routes

    run, images = trained
    with Gallery.open(tmp_path / "faces", model=run, thresholds={0.01: 0.9999}) as gallery:
        gallery.enrol("p0", images[0, 0])
        start = service(gallery=gallery, runs=[run], routers=[routes([run])])
        assert start().get("/").headers["location"] == "/workbench/"
        looking, asking = start(key("workbench")), start(key("workbench", "identify"))
        for path in ("/workbench/", "/workbench/api/runs"):
            assert start().get(path).status_code == 401 and looking.get(path).status_code == 200
        assert error(looking.get("/workbench/static/nothing.js")) == "not-found"
        sent = {"files": {"image": picture(images[0, 0])}}
        assert error(looking.post("/v1/identify", **sent)) == "forbidden"
        assert asking.post("/v1/identify", **sent).json()["match"] == "p0"
