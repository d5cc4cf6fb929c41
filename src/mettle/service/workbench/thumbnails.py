"""Pictures of samples, small enough for a page full of them."""

import io

import numpy as np
from PIL import Image

from mettle.data.dataset import Samples

SMALL, LARGE = 64, 192  # pictures up to SMALL are sent as they are; larger ones shrink to LARGE


def thumbnail(samples: Samples, at: int) -> tuple[bytes, str]:
    """One sample's picture and its media type: small ones exactly, large ones shrunk and compressed."""
    pixels = samples.read(np.asarray([at]))[0]
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    small = max(image.size) <= SMALL
    if not small:
        image.thumbnail((LARGE, LARGE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 85}))
    return buffer.getvalue(), "image/png" if small else "image/jpeg"
