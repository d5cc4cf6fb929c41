"""Who may look at the workbench and ask from it: the page is no way around tenants, scopes or the audit log."""

import json

import pytest

from mettle.gallery import Gallery
from mettle.service import entries_about
from mettle.workbench import routes
from tests.http_service import error, picture

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
    """A service with the page."""

    def begin(**options):
        return service(gallery=faces, runs=[trained[0]], routers=[routes([trained[0]])], threshold=LOW, **options)

    return begin


def asked(client, content, identity=None):
    """What the page sends."""
    what, named = ("identify", {}) if identity is None else ("verify", {"identity": identity})
    return client.post(f"/v1/{what}", data=named, files={"image": ("x.png", content, "image/png")})


@pytest.mark.parametrize("forged", [False, True], ids=["made", "forged"])
def test_a_tenants_key_sees_nothing_of_the_page(start, key, keyfile, trained, tmp_path, forged):
    token = key("identify", "verify", name="acme desk", tenant="acme")
    if forged:  # a file of keys that was written by hand
        table = json.loads(keyfile.read_text())
        next(entry for entry in table["keys"] if entry["name"] == "acme desk")["scopes"].append("workbench")
        keyfile.write_text(json.dumps(table))
    client, content = start()(token), picture(trained[1][1, 0])
    assert [c["identity"] for c in asked(client, content).json()["candidates"]] == ["alice"]
    sent = [client.get(path) for path in ("/workbench/", "/workbench", "/workbench/api/runs", "/workbench/api/runs/0")]
    sent += [client.post("/workbench/session")]
    for answer in sent:
        assert (answer.status_code, error(answer)) == (403, "forbidden")
        assert "tenant" in answer.json()["error"]["message"] and "bob" not in answer.text and "zoe" not in answer.text
        assert "set-cookie" not in answer.headers
    assert not list(entries_about(tmp_path / "audit.jsonl", "globex/bob"))


def test_a_session_may_ask_what_its_key_may_ask(start, key, trained, tmp_path):
    begun, content = start(), picture(trained[1][0, 0])
    for scopes in (("workbench",), ("workbench", "verify"), ("workbench", "identify", "verify")):
        client = begun(key(*scopes))
        assert client.post("/workbench/session").status_code == 200
        del client.headers["authorization"]  # from here on the cookie is all that the page has
        client.headers["origin"] = str(client.base_url).rstrip("/")
        may = client.get("/workbench/api/runs").json()["may"]
        assert may == {what: what in scopes for what in ("identify", "verify")}
        for what, identity in (("identify", None), ("verify", "zoe")):
            answer = asked(client, content, identity)
            assert answer.status_code == (200 if what in scopes else 403), (scopes, what)
        assert client.get("/v1/info").json()["scopes"] == sorted(scopes)
        del client.headers["origin"]
        assert asked(client, content).status_code == 401, "a form of another site may come with the cookie"
    assert [line["what"] for line in entries_about(tmp_path / "audit.jsonl", "zoe")][:1] == ["verify"]


def test_there_is_no_other_way_to_ask(start, key, trained):
    client = start()(key("workbench", "identify", "verify"))
    for what in ("identify", "verify"):
        sent = client.post(f"/workbench/api/{what}", content=picture(trained[1][0, 0]), params={"identity": "zoe"})
        assert (sent.status_code, error(sent)) == (404, "not-found")
