"""Writing files so that a crash leaves the old content or the new, never half of either.

Every durable write of the package goes through these few functions: temporary name, write, flush, fsync, rename,
fsync of the folder. A process killed at any point leaves at most one ``NAME.mettle-tmp-NUMBER`` beside what it was
writing: the next write of the same file or folder removes it, and `remove_leftovers` whatever is left in a folder. A
writer locks its temporary file and the kernel takes the lock back when it dies, so what another process is still
writing is never removed. Where files cannot be locked (some network disks, systems without ``flock``), leftovers stay
until `remove_leftovers` takes them.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

TEMPORARY = ".mettle-tmp-"  # a name that nobody else gives a file: what has it may be removed

_LEFTOVER = re.compile(rf".+{re.escape(TEMPORARY)}\d+(-journal)?")  # SQLite writes a journal beside what it makes


def write_bytes(path: Path, content: bytes | memoryview, mode: int | None = None) -> None:
    """Replace the file at ``path`` by ``content``, all or nothing.

    The umask says who may read it, unless a ``mode`` does: then nobody but its owner may until it is complete.
    """
    path = Path(path)
    with _temporary_beside(path, lambda place: _create_empty(place, 0o666 if mode is None else 0o600)) as temporary:
        with temporary.open("r+b") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    sync_folder(path.parent)


def write_file(path: Path, fill: Callable[[Path], Any], mode: int) -> None:
    """Make the file ``path`` appear complete: ``fill`` writes into a temporary one, which is then renamed."""
    path = Path(path)
    with _temporary_beside(path, lambda place: _create_empty(place, mode)) as temporary:
        fill(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    sync_folder(path.parent)


def write_text(path: Path, content: str, mode: int | None = None) -> None:
    """Replace the file at ``path`` by UTF-8 text, all or nothing."""
    write_bytes(path, content.encode(), mode)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder ``path`` appear complete: ``fill`` writes into a temporary one, which is then renamed."""
    path = Path(path)
    with _temporary_beside(path, os.mkdir) as temporary:
        fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_dir():
                sync_folder(file)
                continue
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
        os.rename(temporary, path)
    sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left behind in ``folder``; for a caller that has the folder to itself."""
    for leftover in Path(folder).iterdir():
        if _LEFTOVER.fullmatch(leftover.name):
            _remove_leftover(leftover, unsure=True)


def open_unlinked(path: Path) -> BufferedReader:
    """Open a regular file for reading; where a link or anything else has its name, that is an OSError.

    For folders that may come from elsewhere, in which a link could lead anywhere.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def find_link(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these entries of a folder that is neither a regular file nor a folder itself, such as a link."""
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = os.lstat(folder / name).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return folder / name
    return None


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, durably: each name is synchronized in its folder."""
    path = Path(path)
    missing = [part for part in (path, *path.parents) if not part.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for part in reversed(missing):
        sync_folder(part.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable (a no-op where folders cannot be opened)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hash of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _temporary_beside(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """A temporary file or folder beside ``path``, locked while it is written; nothing of it stays if that fails."""
    temporary, handle = _claim_temporary(path, make)
    try:
        yield temporary
    except BaseException:
        if handle is None or _is_same_file(handle, temporary):  # else it was renamed already, and another has the name
            _delete_path(temporary)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _claim_temporary(path: Path, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    """A name beside ``path`` that nobody has, made by ``make``, and its lock; what the dead left there is removed."""
    start = path.name + TEMPORARY
    with suppress(OSError):  # a folder that may be written to, but not looked into
        for name in os.listdir(path.parent):
            if name.startswith(start) and _LEFTOVER.fullmatch(name):
                _remove_leftover(path.parent / name, unsure=False)
    turn = 0
    while True:
        temporary, turn = path.parent / f"{start}{turn}", turn + 1
        try:
            make(temporary)
        except FileExistsError:
            continue
        try:
            return temporary, _lock_path(temporary)
        except (BlockingIOError, FileNotFoundError):  # another took it for a leftover before it was locked
            continue


def _create_empty(place: Path, mode: int) -> None:
    """An empty file; refuses one that exists."""
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))


def _remove_leftover(leftover: Path, unsure: bool) -> None:
    """Remove what a dead writer left; ``unsure``: also where it cannot be told whether it is dead."""
    try:
        handle = _lock_path(leftover)
    except (BlockingIOError, FileNotFoundError):  # its writer lives, or it is gone
        return
    try:
        if handle is not None or unsure:
            _delete_path(leftover)
    finally:
        if handle is not None:
            os.close(handle)


def _lock_path(temporary: Path) -> int | None:
    """Lock a temporary file or folder: a handle that holds the lock, None where there are no locks.

    Raises:
        BlockingIOError: another writer holds it.
        FileNotFoundError: another removed it meanwhile.
    """
    try:
        import fcntl
    except ImportError:  # not on every system
        return None
    try:
        handle = os.open(temporary, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(handle, temporary):
            return handle
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    os.close(handle)
    raise FileNotFoundError(temporary)


def _is_same_file(handle: int, place: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(place))
    except FileNotFoundError:
        return False


def _delete_path(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
        return
    with suppress(OSError):
        place.unlink(missing_ok=True)
