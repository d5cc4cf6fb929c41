"""Where pictures are: in memory, in files, packed into one buffer. Each class is an `Inputs`.

| class | holds | reading | stands in |
|---|---|---|---|
| `ImageArray` | decoded pictures | a copy | this file |
| `ImageFiles` | paths | opens and decodes | :mod:`mettle.data.encoded` |
| `PackedImages` | encoded pictures, end to end in one buffer | decodes | :mod:`mettle.data.encoded` |

All kinds of inputs can be had from here.

Beyond the protocol each of them has ``take`` (fewer items), ``name`` (what to call an item in a message) and
``content`` (the bytes that two equal items share); pictures have ``resized`` (another size, grey or colour).
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
from PIL import Image

from mettle.data.decode import Channels, Resize, Sides, Size, as_size, resize_picture
from mettle.data.encoded import Encoded, WholePictures, canvas_size, decode_with_whole
from mettle.data.encoded import ImageFiles as ImageFiles
from mettle.data.encoded import PackedImages as PackedImages
from mettle.data.encoded import picture as picture
from mettle.data.rows import Rows as Rows
from mettle.data.rows import digest
from mettle.data.samples import Inputs
from mettle.errors import DataError

Result = TypeVar("Result")
BUDGET = 2 << 30
CHUNK = 64  # items per task of a thread: enough that handing them out costs nothing


class ImageArray:
    """Decoded pictures in memory.

    Args:
        array: (n, h, w) or (n, h, w, c) uint8 with 1 or 3 channels, last.
        size: (height, width) that they get, once, here.
        resize: How they get it, see `mettle.data.decode.resize_picture`.
        source: Fingerprint of what the pictures were decoded from; their own hash when empty.
        whole: The same pictures uncropped, for random crops, where there are such.
    """

    kind: Literal["image", "row"] = "image"
    resident = True

    def __init__(
        self,
        array: np.ndarray,
        size: Sides | None = None,
        *,
        resize: Resize = "crop",
        source: str = "",
        whole: WholePictures | None = None,
    ) -> None:
        array, size = np.asarray(array), as_size(size)
        if array.dtype != np.uint8:
            raise DataError(f"pictures must be uint8, 0 to 255, got {array.dtype}: scale and round them")
        array = array[..., None] if array.ndim == 3 else array
        if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape[1:3]:
            raise DataError(f"pictures must be (n, h, w) or (n, h, w, 1 or 3), got {array.shape}: channels last")
        self.array = array if size is None or size == array.shape[1:3] else _resize_all(array, size, resize)
        self.source, self.whole = source, whole

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
        at = np.asarray(at, np.int64)
        whole = WholeArray(*self.whole.read(at)) if self.whole is not None else None
        return ImageArray(self.array[at], whole=whole)

    def resized(
        self, size: Sides | None = None, channels: Channels | None = None, resize: Resize = "crop"
    ) -> "ImageArray":
        """The same pictures in another size, in grey or in colour."""
        array = self.array
        if channels == 3 and array.shape[3] == 1:
            array = np.repeat(array, 3, axis=3)
        elif channels == 1 and array.shape[3] == 3:
            # The grey of Pillow (ITU-R 601-2) in its fixed point, so that both roads to grey agree.
            luma = array.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
            array = ((luma + 0x8000) >> 16).astype(np.uint8)[..., None]
        return ImageArray(array, size, resize=resize)

    def name(self, i: int) -> str:
        """What to call one picture."""
        return f"picture {i}"

    def content(self, i: int) -> bytes:
        """The pixels of one picture."""
        return self.array[i].tobytes()


class WholeArray:
    """Whole pictures in memory, see `WholePictures`."""

    def __init__(self, canvas: np.ndarray, aspect: np.ndarray) -> None:
        self.canvas, self.aspect = canvas, aspect

    def read(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `WholePictures`."""
        return self.canvas[at], self.aspect[at]


def hold(inputs: Inputs, budget_bytes: int = BUDGET) -> Inputs:
    """Decode everything once into memory when it fits the budget; otherwise give the inputs back unchanged.

    The fingerprint stays that of the source, so that holding or not does not look like other data.
    """
    if inputs.kind != "image" or inputs.resident:
        return inputs
    n, shape = len(inputs), inputs.shape
    cropped = isinstance(inputs, Encoded) and inputs.whole is not None
    sizes = [shape, (*canvas_size(shape[:2]), shape[2])] if cropped else [shape]  # type: ignore[arg-type]
    if n * sum(int(np.prod(size)) for size in sizes) > budget_bytes:
        return inputs
    array, *canvas = (np.empty((n, *size), np.uint8) for size in sizes)
    aspect = np.ones(n, np.float32)

    def fill(at: range) -> None:
        if not cropped:
            array[at.start : at.stop] = inputs.read(np.arange(at.start, at.stop))
            return
        for i in at:
            array[i], canvas[0][i], aspect[i] = decode_with_whole(inputs, i)  # type: ignore[arg-type]

    for _ in in_threads(fill, n):
        pass
    whole = WholeArray(canvas[0], aspect) if cropped else None
    return ImageArray(array, source=inputs.fingerprint(), whole=whole)


def in_threads(work: Callable[[range], Result], n: int, chunk: int = CHUNK) -> Iterator[Result]:
    """Results of ``work`` on consecutive ranges of 0..n, in order (decoding and hashing release the lock)."""
    ranges = [range(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        yield from threads.map(work, ranges)


def _resize_all(array: np.ndarray, size: Size, resize: Resize) -> np.ndarray:
    """(n, h, w, c) pictures in another size, antialiased."""
    result = np.empty((len(array), *size, array.shape[3]), np.uint8)

    def fill(at: range) -> None:
        for i in at:
            image = Image.fromarray(array[i] if array.shape[3] == 3 else array[i, :, :, 0])
            result[i] = np.asarray(resize_picture(image, size, resize)).reshape(result.shape[1:])

    for _ in in_threads(fill, len(array)):
        pass
    return result
