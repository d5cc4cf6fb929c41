"""Class vectors kept where gradients will be written: whatever the sizes, each is read before it is written over."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: the fused kernels cannot run", allow_module_level=True)

from mettle.pairs.kernels.class_softmax import ClassOperands, GradientBuffer

PAD = 8


def padded(n):
    return -(-n // PAD) * PAD


def parts(n, size):
    return [slice(k, min(k + size, n)) for k in range(0, n, size)]


@settings(max_examples=400)
@given(
    classes=st.integers(1, 150),
    d=st.integers(1, 12),
    width=st.sampled_from([4, 8, 16]),
    chunk=st.sampled_from([16, 32, 64]),
    step=st.sampled_from([8, 16, 24, 32]),
    kinds=st.tuples(*2 * [st.sampled_from([torch.float16, torch.float32])]),
)
def test_nothing_is_written_over_before_it_is_read(classes, d, width, chunk, step, kinds):
    gradient = torch.zeros(classes, d, dtype=kinds[0])
    buffer, like = GradientBuffer(gradient, chunk, min(step, chunk)), torch.empty(0, width, dtype=kinds[1])
    validate_numbers = torch.arange((classes + PAD) * width, dtype=torch.float64).remainder_(1999).view(-1, width)
    for place in parts(classes, chunk):
        rows = padded(place.stop - place.start)
        room, these = buffer.allocate(place, rows, like), validate_numbers[place.start : place.start + rows]
        if room is not None:
            room.copy_(these)
            buffer.store(place, ClassOperands(room, room, these[:, 0]))
    for place in parts(classes, buffer.step):
        found = buffer.read(place, padded(place.stop - place.start))
        if found is not None:
            many = place.stop - place.start
            assert torch.equal(found.hi[:many].double(), validate_numbers[place])
            assert torch.equal(found.inverse_norm[:many], validate_numbers[place, 0])
        gradient[place] = -1
    assert (gradient == -1).all()


def test_there_is_room_where_operands_are_half_as_wide():
    buffer, like = GradientBuffer(torch.zeros(1000, 16), 256, 64), torch.empty(0, 16, dtype=torch.float16)
    assert all(buffer.allocate(place, padded(place.stop - place.start), like) is not None for place in parts(1000, 256))
