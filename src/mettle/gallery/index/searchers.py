"""Finding rows near a probe: in an index that follows the storage, or on the storage's own server.

    storage ── changes ──> Local: rows in an index in memory, kept on disk as a checksummed view
    storage.search ──────> Remote: PostgreSQL does it

An index is never trusted over the storage: it is brought up to date before every search, names come from the storage
afterwards, so what has been deleted cannot be found, by whomever it was deleted.

A lock for one writer or many readers: searches run side by side, a change waits for them and they for it.

The best people of each probe: rows that a search finds, under the names that the storage gives.

Search in an index in memory, which follows the storage and is kept on disk for the next opening.

Search on the storage's own server.
"""

import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mettle.atomic_files import sync_folder
from mettle.errors import GalleryError, GalleryUnavailable
from mettle.gallery.index.base import Index
from mettle.gallery.index.exact import ExactIndex
from mettle.gallery.index.persistence import (
    MANIFEST,
    PRIVATE,
    IndexManifest,
    IndexMismatch,
    load_index,
    restrict_modes,
    save_index,
)
from mettle.gallery.index.selection import IndexBenchmark, IndexSpec, as_wanted, build_index, has_outgrown
from mettle.gallery.results import Changes, Size, Templates
from mettle.gallery.scoring import fused_rows
from mettle.gallery.storage.base import Storage
from mettle.gallery.storage.integrity import RevisionState, RowSum, damage_error
from mettle.gallery.storage.location import RECORD
from mettle.gallery.storage.postgres import PostgresStorage


@dataclass(frozen=True, eq=False)
class FoundRows:
    """What a search found, and in what."""

    scores: np.ndarray  # (p, m) best first, padded by -inf
    numbers: np.ndarray  # (p, m) of the rows, padded by -1
    sequence: int  # the change of the storage up to which the rows were known
    rows: int  # how many there are to find


class Searcher(Protocol):
    """Where the rows of people are looked for."""

    scores_on_server: bool  # by the vectors as they are on its disk at that moment

    def find_templates(self, probes: np.ndarray, m: int) -> FoundRows:
        """The m rows nearest to each probe."""
        ...

    def describe(self) -> dict[str, Any]:
        """What is known of it."""
        ...

    @property
    def notes(self) -> list[str]:
        """What was found odd on opening."""
        ...

    def reindex(self, wanted: IndexSpec | None = None) -> IndexBenchmark | None:
        """Choose and build the index anew; what was measured, where it is measured."""
        ...

    def erase(self) -> None:
        """Drop what the index still holds of deleted templates from disk."""
        ...

    def save(self) -> None:
        """Keep the index for the next opening."""
        ...

    def check(self) -> list[str]:
        """What is wrong with it, in words."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class ReadWriteLock:
    """Readers share, writers exclude; a waiting writer goes before new readers, so that changes are never starved."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = self._waiting = 0
        self._writing = False

    @contextmanager
    def hold_shared(self) -> Iterator[None]:
        """Beside other readers."""
        with self._condition:
            while self._writing or self._waiting:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                if self._waiting and not self._readers:
                    self._condition.notify_all()

    @contextmanager
    def hold_exclusive(self) -> Iterator[None]:
        """Alone."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._writing and not self._readers)
            finally:
                self._waiting -= 1
                self._condition.notify_all()  # readers that let a writer go first, where it gave up
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()


TRIES = 5  # searches of one answer, where the people found are being changed


class IdentitySearch:
    """Who comes near a probe, and among how many."""

    def __init__(self, storage: Storage, search: Searcher):
        self._storage, self._search = storage, search

    def top_identities(self, probes: np.ndarray, k: int) -> tuple[list[list[tuple[str, float]]], Size]:
        """The best k people of each probe, with scores: as many rows as it takes to see k different ones."""
        m, tries = k, 0
        found: list[list[tuple[str, float]]] = [[] for _ in probes]
        pending = np.arange(len(probes))
        while True:
            rows = self._search.find_templates(probes[pending], m)
            known = sorted({*rows.numbers.ravel().tolist()} - {-1})
            # A score is as good as the row that it was made of: one made elsewhere is checked after every search.
            state, owners = self._storage.owners(known, anew=self._search.scores_on_server)
            if None in owners and state.sequence == rows.sequence:
                raise damage_error(f"template {known[owners.index(None)]} is not where it was")
            if None in owners and tries < TRIES:  # changed since the search, which follows when asked again
                tries += 1
                continue
            names, short = dict(zip(known, owners, strict=True)), []
            for row, probe in enumerate(pending.tolist()):
                found[probe] = distinct_identities(rows.numbers[row], rows.scores[row], names)[:k]
                if len(found[probe]) < k:
                    short.append(probe)
            pending = np.asarray(short, np.int64)
            if m >= rows.rows or not short:
                return found, Size(state.identities, state.templates)
            m = min(4 * m, max(rows.rows, 1))


def distinct_identities(
    numbers: np.ndarray, scores: np.ndarray, names: Mapping[int, str | None]
) -> list[tuple[str, float]]:
    """People in the order of their best row; rows of people deleted meanwhile have no name and are left out."""
    best: dict[str, float] = {}
    for number, score in zip(numbers.tolist(), scores.clip(-1, 1).tolist(), strict=True):
        name = names.get(number)  # -1 is nobody's
        if name is not None and score != score:
            raise damage_error(f"template {number} has a score that is not a number")
        if name is not None and name not in best:
            best[name] = score
    return list(best.items())


LOOKS = 5  # at a storage that others are changing


QUICK = 20_000  # rows: up to here a gallery measures and chooses its index whenever it opens without one


INCOMPLETE = "changes that the storage tells of are damaged; the index was built again from all templates: check it"


class FaissSearcher:
    """An index in memory that follows the storage.

    With the rule ``best`` its rows are the templates, and it is kept on disk. With any other it has one row per person,
    made when the gallery is opened and numbered by the newest template of that person.
    """

    scores_on_server = False

    def __init__(self, storage: Storage, folder: Path | None, wanted: IndexSpec, write: bool = True):
        self.storage, self.folder, self.wanted, self.write = storage, folder, wanted, write
        self.rule = storage.binding.fusion
        self.lock = ReadWriteLock()
        self.measured: IndexBenchmark | None = None
        self.notes: list[str] = []
        self.sequence = self.saved = -1
        self.held = RowSum()  # templates of the storage that it was built from, and the sum of their checksums
        self.owner: dict[int, str] = {}  # of templates,
        self.row: dict[str, int] = {}  # row of a person,
        self.known: set[int] = set()  # and templates that were counted: all three for fused rules only
        self.index: Index = ExactIndex(storage.binding.dim)
        self._open_index()

    def find_templates(self, probes: np.ndarray, m: int) -> FoundRows:
        """By the index, once it is up to date."""
        self.sync()
        with self.lock.hold_shared():
            return FoundRows(*self.index.search(probes, m), self.sequence, len(self.index))

    def describe(self) -> dict[str, Any]:
        """Kind, size, and what was measured when it was built."""
        found: dict[str, Any] = {"kind": self.index.kind, "rows": len(self.index)}
        if self.measured is not None:
            found["measured"] = str(self.measured)
        if has_outgrown(len(self.index), self.measured) if self.measured else len(self.index) > QUICK:
            found["advice"] = "no index was chosen for this size: `mettle gallery index` measures and chooses one"
        return found

    def sync(self) -> None:
        """Take in what has happened to the storage."""
        if self.storage.sequence() == self.sequence:
            return
        with self.lock.hold_exclusive():
            try:
                news = self.storage.changes_since(self.sequence)
            except GalleryUnavailable:
                raise
            except GalleryError:  # a change is damaged: the scan tells whether templates are
                self._mend()
                return
            if news is None:
                self._rebuild()
                return
            self._apply_changes(news)
            if self.held != news.held:  # changes are missing: likewise
                self._mend()

    def reindex(self, wanted: IndexSpec | None = None) -> IndexBenchmark | None:
        """Choose and build the index again, measured against exact search, and keep it on disk."""
        with self.lock.hold_exclusive():
            former, self.wanted = self.wanted, self.wanted if wanted is None else as_wanted(wanted)
            try:
                self._rebuild(choose=True)
            except BaseException:
                self.wanted = former
                raise
            self.saved = -1  # another index, though of the same content
        self.save()
        return self.measured

    def save(self) -> None:
        """Keep the index on disk, unless what is there is as new."""
        if self.folder is None or not self.write or self.rule != "best" or self.saved == self.sequence:
            return
        with self.lock.hold_shared():
            save_index(self.folder, self.index, self._manifest_at(), self._file_mode(self.folder))
            self.saved = self.sequence

    def close(self) -> None:
        """Nothing is held: the index is in memory."""

    def erase(self) -> None:
        """Build the index on disk anew: deleted templates may be in the old one."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.reindex()

    def check(self) -> list[str]:
        """Whether the index holds exactly the rows that the storage says; a writer beside us may need a second look."""
        for _ in range(LOOKS):
            try:
                self.sync()
            except GalleryUnavailable:
                raise
            except GalleryError as problem:
                return [f"the index cannot follow the storage ({problem})"]
            with self.lock.hold_shared():
                sequence, wanted, missing = self.sequence, 0, 0
                for part in self.storage.scan():
                    numbers = part.numbers
                    if self.rule != "best":
                        numbers = _as_ids(n for n in numbers.tolist() if self.row.get(self.owner.get(n, "")) == n)
                    wanted += len(numbers)
                    missing += int((~self.index.contains_ids(numbers)).sum())
                wrong = missing or len(self.index) != wanted
                if not wrong:
                    return []
            if self.storage.sequence() == sequence:
                return [
                    f"the index holds {len(self.index)} rows and lacks {missing} of {wanted}: build it anew (reindex)"
                ]
        return []

    def _file_mode(self, folder: Path) -> int:
        """Who may read the index: whoever may read the storage, which holds the same templates."""
        try:
            return (folder.parent / RECORD).stat().st_mode & 0o066 | PRIVATE
        except OSError:
            return PRIVATE

    def _open_index(self) -> None:
        if self.folder is not None and self.write:
            self.notes += restrict_modes(self.folder, self._file_mode(self.folder))
        if self.folder is not None and self.folder.is_dir() and self.rule == "best":
            try:
                loaded = load_index(self.folder, self._manifest_at(self.storage.state()))
                self.index, self.measured = loaded.index, loaded.measured
                self.sequence = self.saved = loaded.sequence
                self.held = RowSum(len(self.index), loaded.template_sum)
                self.sync()
                return
            except IndexMismatch as problem:
                self.notes.append(f"the index on disk was not used ({problem}); built again from the storage")
                if self.write:  # it must not look valid once the storage has come as far as it did
                    (self.folder / MANIFEST).unlink(missing_ok=True)
                    sync_folder(self.folder)
        self._rebuild(choose=self.storage.size().templates <= QUICK)

    def _manifest_at(self, state: RevisionState | None = None) -> IndexManifest:
        """What a view of this storage is: as it stands, or as the storage says that it should be."""
        bound = self.storage.binding
        return IndexManifest(
            sequence=self.sequence if state is None else state.sequence,
            count=len(self.index) if state is None else state.templates,
            template_sum=self.held.checksums if state is None else state.template_sum,
            dim=bound.dim,
            metric=bound.metric,
            model=bound.model,
            fusion=bound.fusion,
            kind=self.index.kind,
            measured=self.measured,
            storage=self.storage.identity,
        )

    def _mend(self) -> None:
        self._rebuild()
        if INCOMPLETE not in self.notes:
            self.notes.append(INCOMPLETE)

    def _rebuild(self, choose: bool = False) -> None:
        """Everything from the storage; without ``choose`` into an exact index, which takes no time to build."""
        sequence = self.storage.sequence()  # before the scan: what comes in between is taken in once more
        numbers, vectors, people, held = [], [], [], RowSum()
        for part in self.storage.scan():
            numbers.append(part.numbers)
            vectors.append(part.vectors)
            people.extend(part.identities)
            held.add(int(part.checksums.sum()), len(part.numbers))
        dim = self.storage.binding.dim
        at = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
        table = np.concatenate(vectors) if vectors else np.empty((0, dim), np.float32)
        owner: dict[int, str] = {}
        row: dict[str, int] = {}
        known: set[int] = set()
        if self.rule != "best":
            known = set(at.tolist())
            owner = dict(zip(at.tolist(), people, strict=True))
            row, table = group_by_identity(self.rule, at, table, people)
            at, people = _as_ids(row.values()), list(row)
        index, measured = ExactIndex(dim), None
        if choose and len(at):
            whose = np.unique(np.asarray(people, dtype=object), return_inverse=True)[1]  # as text, all would be as long
            built = build_index(table, at, self.wanted, labels=whose)
            index, measured = built.index, built.measured
        else:
            index.add(at, table)
        # All at once: an index that could not be built leaves the former one, and what it knows, as they were.
        self.index, self.measured, self.owner, self.row, self.sequence = index, measured, owner, row, sequence
        self.held, self.known = held, known

    def _apply_changes(self, news: Changes) -> None:
        gone, new = self._holds(news.removed), ~self._holds(news.added.numbers)
        if self.rule == "best":
            self.index.remove(news.removed)
            fresh = _take_templates(news.added, new)
            self.index.add(fresh.numbers, fresh.vectors)
        else:
            self._fuse_again(news)
            self.known -= set(news.removed.tolist())
            self.known |= set(news.added.numbers.tolist())
        self.held = RowSum(
            self.held.rows + int(new.sum()) - int(gone.sum()),
            self.held.checksums + int(news.added.checksums[new].sum()) - int(news.removed_checksums[gone].sum()),
        )
        self.sequence = news.sequence

    def _holds(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these templates were taken in: a scan may have seen them before the change was told."""
        if self.rule == "best":
            return self.index.contains_ids(numbers)
        return np.fromiter((n in self.known for n in numbers.tolist()), np.bool_, len(numbers))

    def _fuse_again(self, news: Changes) -> None:
        """The rows of everybody whose templates changed, made anew from the storage."""
        gone = news.removed.tolist()
        touched = {self.owner[n] for n in gone if n in self.owner} | set(news.added.identities)
        # The storage is read before anything changes: where it fails, the index is as it was and follows the next time.
        now = {name: self.storage.templates_of(name) for name in sorted(touched)}
        now = {name: theirs for name, theirs in now.items() if len(theirs.numbers)}
        self.index.remove(_as_ids(self.row.pop(name) for name in touched if name in self.row))
        for n in gone:
            self.owner.pop(n, None)
        for name, theirs in now.items():
            self.owner |= dict.fromkeys(theirs.numbers.tolist(), name)
            self.row[name] = int(theirs.numbers.max())
        if now:  # all at once: each addition looks through the numbers of the whole index
            made = np.concatenate([fused_rows(self.rule, theirs.vectors) for theirs in now.values()])
            self.index.add(_as_ids(self.row[name] for name in now), made)


def group_by_identity(
    rule: str, at: np.ndarray, table: np.ndarray, people: list[str]
) -> tuple[dict[str, int], np.ndarray]:
    """Everybody's row number (that of the newest template), and the rows in the same order."""
    order: dict[str, list[int]] = {}
    for position, name in enumerate(people):
        order.setdefault(name, []).append(position)
    made = [fused_rows(rule, table[positions]) for positions in order.values()]
    rows = np.concatenate(made) if made else np.empty((0, table.shape[1]), np.float32)
    return {name: int(at[positions].max()) for name, positions in order.items()}, rows


def _as_ids(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _take_templates(added: Templates, new: np.ndarray) -> Templates:
    """Some of the templates."""
    if new.all():
        return added
    kept = tuple(name for name, keep in zip(added.identities, new, strict=True) if keep)
    return Templates(added.numbers[new], kept, added.vectors[new], added.checksums[new])


class PgvectorSearcher:
    """The storage's own server searches its templates, and looks after its index itself."""

    scores_on_server = True

    def __init__(self, storage: PostgresStorage):
        self.storage = storage
        self.notes: list[str] = []

    def reindex(self, wanted: IndexSpec | None = None) -> None:
        """Let the server search exactly, or by its own graph."""
        kind = as_wanted(wanted).kind
        if kind not in ("auto", "exact", "hnsw"):
            raise GalleryError("a gallery on a server has the indexes exact and hnsw: ask for one of these")
        self.storage.set_index("exact" if kind == "exact" else "hnsw")

    def erase(self) -> None:
        """The storage has done so."""

    def close(self) -> None:
        """The connections are the storage's."""

    def save(self) -> None:
        """Nothing is kept here."""

    def check(self) -> list[str]:
        """There is nothing beside the storage."""
        return []

    def find_templates(self, probes: np.ndarray, m: int) -> FoundRows:
        """By pgvector."""
        return FoundRows(*self.storage.search(probes, m))

    def describe(self) -> dict[str, Any]:
        """Where it is."""
        return {"kind": "pgvector, on the server"}
