"""Templates that are the same up to rounding, such as one picture embedded in batches of two sizes.

Rows are looked for in cells of a grid over a few directions: whoever is as near as `SAME` lies in the same cell or just
across an edge of it, so a row is compared with the few that share its cells and the time grows with the number of rows.
"""

import numpy as np

SAME = 1e-10  # squared distance of two templates of the same picture
REACH = 1.01e-5  # distance, with room for rounding
CELL = 8 * REACH  # side of a cell: along a direction, one row in four lies near an edge
DIRECTIONS = 8
BLOCK = 4096  # pairs of rows held at one time


def new_rows(rows: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The unit rows that are neither among the known ones nor among those before them, up to rounding."""
    return rows[~has_twin(np.concatenate([known, rows]), len(known))]


def has_twin(rows: np.ndarray, start: int) -> np.ndarray:
    """Which rows from ``start`` on are the same as one before them: (n - start,) bool."""
    along = rows.astype(np.float64) @ _directions(rows.shape[1])
    weights = np.random.default_rng(1).integers(1 << 62, size=along.shape[1]) | 1  # of a cell's coordinates, in its key
    cells = (np.floor(along / CELL).astype(np.int64) * weights).sum(1)  # cells of one key: some comparisons too many
    order = np.argsort(cells, kind="stable")  # within a cell in the order of the rows
    asks, keys = _touched(along[start:], weights)
    asks += start
    first = np.searchsorted(cells[order], keys, side="left")
    last = np.searchsorted(cells[order], keys, side="right")
    found = np.zeros(len(rows), np.bool_)
    while len(asks):  # with the first row of their cells, the second, ... until a twin is found or the cell is done
        going = (first < last) & ~found[asks]
        asks, first, last = asks[going], first[going], last[going]
        before = order[first] < asks
        asks, first, last = asks[before], first[before], last[before]
        others = order[first]
        close = np.flatnonzero((np.abs(along[asks] - along[others]) <= REACH).all(1))
        for a in range(0, len(close), BLOCK):
            mine, theirs = asks[close[a : a + BLOCK]], others[close[a : a + BLOCK]]
            apart = np.square(rows[mine].astype(np.float64) - rows[theirs]).sum(1)
            found[mine[apart <= SAME]] = True
        first = first + 1
    return found[start:]


def _directions(dim: int) -> np.ndarray:
    """(dim, k) unit columns: along any of them two rows are no further apart than they are."""
    drawn = np.random.default_rng(0).standard_normal((dim, min(dim, DIRECTIONS)))
    return drawn / np.linalg.norm(drawn, axis=0)


def _touched(along: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and the keys of cells in which a twin of theirs may lie: one cell, or several near an edge."""
    low, high = np.floor((along - REACH) / CELL).astype(np.int64), np.floor((along + REACH) / CELL).astype(np.int64)
    rows, keys = np.arange(len(along)), (low * weights).sum(1)
    for axis, weight in enumerate(weights):
        edge = low[rows, axis] != high[rows, axis]
        rows, keys = np.concatenate([rows, rows[edge]]), np.concatenate([keys, keys[edge] + weight])
    return rows, keys
