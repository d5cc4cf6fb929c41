import numpy as np
import pytest
import torch

from mettle.data import Samples
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.errors import InputError, MissingExtra, RecipeError
from mettle.model import Embedder, EmbedderSpec, backbones, embed


@pytest.mark.parametrize("pool", ["average", "gem", "flatten"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 20, 28), (3, 5, 5)])
def test_pictures_become_unit_vectors(pool, head, shape):
    model = Embedder(EmbedderSpec(width=4, pool=pool, head=head, dim=6), shape).eval()
    z = model(torch.rand(3, *shape))
    assert z.shape == (3, 6)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3))
    z.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rows_become_vectors():
    model = Embedder(EmbedderSpec(backbone="mlp", width=2, depth=2, dim=5, unit=False), (7,)).eval()
    z = model(torch.rand(4, 7))
    assert z.shape == (4, 5) and not torch.allclose(z.norm(dim=1), torch.ones(4))


def test_no_head_needs_the_right_dimension():
    assert Embedder(EmbedderSpec(width=2, depth=2, head="none", dim=4), (1, 8, 8))(torch.rand(2, 1, 8, 8)).shape == (
        2,
        4,
    )
    with pytest.raises(RecipeError, match=r"model\.dim = 4"):
        Embedder(EmbedderSpec(width=2, depth=2, head="none", dim=9), (1, 8, 8))


def test_centring_is_part_of_the_model():
    model = Embedder(EmbedderSpec(width=4, depth=2, dim=6), (3, 8, 8)).eval()
    x = torch.rand(64, 3, 8, 8) * torch.tensor([1.0, 0.2, 3.0]).view(3, 1, 1) + 5
    model.fit_normalization(x)
    inside = (x - model.input_mean) / model.input_std
    torch.testing.assert_close(inside.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inside.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    assert {"input_mean", "input_std"} <= set(model.state_dict())


def test_a_constant_column_does_not_divide_by_zero():
    model = Embedder(EmbedderSpec(backbone="mlp", width=1, depth=1, dim=2), (2,)).eval()
    model.fit_normalization(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))
    assert torch.isfinite(model(torch.tensor([[1.5, 5.0]]))).all()


def test_the_wrong_shape_is_named():
    model = Embedder(EmbedderSpec(width=2, depth=1), (1, 8, 8))
    with pytest.raises(InputError, match=r"\(1, 8, 8\), got \(3, 8, 8\)"):
        model(torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ({"backbone": "mlp"}, (1, 8, 8), "use 'convnet'"),
        ({"backbone": "convnet"}, (8,), "use 'mlp'"),
        ({"backbone": "resnet18"}, (8,), "rows"),
        ({"backbone": "convent"}, (1, 8, 8), "did you mean 'convnet'"),
        ({"backbone": "timm/resnet81"}, (3, 32, 32), "did you mean"),
        ({"backbone": "convnet", "pretrained": True}, (1, 8, 8), "needs a timm backbone"),
        ({"width": 0}, (1, 8, 8), "width must be between 1 and"),
    ],
)
def test_what_does_not_fit_is_refused(spec, shape, message):
    with pytest.raises(RecipeError, match=message):
        Embedder(EmbedderSpec(**spec), shape)


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet18", (1, 32, 32)), ("resnet18", (3, 96, 96)), ("resnet50", (3, 32, 32))]
)
def test_resnets_keep_small_pictures_large(name, shape):
    model = Embedder(EmbedderSpec(backbone=name, dim=8), shape).eval()
    side = model.backbone(torch.zeros(1, *shape)).shape[-1]
    assert side == (4 if shape[1] == 32 else 3)
    assert model(torch.rand(2, *shape)).shape == (2, 8)


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm/vit_tiny_patch16_224"])
def test_any_timm_name_is_a_backbone(name):
    model = Embedder(EmbedderSpec(backbone=name, dim=8), (3, 64, 64)).eval()
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 8)


def test_a_missing_extra_names_the_remedy(monkeypatch):
    monkeypatch.setattr(backbones.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install torchvision"):
        backbones.import_torchvision()


def test_importing_torchvision_twice_is_harmless():
    assert backbones.import_torchvision() is backbones.import_torchvision()


def test_embed_is_in_eval_mode_in_order_and_leaves_the_mode_alone():
    samples = Samples.of(ImageArray(np.random.default_rng(0).integers(0, 255, (10, 8, 8), np.uint8)), [0] * 10)
    model = Embedder(EmbedderSpec(width=2, depth=2, dim=3), (1, 8, 8)).train()
    z = embed(model, samples, batch=4)
    assert model.training and z.dtype == np.float32
    np.testing.assert_allclose(z, embed(model, samples, batch=10), atol=1e-6)
    np.testing.assert_allclose(z[[7, 2]], embed(model, samples.take(np.array([7, 2]))), atol=1e-6)
    assert embed(model, samples, features=True).shape == (10, 4)
    assert embed(model, samples.take(np.array([], int))).shape == (0, 3)


def test_rows_are_embedded_too():
    samples = Samples.of(FeatureArray(np.ones((3, 4), np.float32)), [0, 1, 2])
    assert embed(Embedder(EmbedderSpec(backbone="mlp", width=1, dim=2), (4,)), samples).shape == (3, 2)
