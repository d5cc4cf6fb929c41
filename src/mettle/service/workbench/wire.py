"""Arrays on the wire: JSON that names them, then their bytes, little-endian, each from a multiple of eight."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

TYPES = {"f4": "<f4", "f8": "<f8", "u4": "<u4"}


def packed(arrays: Mapping[str, np.ndarray], **facts: Any) -> bytes:
    """Arrays of float32, float64 or uint32, and facts about them, as one body.

    Layout: uint32 length of the header, the header (JSON, padded with spaces), the arrays.
    """
    bodies, places, offset = [], [], 0
    for name, array in arrays.items():
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        content = np.ascontiguousarray(array, TYPES[kind]).tobytes()
        places.append({"name": name, "type": kind, "length": array.size, "offset": offset})
        content += bytes(-len(content) % 8)
        bodies.append(content)
        offset += len(content)
    header = json.dumps({**facts, "arrays": places}).encode()
    header += b" " * (-(len(header) + 4) % 8)
    return struct.pack("<I", len(header)) + header + b"".join(bodies)
