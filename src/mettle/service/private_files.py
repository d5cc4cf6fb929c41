"""Files that only their owner may read."""

import os
import stat
from pathlib import Path

from mettle.atomic_files import write_bytes
from mettle.errors import InputError


def write_secret(path: Path, content: bytes) -> None:
    """Replace a file, all or nothing, never readable by anybody else, not even for a moment."""
    write_bytes(path, content, mode=0o600)


def read_secret(path: Path) -> bytes:
    """The content of a file that nobody but its owner may read; any other is refused."""
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise InputError(f"{path} must be a regular file")
        if mode & 0o077:
            raise InputError(f"{path} can be read or written by others (mode {mode & 0o777:o}): run chmod 600 {path}")
        return file.read()
