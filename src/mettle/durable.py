"""Writing files so that a crash leaves the old content or the new, never half of either.

Every durable write of the package goes through these few functions: temporary name, write, flush, fsync, rename,
fsync of the folder. A process killed at any point leaves at most a ``*.tmp-*`` leftover, which is swept later.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

TEMPORARY = ".tmp-"


def write_bytes(path: Path, content: bytes | memoryview, mode: int = 0o644) -> None:
    """Replace the file at ``path`` by ``content``, all or nothing; until it is complete its owner alone may read it."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=path.name + TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """Replace the file at ``path`` by UTF-8 text, all or nothing."""
    write_bytes(path, content.encode())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder ``path`` appear complete: ``fill`` writes into a temporary one, which is then renamed."""
    path = Path(path)
    temporary = Path(tempfile.mkdtemp(prefix=path.name + TEMPORARY, dir=path.parent))
    try:
        fill(temporary)
        for file in temporary.rglob("*"):
            if file.is_dir():
                sync_folder(file)
                continue
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(temporary)
        os.chmod(temporary, 0o755)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind in ``folder``."""
    for leftover in Path(folder).glob(f"*{TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


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
