"""Where pictures are: in memory, in files, packed into one buffer. Each class is an `Inputs`.

| class | holds | reading |
|---|---|---|
| `ImageArray` | decoded pictures | a copy |
| `ImageFiles` | paths | opens and decodes |
| `PackedImages` | encoded pictures, end to end in one buffer | decodes |

All pictures of one source come out in one size. Without ``size`` that is the size of the first picture that
can be read, and a picture of another size is an error that says so. Sizes are (height, width), or one side.

Beyond the protocol each of them has ``take`` (fewer items), ``name`` (what to call an item in a message) and
``content`` (the bytes that two equal items share); pictures have ``resized`` (another size, grey or colour).
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
from PIL import Image

from mettle.data.decode import Channels, Sides, Size, as_size, decode, read_file, shown
from mettle.data.rows import Rows as Rows  # all kinds of inputs can be had from here
from mettle.data.rows import digest
from mettle.data.samples import Inputs
from mettle.errors import DataError

Result = TypeVar("Result")
BUDGET = 2 << 30
HASHED_FILES = 64
CHUNK = 64  # items per task of a thread: enough that handing them out costs nothing


class ImageArray:
    """Decoded pictures in memory.

    Args:
        array: (n, h, w) or (n, h, w, c) uint8 with 1 or 3 channels, last.
        size: (height, width) to stretch to, once, here.
        source: Fingerprint of what the pictures were decoded from; their own hash when empty.
    """

    kind: Literal["image", "row"] = "image"
    resident = True

    def __init__(self, array: np.ndarray, size: Sides | None = None, *, source: str = "") -> None:
        array, size = np.asarray(array), as_size(size)
        if array.dtype != np.uint8:
            raise DataError(f"pictures must be uint8, 0 to 255, got {array.dtype}: scale and round them")
        array = array[..., None] if array.ndim == 3 else array
        if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape[1:3]:
            raise DataError(f"pictures must be (n, h, w) or (n, h, w, 1 or 3), got {array.shape}: channels last")
        self.array = array if size is None or size == array.shape[1:3] else _stretched(array, size)
        self.source = source

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w, c)."""
        return self.array.shape[1:]

    def read(self, at: np.ndarray) -> np.ndarray:
        """Copies of the pictures at these positions."""
        return self.array[np.asarray(at, np.int64)]

    def fingerprint(self) -> str:
        """Hash of all pixels, or of what they were decoded from."""
        return self.source or digest(str(self.array.shape).encode(), self.array)

    def take(self, at: np.ndarray) -> "ImageArray":
        """Only the pictures at these positions."""
        return ImageArray(self.array[np.asarray(at, np.int64)])

    def resized(self, size: Sides | None = None, channels: Channels | None = None) -> "ImageArray":
        """The same pictures in another size, in grey or in colour."""
        array = self.array
        if channels == 3 and array.shape[3] == 1:
            array = np.repeat(array, 3, axis=3)
        elif channels == 1 and array.shape[3] == 3:
            # The grey of Pillow (ITU-R 601-2) in its fixed point, so that both roads to grey agree.
            luma = array.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
            array = ((luma + 0x8000) >> 16).astype(np.uint8)[..., None]
        return ImageArray(array, size)

    def name(self, i: int) -> str:
        """What to call one picture."""
        return f"picture {i}"

    def content(self, i: int) -> bytes:
        """The pixels of one picture."""
        return self.array[i].tobytes()


class ImageFiles:
    """Picture files, opened when read.

    Args:
        paths: One file per picture, relative to ``root`` or absolute.
        size: (height, width) to stretch to; None for the files' own size, which must then be one size.
        channels: 1 for grey, 3 for RGB.
        root: Folder that relative paths start from.
    """

    kind: Literal["image", "row"] = "image"
    resident = False

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: Sides | None = None,
        channels: Channels = 3,
        root: str | Path = ".",
    ) -> None:
        self.paths, self.root, self.size = tuple(map(str, paths)), str(root), as_size(size)
        self.channels: Channels = channels
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w, c)."""
        self._shape = self._shape or _shape(self)
        return self._shape

    def read(self, at: np.ndarray) -> np.ndarray:
        """Decode the files at these positions."""
        return _read(self, at)

    def fingerprint(self) -> str:
        """Hash of every relative path and byte count, and of the content of 64 files evenly spread.

        Hashing all content would read the whole set; a change that keeps the byte count of a file that is not
        among the 64 goes unseen.
        """
        found = hashlib.sha256(repr((len(self), self.size, self.channels)).encode())
        for i, path in enumerate(self.paths):
            try:
                count = self.path(i).stat().st_size
            except (OSError, ValueError) as problem:
                raise DataError(f"cannot find {shown(path)}: {getattr(problem, 'strerror', problem)}") from None
            found.update(os.fsencode(f"{path}\0{count}\0"))
        hashed = np.linspace(0, len(self) - 1, min(HASHED_FILES, len(self))).astype(np.int64)
        for i in hashed.tolist():
            found.update(hashlib.sha256(self.content(i)).digest())
        return found.hexdigest()[:16]

    def take(self, at: np.ndarray) -> "ImageFiles":
        """Only the files at these positions."""
        paths = [self.paths[i] for i in np.asarray(at).tolist()]
        return ImageFiles(paths, self.size, self.channels, self.root)

    def resized(self, size: Sides | None = None, channels: Channels | None = None) -> "ImageFiles":
        """The same files, decoded to another size, in grey or in colour."""
        return ImageFiles(self.paths, size or self.size, channels or self.channels, self.root)

    def path(self, i: int) -> Path:
        """Where one file is."""
        return Path(self.root, self.paths[i])

    def name(self, i: int) -> str:
        """The path as it was given."""
        return self.paths[i]

    def content(self, i: int) -> bytes:
        """The encoded bytes of one file."""
        try:
            return read_file(self.path(i))
        except (DataError, OSError, ValueError) as problem:
            reason = (problem.strerror if isinstance(problem, OSError) else None) or problem
            raise DataError(f"cannot read {shown(self.paths[i])}: {reason}") from None


class PackedImages:
    """Encoded pictures end to end in one buffer, decoded when read.

    Picture ``i`` is ``header + data[offsets[i]:offsets[i + 1]] + trailer``: what all share is stored once.

    Args:
        data: 1-D uint8, the pictures end to end.
        offsets: n + 1 rising positions in ``data``.
        header: Bytes that stand before every picture.
        trailer: Bytes that stand after every picture.
        size: (height, width) to stretch to; None for the pictures' own size, which must then be one size.
        channels: 1 for grey, 3 for RGB.
    """

    kind: Literal["image", "row"] = "image"
    resident = False

    def __init__(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        header: bytes = b"",
        trailer: bytes = b"",
        size: Sides | None = None,
        channels: Channels = 3,
    ) -> None:
        data, offsets = np.asarray(data), np.asarray(offsets)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise DataError(f"packed pictures: data must be 1-D uint8, got {data.dtype} {data.shape}")
        if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 1:
            raise DataError(f"packed pictures: offsets must be n + 1 whole numbers, got {offsets.dtype}")
        offsets = offsets.astype(np.int64)
        if offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
            raise DataError(f"packed pictures: offsets must rise from 0 to at most {len(data)}, the data's size")
        self.data, self.offsets, self.header, self.trailer = data, offsets, bytes(header), bytes(trailer)
        self.size = as_size(size)
        self.channels: Channels = channels
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w, c)."""
        self._shape = self._shape or _shape(self)
        return self._shape

    def read(self, at: np.ndarray) -> np.ndarray:
        """Decode the pictures at these positions."""
        return _read(self, at)

    def fingerprint(self) -> str:
        """Hash of all encoded bytes and of how they are decoded."""
        how = repr((self.size, self.channels, self.header, self.trailer))
        return digest(how.encode(), self.offsets, self.data)

    def take(self, at: np.ndarray) -> "PackedImages":
        """Only the pictures at these positions, copied."""
        parts = [self.data[self.offsets[i] : self.offsets[i + 1]] for i in np.asarray(at).tolist()]
        offsets = np.cumsum([0, *(len(part) for part in parts)])
        data = np.concatenate([np.empty(0, np.uint8), *parts])
        return PackedImages(data, offsets, self.header, self.trailer, self.size, self.channels)

    def resized(self, size: Sides | None = None, channels: Channels | None = None) -> "PackedImages":
        """The same pictures, decoded to another size, in grey or in colour."""
        how = (self.header, self.trailer, size or self.size, channels or self.channels)
        return PackedImages(self.data, self.offsets, *how)

    def name(self, i: int) -> str:
        """What to call one picture."""
        return f"picture {i}"

    def content(self, i: int) -> bytes:
        """The encoded bytes of one picture."""
        i = range(len(self))[i]  # so that -1 is the last and n an IndexError
        return self.header + self.data[self.offsets[i] : self.offsets[i + 1]].tobytes() + self.trailer


class Encoded(Protocol):
    """What `ImageFiles` and `PackedImages` share: pictures that have to be decoded."""

    size: Size | None
    channels: Channels

    def __len__(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def name(self, i: int) -> str: ...  # noqa: D102

    def content(self, i: int) -> bytes: ...  # noqa: D102


def picture(inputs: Encoded, i: int, content: bytes | None = None) -> np.ndarray:
    """Decode one picture, or its content when that is already at hand."""
    content = inputs.content(i) if content is None else content
    return decode(content, size=inputs.size, channels=inputs.channels, name=inputs.name(i))


def hold(inputs: Inputs, budget_bytes: int = BUDGET) -> Inputs:
    """Decode everything once into memory when it fits the budget; otherwise give the inputs back unchanged.

    The fingerprint stays that of the source, so that holding or not does not look like other data.
    """
    if inputs.kind != "image" or inputs.resident or len(inputs) * int(np.prod(inputs.shape)) > budget_bytes:
        return inputs
    array = np.empty((len(inputs), *inputs.shape), np.uint8)

    def fill(at: range) -> None:
        array[at.start : at.stop] = inputs.read(np.arange(at.start, at.stop))

    for _ in in_threads(fill, len(inputs)):
        pass
    return ImageArray(array, source=inputs.fingerprint())


def in_threads(work: Callable[[range], Result], n: int, chunk: int = CHUNK) -> Iterator[Result]:
    """Results of ``work`` on consecutive ranges of 0..n, in order (decoding and hashing release the lock)."""
    ranges = [range(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        yield from threads.map(work, ranges)


def _read(inputs: Encoded, at: np.ndarray) -> np.ndarray:
    """Pictures of one size as one array."""
    pictures = []
    for i in np.asarray(at, np.int64).tolist():
        one = picture(inputs, i)
        if inputs.size is None and one.shape != inputs.shape:
            (h, w), (h0, w0) = one.shape[:2], inputs.shape[:2]
            differs = f"{shown(inputs.name(i))} is {h} x {w}, the first is {h0} x {w0}"
            raise DataError(f"{differs}: give one size (data.size in a recipe, size= in Python)")
        pictures.append(one)
    return np.stack(pictures) if pictures else np.empty((0, *inputs.shape), np.uint8)


def _shape(inputs: Encoded) -> tuple[int, ...]:
    """(h, w, c): as wanted, or that of the first picture that can be decoded."""
    if inputs.size is not None:
        return (*inputs.size, inputs.channels)
    problem = "there are none"
    for i in range(len(inputs)):
        try:
            return picture(inputs, i).shape
        except DataError as error:
            problem = str(error)
    raise DataError(f"no picture can be read: {problem}")


def _stretched(array: np.ndarray, size: Size) -> np.ndarray:
    """(n, h, w, c) pictures in another size, antialiased."""
    result = np.empty((len(array), *size, array.shape[3]), np.uint8)

    def stretch(at: range) -> None:
        for i in at:
            image = Image.fromarray(array[i] if array.shape[3] == 3 else array[i, :, :, 0])
            small = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, reducing_gap=2.0)
            result[i] = np.asarray(small).reshape(result.shape[1:])

    for _ in in_threads(stretch, len(array)):
        pass
    return result
