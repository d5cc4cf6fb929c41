"""The storage on a real PostgreSQL: many writers, restarts, silence, wrong passwords, missing parts."""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import psycopg
import pytest
import writer
from proxy import Proxy
from storage_fixtures import PATIENT, ServerShelf, units
from test_storage import held, replayed

from mettle.errors import GalleryError, GalleryUnavailable, InputError, MettleError, OutcomeUnknown
from mettle.gallery.binding import Binding
from mettle.gallery.results import Receipt
from mettle.gallery.storage.postgres import PostgresStorage, parse_address

WRITER = str(Path(writer.__file__))
BUSY = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'mettle'"


@pytest.fixture
def shelf(postgres):
    return ServerShelf(postgres)


@pytest.fixture
def proxy(postgres):
    with tempfile.TemporaryDirectory(prefix="px-") as folder:
        line = Proxy(Path(folder), Path(postgres.socket))
        yield line
        line.close()


def refused(call, kind: type[MettleError], *words: str, secret: str = "hush") -> str:
    """The one line that a call fails with."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    text, error = str(caught.value), caught.value
    assert "\n" not in text and secret not in text and all(word in text for word in words), text
    while error is not None:  # nothing that a traceback would show holds it either
        assert secret not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text


def test_the_wrong_door_is_named(postgres):
    inside = postgres.url(user="locked:hush")
    assert PostgresStorage.exists(inside) is False, "the right password opens"
    for user in ("locked:wrong", "locked", "nobody"):
        url = postgres.url(user=user)
        refused(lambda url=url: PostgresStorage.open(url), GalleryError, "user and password", secret="wrong")
    for secret in ("s3cr3t", "p@ss/w?rd", "x y"):
        url = postgres.url(user=f"locked:{quote(secret, safe='')}")
        refused(lambda url=url: PostgresStorage.open(url), GalleryError, "password", secret=secret)
    refused(lambda: PostgresStorage.open(postgres.url(database="nowhere", user="locked:hush")), GalleryError, "nowhere")
    for host in ("/nowhere", "127.0.0.1:1", "no-such-host.invalid"):
        url = f"postgresql://locked:hush@{host}/x" if host[0] != "/" else postgres.url(host=host, user="locked:hush")
        refused(lambda url=url: PostgresStorage.open(url), GalleryUnavailable, "host and port")
    for url in ("mysql://hush@x", "people.mettle", "", None, 7):
        refused(lambda url=url: PostgresStorage.open(url), InputError, "postgresql://")
    for url in ("postgresql://u:hush@[x/y", "postgresql://u:hush@h/%zz", "postgresql://u:hush@h/x?nonsense=hush"):
        refused(lambda url=url: PostgresStorage.open(url), InputError, "URL")
    with pytest.raises(InputError, match="timeout"):
        PostgresStorage.open(inside, timeout=0)


def test_a_wrong_password_is_sent_once(postgres):
    def count() -> int:
        return (postgres.folder / "log").read_text().count("password authentication failed")

    before = count()
    for turn in range(1, 3):
        url = postgres.url(user="locked:wrong")
        refused(lambda url=url: PostgresStorage.open(url), GalleryError, "user and password", secret="wrong")
        time.sleep(0.3)  # in which the pool would try again
        assert count() == before + turn


def test_a_missing_gallery_is_named(postgres, shelf):
    assert not PostgresStorage.exists(shelf.url)
    refused(shelf.open, GalleryError, shelf.name)
    shelf.create().close()
    assert PostgresStorage.exists(shelf.url)
    postgres.sql("CREATE SCHEMA somebody")
    assert not PostgresStorage.exists(postgres.url("somebody"))
    refused(lambda: PostgresStorage.create(postgres.url("somebody"), Binding(8)), GalleryError, "somebody", "another")
    storage = shelf.open()
    storage.enrol("anna", units(1, 1))
    postgres.sql(f'DROP SCHEMA "{shelf.name}" CASCADE')
    refused(lambda: storage.enrol("bert", units(1, 1)), GalleryError, shelf.name)
    refused(storage.size, GalleryError, shelf.name)
    storage.close()


def test_a_missing_extension_is_named(postgres):
    postgres.sql("CREATE DATABASE bare")
    postgres.sql("ALTER DATABASE bare SET extension_control_path = '/nowhere'")
    url = postgres.url(database="bare")
    refused(lambda: PostgresStorage.create(url, Binding(8)), GalleryError, "pgvector", "CREATE EXTENSION vector")
    postgres.sql("ALTER DATABASE bare RESET extension_control_path")
    postgres.sql("CREATE ROLE guest LOGIN")
    guest = postgres.url(database="bare", user="guest")
    refused(lambda: PostgresStorage.create(guest, Binding(8)), GalleryError, "pgvector", "may not")
    postgres.sql("CREATE EXTENSION vector", database="bare")
    refused(lambda: PostgresStorage.create(guest, Binding(8)), GalleryError, "rights")
    postgres.sql("GRANT CREATE ON DATABASE bare TO guest")
    storage = PostgresStorage.create(guest, Binding(8))
    storage.enrol("anna", units(1, 1))
    assert storage.search(units(1, 1), 1)[1].tolist() == [[1]]
    storage.close()


def test_the_extension_may_live_in_another_schema(postgres):
    postgres.sql("CREATE DATABASE tidy")
    postgres.sql("CREATE SCHEMA extensions", database="tidy")
    postgres.sql("CREATE EXTENSION vector SCHEMA extensions", database="tidy")
    storage = PostgresStorage.create(postgres.url(database="tidy"), Binding(8))
    storage.enrol("anna", units(1, 1))
    assert storage.search(units(1, 1), 1)[1].tolist() == [[1]] and storage.check() == []
    storage.close()


def test_rights_that_are_missing_on_the_extension_are_named(postgres):
    postgres.sql("CREATE DATABASE apart")
    postgres.sql("CREATE SCHEMA ext", database="apart")
    postgres.sql("CREATE EXTENSION vector SCHEMA ext", database="apart")
    PostgresStorage.create(postgres.url("people", database="apart"), Binding(8)).close()
    postgres.sql("CREATE ROLE low LOGIN")
    postgres.sql("GRANT USAGE ON SCHEMA people TO low", database="apart")
    postgres.sql("GRANT ALL ON ALL TABLES IN SCHEMA people TO low", database="apart")
    url = postgres.url("people", database="apart", user="low")
    refused(lambda: PostgresStorage.open(url), GalleryError, "'low'", "'ext'", "ask for the rights")
    postgres.sql("GRANT USAGE ON SCHEMA ext TO low", database="apart")
    storage = PostgresStorage.open(url)
    storage.enrol("anna", units(1, 1))
    storage.close()


def test_who_finds_too_many_connections_waits_for_one_of_ours(postgres, shelf):
    shelf.create().close()
    postgres.sql("CREATE ROLE single LOGIN CONNECTION LIMIT 1")
    postgres.sql(f'GRANT USAGE ON SCHEMA "{shelf.name}" TO single')
    postgres.sql(f'GRANT ALL ON ALL TABLES IN SCHEMA "{shelf.name}" TO single')
    url = postgres.url(shelf.name, user="single")
    storage, said = PostgresStorage.open(url, timeout=PATIENT), []

    def ask() -> None:
        try:
            said.append(storage.names_of([1]))
        except MettleError as error:
            said.append(error)

    with storage._server.connection():
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.7)  # so that attempts at more connections fail
        refused(lambda: PostgresStorage.open(url), GalleryUnavailable, "too many connections")
    for thread in threads:
        thread.join(100)
    assert said == [[None]] * 4
    storage.close()
    hurried = PostgresStorage.open(url, timeout=0.1)
    with hurried._server.connection():
        refused(lambda: hurried.names_of([1]), GalleryUnavailable, "too many connections")
    hurried.close()


def test_a_database_of_another_encoding_is_refused(postgres):
    postgres.sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    refused(lambda: PostgresStorage.create(postgres.url(database="latin"), Binding(8)), GalleryError, "LATIN1", "UTF8")


@pytest.mark.parametrize("missing", ["psycopg", "psycopg_pool", "pgvector"])
def test_a_missing_driver_is_named(missing):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nfrom mettle.errors import MissingExtra\n"
        "from mettle.gallery.storage.postgres import PostgresStorage\n"
        "try:\n    PostgresStorage.open('postgresql://u:hush@h/x')\n"
        "except MissingExtra as error:\n    assert 'psycopg[binary,pool]' in str(error)\nelse:\n    sys.exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_the_url_names_the_gallery():
    base = "postgresql://u:p%40@h:5/db"
    assert parse_address(f"{base}?gallery=people&sslmode=disable") == (f"{base}?sslmode=disable", "people")
    assert parse_address(base) == (base, "mettle") and parse_address(base, "x")[1] == "x"
    for name in ("public", "pg_x", "information_schema", "a b", 'a"b', "ä", "x" * 64, "1a"):
        with pytest.raises(InputError, match="named by"):
            parse_address(base, name)


def test_galleries_of_one_database_do_not_see_each_other(postgres):
    first, second = ServerShelf(postgres), ServerShelf(postgres)
    one, two = first.create(), second.create(Binding(16))
    one.enrol("anna", units(1, 1))
    two.enrol("bert", units(2, 1, 16))
    assert list(one.ids()) == ["anna"] and list(two.ids()) == ["bert"] and two.binding.dim == 16
    one.close()
    two.close()


@pytest.mark.parametrize(("dim", "rows"), [(1, 1), (512, 1500), (3000, 2)])
def test_any_width_and_any_number_come_back(shelf, dim, rows):
    storage = shelf.create(Binding(dim))
    storage.enrol("anna", units(1, rows, dim))
    assert storage.templates_of("anna").vectors.tobytes() == units(1, rows, dim).tobytes()
    assert storage.search(units(1, rows, dim)[:1], 1)[1].tolist() == [[1]] or dim == 1
    assert storage.bytes() > 4 * dim * rows
    if dim > 2000:
        with pytest.raises(InputError, match="2000"):
            storage.set_index("hnsw")
    storage.close()
    with pytest.raises(InputError, match="16000"):
        PostgresStorage.create(shelf.url, Binding(16001))


def test_search_on_the_server_equals_a_plain_product(shelf):
    storage = shelf.create(Binding(32))
    templates, probes = units(1, 300, 32), units(2, 5, 32)
    templates[200:205] = templates[7]  # ties: the smaller number first
    for i in range(0, 300, 10):
        storage.enrol(f"p{i}", templates[i : i + 10])
    storage.delete("p30")
    live = np.array([i for i in range(300) if not 30 <= i < 40])
    probes[0] = templates[7]
    cosines = probes.astype(np.float64) @ templates[live].astype(np.float64).T
    scores, numbers, sequence, rows = storage.search(probes, 20)
    assert (sequence, rows) == (31, 290)
    assert scores.dtype == np.float32 and numbers.dtype == np.int64 and scores.shape == numbers.shape == (5, 20)
    for row in range(5):
        order = np.lexsort((live, -np.round(cosines[row], 6)))[:20]
        np.testing.assert_allclose(scores[row], cosines[row][order], atol=1e-6)
        assert numbers[row].tolist() == (live[order] + 1).tolist()
    scores, numbers = storage.search(probes, 400)[:2]
    assert (numbers[:, 290:] == -1).all() and (scores[:, 290:] == -np.inf).all() and (numbers[:, :290] > 0).all()
    for bad in (np.full((1, 32), np.nan, np.float32), units(1, 1, 31), np.zeros((1, 32), np.float32)):
        with pytest.raises(InputError, match="probes"):
            storage.search(bad, 3)
    with pytest.raises(InputError, match="k must"):
        storage.search(probes, 0)
    exact = storage.search(probes, 10)[1]
    storage.set_index("hnsw")
    near = storage.search(probes, 10)[1]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact.tolist(), near.tolist(), strict=True)]) >= 0.9
    storage.delete("p0")
    assert not set(range(1, 11)) & set(storage.search(probes, 300)[1].ravel().tolist())
    storage.set_index("exact")
    with pytest.raises(InputError, match="exact, hnsw"):
        storage.set_index("ivf")
    storage.close()


def test_g12_an_empty_gallery_finds_nothing(shelf):
    storage = shelf.create()
    scores, numbers = storage.search(units(1, 2), 3)[:2]
    assert (numbers == -1).all() and (scores == -np.inf).all()
    storage.close()


def test_g7_processes_write_at_once_and_one_is_killed(postgres, shelf):
    shelf.create().close()
    command = [sys.executable, WRITER, shelf.url]
    writers = [
        subprocess.Popen([*command, str(worker), "25"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for worker in range(3)
    ]
    victim = subprocess.Popen([*command, "9", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    spoken = [victim.stdout.readline() for _ in range(15)]
    os.kill(victim.pid, signal.SIGKILL)
    spoken += victim.stdout  # not `communicate`: that forgets lines which were read ahead with the last of these
    victim.communicate()
    lines = [json.loads(line) for line in spoken]
    for child in writers:
        out, errors = child.communicate(timeout=240)
        assert child.returncode == 0, errors
        lines += [json.loads(line) for line in out.splitlines()]
    done = [line["done"] for line in lines if "done" in line]
    _until(lambda: postgres.sql(BUSY) == [(0,)])  # the server may be about to make the victim's last change
    storage = shelf.open()
    history = {entry[0]: (Receipt(entry[0], tuple(entry[1])), *entry[2:]) for entry in done}
    assert len(history) == len(done), "two changes have one sequence number"
    total = storage.sequence()
    missing = sorted(set(range(1, total + 1)) - set(history))
    assert len(missing) <= 1 and set(history) <= set(range(1, total + 1)), "only the killed one's last is unspoken"
    if missing:  # committed, but its writer died before it could say so: read it from the storage itself
        verb, name, seed = next(line["try"] for line in reversed(lines[: len(spoken)]) if "try" in line)
        before = replayed([history[i] for i in range(1, missing[0])])
        added = [entry[0].numbers for at, entry in history.items() if at < missing[0] and entry[1] != "delete"]
        last = max((max(numbers) for numbers in added), default=0)
        numbers = sorted(before[name]) if verb == "delete" else [last + 1, last + 2]
        history[missing[0]] = (Receipt(missing[0], tuple(numbers)), verb, name, seed)
    assert held(storage) == replayed([history[i] for i in range(1, total + 1)])
    assert storage.check() == []
    storage.close()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_g14_a_server_restarted_during_enrolment_loses_nothing(postgres, shelf, mode):
    storage = shelf.create()
    receipts, unavailable, stop = {}, [], threading.Event()

    def enrol() -> None:
        turn = 0
        while not stop.is_set() or turn < 20:
            try:
                receipts[turn] = storage.enrol(f"p{turn}", units(turn, 2), request=f"r{turn}")
                turn += 1
            except GalleryUnavailable as error:
                unavailable.append(str(error))
                time.sleep(0.05)

    thread = threading.Thread(target=enrol)
    thread.start()
    _until(lambda: len(receipts) >= 5)
    postgres.restart(mode)
    before = len(receipts)
    _until(lambda: len(receipts) >= before + 5)
    stop.set()
    thread.join(200)
    assert not thread.is_alive() and len(receipts) >= 20
    assert sorted(r.sequence for r in receipts.values()) == list(range(1, len(receipts) + 1)), "doubled or lost"
    people = held(storage)
    assert {name: sorted(rows.values()) for name, rows in people.items()} == {
        f"p{turn}": sorted(row.tobytes() for row in units(turn, 2)) for turn in receipts
    }
    assert all("\n" not in text for text in unavailable)
    storage.close()


def test_g14_a_stopped_server_is_unavailable_and_comes_back(postgres, shelf):
    storage = shelf.create()
    storage.enrol("anna", units(1, 1), request="r1")
    postgres.control("-m", "fast", "stop")
    try:
        refused(lambda: storage.enrol("bert", units(2, 1), request="r2"), GalleryUnavailable)
        refused(storage.sequence, GalleryUnavailable)
        refused(lambda: list(storage.scan()), GalleryUnavailable)
        refused(shelf.open, GalleryUnavailable)
    finally:
        postgres.start()
    assert storage.sequence() == 1 and list(storage.ids()) == ["anna"]
    assert not storage.enrol("bert", units(2, 1), request="r2").repeated
    assert storage.enrol("anna", units(1, 1), request="r1").repeated
    storage.close()


@pytest.mark.parametrize("request_name", ["mine", None])
@pytest.mark.parametrize("fault", ["cut before commit", "cut after commit"])
def test_g14_a_line_cut_at_the_commit_neither_loses_nor_doubles(postgres, shelf, proxy, fault, request_name):
    """The worst moment: whether the commit was made is known to the server only."""
    shelf.create().close()
    storage = PostgresStorage.open(postgres.url(shelf.name, host=str(proxy.folder)), timeout=PATIENT)
    storage.enrol("anna", units(1, 1))
    for turn in range(3):
        proxy.fault = fault
        receipt = storage.enrol("anna", units(2 + turn, 2), request=request_name and f"{request_name}{turn}")
        assert proxy.happened == turn + 1, "the line was not cut: this test saw nothing"
        assert receipt.sequence == 2 + turn and len(storage.templates_of("anna").numbers) == 3 + 2 * turn
        assert receipt.repeated is (request_name is not None and fault == "cut after commit")
    proxy.fault = fault
    assert storage.delete("anna").sequence == 5 and storage.size().identities == 0
    storage.close()


def test_g14_a_line_cut_at_a_commit_that_cannot_be_asked_about_says_so(postgres, shelf, proxy):
    shelf.create().close()
    storage = _served(lambda: PostgresStorage.open(postgres.url(shelf.name, host=str(proxy.folder)), timeout=2))
    _served(lambda: storage.enrol("anna", units(1, 1), request="r1"))
    while not proxy.happened:  # a busy machine may be silent for two seconds before it comes to the commit
        proxy.fault, proxy.after = "cut after commit", "freeze"
        with pytest.raises(OutcomeUnknown) as caught:
            storage.enrol("bert", units(2, 1), request="r2")
    refused(lambda: _raise(caught.value), OutcomeUnknown, "same request name")
    proxy.fault = proxy.after = ""
    assert _served(lambda: storage.enrol("bert", units(2, 1), request="r2")).repeated
    assert _served(storage.sequence) == 2
    storage.close()


@pytest.mark.parametrize("answer", ["closed", "no such gallery"])
def test_g14_whatever_the_second_attempt_meets_the_first_one_stays_unknown(postgres, shelf, proxy, answer):
    shelf.create().close()
    storage = PostgresStorage.open(postgres.url(shelf.name, host=str(proxy.folder)), timeout=PATIENT)
    drop = storage._server.drop_idle_connections

    def meanwhile() -> None:
        drop()
        storage.close() if answer == "closed" else postgres.sql(f'DROP SCHEMA "{shelf.name}" CASCADE')

    storage._server.drop_idle_connections = meanwhile
    proxy.fault = "cut after commit"
    refused(lambda: storage.enrol("anna", units(1, 1), request="r"), OutcomeUnknown, "same request name")
    assert proxy.happened == 1, "the line was not cut: this test saw nothing"
    storage.close()


def _raise(error: Exception) -> None:
    raise error


def _until(true, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)


def _served(call, seconds: float = 120.0):
    """What it answers once it does: with a short limit on time, a busy machine may seem to be silent now and then."""
    end = time.monotonic() + seconds
    while True:
        try:
            return call()
        except GalleryUnavailable:
            if time.monotonic() > end:
                raise


def test_g14_a_silent_server_is_given_up_in_time(postgres, shelf, proxy):
    shelf.create().close()
    storage = _served(lambda: PostgresStorage.open(postgres.url(shelf.name, host=str(proxy.folder)), timeout=1))
    _served(lambda: storage.enrol("anna", units(1, 1), request="r0"))
    proxy.fault = "freeze"
    for call in (lambda: storage.enrol("bert", units(2, 1), request="r"), storage.size):
        started = time.monotonic()
        refused(call, GalleryUnavailable)
        assert time.monotonic() - started < 30
    proxy.fault = ""
    assert _served(storage.size).identities == 1
    storage.close()
    patient = shelf.open()
    assert not patient.enrol("bert", units(2, 1), request="r").repeated
    patient.close()


def test_g14_a_writer_that_hangs_does_not_hang_the_others(postgres, shelf):
    shelf.create().close()
    storage = _served(lambda: PostgresStorage.open(shelf.url, timeout=0.5))
    with psycopg.connect(postgres.url()) as other:
        other.execute(f'SELECT 1 FROM "{shelf.name}".revision_state FOR UPDATE')
        refused(lambda: storage.enrol("anna", units(1, 1)), GalleryUnavailable, "nothing was changed")
        assert _served(storage.sequence) == 0, "readers go on"
    assert _served(lambda: storage.enrol("anna", units(1, 1), request="r")).sequence == 1
    storage.close()


def test_g3_a_server_that_only_reads_is_unavailable(postgres, shelf):
    shelf.create().close()
    postgres.sql("ALTER ROLE postgres SET default_transaction_read_only = on")
    try:
        storage = shelf.open()
        refused(lambda: storage.enrol("anna", units(1, 1)), GalleryUnavailable)
        assert storage.size().identities == 0
        storage.close()
    finally:
        with psycopg.connect(postgres.url(), autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("ALTER ROLE postgres RESET default_transaction_read_only")


def test_commits_are_synchronous_whatever_the_role_says(postgres, shelf):
    postgres.sql("ALTER ROLE postgres SET synchronous_commit = off")
    try:
        storage = shelf.create()
        assert storage._run_read(lambda s: s.execute("SHOW synchronous_commit")) == [("on",)]
        storage.close()
    finally:
        postgres.sql("ALTER ROLE postgres RESET synchronous_commit")


def test_connections_are_kept_and_few(postgres, shelf):
    storage = shelf.create()
    for turn in range(20):
        storage.enrol(f"p{turn}", units(turn, 1))
        with pytest.raises(GalleryError):
            storage.delete("nobody")
    _until(lambda: postgres.sql(BUSY) == [(1,)])  # those of the tests before this one are leaving
    assert postgres.sql(BUSY) == [(1,)]
    storage.close()
    _until(lambda: postgres.sql(BUSY) == [(0,)])
    assert postgres.sql(BUSY) == [(0,)]


def in_child(work) -> str:
    """What a forked child says of a piece of work: its answer or its error."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as line:
        said = line.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of later Pythons, about a fork beside threads
def test_a_forked_child_makes_connections_of_its_own(postgres, shelf):
    storage = shelf.create()
    storage.enrol("anna", units(1, 2))
    own = "SELECT pg_backend_pid()"

    def backend() -> int:
        return storage._run_read(lambda session: session.execute(own))[0][0]

    mine = backend()
    theirs = in_child(backend)  # with an idle connection in the parent's pool
    assert theirs.isdigit() and int(theirs) != mine == backend()
    scan = storage.scan(batch=1)
    assert next(scan).numbers.tolist() == [1]  # the only connection is in use now
    assert in_child(backend).isdigit()
    assert in_child(lambda: next(scan)).startswith("GalleryUnavailable"), "it is the parent's"
    assert in_child(scan.close) == "None"
    assert next(scan).numbers.tolist() == [2] and next(scan, None) is None
    assert in_child(lambda: (storage.close(), storage.close())) == "(None, None)"
    assert in_child(lambda: (storage.enrol("bert", units(2, 1)).sequence, storage.close())) == "(2, None)"
    assert list(storage.ids()) == ["anna", "bert"] and backend() == mine
    storage.close()
    assert in_child(storage.sequence).startswith("GalleryError") and "closed" in in_child(storage.sequence)


def test_servers_add_no_handlers_to_the_log(postgres, shelf):
    before = list(logging.getLogger("psycopg.pool").handlers)
    for _ in range(3):
        PostgresStorage.exists(shelf.url)
    assert logging.getLogger("psycopg.pool").handlers == before


def test_g9_compact_erases_deleted_templates_from_the_tables(postgres, shelf):
    storage = shelf.create(Binding(128))
    for turn in range(30):
        storage.enrol(f"person number {turn} of the gallery", units(turn, 2, 128))
    storage.set_index("hnsw")
    for turn in range(0, 30, 2):
        storage.delete(f"person number {turn} of the gallery")

    def found() -> int:
        postgres.sql("CHECKPOINT")
        sql = "SELECT pg_relation_filepath(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE "
        paths = [row[0] for row in postgres.sql(f"{sql} n.nspname = %s AND c.relkind IN ('r', 'i')", shelf.name)]
        content = b"".join((postgres.folder / path).read_bytes() for path in paths)
        rows = [row.astype(">f4").tobytes() for turn in range(0, 30, 2) for row in units(turn, 2, 128)]
        rows += [row.tobytes() for turn in range(0, 30, 2) for row in units(turn, 2, 128)]
        names = [f"person number {turn} of the gallery".encode() for turn in range(0, 30, 2)]
        return sum(piece in content for piece in [*rows, *names])

    assert found(), "before, the tables hold them: otherwise this test sees nothing"
    with psycopg.connect(postgres.url()) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1 FROM pg_class")
        storage.delete("person number 1 of the gallery")
        refused(storage.compact, GalleryUnavailable, "compact again")
    storage.compact()
    assert found() == 0 and storage.check() == [] and storage.size().identities == 14
    storage.close()
