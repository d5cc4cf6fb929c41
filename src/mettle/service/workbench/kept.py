"""Arrays kept in a file beside a run, and made again whenever the file is absent, damaged or of another shape."""

import io
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from mettle.atomic_files import write_bytes


def kept(
    path: Path, wanted: Mapping[str, tuple[int, ...]], make: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of a file if they are all there in these shapes, else new ones, which are then kept.

    A folder that cannot be written to is no error: the arrays are made again the next time.
    """
    held = _read(path, wanted)
    if held is not None:
        return held
    made = {name: np.asarray(array) for name, array in make().items()}
    buffer = io.BytesIO()
    np.savez(buffer, **made)  # type: ignore[arg-type]
    with suppress(OSError):
        write_bytes(path, buffer.getvalue())
    return made


def _read(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray] | None:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            found = {name: file[name] for name in wanted}  # every member's checksum is compared while it is read
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    fits = all(found[name].shape == shape and found[name].dtype.kind == "f" for name, shape in wanted.items())
    return found if fits else None
