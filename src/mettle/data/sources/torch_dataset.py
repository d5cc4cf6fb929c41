"""Any map-style data set of Python as `Samples`: torch's, torchvision's, Hugging Face's, or a list of pairs.

| what ``dataset[i]`` is | what becomes of it |
|---|---|
| ``(input, label, ...)`` | the input, and the label unless it is known already |
| ``{"image": ..., "label": ...}`` | likewise, by the usual names of columns |
| an input alone | the input; labels must be given |

An input that is a Pillow image or a uint8 array or tensor is an *image*; it is resized and decoded like a file. Any
other array or tensor is a *tensor*: token ids, a waveform, a spectrogram, an image that is normalized already. The
network gets it as it is.

A data set may draw random numbers in ``__getitem__``: torch, NumPy and `random` are seeded for every item, in training
by (seed, epoch, item), elsewhere by the item alone, so that reading twice gives the same.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mettle.data.column_names import DOMAINS, LABELS, PICTURES, find_column
from mettle.data.dataset import Samples
from mettle.data.image_decoding import Channels, Resize, Sides, Size, as_size
from mettle.data.inputs import ImageArray
from mettle.data.transforms import preserve_generators, seed_generators
from mettle.errors import DataError, InputError
from mettle.rng import hash_bits

INPUTS = (*PICTURES, "pixel_values", "input_ids", "input_values", "audio", "input", "inputs", "x", "data", "features")
HASHED_ITEMS = 64
LABEL_NAMES = ("targets", "labels", "label")  # attributes under which data sets keep all labels

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class DatasetItems:
    """The inputs of a map-style data set, read item by item; an `mettle.data.dataset.Inputs`."""

    dataset: Any
    kind: Literal["image", "tensor"]
    column: str | None = None  # of items that are mappings
    size: Size | None = None  # of images; None: as they are, which must then be one size
    channels: Channels | None = None
    resize: Resize = "crop"
    how: Mapping[str, Any] | None = None  # further arguments of `ImageArray.with_size`
    collate: Collate | None = None  # of a DataLoader, which puts items of several lengths into one batch

    is_in_memory = False
    is_seeded = True  # `read_seeded` is what training reads with

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first item: (h, w, c) of an image, that of its tensor else."""
        return tuple(self.read(np.zeros(1, np.int64)).shape[1:])

    def read(self, at: np.ndarray) -> np.ndarray:
        """The items at these positions, with random numbers that follow from the position."""
        at = np.asarray(at, np.int64)
        return self.read_seeded(at, at, seed=0, epoch=0)

    def read_seeded(self, at: np.ndarray, ids: np.ndarray, *, seed: int, epoch: int, view: int = 0) -> np.ndarray:
        """The items at these positions, with random numbers drawn from (seed, epoch, id, view)."""
        at = np.asarray(at, np.int64)
        bits = hash_bits(seed, epoch, view, 31, np.asarray(ids))
        items = []
        with preserve_generators():
            for i, one in zip(at.tolist(), bits.tolist(), strict=True):
                seed_generators(one)
                items.append(self.dataset[i])
        if self.collate is not None and items:
            batch = to_array(select_input(self.collate(items), self.column))
            if len(batch) != len(items):
                raise DataError(f"collate_fn made {len(batch)} inputs of {len(items)} items: one for each is wanted")
            return batch
        return self._stack([self._array(select_input(item, self.column)) for item in items], at)

    def _array(self, item: Any) -> np.ndarray:
        if self.kind == "tensor":
            return to_array(item)
        array = to_image_array(item)[None]
        if self.size is None and self.channels is None:
            return array[0]
        return ImageArray(array).with_size(self.size, self.channels, self.resize, **(self.how or {})).array[0]

    def _stack(self, arrays: list[np.ndarray], at: np.ndarray) -> np.ndarray:
        if not arrays:
            return np.empty((0, *self.shape), np.uint8 if self.kind == "image" else np.float32)
        for i, array in zip(at.tolist(), arrays, strict=True):
            if array.shape != arrays[0].shape:
                remedy = (
                    "give preprocess= a size"
                    if self.kind == "image"
                    else "make them one length in the data set, or give a DataLoader whose collate_fn does"
                )
                shapes = f"{arrays[0].shape} (item {at[0]}) and {array.shape} (item {i})"
                raise DataError(f"items of one shape are wanted, got {shapes}: {remedy}")
        return np.stack(arrays)

    def fingerprint(self) -> str:
        """Hash of the number of items and of the content of 64 of them, evenly spread."""
        found = hashlib.sha256(repr((len(self), self.kind, self.size, self.channels, self.resize, self.how)).encode())
        for i in np.unique(np.linspace(0, len(self) - 1, min(HASHED_ITEMS, len(self))).astype(np.int64)).tolist():
            one = self.read(np.asarray([i]))
            found.update(repr((one.dtype.str, one.shape)).encode() + np.ascontiguousarray(one).tobytes())
        return found.hexdigest()[:16]

    def with_size(
        self, size: Sides | None = None, channels: Channels | None = None, resize: Resize | None = None, **how: Any
    ) -> "DatasetItems":
        """The same images in another size, in grey or in color."""
        if self.kind != "image":
            raise InputError("only images have a size to change: this data set yields tensors")
        chosen = {"size": as_size(size) or self.size, "channels": channels or self.channels}
        return replace(self, **chosen, resize=resize or self.resize, how=how or self.how)

    def name(self, i: int) -> str:
        """What to call one item."""
        return f"item {i}"

    def content(self, i: int) -> bytes:
        """The bytes of one item."""
        return self.read(np.asarray([i])).tobytes()


@dataclass(frozen=True, eq=False)
class ConvertedItems:
    """The items of other inputs, each batch converted by a function to what a network takes."""

    items: Any
    convert: Callable[[np.ndarray], np.ndarray]

    kind = "tensor"
    is_in_memory = False

    @property
    def is_seeded(self) -> bool:
        """Whether the items draw random numbers when they are read."""
        return getattr(self.items, "is_seeded", False)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first item, converted."""
        return tuple(self.read(np.zeros(1, np.int64)).shape[1:])

    def read(self, at: np.ndarray) -> np.ndarray:
        """The items at these positions."""
        return self.convert(self.items.read(at))

    def read_seeded(self, at: np.ndarray, ids: np.ndarray, **how: int) -> np.ndarray:
        """The same, with random numbers of these ids."""
        return self.convert(self.items.read_seeded(at, ids, **how))

    def fingerprint(self) -> str:
        """That of the items: how they are converted is the model's affair."""
        return self.items.fingerprint()

    def name(self, i: int) -> str:
        """What to call one item."""
        return self.items.name(i)

    def content(self, i: int) -> bytes:
        """The bytes of one item."""
        return self.items.content(i)


@dataclass(frozen=True)
class Denormalize:
    """Images that a data set normalizes itself, (b, c, h, w) float, back in [0, 1]: a model normalizes them again.

    So one model serves the data set and images from elsewhere alike.
    """

    mean: np.ndarray  # (c, 1, 1)
    std: np.ndarray

    def __call__(self, batch: Any) -> Any:
        """An array or a tensor."""
        if isinstance(batch, Tensor):
            mean, std = (torch.from_numpy(values).to(batch.device) for values in (self.mean, self.std))
            return batch * std + mean
        return batch * self.std + self.mean


@dataclass(frozen=True)
class ApplyTransform:
    """A function on one Pillow image, such as a ``Compose`` of torchvision, for batches of images (b, h, w, c)."""

    transform: Callable[[Image.Image], Any]

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """(b, ...) what the function makes of every image."""
        images = [Image.fromarray(item if item.shape[2] == 3 else item[:, :, 0]) for item in batch]
        found = [to_array(self.transform(image)) for image in images]
        if len({item.shape for item in found}) > 1:
            raise DataError("preprocess= gives items of several shapes: end it with a resize or a crop")
        return np.stack(found)


def read_dataset(
    dataset: Any,
    *,
    labels: Any = None,
    domains: Any = None,
    collate: Collate | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Samples:
    """The samples of a map-style data set.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        labels: one per item, or the name of the column that holds them. Without, ``dataset.targets`` or
            ``dataset.labels``, those of a ``Subset`` likewise; else every item is read once for its label.
        domains: one per item, or the name of a column.
        collate: the ``collate_fn`` of a DataLoader, for items of several lengths.
        on_note: called with a line about a pass over all items.

    Raises:
        DataError: there are no items, no labels, or nothing that a network could take.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(
            f"data must be a map-style data set with __len__ and __getitem__, got {type(dataset).__name__}: "
            "put the items of an iterable one into a list"
        )
    name, count = type(dataset).__name__, len(dataset)
    if count == 0:
        raise DataError(f"the {name} is empty: there is nothing to train on")
    with preserve_generators():
        seed_generators(0)
        first = dataset[0]
    column = find_input_column(first, labels, domains)
    items = DatasetItems(dataset, _find_kind(select_input(first, column)), column, collate=collate)
    found = find_values(dataset, labels, LABELS, "labels", on_note)
    if found is None:
        raise DataError(
            f"no labels: {name}[0] is {describe_item(first)}, and there is neither .targets nor .labels. Yield "
            "(input, label), or give labels=, one for each item"
        )
    where = find_values(dataset, domains, DOMAINS, "domains", on_note) if domains is not None else None
    for what, values in (("labels", found), ("domains", where)):
        if values is not None and len(values) != count:
            raise DataError(f"{what} has {len(values)} entries for {count} items: one for each is wanted")
    return Samples.of(items, found, domain=where, source_name=f"{PYTHON}{name}")


PYTHON = "python:"  # before the name of a source that was given as an object


def find_values(
    dataset: Any, given: Any, usual: Sequence[str], what: str, on_note: Callable[[str], None]
) -> np.ndarray | list[Any] | None:
    """The labels or domains of all items: as given, as a column, as an attribute, or read from every item."""
    if given is not None and not isinstance(given, str):
        return _as_list(given)
    if given is None:
        known = _find_attribute(dataset)
        if known is not None:
            return known
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list | tuple):  # of Hugging Face: a column is read without the images beside it
        name = given or find_column(columns, usual)
        if name is not None and name in columns:
            return _as_list(dataset[name])
    with preserve_generators():
        seed_generators(0)
        first = dataset[0]
        name = _find_value_key(first, given, usual)
        if name is None:
            if given is not None:
                raise DataError(f"{what}={given!r} is no column of the data set: item 0 is {describe_item(first)}")
            return None
        on_note(f"{what} are read from the items, in one pass over all {len(dataset)}: give {what}= to save it")
        return [_as_plain(dataset[i][name]) for i in range(len(dataset))]


def _find_attribute(dataset: Any) -> list[Any] | np.ndarray | None:
    """All labels, where a data set keeps them beside its items; of a part of a data set those of the part."""
    for name in LABEL_NAMES:
        values = getattr(dataset, name, None)
        if values is not None and not callable(values) and hasattr(values, "__len__") and len(values) == len(dataset):
            return _as_list(values)
    whole, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if whole is not None and indices is not None:  # torch.utils.data.Subset
        found = _find_attribute(whole)
        return None if found is None else [found[i] for i in indices]
    return None


def _find_value_key(item: Any, given: Any, usual: Sequence[str]) -> Any:
    """Where in an item the label is: a key of a mapping, or position 1 of a tuple."""
    if isinstance(item, Mapping):
        return given if given in item else find_column(map(str, item), usual) if given is None else None
    if isinstance(item, tuple | list) and len(item) >= 2 and given is None and usual is LABELS:
        return 1
    return None


def find_input_column(item: Any, *others: Any) -> str | None:
    """The key of the input in an item that is a mapping; None for other items."""
    if not isinstance(item, Mapping):
        return None
    taken = {*LABELS, *DOMAINS, *(name for name in others if isinstance(name, str))}
    free = [str(key) for key in item if str(key).lower() not in taken and str(key) not in taken]
    found = free[0] if len(free) == 1 else find_column(free, INPUTS)
    if found is None:
        raise DataError(
            f"cannot tell which of {', '.join(map(repr, map(str, item)))} is the input: leave only it and the labels "
            "in the items, or call it 'image' or 'input'"
        )
    return found


def select_input(item: Any, column: str | None) -> Any:
    """The input of an item or of a batch."""
    if column is not None:
        return item[column]
    if isinstance(item, tuple | list):
        return item[0]
    return item


def _find_kind(item: Any) -> Literal["image", "tensor"]:
    if isinstance(item, Image.Image):
        return "image"
    if isinstance(item, Tensor | np.ndarray):
        is_bytes = str(item.dtype) in ("torch.uint8", "uint8")
        return "image" if is_bytes and item.ndim in (2, 3) else "tensor"
    if isinstance(item, int | float | list | tuple):
        return "tensor"
    raise DataError(
        f"inputs must be tensors, arrays or images, got {describe_item(item)}: turn them into one in the data set"
    )


def to_array(item: Any) -> np.ndarray:
    """A tensor, an array or numbers as an array: float32, int64, or uint8 as it is."""
    if isinstance(item, Tensor):
        item = item.detach().cpu()
        item = (item.float() if item.is_floating_point() else item).numpy()
    array = np.asarray(item)
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return array.astype(np.int64, copy=False)
    if array.dtype.kind not in "ub":
        raise DataError(f"inputs must be numbers, got {array.dtype}: turn them into tensors in the data set")
    return array


def to_image_array(item: Any) -> np.ndarray:
    """(h, w, c) uint8 of a Pillow image, a uint8 array with channels last, or a uint8 tensor with channels first."""
    if isinstance(item, Image.Image):
        array = np.asarray(item.convert("L" if item.mode in ("1", "L", "I", "I;16", "F") else "RGB"))
    elif isinstance(item, Tensor):
        array = item.detach().cpu().numpy()
        array = array.transpose(1, 2, 0) if array.ndim == 3 and array.shape[0] in (1, 3) else array
    else:
        array = np.asarray(item)
    array = array[..., None] if array.ndim == 2 else array
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3):
        raise DataError(f"an image must be uint8 (h, w), (h, w, 3) or (3, h, w), got {array.dtype} {array.shape}")
    return array


def describe_item(item: Any) -> str:
    """What an item of a data set is, in a few words."""
    if isinstance(item, Mapping):
        return f"a mapping with {', '.join(map(repr, map(str, item)))}"
    if isinstance(item, tuple | list):
        return f"a {type(item).__name__} of {len(item)}"
    return f"one {type(item).__name__}"


def _as_list(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values if isinstance(values, np.ndarray) else [_as_plain(value) for value in values]


def _as_plain(value: Any) -> Any:
    """A label as a plain number or text: a tensor of one number would be a name of its own."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        if value.size != 1 if not isinstance(value, Tensor) else value.numel() != 1:
            raise DataError(f"a label must be one number or one text, got shape {tuple(value.shape)}")
        return value.item()
    return value
