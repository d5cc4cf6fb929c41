"""The laws of a storage, on both kinds."""

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


def held(storage) -> dict[str, dict[int, bytes]]:
    """Everything in a storage, by `scan`."""
    people: dict[str, dict[int, bytes]] = {}
    for part in storage.scan(batch=7):
        assert part.numbers.dtype == np.int64 and part.vectors.dtype == np.float32
        for number, name, row in zip(part.numbers.tolist(), part.identities, part.vectors, strict=True):
            people.setdefault(name, {})[number] = row.tobytes()
    return people


def test_a_new_record_is_empty(storage):
    assert storage.sequence() == 0
    assert (storage.size().identities, storage.size().templates) == (0, 0)
    assert list(storage.ids()) == [] and held(storage) == {} and storage.check() == []
    assert len(storage.templates_of("anna").numbers) == 0 and storage.templates_of("anna").vectors.shape == (0, 8)
    changes = storage.changes_since(0)
    assert changes.sequence == 0 and len(changes.removed) == 0 and len(changes.added.numbers) == 0


def test_what_was_enrolled_is_read_bit_by_bit(storage):
    vectors = units(1, 3)
    vectors[0, 0] = -0.0
    vectors[0] /= np.linalg.norm(vectors[0])
    first, second = storage.enrol("anna", vectors), storage.enrol("bert", units(2, 1))
    assert (first.sequence, second.sequence) == (1, 2) and not first.repeated
    assert len(first.numbers) == 3 and set(first.numbers).isdisjoint(second.numbers)
    got = storage.templates_of("anna")
    assert got.vectors.tobytes() == vectors.tobytes() and got.numbers.tolist() == sorted(first.numbers)
    assert got.identities == ("anna",) * 3
    asked = np.array([*second.numbers, 10**15, *first.numbers], np.int64)
    assert storage.names_of(asked) == ["bert", None, "anna", "anna", "anna"]
    assert storage.names_of(np.array([], np.int64)) == [] and storage.names_of(np.array([-1])) == [None]
    assert storage.templates_of(np.str_("bert")).numbers.tolist() == list(second.numbers)
    assert storage.changes_since(np.int64(1)).added.identities == ("bert",)
    assert (storage.size().identities, storage.size().templates) == (2, 4)


def test_names_that_are_kept_in_memory_are_those_of_the_present_state(shelf, storage):
    """Every change of another one is seen at once; damage without a change never changes an answer, and is found."""
    numbers = storage.enrol_many([("anna", units(1, 2)), ("bert", units(2, 1))]).numbers
    reader = shelf.open(write=False)

    def answers() -> tuple:
        return list(reader.ids()), reader.names_of(np.array(numbers)), sorted(held(reader)), reader.size()

    before = answers()
    assert before == answers() == (["anna", "bert"], ["anna", "anna", "bert"], ["anna", "bert"], storage.size())
    storage.delete("anna")
    more = storage.enrol("carl", units(3, 1)).numbers
    assert answers()[:3] == (["bert", "carl"], [None, None, "bert"], ["bert", "carl"])
    assert reader.names_of(np.array([*more, *numbers])) == ["carl", None, None, "bert"]
    shelf.sql("UPDATE identities SET name = 'dora' WHERE name = 'carl'")
    assert list(reader.ids()) == ["bert", "carl"] and reader.names_of(np.array(more)) == ["carl"]
    reader.forget_pages()
    for question in (lambda: list(reader.ids()), lambda: reader.names_of(np.array(more)), lambda: held(reader)):
        with pytest.raises(GalleryError, match="fails its checksum"):
            question()
    reader.close()


def test_one_change_may_name_somebody_several_times(storage):
    """Rows are written together at the end, unless somebody must be looked up who came before in the same change."""
    first = storage.enrol_many([("anna", units(1, 2)), ("bert", units(2, 1)), ("anna", units(3, 1))])
    assert first.numbers == (1, 2, 3, 4) and sorted(held(storage)["anna"]) == [1, 2, 4]
    people = [("anna", units(4, 1)), ("carl", units(5, 1)), ("anna", units(6, 1)), ("carl", units(7, 2))]
    storage.enrol_many(people, replace=True)
    assert {name: len(rows) for name, rows in held(storage).items()} == {"anna": 2, "bert": 1, "carl": 3}
    assert storage.check() == []


def test_somebody_new_may_follow_whose_templates_are_replaced(shelf, storage):
    """Whoever is looked up first after an opening proves the index of names, in the middle of a change, too."""
    storage.enrol("anna", units(1, 2))
    storage.close()
    reopened = shelf.open()
    reopened.enrol_many([("anna", units(2, 1)), ("bert", units(3, 1))], replace=True)
    reopened.close()
    reopened = shelf.open()
    reopened.enrol_many([("anna", units(4, 1)), ("carl", units(5, 1)), ("carl", units(6, 1))])
    assert reopened.check() == [] and reopened.size().templates == 5
    reopened.close()


def test_what_is_there_is_not_added_again_where_that_is_asked_for(storage):
    rows = units(1, 4)
    storage.enrol("anna", rows[:2])
    doubled = storage.enrol("anna", rows[:2])
    assert (len(doubled.numbers), doubled.skipped) == (2, 0), "a storage adds what it is given, unless asked not to"
    again = storage.enrol("anna", rows[[0, 2, 1, 2]], distinct=True)
    assert (len(again.numbers), again.skipped) == (1, 3)
    several = storage.enrol_many([("anna", rows), ("bert", rows[:1]), ("bert", rows[:2])], distinct=True)
    assert (len(several.numbers), several.skipped) == (3, 4)
    anew = storage.enrol("anna", rows[[0, 0, 1]], replace=True, distinct=True)
    assert (len(anew.numbers), anew.skipped) == (2, 1)
    assert sorted(held(storage)["anna"].values()) == sorted(row.tobytes() for row in rows[:2])
    nothing = storage.enrol("bert", rows[:2], distinct=True, request="r")
    assert nothing.numbers == () and nothing.skipped == 2
    assert storage.enrol("bert", rows[:2], distinct=True, request="r").repeated
    assert storage.check() == [] and storage.size().templates == 4


def test_the_binding_is_kept(shelf):
    bound = Binding(5, "ab" * 32, '{"size": 64}', "mean", {"0.001": {"threshold": 0.5, "interval": [0.4, 0.6]}})
    shelf.create(bound).close()
    reopened = shelf.open()
    assert reopened.binding == bound
    reopened.close()


def test_an_existing_record_is_not_made_again(shelf, storage):
    with pytest.raises(GalleryError, match="already"):
        shelf.create()


def test_g8_enrolling_again_adds_and_replace_replaces(storage):
    old = storage.enrol("anna", units(1, 2)).numbers
    more = storage.enrol("anna", units(2, 1)).numbers
    assert set(held(storage)["anna"]) == {*old, *more}
    new = storage.enrol("anna", units(3, 2), replace=True).numbers
    assert set(held(storage)["anna"]) == set(new) and set(new).isdisjoint({*old, *more})
    assert storage.sequence() == 3 and storage.size().templates == 2
    assert storage.enrol("new", units(4, 1), replace=True).sequence == 4


def test_g8_a_retried_request_changes_nothing(shelf, storage):
    first = storage.enrol("anna", units(1, 2), request="r-1")
    again = storage.enrol("anna", units(1, 2), request="r-1")
    assert again.repeated and (again.sequence, again.numbers) == (first.sequence, first.numbers)
    gone = storage.delete("anna", request="r-2")
    storage.close()
    reopened = shelf.open()
    again = reopened.delete("anna", request="r-2")
    assert again.repeated and (again.sequence, again.numbers) == (gone.sequence, first.numbers)
    assert reopened.enrol("anna", units(1, 2), request="r-1").repeated, "a late retry must not resurrect"
    assert reopened.size().templates == 0 and reopened.sequence() == 2
    with pytest.raises(InputError, match="r-1"):
        reopened.delete("bert", request="r-1")
    reopened.close()


def test_g9_a_deleted_identity_is_gone_at_once_and_after_reopening(shelf, storage):
    numbers = storage.enrol("anna", units(1, 3)).numbers
    storage.enrol("bert", units(2, 1))
    receipt = storage.delete("anna")
    assert receipt.numbers == numbers and receipt.sequence == 3
    for _ in range(2):
        assert len(storage.templates_of("anna").numbers) == 0 and list(storage.ids()) == ["bert"]
        assert storage.names_of(np.array(numbers)) == [None] * 3 and list(held(storage)) == ["bert"]
        storage.close()
        storage = shelf.open()
    with pytest.raises(UnknownIdentity, match="anna"):
        storage.delete("anna")
    assert storage.sequence() == 3, "what was refused is no change"
    storage.close()


def test_numbers_are_never_used_twice(shelf, storage):
    seen: list[int] = []
    for turn in range(4):
        seen += storage.enrol("anna", units(turn, 2)).numbers
        storage.delete("anna")
        storage.compact()
        storage.close()
        storage = shelf.open()
    seen += storage.enrol("anna", units(9, 1)).numbers
    assert seen == sorted(set(seen))
    storage.close()


@pytest.mark.parametrize(
    "name", ["", "a" * 513, "é" * 257, "a\0b", "\ud800", "x\udfff", None, 7, b"anna", ["anna"]], ids=ascii
)
def test_s5_bad_names_are_refused(storage, name):
    for call in (
        lambda: storage.enrol(name, units(1, 1)),
        lambda: storage.delete(name),
        lambda: storage.templates_of(name),
    ):
        with pytest.raises(InputError, match="identity"):
            call()
    if name is not None:
        with pytest.raises(InputError, match="request"):
            storage.enrol("anna", units(1, 1), request=name)
    assert storage.sequence() == 0


def test_s5_any_name_is_data(shelf, storage, folder):
    names = [
        *("../x", "..\\x", "/etc/passwd", "%2e%2e", "a'b\"c;DROP TABLE templates;--", "?", "%s", "%", "\u202eabc", " "),
        *("a\nb", "\x01", "e\u0301", "\u00e9", "A", "a", "\U0001f9d1", "\ufffe", "\uffff", "é" * 256, "x" * 512, "$1"),
    ]
    before = {p.name for p in folder.rglob("*")}
    for i, name in enumerate(names):
        storage.enrol(name, units(i, 1), request=name)
    assert list(storage.ids()) == sorted(names)
    for i, name in enumerate(names):
        assert storage.templates_of(name).vectors.tobytes() == units(i, 1).tobytes()
    assert storage.check() == []
    new = {p.name for p in folder.rglob("*")} - before
    assert new <= {"record.sqlite-wal", "record.sqlite-shm"}, "a name never becomes a path"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=120))
def test_s5_fuzzed_names_come_back(storage, name):
    storage.enrol(name, units(5, 1), replace=True)
    assert storage.templates_of(name).identities == (name,)
    assert name in list(storage.ids())
    storage.delete(name)
    assert len(storage.templates_of(name).numbers) == 0


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
def test_g10_g11_bad_templates_are_refused_whole(storage, vectors):
    with pytest.raises(InputError, match="vectors"):
        storage.enrol("anna", vectors)
    assert storage.sequence() == 0 and storage.size().templates == 0


def test_scan_is_as_of_one_moment(storage):
    for i in range(10):
        storage.enrol(f"p{i}", units(i, 1))
    scan = storage.scan(batch=2)
    seen = [*next(scan).identities]
    storage.delete("p9")
    storage.enrol("p5", units(20, 1), replace=True)
    storage.enrol("late", units(21, 3))
    for part in scan:
        seen += part.identities
    assert seen == [f"p{i}" for i in range(10)]
    assert set(held(storage)) == {*(f"p{i}" for i in range(9)), "late"}


def test_a_scan_left_early_holds_nothing(storage):
    for i in range(10):
        storage.enrol(f"p{i}", units(i, 1))
    next(storage.scan(batch=2))
    storage.delete("p1")
    storage.compact()
    assert storage.size().identities == 9


def test_changes_bring_any_older_view_up_to_date(storage):
    rng = random.Random(5)
    views = {0: {}}
    for turn in range(40):
        name = f"p{rng.randrange(6)}"
        if rng.random() < 0.35 and len(storage.templates_of(name).numbers):
            storage.delete(name)
        else:
            storage.enrol(name, units(turn, rng.randint(1, 3)), replace=rng.random() < 0.3)
        views[storage.sequence()] = {n: (name, row) for name, rows in held(storage).items() for n, row in rows.items()}
    assert sorted(views) == list(range(41))
    last = views[40]
    for sequence, view in views.items():
        changes = storage.changes_since(sequence)
        removed, added = changes.removed.tolist(), changes.added.numbers.tolist()
        assert changes.sequence == 40 and len({*removed, *added}) == len(removed) + len(added)
        new = zip(changes.added.identities, [row.tobytes() for row in changes.added.vectors], strict=True)
        followed = {n: v for n, v in view.items() if n not in removed} | dict(zip(added, new, strict=True))
        assert followed == last
    assert storage.changes_since(41) is None and storage.changes_since(-1) is None


def test_compact_forgets_what_is_long_ago_and_says_so(storage, monkeypatch):
    for i in range(6):
        storage.enrol(f"p{i}", units(i, 1), request=f"r{i}")
    storage.delete("p0")
    monkeypatch.setattr(sql, "REMEMBERED", 3)
    before = storage.digest()
    storage.compact()
    assert storage.changes_since(3) is None and storage.changes_since(4).removed.tolist() == [1]
    assert storage.enrol("p5", units(5, 1), request="r5").repeated
    assert storage.digest() == before and storage.check() == []


def test_digest_is_of_the_content_alone(shelf, storage):
    empty = storage.digest()
    storage.enrol("anna", units(1, 3))
    storage.enrol("bert", units(2, 2))
    one = storage.digest()
    storage.enrol("carl", units(3, 1))
    assert len({empty, one, storage.digest()}) == 3
    storage.delete("carl")
    assert storage.digest() == one
    storage.enrol("bert", units(2, 2)[::-1].copy(), replace=True)
    storage.enrol("anna", units(1, 3)[:1], replace=True)
    assert storage.digest() != one, "fewer templates"
    storage.enrol("anna", units(1, 3)[1:])
    assert storage.digest() == one, "order and numbers do not count"
    storage.enrol("anna", units(1, 3)[:1])
    assert storage.digest() != one, "a template twice counts twice"
    swapped = [("anna", units(2, 2)), ("bert", units(1, 3))]
    for name, vectors in swapped:
        storage.enrol(name, vectors, replace=True)
    assert storage.digest() != one, "it matters whose template it is"
    storage.delete("anna")
    storage.delete("bert")
    assert storage.digest() == empty


def test_both_kinds_have_the_same_digest(folder, postgres):
    digests = []
    for shelf in (FileShelf(folder), ServerShelf(postgres)):
        storage = shelf.create(Binding(16))
        for i in range(20) if shelf.kind == "sqlite" else reversed(range(20)):
            storage.enrol(f"p{i}", units(i, 1 + i % 3, 16))
        digests.append(storage.digest())
        storage.close()
    assert digests[0] == digests[1]


def test_check_finds_damaged_rows(shelf, storage):
    for i in range(5):
        storage.enrol(f"p{i}", units(i, 2))
    assert storage.check() == []
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
        found = storage.check()
        assert any(words in line for line in found), (statement, found)
    assert len(found) >= len(damages)
    with pytest.raises(GalleryError, match="template 3"):
        storage.templates_of("p1")
    with pytest.raises(GalleryError, match="checksum"):
        held(storage)


def test_a_newer_format_is_refused(shelf, storage):
    storage.close()
    key = "key = 'format'"
    shelf.sql(f"UPDATE metadata SET value = '99', checksum = {row_checksum('metadata', 'format', '99')} WHERE {key}")
    with pytest.raises(GalleryError, match="upgrade mettle"):
        shelf.open()
    shelf.sql(f"UPDATE metadata SET value = '1', checksum = {row_checksum('metadata', 'format', '1')} WHERE {key}")
    shelf.sql("UPDATE metadata SET value = '[]' WHERE key = 'binding'")
    with pytest.raises(GalleryError, match="damaged"):
        shelf.open(write=False)


def test_a_reader_sees_the_newest_and_changes_nothing(shelf, storage):
    reader = shelf.open(write=False)
    for i in range(3):
        storage.enrol(f"p{i}", units(i, 1))
        assert reader.sequence() == i + 1 and list(reader.ids()) == [f"p{j}" for j in range(i + 1)]
    for call in (lambda: reader.enrol("x", units(1, 1)), lambda: reader.delete("p1"), lambda: reader.compact()):
        with pytest.raises(GalleryError, match="reading"):
            call()
    assert storage.sequence() == 3
    reader.close()


def test_a_closed_record_says_so(storage):
    storage.close()
    storage.close()
    for call in (
        storage.sequence,
        storage.digest,
        lambda: storage.enrol("a", units(1, 1)),
        lambda: list(storage.scan()),
    ):
        with pytest.raises(GalleryError, match="closed"):
            call()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_g7_threads_give_some_serial_order(kind, folder, request):
    shelf = FileShelf(folder) if kind == "sqlite" else ServerShelf(request.getfixturevalue("postgres"))
    storage = shelf.create()
    history, troubles = [], []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        try:
            for turn in range(25):
                name, seed = f"p{rng.randrange(4)}", 1000 * worker + turn
                try:
                    if rng.random() < 0.4:
                        history.append((storage.delete(name), "delete", name, seed))
                    else:
                        swap = rng.random() < 0.3
                        done = storage.enrol(name, units(seed, 2), replace=swap)
                        history.append((done, "replace" if swap else "enrol", name, seed))
                except UnknownIdentity:
                    pass
                sequence = storage.sequence()
                view = storage.changes_since(0)
                assert view.sequence >= sequence
                assert len(storage.templates_of(name).numbers) % 2 == 0, "a change is seen whole or not at all"
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
    assert held(storage) == replayed(history)
    assert storage.check() == []
    storage.close()


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
    """Random operations on a storage and on a dict, with reopening in between: they never differ."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:  # the number of operations counts here, not the disk
        shelf = FileShelf(Path(folder)) if kind == "sqlite" else ServerShelf(request.getfixturevalue("postgres"))
        storage, rng = shelf.create(), random.Random(8)
        people: dict[str, dict[int, bytes]] = {}
        sequence, requests = 0, {}
        for turn in range(operations):
            name, act = f"p{rng.randrange(60)}", rng.random()
            if act < 0.40:
                rows, swap = units(turn, rng.randint(1, 3)), rng.random() < 0.2
                label = f"r{turn}" if rng.random() < 0.3 else None
                receipt = storage.enrol(name, rows, request=label, replace=swap)
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
                    receipt = storage.delete(name)
                    assert receipt.sequence == sequence and set(receipt.numbers) == set(people.pop(name))
                else:
                    with pytest.raises(UnknownIdentity):
                        storage.delete(name)
            elif act < 0.60 and requests:
                label = rng.choice(sorted(requests))
                who, rows, swap, before = requests[label]
                receipt = storage.enrol(who, rows, request=label, replace=swap)
                assert receipt.repeated and receipt.numbers == before.numbers
            elif act < 0.85:
                got = storage.templates_of(name)
                expected = people.get(name, {})
                assert dict(zip(got.numbers.tolist(), [r.tobytes() for r in got.vectors], strict=True)) == expected
            elif act < 0.97:
                size = storage.size()
                assert (size.identities, size.templates) == (len(people), sum(map(len, people.values())))
                assert storage.sequence() == sequence
            elif act < 0.98:
                assert list(storage.ids()) == sorted(people)
            elif act < 0.985:
                storage.compact()
            elif act < 0.99:
                assert held(storage) == people
            else:
                storage.close()
                storage = shelf.open()
        assert held(storage) == people and storage.check() == []
        storage.close()
