"""Keys: shown once, kept as hashes, refused in every way but the right one."""

import hashlib
import json
import os
import stat
import threading
import time

import pytest

from mettle.errors import InputError
from mettle.service.auth import SCOPES, TOKEN, Keys, create_key, list_keys, revoke_key


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def test_a_token_opens_and_only_its_salted_hash_is_kept(path):
    token = create_key(path, "front desk", ["verify", "identify"])
    key = Keys(path).find(token)
    assert key is not None and key.name == "front desk" and key.scopes == ("identify", "verify")
    content = path.read_text()
    secret = TOKEN.fullmatch(token)[2]
    assert token not in content and secret not in content
    entry = json.loads(content)["keys"][0]
    assert entry["hash"] == hashlib.sha256(bytes.fromhex(entry["salt"]) + secret.encode()).hexdigest()
    assert hashlib.sha256(secret.encode()).hexdigest() not in content
    assert len(secret) * 6 >= 256


def test_two_keys_never_share_a_salt_or_a_secret(path):
    tokens = [create_key(path, f"key {k}", ["verify"]) for k in range(8)]
    entries = json.loads(path.read_text())["keys"]
    assert len({e["salt"] for e in entries}) == len({e["hash"] for e in entries}) == len(set(tokens)) == 8


def test_the_file_is_for_its_owner_only_and_any_other_is_refused(path):
    token = create_key(path, "a", ["verify"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = Keys(path)
    for mode in (0o640, 0o604, 0o644, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(InputError, match="chmod 600"):
            list_keys(path)
        with pytest.raises(InputError, match="chmod 600"):
            Keys(path)
        assert keys.find(token) is None, "a running service trusts it no more"
    path.chmod(0o600)
    assert keys.find(token) is not None


@pytest.mark.parametrize(
    "wrong", ["", "mettle_", "Bearer x", "x" * 10_000, "mettle_000000000000_" + "A" * 43, "é", "mettle_\n_", "\0"]
)
def test_wrong_tokens_are_nobody(path, wrong):
    create_key(path, "a", ["verify"])
    assert Keys(path).find(wrong) is None


def test_every_change_of_one_character_is_refused(path):
    token = create_key(path, "a", ["verify"])
    keys = Keys(path)
    for at in range(len(token)):
        other = "B" if token[at] != "B" else "C"
        assert keys.find(token[:at] + other + token[at + 1 :]) is None
    assert keys.find(token + "A") is None and keys.find(token[:-1]) is None


def test_a_revoked_key_stops_at_the_next_request_of_a_running_service(path):
    gone, stays = create_key(path, "gone", ["verify"]), create_key(path, "stays", ["verify"])
    keys = Keys(path)
    assert keys.find(gone) and keys.find(stays)
    assert revoke_key(path, "gone").name == "gone"
    assert keys.find(gone) is None and keys.find(stays) is not None
    later = create_key(path, "gone", ["verify"])
    assert keys.find(later) is not None and keys.find(gone) is None


def test_an_expired_key_is_nobody(path):
    token = create_key(path, "short", ["verify"], days=1)
    now = time.time()
    assert Keys(path, clock=lambda: now + 86_300).find(token) is not None
    assert Keys(path, clock=lambda: now + 86_500).find(token) is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b'{"format": 2, "keys": []}', b'{"format": 1, "keys": [{}]}', b"\xff\xfe"]
)
def test_a_damaged_file_is_one_line_at_start_and_lets_nobody_in_later(path, content):
    token = create_key(path, "a", ["verify"])
    keys = Keys(path)
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert keys.find(token) is None
    with pytest.raises(InputError, match=r"keys\.json"):
        Keys(path)


def test_a_missing_file_lets_nobody_in(path):
    with pytest.raises(InputError, match="no file of keys"):
        Keys(path)
    token = create_key(path, "a", ["verify"])
    keys = Keys(path)
    path.unlink()
    assert keys.find(token) is None


@pytest.mark.parametrize("field", ["salt", "hash", "scopes", "id", "name", "created", "tenant", "expires"])
def test_an_entry_of_the_wrong_kind_is_refused(path, field):
    create_key(path, "a", ["verify"])
    table = json.loads(path.read_text())
    table["keys"][0][field] = ["root"]
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match="damaged"):
        list_keys(path)


@pytest.mark.parametrize(
    ("name", "scopes", "more", "said"),
    [
        ("", ["verify"], {}, "name of a key"),
        ("a\nb", ["verify"], {}, "name of a key"),
        ("a" * 65, ["verify"], {}, "name of a key"),
        ("=cmd()", ["verify"], {}, "name of a key"),
        ("a", [], {}, "at least one"),
        ("a", ["verfy"], {}, "did you mean 'verify'"),
        ("a", ["verify"], {"tenant": "../x"}, "tenant"),
        ("a", ["verify"], {"tenant": "a/b"}, "tenant"),
        ("a", ["workbench"], {"tenant": "acme"}, "workbench"),
        ("a", ["verify"], {"days": 0}, "days"),
        ("a", ["verify"], {"days": float("nan")}, "days"),
    ],
)
def test_a_key_that_cannot_be_is_one_line(path, name, scopes, more, said):
    with pytest.raises(InputError, match=said):
        create_key(path, name, scopes, **more)
    assert not path.exists()


def test_names_are_unique_and_revoking_a_stranger_names_the_nearest(path):
    create_key(path, "front desk", SCOPES)
    with pytest.raises(InputError, match="already"):
        create_key(path, "front desk", ["verify"])
    with pytest.raises(InputError, match="did you mean 'front desk'"):
        revoke_key(path, "front dsk")


def test_many_writers_at_once_lose_no_key(path):
    threads = [threading.Thread(target=create_key, args=(path, f"key {k}", ["verify"])) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in list_keys(path)} == {f"key {k}" for k in range(12)}
    assert [p.name for p in path.parent.iterdir()] == ["keys.json"]


def test_a_tenants_names_are_its_own(path):
    create_key(path, "a", ["verify"], tenant="acme")
    (key,) = list_keys(path)
    assert key.qualified_name("anna") == "acme/anna" and key.local_name("acme/anna") == "anna"
    assert key.local_name("acme2/anna") is None and key.local_name("anna") is None and key.local_name("acm") is None
    assert key.local_name(key.qualified_name("../other/anna")) == "../other/anna"
