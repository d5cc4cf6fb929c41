"""Everybody of a data set, person by person, ready to be enrolled."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from mettle.data.dataset import Column, Samples
from mettle.data.embeddings import read_embeddings
from mettle.errors import DataError, GalleryError
from mettle.model import EmbeddingModel
from mettle.model.inference import embed


def people_of_table(path: Path, where: Sequence[str] = ()) -> Iterator[tuple[str, np.ndarray]]:
    """(name, (m, dim) embeddings) of every label of a file of embeddings, as `mettle audit` reads them."""
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
    model: EmbeddingModel, samples: Samples, split: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, (m, dim) embeddings) of every label of a data set, embedded by a model."""
    part = samples if split is None else samples.part(split)
    if not len(part):
        raise DataError(f"{samples.source_name} has no samples{'' if split is None else f' in split {split!r}'}")
    return by_name(part.label, embed(model, part))


def by_name(label: Column, vectors: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Rows gathered by label, in the order of the labels."""
    order = np.argsort(label.codes, kind="stable")
    cuts = np.flatnonzero(np.diff(label.codes[order])) + 1
    for rows in np.split(order, cuts):
        yield str(label.names[label.codes[rows[0]]]), vectors[rows]
