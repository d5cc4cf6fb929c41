"""What opens a gallery: the place is looked at, its record opened or made, and what belongs to it put around it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.errors import GalleryError, InputError
from mettle.match.choose import Wanted, as_wanted
from mettle.match.embedding import Embedding, binding_of, check_same, contract_of, offered_binding
from mettle.match.local import Local
from mettle.match.operating import as_thresholds, check_fusion
from mettle.match.place import INDEX, MODEL, check_place, exists, is_server, made, reopened, shown
from mettle.match.postgres import PostgresRecord
from mettle.match.record import Record
from mettle.match.remote import Remote
from mettle.match.search import Search
from mettle.match.thresholds import Thresholds

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder

WHOSE = "say whose embeddings it will hold, by model=RUN or dim=N (on the command line --model RUN or --dim N)"
MAKE = "look at the path, or make one: `mettle gallery enrol`, or Gallery.open with model=RUN or dim=N"


@dataclass(frozen=True, eq=False)
class Opened:
    """The parts of a gallery that is open."""

    where: str  # without a password
    record: Record
    embedding: Embedding
    search: Search
    thresholds: Thresholds


def opened(
    where: str | Path,
    model: "str | Path | RunFolder | None",
    dim: int | None,
    fusion: str | None,
    thresholds: Mapping[Any, Any] | None,
    wanted: Wanted | None,
    read_only: bool,
    create: bool,
) -> Opened:
    """Open a gallery, or make a new one; the arguments are those of `Gallery.open`."""
    check_place(where)
    run, wanted = _run(model), as_wanted(wanted)
    if dim is not None and run is not None:
        raise InputError("give a model or a dim, not both: a model says how long its embeddings are")
    offered, known = offered_binding(run, dim, fusion, thresholds), as_thresholds(thresholds)
    there, place = exists(where), shown(str(where))
    if there:
        record = reopened(where, read_only)
    elif read_only or not create:
        raise GalleryError(f"there is no gallery at {place}: {MAKE}")
    elif offered is None:
        raise GalleryError(f"{place} is new: {WHOSE}")
    else:
        record, known = made(where, offered, run), {}  # it is made with them: they are its own
    try:
        bound, folder = record.binding, None if is_server(where) else Path(where)
        contract, load = None if run is None else contract_of(run), None
        if run is None and folder is not None and bound.model and (folder / MODEL / "run.json").is_file():
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
        if isinstance(record, PostgresRecord) and bound.fusion == "best" and wanted.kind == "auto":
            search: Search = Remote(record)
        else:
            search = Local(record, None if folder is None else folder / INDEX, wanted, write=not read_only)
        return Opened(place, record, Embedding(bound.dim, run, load), search, Thresholds(record, known, own))
    except BaseException:
        record.close()
        raise


def _kept_contract(folder: Path) -> dict[str, Any]:
    """What the run says of its model that a gallery keeps beside its templates, without importing torch."""
    try:
        return json.loads((folder / "contract.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return _open_run(folder).contract()  # which says what is wrong with it


def _run(model: "str | Path | RunFolder | None") -> "RunFolder | None":
    if model is None or (hasattr(model, "contract") and hasattr(model, "embed")):
        return model  # type: ignore[return-value]
    if not isinstance(model, str | PathLike):
        raise InputError(
            f"model must be a run, its folder, or an object with embed and contract: got {type(model).__name__}"
        )
    return _open_run(model)


def _open_run(folder: str | Path) -> "RunFolder":
    from mettle.train.run_folder import open_run_folder

    return open_run_folder(folder)
