"""Pictures good and bad, made when needed: every way a file can differ from what its reader hopes for.

All good ones show `BASE`, 24 high and 16 wide: red, green, blue and grey quarters. No two of its turns and
mirror images are alike, so a picture that comes out turned is seen to be.
"""

import io
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 24, 16
BASE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
BASE[:12, :8], BASE[:12, 8:], BASE[12:, :8], BASE[12:, 8:] = (
    (200, 0, 0),
    (0, 180, 0),
    (0, 0, 220),
    (90, 90, 90),
)
GREY = np.asarray(Image.fromarray(BASE).convert("L"))

# What a camera stores so that a viewer which obeys the EXIF orientation shows BASE.
STORED = {
    1: BASE,
    2: BASE[:, ::-1],
    3: BASE[::-1, ::-1],
    4: BASE[::-1],
    5: BASE.transpose(1, 0, 2),
    6: np.rot90(BASE, 1),
    7: np.rot90(BASE, 2).transpose(1, 0, 2),
    8: np.rot90(BASE, -1),
}


@dataclass(frozen=True)
class Good:
    """A file that must decode to ``shows`` within ``off`` levels."""

    data: bytes
    shows: np.ndarray = field(default_factory=lambda: BASE)
    off: float = 0.0


@dataclass(frozen=True)
class Bad:
    """A file that must be refused for a reason that matches ``reason``."""

    data: bytes
    reason: str


def encoded(array: np.ndarray, kind: str, mode: str | None = None, **options: Any) -> bytes:
    """A picture in some format."""
    image = Image.fromarray(np.ascontiguousarray(array))
    buffer = io.BytesIO()
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    """EXIF that holds an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(width: int, height: int, depth: int, colour: int, rows: bytes = b"", frames: int | None = None) -> bytes:
    """A PNG from its parts; without rows it is a header that promises pixels and has none.

    With ``frames`` it says it is animated and has so many.
    """

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    moving = b"" if frames is None else chunk(b"acTL", struct.pack(">II", frames, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + moving + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def good() -> dict[str, Good]:
    """Files that must be read, by name."""
    grey3 = np.repeat(GREY[:, :, None], 3, axis=2)
    clear = np.dstack([BASE, np.where(np.arange(HEIGHT) < 12, 0, 255)[:, None].repeat(WIDTH, 1).astype(np.uint8)])
    on_white = BASE.copy()
    on_white[:12] = 255
    deep = GREY.astype(np.uint16) * 257
    rows = b"".join(b"\0" + (BASE[y].astype(">u2") * 257).astype(">u2").tobytes() for y in range(HEIGHT))
    plain = b"".join(b"\0" + BASE[y].tobytes() for y in range(HEIGHT))
    odd = encoded(BASE, "TIFF", description="x" * 20)  # a text that claims to reach beyond the end of the file
    for length in (20, 21):
        odd = odd.replace(struct.pack("<HHI", 270, 2, length), struct.pack("<HHI", 270, 2, 90_000))
    two = [Image.fromarray(BASE), Image.fromarray(BASE[::-1])]
    bilevel = np.where(GREY > 60, 255, 0).astype(np.uint8)
    bilevel3 = np.repeat(bilevel[:, :, None], 3, axis=2)
    frames: dict[str, Any] = {"save_all": True, "append_images": two[1:]}
    files = {
        "plain.jpg": Good(encoded(BASE, "JPEG", quality=95, subsampling=0), off=6),
        "progressive.jpg": Good(encoded(BASE, "JPEG", quality=95, subsampling=0, progressive=True), off=6),
        "grey.jpg": Good(encoded(GREY, "JPEG", quality=95), grey3, 6),
        "cmyk.jpg": Good(encoded(BASE, "JPEG", "CMYK", quality=95), off=6),
        "odd_exif.jpg": Good(
            encoded(BASE, "JPEG", quality=95, subsampling=0, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), off=6
        ),
        "rgb.png": Good(encoded(BASE, "PNG")),
        "grey.png": Good(encoded(GREY, "PNG"), grey3),
        "deep_grey.png": Good(encoded(deep, "PNG"), grey3),
        "deep_rgb.png": Good(png(WIDTH, HEIGHT, 16, 2, rows)),
        "bilevel.png": Good(encoded(bilevel, "PNG", "1"), bilevel3),
        "palette.png": Good(encoded(BASE, "PNG", "P", bits=8), off=60),
        "clear.png": Good(encoded(clear, "PNG"), on_white),
        "clear_grey.png": Good(encoded(clear, "PNG", "LA"), np.where(clear[:, :, 3:] == 0, 255, grey3)),
        "clear_palette.png": Good(encoded(BASE, "PNG", "P", transparency=bytes(256)), np.full_like(BASE, 255)),
        "turned.png": Good(encoded(STORED[6], "PNG", exif=turned(6))),
        "no_frames.png": Good(png(WIDTH, HEIGHT, 8, 2, plain, frames=0)),
        "animated.png": Good(encoded(BASE, "PNG", **frames)),
        "plain.gif": Good(encoded(BASE, "GIF")),
        "animated.gif": Good(encoded(BASE, "GIF", **frames)),
        "lossy.webp": Good(encoded(BASE, "WEBP", quality=95), off=45),
        "lossless.webp": Good(encoded(BASE, "WEBP", lossless=True)),
        "clear.webp": Good(encoded(clear, "WEBP", lossless=True), on_white),
        "animated.webp": Good(encoded(BASE, "WEBP", lossless=True, **frames)),
        "turned.webp": Good(encoded(STORED[8], "WEBP", lossless=True, exif=turned(8))),
        "plain.bmp": Good(encoded(BASE, "BMP")),
        "plain.tif": Good(encoded(BASE, "TIFF")),
        "odd_tag.tif": Good(odd),
        "lzw.tif": Good(encoded(BASE, "TIFF", compression="tiff_lzw")),
        "deep_grey.tif": Good(encoded(deep, "TIFF"), grey3),
        "cmyk.tif": Good(encoded(BASE, "TIFF", "CMYK")),
        "pages.tif": Good(encoded(BASE, "TIFF", **frames)),
        "turned.tif": Good(encoded(STORED[6], "TIFF", exif=turned(6))),
    }
    for orientation, stored in STORED.items():
        data = encoded(stored, "JPEG", quality=95, subsampling=0, exif=turned(orientation))
        files[f"orientation_{orientation}.jpg"] = Good(data, off=6)
    return files


def bombs(side: int = 60_000) -> dict[str, Bad]:
    """Small files whose headers promise more pixels than any machine should make room for."""
    reason = rf"{side} x {side} pixels, more than the limit"
    gif = encoded(BASE, "GIF")
    bmp = encoded(BASE, "BMP")
    tiff = encoded(GREY, "TIFF")
    square = struct.pack("<II", side, side)
    for tag, value in ((256, WIDTH), (257, HEIGHT)):  # width and height entries of the directory
        for kind, code in (("H", 3), ("I", 4)):
            entry = struct.pack(f"<HHI{kind}", tag, code, 1, value)
            tiff = tiff.replace(entry.ljust(12, b"\0"), struct.pack("<HHII", tag, 4, 1, side))
    webp = b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (b"\xfe\x3f\0" * 2) + bytes(40)
    return {
        "bomb.png": Bad(png(side, side, 8, 2, bytes(1000)), reason),
        "bomb.gif": Bad(gif[:6] + struct.pack("<HH", side, side) + gif[10:], reason),
        "bomb.bmp": Bad(bmp[:18] + square + bmp[26:], reason),
        "bomb.tif": Bad(tiff, reason),
        "bomb.webp": Bad(webp, "16383 x 16383 pixels, more than the limit"),
    }


def bad() -> dict[str, Bad]:
    """Files that must be refused, by name."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (40, 40, 3)).astype(np.uint8)  # does not compress, so half a file is half a picture
    halves = {}
    for suffix, kind in {
        "jpg": "JPEG",
        "png": "PNG",
        "gif": "GIF",
        "webp": "WEBP",
        "bmp": "BMP",
        "tif": "TIFF",
    }.items():
        data = encoded(noise, kind)
        halves[f"half.{suffix}"] = Bad(data[: len(data) // 2], "damaged or truncated")
        halves[f"start.{suffix}"] = Bad(data[:16], "damaged or truncated|truncated header")
    flipped = bytearray(encoded(BASE, "PNG"))
    flipped[40:44] = b"\xff\xff\xff\xff"
    return halves | {
        "empty.jpg": Bad(b"", "empty"),
        "page.jpg": Bad(b"\n<!DOCTYPE html><title>404</title>", "web page"),
        "text.png": Bad(b"not found", "not a JPEG"),
        "vector.jpg": Bad(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "web page or XML"),
        "icon.png": Bad(encoded(BASE, "ICO"), "not a JPEG"),
        "flipped.png": Bad(bytes(flipped), "damaged or truncated PNG"),
        "float.tif": Bad(encoded(GREY.astype(np.float32), "TIFF"), "floating-point"),
        "wide_integers.tif": Bad(encoded(GREY.astype(np.int32) * 100_000, "TIFF"), "32-bit"),
        "promise.png": Bad(png(WIDTH, HEIGHT, 8, 2), "damaged or truncated PNG"),
    }
