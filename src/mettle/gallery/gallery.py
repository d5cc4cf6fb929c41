"""A gallery: people enrolled under one model, and answers in milliseconds.

    enrol, delete ──> storage (SQL, the truth) ──> search (a view that follows it) ──> identify
    verify <───────── storage

Verification reads the person's templates from the storage and is exact always. Identification finds candidates by
the index and says how many it lost when that index was built. Scores become verdicts at a threshold that was measured
(on the people enrolled, or with the model) or given; without one the verdict is "not calibrated".

What opens a gallery: the place is looked at, its storage opened or made, and what belongs to it put around it.

A gallery at a glance: what its storage, its index and its thresholds say of themselves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.errors import GalleryError, InputError, UnknownIdentity
from mettle.gallery.audit import GalleryAudit, audit_templates
from mettle.gallery.binding import (
    FILES,
    Binding,
    _find_run,
    _kept_contract,
    _open_run,
    binding_of,
    check_same,
    contract_of,
    find_damaged_files,
    offered_binding,
)
from mettle.gallery.calibration import measure_calibration, summarize_calibration
from mettle.gallery.enrolment import canonical_name, enrol_many, name_spellings, suggest_name
from mettle.gallery.index.milvus import MilvusSearcher, check_address
from mettle.gallery.index.searchers import FaissSearcher, IdentitySearch, PgvectorSearcher, Searcher
from mettle.gallery.index.selection import IndexBenchmark, IndexSpec, as_wanted
from mettle.gallery.inputs import TemplateInputs
from mettle.gallery.results import (
    IdentifyResult,
    Info,
    Receipt,
    Templates,
    VerifyResult,
    identify_result,
    verify_result,
)
from mettle.gallery.scoring import fused_score
from mettle.gallery.storage.base import Storage
from mettle.gallery.storage.location import (
    INDEX,
    MODEL,
    bytes_of,
    check_place,
    create_storage,
    gallery_exists,
    is_server,
    open_storage,
    redact_location,
)
from mettle.gallery.storage.postgres import PostgresStorage
from mettle.gallery.storage.scrub import ScrubReport, scrub_storage
from mettle.gallery.storage.sql import list_damage
from mettle.gallery.storage.transfer import MoveResult, copy_storage, write_snapshot
from mettle.gallery.thresholds import DecisionThreshold, ThresholdTable, as_thresholds, check_fusion, false_accept_bound

if TYPE_CHECKING:
    from mettle.gallery.audit import GalleryAudit
    from mettle.train.run_folder import RunFolder

MAX_RESULTS = 1000  # candidates of one answer, or lines of a list


class Gallery:
    """People and their templates. Open it with :meth:`open`; every method may be called from several threads."""

    def __init__(
        self,
        where: str,
        storage: Storage,
        embedding: TemplateInputs,
        search: Searcher,
        thresholds: ThresholdTable,
        folder: Path | None = None,
    ):
        self.where, self._storage, self._embedding, self._search = where, storage, embedding, search
        self._folder = folder
        self._thresholds, self._candidates = thresholds, IdentitySearch(storage, search)
        self.closed = False

    @classmethod
    def open(
        cls,
        where: str | Path,
        *,
        model: "str | Path | RunFolder | None" = None,
        dim: int | None = None,
        fusion: str | None = None,
        thresholds: Mapping[Any, Any] | None = None,
        wanted: IndexSpec | None = None,
        read_only: bool = False,
        create: bool = True,
        milvus: str | None = None,
    ) -> "Gallery":
        """Open a gallery, or make a new one.

        Args:
            where: a folder (SQLite inside), or ``postgresql://user@host/database?gallery=name``.
            model: the run whose embeddings it holds; needed once, when it is made (for pictures on PostgreSQL: always).
            dim: instead of a model, the length of embeddings that come from elsewhere.
            fusion: how several templates of a person become one score: ``best`` (default), ``mean`` or ``centroid``.
            thresholds: ``{false-accept rate: threshold}``. A new gallery keeps them; for one that exists they are
                used while it is open, instead of its own: those that :meth:`calibrate` keeps, then those that it was
                made with or of the model's contract. Rates are per comparison with one template, in a table that
                :meth:`calibrate` gave per person.
            wanted: how fast, how exact and how small the index should be.
            read_only: beside the one writer of a folder there may be many readers.
            create: whether to make it where there is none.
            milvus: the address of a Milvus server that searches its templates, ``http://user:password@host:19530``: for
                more of them than one machine holds. Nothing is kept of it: give it whenever the gallery is opened.

        Raises:
            GalleryError: no gallery there, a damaged one, or one that is bound to another model.
            GalleryLocked: another process is writing to it.
        """
        found = open_parts(where, model, dim, fusion, thresholds, wanted, read_only, create, milvus)
        return cls(found.where, found.storage, found.embedding, found.search, found.thresholds, found.folder)

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        return self._open_storage().binding

    @property
    def notes(self) -> list[str]:
        """What is odd: an index that was damaged and built again on opening, a calibration that is stale."""
        self._open_storage()
        return [*self._search.notes, *self._thresholds.notes()]

    @property
    def run(self) -> "RunFolder":
        """The run whose model embeds pictures for this gallery."""
        if self._embedding.run is None:
            raise InputError(f"{self.where} holds embeddings from elsewhere: it has no model of its own")
        return self._embedding.run

    @staticmethod
    def move(source: str | Path, target: str | Path) -> MoveResult:
        """Copy a gallery into a new one of either kind; counts and checksums of both are compared."""
        with Gallery.open(source, read_only=True, create=False) as old:
            bound, run = old.binding, old._embedding.run
            # One that exists must be empty and of the same binding, or `move` refuses it: a second try after a failure.
            place = open_storage(target, False) if gallery_exists(target) else create_storage(target, bound, run)
            try:
                return copy_storage(old._open_storage(), place)
            finally:
                place.close()

    def snapshot(self, folder: str | Path) -> Path:
        """Write a consistent copy into a new folder, while the gallery is in use."""
        return write_snapshot(self._open_storage(), self._embedding.run, folder, self.where)

    def enrol(self, identity: str, templates: Any, *, request: str | None = None, replace: bool = False) -> Receipt:
        """Add templates of a person: pictures, or embeddings (dim,) or (n, dim). Durable when this returns.

        Args:
            identity: who; somebody already enrolled gets further templates.
            templates: what is kept: unit vectors, never pictures. What the person has already is not added again;
                the receipt says how many were skipped.
            request: a name for this request; repeating it changes nothing and returns the first receipt.
            replace: remove the person's former templates in the same change.
        """
        storage, vectors = self._open_storage(), self._embedding.to_vectors(templates)
        name, alike = canonical_name(identity, storage.has_identity), name_spellings(identity)
        return storage.enrol(name, vectors, request=request, replace=replace, distinct=True, former=alike)

    def enrol_many(self, people: Iterable[tuple[str, Any]], *, replace: bool = False) -> list[Receipt]:
        """Enrol (identity, templates) of many people: some hundreds at a time become one durable change."""
        return enrol_many(self._open_storage(), people, self._embedding.to_vectors, replace=replace)

    def delete(self, identity: str, *, request: str | None = None, suggest: bool = True) -> Receipt:
        """Remove a person: never found again once this returns, erased from disk by :meth:`compact`.

        Args:
            identity: who.
            request: a name for this request; repeating it changes nothing and returns the first receipt.
            suggest: whether the error about a name that nobody has tells the nearest one; not for callers who may not
                know who is enrolled.
        """
        *former, name = name_spellings(identity)
        try:
            return self._open_storage().delete(name, request=request, former=former)
        except UnknownIdentity as unknown:
            raise UnknownIdentity(f"{unknown}{self._suggest_name(identity) if suggest else ''}") from None

    def verify(
        self,
        identity: str,
        probe: Any,
        *,
        far: float | None = None,
        threshold: float | None = None,
        suggest: bool = True,
    ) -> VerifyResult:
        """Whether the probe is this person.

        Where no threshold was measured and none is given, the answer has the score, and its verdict is "not
        calibrated": see :meth:`calibrate`.

        Args:
            identity: who it claims to be.
            probe: a picture, or an embedding (dim,).
            far: the false-accept rate to answer at; by default 1e-3, or the lowest that was measured.
            threshold: a threshold by hand instead.
            suggest: as for :meth:`delete`.
        """
        point = self.decision_threshold(far=far, threshold=threshold)
        vector = self._embedding.to_vector(probe)
        theirs = self._find_templates(identity)
        if not len(theirs.numbers):
            near = self._suggest_name(identity) if suggest else ""
            raise UnknownIdentity(f"nobody called {identity!r} is enrolled in {self.where}{near}")
        score = fused_score(self.binding.fusion, vector, theirs.vectors)
        count = len(theirs.numbers)
        return verify_result(identity, score, point, count, false_accept_bound(point, self.binding.fusion, 1, count))

    def identify(
        self, probe: Any, *, k: int = 5, far: float | None = None, threshold: float | None = None
    ) -> IdentifyResult:
        """Who the probe is: the best ``k`` people, and a match only where the best reaches the threshold.

        Where no threshold was measured and none is given, nobody is a match, and the verdict is "not calibrated": see
        :meth:`calibrate`.
        """
        point = self._check_question(k, far, threshold)
        return self._identify_all(self._embedding.to_vector(probe)[None], k, point)[0]

    def identify_many(
        self, probes: Any, *, k: int = 5, far: float | None = None, threshold: float | None = None
    ) -> list[IdentifyResult]:
        """The same for several probes at once, faster than one by one."""
        point = self._check_question(k, far, threshold)
        if isinstance(probes, Sequence) and not len(probes):
            return []
        return self._identify_all(self._embedding.to_vectors(probes), k, point)

    def decision_threshold(self, *, far: float | None = None, threshold: float | None = None) -> DecisionThreshold:
        """The threshold that an answer is given at now, what its rate counts and where it comes from.

        It is None where none was measured and none is given.
        """
        self._open_storage()
        return self._thresholds.threshold_at(far, threshold)

    def embed(self, inputs: Any) -> np.ndarray:
        """(n, dim) embeddings of pictures by the gallery's model, of unit length."""
        self._open_storage()
        return self._embedding.to_vectors(inputs)

    def ids(self) -> Iterator[str]:
        """Everybody enrolled, sorted."""
        return self._open_storage().ids()

    def __contains__(self, identity: object) -> bool:
        try:
            return isinstance(identity, str) and len(self._find_templates(identity).numbers) > 0
        except InputError:  # what cannot be a name is nobody's
            return False

    def __len__(self) -> int:
        return self._open_storage().size().identities

    def info(self) -> Info:
        """The gallery at a glance; of a damaged calibration, :attr:`notes` tell."""
        return summarize_gallery(self.where, self._open_storage(), self._search, self._thresholds)

    def calibrate(self, fars: Sequence[float] | float = (0.1, 0.01, 0.001), *, keep: bool = True) -> dict[str, Any]:
        """Thresholds whose false-accept rate is per person, for the rule and the templates of this gallery.

        Everybody's templates are tried on everybody else: a rate of 0.01 takes 25 people, one of 0.001 takes 78. They
        stand for strangers, so they should be people whom the model was not trained on. The storage keeps what could be
        measured, durably, in the place of an earlier calibration; answers at these rates go by it from then on, here
        and wherever the gallery is open. Where too much has changed since, answers and :attr:`notes` say so: calibrate
        again.

        Args:
            fars: false-accept rates per person.
            keep: False only measures: give the table to :meth:`open` as ``thresholds=``, or one of its thresholds
                with the question.
        """
        storage = self._open_storage()
        if keep:
            storage.for_writing()  # before minutes are spent on it
        found = measure_calibration(storage, fars)
        if keep and found.rates:
            storage.keep_calibration(found)
        return dict(found.table)

    def forget_calibration(self) -> bool:
        """Answer by the thresholds of the model again; whether a calibration was kept until now."""
        return not self._open_storage().keep_calibration(None).repeated

    def reindex(self, wanted: IndexSpec | None = None) -> IndexBenchmark | None:
        """Choose and build the index anew for the present size; returns what was measured against exact search."""
        self._open_storage()
        return self._search.reindex(wanted)

    def compact(self) -> None:
        """Erase what was deleted from every file of the gallery."""
        self._open_storage().compact()
        self._search.erase()

    def check(self) -> list[str]:
        """What is wrong with storage, index or the copy of the model, in words; an empty list is a sound gallery."""
        storage = self._open_storage()
        found = storage.check()
        with list_damage(found):
            found += self._search.check()
        if self._folder is not None:
            found += find_damaged_files(self._folder / MODEL, storage.model_files, storage.model_files)
        return found

    def scrub(self, *, pause: float = 0.0) -> ScrubReport:
        """Read everything that answers rest on again, while the gallery is in use.

        A few hundred people are looked at in a transaction of their own, so that nobody waits for it; `check` looks at
        all in one, and at the structure of the file.

        Args:
            pause: seconds to wait after each such part, so that others have the disk.
        """
        return scrub_storage(self._open_storage(), self._folder, pause)

    def audit(self, *, far: float | None = None, threshold: float | None = None, count: int = 20) -> "GalleryAudit":
        """Look at who is enrolled: people who would be taken for each other, templates that may be under a wrong name.

        Everybody's templates are tried on everybody else, and on the others of their own person, at the threshold that
        answers are given at. Whether storage and index are sound is told, too.

        Args:
            far: the false-accept rate to look at it for.
            threshold: a threshold by hand instead.
            count: the length of each list; the counts beside them are of all.
        """
        point, found = self._check_question(count, far, threshold, "count"), self.check()
        return audit_templates(self._open_storage(), point, count=count, problems=tuple(found), notes=tuple(self.notes))

    def close(self) -> None:
        """Keep the index and let go of files and locks; closing twice is allowed."""
        if self.closed:
            return
        self.closed = True
        try:
            self._search.save()
        finally:
            self._search.close()
            self._storage.close()

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gallery({self.where!r}{', closed' if self.closed else ''})"

    def _open_storage(self) -> Storage:
        if self.closed:
            raise GalleryError(f"{self.where} is closed: open it again with Gallery.open")
        return self._storage

    def _find_templates(self, identity: str) -> Templates:
        """Templates of whoever is called so; none: empty."""
        storage = self._open_storage()
        *former, name = name_spellings(identity)
        found = (storage.templates_of(old) for old in former)
        return next((theirs for theirs in found if len(theirs.numbers)), None) or storage.templates_of(name)

    def _suggest_name(self, identity: str) -> str:
        return suggest_name(identity, self.ids())

    def _check_question(
        self, k: int, far: float | None, threshold: float | None, called: str = "k"
    ) -> DecisionThreshold:
        """The operating point of an answer that lists up to k, before anything is looked at."""
        if not isinstance(k, int | np.integer) or isinstance(k, bool) or not 1 <= k <= MAX_RESULTS:
            raise InputError(f"{called} must be between 1 and {MAX_RESULTS}, got {k!r}")
        return self.decision_threshold(far=far, threshold=threshold)

    def _identify_all(self, probes: np.ndarray, k: int, point: DecisionThreshold) -> list[IdentifyResult]:
        self._open_storage()
        found, size = self._candidates.top_identities(probes, k)
        bound = false_accept_bound(point, self.binding.fusion, size.identities, size.templates)
        return [identify_result(best, point, size, bound) for best in found]


WHOSE = "say whose embeddings it will hold, by model=RUN or dim=N (on the command line --model RUN or --dim N)"


MAKE = "look at the path, or make one: `mettle gallery enrol`, or Gallery.open with model=RUN or dim=N"


@dataclass(frozen=True, eq=False)
class GalleryParts:
    """The parts of a gallery that is open."""

    where: str  # without a password
    storage: Storage
    embedding: TemplateInputs
    search: Searcher
    thresholds: ThresholdTable
    folder: Path | None  # where it has one


def open_parts(
    where: str | Path,
    model: "str | Path | RunFolder | None",
    dim: int | None,
    fusion: str | None,
    thresholds: Mapping[Any, Any] | None,
    wanted: IndexSpec | None,
    read_only: bool,
    create: bool,
    milvus: str | None = None,
) -> GalleryParts:
    """Open a gallery, or make a new one; the arguments are those of `Gallery.open`."""
    check_place(where)
    if milvus is not None:
        check_address(milvus)
    run, wanted = _find_run(model), as_wanted(wanted)
    if dim is not None and run is not None:
        raise InputError("give a model or a dim, not both: a model says how long its embeddings are")
    offered, known = offered_binding(run, dim, fusion, thresholds), as_thresholds(thresholds)
    there, place = gallery_exists(where), redact_location(str(where))
    if there:
        storage = open_storage(where, read_only)
    elif read_only or not create:
        raise GalleryError(f"there is no gallery at {place}: {MAKE}")
    elif offered is None:
        raise GalleryError(f"{place} is new: {WHOSE}")
    else:
        storage, known = create_storage(where, offered, run), {}  # it is made with them: they are its own
    try:
        bound, folder = storage.binding, None if is_server(where) else Path(where)
        contract, load = None if run is None else contract_of(run), None
        if run is None and folder is not None and bound.model and (folder / MODEL / "run.json").is_file():
            own_files = [name for name in FILES if name in storage.model_files]
            if wrong := find_damaged_files(folder / MODEL, storage.model_files, own_files):
                raise GalleryError(wrong[0])
            contract, load = _kept_contract(folder / MODEL), partial(_open_run, folder / MODEL)
        if contract is not None:
            check_same(bound, binding_of(contract, bound.fusion, {}), place)
        if dim is not None and dim != bound.dim:
            raise GalleryError(f"{place} holds embeddings of length {bound.dim}, not {dim}: give no dim")
        if fusion is not None and fusion != bound.fusion:
            raise GalleryError(f"{place} was made with fusion={bound.fusion!r}, not {fusion!r}: give no fusion")
        own = bound.thresholds
        check_fusion(known or own, bound.fusion)
        if not own and contract is not None:  # evaluated only after the gallery was made
            own = as_thresholds(contract.get("thresholds"))
        search: Searcher
        if milvus is not None:
            search = MilvusSearcher(storage, milvus, wanted)
        elif isinstance(storage, PostgresStorage) and bound.fusion == "best" and wanted.kind == "auto":
            search = PgvectorSearcher(storage)
        else:
            search = FaissSearcher(storage, None if folder is None else folder / INDEX, wanted, write=not read_only)
        return GalleryParts(
            place, storage, TemplateInputs(bound.dim, run, load), search, ThresholdTable(storage, known, own), folder
        )
    except BaseException:
        storage.close()
        raise


def summarize_gallery(where: str, storage: Storage, search: Searcher, thresholds: ThresholdTable) -> Info:
    """What is there, under which model, found how, and answered at which thresholds."""
    size, bound, server = storage.size(), storage.binding, is_server(where)
    table, kept = thresholds.table_and_calibration()
    return Info(
        where=where,
        kind="postgresql" if server else "sqlite",
        identities=size.identities,
        templates=size.templates,
        dim=bound.dim,
        model=bound.model,
        fusion=bound.fusion,
        sequence=storage.sequence(),
        index=search.describe(),
        thresholds=table,
        calibration=None if kept is None else summarize_calibration(kept),
        bytes=None if server else bytes_of(Path(where)),
    )
