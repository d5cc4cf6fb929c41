"""One writer at a time: a lock that the kernel takes back when its holder dies, however it dies."""

import os
import weakref
from pathlib import Path

from mettle.errors import GalleryLocked, GalleryUnavailable


class Lock:
    """The write lock of a gallery's folder. The file stays; what counts is who holds a `flock` on it."""

    def __init__(self, handle: int):
        self._handle: int | None = handle
        # A forked child shares the open file and would keep the lock after its parent died.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := this()) and lock.release())

    @classmethod
    def take(cls, path: Path) -> "Lock":
        """Take the lock at once, or raise GalleryLocked that names the holder."""
        import fcntl  # not on every system; reading a gallery needs no lock

        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GalleryUnavailable(
                f"cannot write to the gallery in {path.parent}: {error.strerror}; free the disk or its permissions, "
                "or open it read-only"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {holder}" if holder.isdigit() else "another process"
            if holder == str(os.getpid()):
                who = f"this process ({holder})"
            raise GalleryLocked(
                f"{who} is writing to the gallery in {path.parent}: close it there first, or leave the change to it; "
                "in Python, read_only=True reads beside it"
            ) from None
        try:  # only for the message above; a full disk is no reason to refuse
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass
        return cls(handle)

    def release(self) -> None:
        """Give it back; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
