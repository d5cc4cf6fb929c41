"""Small files that cost a decoder much: each was once enough to freeze a service or to fill its memory."""

import io

import numpy as np
from PIL import Image

from tests.data.corpus import png


def slow_jpeg(side: int = 3000, passes: int = 1000) -> bytes:
    """A progressive JPEG whose last pass is there again and again: each goes over all pixels."""
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last = content[content.rfind(b"\xff\xda") : -2]
    return content[:-2] + last * passes + b"\xff\xd9"


def large_png(side: int = 3000) -> bytes:
    """A PNG of one color with transparency: 35 kB that are there four times, each of 36 MB, on their way to RGB."""
    return png(side, side, 8, 6, bytes((1 + 4 * side) * side))


def small_picture() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(144, dtype=np.uint8).reshape(12, 12)).save(buffer, "PNG")
    return buffer.getvalue()
