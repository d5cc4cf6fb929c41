"""A trail that was cut off stays one that was cut off: no restart, and no file that is taken away, makes it whole."""

import hashlib
import hmac
import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mettle.errors import DataError, InputError
from mettle.service.audit_log import Trail, uses, verify_trail


def written(path, lines):
    trail = Trail(path)
    for k in range(lines):
        trail.append("desk", "verify", "match", subject=f"person {k}")
    trail.close()
    return path.read_bytes().splitlines(keepends=True)


def beside(path):
    return path.with_name(path.name + ".key"), path.with_name(path.name + ".head")


def refused(path):
    """It is not continued, in one line that says what to do, and nothing of the evidence is touched."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(DataError, match="evidence, and start a new one under another name") as told:
        Trail(path)
    assert "\n" not in str(told.value)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    return str(told.value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_trail_that_was_cut_off_is_never_continued(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "trail.jsonl"
    lines = data.draw(st.integers(1, 140))
    raw = written(path, lines)
    kept = data.draw(st.integers(0, lines - 1))
    torn = raw[kept][: data.draw(st.sampled_from([0, 1, 40]))]
    path.write_bytes(b"".join(raw[:kept]) + torn)
    wanted = f"line {lines}, which was written once, is missing: the end was cut off"
    assert verify_trail(path).problems == (wanted,)
    assert wanted in refused(path)
    assert verify_trail(path).problems == (wanted,), "nor does the try erase it"


@pytest.mark.parametrize("kept", [0, 1, 50, 70, 100])
def test_taking_the_head_away_shows(tmp_path, kept):
    path = tmp_path / "trail.jsonl"
    raw = written(path, 100)
    path.write_bytes(b"".join(raw[:kept]))
    beside(path)[1].unlink()
    assert verify_trail(path).problems == ("trail.jsonl.head is missing: whether the end was cut off cannot be told",)
    assert "trail.jsonl.head is missing" in refused(path)


@pytest.mark.parametrize("seal", [None, "", "0" * 64, "\u00e9", 7, "\ud800"], ids=repr)
def test_a_head_that_somebody_else_wrote_shows(tmp_path, seal):
    path = tmp_path / "trail.jsonl"
    raw = written(path, 100)
    path.write_bytes(b"".join(raw[:70]))
    head = {"n": 70, "mark": json.loads(raw[69])["mark"], "seal": seal}
    beside(path)[1].write_text(json.dumps(head if seal is not None else {k: v for k, v in head.items() if k != "seal"}))
    assert verify_trail(path).problems == ("trail.jsonl.head was changed: whether the end was cut off cannot be told",)
    assert "was changed" in refused(path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"n": 1}', b"\xff", b'{"n": 1e999, "mark": ""}', b"[" * 90_000]
)
def test_a_damaged_head_shows(tmp_path, content):
    path = tmp_path / "trail.jsonl"
    written(path, 3)
    beside(path)[1].write_bytes(content)
    assert verify_trail(path).problems == ("trail.jsonl.head is damaged: whether the end was cut off cannot be told",)
    assert "is damaged" in refused(path)


def test_a_trail_of_the_same_length_with_another_end_is_not_continued(tmp_path):
    path = tmp_path / "trail.jsonl"
    raw = written(path, 4)
    line = {"n": 4, "at": "t", "who": "x", "what": "verify", "outcome": "match", "before": json.loads(raw[2])["mark"]}
    path.write_bytes(b"".join(raw[:3]) + _marked(beside(path)[0].read_bytes(), line))
    assert verify_trail(path).problems == ("line 4, which was written once, is missing: the end was cut off",)
    assert "line 4, which was written once, is missing" in refused(path)


@pytest.mark.parametrize(
    "line", [b'{"n": 2, "before": "", "mark": "\xc3\xa9"}\n', b"[" * 60_000 + b"\n"], ids=["mark", "nested"]
)
def test_a_line_that_is_none_is_a_problem_and_no_fault(tmp_path, line):
    path = tmp_path / "trail.jsonl"
    raw = written(path, 1)
    path.write_bytes(raw[0] + line)
    assert not verify_trail(path).sound
    with pytest.raises(DataError, match="was changed"):
        Trail(path)


# Crashes.

KILLED = """
import os, signal, sys
from mettle.service.audit_log import Trail
at, path = int(sys.argv[1]), sys.argv[2]
replace, calls = os.replace, 0
def counted(*names):
    global calls
    calls += 1
    if calls == at: os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
    if calls == -at: os.kill(os.getpid(), signal.SIGKILL)
os.replace = counted
trail = Trail(path)
for k in range(70): trail.append("desk", "verify", "match")
trail.close()
"""


@pytest.mark.parametrize(("at", "lines"), [(1, 0), (-1, 0), (2, 0), (-2, 0), (3, 64), (-3, 64), (4, 70), (-4, 70)])
def test_a_crash_around_any_writing_of_head_and_secret_is_no_cut(tmp_path, at, lines):
    """A real kill just before (at) or after (-at) a file takes its name: head, secret, head of line 64, last head."""
    path = tmp_path / "trail.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(at), str(path)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert path.read_bytes().count(b"\n") == lines
    written(path, 3)
    found = verify_trail(path)
    assert found.sound and found.lines == lines + 3
    assert len(list(uses(path, "person 1"))) == 1


def test_after_a_crash_the_next_start_remembers_the_end(tmp_path):
    path = tmp_path / "trail.jsonl"
    Trail(path).close()
    early = beside(path)[1].read_bytes()
    raw = written(path, 40)
    beside(path)[1].write_bytes(early)
    trail = Trail(path)  # killed before it writes anything
    path.write_bytes(b"".join(raw[:39]))
    assert verify_trail(path).problems == ("line 40, which was written once, is missing: the end was cut off",)
    trail._broken = True
    trail.close()


# Names, and trails of earlier versions, which are made here by hand.


def test_trails_of_one_stem_have_nothing_in_common(tmp_path):
    first, second = tmp_path / "audit.1", tmp_path / "audit.2"
    written(first, 3), written(second, 9), written(first, 1)
    assert [verify_trail(path).lines for path in (first, second)] == [4, 9]
    assert verify_trail(first).sound and verify_trail(second).sound
    assert beside(first)[0].read_bytes() != beside(second)[0].read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {
        f"audit.{k}{end}" for k in (1, 2) for end in ("", ".key", ".head")
    }


@pytest.mark.parametrize("name", ["z.key", "z.head", "trail.jsonl.key"])
def test_a_trail_is_not_named_like_what_lies_beside_one(tmp_path, name):
    for act in (Trail, verify_trail, lambda path: list(uses(path, "anna"))):
        with pytest.raises(InputError, match=r"cannot be an audit trail: \.key and \.head"):
            act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def _marked(secret, line):
    content = json.dumps(line, sort_keys=True)
    mark = hmac.new(secret, b"line\0" + content.encode(), hashlib.sha256).hexdigest()
    return json.dumps(line | {"mark": mark}).encode() + b"\n"


def old(path, lines, head=True):
    """A trail as earlier versions left it: .key of 32 bytes and .head without a seal, named by the stem."""
    secret, before, content = bytes(range(32)), "0" * 64, b""
    subject = hmac.new(secret, b"subject\0anna", hashlib.sha256).hexdigest()[:32]
    for n in range(1, lines + 1):
        line = {"n": n, "at": "2031-05-04T10:20:30.123456Z", "who": "desk", "what": "verify", "outcome": "match"}
        raw = _marked(secret, line | {"subject": subject, "before": before})
        before, content = json.loads(raw)["mark"], content + raw
    path.write_bytes(content)
    (path.parent / f"{path.stem}.key").write_bytes(secret)
    (path.parent / f"{path.stem}.key").chmod(0o600)
    if head:
        (path.parent / f"{path.stem}.head").write_text(json.dumps({"n": lines, "mark": before}))


@pytest.mark.parametrize(("lines", "head"), [(5, True), (5, False), (63, False), (200, True)])
def test_an_old_trail_is_checked_searched_and_continued(tmp_path, lines, head):
    path = tmp_path / "trail.jsonl"
    old(path, lines, head)
    assert verify_trail(path).sound and len(list(uses(path, "anna"))) == lines
    trail = Trail(path)
    trail.append("desk", "verify", "match", subject="anna")
    trail.close()
    found = verify_trail(path)
    assert found.sound and found.lines == lines + 1 and len(list(uses(path, "anna"))) == lines + 1
    assert {file.name for file in tmp_path.iterdir()} == {"trail.jsonl", "trail.key", "trail.head"}
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert not verify_trail(path).sound
    refused(path)


def test_an_old_trail_that_was_cut_off_is_not_continued(tmp_path):
    path = tmp_path / "trail.jsonl"
    old(path, 100)
    whole = path.read_bytes().splitlines(keepends=True)
    for kept in (0, 1, 70, 99):
        path.write_bytes(b"".join(whole[:kept]))
        assert "line 100" in refused(path)
    path.write_bytes(b"".join(whole))
    (tmp_path / "trail.head").unlink()
    assert verify_trail(path).problems == ("trail.head is missing: whether the end was cut off cannot be told",)
    assert "trail.head is missing" in refused(path)


def test_a_new_trail_takes_nothing_from_an_old_one_of_its_stem(tmp_path):
    old(tmp_path / "audit.1", 9)
    written(tmp_path / "audit.2", 3)
    assert [verify_trail(tmp_path / f"audit.{k}").problems for k in (1, 2)] == [(), ()]
    assert (tmp_path / "audit.2.key").read_bytes() != (tmp_path / "audit.key").read_bytes()


def test_a_trail_that_was_taken_away_leaves_its_name_taken(tmp_path):
    path = tmp_path / "trail.jsonl"
    written(path, 5)
    path.unlink()
    with pytest.raises(DataError, match="line 5, which was written once"):
        Trail(path)
    for file in (path, beside(path)[0]):
        file.unlink()
    with pytest.raises(DataError, match="belongs to a trail that is gone"):
        Trail(path)
