"""One run on the workbench: every part is made when it is first asked for, and once."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.verification import Verification
from mettle.train import RunFolder
from mettle.workbench.projection import Place, place, sketch, waits
from mettle.workbench.run_data import Scene, load
from mettle.workbench.threshold_counts import Tally, tally

Value = TypeVar("Value")


class Once(Generic[Value]):
    """A value that the first who asks makes, while the others wait; a failure is raised, and tried again later."""

    def __init__(self, make: Callable[[], Value]):
        self._make, self._lock = make, Lock()
        self.made = False

    def __call__(self) -> Value:
        """The value."""
        with self._lock:
            if not self.made:
                self._value = self._make()
                self.made = True
            return self._value


class Bench:
    """One run, taken apart lazily."""

    def __init__(self, run: RunFolder, cache: Path | None = None):
        self.run = run
        self.scene: Once[Scene] = Once(lambda: load(run, cache))
        self.place: Once[Place] = Once(lambda: place(self.scene()))
        self.sketch: Once[Place] = Once(lambda: sketch(self.scene()))
        self.verification: Once[Verification] = Once(self._verified)
        self.retrieval: Once[Retrieval] = Once(self._retrieved)
        self.tally: Once[Tally] = Once(lambda: tally(self.scene(), self.verification()))

    def points(self, *, final: bool = True) -> bytes:
        """Where every sample lies and what it is, for the map: numbers only, names are in the facts.

        Laying out neighbourhoods takes a while the first time; ``final=False`` does not wait for it.
        """
        scene = self.scene()
        found = self.sketch() if not (final or self.place.made) and waits(scene) else self.place()
        columns: dict[str, Any] = {"label": scene.label, "band": scene.band}
        columns |= {f"column.{k}": column for k, column in enumerate(scene.columns.values())}
        arrays = {"x": found.at[:, 0], "y": found.at[:, 1], "hard": scene.hard.astype(np.float32)}
        return packed(
            arrays | {name: c.codes.astype(np.uint32) for name, c in columns.items()}, how=found.how, final=found.final
        )

    def counts(self) -> bytes:
        """Counts at every position of the slider, and the curve."""
        found = self.tally()
        return packed(found.arrays(), **found.facts())

    def _verified(self) -> Verification:
        scene = self.scene()
        return scene.way.verification(scene.embeddings, scene.samples)

    def _retrieved(self) -> Retrieval:
        scene = self.scene()
        return scene.way.retrieval(scene.embeddings, scene.samples, (1,))


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
