"""Trials files and matrices of domains: verification that somebody else laid out.

A trials file has one trial a line, two sample ids and 1 for the same subject or 0, separated by commas, tabs or spaces;
a first line of words is a header, a line that starts with # is a remark.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mettle.errors import DataError, InputError, MettleError, UnknownArgument
from mettle.evaluate.checks import check_embeddings
from mettle.evaluate.verification import Verification, verification
from mettle.unknown_names import explain_arguments


@explain_arguments
def read_trials(path: Path | str) -> np.ndarray:
    """Integers (m, 3) of (id, id, target) from a file.

    Raises:
        DataError: names the line that is wrong.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path must be that of a trials file, got {type(path).__name__}")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"cannot read the trials {path}: {e}") from e
    found: list[tuple[int, int, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").replace(";", " ").split()
        if not words or words[0].startswith("#"):
            continue
        try:
            first, second, target = (int(w) for w in words)
        except ValueError:
            if not found and not any(w.lstrip("-").isdigit() for w in words):
                continue  # a header
            raise DataError(
                f"{path} line {number}: a trial is two whole numbers and 0 or 1, got {line[:60]!r}"
            ) from None
        if target not in (0, 1):
            raise DataError(f"{path} line {number}: the target must be 0 or 1, got {target}")
        if not all(-(2**63) <= v < 2**63 for v in (first, second)):
            raise DataError(f"{path} line {number}: ids must fit in int64")
        found.append((first, second, target))
    if not found:
        raise DataError(f"{path} holds no trials")
    return np.asarray(found, np.int64)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Verification of every enrol domain against every probe domain.

    Attributes:
        domains: names, in the order of rows (enrol) and columns (probe).
        cells: by (enrol, probe); None where a cell lacks genuine or impostor pairs.
        why_not: why a cell is None.
    """

    domains: tuple[str, ...]
    cells: Mapping[tuple[str, str], Verification | None]
    why_not: Mapping[tuple[str, str], str]

    def __repr__(self) -> str:
        known = {key: v.eer for key, v in self.cells.items() if v is not None}
        worst = max(known, key=lambda key: known[key], default=None)
        said = "" if worst is None else f", highest eer {known[worst]:.4g} from {worst[0]!r} to {worst[1]!r}"
        return f"Matrix(domains={len(self.domains)}, measured={len(known)} of {len(self.cells)}{said})"

    def __getitem__(self, key: tuple[Any, Any]) -> Verification | None:
        return self.cells[str(key[0]), str(key[1])]

    def values(self, metric: str = "eer") -> list[list[float | None]]:
        """One number per cell, rows are enrol domains."""
        found = []
        for enrol in self.domains:
            row = [self.cells[enrol, probe] for probe in self.domains]
            found.append([None if v is None else v.value(metric) for v in row])
        return found

    def summary(self, metric: str = "eer") -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        why = {f"{a} to {b}": text for (a, b), text in self.why_not.items()}
        return {"metric": metric, "domains": list(self.domains), "values": self.values(metric), "not measurable": why}


@explain_arguments
def domain_matrix(embeddings: Any, labels: Any, domains: Any, *, ids: Any = None, **options: Any) -> Matrix:
    """Compare every domain with every domain: the diagonal within, all else across.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        domains: (n,) integers or text.
        ids: (n,) integer sample ids.
        options: of :func:`mettle.evaluate.verification`, such as ``mode``.

    Example:
        >>> import numpy as np
        >>> x = np.repeat(np.eye(3), 4, axis=0)
        >>> m = domain_matrix(x, np.repeat([0, 1, 2], 4), np.tile(["left", "left", "right", "right"], 3))
        >>> m.values("eer")
        [[0.0, 0.0], [0.0, 0.0]]
    """
    rows = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    if rows.domains is None:
        raise InputError("domain_matrix compares domains: pass one for each row")
    names = np.unique(rows.domains)
    if rows.ids is None:  # rows of one table are samples of their own, whatever their numbers
        rows = replace(rows, ids=np.arange(len(rows)))
    cells: dict[tuple[str, str], Verification | None] = {}
    why: dict[tuple[str, str], str] = {}
    for enrol in names:
        for probe in names:
            key = str(enrol), str(probe)
            try:
                cells[key] = _cell(rows, rows.domains == enrol, rows.domains == probe, enrol == probe, options)
            except UnknownArgument:  # of the options: no cell could be measured
                raise
            except MettleError as e:
                cells[key], why[key] = None, str(e)
    return Matrix(tuple(str(n) for n in names), MappingProxyType(cells), MappingProxyType(why))


def _cell(rows: Any, enrol: np.ndarray, probe: np.ndarray, same: bool, options: dict[str, Any]) -> Verification:
    def side(mask: np.ndarray) -> tuple[Any, ...]:
        some = rows.take(mask)
        return some.given, some.given_labels, None, some.ids

    values, y, _, known = side(probe)
    return verification(values, y, ids=known, gallery=None if same else side(enrol), **options)
