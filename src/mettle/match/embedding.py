"""From what a user holds (vectors, pictures, files) to unit vectors of the gallery's model."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.errors import GalleryError, InputError, RunError
from mettle.match.fusion import check_rule
from mettle.match.operating import as_thresholds
from mettle.match.record import Binding

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder

FILES = ("run.json", "recipe.toml", "contract.json")  # what embeds a picture, beside the network itself
NETWORKS = ("graph.onnx", "model.safetensors")  # the first that the contract names


class Embedding:
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

    def vectors(self, given: Any) -> np.ndarray:
        """(n, dim) float32 of unit length."""
        array = _numbers(given)
        return unit(self.pictures(given) if array is None else array, self.dim)

    def one(self, given: Any) -> np.ndarray:
        """(dim,) of one probe."""
        found = self.vectors(given)
        if len(found) != 1:
            raise InputError(
                f"one probe is wanted, got {len(found)}: ask for them one by one; identification takes several at once"
            )
        return found[0]

    def pictures(self, given: Any) -> np.ndarray:
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


def unit(array: np.ndarray, dim: int) -> np.ndarray:
    """Rows scaled to length 1; what has no direction is refused."""
    array = np.atleast_2d(np.asarray(array))
    if array.ndim != 2 or array.shape[1] != dim or len(array) == 0:
        raise InputError(f"embeddings of shape (n, {dim}) are wanted, got {array.shape}: another model made these")
    exact = array.astype(np.float64)
    if not np.isfinite(exact).all():
        row = int(np.argwhere(~np.isfinite(exact).all(1))[0, 0])
        raise InputError(f"embedding {row} holds NaN or infinity: it is not a template")
    peak = np.abs(exact).max(1, keepdims=True)
    if not (peak > 0).all():
        row = int(np.argwhere(peak[:, 0] == 0)[0, 0])
        raise InputError(f"embedding {row} is zero: it has no direction")
    exact /= peak  # first, so that neither tiny nor huge rows overflow when squared
    return (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)


def contract_of(model: Any) -> dict[str, Any]:
    """What an embedding of a model is: of a run, or of any object with ``embed`` and a ``contract``."""
    found: Any = model.contract
    contract: Any = found() if callable(found) else found
    return contract


def binding_of(contract: dict[str, Any], fusion: str, thresholds: dict[str, Any]) -> Binding:
    """What a gallery of this model is bound to."""
    try:
        # What a table's columns are called was not always kept; the weights say which model it is.
        way = {key: value for key, value in contract["input"].items() if key != "columns"}
        return Binding(
            dim=int(contract["dim"]),
            model=str(contract["weights"]),
            preprocessing=json.dumps(way, sort_keys=True),
            fusion=fusion,
            thresholds=thresholds or as_thresholds(contract.get("thresholds")),
            metric=str(contract["metric"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise RunError(f"the model's contract.json is damaged ({problem}): train or copy the run again") from None


def offered_binding(
    run: "RunFolder | None", dim: int | None, fusion: str | None, thresholds: Mapping[Any, Any] | None
) -> Binding | None:
    """What a new gallery would be bound to; None where nothing says how long its embeddings are."""
    rule, given = check_rule("best" if fusion is None else fusion), as_thresholds(thresholds)
    if run is not None:
        return binding_of(contract_of(run), rule, given)
    if dim is None:
        return None
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool) or not 1 <= dim <= 65536:
        raise InputError(f"dim must be a whole number between 1 and 65536, got {dim!r}")
    return Binding(int(dim), fusion=rule, thresholds=given)


def check_same(bound: Binding, offered: Binding, where: str) -> None:
    """Refuse a model whose embeddings are not those of the gallery."""
    if bound.model is None:
        raise GalleryError(f"{where} holds embeddings from elsewhere: open it without a model, and give embeddings")
    for name, what in (("dim", "dimension"), ("model", "weights"), ("preprocessing", "input"), ("metric", "metric")):
        mine, other = getattr(bound, name), getattr(offered, name)
        if mine != other:
            raise GalleryError(
                f"{where} is bound to a model with another {what} ({_short(mine)}, not {_short(other)}): scores of two "
                "models cannot be compared. Open it with its own model, or enrol everybody anew in a new gallery"
            )


def copy_model(run: "RunFolder", folder: Path) -> None:
    """Keep what embeds a picture beside the templates, so that the gallery opens alone."""
    from mettle.atomic_files import write_bytes

    if not hasattr(run, "folder"):
        return  # an object of somebody else: whoever opens the gallery brings it along
    run.model()  # refuses weights that are not those of the contract
    folder.mkdir(exist_ok=True)
    network = next(name for name in NETWORKS if name in run.contract()["files"])
    for name in (*FILES, network):
        write_bytes(folder / name, (run.folder / name).read_bytes())


def _numbers(given: Any) -> np.ndarray | None:
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
        parts = [_numbers(item) if not isinstance(item, str | bytes | Path) else None for item in given]
        if all(part is not None for part in parts):
            try:
                return np.concatenate([np.atleast_2d(part) for part in parts])  # type: ignore[arg-type]
            except ValueError:
                raise InputError("the embeddings of the list differ in length: one model gives one length") from None
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
