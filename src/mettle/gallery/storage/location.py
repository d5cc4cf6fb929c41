"""Where a gallery is: a folder with SQLite inside, or a name on a PostgreSQL server; looked at, opened, made, shown."""

import os
import re
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from mettle.atomic_files import TEMPORARY, make_folder
from mettle.errors import GalleryError, InputError
from mettle.gallery.binding import Binding, copy_model
from mettle.gallery.storage.postgres import PostgresStorage
from mettle.gallery.storage.sqlite import LOCK, ErrorTranslation, SqliteStorage, refuse_links

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder

RECORD, INDEX, MODEL = "record.sqlite", "index", "model"


SERVERS = ("postgresql://", "postgres://")


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/|$)")  # two letters or more: C:/ is a disk


def is_server(where: str | Path) -> bool:
    """Whether this names a server."""
    return str(where).lower().startswith(SERVERS)


def _normalize_url(where: str | Path) -> str:
    """The address of a server as drivers know it: its scheme in small letters."""
    scheme, rest = str(where).split(":", 1)
    return f"{scheme.lower()}:{rest}"


def check_place(where: str | Path) -> None:
    """Refuse what is neither a folder nor a server that we know, before anything is looked for or made."""
    if not isinstance(where, str | PathLike):
        raise InputError(f"where must be a folder or postgresql://user@host/database, got {where!r:.80}")
    text = str(where)
    if not text or "\0" in text:
        raise InputError(f"where must be a folder or postgresql://user@host/database, got {text!r:.80}")
    scheme = _SCHEME.match(text)
    if scheme is None or is_server(where):
        return
    if scheme[1].lower() in ("postgresql", "postgres"):
        raise InputError(f"give the address of a server as text, not as a path: {scheme[1]}://user@host/database")
    raise InputError(
        f"a gallery is in a folder or on a PostgreSQL server, and {scheme[1]!r} is neither: give the path of a folder "
        "as it is, or postgresql://user@host/database?gallery=name"
    )


def gallery_exists(where: str | Path) -> bool:
    """Whether there is a gallery; something else in its place is an error."""
    check_place(where)
    if is_server(where):
        return PostgresStorage.exists(_normalize_url(where))
    folder = Path(where)
    with ErrorTranslation(folder):
        refuse_links(folder, [RECORD, LOCK, INDEX, MODEL])
        for part in (folder / INDEX, folder / MODEL):
            refuse_links(part, os.listdir(part) if part.is_dir() else ())
        if (folder / RECORD).is_file():
            return True
        if folder.exists() and not folder.is_dir():
            raise GalleryError(f"{folder} is a file, not a gallery: give a folder")
        strangers = [file.name for file in folder.iterdir() if not _is_leftover(file.name)] if folder.exists() else []
    if strangers:
        raise GalleryError(f"{folder} is no gallery: it holds {strangers[0]!r} and no {RECORD}. Choose another folder")
    return False


def _is_leftover(name: str) -> bool:
    """Whether a gallery that was killed while it was made may have left this."""
    return name in (MODEL, INDEX, LOCK) or name.startswith(RECORD) or TEMPORARY in name


def open_storage(where: str | Path, read_only: bool) -> PostgresStorage | SqliteStorage:
    """The storage that is there."""
    if is_server(where):
        return PostgresStorage.open(_normalize_url(where), write=not read_only)
    return SqliteStorage.open(Path(where) / RECORD, write=not read_only)


def create_storage(where: str | Path, binding: Binding, run: "RunFolder | None") -> PostgresStorage | SqliteStorage:
    """A new storage; in a folder, with what embeds pictures for it beside it."""
    if is_server(where):
        return PostgresStorage.create(_normalize_url(where), binding)
    folder = Path(where)
    with ErrorTranslation(folder):
        make_folder(folder)
        digests = {} if run is None else copy_model(run, folder / MODEL)
    return SqliteStorage.create(folder / RECORD, binding, digests)


def redact_location(where: str) -> str:
    """A place without its password."""
    if not is_server(where):
        return where
    parts = urlsplit(where)
    login, _, place = parts.netloc.rpartition("@")  # hosts and ports as they are: there may be several
    user = login.partition(":")[0]
    name = dict(parse_qsl(parts.query)).get("gallery")
    return f"{parts.scheme}://{f'{user}@' if user else ''}{place}{parts.path}{f'?gallery={name}' if name else ''}"


def bytes_of(folder: Path) -> int:
    """Size of all files; some may go while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
