"""One encoded picture in, one uint8 array out; whatever is wrong with it is one `DataError` that names it.

| comes | becomes |
|---|---|
| JPEG, PNG, WebP, GIF, BMP, TIFF | decoded; told apart by their first bytes; all else is refused |
| a header with more pixels than the limit | refused before any pixel is decoded |
| EXIF orientation | applied |
| alpha, transparent palette colour | composited on white |
| 16 bits a channel | scaled to 8 (65535 becomes 255) |
| CMYK, palette, one bit, grey | converted to RGB, or to grey where one channel is asked for |
| several frames or pages | the first |

The plugin classes of Pillow are called directly rather than through ``Image.open``: that keeps the allow-list
short and the pixel limit ours. Warnings of Pillow never leave this file. Silencing them changes process-wide
state, so it is done under a lock and only for the kinds of file that can warn.
"""

import io
import operator
import re
import stat
import struct
import threading
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mettle.errors import DataError, InputError

Channels = Literal[1, 3]
Size = tuple[int, int]
Sides = int | Sequence[int]  # a size as people give it: one side, or (height, width)
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PIXELS = 64_000_000
FILE_BYTES = 512 << 20  # no picture within the pixel limit needs more

_PLUGINS = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_STARTS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF8", "BMP": b"BM"}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WARNINGS = threading.RLock()


def decode(
    source: bytes | Path,
    *,
    size: Sides | None = None,
    channels: Channels = 3,
    pixels: int = PIXELS,
    name: str | None = None,
) -> np.ndarray:
    """Decode one picture.

    Args:
        source: The encoded bytes, or the file that holds them.
        size: (height, width), or one side of a square, to stretch to, antialiased; None keeps the picture's own size.
        channels: 1 for grey, 3 for RGB.
        pixels: The most pixels a header may announce.
        name: What to call the picture in an error; the path by default.

    Returns:
        (height, width, channels) uint8.

    Raises:
        DataError: The picture cannot be read; one line says why.
    """
    if channels not in (1, 3):
        raise InputError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    size = as_size(size)
    called = name if name is not None else str(source) if isinstance(source, Path) else None
    try:
        data = source if isinstance(source, bytes) else read_file(source)
        return _decode(data, size, channels, pixels)
    except (DataError, OSError, MemoryError, ValueError) as problem:
        reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        what = "a picture" if called is None else shown(called)
        raise DataError(f"cannot decode {what}: {reason or 'not enough memory'}") from None


def as_size(size: Sides | None) -> Size | None:
    """(height, width), from such a pair or from one side of a square; None stays None."""
    if size is None:
        return None
    try:
        sides = [size, size] if np.ndim(size) == 0 else list(size)  # type: ignore[arg-type]
        height, width = (operator.index(side) for side in sides)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1 or isinstance(size, bool):
        wanted = "one side in pixels or (height, width), at least 1"
        raise InputError(f"size must be {wanted}, got {size!r}")
    return height, width


def read_file(path: Path) -> bytes:
    """The bytes of a picture file; a folder, a pipe, a device or a giant is refused."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError("not a regular file")
    if status.st_size > FILE_BYTES:
        raise DataError(f"{status.st_size} bytes, more than the limit of {FILE_BYTES}")
    return path.read_bytes()


def shown(name: str | Path, most: int = 160) -> str:
    """A name fit for one line: quoted, breaks and invisible marks escaped, long ones cut in the middle."""
    text = str(name)
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-most // 2 :]}"
    return repr(text)


def _decode(data: bytes, size: Size | None, channels: Channels, pixels: int) -> np.ndarray:
    kind = _kind(data)
    exif, noisy = b"", kind in ("TIFF", "GIF") or (kind == "PNG" and b"acTL" in data)
    if kind == "JPEG":
        data, exif, noisy = _without_exif(data)
    if kind == "WebP":  # its plugin makes room for all pixels as soon as it is opened
        _limit(*_webp_size(data), pixels)
    try:
        with _quiet(noisy), _PLUGINS[kind](io.BytesIO(data)) as image:
            _limit(image.width, image.height, pixels)
            if size is not None and isinstance(image, JpegImageFile):
                # Halving in the decoder is cheap; twice the wanted size, either way up, stays for the filter.
                image.draft(None, (2 * max(size), 2 * max(size)))
            image.load()
            # Pillow turns a TIFF itself, and only that.
            turn = 1 if kind == "TIFF" else _orientation(exif or image.info.get("exif", b""))
            picture = _flat(_eight_bits(image), "L" if channels == 1 else "RGB")
    except (DataError, MemoryError):
        raise
    except Exception as problem:  # a dozen types for bad files, and no base class covers them
        reason = " ".join(str(problem).split())[:120] or type(problem).__name__
        raise DataError(f"damaged or truncated {kind} ({reason})") from None
    if size is not None:
        target = size if turn >= 5 else (size[1], size[0])  # Pillow says (width, height)
        if picture.size != target:
            picture = picture.resize(target, Image.Resampling.BILINEAR, reducing_gap=2.0)
    if turn in _TURNS:
        picture = picture.transpose(_TURNS[turn])
    array = np.array(picture, dtype=np.uint8)
    return array[:, :, None] if array.ndim == 2 else array


def _kind(data: bytes) -> str:
    """The format by its first bytes."""
    if not data:
        raise DataError("the file is empty")
    for kind, start in _STARTS.items():
        if data.startswith(start):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    page = re.match(rb"\s*<(!doctype|html|\?xml|svg)", data[:64], re.IGNORECASE)
    what = "a web page or XML" if page else f"starts with {data[:8]!r}"
    raise DataError(f"not a JPEG, PNG, WebP, GIF, BMP or TIFF picture ({what})")


def _limit(width: int, height: int, pixels: int) -> None:
    if width * height > pixels:
        raise DataError(f"its header says {width} x {height} pixels, more than the limit of {pixels}")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk of a WebP file (lossy, lossless or extended)."""
    if len(data) < 30:
        raise DataError("truncated header")
    if data[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1


def _without_exif(data: bytes) -> tuple[bytes, bytes, bool]:
    """A JPEG without its EXIF segments, the first of these, and whether it was too odd to tell.

    Pillow parses EXIF on opening and warns about what it finds odd there; we want the orientation only.
    """
    at, kept, exif = 2, [data[:2]], b""
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte before a marker
            at += 1
            continue
        if marker == 0xDA:  # the picture itself starts: no metadata after this
            return (b"".join([*kept, data[at:]]) if exif else data), exif, False
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = exif or data[at + 4 : end]
        else:
            kept.append(data[at:end])
        at = end
    return data, exif, True


def _orientation(exif: bytes) -> int:
    """The EXIF orientation, 1 to 8; 1 (upright) when there is none that can be read."""
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for entry in range(min(entries, 512)):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", block, start + 2 + 12 * entry)
            if tag == 0x0112 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """The loaded picture in a mode of 8 bits a channel."""
    if image.mode == "F":
        raise DataError("floating-point pixels have no agreed range: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError("32-bit pixels have no agreed range: save it with 8 or 16 bits")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _flat(image: Image.Image, mode: str) -> Image.Image:
    """The picture without transparency, in this mode."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


@contextmanager
def _quiet(noisy: bool):
    """Keep Pillow's warnings in; a warning about a bomb becomes an error."""
    if not noisy:
        yield
        return
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
