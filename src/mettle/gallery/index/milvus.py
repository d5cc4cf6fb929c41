"""Search on a Milvus server: for more templates than one machine holds.

    storage (SQL, the truth) ── changes ──> a collection of Milvus: number and vector of every template
    probe ──> Milvus: numbers of the nearest ──> storage: their vectors and names ──> exact scores

Milvus never has the last word. It proposes numbers; what they are, whose they are and how near they are is read from
the storage after the search. So what was deleted cannot be found, whoever deleted it, and a collection that is behind,
ahead or of another time costs recall and nothing else. Numbers are never used twice and both kinds of changes may be
repeated, so several processes may bring one collection up to date at the same time.

The collection knows up to which change of the storage it has come (`REVISION`); a number that is too old only means
that changes are repeated. Where the storage no longer remembers what changed, or is older than the collection, every
template is compared: what is missing or differs is written, what is not in the storage is deleted, and searches go on
meanwhile.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from mettle.errors import GalleryUnavailable, InputError, MissingExtra
from mettle.gallery.index.base import check_search, empty_result, rank_candidates
from mettle.gallery.index.searchers import FoundRows
from mettle.gallery.index.selection import IndexSpec, as_wanted
from mettle.gallery.results import Templates
from mettle.gallery.storage.base import Storage

REVISION = "mettle.revision"  # property of a collection: up to which change of the storage it has come
RARELY = 256  # changes between two writings of it, each of which is a change of the server's catalogue
AT_ONCE = 8 << 20  # bytes of vectors in one message: a quarter of what servers take
NUMBERS = 4096  # numbers in one message
PROBES = 256  # probes of one search
MOST = 16_384  # candidates of a probe that a server gives
PATIENCE = 10.0  # seconds for a server to answer at first
LOOKS = 5  # at a storage that others are changing
KINDS = {"auto": "AUTOINDEX", "exact": "FLAT", "ivf": "IVF_FLAT", "hnsw": "HNSW"}
BUILD = {"HNSW": {"M": 32, "efConstruction": 200}, "IVF_FLAT": {"nlist": 1024}}


class MilvusSearcher:
    """A collection of Milvus that follows a storage. Every process that searches may also bring it up to date."""

    scores_on_server = False  # the storage's vectors are read and checked, and scored here

    def __init__(self, storage: Storage, address: str, wanted: IndexSpec | None = None):
        if storage.binding.fusion != "best":
            raise InputError(
                f"Milvus searches templates, and this gallery compares with one row per person "
                f"(fusion={storage.binding.fusion!r}): open it without milvus=, or make one with fusion='best'"
            )
        check_address(address)
        self.storage, self.address = storage, hide_password(address)
        self.name = f"mettle_{storage.identity}"
        self.notes: list[str] = []
        self._lock = threading.Lock()
        self._client = _connect(address, self.address)
        self._saved, self._count = -1, (-1, 0)  # rows as of a change of the storage
        self.sequence = -1
        try:
            self._kind = self._open(as_wanted(wanted))
        except BaseException:
            self._client.close()
            raise

    def find_templates(self, probes: np.ndarray, m: int) -> FoundRows:
        """Candidates by Milvus, scored exactly by the storage's own vectors."""
        self.sync()
        sequence = self.sequence
        probes, m = check_search(probes, m, self.storage.binding.dim)
        found, who = empty_result(len(probes), m)
        for start in range(0, len(probes), PROBES):
            part = slice(start, start + PROBES)
            found[part], who[part] = self._find(probes[part], m)
        return FoundRows(found, who, sequence, self.rows())

    def rows(self) -> int:
        """Rows of the collection, counted once per change."""
        if self._count[0] != self.sequence:
            self._count = (self.sequence, self._count_rows())
        return self._count[1]

    def describe(self) -> dict[str, Any]:
        """Kind, size and where it is."""
        return {"kind": f"Milvus, {self._kind}", "rows": self.rows(), "server": self.address}

    def sync(self) -> None:
        """Take in what has happened to the storage."""
        if self.storage.sequence() == self.sequence:
            return
        with self._lock:
            news = self.storage.changes_since(self.sequence) if self.storage.sequence() >= self.sequence >= 0 else None
            if news is None:
                self._reconcile()
                return
            self._delete(news.removed)
            self._upsert(news.added)
            self.sequence = news.sequence
            if self.sequence - self._saved >= RARELY:
                self._write_revision()

    def reindex(self, wanted: IndexSpec | None = None) -> None:
        """Give the collection another index, and compare every template with the storage."""
        kind = _server_kind(as_wanted(wanted))
        with self._lock:
            if kind != self._kind:
                self._call("release_collection")
                self._call("drop_index", index_name="vector")
                self._call("create_index", index_params=self._index(kind))
                self._call("load_collection")
                self._kind = kind
            self._reconcile()

    def erase(self) -> None:
        """Make the collection anew: the server deletes the files of the former one, with what was deleted in them."""
        with self._lock:
            self._call("drop_collection")
            self._make(self._kind)
            self._reconcile()

    def save(self) -> None:
        """Note in the collection how far it has come."""
        with self._lock:
            if self._saved != self.sequence:
                self._write_revision()

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def check(self) -> list[str]:
        """Whether the collection holds exactly the templates that the storage says."""
        found: list[str] = []
        for _ in range(LOOKS):  # a writer beside us may need a second look
            self.sync()
            sequence, wanted, wrong = self.sequence, 0, 0
            for part in self._scan():
                wanted += len(part.numbers)
                wrong += int(np.count_nonzero(self._differs(part)))
            rows = self._count_rows()
            if not wrong and rows == wanted:
                return []
            found = [
                f"Milvus holds {rows} rows, and of {wanted} templates {wrong} are missing there or differ: bring it up "
                "to date (reindex)"
            ]
            if self.storage.sequence() == sequence:
                return found
        return found

    def _count_rows(self) -> int:
        return int(self._call("query", filter="number >= 0", output_fields=["count(*)"])[0]["count(*)"])

    def _open(self, wanted: IndexSpec) -> str:
        """The collection that is there, or a new one; the kind of its index."""
        if not self._call("has_collection"):
            self._make(_server_kind(wanted))
        else:
            self._call("load_collection")
            told = self._call("describe_collection")
            revision = str((told.get("properties") or {}).get(REVISION, ""))
            if revision.isdecimal() and int(revision) <= self.storage.sequence():
                self.sequence = self._saved = int(revision)
            else:
                self.notes.append("Milvus did not say how far its collection has come: compared with the storage")
        indexes = self._call("describe_index", index_name="vector") or {}
        self.sync()
        return str(indexes.get("index_type", "AUTOINDEX"))

    def _make(self, kind: str) -> None:
        types = importlib.import_module("pymilvus").DataType
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("number", types.INT64, is_primary=True)
        schema.add_field("vector", types.FLOAT_VECTOR, dim=self.storage.binding.dim)
        self._call("create_collection", schema=schema, index_params=self._index(kind), consistency_level="Strong")
        self.sequence = self._saved = -1

    def _index(self, kind: str) -> Any:
        found = self._client.prepare_index_params()
        found.add_index("vector", index_type=kind, index_name="vector", metric_type="IP", params=BUILD.get(kind, {}))
        return found

    def _find(self, probes: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        limit = min(m, MOST)
        effort = {"HNSW": {"ef": max(100, 2 * limit)}, "IVF_FLAT": {"nprobe": 64}}.get(self._kind, {})
        options: dict[str, Any] = {"limit": limit, "anns_field": "vector", "output_fields": ["number"]}
        told = self._call("search", data=list(probes), search_params={"metric_type": "IP", "params": effort}, **options)
        numbers = np.full((len(probes), limit), -1, np.int64)
        for row, hits in zip(numbers, told, strict=True):
            row[: len(hits)] = [int(hit["number"]) for hit in hits]
        theirs = self.storage.templates_at(np.unique(numbers[numbers >= 0]))
        scores = np.full(numbers.shape, -np.inf, np.float32)
        if len(theirs.numbers):
            at = np.minimum(np.searchsorted(theirs.numbers, numbers), len(theirs.numbers) - 1)
            known = theirs.numbers[at] == numbers
            exact = np.einsum("pmd,pd->pm", theirs.vectors[at], probes)
            scores[known] = exact[known]
        return rank_candidates(scores, numbers, m)

    def _reconcile(self) -> None:
        """Make the collection hold what the storage holds, and nothing else, while others search it."""
        sequence = self.storage.sequence()  # before the scan: what comes in between is taken in once more
        for part in self._scan():
            change = self._differs(part)
            names = tuple(name for name, new in zip(part.identities, change, strict=True) if new)
            self._upsert(Templates(part.numbers[change], names, part.vectors[change], part.checksums[change]))
        for numbers in self._numbers():
            known = self.storage.names_of(numbers)  # asked now: what another process has enrolled meanwhile stays
            self._delete(numbers[np.asarray([name is None for name in known], bool)])
        self.sequence = sequence
        self._write_revision()

    def _scan(self) -> Iterator[Templates]:
        return (part for part in self.storage.scan(batch=NUMBERS) if len(part.numbers))

    def _numbers(self) -> Iterator[np.ndarray]:
        """All numbers that the collection holds."""
        pages = self._call("query_iterator", batch_size=NUMBERS, filter="number >= 0", output_fields=["number"])
        while page := _run(pages.next, self.address):
            yield np.asarray([int(row["number"]) for row in page], np.int64)
        pages.close()

    def _differs(self, part: Templates) -> np.ndarray:
        """Which of these templates the collection does not hold as they are."""
        differs = np.ones(len(part.numbers), bool)
        for start in range(0, len(differs), step := self._step()):
            piece = slice(start, start + step)
            told = self._call("get", ids=part.numbers[piece].tolist(), output_fields=["number", "vector"])
            if told:
                numbers = np.asarray([int(row["number"]) for row in told], np.int64)
                vectors = np.asarray([row["vector"] for row in told], np.float32)
                at = np.searchsorted(part.numbers, numbers)
                differs[at] = (vectors != part.vectors[at]).any(1)
        return differs

    def _upsert(self, added: Templates) -> None:
        for start in range(0, len(added.numbers), step := self._step()):
            piece = slice(start, start + step)
            rows = zip(added.numbers[piece].tolist(), added.vectors[piece], strict=True)
            self._call("upsert", data=[{"number": number, "vector": vector} for number, vector in rows])

    def _delete(self, numbers: np.ndarray) -> None:
        for start in range(0, len(numbers), NUMBERS):
            self._call("delete", ids=numbers[start : start + NUMBERS].tolist())

    def _step(self) -> int:
        return max(1, min(NUMBERS, AT_ONCE // (4 * self.storage.binding.dim)))

    def _write_revision(self) -> None:
        self._call("alter_collection_properties", properties={REVISION: str(self.sequence)})
        self._saved = self.sequence

    def _call(self, name: str, **options: Any) -> Any:
        """A call of the client about the collection; what goes wrong on the way is said as one line."""
        return _run(partial(getattr(self._client, name), collection_name=self.name, **options), self.address)


def check_address(address: object) -> None:
    """Refuse what names no server, before anything is made."""
    if not isinstance(address, str) or not (address.startswith(("http://", "https://")) or address.endswith(".db")):
        raise InputError(
            "milvus must be the address of a server, http://user:password@host:19530, or for trying it out a file "
            f"NAME.db: got {type(address).__name__ if not isinstance(address, str) else hide_password(address)!r}"
        )


def hide_password(address: str) -> str:
    """An address without user and password."""
    parts = urlsplit(address)
    if "@" not in parts.netloc:
        return address
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, parts.fragment))


def _connect(address: str, shown: str) -> Any:
    """A client of the server at an address, or of the embedded one in a file that ends in .db."""
    try:
        client = importlib.import_module("pymilvus").MilvusClient
    except ImportError:
        raise MissingExtra("search on Milvus needs pymilvus: pip install 'mettle-ml[milvus]'") from None
    parts, login = urlsplit(address), {}
    if parts.username:
        login = {"user": unquote(parts.username), "password": unquote(parts.password or "")}
    return _run(partial(client, uri=shown, timeout=PATIENCE, **login), shown)


def _run(call: Callable[[], Any], shown: str) -> Any:
    """What a call of the client gives; what goes wrong on the way is one line."""
    try:
        return call()
    except Exception as problem:  # of the client and of what it is built on, without a common base
        said = " ".join(str(getattr(problem, "message", "") or problem).split())[:200]
        raise GalleryUnavailable(
            f"Milvus at {shown} cannot be asked ({said}): see that it runs and try again; nothing that was enrolled is "
            "lost"
        ) from problem


def _server_kind(wanted: IndexSpec) -> str:
    if wanted.kind not in KINDS:
        raise InputError(f"Milvus has the indexes {', '.join(KINDS)}: ask for one of these, not {wanted.kind!r}")
    return KINDS[wanted.kind]
