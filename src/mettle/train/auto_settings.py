"""Settings that follow from the data and the machine, where a recipe leaves them open.

The numbers of the shipped recipes were found on small drawn characters. Photographs of other sizes, few classes or a
machine without a GPU ask for others, so a shipped recipe lists in ``auto`` which of its keys may be replaced. A key
that somebody wrote, in a file of their own or with ``--set``, is never replaced: what cannot be stays an error. The run
folder keeps the recipe with all values filled in and an empty ``auto``.
"""

import importlib.util
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.data.decode import Size, read_size
from mettle.data.encoded import Encoded
from mettle.data.samples import Inputs, Samples
from mettle.errors import DataError

if TYPE_CHECKING:
    from mettle.train.recipe import Recipe

AUTO_KEYS = (
    "data.size",
    "data.resize",
    "batch.classes",
    "batch.size",
    "batch.augment",
    "model.backbone",
    "model.pool",
)
LOOKED_AT = 1000  # pictures whose size is read to choose one
LARGEST_SIDE = {"cpu": 64, "cuda": 128}  # pixels: what trains in minutes
SMALLEST_SIDE = 32
STEP = 8  # sides are multiples of this
DRAWN_SIDE = 40  # pixels: smaller pictures in grey are taken for characters and symbols, not for photographs


@dataclass(frozen=True)
class Choice:
    """One setting that was chosen, and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        shown = f"{self.value!r}" if isinstance(self.value, str) else str(self.value)
        return f"chose {self.key} = {shown}: {self.reason} (--set {self.key}=... changes it)"


@dataclass(frozen=True)
class PictureSizes:
    """The sizes (height, width) of some pictures of a source, as they are to be looked at."""

    sizes: tuple[Size, ...] = field(repr=False)

    @property
    def distinct(self) -> int:
        """How many different sizes there are."""
        return len(set(self.sizes))

    @property
    def median_short_side(self) -> int:
        """Half of the pictures are at least so wide and high."""
        return int(statistics.median(min(size) for size in self.sizes))


def measure_sizes(inputs: Inputs, most: int = LOOKED_AT) -> PictureSizes:
    """The sizes of up to ``most`` pictures, evenly spread over the source; headers only, nothing is decoded."""
    if not isinstance(inputs, Encoded):
        return PictureSizes((inputs.shape[:2],))  # type: ignore[arg-type]
    sizes = []
    for i in np.unique(np.linspace(0, len(inputs) - 1, min(most, len(inputs))).astype(np.int64)).tolist():
        try:
            sizes.append(read_size(inputs.content(i)))
        except DataError:
            continue  # a bad picture: it is reported where all of them are read
    return PictureSizes(tuple(sizes))


def choose_size(recipe: "Recipe", inputs: Inputs, device: str) -> list[Choice]:
    """The size of the pictures, where the recipe leaves it open and they do not share one that is small enough."""
    if inputs.kind != "image" or recipe.data.size is not None:
        return []
    found = measure_sizes(inputs)
    if not found.sizes:
        return []  # none can be read: reading them says so
    largest = LARGEST_SIDE["cuda" if device.startswith("cuda") else "cpu"]
    height, width = found.sizes[0]
    machine = f"up to {largest} on {'a GPU' if largest > LARGEST_SIDE['cpu'] else 'a machine without a GPU'}"
    resize = recipe.data.resize or "crop"
    if found.distinct == 1:
        if "data.size" not in recipe.auto or max(height, width) <= largest:
            return []
        scale = largest / max(height, width)
        size = [max(STEP, round(side * scale / STEP) * STEP) for side in (height, width)]
        return [Choice("data.size", size, f"pictures are {height} x {width}, {machine}")]
    side = max(SMALLEST_SIDE, min(largest, found.median_short_side // STEP * STEP))
    many = f"{found.distinct} sizes" if len(found.sizes) == len(inputs) else f"{found.distinct} sizes or more"
    reason = f"pictures come in {many}, the median short side is {found.median_short_side} pixels; {machine}"
    how = {
        "crop": "proportions are kept, what sticks out of the square is cut off; 'pad' keeps all of it",
        "pad": "proportions are kept, the rest is grey",
        "stretch": "proportions are not kept",
    }
    return [Choice("data.size", side, reason), Choice("data.resize", resize, how[resize])]


def choose_training(recipe: "Recipe", samples: Samples, device: str) -> list[Choice]:
    """Batch shape, network and augmentation, as far as the recipe leaves them open."""
    auto, part = set(recipe.auto), samples.part("train")
    chosen = _choose_batch(recipe, part, auto)
    if part.inputs.kind == "image" and is_photographs(samples):
        chosen += _choose_network(recipe, part, auto, device)
    return chosen


def is_photographs(samples: Samples) -> bool:
    """Whether pictures are taken for photographs: in color, or larger than drawn characters and symbols."""
    shape = samples.inputs.shape
    drawn = samples.origin.partition(":")[0] == "glyphs"
    return samples.inputs.kind == "image" and not drawn and (shape[2] == 3 or min(shape[:2]) > DRAWN_SIDE)


def _choose_batch(recipe: "Recipe", part: Samples, auto: set[str]) -> list[Choice]:
    """Fewer classes, or fewer samples, where there are not as many as the recipe asks for."""
    batch = recipe.batch
    if batch.size is not None:
        if recipe.takes() or "batch.size" not in auto or len(part) >= batch.size or len(part) < 2:
            return []
        return [Choice("batch.size", len(part), f"the training split has {len(part)} samples")]
    counts = np.bincount(part.labels)
    usable = int((counts >= 2).sum())
    if "batch.classes" not in auto or usable >= batch.classes or usable < 2:
        return []
    return [Choice("batch.classes", usable, f"the training split has {usable} classes with two or more samples")]


def _choose_network(recipe: "Recipe", part: Samples, auto: set[str], device: str) -> list[Choice]:
    """The network and the augmentation for photographs."""
    wanted: dict[str, tuple[Any, str]] = {}
    model = recipe.model
    color = part.inputs.shape[2] == 3
    if color:
        wanted["batch.augment"] = ("photo", "random resized crops in training, the centre crop in evaluation")
    if model.get("backbone", "convnet") == "convnet":
        if device.startswith("cuda") and importlib.util.find_spec("torchvision") is not None:
            wanted["model.backbone"] = ("resnet18", "photographs, and a GPU to train it")
        wanted["model.pool"] = ("gem", "what a photograph shows may be anywhere in it")
    current: Mapping[str, Any] = {"batch.augment": recipe.batch.augment, **{f"model.{k}": v for k, v in model.items()}}
    return [
        Choice(key, value, reason)
        for key, (value, reason) in wanted.items()
        if key in auto and current.get(key) != value
    ]
