"""What the service says of a change is true, whatever its audit log or its disk can still do."""

import errno
import os
from pathlib import Path

import pytest

from mettle.errors import OutcomeUnknown
from mettle.service import audit_log
from mettle.service.audit_log import entries_about, verify_audit_log


class FullDisk:
    """The module ``os`` for the audit log, whose disk takes so many lines more, and then no further ones."""

    def __init__(self, lines: int):
        self.lines = lines

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, handle, content):
        if self.lines == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.lines -= 1
        return os.write(handle, content)


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "audit.jsonl"


def outcomes(log: Path, identity: str) -> list[tuple[str, str]]:
    return [(line["what"], line["outcome"]) for line in entries_about(log, identity)]


def test_where_the_log_takes_no_line_nothing_is_deleted(service, key, people, log, monkeypatch):
    asked = service()(key("delete"))
    monkeypatch.setattr(audit_log, "os", FullDisk(0))
    sent = asked.post("/v1/delete", json={"identity": "anna"})
    assert sent.status_code == 503 and "nothing was changed" in sent.text
    assert "anna" in people, "and that is true"


def test_a_deletion_that_was_made_is_answered_as_made_though_the_log_is_full(service, key, people, log, monkeypatch):
    asked = service()(key("delete"))
    disk = FullDisk(1)  # it takes the line before the change, and not the one after it
    monkeypatch.setattr(audit_log, "os", disk)
    sent = asked.post("/v1/delete", json={"identity": "anna", "request": "r"})
    assert sent.status_code == 200 and sent.json()["templates"] > 0, sent.text
    assert "anna" not in people and outcomes(log, "anna") == [("delete", "begun")]
    disk.lines = 100  # there is room again
    again = asked.post("/v1/delete", json={"identity": "anna", "request": "r"})
    assert again.json()["repeated"] is True
    assert outcomes(log, "anna") == [("delete", "begun"), ("delete", "begun"), ("delete", "repeated")]
    assert verify_audit_log(log).sound


@pytest.mark.parametrize("made", [True, False])
def test_an_unsure_deletion_is_called_unsure_and_settled_by_asking_again(service, key, people, log, monkeypatch, made):
    asked = service()(key("delete"))
    delete = type(people).delete

    def fails_while_it_commits(self, *given, **more):
        if made:
            delete(self, *given, **more)
        raise OutcomeUnknown("the disk failed while the change was committed")

    with monkeypatch.context() as patched:
        patched.setattr(type(people), "delete", fails_while_it_commits)
        sent = asked.post("/v1/delete", json={"identity": "anna", "request": "r"})
    assert sent.status_code == 503 and "outcome-unknown" in sent.text and "nothing was changed" not in sent.text
    assert ("delete", "unknown") in outcomes(log, "anna")
    again = asked.post("/v1/delete", json={"identity": "anna", "request": "r"})
    assert again.status_code == 200 and again.json()["repeated"] is made and "anna" not in people
