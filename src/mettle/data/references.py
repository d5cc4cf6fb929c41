"""How the cells of a table name samples, and its numbers: for tables about samples, such as pairs."""

import os
from difflib import get_close_matches

import numpy as np

from mettle.data.decode import shown
from mettle.data.images import ImageFiles
from mettle.data.samples import Samples
from mettle.data.table import Table, number, whole

NEAR = 20_000  # names among which a misspelt one is looked for


class Names:
    """Finds the sample that a cell names: a picture by its path, anything by its id."""

    def __init__(self, samples: Samples):
        self.samples, self.known = samples, set(samples.ids.tolist())
        self.root, self.names = "", {}
        if isinstance(samples.inputs, ImageFiles):
            self.root = samples.inputs.root
            for id, at in zip(samples.ids.tolist(), samples.at.tolist(), strict=True):
                name = os.path.normpath(samples.inputs.name(at))
                self.names[name] = None if name in self.names else id  # listed twice: which one is meant?

    def ids(self, table: Table, column: str) -> list[int]:
        """The sample id of every cell of a column."""
        cells = [value.strip() for value in table.columns[column]]
        seen: dict[str, int] = {}
        for row, text in enumerate(cells):
            if text not in seen:
                seen[text] = self._id(table, row, column, text)
        return [seen[text] for text in cells]

    def _id(self, table: Table, row: int, column: str, text: str) -> int:
        if not text:
            raise table.error(row, column, "empty; every row needs a sample")
        if whole(text) and int(text) in self.known:
            return int(text)
        name = os.path.normpath(text)
        if name not in self.names and os.path.isabs(name) and self.root:
            name = os.path.relpath(name, os.path.abspath(self.root))
        if self.names.get(name) is not None:
            return self.names[name]
        if name in self.names:
            raise table.error(row, column, f"{shown(text)} is listed twice in {self._where}; name it by its id")
        raise table.error(row, column, f"no sample {shown(text)} in {self._where}{self._hint(text)}")

    @property
    def _where(self) -> str:
        return shown(self.samples.origin) if self.samples.origin else "the samples"

    def _hint(self, text: str) -> str:
        close = get_close_matches(os.path.normpath(text), list(self.names)[:NEAR], n=1, cutoff=0.5)
        if close and not whole(text):
            return f"; did you mean {shown(close[0])}?"
        if self.names:
            return f"; its pictures are named like {shown(next(iter(self.names)))}"
        ids = self.samples.ids
        return f"; its ids go from {ids.min()} to {ids.max()}" if len(ids) else ""


def numbers(table: Table, name: str) -> list[float]:
    """A column of finite numbers."""
    found = []
    for row, text in enumerate(table.columns[name]):
        value = number(text.strip())
        if value is None or not np.isfinite(value):
            raise table.error(row, name, f"{shown(text)} is not a finite number")
        found.append(value)
    return found
