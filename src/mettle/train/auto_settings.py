"""Settings that follow from the data and the machine, where a recipe leaves them open.

The numbers of the shipped recipes were found on small drawn characters. Photographs of other sizes, few classes or a
machine without a GPU ask for others, so a shipped recipe lists in ``auto`` which of its keys may be replaced. A key
that somebody wrote, in a file of their own or with ``--set``, is never replaced: what cannot be stays an error. The run
folder keeps the recipe with all values filled in and an empty ``auto``.
"""

import importlib.util
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mettle.data.dataset import Inputs, Samples
from mettle.data.image_decoding import Size, read_image_header
from mettle.data.inputs import EncodedImages
from mettle.data.tuples import Tuples
from mettle.errors import DataError, RecipeError

if TYPE_CHECKING:
    from mettle.train.recipe import Recipe

AUTO_KEYS = (
    "data.size",
    "data.resize",
    "data.channels",
    "data.policy",
    "batch.classes",
    "batch.size",
    "batch.augment",
    "model.backbone",
    "model.pool",
)
MOST_HEADERS = 1000  # images whose size is read to choose one
LARGEST_SIDE = {"cpu": 64, "cuda": 128}  # pixels: what trains in minutes
SMALLEST_SIDE = 32
STEP = 8  # sides are multiples of this
CROPPED = "proportions are kept, what sticks out of the square is cut off; 'pad' keeps all of it"
DRAWN_SIDE = 40  # pixels: smaller images in grey are taken for characters and symbols, not for photographs


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
class ImageFacts:
    """The sizes (height, width) of some images of a source, as they are to be looked at, and whether all are grey."""

    sizes: tuple[Size, ...]
    grey: bool = False  # all of them

    @property
    def distinct(self) -> int:
        """How many different sizes there are."""
        return len(set(self.sizes))

    @property
    def median_short_side(self) -> int:
        """Half of the images are at least so wide and high."""
        return int(statistics.median(min(size) for size in self.sizes))


def measure_images(inputs: Inputs, most: int = MOST_HEADERS) -> ImageFacts:
    """What the headers of up to ``most`` images say, evenly spread over the source; nothing is decoded."""
    if not isinstance(inputs, EncodedImages):
        return ImageFacts((inputs.shape[:2],), inputs.shape[2] == 1)  # type: ignore[arg-type]
    headers = []
    for i in np.unique(np.linspace(0, len(inputs) - 1, min(most, len(inputs))).astype(np.int64)).tolist():
        try:
            headers.append(read_image_header(inputs.content(i)))
        except DataError:
            continue  # a bad image: it is reported where all of them are read
    return ImageFacts(tuple(header.size for header in headers), all(header.grey for header in headers))


def choose_image_size(recipe: "Recipe", inputs: Inputs, device: str) -> list[Choice]:
    """Channels and size of the images, where the recipe leaves them open and they do not fit as they are."""
    data = recipe.data
    open_size, open_channels = data.size is None, data.channels is None and "data.channels" in recipe.auto
    if inputs.kind != "image" or not (open_size or open_channels):
        return []  # and no header is read
    found = measure_images(inputs)
    if not found.sizes:
        return []  # none can be read: reading them says so
    wants_grey = open_channels and found.grey and inputs.shape[2] != 1
    chosen = [Choice("data.channels", 1, "all images are grey")] if wants_grey else []
    return chosen + (_choose_size(recipe, found, len(inputs), device) if open_size else [])


def _choose_size(recipe: "Recipe", found: ImageFacts, total: int, device: str) -> list[Choice]:
    """One size for all, and how they get it, where they do not share one that is small enough for the machine."""
    largest = LARGEST_SIDE["cuda" if device.startswith("cuda") else "cpu"]
    height, width = found.sizes[0]
    machine = f"up to {largest} on {'a GPU' if largest > LARGEST_SIDE['cpu'] else 'a machine without a GPU'}"
    if found.distinct == 1:
        if "data.size" not in recipe.auto or max(height, width) <= largest:
            return []
        scale = largest / max(height, width)
        least = min(SMALLEST_SIDE, height, width)
        size = [max(least, round(side * scale / STEP) * STEP) for side in (height, width)]
        return [Choice("data.size", size, f"images are {height} x {width}, {machine}")]
    side = max(SMALLEST_SIDE, min(largest, found.median_short_side // STEP * STEP))
    many = f"{found.distinct} sizes" if len(found.sizes) == total else f"{found.distinct} sizes or more"
    reason = f"images come in {many}, the median short side is {found.median_short_side} pixels; {machine}"
    chosen = [Choice("data.size", side, reason)]
    return chosen if recipe.data.resize else [*chosen, Choice("data.resize", "crop", CROPPED)]


def choose_training(recipe: "Recipe", samples: Samples, device: str, table: Tuples | None = None) -> list[Choice]:
    """Batch shape, network and augmentation, as far as the recipe leaves them open."""
    auto, part = set(recipe.auto), samples.part("train")
    chosen = _choose_batch(recipe, part, auto, table)
    if is_photographs(samples):
        chosen += _choose_network(recipe, part, auto, device)
    return chosen


def is_photographs(samples: Samples) -> bool:
    """Whether images are taken for photographs: in color, or larger than drawn characters and symbols."""
    shape = samples.inputs.shape
    drawn = samples.source_name.partition(":")[0] == "glyphs"
    return samples.inputs.kind == "image" and not drawn and (shape[2] == 3 or min(shape[:2]) > DRAWN_SIDE)


def _choose_batch(recipe: "Recipe", part: Samples, auto: set[str], table: Tuples | None) -> list[Choice]:
    """Fewer classes, or fewer samples, where there are not as many as the recipe asks for."""
    batch = recipe.batch
    if batch.size is not None or table is not None:
        rows, what = (part, "samples") if table is None else (table.part("train"), f"{table.noun}s")
        wanted = batch.size or batch.classes * batch.samples
        if "batch.size" not in auto or not 2 <= len(rows) < wanted:
            return []
        return [Choice("batch.size", len(rows), f"the training split has {len(rows)} {what}")]
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
        seen = "the centre crop" if (recipe.data.resize or "crop") == "crop" else "the whole image"
        wanted["batch.augment"] = ("photo", f"random resized crops in training, {seen} in evaluation")
    if model.get("backbone", "convnet") == "convnet":
        wanted["model.backbone"] = _choose_backbone(device)
        wanted["model.pool"] = ("gem", "what a photograph shows may be anywhere in it")
    return [Choice(key, value, reason) for key, (value, reason) in wanted.items() if key in auto]


def _choose_backbone(device: str) -> tuple[str, str]:
    """A network that the machine trains in minutes, and why it is that one."""
    if not device.startswith("cuda"):
        return "convnet", "small enough for a machine without a GPU"
    if importlib.util.find_spec("torchvision") is None:
        return "convnet", "'resnet18' is better on a GPU but needs torchvision (pip install torchvision)"
    return "resnet18", "photographs, and a GPU to train it"


def resolve_device(name: str) -> str:
    """``auto`` means CUDA where there is one, else the CPU; a device that this machine does not have is refused."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{k}" for k in range(count))]
    if torch.backends.mps.is_available():
        here.append("mps")
    if name not in here:
        seen = f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        known = ", ".join(map(repr, here))
        raise RecipeError(f"train.device = {name!r}, but torch sees {seen} here: use 'auto' or one of {known}")
    return name
