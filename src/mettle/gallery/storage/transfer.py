"""Moving a gallery from one kind of storage to another, with proof that everything came through."""

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mettle.atomic_files import write_folder
from mettle.errors import GalleryError, InputError
from mettle.gallery.binding import copy_files, copy_model, find_damaged_files
from mettle.gallery.calibration import GalleryCalibration
from mettle.gallery.storage.base import SqlStorage, Storage
from mettle.gallery.storage.integrity import ContentDigest
from mettle.gallery.storage.location import MODEL, RECORD
from mettle.gallery.storage.sqlite import ErrorTranslation, SqliteStorage

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder


@dataclass(frozen=True)
class MoveResult:
    """What was moved; `digest` is the same on both sides."""

    identities: int
    templates: int
    digest: str

    def __str__(self) -> str:
        return f"moved {self.identities} identities, {self.templates} templates; digest {self.digest[:16]} on both"


def copy_storage(source: Storage, target: SqlStorage) -> MoveResult:
    """Copy all live templates into an empty storage of the same binding, in one change.

    Counts and digests of the source, of what came and of what the target holds are compared before the target commits:
    where they differ, or anything fails, it stays empty. Numbers and requests are the target's own. A calibration
    goes along, and remembers what had changed since it was measured.
    """
    if source is target:
        raise GalleryError("source and target are the same gallery: move into a new one")
    if source.binding != target.binding:
        raise GalleryError("the target is bound to something else than the source: create it with the source's binding")
    size = target.size()
    if size.templates:
        raise GalleryError(f"the target holds {size.templates} templates already: move into a new gallery")
    promised = ContentDigest(source.size().identities, source.size().templates, source.digest())
    target.load_templates(
        source.scan, lambda came, here: _check_equal(promised, came, here), _carried_calibration(source)
    )
    return MoveResult(promised.identities, promised.templates, promised.digest)


def _carried_calibration(source: Storage) -> GalleryCalibration | None:
    standing = source.calibration_status()
    return None if standing is None else replace(standing.calibration, came=standing.templates_added)


def _check_equal(promised: ContentDigest, came: ContentDigest, here: ContentDigest) -> None:
    if came != promised:
        raise GalleryError(
            f"the source changed while it was read ({_describe_difference(promised, came)}): stop its writers, and try "
            "again"
        )
    if here != came:
        raise GalleryError(f"the target did not keep what came ({_describe_difference(came, here)}): it was left empty")


def _describe_difference(wanted: ContentDigest, got: ContentDigest) -> str:
    return (
        f"{wanted.identities} identities, {wanted.templates} templates, {wanted.digest[:16]} against "
        f"{got.identities}, {got.templates}, {got.digest[:16]}"
    )


def write_snapshot(storage: Storage, run: "RunFolder | None", folder: str | Path, where: str) -> Path:
    """Write a consistent copy of a storage, and what embeds pictures for it, into a new folder."""
    if not isinstance(folder, str | PathLike):
        raise InputError(f"a snapshot needs the path of a new folder, got {folder!r:.80}")
    folder = Path(folder)
    if not isinstance(storage, SqliteStorage):
        raise GalleryError(f"{where} is on a server: back it up with pg_dump, or move it into a folder")
    if folder.exists():
        raise GalleryError(f"{folder} is there already: give the snapshot a new folder")

    def fill_folder(place: Path) -> None:
        storage.snapshot(place / RECORD)
        if storage.model_files:  # its own copy: the run may have been evaluated since, and say more
            own = storage.path.parent / MODEL
            if wrong := find_damaged_files(own, storage.model_files, storage.model_files):
                raise GalleryError(wrong[0])
            copy_files(own, place / MODEL, storage.model_files)
        elif run is not None:
            copy_model(run, place / MODEL)

    with ErrorTranslation(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, fill_folder)
    return folder
