"""What the parts of a recipe must agree on, told before anything is read or written."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mettle import losses
from mettle.errors import InputError, RecipeError
from mettle.losses import PairwiseLoss
from mettle.train.methods.base import LEAVE_SPARSE, compares, takes_sparse
from mettle.train.methods.batch_tuples import layout

if TYPE_CHECKING:
    from mettle.train.recipe import Recipe

BY_SAMPLE = ("similarity", "two-encoder", "jtt")  # methods whose batches are samples, pairs or triplets, not classes


def fitting(recipe: "Recipe") -> None:
    """Refuse a recipe whose loss, method and data do not go together."""
    _method(recipe)
    _networks(recipe)


def _method(recipe: "Recipe") -> None:
    """A loss over pairs or triplets, the method that feeds it and the table it needs come together or not at all."""
    kind, takes, data = recipe.loss.get("kind"), recipe.takes(), recipe.data
    given = [name for name in ("pairs", "triplets") if getattr(data, name) is not None]
    if recipe.train.method == "similarity":
        if not takes:
            known = [name for name in losses.__all__ if hasattr(getattr(losses, name), "takes")]
            raise RecipeError(f"train.method = 'similarity' needs a loss over pairs or triplets: {', '.join(known)}")
        if given != [takes]:
            came = " and ".join(f"data.{name}" for name in given) or "none"
            raise RecipeError(f"{kind} needs data.{takes} (a table, or 'same-class') and no other: got {came}")
        if recipe.batch.views > 1:
            raise RecipeError("batch.views does not apply to pairs and triplets: leave it out")
    elif takes:
        raise RecipeError(f"{kind} needs train.method = 'similarity', got {recipe.train.method!r}")
    elif given:
        raise RecipeError(f"data.{given[0]} needs train.method = 'similarity', got {recipe.train.method!r}")
    elif recipe.batch.size and recipe.train.method not in BY_SAMPLE:
        raise RecipeError(f"batch.size needs train.method = {' or '.join(map(repr, BY_SAMPLE))}: set batch.classes")


def _networks(recipe: "Recipe") -> None:
    """Losses that need a second network or tuples, and the methods that have them, come together or not at all."""
    method, loss, kind = recipe.train.method, recipe.criterion(), recipe.loss.get("kind")
    recipe.biased_criterion()
    recipe.synthesised()
    if compares(loss) and method != "two-encoder":
        raise RecipeError(f"a Relative difficulty needs train.method = 'two-encoder', got {method!r}")
    if method == "two-encoder":
        if recipe.batch.views != 2:
            raise RecipeError("train.method = 'two-encoder' compares two views: set batch.views = 2")
        if not isinstance(loss, PairwiseLoss):
            raise RecipeError(f"train.method = 'two-encoder' needs a loss over the pairs of a batch, got {kind}")
    if recipe.biased != type(recipe.biased).model_validate({}) and not compares(loss):
        raise RecipeError('[biased] needs a loss with difficulty = { kind = "Relative" } and method two-encoder')
    if recipe.synthesis and method != "hardness-aware":
        raise RecipeError(f"[synthesis] needs train.method = 'hardness-aware', got {method!r}")
    if method == "hardness-aware":
        try:
            layout(loss)
        except InputError as error:
            raise RecipeError(f"[loss] {error}") from None
        if recipe.batch.views != 1:
            raise RecipeError("batch.views does not apply to the tuples of hardness-aware training: leave it out")
    if takes_sparse(loss):
        raise RecipeError(f"loss.sparse = true is for optimisers of your own, mettle trains with AdamW: {LEAVE_SPARSE}")
    if kind == "NPair" and recipe.batch.samples != 2:
        raise RecipeError(f"NPair needs two samples of every class: set batch.samples = 2, not {recipe.batch.samples}")
    if method == "jtt" and not hasattr(loss, "num_classes"):
        raise RecipeError(f"train.method = 'jtt' needs a loss with one vector per class, such as Softmax, got {kind}")
    if recipe.jtt != type(recipe.jtt).model_validate({}) and method != "jtt":
        raise RecipeError(f"[jtt] needs train.method = 'jtt', got {method!r}")


def finite(content: Any, key: str = "") -> None:
    """TOML can write inf and nan; no key of a recipe means anything by them."""
    if isinstance(content, float) and not math.isfinite(content):
        raise RecipeError(f"recipe key {key}: a finite number is wanted, got {content}")
    inner = content.items() if isinstance(content, Mapping) else ()
    inner = enumerate(content) if isinstance(content, list | tuple) else inner
    for name, value in inner:
        finite(value, f"{key}.{name}" if key else str(name))


def heard(recipe: "Recipe", keys: Iterable[str]) -> None:
    """An override that decides nothing is a mistake; in a file the same keys are how a run folder writes defaults."""
    for key in keys:
        if key == "train.class_vectors" and not hasattr(recipe.criterion(), "num_classes"):
            raise RecipeError(
                f"{key} changes nothing here: {recipe.loss.get('kind')} has no class vectors. Leave it out"
            )
        by_size = recipe.train.method in BY_SAMPLE and recipe.batch.size is not None
        if key in ("batch.classes", "batch.samples") and by_size:
            raise RecipeError(
                f"{key} changes nothing here: batches of train.method = {recipe.train.method!r} have batch.size = "
                f"{recipe.batch.size} samples. Set batch.size instead"
            )
