"""The batch-norm neck: its formula, what it remembers, and the choice of the embedding that a model gives."""

import numpy as np
import pytest
import torch
from torch import nn

from mettle.errors import RecipeError
from mettle.model import Embedder, EmbedderSpec, ModuleEmbedder, OnnxEmbedder, encode_onnx
from mettle.model.neck import BatchNormNeck


def embeddings(n: int = 20, dim: int = 5) -> torch.Tensor:
    return 3 * torch.randn(n, dim, generator=torch.Generator().manual_seed(0)) + torch.arange(dim)


def spec(**options) -> EmbedderSpec:
    return EmbedderSpec("mlp", width=1, depth=1, dim=4, **options)


def test_the_neck_centers_and_scales_every_dimension_and_learns_no_shift():
    neck, z = BatchNormNeck(5), embeddings()
    with torch.no_grad():
        neck.norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    wanted = np.empty((20, 5))
    for k, column in enumerate(z.double().numpy().T):
        wanted[:, k] = (k + 1) * (column - column.mean()) / np.sqrt(column.var() + 1e-5)
    np.testing.assert_allclose(neck(z).detach().numpy(), wanted, rtol=1e-5, atol=1e-5)
    neck(z).square().sum().backward()
    assert neck.norm.weight.grad is not None
    assert neck.norm.bias.grad is None and not neck.norm.bias.any()


def test_unit_embeddings_stay_unit():
    after = BatchNormNeck(5, unit=True)(embeddings())
    torch.testing.assert_close(after, nn.functional.normalize(BatchNormNeck(5)(embeddings()), dim=1))


def test_the_statistics_of_a_batch_can_be_used_without_remembering_them():
    neck, z = BatchNormNeck(5).eval(), embeddings()
    before = {name: value.clone() for name, value in neck.state_dict().items()}
    found = neck.normalize_batch(z)
    assert all(torch.equal(value, before[name]) for name, value in neck.state_dict().items())
    torch.testing.assert_close(found, neck.train()(z))
    assert not torch.equal(neck.norm.running_mean, before["norm.running_mean"])
    assert not torch.allclose(neck.eval()(z), found)


@pytest.mark.parametrize("kind", ["described", "module"])
def test_a_model_gives_the_chosen_embedding(kind):
    x, made = torch.rand(6, 7), {}
    for embedding in ("before", "after"):
        torch.manual_seed(0)
        if kind == "described":
            made[embedding] = Embedder(spec(neck="batchnorm", embedding=embedding), (7,))
        else:
            made[embedding] = ModuleEmbedder(nn.Linear(7, 4), (7,), neck="batchnorm", embedding=embedding)
    for model in made.values():
        model.neck.norm.running_mean.copy_(torch.arange(4) / 10)
        model.eval()
    before, after = made["before"](x), made["after"](x)
    assert torch.equal(before, made["after"].before_neck(x))
    torch.testing.assert_close(after, made["before"].neck(before))
    assert not torch.allclose(before, after)


def test_a_model_without_a_neck_is_as_it_was():
    torch.manual_seed(0)
    plain = Embedder(spec(), (7,))
    torch.manual_seed(0)
    other = Embedder(spec(neck="batchnorm"), (7,))
    assert plain.neck is None and not any("neck" in name for name in plain.state_dict())
    assert not {"neck", "embedding"} & set(plain.spec.to_table())
    assert set(other.state_dict()) - set(plain.state_dict()) == {
        f"neck.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    for name, value in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert EmbedderSpec(**other.spec.to_table()) == other.spec


@pytest.mark.parametrize("embedding", ["before", "after"])
def test_the_exported_graph_gives_the_chosen_embedding(embedding):
    pytest.importorskip("onnxscript")
    model = Embedder(spec(neck="batchnorm", embedding=embedding), (7,))
    model.neck.norm.running_mean.copy_(torch.arange(4) / 10)
    x = torch.rand(5, 7)
    found = OnnxEmbedder(encode_onnx(model, example=x).content)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"neck": "batchnrm"}, "did you mean 'batchnorm'"),
        ({"neck": "batchnorm", "embedding": "behind"}, "model.embedding = 'behind' is not known"),
        ({"embedding": "after"}, "needs a neck: set model.neck = 'batchnorm'"),
    ],
)
def test_what_makes_no_neck_is_refused(options, said):
    with pytest.raises(RecipeError, match=said):
        spec(**options)
    with pytest.raises(RecipeError, match=said):
        ModuleEmbedder(nn.Linear(7, 4), (7,), **options)
