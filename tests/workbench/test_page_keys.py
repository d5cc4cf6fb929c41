"""Who may ask the gallery on the workbench: the page is no way around tenants, scopes, rates, rounding or the trail."""

import json

import pytest

from mettle.gallery import Gallery
from mettle.service import Limits, Rate, entries_about, verify_audit_log
from mettle.workbench import routes
from tests.http_service import error, picture

PNG = {"Content-Type": "image/png"}
LOW = -1.0  # a threshold that everybody reaches


@pytest.fixture
def faces(trained, tmp_path):
    """Two tenants' people, and one of nobody's."""
    run, images = trained
    with Gallery.open(tmp_path / "faces", model=run) as gallery:
        for k, name in enumerate(("acme/alice", "globex/bob", "zoe")):
            gallery.enrol(name, images[k, 0])
        yield gallery


@pytest.fixture
def start(service, faces, trained):
    """A service with the page; limits and trail are given to the service alone."""

    def begin(limits=None, **options):
        page = routes([trained[0]], faces)
        return service(limits, gallery=faces, runs=[trained[0]], routers=[page], threshold=LOW, **options)

    return begin


def asked(client, content, identity=None, **query):
    """The page's own question."""
    what, named = ("identify", {}) if identity is None else ("verify", {"identity": identity})
    return client.post(f"/workbench/api/{what}", params=named | query, content=content, headers=PNG)


def told(client, content, identity=None, **fields):
    """The same through the API."""
    what, named = ("identify", {}) if identity is None else ("verify", {"identity": identity})
    return client.post(f"/v1/{what}", data=named | fields, files={"image": ("x.png", content, "image/png")})


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "trail.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("forged", [False, True], ids=["made", "forged"])
def test_a_tenants_key_sees_nothing_of_the_page(start, key, keyfile, trained, tmp_path, forged):
    token = key("identify", "verify", name="acme desk", tenant="acme")
    if forged:  # a file of keys that was written by hand
        table = json.loads(keyfile.read_text())
        next(entry for entry in table["keys"] if entry["name"] == "acme desk")["scopes"].append("workbench")
        keyfile.write_text(json.dumps(table))
    client, content = start()(token), picture(trained[1][1, 0])
    assert [c["identity"] for c in told(client, content).json()["candidates"]] == ["alice"]
    sent = [asked(client, content), asked(client, content, "globex/bob"), asked(client, content, "alice")]
    sent += [client.get(path) for path in ("/workbench/", "/workbench", "/workbench/api/runs", "/workbench/api/runs/0")]
    sent += [client.post("/workbench/session")]
    for answer in sent:
        assert (answer.status_code, error(answer)) == (403, "forbidden")
        assert "tenant" in answer.json()["error"]["message"] and "bob" not in answer.text and "zoe" not in answer.text
        assert "set-cookie" not in answer.headers
    assert not list(entries_about(tmp_path / "trail.jsonl", "globex/bob"))


def test_asking_on_the_page_needs_the_scope_of_the_page_and_that_of_the_question(start, key, trained):
    begun, content = start(), picture(trained[1][0, 0])
    keys = {scopes: begun(key(*scopes)) for scopes in (("identify", "verify"), ("workbench",), ("workbench", "verify"))}
    outside, looking, verifying = keys.values()
    for answer, missing in [
        (asked(outside, content), "workbench"),
        (asked(outside, content, "zoe"), "workbench"),
        (asked(looking, content), "identify"),
        (asked(looking, content, "zoe"), "verify"),
        (asked(verifying, content), "identify"),
    ]:
        assert (answer.status_code, error(answer)) == (403, "forbidden")
        assert answer.json()["error"]["message"] == f"this key does not have the scope {missing}"
    assert asked(verifying, content, "zoe").status_code == 200


@pytest.mark.parametrize("digits", [1, 3])
def test_the_page_answers_what_the_api_answers(start, key, trained, faces, digits):
    begun, images = start(Limits(digits=digits, k=2)), trained[1]
    client, shy = begun(key("workbench", "identify", "verify")), begun(key("workbench", "verify"))
    for k in range(3):
        content = picture(images[k, 1])
        found = asked(client, content, k=3).json()
        assert found == told(client, content, k=3).json()
        assert len(found["candidates"]) == 2, "no more than the service's limit"
        exact = {c.identity: c.score for c in faces.identify(images[k, 1]).candidates}
        assert all(c["score"] == round(exact[c["identity"]], digits) for c in found["candidates"])
        for who in (client, shy):
            assert asked(who, content, "globex/bob").json() == told(who, content, "globex/bob").json()
    assert asked(client, content, "nobody").status_code == 404
    assert asked(shy, content, "nobody").json() == told(shy, content, "nobody").json()


def test_tries_and_identifications_are_counted_together_with_those_of_the_api(start, key, trained, tmp_path):
    begun = start(Limits(per_target=Rate(3, 6000), identify_daily=Rate(3, 86_400)))
    client, content = begun(key("workbench", "identify", "verify")), picture(trained[1][0, 0])
    ways = (told, asked, told, asked, told)
    tries = [way(client, content, "zoe") for way in ways]
    searches = [way(client, content) for way in ways]
    for sent, code in ((tries, "target-rate"), (searches, "quota")):
        assert [answer.status_code for answer in sent] == [200, 200, 200, 429, 429]
        assert [error(answer) for answer in sent[3:]] == [code, code]
        assert all(int(answer.headers["retry-after"]) > 0 for answer in sent[3:])
    refused = [line for line in lines(tmp_path) if line["outcome"].startswith("refused")]
    assert [line["what"] for line in refused] == [
        "/workbench/api/verify",
        "/v1/verify",
        "/workbench/api/identify",
        "/v1/identify",
    ]
    assert "subject" in refused[0], "whom a refused try was at is known"


def test_what_was_asked_on_the_page_is_in_the_trail_with_its_subject(start, key, trained, tmp_path):
    begun = start()
    client = begun(key("workbench", "identify", "verify", name="lab"))
    asked(client, picture(trained[1][1, 0]))
    asked(client, picture(trained[1][0, 0]), "zoe")
    whole = tmp_path / "trail.jsonl"
    assert [(line["who"], line["what"], line["outcome"]) for line in lines(tmp_path)] == [
        ("lab", "/workbench/api/identify", "asked"),
        ("lab", "identify", "match"),
        ("lab", "/workbench/api/verify", "asked"),
        ("lab", "verify", "match"),
    ]
    assert [line["what"] for line in entries_about(whole, "globex/bob")] == ["identify"]
    assert [line["what"] for line in entries_about(whole, "zoe")] == ["verify"]
    assert verify_audit_log(whole).sound
    numbers = begun().get("/metrics").text
    assert 'mettle_verdicts_total{route="/workbench/api/verify",verdict="match"} 1' in numbers


def test_an_answer_that_the_trail_cannot_take_is_not_given_on_the_page_either(start, key, trained):
    begun = start()
    client = begun(key("workbench", "identify", "verify"))
    begun.app.state.mettle.trail.close()
    for answer in (asked(client, picture(trained[1][0, 0])), asked(client, picture(trained[1][0, 0]), "zoe")):
        assert answer.status_code == 503 and answer.json()["match"] is None
        assert "alice" not in answer.text


def test_a_page_with_a_threshold_of_its_own_answers_at_that(service, key, trained, faces):
    page = routes([trained[0]], faces, threshold=0.25)
    client = service(gallery=faces, runs=[trained[0]], routers=[page], threshold=LOW)(key("workbench", "identify"))
    content = picture(trained[1][0, 0])
    assert (asked(client, content).json()["threshold"], told(client, content).json()["threshold"]) == (0.25, LOW)


def test_what_is_no_picture_is_refused_in_the_words_of_the_service(start, key):
    client = start(Limits(body=1000))(key("workbench", "identify"))
    plain = client.post("/workbench/api/identify", content=b"x", headers={"Content-Type": "text/plain"})
    assert (plain.status_code, error(plain)) == (415, "media-type")
    large = asked(client, bytes(1001))
    assert (large.status_code, error(large)) == (413, "too-large")
    none = asked(client, b"none")
    assert (none.status_code, error(none)) == (415, "image-format")
