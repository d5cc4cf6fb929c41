"""One encoded picture in, one uint8 array out; whatever is wrong with it is one `DataError` that names it.

| comes | becomes |
|---|---|
| JPEG, PNG, WebP, GIF, BMP, TIFF; HEIC by pillow-heif | decoded; told apart by their first bytes; all else is refused |
| a header with more pixels than the limit | refused before any pixel is decoded |
| EXIF orientation | applied |
| alpha, transparent palette colour | composited on white |
| 16 bits a channel | scaled to 8 (65535 becomes 255) |
| CMYK, palette, one bit, grey | converted to RGB, or to grey where one channel is asked for |
| several frames or pages | the first |
| another size than the wanted one | scaled and cropped from the centre, or padded, or stretched: see `Resize` |

Where a `ReaderPool` is active, its processes decode, within their limits of time and memory; else it is done here.

The plugin classes of Pillow are called directly rather than through ``Image.open``: that keeps the allow-list
short and the pixel limit ours. Warnings of Pillow never leave this file. Silencing them changes process-wide
state, so it is done under a lock and only for the kinds of file that can warn.
"""

import importlib.util
import io
import math
import operator
import re
import stat
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mettle.data.reader_pool import ReaderLimitExceeded, active_pool
from mettle.errors import DataError, InputError

Channels = Literal[1, 3]
Resize = Literal["crop", "pad", "stretch"]  # how a picture of another shape gets the wanted one, see `resize_image`
RESIZES = get_args(Resize)
Interpolation = Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"]  # the filters of Pillow
INTERPOLATIONS = get_args(Interpolation)
Size = tuple[int, int]
Sides = int | Sequence[int]  # a size as people give it: one side, or (height, width)
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
HEIC_SUFFIXES = (".heic", ".heif")
PAD_COLOR = 128  # of every channel, around a padded picture: neutral once inputs are centred
MAX_PIXELS = 64_000_000
LEAST_CROP = 0.05  # of the sides: what is smaller is a mistake, and would scale pictures up without a bound
MOST_SCALED = 16  # times the pixels of the result that a picture is scaled to before its centre is kept
MOST_TENSOR_SCALE = 4  # reductions up to which torch stretches faster than Pillow, which first averages whole pixels
MAX_FILE_BYTES = 512 << 20  # no picture within the pixel limit needs more

CHEAP_PIXELS = 4_000_000  # up to which a PNG or JPEG takes at most some 100 MB
CHEAP_PASSES = 40_000_000  # pixels times passes of a JPEG: less than a second
_FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)  # markers of JPEG

_PLUGINS = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
HEIC_REMEDY = "install pillow-heif to read it (pip install pillow-heif)"
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
_EIGHT_BITS = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)  # of each value of 16 bits


class ImageTarget(NamedTuple):
    """What a decoded picture becomes; see `resize_image`."""

    size: Size | None = None  # (height, width); None keeps the picture's own
    resize: Resize = "crop"
    crop: float | None = None
    interpolation: Interpolation = "bilinear"


def decode_image(
    source: bytes | Path,
    *,
    size: Sides | None = None,
    resize: Resize = "crop",
    crop: float | None = None,
    interpolation: Interpolation = "bilinear",
    channels: Channels = 3,
    pixels: int = MAX_PIXELS,
    name: str | None = None,
) -> np.ndarray:
    """Decode one picture.

    Args:
        source: The encoded bytes, or the file that holds them.
        size: (height, width), or one side of a square, antialiased; None keeps the picture's own size.
        resize: How it gets that size, see `resize_image`.
        crop: The share of the sides that a centre crop keeps, see `resize_image`.
        interpolation: The filter, see `resize_image`.
        channels: 1 for grey, 3 for RGB.
        pixels: The most pixels a header may announce.
        name: What to call the picture in an error; the path by default.

    Returns:
        (height, width, channels) uint8.

    Raises:
        DataError: The picture cannot be read; one line says why.
    """
    target = ImageTarget(as_size(size), check_resize(resize), check_crop(crop), check_interpolation(interpolation))
    return decode_to_sizes(source, [target], channels=channels, pixels=pixels, name=name)[0][0]


def decode_to_sizes(
    source: bytes | Path,
    targets: Sequence[ImageTarget],
    *,
    channels: Channels = 3,
    pixels: int = MAX_PIXELS,
    name: str | None = None,
    every_pixel: bool = False,
) -> tuple[list[np.ndarray], float]:
    """Decode one picture once into several sizes; also its own width over its height, as it is to be looked at.

    A JPEG that is much larger than all targets is decoded at a fraction of its size, but for targets with a share
    ``crop`` and where ``every_pixel`` is asked for.
    """
    if channels not in (1, 3):
        raise InputError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    called = name if name is not None else str(source) if isinstance(source, Path) else None
    try:
        data = source if isinstance(source, bytes) else read_image_bytes(source)
        pool = active_pool()
        if pool is None or (pool.only_costly and _is_cheap(data)):
            return _decode_bytes(data, targets, channels, pixels, every_pixel)
        pixels = pool.limits.pixels or pixels
        arrays, aspect = pool.call(_decode_bytes, data, targets, channels, pixels, every_pixel, size=len(data))
        return arrays, aspect
    except (DataError, OSError, MemoryError, ValueError) as problem:
        reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        what = "a picture" if called is None else quote_name(called)
        kind = ReaderLimitExceeded if isinstance(problem, ReaderLimitExceeded) else DataError
        raise kind(f"cannot decode {what}: {reason or 'not enough memory'}") from None


def resize_image(
    picture: Image.Image,
    size: Size,
    resize: Resize,
    crop: float | None = None,
    interpolation: Interpolation = "bilinear",
) -> Image.Image:
    """A picture in another size (height, width), antialiased.

    ``crop`` scales it until it covers the size and keeps the centre; ``pad`` scales it until it fits in and fills the
    rest with grey; both keep its proportions. ``stretch`` does not: wide pictures become narrow.

    A share ``crop`` (timm's ``crop_pct``) scales to ``size / crop`` in the same way and then keeps the centre of that
    size, with sides and offsets rounded to whole pixels as torchvision's ``Resize`` and ``CenterCrop`` round them.
    ``crop=1`` cuts nothing off and differs from None by that rounding alone: None samples the exact centre.
    """
    (height, width), (w, h) = size, picture.size
    if (w, h) == (width, height) and (crop is None or crop == 1):
        return picture
    method = Image.Resampling[interpolation.upper()]
    if crop is not None:
        return _resize_then_crop(picture, size, resize, crop, method)
    if resize == "crop":
        scale = min(w / width, h / height)  # pixels of the picture for one of the result
        left, top = (w - width * scale) / 2, (h - height * scale) / 2
        box = (max(left, 0.0), max(top, 0.0), min(w - left, w), min(h - top, h))
        return picture.resize((width, height), method, box=box, reducing_gap=2.0)
    if resize == "pad":
        scale = max(w / width, h / height)
        inner = (min(width, max(1, round(w / scale))), min(height, max(1, round(h / scale))))
        canvas = _grey_canvas(picture.mode, size)
        canvas.paste(
            picture.resize(inner, method, reducing_gap=2.0), ((width - inner[0]) // 2, (height - inner[1]) // 2)
        )
        return canvas
    return picture.resize((width, height), method, reducing_gap=2.0)


def resize_to_array(picture: Image.Image, size: Size, target: ImageTarget) -> np.ndarray:
    """(h, w, c) or (h, w) uint8: `resize_image` as a target says, in less than half of the time where it stretches.

    Some pixels of stretched pictures are rounded in another way than Pillow rounds them.
    """
    reduction = max(picture.height / size[0], picture.width / size[1])
    is_plain = target.crop is None and target.interpolation in ("bilinear", "bicubic")
    if target.resize != "stretch" or not is_plain or reduction > MOST_TENSOR_SCALE:
        return np.array(resize_image(picture, size, target.resize, target.crop, target.interpolation), np.uint8)
    import torch  # not at the top: galleries of numbers read no pictures

    pixels = torch.from_numpy(np.array(picture))
    # Of strides that torch knows for channels last: it then reads and writes pixels as they lie, in 40 % of the time.
    batch = pixels[None, None] if pixels.ndim == 2 else pixels[None].permute(0, 3, 1, 2)
    found = torch.nn.functional.interpolate(batch, size, mode=target.interpolation, antialias=True)
    return (found[0, 0] if pixels.ndim == 2 else found[0].permute(1, 2, 0).contiguous()).numpy()


def scaled_size(own: Size, size: Size, resize: Resize, crop: float) -> Size:
    """(height, width) that a picture of its own size is scaled to before the centre of ``size`` is kept.

    The shorter side is rounded as by torchvision's ``Resize`` where the size is square, and both sides as by timm's
    ``ResizeKeepRatio`` where it is not, or where the picture is padded.
    """
    (h, w), (height, width) = own, (math.floor(side / crop) for side in size)
    if resize == "stretch":
        return height, width
    if resize == "crop" and height == width:
        return (height, int(height * w / h)) if h <= w else (int(height * h / w), height)
    scale = (min if resize == "crop" else max)(h / height, w / width)
    return max(1, round(h / scale)), max(1, round(w / scale))


def _resize_then_crop(
    picture: Image.Image, size: Size, resize: Resize, crop: float, method: Image.Resampling
) -> Image.Image:
    (height, width), (w, h) = size, picture.size
    scaled_height, scaled_width = scaled_size((h, w), size, resize, crop)
    inner_height, inner_width = min(height, scaled_height), min(width, scaled_width)
    top, left = round((scaled_height - inner_height) / 2), round((scaled_width - inner_width) / 2)
    if scaled_height * scaled_width <= MOST_SCALED * height * width:
        scaled = picture.resize((scaled_width, scaled_height), method)
        inner = scaled.crop((left, top, left + inner_width, top + inner_height))
    else:
        # A picture one pixel high would fill the memory. Only what is kept is computed then, with a box that Pillow
        # holds in single precision: some values differ by one.
        y, x = h / scaled_height, w / scaled_width  # pixels of the picture for one of the scaled one
        box = (left * x, top * y, min((left + inner_width) * x, w), min((top + inner_height) * y, h))
        inner = picture.resize((inner_width, inner_height), method, box=box)
    if inner.size == (width, height):
        return inner
    canvas = _grey_canvas(picture.mode, size)
    canvas.paste(inner, ((width - inner_width) // 2, (height - inner_height) // 2))
    return canvas


def _grey_canvas(mode: str, size: Size) -> Image.Image:
    return Image.new(mode, (size[1], size[0]), PAD_COLOR if mode == "L" else (PAD_COLOR,) * 3)


def check_resize(resize: str) -> Resize:
    """One of the ways of `resize_image`; anything else is an error."""
    if resize not in RESIZES:
        raise InputError(f"resize must be {', '.join(RESIZES[:-1])} or {RESIZES[-1]}, got {resize!r}")
    return resize  # type: ignore[return-value]


def check_crop(crop: float | None) -> float | None:
    """The share of the sides that a centre crop keeps: above 0, at most 1; None for none."""
    if crop is None:
        return None
    if isinstance(crop, bool) or not isinstance(crop, Real) or not LEAST_CROP <= crop <= 1:
        raise InputError(f"crop must be the share of the sides that is kept, {LEAST_CROP} to 1, got {crop!r}")
    return float(crop)


def check_interpolation(interpolation: str) -> Interpolation:
    """One of the filters of Pillow; anything else is an error."""
    if interpolation not in INTERPOLATIONS:
        known = f"{', '.join(INTERPOLATIONS[:-1])} or {INTERPOLATIONS[-1]}"
        raise InputError(f"interpolation must be {known}, got {interpolation!r}")
    return interpolation  # type: ignore[return-value]


class ImageHeader(NamedTuple):
    """What a header says of a picture."""

    size: Size  # (height, width), as it is to be looked at
    grey: bool


def read_image_header(source: bytes | Path, pixels: int = MAX_PIXELS) -> ImageHeader:
    """Size and kind of one picture; nothing is decoded."""
    kind, data, exif, noisy = _recognize_format(
        source if isinstance(source, bytes) else read_image_bytes(source), pixels
    )
    try:
        with _silence_warnings(noisy), _plugin_for(kind)(io.BytesIO(data)) as image:
            (width, height), mode = image.size, image.mode
            turn = _read_orientation(exif or image.info.get("exif") or b"")
    except Exception as problem:  # a dozen types for bad files, and no base class covers them
        raise DataError(f"damaged or truncated {kind} ({type(problem).__name__})") from None
    _check_pixel_count(width, height, pixels)
    size = (width, height) if turn >= 5 and kind != "TIFF" else (height, width)
    return ImageHeader(size, mode in ("1", "L", "LA") or mode.startswith("I"))


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


def read_image_bytes(path: Path) -> bytes:
    """The bytes of a picture file; a folder, a pipe, a device or a giant is refused."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError("not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise DataError(f"{status.st_size} bytes, more than the limit of {MAX_FILE_BYTES}")
    return path.read_bytes()


def quote_name(name: str | Path, most: int = 160) -> str:
    """A name fit for one line: quoted, breaks and invisible marks escaped, long ones cut in the middle."""
    text = str(name)
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-most // 2 :]}"
    return repr(text)


def _decode_bytes(
    data: bytes, targets: Sequence[ImageTarget], channels: Channels, pixels: int, every_pixel: bool
) -> tuple[list[np.ndarray], float]:
    kind, data, exif, noisy = _recognize_format(data, pixels)
    try:
        with _silence_warnings(noisy), _plugin_for(kind)(io.BytesIO(data)) as image:
            _check_pixel_count(image.width, image.height, pixels)
            wide, high = image.size
            if isinstance(image, JpegImageFile):
                # Halving in the decoder is cheap; twice the wanted size, either way up, stays for the filter. Where
                # the result is to be that of torchvision, which decodes all pixels, so is this.
                whole = every_pixel or any(target.size is None or target.crop is not None for target in targets)
                side = max(wide, high) if whole else max(2 * max(target.size) for target in targets if target.size)
                image.draft(None, (side, side))
            image.load()
            # Pillow turns a TIFF itself, and only that.
            turn = 1 if kind == "TIFF" else _read_orientation(exif or image.info.get("exif") or b"")
            picture = _flatten_transparency(_to_eight_bits(image), "L" if channels == 1 else "RGB")
    except (DataError, MemoryError):
        raise
    except Exception as problem:  # a dozen types for bad files, and no base class covers them
        reason = " ".join(str(problem).split())[:120] or type(problem).__name__
        raise DataError(f"damaged or truncated {kind} ({reason})") from None
    aspect = high / wide if turn >= 5 else wide / high
    return [_resized_array(picture, target, turn) for target in targets], aspect


def _is_cheap(data: bytes) -> bool:
    """Whether decoding takes little time and memory whatever the pixels are: by the size, and the passes of a JPEG."""
    if data.startswith(_STARTS["PNG"]):
        return b"acTL" not in data and 0 < _product(data[16:24], ">II") <= CHEAP_PIXELS
    if not data.startswith(_STARTS["JPEG"]):
        return False
    at, pixels = 2, 0
    while at + 9 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        if data[at + 1] in _FRAMES:
            pixels = max(pixels, _product(data[at + 5 : at + 9], ">HH"))
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    passes = data.count(b"\xff\xda", at)  # of the entropy-coded data: within it 255 is never followed by a marker
    return 0 < pixels <= CHEAP_PIXELS and pixels * passes <= CHEAP_PASSES


def _product(content: bytes, layout: str) -> int:
    return math.prod(struct.unpack(layout, content)) if len(content) == struct.calcsize(layout) else 0


def _recognize_format(data: bytes, pixels: int) -> tuple[str, bytes, bytes, bool]:
    """The format, the bytes to open, the EXIF block of a JPEG, and whether Pillow may warn about them."""
    kind = _detect_format(data)
    exif, noisy = b"", kind in ("TIFF", "GIF") or (kind == "PNG" and b"acTL" in data)
    if kind == "JPEG":
        data, exif, noisy = _strip_exif(data)
    if kind == "WebP":  # its plugin makes room for all pixels as soon as it is opened
        _check_pixel_count(*_webp_size(data), pixels)
    return kind, data, exif, noisy


def _resized_array(picture: Image.Image, target: ImageTarget, turn: int) -> np.ndarray:
    """(h, w, c) uint8 of a decoded picture; it is turned after it has become smaller, where that is the same."""
    size = target.size
    # An odd rest is one pixel wider at one end, and a rounded offset one pixel nearer to it: it matters where that is.
    if turn in _TURNS and (target.resize == "pad" or target.crop is not None):
        picture, turn = picture.transpose(_TURNS[turn]), 1
    if size is None:
        array = np.array(picture, np.uint8)
    else:
        array = resize_to_array(picture, (size[1], size[0]) if turn >= 5 else size, target)
    if turn in _TURNS:
        array = np.array(Image.fromarray(array).transpose(_TURNS[turn]))
    return array[:, :, None] if array.ndim == 2 else array


@cache  # asked for every file of a folder
def can_read_heic() -> bool:
    """Whether pillow-heif, which decodes HEIC, is installed."""
    return importlib.util.find_spec("pillow_heif") is not None


def image_suffixes() -> tuple[str, ...]:
    """The endings of picture files that this installation reads."""
    return SUFFIXES + (HEIC_SUFFIXES if can_read_heic() else ())


def _plugin_for(kind: str) -> Callable[[io.BytesIO], ImageFile]:
    if kind == "HEIC":  # an optional package, imported where the first such picture is met
        from pillow_heif import HeifImageFile

        return HeifImageFile
    return _PLUGINS[kind]


def _detect_format(data: bytes) -> str:
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
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS:
        if not can_read_heic():
            raise DataError(f"a HEIC picture: {HEIC_REMEDY}")
        return "HEIC"
    page = re.match(rb"\s*<(!doctype|html|\?xml|svg)", data[:64], re.IGNORECASE)
    what = "a web page or XML" if page else f"starts with {data[:8]!r}"
    raise DataError(f"not a JPEG, PNG, WebP, GIF, BMP, TIFF or HEIC picture ({what})")


def _check_pixel_count(width: int, height: int, pixels: int) -> None:
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


def _strip_exif(data: bytes) -> tuple[bytes, bytes, bool]:
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


def _read_orientation(exif: bytes) -> int:
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


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """The loaded picture in a mode of 8 bits a channel."""
    if image.mode == "F":
        raise DataError("floating-point pixels have no agreed range: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise DataError("32-bit pixels have no agreed range: save it with 8 or 16 bits")
    return Image.fromarray(_EIGHT_BITS[values])


def _flatten_transparency(image: Image.Image, mode: str) -> Image.Image:
    """The picture without transparency, in this mode."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == mode else image.convert(mode)


@contextmanager
def _silence_warnings(noisy: bool):
    """Keep Pillow's warnings in; a warning about a bomb becomes an error."""
    if not noisy:
        yield
        return
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
