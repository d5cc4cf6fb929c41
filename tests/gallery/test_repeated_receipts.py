"""A repeated request gives the first receipt, whole, with what was skipped."""

import sqlite3

import numpy as np
import pytest
from storage_fixtures import units

from mettle.gallery import Gallery
from mettle.gallery.storage import sql

LONGEST = "ü" * 256  # 512 bytes


@pytest.mark.parametrize("request_name", ["r", LONGEST, "a {brace} and ' ? % quotes", "skipped"])
def test_what_was_skipped_is_in_the_receipt_of_a_repeated_request(shelf, storage, request_name):
    rows = units(1, 4)
    storage.enrol("anna", rows[:3])
    first = storage.enrol("anna", rows, distinct=True, request=request_name)
    assert (len(first.numbers), first.skipped, first.repeated) == (1, 3, False)
    storage.enrol("anna", units(2, 2), replace=True)
    again = storage.enrol("anna", rows, distinct=True, request=request_name)
    assert again.repeated and (again.sequence, again.numbers, again.skipped) == (first.sequence, first.numbers, 3)
    storage.close()
    reopened = shelf.open()
    # Also for a retry that sends other templates: it is the receipt of what was done then.
    late = reopened.enrol("anna", rows[:1], distinct=True, request=request_name)
    assert (late.repeated, late.numbers, late.skipped) == (True, first.numbers, 3)
    assert reopened.size().templates == 2 and reopened.check() == []
    reopened.close()


def test_each_request_has_its_own_count(storage):
    rows = units(1, 4)
    storage.enrol("anna", rows)
    for count in range(4):
        storage.enrol("anna", rows[: count + 1], distinct=True, request=f"r{count}")
    storage.enrol("anna", units(5, 2), distinct=True, request="none")
    assert [storage.enrol("anna", rows, distinct=True, request=f"r{i}").skipped for i in range(4)] == [1, 2, 3, 4]
    assert storage.enrol("anna", rows, distinct=True, request="none").skipped == 0
    assert storage.delete("anna", request="gone").skipped == storage.delete("anna", request="gone").skipped == 0


def requests(shelf) -> list[tuple]:
    """All rows of the table, read around the package."""
    sql = "SELECT name, request_hash, sequence, numbers FROM {}idempotency_keys ORDER BY sequence"
    if shelf.kind == "postgresql":
        return shelf.server.sql(sql.format(f"{shelf.name}."))
    connection = sqlite3.connect(shelf.path)
    try:
        return connection.execute(sql.format("")).fetchall()
    finally:
        connection.close()


def test_what_is_forgotten_is_forgotten_whole(shelf, storage, monkeypatch):
    storage.enrol("anna", units(1, 1))
    storage.enrol("anna", units(1, 1), distinct=True, request="r")
    monkeypatch.setattr(sql, "REMEMBERED", 2)
    for seed in range(4):
        storage.enrol("ben", units(10 + seed, 1))
    storage.compact()
    assert [row[0] for row in requests(shelf) if not row[0].startswith("unnamed")] == []
    again = storage.enrol("anna", units(1, 1), distinct=True, request="r")
    assert not again.repeated and again.skipped == 1


def test_a_gallery_says_again_what_it_skipped(folder):
    rows = np.eye(8, dtype=np.float32)
    with Gallery.open(folder / "g", dim=8) as gallery:
        gallery.enrol("anna", rows[0])
        first = gallery.enrol("anna", rows[:2], request="r")
        again = gallery.enrol("anna", rows[:2], request="r")
    assert (first.skipped, again.skipped, again.numbers) == (1, 1, first.numbers)
