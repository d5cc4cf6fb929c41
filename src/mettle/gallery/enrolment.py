"""What people of a gallery may be called: one spelling, and nothing that a list or a terminal cannot show.

A storage keeps any name. A gallery takes new ones in Unicode's composed form (NFC), in which "José" is the same text
however it was typed, and finds those that an older version kept in another form.

Templates that are the same up to rounding, such as one picture embedded in batches of two sizes.

Rows are looked for in cells of a grid over a few directions: whoever is as near as `SAME` lies in the same cell or just
across an edge of it, so a row is compared with the few that share its cells and the time grows with the number of rows.

Many people at once: some hundreds of them become one durable change.

Everybody of a data set, person by person, ready to be enrolled.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from mettle.errors import DataError, GalleryError, InputError
from mettle.gallery.results import Receipt
from mettle.gallery.storage.integrity import IDENTITY_BYTES, check_name

if TYPE_CHECKING:
    from mettle.data.dataset import Column, Samples
    from mettle.gallery.storage.base import Storage
    from mettle.model import EmbeddingModel


MOST_COMPARED = 10_000  # names among which the nearest to a misspelt one is looked for: within a second


_BREAKS = ("Cc", "Zl", "Zp")  # control characters, separators of lines and of paragraphs


def name_spellings(identity: Any) -> tuple[str, ...]:
    """The names that a text may stand for: as it came, decomposed as some systems type it, and last composed."""
    given = check_name(identity)
    composed, parts = unicodedata.normalize("NFC", given), unicodedata.normalize("NFD", given)
    others = (given, parts) if len(parts.encode()) <= IDENTITY_BYTES else (given,)  # longer ones were never kept
    return *dict.fromkeys(text for text in others if text != composed), composed


def canonical_name(identity: Any, known: Callable[[str], bool]) -> str:
    """The name to enrol somebody under; a name that is in use as it came stays as it is."""
    *former, name = name_spellings(identity)
    if (old := next((text for text in former if known(text)), None)) is not None:
        return old
    name = check_name(name)
    if wrong := next((letter for letter in name if unicodedata.category(letter) in _BREAKS), None):
        if known(name):
            return name
        raise InputError(f"identity must hold no control characters or line breaks: got {wrong!r} in {name!r:.80}")
    return name


def suggest_name(identity: str, names: Iterable[str]) -> str:
    """Who was probably meant by a name that nobody has: ``"; did you mean 'anna'?"``, or nothing."""
    folded = {name.casefold(): name for name in islice(names, MOST_COMPARED)}
    close = get_close_matches(identity.casefold(), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


SAME_SQUARED = 1e-10  # squared distance of two templates of the same picture


REACH = 1.01e-5  # distance, with room for rounding


CELL = 8 * REACH  # side of a cell: along a direction, one row in four lies near an edge


DIRECTIONS = 8


FEW_PAIRS = 256  # up to here, comparing all pairs is faster than making cells


PAIR_BLOCK = 4096  # pairs of rows held at one time


def select_new_rows(rows: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The unit rows that are neither among the known ones nor among those before them, up to rounding."""
    return rows[~has_twin(np.concatenate([known, rows]), len(known))]


def has_twin(rows: np.ndarray, start: int) -> np.ndarray:
    """Which rows from ``start`` on are the same as one before them: (n - start,) bool."""
    if len(rows) * (len(rows) - start) <= FEW_PAIRS:
        return _has_twin_of_few(rows, start)
    along = rows.astype(np.float64) @ _grid_directions(rows.shape[1])
    weights = np.random.default_rng(1).integers(1 << 62, size=along.shape[1]) | 1  # of a cell's coordinates, in its key
    cells = (np.floor(along / CELL).astype(np.int64) * weights).sum(1)  # cells of one key: some comparisons too many
    order = np.argsort(cells, kind="stable")  # within a cell in the order of the rows
    asks, keys = _cell_keys(along[start:], weights)
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
        for a in range(0, len(close), PAIR_BLOCK):
            mine, theirs = asks[close[a : a + PAIR_BLOCK]], others[close[a : a + PAIR_BLOCK]]
            apart = np.square(rows[mine].astype(np.float64) - rows[theirs]).sum(1)
            found[mine[apart <= SAME_SQUARED]] = True
        first = first + 1
    return found[start:]


def _has_twin_of_few(rows: np.ndarray, start: int) -> np.ndarray:
    """The same, every row compared with every one before it."""
    exact, found = rows.astype(np.float64), np.zeros(len(rows) - start, np.bool_)
    squared = np.einsum("nd,nd->n", exact, exact)
    apart = squared[start:, None] + squared - 2 * (exact[start:] @ exact.T)  # with rounding errors, far below the limit
    asks, others = np.nonzero(apart <= 2 * SAME_SQUARED)
    before = others < asks + start
    asks, others = asks[before], others[before]
    found[asks[np.square(exact[start + asks] - exact[others]).sum(1) <= SAME_SQUARED]] = True
    return found


def _grid_directions(dim: int) -> np.ndarray:
    """(dim, k) unit columns: along any of them two rows are no further apart than they are."""
    drawn = np.random.default_rng(0).standard_normal((dim, min(dim, DIRECTIONS)))
    return drawn / np.linalg.norm(drawn, axis=0)


def _cell_keys(along: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and the keys of cells in which a twin of theirs may lie: one cell, or several near an edge."""
    low, high = np.floor((along - REACH) / CELL).astype(np.int64), np.floor((along + REACH) / CELL).astype(np.int64)
    rows, keys = np.arange(len(along)), (low * weights).sum(1)
    for axis, weight in enumerate(weights):
        edge = low[rows, axis] != high[rows, axis]
        rows, keys = np.concatenate([rows, rows[edge]]), np.concatenate([keys, keys[edge] + weight])
    return rows, keys


BATCH_IDENTITIES, BATCH_TEMPLATES = 256, 16384  # people, and about as many templates, of one change


WANTED = "people must be pairs (identity, templates), of a dict its items()"


def enrol_many(
    storage: "Storage", people: Iterable[tuple[str, Any]], vectors: Callable[[Any], np.ndarray], *, replace: bool
) -> list[Receipt]:
    """Enrol (identity, templates) of many, one receipt a change; ``vectors`` makes unit rows of templates."""
    receipts: list[Receipt] = []
    seen: set[str] = set()
    pending: dict[str, list[np.ndarray]] = {}  # whoever comes several times is looked up once

    def send_batch() -> None:
        theirs = [(name, np.concatenate(parts)) for name, parts in pending.items()]
        new = [person for person in theirs if person[0] not in seen]
        again = [person for person in theirs if person[0] in seen]  # theirs from before is of this call: it stays
        for some, anew in ((new, replace), (again, False)):
            if some:
                receipts.append(storage.enrol_many(some, replace=anew, distinct=True))
        seen.update(pending)
        pending.clear()

    rows = 0
    for identity, templates in _as_pairs(people):
        name, made = canonical_name(identity, storage.has_identity), vectors(templates)
        pending.setdefault(name, []).append(made)
        rows += len(made)
        if len(pending) == BATCH_IDENTITIES or rows >= BATCH_TEMPLATES:
            send_batch()
            rows = 0
    send_batch()
    return receipts


def _as_pairs(people: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What was given, if it is pairs."""
    try:
        given = iter(people)
    except TypeError:
        raise InputError(f"{WANTED}: got {type(people).__name__}") from None
    for place, person in enumerate(given):
        if not isinstance(person, tuple | list) or len(person) != 2:
            many = f" of {len(person)}" if isinstance(person, tuple | list) else ""
            raise InputError(f"{WANTED}: got {type(person).__name__}{many} as number {place} (from 0)")
        yield person[0], person[1]


def people_of_table(path: Path, where: Sequence[str] = ()) -> Iterator[tuple[str, np.ndarray]]:
    """(name, (m, dim) embeddings) of every label of a file of embeddings, as `mettle audit` reads them."""
    from mettle.data.embeddings import read_embeddings

    table = read_embeddings(path, where=where)
    return by_name(table.label, table.values)


def check_model_of_table(path: Path, bound: str | None) -> None:
    """Refuse a file whose array ``model`` names other weights than the gallery is bound to; many files name none."""
    named = _model_of_table(path)
    if bound is not None and named is not None and named != bound:
        raise GalleryError(
            f"{path} holds embeddings of another model (weights {named[:12]}…, the gallery's are {bound[:12]}…): "
            "scores of two models cannot be compared. Embed with the gallery's model, or enrol into a new gallery"
        )


def _model_of_table(path: Path) -> str | None:
    if path.suffix.lower() != ".npz":
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            named = arrays["model"] if "model" in arrays.files else None
    except (OSError, ValueError, EOFError, BadZipFile):  # whoever reads the table says what is wrong with it
        return None
    if named is None or named.shape != () or named.dtype.kind != "U":
        return None
    return str(named) or None


def people_of_samples(
    model: "EmbeddingModel", samples: "Samples", split: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, (m, dim) embeddings) of every label of a data set, embedded by a model."""
    from mettle.model.inference import embed

    part = samples if split is None else samples.part(split)
    if not len(part):
        raise DataError(f"{samples.source_name} has no samples{'' if split is None else f' in split {split!r}'}")
    return by_name(part.label, embed(model, part))


def by_name(label: "Column", vectors: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Rows gathered by label, in the order of the labels."""
    order = np.argsort(label.codes, kind="stable")
    cuts = np.flatnonzero(np.diff(label.codes[order])) + 1
    for rows in np.split(order, cuts):
        yield str(label.names[label.codes[rows[0]]]), vectors[rows]
