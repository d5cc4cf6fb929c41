"""Anybody's module embeds like one of ours; what is no embedding is refused in one line."""

import numpy as np
import pytest
import torch
from torch import nn

from mettle.data import Samples
from mettle.data.inputs import ImageArray
from mettle.data.transforms import to_input_tensor
from mettle.errors import InputError
from mettle.model import Embedder, EmbedderSpec, EmbeddingModel, ModuleEmbedder, Preprocess, embed


class Bag(nn.Module):
    """Mean of the vectors of tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5)

    def forward(self, tokens):
        return self.table(tokens).mean(1)


class Give(nn.Module):
    """Whatever a function makes of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_images_come_in_unnormalized_and_the_module_sees_normalized_ones():
    preprocess = Preprocess(8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    module, x = net().eval(), torch.rand(5, 3, 8, 8)
    model = ModuleEmbedder.from_example(module, x, preprocess=preprocess)
    wanted = module((x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1))
    torch.testing.assert_close(model(x), wanted)
    assert torch.equal(model.features(x), model(x))
    assert (model.shape, model.dim, model.dtype) == ((3, 8, 8), 4, "float32")
    assert {"input_mean", "input_std"} <= set(model.state_dict())
    assert "input_mean" not in ModuleEmbedder(net(), (3, 8, 8)).state_dict()


def test_trying_a_module_leaves_it_as_it_was():
    module = net().train()
    module[1].eval()  # a frozen batch norm
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = ModuleEmbedder.from_example(module, torch.rand(2, 3, 8, 8))
    assert module.training and not module[1].training and made.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_token_ids_stay_whole_numbers():
    model = ModuleEmbedder.from_example(Bag(), np.zeros((3, 7), np.int32))
    assert (model.shape, model.dim, model.dtype) == ((7,), 5, "int64")
    assert ModuleEmbedder(Bag(), (7,), dtype="int64").dim == 5


def test_every_model_is_an_embedding_model():
    ours = Embedder(EmbedderSpec(width=2, depth=1, dim=3), (1, 8, 8))
    assert ours.dim == 3
    for model in (ours, ModuleEmbedder(net(), (3, 8, 8))):
        assert isinstance(model, EmbeddingModel)
    assert not isinstance(nn.Softmax(dim=1), EmbeddingModel)


def test_a_module_without_parameters_embeds_samples():
    pixels = np.random.default_rng(0).integers(0, 255, (10, 4, 4), np.uint8)
    samples = Samples.of(ImageArray(pixels), [0] * 10)
    z = embed(ModuleEmbedder(nn.Flatten(), (1, 4, 4)), samples, batch=4)
    np.testing.assert_allclose(z, pixels.reshape(10, 16) / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x.flatten(1), x), "got a tuple: return one tensor, or wrap"),
        (lambda x: {"z": x}, "got a dict"),
        (lambda x: x, r"\(2, 3, 8, 8\): flatten or pool the feature map"),
        (lambda x: x.mean(), r"got shape \(\): return one row"),
        (lambda x: x.flatten(1)[:1], r"one row for each of 2 inputs, got shape \(1, 192\)"),
        (lambda x: x.flatten(1)[:, :0], r"got shape \(2, 0\)"),
        (lambda x: x.flatten(1).argmax(1, keepdim=True), "floating-point embeddings, got int64"),
        (lambda x: x.flatten(1) / 0, "NaN or infinity"),
        (lambda x: x @ torch.ones(5, 5), "the module fails on inputs of shape .2, 3, 8, 8. and type float32: "),
        (lambda x: {}[3], "fails on .*: 3"),
    ],
)
def test_what_is_no_embedding_is_refused_in_one_line(function, message):
    with pytest.raises(InputError, match=message) as caught:
        ModuleEmbedder.from_example(Give(function), torch.ones(2, 3, 8, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("example", [torch.ones(3), torch.ones(0, 3), [1.0], np.array([["a"]])])
def test_an_example_is_a_batch_of_numbers(example):
    with pytest.raises(InputError, match="example must"):
        ModuleEmbedder.from_example(nn.Flatten(), example)


def test_what_does_not_fit_is_named():
    with pytest.raises(InputError, match=r"preprocess gives images .*\(3, 9, 9\), the module takes .*\(3, 8, 8\)"):
        ModuleEmbedder.from_example(net(), torch.ones(2, 3, 8, 8), preprocess=Preprocess(9))
    with pytest.raises(InputError, match="dtype must be"):
        ModuleEmbedder(net(), (3, 8, 8), dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        ModuleEmbedder.from_example(lambda x: x, torch.ones(2, 3))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"inputs of shape \(3, 8, 8\), got \(3, 9, 9\)"):
        ModuleEmbedder(net(), (3, 8, 8))(torch.ones(2, 3, 9, 9))


@pytest.mark.parametrize(
    ("array", "dtype", "shape"),
    [
        (np.full((2, 4, 6, 3), 255, np.uint8), torch.float32, (2, 3, 4, 6)),
        (np.ones((2, 3, 4, 6), np.float64), torch.float32, (2, 3, 4, 6)),
        (np.ones((2, 5), np.float16), torch.float32, (2, 5)),
        (np.ones((2, 5), np.int32), torch.int64, (2, 5)),
        (np.ones((2, 5), bool), torch.float32, (2, 5)),
        (np.ones((2, 3, 4, 6), np.int64), torch.int64, (2, 3, 4, 6)),
    ],
)
def test_the_dtype_says_what_inputs_are(array, dtype, shape):
    found = to_input_tensor(array, "cpu")
    assert (found.dtype, tuple(found.shape)) == (dtype, shape) and (found == 1).all()
