import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from mettle.data.sampler import PKBatchSampler, ShuffledBatchSampler, UpsampledSampler
from mettle.errors import DataError, InputError


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=25),
    st.integers(2, 5),
    st.integers(2, 4),
    st.integers(0, 99),
)
def test_batches_are_p_classes_of_k_samples(sizes, classes, samples, seed):
    labels = np.repeat(np.arange(len(sizes)) * 7, sizes)
    if sum(size >= 2 for size in sizes) < classes:
        with pytest.raises(DataError, match=r"batch\.classes"):
            PKBatchSampler(labels, classes, samples, seed)
        return
    order = PKBatchSampler(labels, classes, samples, seed)
    for epoch in (0, 3):
        batches = order.epoch_batches(epoch)
        assert batches
        used = np.concatenate(batches)
        for batch in batches:
            found, counts = np.unique(labels[batch], return_counts=True)
            assert len(found) == classes and (counts == samples).all()
        for label in np.unique(labels):  # nothing is used twice in an epoch unless its class is smaller than K
            members = np.flatnonzero(labels == label)
            times = np.bincount(used, minlength=len(labels))[members]
            if len(members) >= samples:
                assert times.max() <= 1
            if len(members) == 1:
                assert times.sum() == 0


def test_order_is_a_pure_function_of_seed_and_epoch():
    labels = np.repeat(np.arange(20), 6)
    a, b = PKBatchSampler(labels, 4, 3, 1), PKBatchSampler(labels, 4, 3, 1)
    late = a.epoch_batches(5)
    assert [x.tolist() for x in b.epoch_batches(5)] == [x.tolist() for x in late]
    assert [x.tolist() for x in a.epoch_batches(6)] != [x.tolist() for x in late]
    assert [x.tolist() for x in PKBatchSampler(labels, 4, 3, 2).epoch_batches(5)] != [x.tolist() for x in late]


def test_an_epoch_covers_nearly_everything():
    labels = np.repeat(np.arange(50), 8)
    used = np.concatenate(PKBatchSampler(labels, 5, 4).epoch_batches(0))
    assert len(np.unique(used)) == len(labels)


def test_sample_batches_use_every_sample_once():
    used = np.concatenate(ShuffledBatchSampler(23, 5, 3).epoch_batches(2))
    assert len(used) == 20 == len(np.unique(used))
    with pytest.raises(InputError, match="between 2 and the 3 samples"):
        ShuffledBatchSampler(3, 4)


@pytest.mark.parametrize(("classes", "samples"), [(1, 4), (4, 1)])
def test_a_batch_without_pairs_is_refused(classes, samples):
    with pytest.raises(InputError, match="at least 2 classes of 2 samples"):
        PKBatchSampler(np.repeat(np.arange(9), 4), classes, samples)


SAMPLERS = {
    "P x K": PKBatchSampler(np.repeat(np.arange(20), 6), 4, 3, 1),
    "shuffled": ShuffledBatchSampler(50, 8, 1),
    "upsampled": UpsampledSampler(50, np.array([3, 7, 9]), 4, 8, 1),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_any_loader_of_torch_takes_it_and_goes_on_from_any_batch(sampler):
    data = TensorDataset(torch.arange(200))
    loader = DataLoader(data, batch_sampler=sampler)
    for epoch in (0, 1, 4):
        wanted = [batch.tolist() for batch in sampler.epoch_batches(epoch)]
        sampler.set_epoch(epoch)
        assert len(loader) == len(wanted) > 3
        assert [x.tolist() for (x,) in loader] == wanted
        sampler.set_epoch(epoch, start=3)
        assert len(loader) == len(wanted) - 3
        assert [x.tolist() for (x,) in loader] == wanted[3:]
    with pytest.raises(InputError, match="epoch must be a whole number from 0 up, got -1"):
        sampler.set_epoch(-1)


def test_upsampling_repeats_what_it_is_told_to():
    sampler = UpsampledSampler(10, np.array([3, 7]), 3, 4)
    entries = np.concatenate(sampler.epoch_batches(0))
    assert np.bincount(entries, minlength=10).tolist() == [1, 1, 1, 4, 1, 1, 1, 4, 1, 1]
    copies = np.concatenate(sampler.copy_numbers(0))
    assert sorted(copies[entries == 3].tolist()) == [0, 1, 2, 3]
    assert (copies[~np.isin(entries, (3, 7))] == 0).all()
    with pytest.raises(InputError, match="repeated must be positions of the 10 samples"):
        UpsampledSampler(10, np.array([10]), 3, 4)
