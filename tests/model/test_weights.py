import hashlib

import pytest
import torch
from torch import nn

from mettle.errors import RunError
from mettle.model.weights import hash_state_dict, load_state_dict, save_state_dict, state_bytes


def state():
    torch.manual_seed(0)
    return nn.Linear(3, 2).state_dict()


def test_weights_come_back_as_they_were_with_their_hash_and_size(tmp_path):
    path = tmp_path / "w.safetensors"
    saved = save_state_dict(path, state())
    assert saved.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert saved.size == path.stat().st_size
    found = load_state_dict(path, saved.sha256, saved.size)
    assert found.keys() == state().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state().items())


def test_a_damaged_a_swapped_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    saved = save_state_dict(path, state())
    other = save_state_dict(tmp_path / "other", {name: t + 1 for name, t in state().items()})
    assert other.size == saved.size and other.sha256 != saved.sha256
    (tmp_path / "other").replace(path)
    with pytest.raises(RunError, match="does not match its hash"):
        load_state_dict(path, saved.sha256, saved.size)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(RunError, match=f"{saved.size + 1} bytes instead of {saved.size}"):
        load_state_dict(path, size=saved.size)
    path.write_bytes(b"not tensors")
    with pytest.raises(RunError, match="holds no tensors"):
        load_state_dict(path)
    path.unlink()
    with pytest.raises(RunError, match="is missing"):
        load_state_dict(path)
    with pytest.raises(RunError, match="cannot be read"):
        load_state_dict(tmp_path)


def test_a_tensor_under_two_names_is_saved_twice(tmp_path):
    shared = torch.arange(4.0)
    saved = save_state_dict(tmp_path / "w", {"a": shared, "b": shared, "c": shared[1:]})
    found = load_state_dict(tmp_path / "w", *saved)
    assert torch.equal(found["a"], shared) and torch.equal(found["b"], shared) and torch.equal(found["c"], shared[1:])


def test_the_hash_of_a_model_is_that_of_its_file(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    saved = save_state_dict(tmp_path / "w", model.state_dict())
    assert hash_state_dict(model) == saved.sha256
    assert state_bytes(model) <= saved.size <= state_bytes(model) + (1 << 20)
    assert saved.sha256 != hash_state_dict(nn.Linear(3, 2))
