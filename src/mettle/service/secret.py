"""Files that only their owner may read."""

import os
import secrets
import stat
from pathlib import Path

from mettle.durable import TEMPORARY, sync_folder
from mettle.errors import InputError


def write_secret(path: Path, content: bytes) -> None:
    """Replace a file, all or nothing, never readable by anybody else, not even for a moment."""
    temporary = path.parent / f"{path.name}{TEMPORARY}{secrets.token_hex(6)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_secret(path: Path) -> bytes:
    """The content of a file that nobody but its owner may read; any other is refused."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{path} must be a regular file")
        if mode & 0o077:
            raise InputError(f"{path} can be read or written by others (mode {mode & 0o777:o}): run chmod 600 {path}")
        return file.read()
