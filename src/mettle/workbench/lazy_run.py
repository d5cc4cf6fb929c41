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
from mettle.workbench.projection import Layout, needs_layout, pca_layout, tsne_layout
from mettle.workbench.run_data import RunData, load_run_data
from mettle.workbench.threshold_counts import ThresholdCounts, count_at_thresholds

Value = TypeVar("Value")


class LazyValue(Generic[Value]):
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


class LazyRun:
    """One run, taken apart lazily."""

    def __init__(self, run: RunFolder, cache: Path | None = None):
        self.run = run
        self.data: LazyValue[RunData] = LazyValue(lambda: load_run_data(run, cache))
        self.tsne_layout: LazyValue[Layout] = LazyValue(lambda: tsne_layout(self.data()))
        self.pca_layout: LazyValue[Layout] = LazyValue(lambda: pca_layout(self.data()))
        self.verification: LazyValue[Verification] = LazyValue(self._verification)
        self.retrieval: LazyValue[Retrieval] = LazyValue(self._retrieval)
        self.threshold_counts: LazyValue[ThresholdCounts] = LazyValue(
            lambda: count_at_thresholds(self.data(), self.verification())
        )

    def points(self, *, final: bool = True) -> bytes:
        """Where every sample lies and what it is, for the map: numbers only, names are in the facts.

        Laying out neighbourhoods takes a while the first time; ``final=False`` does not wait for it.
        """
        data = self.data()
        found = self.pca_layout() if not (final or self.tsne_layout.made) and needs_layout(data) else self.tsne_layout()
        columns: dict[str, Any] = {"label": data.label, "quartile": data.quartile}
        columns |= {f"column.{k}": column for k, column in enumerate(data.columns.values())}
        arrays = {"x": found.at[:, 0], "y": found.at[:, 1], "difficulty": data.difficulty.astype(np.float32)}
        return pack_arrays(
            arrays | {name: c.codes.astype(np.uint32) for name, c in columns.items()}, how=found.how, final=found.final
        )

    def counts(self) -> bytes:
        """Counts at every position of the slider, and the curve."""
        found = self.threshold_counts()
        return pack_arrays(found.arrays(), **found.facts())

    def _verification(self) -> Verification:
        data = self.data()
        return data.scenario.verification(data.embeddings, data.samples)

    def _retrieval(self) -> Retrieval:
        data = self.data()
        return data.scenario.retrieval(data.embeddings, data.samples, (1,))


TYPES = {"f4": "<f4", "f8": "<f8", "u4": "<u4"}


def pack_arrays(arrays: Mapping[str, np.ndarray], **facts: Any) -> bytes:
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
