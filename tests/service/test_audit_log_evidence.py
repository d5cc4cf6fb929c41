"""A log that was cut off stays one that was cut off: no restart, and no file that is taken away, makes it whole."""

import hashlib
import hmac
import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mettle.errors import DataError, InputError
from mettle.service.audit_log import AuditLog, entries_about, verify_audit_log


def written(path, lines):
    log = AuditLog(path)
    for k in range(lines):
        log.append("desk", "verify", "match", subject=f"person {k}")
    log.close()
    return path.read_bytes().splitlines(keepends=True)


def beside(path):
    return path.with_name(path.name + ".key"), path.with_name(path.name + ".checkpoint")


def refused(path):
    """It is not continued, in one line that says what to do, and nothing of the evidence is touched."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(DataError, match="evidence, and start a new one under another name") as told:
        AuditLog(path)
    assert "\n" not in str(told.value)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    return str(told.value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_audit_log_that_was_cut_off_is_never_continued(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "audit.jsonl"
    lines = data.draw(st.integers(1, 140))
    raw = written(path, lines)
    kept = data.draw(st.integers(0, lines - 1))
    torn = raw[kept][: data.draw(st.sampled_from([0, 1, 40]))]
    path.write_bytes(b"".join(raw[:kept]) + torn)
    wanted = f"line {lines}, which was written once, is missing: the end was cut off"
    assert verify_audit_log(path).problems == (wanted,)
    assert wanted in refused(path)
    assert verify_audit_log(path).problems == (wanted,), "nor does the try erase it"


@pytest.mark.parametrize("kept", [0, 1, 50, 70, 100])
def test_taking_the_head_away_shows(tmp_path, kept):
    path = tmp_path / "audit.jsonl"
    raw = written(path, 100)
    path.write_bytes(b"".join(raw[:kept]))
    beside(path)[1].unlink()
    assert verify_audit_log(path).problems == (
        "audit.jsonl.checkpoint is missing: whether the end was cut off cannot be told",
    )
    assert "audit.jsonl.checkpoint is missing" in refused(path)


@pytest.mark.parametrize("seal", [None, "", "0" * 64, "\u00e9", 7, "\ud800"], ids=repr)
def test_a_head_that_somebody_else_wrote_shows(tmp_path, seal):
    path = tmp_path / "audit.jsonl"
    raw = written(path, 100)
    path.write_bytes(b"".join(raw[:70]))
    head = {"n": 70, "mac": json.loads(raw[69])["mac"], "seal": seal}
    beside(path)[1].write_text(json.dumps(head if seal is not None else {k: v for k, v in head.items() if k != "seal"}))
    assert verify_audit_log(path).problems == (
        "audit.jsonl.checkpoint was changed: whether the end was cut off cannot be told",
    )
    assert "was changed" in refused(path)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"n": 1}', b"\xff", b'{"n": 1e999, "mac": ""}', b"[" * 90_000]
)
def test_a_damaged_head_shows(tmp_path, content):
    path = tmp_path / "audit.jsonl"
    written(path, 3)
    beside(path)[1].write_bytes(content)
    assert verify_audit_log(path).problems == (
        "audit.jsonl.checkpoint is damaged: whether the end was cut off cannot be told",
    )
    assert "is damaged" in refused(path)


def test_an_audit_log_of_the_same_length_with_another_end_is_not_continued(tmp_path):
    path = tmp_path / "audit.jsonl"
    raw = written(path, 4)
    line = {
        "n": 4,
        "at": "t",
        "who": "x",
        "what": "verify",
        "outcome": "match",
        "previous_mac": json.loads(raw[2])["mac"],
    }
    path.write_bytes(b"".join(raw[:3]) + _marked(beside(path)[0].read_bytes(), line))
    assert verify_audit_log(path).problems == ("line 4, which was written once, is missing: the end was cut off",)
    assert "line 4, which was written once, is missing" in refused(path)


@pytest.mark.parametrize(
    "line", [b'{"n": 2, "previous_mac": "", "mac": "\xc3\xa9"}\n', b"[" * 60_000 + b"\n"], ids=["mac", "nested"]
)
def test_a_line_that_is_none_is_a_problem_and_no_fault(tmp_path, line):
    path = tmp_path / "audit.jsonl"
    raw = written(path, 1)
    path.write_bytes(raw[0] + line)
    assert not verify_audit_log(path).sound
    with pytest.raises(DataError, match="was changed"):
        AuditLog(path)


# Crashes.

KILLED = """
import os, signal, sys
from mettle.service.audit_log import AuditLog
at, path = int(sys.argv[1]), sys.argv[2]
replace, calls = os.replace, 0
def counted(*names):
    global calls
    calls += 1
    if calls == at: os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
    if calls == -at: os.kill(os.getpid(), signal.SIGKILL)
os.replace = counted
log = AuditLog(path)
for k in range(70): log.append("desk", "verify", "match")
log.close()
"""


@pytest.mark.parametrize(("at", "lines"), [(1, 0), (-1, 0), (2, 0), (-2, 0), (3, 64), (-3, 64), (4, 70), (-4, 70)])
def test_a_crash_around_any_writing_of_head_and_secret_is_no_cut(tmp_path, at, lines):
    """A real kill just before (at) or after (-at) a file takes its name: head, secret, head of line 64, last head."""
    path = tmp_path / "audit.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(at), str(path)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert path.read_bytes().count(b"\n") == lines
    written(path, 3)
    found = verify_audit_log(path)
    assert found.sound and found.lines == lines + 3
    assert len(list(entries_about(path, "person 1"))) == 1


def test_after_a_crash_the_next_start_remembers_the_end(tmp_path):
    path = tmp_path / "audit.jsonl"
    AuditLog(path).close()
    early = beside(path)[1].read_bytes()
    raw = written(path, 40)
    beside(path)[1].write_bytes(early)
    log = AuditLog(path)  # killed before it writes anything
    path.write_bytes(b"".join(raw[:39]))
    assert verify_audit_log(path).problems == ("line 40, which was written once, is missing: the end was cut off",)
    log._broken = True
    log.close()


# Names.


def test_trails_of_one_stem_have_nothing_in_common(tmp_path):
    first, second = tmp_path / "audit.1", tmp_path / "audit.2"
    written(first, 3), written(second, 9), written(first, 1)
    assert [verify_audit_log(path).lines for path in (first, second)] == [4, 9]
    assert verify_audit_log(first).sound and verify_audit_log(second).sound
    assert beside(first)[0].read_bytes() != beside(second)[0].read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {
        f"audit.{k}{end}" for k in (1, 2) for end in ("", ".key", ".checkpoint")
    }


@pytest.mark.parametrize("name", ["z.key", "z.checkpoint", "audit.jsonl.key"])
def test_an_audit_log_is_not_named_like_what_lies_beside_one(tmp_path, name):
    for act in (AuditLog, verify_audit_log, lambda path: list(entries_about(path, "anna"))):
        with pytest.raises(InputError, match=r"cannot be an audit log: \.key and \.checkpoint"):
            act(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def _marked(secret, line):
    content = json.dumps(line, sort_keys=True)
    mark = hmac.new(secret, b"line\0" + content.encode(), hashlib.sha256).hexdigest()
    return json.dumps(line | {"mac": mark}).encode() + b"\n"


def test_an_audit_log_that_was_taken_away_leaves_its_name_taken(tmp_path):
    path = tmp_path / "audit.jsonl"
    written(path, 5)
    path.unlink()
    with pytest.raises(DataError, match="line 5, which was written once"):
        AuditLog(path)
    for file in (path, beside(path)[0]):
        file.unlink()
    with pytest.raises(DataError, match="belongs to a log that is gone"):
        AuditLog(path)
