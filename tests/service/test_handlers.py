"""A gallery that is calibrated, also by another process, while a service answers from it."""

import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mettle.gallery import Gallery
from mettle.service.auth import SCOPES
from tests.gallery.storage_fixtures import Server, memory
from tests.http_service import DIM, PATIENCE, error, near
from tests.processes import run_mettle

PEOPLE = 40
MADE = {0.1: 0.97}  # per comparison, far above what strangers reach: a calibration moves it


def crowd(seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(PEOPLE, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def enrolled(where) -> Gallery:
    gallery = Gallery.open(where, dim=DIM, thresholds=MADE)
    gallery.enrol_many((f"person {k}", row) for k, row in enumerate(crowd()))
    return gallery


@pytest.fixture
def people(tmp_path):
    with enrolled(tmp_path / "crowd.mettle") as gallery:
        yield gallery


@pytest.fixture(scope="module")
def postgres():
    folder = Path(tempfile.mkdtemp(prefix="mettle-pg-", dir=memory()))
    server = Server(folder)
    yield server
    server.control("-m", "immediate", "stop")
    server.server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def in_another_process(*words) -> str:
    done = run_mettle("gallery", "calibrate", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(asked, identity="person 7", probe=None) -> dict[str, dict]:
    """Every answer that says what its threshold stands for."""
    probe = near(crowd()[7], 0.5) if probe is None else probe
    return {
        "verify": asked.post("/v1/verify", json={"identity": identity, "embedding": probe}).json(),
        "nobody": asked.post("/v1/verify", json={"identity": "zoe", "embedding": probe}).json(),
        "identify": asked.post("/v1/identify", json={"embedding": probe}).json(),
        "info": asked.get("/v1/info").json(),
    }


def points(found: dict[str, dict]) -> set[tuple]:
    return {(body["threshold"], body["far"], body["per"]) for body in found.values()}


def test_a_running_service_follows_what_another_process_calibrates_and_forgets(service, key, postgres):
    url = postgres.url("followed")
    with enrolled(url) as gallery:
        asked = service(gallery=gallery)(key(*SCOPES, name="all"))
        before = answers(asked)
        assert points(before) == {(MADE[0.1], 0.1, "comparison")}
        assert before["verify"]["match"] is False and before["identify"]["match"] is None

        table = json.loads(in_another_process(url, "--far", 0.1, "--json"))["0.1"]
        after = answers(asked)
        assert points(after) == {(table["threshold"], 0.1, "person")} and table["threshold"] < MADE[0.1]
        assert after["verify"]["match"] is True and after["identify"]["match"] == "person 7"
        assert after["verify"]["score"] == before["verify"]["score"] and after["nobody"]["match"] is False
        assert after["identify"]["false_matches"] == pytest.approx(min(1, 0.1 * PEOPLE))
        assert {body["basis"] for body in after.values()} == {table["measured_on"]}

        assert in_another_process(url, "--forget") == "forgotten\n"
        assert answers(asked) == before


def test_a_threshold_by_hand_counts_nothing_whatever_is_calibrated(service, key, people):
    people.calibrate(0.1)
    asked = service(threshold=0.5)(key(*SCOPES, name="all"))
    assert points(answers(asked)) == {(0.5, None, None)}


def test_a_service_whose_rate_is_lost_answers_nobody_and_says_that_it_is_not_ready(service, key, people):
    """It started with a rate that only the calibration had: the client is not to blame, and nobody is accepted."""
    people.calibrate(0.2)
    asked = service(far=0.2)(key(*SCOPES, name="all"))
    exact = crowd()[7].tolist()
    assert answers(asked, probe=exact)["verify"]["match"] is True and asked.get("/health").json()["ready"] is True
    zero = asked.post("/v1/identify", json={"embedding": [0.0] * DIM})
    assert zero.status_code == 422, "that is the client's mistake still"

    people.forget_calibration()
    for path, body in {
        "verify": {"identity": "person 7", "embedding": exact},
        "identify": {"embedding": exact},
        "enrol": {"identity": "zoe", "embeddings": [near(crowd()[7], 3.0)]},
    }.items():
        sent = asked.post(f"/v1/{path}", json=body)
        assert (sent.status_code, error(sent)) == (503, "gallery") and "0.2" not in sent.text
    assert asked.get("/v1/info").status_code == 503 and "zoe" not in people
    end = time.monotonic() + PATIENCE
    while asked.get("/health").json()["ready"] and time.monotonic() < end:
        time.sleep(0.1)  # what was known is believed for a second
    assert asked.get("/health").status_code == 503

    people.calibrate(0.2)
    assert answers(asked, probe=exact)["verify"]["match"] is True


def test_tenants_are_not_told_how_many_people_a_calibration_rests_on(service, key, people):
    start = service()
    acme = start(key("verify", "identify", name="acme", tenant="acme"))
    owner = start(key("verify", "identify", name="owner"))
    people.calibrate(0.1)
    seen = []
    for stale in (False, True):
        told = {body["basis"] for body in answers(owner).values()}
        assert len(told) == 1 and f"the {PEOPLE} people enrolled, with {PEOPLE} templates" in told.pop()
        assert ("stale" in answers(owner)["info"]["basis"]) is stale
        found = answers(acme)
        assert not any(re.search(r"\d|stale", body["basis"]) for body in found.values()), found
        assert points(found) == points(answers(owner)) and {p[2] for p in points(found)} == {"person"}
        seen.append({name: body["basis"] for name, body in found.items()})
        people.enrol_many((f"acme/own {k}", row) for k, row in enumerate(crowd(1)[:5]))  # one more than a tenth
    assert seen[0] == seen[1], "a tenant that enrols until it goes stale could count the others"


def test_a_name_that_is_nobodys_answers_alike_where_the_rate_is_per_person(service, key, people):
    people.calibrate(0.1)
    watched = Watched(people)
    shy = service(gallery=watched)(key("verify"))
    found, asked = [], []
    for name in ("person 8", "zoe", "person 7"):
        before = watched.asked
        found.append(answers_of(shy, name))
        asked.append(watched.asked - before)
    assert found[0] | {"identity": ""} == found[1] | {"identity": ""}
    assert found[0]["per"] == "person" and found[0]["score"] is None
    assert found[2]["match"] is True and found[2]["per"] == "person"
    assert asked[0] == asked[1], "on a server, the time of a miss would tell who is enrolled"
    assert asked[2] == 0, "who is let in need not wait for that"


class Watched:
    """A gallery that counts how often it is asked for its operating point from outside."""

    def __init__(self, gallery):
        self._gallery, self.asked = gallery, 0

    def decision_threshold(self, **point):
        self.asked += 1
        return self._gallery.decision_threshold(**point)

    def __getattr__(self, name):
        return getattr(self._gallery, name)

    def __len__(self):
        return len(self._gallery)


def answers_of(asked, identity: str) -> dict:
    return asked.post("/v1/verify", json={"identity": identity, "embedding": crowd()[7].tolist()}).json()


def test_the_schema_says_what_a_rate_counts(service):
    shapes = service()().get("/openapi.json").json()
    assert "per person where the gallery is calibrated" in shapes["info"]["description"]
    for name in ("VerifyAnswer", "IdentifyAnswer", "InfoAnswer"):
        shape = shapes["components"]["schemas"][name]
        assert "person" in shape["properties"]["per"]["description"] and "per" in shape["required"]
        assert "of what `per` says" in shape["properties"]["far"]["description"]


def test_answers_on_a_connection_in_use_leave_at_once(service, key, people):
    """The body of an answer does not wait until the client has acknowledged its head, which takes 40 ms."""
    asked, taken = service(audit_log=None)(key("verify")), []  # a log waits for the disk
    for turn in range(2000):
        began = time.perf_counter()
        assert asked.post("/v1/verify", json={"identity": "person 7", "embedding": near(crowd()[7])}).status_code == 200
        taken.append(time.perf_counter() - began)
        if turn >= 40 and statistics.median(taken[-40:]) < 0.03:
            return  # a machine that is busy with other things is so now and then; 40 ms would be there always
    raise AssertionError(taken)


def test_without_a_threshold_every_verdict_is_not_calibrated_and_nobody_is_named(service, key, tmp_path):
    exact, log = crowd()[7].tolist(), tmp_path / "audit.jsonl"
    with Gallery.open(tmp_path / "new.mettle", dim=DIM) as gallery:
        gallery.enrol_many((f"person {k}", row) for k, row in enumerate(crowd()))
        start = service(gallery=gallery, audit_log=log)
        asked, shy = start(key(*SCOPES, name="all")), start(key("verify", name="shy"))
        found = answers(asked, probe=exact)
        assert points(found) == {(None, None, None)} and asked.get("/health").json()["ready"] is True
        assert all("no threshold was measured" in body["basis"] for body in found.values())
        assert {found[what]["verdict"] for what in ("verify", "nobody", "identify")} == {"not calibrated"}
        assert found["verify"]["match"] is False and found["verify"]["score"] == 1
        assert found["identify"]["match"] is None and not any(c["match"] for c in found["identify"]["candidates"])
        assert found["identify"]["candidates"][0] == {"identity": "person 7", "score": 1, "match": False}
        hidden = [
            shy.post("/v1/verify", json={"identity": name, "embedding": exact}).json() | {"identity": ""}
            for name in ("person 7", "zoe")
        ]
        assert hidden[0] == hidden[1] and hidden[0]["score"] is None, "who is enrolled is not told"
        sent = asked.post("/v1/identify", files={"image": ("a.png", b"no matter what", "image/png")})
        assert (sent.status_code, error(sent)) == (422, "no-model")
        assert asked.post("/v1/enrol", json={"identity": "zoe", "embeddings": [exact]}).status_code == 200
    assert '"outcome": "not calibrated"' in log.read_text() and '"outcome": "match"' not in log.read_text()


def test_a_misspelt_name_is_not_put_right_over_http(service, key, people):
    """Whoever may not list the people learns of none by misspelling one."""
    asked = service()(key(*SCOPES, name="all"))
    sent = asked.post("/v1/delete", json={"identity": "persn 7"})
    assert (sent.status_code, error(sent)) == (404, "unknown-identity") and "person" not in sent.text
    sent = asked.post("/v1/verify", json={"identity": "persn 7", "embedding": crowd()[7].tolist()})
    assert sent.status_code == 200 and "person" not in sent.text
