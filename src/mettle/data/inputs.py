"""Where pictures are: in memory, in files, packed into one buffer. Each class is an `Inputs`.

| class | holds | reading | stands in |
|---|---|---|---|
| `ImageArray` | decoded pictures | a copy | this file |
| `ImageFiles` | paths | opens and decodes | :mod:`mettle.data.inputs` |
| `PackedImages` | encoded pictures, end to end in one buffer | decodes | :mod:`mettle.data.inputs` |

All kinds of inputs can be had from here.

Beyond the protocol each of them has ``take`` (fewer items), ``name`` (what to call an item in a message) and
``content`` (the bytes that two equal items share); pictures have ``with_size`` (another size, grey or colour).

Pictures that have to be decoded: in files, or packed into one buffer. Each class is an `Inputs`.

All pictures of one source come out in one size. Without ``size`` that is the size of the first picture that
can be read, and a picture of another size is an error that says so. Sizes are (height, width), or one side.
"""

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image

from mettle.data.dataset import Inputs
from mettle.data.image_decoding import (
    Channels,
    ImageTarget,
    Interpolation,
    Resize,
    Sides,
    Size,
    as_size,
    check_crop,
    check_interpolation,
    check_resize,
    decode_to_sizes,
    quote_name,
    read_image_bytes,
    resize_to_array,
)
from mettle.data.reader_pool import activate_in_thread, active_pool
from mettle.errors import DataError

if TYPE_CHECKING:
    from mettle.data.sources.feature_columns import Feature

HASHED_FILES = 64
CANVAS = 1.5  # sides of the canvas of a whole picture, relative to those that the network takes


class EncodedImages(ABC):
    """Pictures that have to be decoded, in one size and as many channels.

    Those that are cropped to their size can also be read whole, for random crops: see `UncroppedImages`.
    """

    kind: Literal["image", "row"] = "image"
    is_in_memory = False
    _shape: tuple[int, ...] = ()

    def __init__(
        self,
        size: Sides | None,
        channels: Channels,
        resize: Resize,
        crop: float | None,
        interpolation: Interpolation,
    ) -> None:
        self.size: Size | None = as_size(size)
        self.channels: Channels = channels
        self.resize: Resize = check_resize(resize)
        self.crop: float | None = check_crop(crop)
        self.interpolation: Interpolation = check_interpolation(interpolation)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, i: int) -> str:
        """What to call one picture."""

    @abstractmethod
    def content(self, i: int) -> bytes:
        """The encoded bytes of one picture."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(h, w, c): as wanted, or that of the first picture that can be decoded."""
        self._shape = self._shape or self._find_shape()
        return self._shape

    def read(self, at: np.ndarray) -> np.ndarray:
        """Decode the pictures at these positions, into one array."""
        pictures = []
        for i in np.asarray(at, np.int64).tolist():
            one = decode_item(self, i)
            if self.size is None and one.shape != self.shape:
                (h, w), (h0, w0) = one.shape[:2], self.shape[:2]
                differs = f"{quote_name(self.name(i))} is {h} x {w}, the first is {h0} x {w0}"
                raise DataError(f"{differs}: give one size (data.size in a recipe, size= in Python)")
            pictures.append(one)
        return np.stack(pictures) if pictures else np.empty((0, *self.shape), np.uint8)

    @property
    def target(self) -> ImageTarget:
        """What each picture becomes."""
        return ImageTarget(self.size, self.resize, self.crop, self.interpolation)

    @property
    def uncropped(self) -> "UncroppedImages | None":
        """The whole pictures, where their sides are cut off otherwise."""
        return DecodedUncropped(self) if self.size is not None and self.resize == "crop" else None

    def _ways(self) -> tuple[object, ...]:
        """How pictures get their size, for a fingerprint: as ever where only ``resize`` says how."""
        usual = self.crop is None and self.interpolation == "bilinear"
        return (self.resize,) if usual else tuple(self.target[1:])

    def _find_shape(self) -> tuple[int, ...]:
        if self.size is not None:
            return (*self.size, self.channels)
        problem = "there are none"
        for i in range(len(self)):
            try:
                return decode_item(self, i).shape
            except DataError as error:
                problem = str(error)
        raise DataError(f"no picture can be read: {problem}")


class ImageFiles(EncodedImages):
    """Picture files, opened when read.

    Args:
        paths: One file per picture, relative to ``root`` or absolute.
        size: (height, width); None for the files' own size, which must then be one size.
        channels: 1 for grey, 3 for RGB.
        root: Folder that relative paths start from.
        resize, crop, interpolation: How they get that size, see `mettle.data.image_decoding.resize_image`.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: Sides | None = None,
        channels: Channels = 3,
        root: str | Path = ".",
        resize: Resize = "crop",
        crop: float | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.paths, self.root = tuple(map(str, paths)), str(root)
        super().__init__(size, channels, resize, crop, interpolation)

    def __len__(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        """Hash of every relative path and byte count, and of the content of 64 files evenly spread.

        Hashing all content would read the whole set; a change that keeps the byte count of a file that is not
        among the 64 goes unseen.
        """
        found = hashlib.sha256(repr((len(self), self.size, self.channels, *self._ways())).encode())
        for i, path in enumerate(self.paths):
            try:
                count = self.path(i).stat().st_size
            except (OSError, ValueError) as problem:
                raise DataError(f"cannot find {quote_name(path)}: {self._explain_failure(i, problem)}") from None
            found.update(os.fsencode(f"{path}\0{count}\0"))
        hashed = np.linspace(0, len(self) - 1, min(HASHED_FILES, len(self))).astype(np.int64)
        for i in hashed.tolist():
            found.update(hashlib.sha256(self.content(i)).digest())
        return found.hexdigest()[:16]

    def take(self, at: np.ndarray) -> "ImageFiles":
        """Only the files at these positions."""
        paths = [self.paths[i] for i in np.asarray(at).tolist()]
        return ImageFiles(paths, self.size, self.channels, self.root, *self.target[1:])

    def with_size(
        self,
        size: Sides | None = None,
        channels: Channels | None = None,
        resize: Resize | None = None,
        crop: float | None = None,
        interpolation: Interpolation | None = None,
    ) -> "ImageFiles":
        """The same files, decoded to another size, in grey or in colour; what is not given stays as it is."""
        ways = (resize or self.resize, self.crop if crop is None else crop, interpolation or self.interpolation)
        return ImageFiles(self.paths, size or self.size, channels or self.channels, self.root, *ways)

    def path(self, i: int) -> Path:
        """Where one file is."""
        return Path(self.root, self.paths[i])

    def name(self, i: int) -> str:
        """The path as it was given."""
        return self.paths[i]

    def content(self, i: int) -> bytes:
        """The encoded bytes of one file."""
        try:
            return read_image_bytes(self.path(i))
        except (DataError, OSError, ValueError) as problem:
            raise DataError(f"cannot read {quote_name(self.paths[i])}: {self._explain_failure(i, problem)}") from None

    def _explain_failure(self, i: int, problem: Exception) -> str:
        """Why a file cannot be had; of one that is not there, where it was looked for."""
        reason = str((problem.strerror if isinstance(problem, OSError) else None) or problem)
        lost = isinstance(problem, FileNotFoundError) and not os.path.lexists(self.path(i))
        return f"{reason}{describe_root(self.paths[i], self.root)}" if lost else reason


def describe_root(path: str, root: str | Path) -> str:
    """Where a path that leads nowhere was taken to start, unless it says so itself."""
    if os.path.isabs(path):
        return ""
    return f" in {quote_name(os.path.abspath(root))} (relative paths of a table start from its folder)"


class PackedImages(EncodedImages):
    """Encoded pictures end to end in one buffer, decoded when read.

    Picture ``i`` is ``header + data[offsets[i]:offsets[i + 1]] + trailer``: what all share is stored once.

    Args:
        data: 1-D uint8, the pictures end to end.
        offsets: n + 1 rising positions in ``data``.
        header: Bytes that stand before every picture.
        trailer: Bytes that stand after every picture.
        size: (height, width); None for the pictures' own size, which must then be one size.
        channels: 1 for grey, 3 for RGB.
        resize, crop, interpolation: How they get that size, see `mettle.data.image_decoding.resize_image`.
    """

    def __init__(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        header: bytes = b"",
        trailer: bytes = b"",
        size: Sides | None = None,
        channels: Channels = 3,
        resize: Resize = "crop",
        crop: float | None = None,
        interpolation: Interpolation = "bilinear",
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
        super().__init__(size, channels, resize, crop, interpolation)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def fingerprint(self) -> str:
        """Hash of all encoded bytes and of how they are decoded."""
        how = repr((self.size, self.channels, *self._ways(), self.header, self.trailer))
        return hash_arrays(how.encode(), self.offsets, self.data)

    def take(self, at: np.ndarray) -> "PackedImages":
        """Only the pictures at these positions, copied."""
        parts = [self.data[self.offsets[i] : self.offsets[i + 1]] for i in np.asarray(at).tolist()]
        offsets = np.cumsum([0, *(len(part) for part in parts)])
        data = np.concatenate([np.empty(0, np.uint8), *parts])
        how = (self.header, self.trailer, self.size, self.channels, *self.target[1:])
        return PackedImages(data, offsets, *how)

    def with_size(
        self,
        size: Sides | None = None,
        channels: Channels | None = None,
        resize: Resize | None = None,
        crop: float | None = None,
        interpolation: Interpolation | None = None,
    ) -> "PackedImages":
        """The same pictures, decoded to another size, in grey or in colour; what is not given stays as it is."""
        ways = (resize or self.resize, self.crop if crop is None else crop, interpolation or self.interpolation)
        how = (self.header, self.trailer, size or self.size, channels or self.channels, *ways)
        return PackedImages(self.data, self.offsets, *how)

    def name(self, i: int) -> str:
        """What to call one picture."""
        return f"picture {i}"

    def content(self, i: int) -> bytes:
        """The encoded bytes of one picture."""
        i = range(len(self))[i]  # so that -1 is the last and n an IndexError
        return self.header + self.data[self.offsets[i] : self.offsets[i + 1]].tobytes() + self.trailer


def decode_item(inputs: EncodedImages, i: int, content: bytes | None = None) -> np.ndarray:
    """Decode one picture, or its content when that is already at hand."""
    content = inputs.content(i) if content is None else content
    (found,), _ = decode_to_sizes(content, [inputs.target], channels=inputs.channels, name=inputs.name(i))
    return found


class UncroppedImages(Protocol):
    """Whole pictures for random crops: stretched to one canvas, with the proportions that undo the stretching.

    A crop of the canvas whose sides are chosen by ``aspect`` is a crop of the picture itself. The canvas is larger than
    what the network takes, so that a small crop is still sharp.
    """

    def read(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(b, h, w, c) uint8 canvases and (b,) float32 width over height of the pictures at these positions."""
        ...


class DecodedUncropped:
    """Whole pictures, decoded when read."""

    def __init__(self, inputs: EncodedImages) -> None:
        self.inputs = inputs

    def read(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `UncroppedImages`."""
        found = [_decode_to_canvas(self.inputs, int(i), []) for i in np.asarray(at)]
        return np.stack([canvas for (canvas,), _ in found]), np.array([aspect for _, aspect in found], np.float32)


def canvas_size(size: Size) -> Size:
    """The size of the canvas that whole pictures are kept on."""
    return math.ceil(CANVAS * size[0]), math.ceil(CANVAS * size[1])


def decode_with_uncropped(inputs: EncodedImages, i: int) -> tuple[np.ndarray, np.ndarray, float]:
    """One picture as evaluation sees it, the whole of it on its canvas, and its width over its height."""
    (cropped, canvas), aspect = _decode_to_canvas(inputs, i, [inputs.target])
    return cropped, canvas, aspect


def _decode_to_canvas(inputs: EncodedImages, i: int, others: Sequence[ImageTarget]) -> tuple[list[np.ndarray], float]:
    """One picture in other ways and, last, the whole of it on its canvas; and its width over its height."""
    assert inputs.size is not None
    canvas = ImageTarget(canvas_size(inputs.size), "stretch", interpolation=inputs.interpolation)
    # The canvas is the same whether the picture is decoded for evaluation beside it or not.
    how: dict[str, Any] = {"channels": inputs.channels, "every_pixel": inputs.crop is not None}
    return decode_to_sizes(inputs.content(i), [*others, canvas], name=inputs.name(i), **how)


class InMemoryArray:
    """Items that are the entries of one array along its first dimension."""

    is_in_memory = True
    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one item: (f,) or (h, w, c)."""
        return self.array.shape[1:]

    def read(self, at: np.ndarray) -> np.ndarray:
        """Copies of the items at these positions."""
        return self.array[np.asarray(at, np.int64)]


class FeatureArray(InMemoryArray):
    """Rows of numbers in memory: embeddings, or the features of a table.

    Args:
        array: (n, f) numbers; kept as float32, in which a number beyond its range is infinite.
        names: What the f columns are called, when known.
        features: The columns of the table that they came from, when they came from one.
    """

    kind: Literal["image", "row"] = "row"

    def __init__(self, array: np.ndarray, names: Sequence[str] = (), features: "Sequence[Feature]" = ()) -> None:
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "fiub":
            raise DataError(f"rows must be (n, f) numbers, got {array.dtype} {array.shape}")
        names = names or [title for feature in features for title in feature.output_names]
        if names and len(names) != array.shape[1]:
            raise DataError(f"{len(names)} names for {array.shape[1]} columns: one per column is needed")
        with np.errstate(over="ignore"):
            self.array = array.astype(np.float32, copy=False)
        self.names, self.features = tuple(names), tuple(features)

    def fingerprint(self) -> str:
        """Hash of all numbers; what they are called is the contract's affair."""
        return hash_arrays(str(self.array.shape).encode(), self.array)

    def take(self, at: np.ndarray) -> "FeatureArray":
        """Only the rows at these positions."""
        return FeatureArray(self.array[np.asarray(at, np.int64)], self.names, self.features)

    def name(self, i: int) -> str:
        """What to call one row, counted from 1."""
        return f"row {i + 1}"

    def content(self, i: int) -> bytes:
        """The numbers of one row."""
        return self.array[i].tobytes()


def hash_arrays(head: bytes, *arrays: np.ndarray) -> str:
    """A short hash of some arrays."""
    found = hashlib.sha256(head)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


Result = TypeVar("Result")
MEMORY_LIMIT = 2 << 30
CHUNK = 64  # items per task of a thread: enough that handing them out costs nothing


class ImageArray(InMemoryArray):
    """Decoded pictures in memory.

    Args:
        array: (n, h, w) or (n, h, w, c) uint8 with 1 or 3 channels, last.
        size: (height, width) that they get, once, here.
        resize, crop, interpolation: How they get it, see `mettle.data.image_decoding.resize_image`.
        source: Fingerprint of what the pictures were decoded from; their own hash when empty.
        uncropped: The same pictures uncropped, for random crops, where there are such.
    """

    kind: Literal["image", "row"] = "image"

    def __init__(
        self,
        array: np.ndarray,
        size: Sides | None = None,
        *,
        resize: Resize = "crop",
        crop: float | None = None,
        interpolation: Interpolation = "bilinear",
        source: str = "",
        uncropped: UncroppedImages | None = None,
    ) -> None:
        array, size = np.asarray(array), as_size(size)
        if array.dtype != np.uint8:
            raise DataError(f"pictures must be uint8, 0 to 255, got {array.dtype}: scale and round them")
        array = array[..., None] if array.ndim == 3 else array
        if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape[1:3]:
            raise DataError(f"pictures must be (n, h, w) or (n, h, w, 1 or 3), got {array.shape}: channels last")
        how = ImageTarget(size, check_resize(resize), check_crop(crop), check_interpolation(interpolation))
        self.array = array if size is None else _resize_all(array, how)
        self.source, self.uncropped = source, uncropped

    def fingerprint(self) -> str:
        """Hash of all pixels, or of what they were decoded from."""
        return self.source or hash_arrays(str(self.array.shape).encode(), self.array)

    def take(self, at: np.ndarray) -> "ImageArray":
        """Only the pictures at these positions."""
        at = np.asarray(at, np.int64)
        uncropped = UncroppedArray(*self.uncropped.read(at)) if self.uncropped is not None else None
        return ImageArray(self.array[at], uncropped=uncropped)

    def with_size(
        self,
        size: Sides | None = None,
        channels: Channels | None = None,
        resize: Resize = "crop",
        crop: float | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> "ImageArray":
        """The same pictures in another size, in grey or in colour."""
        array = self.array
        if channels == 3 and array.shape[3] == 1:
            array = np.repeat(array, 3, axis=3)
        elif channels == 1 and array.shape[3] == 3:
            # The grey of Pillow (ITU-R 601-2) in its fixed point, so that both roads to grey agree.
            luma = array.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32)
            array = ((luma + 0x8000) >> 16).astype(np.uint8)[..., None]
        return ImageArray(array, size, resize=resize, crop=crop, interpolation=interpolation)

    def name(self, i: int) -> str:
        """What to call one picture."""
        return f"picture {i}"

    def content(self, i: int) -> bytes:
        """The pixels of one picture."""
        return self.array[i].tobytes()


class UncroppedArray:
    """Whole pictures in memory, see `UncroppedImages`."""

    def __init__(self, canvas: np.ndarray, aspect: np.ndarray) -> None:
        self.canvas, self.aspect = canvas, aspect

    def read(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `UncroppedImages`."""
        return self.canvas[at], self.aspect[at]


def load_into_memory(inputs: Inputs, limit_bytes: int = MEMORY_LIMIT) -> Inputs:
    """Decode everything once into memory when it fits the limit; otherwise give the inputs back unchanged.

    The fingerprint stays that of the source, so that holding or not does not look like other data.
    """
    if inputs.kind != "image" or inputs.is_in_memory:
        return inputs
    n, shape = len(inputs), inputs.shape
    cropped = isinstance(inputs, EncodedImages) and inputs.uncropped is not None
    sizes = [shape, (*canvas_size(shape[:2]), shape[2])] if cropped else [shape]  # type: ignore[arg-type]
    if n * sum(int(np.prod(size)) for size in sizes) > limit_bytes:
        return inputs
    array, *canvas = (np.empty((n, *size), np.uint8) for size in sizes)
    aspect = np.ones(n, np.float32)

    def fill(at: range) -> None:
        if not cropped:
            array[at.start : at.stop] = inputs.read(np.arange(at.start, at.stop))
            return
        for i in at:
            array[i], canvas[0][i], aspect[i] = decode_with_uncropped(inputs, i)  # type: ignore[arg-type]

    for _ in map_ranges_in_threads(fill, n):
        pass
    uncropped = UncroppedArray(canvas[0], aspect) if cropped else None
    return ImageArray(array, source=inputs.fingerprint(), uncropped=uncropped)


def map_ranges_in_threads(work: Callable[[range], Result], n: int, chunk: int = CHUNK) -> Iterator[Result]:
    """Results of ``work`` on consecutive ranges of 0..n, in order (decoding and hashing release the lock)."""
    ranges = [range(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    count = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, initializer=activate_in_thread, initargs=(active_pool(),)) as threads:
        yield from threads.map(work, ranges)


def _resize_all(array: np.ndarray, target: ImageTarget) -> np.ndarray:
    """(n, h, w, c) pictures in another size, antialiased."""
    size = target.size
    assert size is not None
    if size == array.shape[1:3] and target.crop in (None, 1):
        return array
    result = np.empty((len(array), *size, array.shape[3]), np.uint8)

    def fill(at: range) -> None:
        for i in at:
            image = Image.fromarray(array[i] if array.shape[3] == 3 else array[i, :, :, 0])
            result[i] = resize_to_array(image, size, target).reshape(result.shape[1:])

    for _ in map_ranges_in_threads(fill, len(array)):
        pass
    return result
