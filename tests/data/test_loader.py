"""Batches are pure functions of (seed, step): neither workers nor a stop and a resume change any of them."""

import random
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from mettle.data import Augment, Loader, Pairs, PKBatchSampler, Samples, ShuffledBatchSampler, UpsampledSampler
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.data.rank_share import RankShare
from mettle.data.transforms import as_array_transform
from mettle.errors import DataError, InputError

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
SAMPLES = Samples.of(ImageArray(IMAGES), np.arange(40) // 4)


class AllGenerators:
    """Draws from every generator that a transform of somebody else may draw from."""

    def __call__(self, image):
        return image.float() / 255 + torch.rand(()) + np.random.rand() + random.random()


class Broken:
    """A file that cannot be read, in the middle of everything."""

    kind, shape, is_in_memory = "row", (2,), False

    def __len__(self):
        return 40

    def read(self, at):
        if 7 in at:
            raise DataError("cannot read row 7")
        return np.zeros((len(at), 2), np.float32)

    def fingerprint(self):
        return ""


def loader(workers=0, **options):
    return Loader(SAMPLES, PKBatchSampler(SAMPLES.labels, 4, 2), Augment(noise=0.1), seed=3, workers=workers, **options)


def content(batches):
    return [(b.step, b.epoch, b.ids.tolist(), b.labels.tolist(), b.inputs.numpy().tobytes()) for b in batches]


@pytest.mark.parametrize("augment", [Augment(), Augment(noise=0.1)])
@pytest.mark.parametrize("how", ["samples", "views", "pairs", "ranks"])
def test_items_that_live_on_the_device_give_the_same_batches(how, augment, monkeypatch):
    samples = SAMPLES.take(np.arange(39, -1, -1))
    pairs = Pairs.of(samples.ids, np.roll(samples.ids, 3), np.linspace(0, 1, 40))
    options = {
        "samples": {},
        "views": {"views": 2},
        "pairs": {"tuples": pairs},
        "ranks": {"share": RankShare(1, 3)},
    }[how]
    sampler = ShuffledBatchSampler(40, 6, 1) if how == "pairs" else PKBatchSampler(samples.labels, 4, 2)
    made = Loader(samples, sampler, augment, seed=3, **options)
    wanted = content(made.batches(2, 90))
    monkeypatch.setattr(Loader, "_fits_gpu", lambda self: True)
    assert content(made.batches(2, 90)) == wanted
    assert {len(b.inputs) for b in made.batches(0, 1)} == {{"samples": 8, "views": 16, "pairs": 12, "ranks": 3}[how]}


@pytest.mark.parametrize("transform", [None, AllGenerators()])
@pytest.mark.parametrize("views", [1, 2])
def test_workers_change_nothing(transform, views):
    wanted = content(loader(transform=transform, views=views).batches(2, 12))
    assert len({inputs for *_, inputs in wanted}) == 10
    for workers in (1, 2):
        assert content(loader(workers, transform=transform, views=views).batches(2, 12)) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_anywhere_gives_the_same_batches_without_drawing_the_epochs_before(workers, monkeypatch):
    one = loader(workers, transform=AllGenerators())
    whole = list(one.batches(0, 14))
    wanted = content(whole)
    assert len({b.epoch for b in whole}) > 2, "the steps must cross epochs for this test to mean anything"
    drawn = []
    draw = PKBatchSampler.epoch_batches
    monkeypatch.setattr(PKBatchSampler, "epoch_batches", lambda self, epoch: drawn.append(epoch) or draw(self, epoch))
    for cut in (0, 3, 4, 9, 12) if workers == 0 else (9,):
        drawn.clear()
        following = one.batches(cut + 1, 14, whole[cut].next_position)
        assert content(following) == wanted[cut + 1 :]
        assert min(drawn) == whole[cut].next_position[0]
        assert workers or content(one.batches(cut + 1, 14)) == wanted[cut + 1 :]


def test_a_batch_says_where_in_its_epoch_it_is():
    batches = list(loader().batches(0, 12))
    for now, then in pairwise(batches):
        assert now.next_position == (then.epoch, then.epoch_step)
        assert now.ends_epoch == (then.epoch != now.epoch)


@pytest.mark.parametrize("transform", [None, AllGenerators()])
def test_the_generators_of_the_process_are_left_alone(transform):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    list(loader(transform=transform).batches(0, 3))
    list(loader(1, transform=transform).batches(0, 3))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_a_transform_is_drawn_for_its_sample_and_epoch_and_not_for_its_batch():
    """The same sample in the same epoch is changed alike in batches of 4 and of 8, and otherwise in the next epoch."""

    def changed(size, epoch):
        steps = 40 // size
        order = ShuffledBatchSampler(40, size)
        found = Loader(SAMPLES, order, Augment(), transform=AllGenerators()).batches(epoch * steps, (epoch + 1) * steps)
        return {i: x for b in found for i, x in zip(b.ids.tolist(), b.inputs, strict=True)}

    first, other, later = changed(4, 0), changed(8, 0), changed(8, 1)
    assert all(torch.equal(first[i], other[i]) for i in first)
    assert not any(torch.equal(first[i], later[i]) for i in first)


def test_transforms_of_arrays_and_of_tensors_agree():
    def mirrored(image):
        return {"image": image[:, ::-1]}

    order = ShuffledBatchSampler(40, 8)
    tensors = Loader(SAMPLES, order, Augment(), transform=lambda image: image.flip(-1)).batches(0, 5)
    arrays = Loader(SAMPLES, order, Augment(), transform=as_array_transform(mirrored)).batches(0, 5)
    for one, two in zip(tensors, arrays, strict=True):
        torch.testing.assert_close(one.inputs, two.inputs, rtol=0, atol=0)
        wanted = torch.from_numpy(IMAGES[one.ids.numpy()][:, :, ::-1].copy()).permute(0, 3, 1, 2) / 255
        torch.testing.assert_close(one.inputs, wanted, rtol=0, atol=0)


def test_a_transform_that_gives_no_image_or_several_sizes_is_told_in_one_line():
    order = ShuffledBatchSampler(40, 8)
    with pytest.raises(InputError, match="transform must give a tensor, an array or an image, got str"):
        list(Loader(SAMPLES, order, Augment(), transform=lambda image: "x").batches(0, 1))
    with pytest.raises(InputError, match="transform must give items of one shape"):
        list(
            Loader(SAMPLES, order, Augment(), transform=lambda image: image[:, : 1 + int(image[0, 0, 0]) % 2]).batches(
                0, 1
            )
        )


def test_members_of_pairs_are_transformed_each_in_its_own_way():
    pairs = Pairs.of(np.arange(39), np.arange(1, 40), np.ones(39))
    found = Loader(SAMPLES, ShuffledBatchSampler(39, 13), Augment(), tuples=pairs, transform=AllGenerators())
    batch = next(found.batches(0, 1))
    assert len(batch.inputs) == 26 and len(batch.weight) == 13
    ids = batch.ids.tolist()
    twice = next(i for i in ids[:13] if i in ids[13:])
    assert not torch.equal(batch.inputs[ids.index(twice)], batch.inputs[13 + ids[13:].index(twice)])


def test_copies_keep_the_name_of_their_sample_and_are_changed_each_in_its_own_way():
    order = UpsampledSampler(40, np.array([5]), 3, 43, seed=1)
    (batch,) = Loader(SAMPLES, order, Augment(noise=0.5)).batches(0, 1)
    at = np.flatnonzero(batch.ids.numpy() == 5)
    assert len(at) == 4 and (batch.labels[at] == SAMPLES.labels[5]).all()
    assert len({batch.inputs[i].numpy().tobytes() for i in at}) == 4
    plain = next(Loader(SAMPLES, ShuffledBatchSampler(40, 40), Augment(noise=0.5)).batches(0, 1))
    own = plain.inputs[plain.ids == 5][0]
    assert sum(torch.equal(batch.inputs[i], own) for i in at) == 1, "the sample itself is changed as without copies"


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_one_line_wherever_it_is_read(workers):
    samples = Samples.of(Broken(), np.arange(40))
    with pytest.raises(DataError) as caught:
        list(Loader(samples, ShuffledBatchSampler(40, 8), Augment(), workers=workers).batches(0, 5))
    assert str(caught.value) == "cannot read row 7"


@pytest.mark.parametrize("workers", [0, 1])
def test_leaving_early_ends_what_reads(workers):
    import multiprocessing
    import threading

    before = threading.active_count()
    batches = loader(workers).batches(0, 10_000)
    next(batches)
    batches.close()
    deadline = time.monotonic() + 20
    while (multiprocessing.active_children() or threading.active_count() > before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children() and threading.active_count() <= before


def test_rows_are_loaded_as_they_are():
    samples = Samples.of(FeatureArray(np.arange(80.0).reshape(40, 2)), np.arange(40))
    for batch in Loader(samples, ShuffledBatchSampler(40, 8), Augment(), workers=1).batches(0, 5):
        assert torch.equal(batch.inputs, torch.from_numpy(samples.inputs.array[batch.ids.numpy()]))
