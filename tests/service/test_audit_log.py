"""The audit log: durable, chained, and silent about who, what and how alike."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from mettle.errors import DataError, GalleryLocked, GalleryUnavailable, InputError
from mettle.service.audit_log import AuditLog, entries_about, verify_audit_log


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


def filled(path, lines=5):
    log = AuditLog(path)
    for k in range(lines):
        log.append("desk", "verify", "match" if k % 2 else "no match", subject=f"person {k % 3}")
    log.close()
    return path.read_bytes().splitlines(keepends=True)


def test_lines_say_who_what_when_and_how_it_ended_but_not_about_whom(path):
    raw = filled(path)
    assert "person" not in path.read_text()
    line = json.loads(raw[0])
    assert set(line) == {"n", "at", "who", "what", "outcome", "subject", "previous_mac", "mac"}
    assert line["previous_mac"] == "0" * 64 and [json.loads(r)["n"] for r in raw] == [1, 2, 3, 4, 5]
    assert all(json.loads(b)["previous_mac"] == json.loads(a)["mac"] for a, b in pairwise(raw))
    found = verify_audit_log(path)
    assert found.sound and found.lines == 5
    assert [line["n"] for line in entries_about(path, "person 1")] == [2, 5]
    assert list(entries_about(path, "person 9")) == []


def test_subjects_of_two_audit_logs_cannot_be_linked(tmp_path):
    first, second = AuditLog(tmp_path / "a.jsonl"), AuditLog(tmp_path / "b.jsonl")
    assert first.subject_mac("anna") != second.subject_mac("anna")
    first.close()
    second.close()


def test_the_secret_is_for_its_owner_only(path):
    filled(path)
    key = path.with_name("audit.jsonl.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(path.stat().st_mode) == 0o600
    key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        AuditLog(path)


def test_an_audit_log_goes_on_after_a_restart(path):
    filled(path)
    filled(path)
    found = verify_audit_log(path)
    assert found.sound and found.lines == 10


def test_s12_log_injection_stays_inside_its_line(path):
    log = AuditLog(path)
    log.append("a\nb", 'x", "outcome": "match', "=cmd|' /C calc'!A0\r\n\u2028\x1b[31m", subject="\n\0'\"")
    log.close()
    assert path.read_bytes().count(b"\n") == 1 and path.read_bytes().isascii() and b"\x1b" not in path.read_bytes()
    assert json.loads(path.read_text())["outcome"].startswith("=cmd")


def test_every_kind_of_tampering_is_found(path):
    raw = filled(path, 8)
    rng = random.Random(0)
    last = json.loads(raw[-1])
    forged = json.dumps(last | {"n": 9, "previous_mac": last["mac"]})
    cases = {
        "outcome": [*raw[:3], raw[3].replace(b'"match"', b'"no match"'), *raw[4:]],
        "removed": raw[:3] + raw[4:],
        "swapped": [*raw[:2], raw[3], raw[2], *raw[4:]],
        "repeated": raw[:4] + raw[3:],
        "first gone": raw[1:],
        "last gone": raw[:-1],
        "half gone": raw[:4],
        "all gone": [],
        "foreign": [*raw[:4], b'{"n": 5}\n', *raw[4:]],
        "garbage": [*raw[:4], b"\xff\xfe\n", *raw[4:]],
        "forged": [*raw, forged.encode() + b"\n"],
    }
    for name, lines in cases.items():
        path.write_bytes(b"".join(lines))
        assert not verify_audit_log(path).sound, name
    whole = b"".join(raw)
    for _ in range(300):
        at, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        changed = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        path.write_bytes(changed)
        found = verify_audit_log(path)
        assert not found.sound or found.torn or _same(changed, whole), (at, bit)


def _same(changed, whole):
    """Some flips change nothing that JSON can tell: then nothing was tampered with."""
    try:
        return [json.loads(a) for a in changed.splitlines()] == [json.loads(b) for b in whole.splitlines()]
    except ValueError:
        return False


def test_without_its_secret_an_audit_log_is_neither_checked_nor_continued(path):
    filled(path)
    path.with_name("audit.jsonl.key").unlink()
    with pytest.raises(InputError, match="missing"):
        verify_audit_log(path)
    with pytest.raises(DataError, match="cannot be continued"):
        AuditLog(path)


@pytest.mark.parametrize("cut", [1, 2, 17, 100, -1])
def test_a_torn_last_line_is_cut_off_with_a_note(path, cut):
    AuditLog(path).close()
    head = path.with_name("audit.jsonl.checkpoint")
    early = head.read_bytes()
    raw = filled(path)
    torn = raw[-1][:cut]
    path.write_bytes(b"".join(raw[:-1]) + torn)
    head.write_bytes(early)  # a crash comes before the next head is written
    assert verify_audit_log(path).torn == len(torn)
    log = AuditLog(path)
    log.append("desk", "verify", "match")
    log.close()
    found = verify_audit_log(path)
    assert found.sound and found.lines == 6 and not found.torn
    assert f"cut {len(torn)} bytes" in path.read_text()


def test_a_changed_last_line_is_not_taken_for_a_torn_one(path):
    raw = filled(path)
    path.write_bytes(b"".join([*raw[:-1], raw[-1].replace(b"desk", b"door")]))
    with pytest.raises(DataError, match="evidence"):
        AuditLog(path)
    path.write_bytes(b"x" * 200_000)
    with pytest.raises(DataError, match="not an audit log"):
        AuditLog(path)


def test_one_process_writes_at_a_time(path):
    log = AuditLog(path)
    with pytest.raises(GalleryLocked):
        AuditLog(path)
    log.close()
    log.close()
    AuditLog(path).close()
    with pytest.raises(GalleryUnavailable):
        log.append("desk", "verify", "match")


def test_threads_share_one_chain(path):
    log = AuditLog(path)
    threads = [
        threading.Thread(target=lambda k=k: [log.append(f"t{k}", "verify", "match") for _ in range(25)])
        for k in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert (
        verify_audit_log(path) == verify_audit_log(path)
        and verify_audit_log(path).sound
        and verify_audit_log(path).lines == 150
    )


WRITER = """
import sys
from mettle.service.audit_log import AuditLog
log = AuditLog(sys.argv[1])
n = 0
while True:
    log.append("desk", "verify", "match", subject="anna")
    n += 1
    sys.stdout.write(f"{n}\\n"); sys.stdout.flush()
"""


def test_a_killed_writer_loses_no_acknowledged_line(path):
    rng, acknowledged = random.Random(1), 0
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        writer.stdout.readline()
        time.sleep(rng.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split("\n")
        acknowledged += 1 + len(rest) - 1  # an answer without its newline was not given
        AuditLog(path).close()
        found = verify_audit_log(path)
        assert found.sound and found.lines >= acknowledged
        acknowledged = found.lines


def test_a_full_disk_refuses_and_takes_half_a_line_back(path):
    filled(path)
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mettle.errors import GalleryUnavailable
from mettle.service.audit_log import AuditLog
log = AuditLog({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({path.stat().st_size + 40}, {resource.RLIM_INFINITY}))
try:
    log.append("desk", "verify", "match")
except GalleryUnavailable as error:
    assert "disk full" in str(error)
else:
    raise SystemExit("no error")
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY}, {resource.RLIM_INFINITY}))
log.append("desk", "verify", "match")
log.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = verify_audit_log(path)
    assert found.sound and found.lines == 6


def test_an_audit_log_is_never_followed_through_a_link(path, tmp_path):
    other = tmp_path / "other"
    other.write_text("")
    path.symlink_to(other)
    with pytest.raises(GalleryUnavailable):
        AuditLog(path)
    assert os.path.getsize(other) == 0
