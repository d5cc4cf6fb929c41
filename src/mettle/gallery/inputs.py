"""From what a user holds (vectors, pictures, files) to unit vectors of the gallery's model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.errors import InputError
from mettle.gallery.binding import contract_of

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder


class TemplateInputs:
    """Unit vectors of one gallery: checked, normalised, and made by the bound model where pictures come.

    The run that the gallery keeps beside its templates is opened by ``load`` when it is first asked for: vectors need
    no model, and opening a run imports torch.
    """

    def __init__(self, dim: int, run: "RunFolder | None" = None, load: "Callable[[], RunFolder] | None" = None):
        self.dim, self._run, self._load_run = dim, run, load

    @property
    def run(self) -> "RunFolder | None":
        """The run whose model embeds pictures; None where there is none."""
        if self._run is None and self._load_run is not None:
            self._run = self._load_run()
        return self._run

    def to_vectors(self, given: Any) -> np.ndarray:
        """(n, dim) float32 of unit length."""
        array = _as_array(given)
        return normalize_templates(self.embed_images(given) if array is None else array, self.dim)

    def to_vector(self, given: Any) -> np.ndarray:
        """(dim,) of one probe."""
        found = self.to_vectors(given)
        if len(found) != 1:
            raise InputError(
                f"one probe is wanted, got {len(found)}: ask for them one by one; identification takes several at once"
            )
        return found[0]

    def embed_images(self, given: Any) -> np.ndarray:
        """(n, dim) embeddings of one picture or of a list of them, as the model gives them."""
        if self.run is None:
            raise InputError(
                "pictures need the gallery's model: open the gallery with model=RUN (--model RUN), or give embeddings "
                f"of shape (n, {self.dim})"
            )
        if contract_of(self.run).get("input", {}).get("kind", "image") != "image":
            raise InputError("the gallery's model takes numbers, not pictures: embed them, then enrol vectors")
        if isinstance(given, Sequence) and not isinstance(given, str | bytes) and not given:
            raise InputError("no pictures were given")
        return np.asarray(self.run.embed(given))


def normalize_templates(array: np.ndarray, dim: int) -> np.ndarray:
    """Rows scaled to length 1; what has no direction is refused."""
    array = np.atleast_2d(np.asarray(array))
    if array.ndim != 2 or array.shape[1] != dim or len(array) == 0:
        raise InputError(f"embeddings of shape (n, {dim}) are wanted, got {array.shape}: another model made these")
    exact = array.astype(np.float64)
    peak = np.abs(exact).max(1, keepdims=True)
    if not (peak.min() > 0 and peak.max() < np.inf):  # written so that NaN is wrong too
        _refuse_rows(exact)
    exact /= peak  # first, so that neither tiny nor huge rows overflow when squared
    return (exact / np.sqrt(np.add.reduce(exact * exact, axis=1, keepdims=True))).astype(np.float32)


def _refuse_rows(exact: np.ndarray) -> None:
    """Say which row has no direction, and why."""
    if not np.isfinite(exact).all():
        row = int(np.argwhere(~np.isfinite(exact).all(1))[0, 0])
        raise InputError(f"embedding {row} holds NaN or infinity: it is not a template")
    row = int(np.argwhere(~exact.any(1))[0, 0])
    raise InputError(f"embedding {row} is zero: it has no direction")


def _as_array(given: Any) -> np.ndarray | None:
    """The array, where vectors were given; None where pictures were."""
    if hasattr(given, "detach"):  # a tensor
        given = given.detach().cpu()
        given = (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()  # NumPy has no bfloat16
    if isinstance(given, np.ndarray):
        if given.dtype == np.uint8 and given.ndim in (2, 3):
            return None
        if given.dtype.kind == "f":
            return given
        raise InputError(f"embeddings are floats and pictures uint8 (h, w) or (h, w, 3): got {given.dtype}")
    if isinstance(given, list | tuple) and given:
        if all(isinstance(item, int | float) and not isinstance(item, bool) for item in given):
            try:
                return np.asarray(given, np.float64)
            except OverflowError:
                raise InputError("an embedding holds a whole number that no float can: it is not a template") from None
        parts = [_as_array(item) if not isinstance(item, str | bytes | Path) else None for item in given]
        if all(part is not None for part in parts):
            try:
                return np.concatenate([np.atleast_2d(part) for part in parts])  # type: ignore[arg-type]
            except ValueError:
                raise InputError("the embeddings of the list differ in length: one model gives one length") from None
    return None
