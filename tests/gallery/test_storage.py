"""The laws of a record, on both kinds."""

import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_fixtures import FileShelf, ServerShelf, memory, units

from mettle.errors import GalleryError, InputError, UnknownIdentity
from mettle.gallery.binding import Binding
from mettle.gallery.storage import sql
from mettle.gallery.storage.integrity import row_checksum


def held(record) -> dict[str, dict[int, bytes]]:
    """Everything in a record, by `scan`."""
    people: dict[str, dict[int, bytes]] = {}
    for part in record.scan(batch=7):
        assert part.numbers.dtype == np.int64 and part.vectors.dtype == np.float32
        for number, name, row in zip(part.numbers.tolist(), part.identities, part.vectors, strict=True):
            people.setdefault(name, {})[number] = row.tobytes()
    return people


def test_a_new_record_is_empty(record):
    assert record.sequence() == 0
    assert (record.size().identities, record.size().templates) == (0, 0)
    assert list(record.ids()) == [] and held(record) == {} and record.check() == []
    assert len(record.templates("anna").numbers) == 0 and record.templates("anna").vectors.shape == (0, 8)
    changes = record.changes(0)
    assert changes.sequence == 0 and len(changes.removed) == 0 and len(changes.added.numbers) == 0


def test_what_was_enrolled_is_read_bit_by_bit(record):
    vectors = units(1, 3)
    vectors[0, 0] = -0.0
    vectors[0] /= np.linalg.norm(vectors[0])
    first, second = record.enrol("anna", vectors), record.enrol("bert", units(2, 1))
    assert (first.sequence, second.sequence) == (1, 2) and not first.repeated
    assert len(first.numbers) == 3 and set(first.numbers).isdisjoint(second.numbers)
    got = record.templates("anna")
    assert got.vectors.tobytes() == vectors.tobytes() and got.numbers.tolist() == sorted(first.numbers)
    assert got.identities == ("anna",) * 3
    asked = np.array([*second.numbers, 10**15, *first.numbers], np.int64)
    assert record.names(asked) == ["bert", None, "anna", "anna", "anna"]
    assert record.names(np.array([], np.int64)) == [] and record.names(np.array([-1])) == [None]
    assert record.templates(np.str_("bert")).numbers.tolist() == list(second.numbers)
    assert record.changes(np.int64(1)).added.identities == ("bert",)
    assert (record.size().identities, record.size().templates) == (2, 4)


def test_what_is_there_is_not_added_again_where_that_is_asked_for(record):
    rows = units(1, 4)
    record.enrol("anna", rows[:2])
    doubled = record.enrol("anna", rows[:2])
    assert (len(doubled.numbers), doubled.skipped) == (2, 0), "a record adds what it is given, unless asked not to"
    again = record.enrol("anna", rows[[0, 2, 1, 2]], distinct=True)
    assert (len(again.numbers), again.skipped) == (1, 3)
    several = record.enrol_many([("anna", rows), ("bert", rows[:1]), ("bert", rows[:2])], distinct=True)
    assert (len(several.numbers), several.skipped) == (3, 4)
    anew = record.enrol("anna", rows[[0, 0, 1]], replace=True, distinct=True)
    assert (len(anew.numbers), anew.skipped) == (2, 1)
    assert sorted(held(record)["anna"].values()) == sorted(row.tobytes() for row in rows[:2])
    nothing = record.enrol("bert", rows[:2], distinct=True, request="r")
    assert nothing.numbers == () and nothing.skipped == 2
    assert record.enrol("bert", rows[:2], distinct=True, request="r").repeated
    assert record.check() == [] and record.size().templates == 4


def test_the_binding_is_kept(shelf):
    bound = Binding(5, "ab" * 32, '{"size": 64}', "mean", {"0.001": {"threshold": 0.5, "interval": [0.4, 0.6]}})
    shelf.create(bound).close()
    reopened = shelf.open()
    assert reopened.binding == bound
    reopened.close()


def test_an_existing_record_is_not_made_again(shelf, record):
    with pytest.raises(GalleryError, match="already"):
        shelf.create()


def test_g8_enrolling_again_adds_and_replace_replaces(record):
    old = record.enrol("anna", units(1, 2)).numbers
    more = record.enrol("anna", units(2, 1)).numbers
    assert set(held(record)["anna"]) == {*old, *more}
    new = record.enrol("anna", units(3, 2), replace=True).numbers
    assert set(held(record)["anna"]) == set(new) and set(new).isdisjoint({*old, *more})
    assert record.sequence() == 3 and record.size().templates == 2
    assert record.enrol("new", units(4, 1), replace=True).sequence == 4


def test_g8_a_retried_request_changes_nothing(shelf, record):
    first = record.enrol("anna", units(1, 2), request="r-1")
    again = record.enrol("anna", units(1, 2), request="r-1")
    assert again.repeated and (again.sequence, again.numbers) == (first.sequence, first.numbers)
    gone = record.delete("anna", request="r-2")
    record.close()
    reopened = shelf.open()
    again = reopened.delete("anna", request="r-2")
    assert again.repeated and (again.sequence, again.numbers) == (gone.sequence, first.numbers)
    assert reopened.enrol("anna", units(1, 2), request="r-1").repeated, "a late retry must not resurrect"
    assert reopened.size().templates == 0 and reopened.sequence() == 2
    with pytest.raises(InputError, match="r-1"):
        reopened.delete("bert", request="r-1")
    reopened.close()


def test_g9_a_deleted_identity_is_gone_at_once_and_after_reopening(shelf, record):
    numbers = record.enrol("anna", units(1, 3)).numbers
    record.enrol("bert", units(2, 1))
    receipt = record.delete("anna")
    assert receipt.numbers == numbers and receipt.sequence == 3
    for _ in range(2):
        assert len(record.templates("anna").numbers) == 0 and list(record.ids()) == ["bert"]
        assert record.names(np.array(numbers)) == [None] * 3 and list(held(record)) == ["bert"]
        record.close()
        record = shelf.open()
    with pytest.raises(UnknownIdentity, match="anna"):
        record.delete("anna")
    assert record.sequence() == 3, "what was refused is no change"
    record.close()


def test_numbers_are_never_used_twice(shelf, record):
    seen: list[int] = []
    for turn in range(4):
        seen += record.enrol("anna", units(turn, 2)).numbers
        record.delete("anna")
        record.compact()
        record.close()
        record = shelf.open()
    seen += record.enrol("anna", units(9, 1)).numbers
    assert seen == sorted(set(seen))
    record.close()


@pytest.mark.parametrize(
    "name", ["", "a" * 513, "é" * 257, "a\0b", "\ud800", "x\udfff", None, 7, b"anna", ["anna"]], ids=ascii
)
def test_s5_bad_names_are_refused(record, name):
    for call in (lambda: record.enrol(name, units(1, 1)), lambda: record.delete(name), lambda: record.templates(name)):
        with pytest.raises(InputError, match="identity"):
            call()
    if name is not None:
        with pytest.raises(InputError, match="request"):
            record.enrol("anna", units(1, 1), request=name)
    assert record.sequence() == 0


def test_s5_any_name_is_data(shelf, record, folder):
    names = [
        *("../x", "..\\x", "/etc/passwd", "%2e%2e", "a'b\"c;DROP TABLE templates;--", "?", "%s", "%", "\u202eabc", " "),
        *("a\nb", "\x01", "e\u0301", "\u00e9", "A", "a", "\U0001f9d1", "\ufffe", "\uffff", "é" * 256, "x" * 512, "$1"),
    ]
    before = {p.name for p in folder.rglob("*")}
    for i, name in enumerate(names):
        record.enrol(name, units(i, 1), request=name)
    assert list(record.ids()) == sorted(names)
    for i, name in enumerate(names):
        assert record.templates(name).vectors.tobytes() == units(i, 1).tobytes()
    assert record.check() == []
    new = {p.name for p in folder.rglob("*")} - before
    assert new <= {"record.sqlite-wal", "record.sqlite-shm"}, "a name never becomes a path"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=120))
def test_s5_fuzzed_names_come_back(record, name):
    record.enrol(name, units(5, 1), replace=True)
    assert record.templates(name).identities == (name,)
    assert name in list(record.ids())
    record.delete(name)
    assert len(record.templates(name).numbers) == 0


@pytest.mark.parametrize(
    "vectors",
    [
        units(1, 1, 7),
        units(1, 1, 9),
        units(1, 1)[0],
        np.zeros((0, 8), np.float32),
        np.zeros((1, 8), np.float32),
        units(1, 2) * np.array([[1.0], [1.1]], np.float32),
        np.where(np.eye(8)[:1] > 0, np.nan, units(1, 1)),
        np.where(np.eye(8)[:1] > 0, np.inf, units(1, 1)),
        np.ones((1, 8), np.int64),
        np.array([["a"] * 8]),
    ],
    ids=["short", "long", "flat", "none", "zero", "second not unit", "nan", "inf", "integers", "text"],
)
def test_g10_g11_bad_templates_are_refused_whole(record, vectors):
    with pytest.raises(InputError, match="vectors"):
        record.enrol("anna", vectors)
    assert record.sequence() == 0 and record.size().templates == 0


def test_scan_is_as_of_one_moment(record):
    for i in range(10):
        record.enrol(f"p{i}", units(i, 1))
    scan = record.scan(batch=2)
    seen = [*next(scan).identities]
    record.delete("p9")
    record.enrol("p5", units(20, 1), replace=True)
    record.enrol("late", units(21, 3))
    for part in scan:
        seen += part.identities
    assert seen == [f"p{i}" for i in range(10)]
    assert set(held(record)) == {*(f"p{i}" for i in range(9)), "late"}


def test_a_scan_left_early_holds_nothing(record):
    for i in range(10):
        record.enrol(f"p{i}", units(i, 1))
    next(record.scan(batch=2))
    record.delete("p1")
    record.compact()
    assert record.size().identities == 9


def test_changes_bring_any_older_view_up_to_date(record):
    rng = random.Random(5)
    views = {0: {}}
    for turn in range(40):
        name = f"p{rng.randrange(6)}"
        if rng.random() < 0.35 and len(record.templates(name).numbers):
            record.delete(name)
        else:
            record.enrol(name, units(turn, rng.randint(1, 3)), replace=rng.random() < 0.3)
        views[record.sequence()] = {n: (name, row) for name, rows in held(record).items() for n, row in rows.items()}
    assert sorted(views) == list(range(41))
    last = views[40]
    for sequence, view in views.items():
        changes = record.changes(sequence)
        removed, added = changes.removed.tolist(), changes.added.numbers.tolist()
        assert changes.sequence == 40 and len({*removed, *added}) == len(removed) + len(added)
        new = zip(changes.added.identities, [row.tobytes() for row in changes.added.vectors], strict=True)
        followed = {n: v for n, v in view.items() if n not in removed} | dict(zip(added, new, strict=True))
        assert followed == last
    assert record.changes(41) is None and record.changes(-1) is None


def test_compact_forgets_what_is_long_ago_and_says_so(record, monkeypatch):
    for i in range(6):
        record.enrol(f"p{i}", units(i, 1), request=f"r{i}")
    record.delete("p0")
    monkeypatch.setattr(sql, "REMEMBERED", 3)
    before = record.digest()
    record.compact()
    assert record.changes(3) is None and record.changes(4).removed.tolist() == [1]
    assert record.enrol("p5", units(5, 1), request="r5").repeated
    assert record.digest() == before and record.check() == []


def test_digest_is_of_the_content_alone(shelf, record):
    empty = record.digest()
    record.enrol("anna", units(1, 3))
    record.enrol("bert", units(2, 2))
    one = record.digest()
    record.enrol("carl", units(3, 1))
    assert len({empty, one, record.digest()}) == 3
    record.delete("carl")
    assert record.digest() == one
    record.enrol("bert", units(2, 2)[::-1].copy(), replace=True)
    record.enrol("anna", units(1, 3)[:1], replace=True)
    assert record.digest() != one, "fewer templates"
    record.enrol("anna", units(1, 3)[1:])
    assert record.digest() == one, "order and numbers do not count"
    record.enrol("anna", units(1, 3)[:1])
    assert record.digest() != one, "a template twice counts twice"
    swapped = [("anna", units(2, 2)), ("bert", units(1, 3))]
    for name, vectors in swapped:
        record.enrol(name, vectors, replace=True)
    assert record.digest() != one, "it matters whose template it is"
    record.delete("anna")
    record.delete("bert")
    assert record.digest() == empty


def test_both_kinds_have_the_same_digest(folder, postgres):
    digests = []
    for shelf in (FileShelf(folder), ServerShelf(postgres)):
        record = shelf.create(Binding(16))
        for i in range(20) if shelf.kind == "sqlite" else reversed(range(20)):
            record.enrol(f"p{i}", units(i, 1 + i % 3, 16))
        digests.append(record.digest())
        record.close()
    assert digests[0] == digests[1]


def test_check_finds_damaged_rows(shelf, record):
    for i in range(5):
        record.enrol(f"p{i}", units(i, 2))
    assert record.check() == []
    damages = {
        "UPDATE templates SET checksum = checksum + 1 WHERE number = 3": "template 3 fails its checksum",
        "UPDATE templates SET identity = (SELECT id FROM identities WHERE name = 'p4') WHERE number = 1": "template 1 ",
        "INSERT INTO deleted_templates VALUES (5, 1, 0, 0)": "deleted template 5 fails its checksum",
        "INSERT INTO identities VALUES (77, 'nobody', 0, 0, 1)": "identity 77 fails its checksum",
        "UPDATE revision_state SET sequence = 1": "state of the revision fails its checksum",
    }
    found = []
    for statement, words in damages.items():
        shelf.sql(statement)
        found = record.check()
        assert any(words in line for line in found), (statement, found)
    assert len(found) >= len(damages)
    with pytest.raises(GalleryError, match="template 3"):
        record.templates("p1")
    with pytest.raises(GalleryError, match="checksum"):
        held(record)


def test_a_newer_format_is_refused(shelf, record):
    record.close()
    key = "key = 'format'"
    shelf.sql(f"UPDATE metadata SET value = '99', checksum = {row_checksum('metadata', 'format', '99')} WHERE {key}")
    with pytest.raises(GalleryError, match="upgrade mettle"):
        shelf.open()
    shelf.sql(f"UPDATE metadata SET value = '1', checksum = {row_checksum('metadata', 'format', '1')} WHERE {key}")
    shelf.sql("UPDATE metadata SET value = '[]' WHERE key = 'binding'")
    with pytest.raises(GalleryError, match="damaged"):
        shelf.open(write=False)


def test_a_reader_sees_the_newest_and_changes_nothing(shelf, record):
    reader = shelf.open(write=False)
    for i in range(3):
        record.enrol(f"p{i}", units(i, 1))
        assert reader.sequence() == i + 1 and list(reader.ids()) == [f"p{j}" for j in range(i + 1)]
    for call in (lambda: reader.enrol("x", units(1, 1)), lambda: reader.delete("p1"), lambda: reader.compact()):
        with pytest.raises(GalleryError, match="reading"):
            call()
    assert record.sequence() == 3
    reader.close()


def test_a_closed_record_says_so(record):
    record.close()
    record.close()
    for call in (record.sequence, record.digest, lambda: record.enrol("a", units(1, 1)), lambda: list(record.scan())):
        with pytest.raises(GalleryError, match="closed"):
            call()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_g7_threads_give_some_serial_order(kind, folder, request):
    shelf = FileShelf(folder) if kind == "sqlite" else ServerShelf(request.getfixturevalue("postgres"))
    record = shelf.create()
    history, troubles = [], []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        try:
            for turn in range(25):
                name, seed = f"p{rng.randrange(4)}", 1000 * worker + turn
                try:
                    if rng.random() < 0.4:
                        history.append((record.delete(name), "delete", name, seed))
                    else:
                        swap = rng.random() < 0.3
                        done = record.enrol(name, units(seed, 2), replace=swap)
                        history.append((done, "replace" if swap else "enrol", name, seed))
                except UnknownIdentity:
                    pass
                sequence = record.sequence()
                view = record.changes(0)
                assert view.sequence >= sequence
                assert len(record.templates(name).numbers) % 2 == 0, "a change is seen whole or not at all"
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []
    history.sort(key=lambda entry: entry[0].sequence)
    assert [entry[0].sequence for entry in history] == list(range(1, len(history) + 1))
    assert held(record) == replayed(history)
    assert record.check() == []
    record.close()


def replayed(history) -> dict[str, dict[int, bytes]]:
    """What a plain dict holds after the same changes in the order of their sequence numbers."""
    people: dict[str, dict[int, bytes]] = {}
    for receipt, verb, name, seed in history:
        if verb == "delete":
            assert set(receipt.numbers) == set(people.pop(name))
            continue
        if verb == "replace":
            people.pop(name, None)
        rows = [row.tobytes() for row in units(seed, len(receipt.numbers))]
        people.setdefault(name, {}).update(zip(receipt.numbers, rows, strict=True))
    return people


@pytest.mark.parametrize(("kind", "operations"), [("sqlite", 5000), ("postgresql", 400)])
def test_model_a_dict_with_restarts(kind, operations, request):
    """Random operations on a record and on a dict, with reopening in between: they never differ."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:  # the number of operations counts here, not the disk
        shelf = FileShelf(Path(folder)) if kind == "sqlite" else ServerShelf(request.getfixturevalue("postgres"))
        record, rng = shelf.create(), random.Random(8)
        people: dict[str, dict[int, bytes]] = {}
        sequence, requests = 0, {}
        for turn in range(operations):
            name, act = f"p{rng.randrange(60)}", rng.random()
            if act < 0.40:
                rows, swap = units(turn, rng.randint(1, 3)), rng.random() < 0.2
                label = f"r{turn}" if rng.random() < 0.3 else None
                receipt = record.enrol(name, rows, request=label, replace=swap)
                sequence += 1
                assert receipt.sequence == sequence and not receipt.repeated
                if swap:
                    people.pop(name, None)
                people.setdefault(name, {}).update(zip(receipt.numbers, [row.tobytes() for row in rows], strict=True))
                if label:
                    requests[label] = (name, rows, swap, receipt)
            elif act < 0.55:
                if name in people:
                    sequence += 1
                    receipt = record.delete(name)
                    assert receipt.sequence == sequence and set(receipt.numbers) == set(people.pop(name))
                else:
                    with pytest.raises(UnknownIdentity):
                        record.delete(name)
            elif act < 0.60 and requests:
                label = rng.choice(sorted(requests))
                who, rows, swap, before = requests[label]
                receipt = record.enrol(who, rows, request=label, replace=swap)
                assert receipt.repeated and receipt.numbers == before.numbers
            elif act < 0.85:
                got = record.templates(name)
                expected = people.get(name, {})
                assert dict(zip(got.numbers.tolist(), [r.tobytes() for r in got.vectors], strict=True)) == expected
            elif act < 0.97:
                size = record.size()
                assert (size.identities, size.templates) == (len(people), sum(map(len, people.values())))
                assert record.sequence() == sequence
            elif act < 0.98:
                assert list(record.ids()) == sorted(people)
            elif act < 0.985:
                record.compact()
            elif act < 0.99:
                assert held(record) == people
            else:
                record.close()
                record = shelf.open()
        assert held(record) == people and record.check() == []
        record.close()
