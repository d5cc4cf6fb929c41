"""Data sets of Python as samples: where inputs and labels are found, and random numbers that can be repeated."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from mettle.data.dataset import join_splits
from mettle.data.sources.torch_dataset import DatasetItems, read_dataset
from mettle.errors import DataError, InputError


class Images(Dataset):
    """Pillow images with a label, nothing beside."""

    def __init__(self, n: int = 12, sizes=((8, 6),)):
        self.n, self.sizes = n, sizes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        h, w = self.sizes[i % len(self.sizes)]
        pixels = np.random.default_rng(i).integers(0, 256, (h, w, 3), np.uint8)
        return Image.fromarray(pixels), f"class {i // 4}"


class Noisy(Dataset):
    """Draws from all three generators when an item is read."""

    targets = (0, 0, 1, 1)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()), np.random.rand(), random.random()]), self.targets[i]


class Rows:
    """A data set of Hugging Face's kind: columns by name, items as mappings."""

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)
        self.reads = 0

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        self.reads += 1
        return {name: values[key] for name, values in self.columns.items()}


def test_images_are_read_like_those_of_files():
    samples = read_dataset(Images())
    assert samples.inputs.kind == "image" and samples.inputs.shape == (8, 6, 3)
    assert samples.label.names == ("class 0", "class 1", "class 2")
    np.testing.assert_array_equal(samples.read(np.array([3]))[0], np.asarray(Images()[3][0]))


def test_a_pass_for_the_labels_is_announced_and_attributes_save_it():
    said = []
    read_dataset(Images(), on_note=said.append)
    assert len(said) == 1 and "one pass over all 12" in said[0]
    said.clear()
    whole = read_dataset(Noisy(), on_note=said.append)
    part = read_dataset(Subset(Noisy(), [3, 0]), on_note=said.append)
    given = read_dataset(Images(), labels=np.arange(12), on_note=said.append)
    assert said == []
    assert whole.labels.tolist() == [0, 0, 1, 1] and part.label.values().tolist() == ["1", "0"]
    assert len(given.label.names) == 12


def test_columns_of_mappings_are_found_by_their_names():
    rows = Rows(img=[np.zeros((4, 4, 3), np.uint8)] * 4, who=["a", "a", "b", "b"], camera=["x", "y", "x", "y"])
    samples = read_dataset(rows, labels="who", domains="camera")
    assert samples.label.values().tolist() == ["a", "a", "b", "b"]
    assert samples.domain is not None and samples.domain.names == ("x", "y")
    assert rows.reads == 1, "a column is read without the images beside it"
    with pytest.raises(DataError, match="no column"):
        read_dataset(rows, labels="whom")
    with pytest.raises(DataError, match="cannot tell which of"):
        read_dataset([{"left": 1.0, "right": 2.0, "label": 0}] * 4)


def test_labels_that_are_tensors_are_plain_numbers():
    items = [(torch.zeros(3), torch.tensor(k // 2)) for k in range(4)]
    assert read_dataset(items).label.names == ("0", "1")
    with pytest.raises(DataError, match="one number or one text"):
        read_dataset([(torch.zeros(3), torch.zeros(2))] * 4)


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        ([], DataError, "is empty"),
        (iter([1]), InputError, "map-style"),
        ([torch.zeros(3)] * 4, DataError, "no labels"),
        ([("a text", 0)] * 4, DataError, "inputs must be tensors, arrays or images"),
        ([({"a": 1}, 0)] * 4, DataError, "inputs must be tensors"),
    ],
)
def test_what_is_no_data_set_is_told_in_one_line(dataset, error, said):
    with pytest.raises(error, match=said) as caught:
        read_dataset(dataset)
    assert "\n" not in str(caught.value)


def test_items_of_several_shapes_say_what_to_do():
    mixed = read_dataset(Images(sizes=((8, 6), (5, 5))))
    with pytest.raises(DataError, match=r"give preprocess= a size"):
        mixed.read(np.arange(2))
    resized = mixed.inputs.with_size(7, 1)
    assert resized.read(np.arange(4)).shape == (4, 7, 7, 1)
    with pytest.raises(DataError, match="collate_fn"):
        read_dataset([(torch.zeros(3 + k), 0) for k in range(4)]).read(np.arange(2))


def test_a_collate_function_makes_one_batch_of_several_lengths():
    def pad(items):
        inputs, labels = zip(*items, strict=True)
        return torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(labels)

    samples = read_dataset([(torch.ones(1 + k, dtype=torch.long), k // 2) for k in range(4)], collate=pad)
    batch = samples.read(np.arange(4))
    assert batch.shape == (4, 4) and batch.dtype == np.int64 and batch.sum() == 10
    with pytest.raises(DataError, match="made 1 inputs of 4 items"):
        read_dataset([(torch.ones(2), 0)] * 4, collate=lambda items: (torch.ones(1, 2), None)).read(np.arange(4))


def test_random_items_follow_from_seed_epoch_and_id_alone():
    samples = read_dataset(Noisy())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    first = samples.read(np.arange(4))
    after = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert after == (torch.rand(()), np.random.rand(), random.random()), "generators are put back"
    np.testing.assert_array_equal(samples.read(np.array([2]))[0], first[2])
    ids, how = np.arange(4), {"seed": 1, "epoch": 3}
    one = samples.read_seeded(ids, ids, **how)
    np.testing.assert_array_equal(samples.read_seeded(ids[::-1], ids[::-1], **how)[::-1], one)
    for other in ({"seed": 2}, {"epoch": 4}, {"view": 1}):
        changed = samples.read_seeded(ids, ids, **(how | other))
        assert (changed[:, 1:] != one[:, 1:]).all()


def test_the_fingerprint_follows_the_content():
    class Other(Images):
        def __getitem__(self, i):
            image, label = super().__getitem__(i)
            return (image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if i == 7 else image), label

    assert read_dataset(Images()).fingerprint() == read_dataset(Images()).fingerprint()
    assert read_dataset(Images()).fingerprint() != read_dataset(Other()).fingerprint()


def test_uint8_tensors_have_their_channels_first_and_arrays_last():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    tensor = read_dataset([(torch.from_numpy(pixels).permute(2, 0, 1), 0)] * 2)
    array = read_dataset([(pixels, 0)] * 2)
    np.testing.assert_array_equal(tensor.read(np.arange(1)), array.read(np.arange(1)))
    assert read_dataset([(torch.rand(3, 5, 4), 0)] * 2).inputs.kind == "tensor"


def test_splits_that_are_given_apart_become_one_table():
    train = read_dataset(Images(8))
    test = read_dataset(
        [(torch.zeros(3, 8, 6, dtype=torch.uint8), "class 1"), (torch.zeros(3, 8, 6, dtype=torch.uint8), "new")]
    )
    joined = join_splits({"train": train, "test": test})
    assert joined.label.names == ("class 0", "class 1", "new")
    assert joined.part("test").label.values().tolist() == ["class 1", "new"]
    assert joined.part("test").read(np.arange(2)).sum() == 0
    np.testing.assert_array_equal(joined.read(np.array([9, 2]))[1], train.read(np.array([2]))[0])
    assert len(np.unique(joined.ids)) == 10
    with pytest.raises(DataError, match="one kind"):
        join_splits({"train": train, "test": read_dataset([(torch.zeros(3), 0)] * 2)})


def test_joined_random_items_are_seeded_by_their_own_ids():
    joined = join_splits({"train": read_dataset(Noisy()), "val": read_dataset(Noisy())})
    at, how = np.array([6, 1]), {"seed": 0, "epoch": 1}
    found = joined.read_seeded(at, joined.ids[at], **how)
    assert isinstance(joined.inputs.parts[1], DatasetItems)
    np.testing.assert_array_equal(found[0], joined.inputs.parts[1].read_seeded(np.array([2]), np.array([6]), **how)[0])
    np.testing.assert_array_equal(found[1], joined.inputs.parts[0].read_seeded(np.array([1]), np.array([1]), **how)[0])
