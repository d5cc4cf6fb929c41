"""The data of a recipe or a run: read, without unreadable images, of one size, in memory where they fit, split."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data.check import drop_unreadable, load_readable
from mettle.data.dataset import NO_SPLIT, SPLITS, Samples
from mettle.data.image_decoding import HEIC_SUFFIXES, SUFFIXES, as_size
from mettle.data.inputs import ImageFiles, PackedImages
from mettle.data.sources import read
from mettle.data.sources.text_table import SUFFIXES as TABLES
from mettle.data.sources.text_table import read_table_header
from mettle.data.splits import hold_out_domains, identity_disjoint_split
from mettle.data.tuples import Pairs, Triplets, Tuples
from mettle.errors import InputError, MettleError
from mettle.train.auto_settings import choose_image_size, choose_training, resolve_device
from mettle.train.recipe import SAME_CLASS, DataConfig, Recipe
from mettle.train.run_folder import RunFolder, is_builtin_source


def prepare_samples(recipe: Recipe, cache: Path | None = None, *, split: bool = True, **reading: Any) -> Samples:
    """The data of a recipe, split and ready: images of one size, in memory where they fit.

    Args:
        recipe: whose data.
        cache: where embedded data are kept.
        split: whether data without a split get one, as for training; else they stay without.
        reading: further options of `mettle.data.read`: ``labeled``, ``like``.
    """
    return prepare_training_data(recipe, cache, split=split, **reading)[0]


def prepare_training_data(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    split: bool = True,
    parts: Sequence[str] | None = None,
    **reading: Any,
) -> tuple[Samples, Tuples | None, tuple[str, ...]]:
    """The same, with the pairs or triplets of the recipe, if it has any, and notes about those that are left out.

    With ``parts``, such as ``("train", "val")``, there is nothing of the other splits in what is returned. Images of
    theirs are not even decoded where the source has a split of its own; else they are, because the split is by the
    identities that can be read.
    """
    samples = _read_source(recipe, cache, **reading)
    # Before bad images are left out: a pair that names one of them is left out too, which is no mistake in the table.
    tuples = read_tuple_table(recipe.data, samples)
    policy = "skip" if "data.policy" in recipe.auto and samples.inputs.kind == "image" else recipe.data.policy
    limit = round(recipe.data.memory * 2**30)
    samples = resize_samples(recipe, samples)
    is_split = parts is not None and bool((samples.split != NO_SPLIT).any())
    if parts is not None and is_split:
        samples = keep_parts(_apply_split(recipe, samples, tuples), parts)
    samples = load_readable(samples, policy, limit_bytes=limit)
    if split and not is_split:
        samples = _apply_split(recipe, samples, tuples)
        samples = samples if parts is None else keep_parts(samples, parts)
    return samples, *split_tuples(recipe, tuples, samples)


def keep_parts(samples: Samples, parts: Sequence[str]) -> Samples:
    """The samples of some splits, with inputs that hold nothing of the others where these can be cut."""
    kept = samples.where(np.isin(samples.split, [SPLITS.index(part) for part in parts]))
    take = getattr(kept.inputs, "take", None)
    if take is None:
        return kept
    return replace(kept, inputs=take(kept.storage_index), storage_index=np.arange(len(kept), dtype=np.int64))


def resize_samples(recipe: Recipe, samples: Samples) -> Samples:
    """The samples in the size and channels that are chosen for them, where the recipe leaves these open."""
    inputs: Any = samples.inputs
    chosen = choose_image_size(recipe, inputs, resolve_device(recipe.train.device))
    values = {choice.key: choice.value for choice in chosen}
    data = recipe.data
    as_read = data.size is not None and data.crop is None and data.interpolation is None
    if not values and (as_read or not isinstance(inputs, ImageFiles | PackedImages)):
        return samples
    size = values.get("data.size") or recipe.data.size or inputs.shape[:2]
    size = as_size(tuple(size) if isinstance(size, list) else size)
    ways: dict[str, Any] = {"resize": data.resize or "crop", "crop": data.crop}
    ways |= {} if data.interpolation is None else {"interpolation": data.interpolation}
    inputs = inputs.with_size(size, values.get("data.channels"), **ways)
    return replace(samples, inputs=inputs, notes=(*samples.notes, *map(str, chosen)))


def fill_settings(recipe: Recipe, samples: Samples, tuples: Tuples | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with all that follows from its data and the machine filled in, and a note about each such choice."""
    chosen = choose_training(recipe, samples, resolve_device(recipe.train.device), tuples)
    values = {choice.key: choice.value for choice in chosen} | {"auto": []}
    if samples.inputs.kind == "image" and not is_builtin_source(recipe.data.source):
        height, width = samples.inputs.shape[:2]
        values |= {"data.size": height if height == width else [height, width]}
        values |= {"data.resize": recipe.data.resize or "crop", "data.channels": samples.inputs.shape[2]}
    if samples.skipped and "data.policy" in recipe.auto:
        values["data.policy"] = "skip"
    return recipe.with_values(values), tuple(map(str, chosen))


def take_over_settings(recipe: Recipe, old: Recipe) -> Recipe:
    """The recipe with what it leaves open as it was chosen when the run that is there began."""
    keys = [key for key in ("data.size", "data.resize", "data.channels") if recipe.value(key) is None]
    keys += ["train.steps"] if recipe.train.epochs is not None and recipe.train.epochs == old.train.epochs else []
    values = {key: old.value(key) for key in (*recipe.auto, *keys)}
    return recipe.with_values({key: value for key, value in values.items() if value is not None} | {"auto": []})


def describe_skipped(samples: Samples) -> tuple[str, ...]:
    """A note about files that were left out because they cannot be read."""
    if not samples.skipped:
        return ()
    files = "1 file that cannot be read was" if len(samples.skipped) == 1 else f"{len(samples.skipped)} files were"
    why = "" if len(samples.skipped) == 1 else " because they cannot be read"
    return (f"{files} left out{why} (--set data.policy=fail stops instead), first: {samples.skipped[0]}",)


def is_training_data(run: RunFolder, source: str, cache: Path | None = None) -> bool:
    """Whether this source holds the very data that a run was trained on, told without decoding images."""
    try:
        recipe = run.recipe_with_data_paths(source)
        samples = _read_source(recipe, cache)
        tuples = read_tuple_table(recipe.data, samples)
        samples = drop_unreadable(samples, "skip") if recipe.data.policy == "skip" else samples
        if (run.folder / "contract.json").exists():  # the same numbers under other names are other data
            columns = [one.to_json() for one in getattr(samples.inputs, "features", ())]
            if run.contract()["input"].get("columns", columns) != columns:
                return False
        return run.matches_data(_apply_split(recipe, samples, tuples).fingerprint())
    except MettleError:  # not even readable as such
        return False


def load_run_samples(
    run: RunFolder,
    data: str | None,
    cache: Path | None = None,
    *,
    columns: Mapping[str, str | None] | None = None,
    **reading: Any,
) -> Samples:
    """The run's own data, split as for training; or other data in the shape that its model takes, with their own split.

    Other data that have no split stay without one: nothing of them needs holding out. ``columns`` name the ``label``,
    ``domain`` and ``image`` of other data, where they are not called as in the recipe.
    """
    named = {key: name for key, name in (columns or {}).items() if name is not None}
    flags = " and ".join(f"--{key}" for key in named)
    are_images = data is not None and (
        Path(data).expanduser().is_dir() or Path(data).suffix.lower() in SUFFIXES + HEIC_SUFFIXES
    )
    if named and data is None:
        raise InputError(f"{flags} only with --data: the run's own data are read as its recipe says")
    if named and (are_images or is_builtin_source(str(data))):
        raise InputError(f"{flags} only with a table or an .npz file: {data} has no columns to name, give it without")
    if data is None or is_training_data(run, data, cache):
        if named:
            whose = f"{data} are those that {run.folder} was trained on, read as its recipe says"
            raise InputError(f"{flags} only with other data: {whose}; give them without")
        return prepare_samples(run.recipe_with_data_paths(data), cache)
    wanted = run.contract()["input"]
    shape = wanted["shape"]
    other: dict[str, Any] = {"source": data, "unseen": [], "pairs": None, "triplets": None}
    if len(shape) == 3:
        other |= {"size": shape[1:], "channels": shape[0]}
    elif "image" in named:
        raise InputError(f"--image only with a model of pictures: that of {run.folder} takes numbers, give none")
    if are_images or Path(data).suffix.lower() == ".npz":  # keys of a table say nothing about them
        other |= dict.fromkeys(("features", "categories", "missing", "text", "image"))
    if are_images:  # nor have these columns to name
        other |= dict.fromkeys(("label", "domain", "groups"))
    if wanted.get("columns"):
        reading["like"] = wanted["columns"]
    if not reading.get("labeled", True):
        other |= _columns_that_may_be_missing(run, data, named.get("label"))
    recipe = run.recipe.model_copy(update={"data": run.recipe.data.model_copy(update=other | named)})
    return prepare_samples(recipe, cache, split=False, **reading)


def _columns_that_may_be_missing(run: RunFolder, data: str, label: str | None) -> dict[str, Any]:
    """What is only told about samples, not shown to the model, may be missing where they are just embedded."""
    path = Path(data).expanduser()
    if not (path.is_file() and path.name.lower().endswith(TABLES)):
        return {}
    header, own = read_table_header(path), run.recipe.data
    if label is not None:
        header.require_column(label)
    found: dict[str, Any] = {"groups": [name for name in own.groups or () if name in header.columns] or None}
    return found | ({"domain": None} if own.domain and own.domain not in header.columns else {})


def _read_source(recipe: Recipe, cache: Path | None, **reading: Any) -> Samples:
    """The samples of a recipe as they stand in its source.

    Nothing is looked at yet: images that fit into memory are looked at once, when they are put there.
    """
    data = recipe.data
    options: dict[str, Any] = {
        "label": data.label,
        "domain": data.domain,
        "groups": data.groups,
        "features": data.features,
        "categories": data.categories,
        "missing": data.missing,
        "text": data.text,
        "image": data.image,
        "size": tuple(data.size) if isinstance(data.size, list) else data.size,
        "resize": data.resize,
        "channels": data.channels,
    }
    return read(data.source, policy="trust", cache=cache, **options, **reading)


def _apply_split(recipe: Recipe, samples: Samples, tuples: Tuples | None = None) -> Samples:
    """The samples with a split, theirs or one by identity, and domains that training is to miss kept out of it."""
    data = recipe.data
    if (samples.split == NO_SPLIT).all():
        if tuples is not None and (tuples.split != NO_SPLIT).any():
            samples = tuples.split_samples(samples)
        else:
            seed = recipe.seed if data.split_seed is None else data.split_seed
            samples = identity_disjoint_split(samples, val=data.val, test=data.test, seed=seed)
    return hold_out_domains(samples, data.unseen) if data.unseen else samples


def read_tuple_table(data: DataConfig, samples: Samples) -> Tuples | None:
    """The table that a recipe names by its path, read while samples still know what their files are called."""
    path = data.pairs or data.triplets
    if path is None or path == SAME_CLASS:
        return None
    return Pairs.read(path, samples) if data.pairs else Triplets.read(path, samples)


def split_tuples(recipe: Recipe, tuples: Tuples | None, samples: Samples) -> tuple[Tuples | None, tuple[str, ...]]:
    """The table of a recipe with the split of every row, and notes about rows that are left out."""
    data = recipe.data
    if SAME_CLASS in (data.pairs, data.triplets):
        kind = Pairs if data.pairs else Triplets
        tuples = kind.same_class(samples, seed=recipe.seed)
    if tuples is None:
        return None, ()
    return tuples.check_target_range(*getattr(recipe.loss_template, "range", (-np.inf, np.inf))).assign_splits(samples)
