"""Options of a strong baseline that belong to the network: GeM pooling, a last stride of 1, flip averaging."""

import numpy as np
import pytest
import torch

from mettle.errors import RecipeError
from mettle.model import Embedder, EmbedderSpec, OnnxEmbedder, encode_onnx
from mettle.model.embedder import GeM


def spec(**options) -> EmbedderSpec:
    return EmbedderSpec(**({"width": 4, "depth": 2, "dim": 6} | options))


def images(n: int = 3, shape: tuple[int, ...] = (1, 12, 10)) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def gem(x: torch.Tensor, p: float) -> np.ndarray:
    """As loops over images, channels and positions."""
    found = np.zeros(x.shape[:2])
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            values = [float(v) for v in x[i, c].flatten()]
            found[i, c] = (sum(v**p for v in values) / len(values)) ** (1 / p)
    return found


@pytest.mark.parametrize("p", [1.0, 3.0, 6.5])
def test_gem_is_its_formula(p):
    x = images(2, (3, 4, 5)).double() + 0.1
    np.testing.assert_allclose(GeM(p)(x).detach().numpy(), gem(x, p), rtol=1e-5)


def test_gem_lies_between_the_mean_and_the_maximum():
    x = images(2, (3, 4, 5)) + 0.1
    torch.testing.assert_close(GeM(1.0)(x), x.mean((2, 3)))
    torch.testing.assert_close(GeM(80.0)(x), x.amax((2, 3)), rtol=0.06, atol=0.0)
    assert (x.mean((2, 3)) < GeM()(x)).all() and (GeM()(x) < x.amax((2, 3))).all()


def test_the_power_of_gem_is_learned():
    model = Embedder(spec(pool="gem"), (1, 12, 10))
    assert float(model.pool.p.detach()) == 3.0
    model(images())[:, 0].sum().backward()
    assert float(model.pool.p.grad) != 0.0


@pytest.mark.parametrize(
    ("name", "shape", "sides"),
    [
        ("resnet18", (3, 64, 32), (16, 8)),
        ("resnet50", (1, 32, 32), (8, 8)),
        ("timm/resnet10t", (3, 128, 64), (8, 4)),
        ("timm/ecaresnet26t", (3, 96, 96), (6, 6)),  # shortcuts that average
    ],
)
def test_a_last_stride_of_one_doubles_the_map_and_keeps_the_weights(name, shape, sides):
    made = {}
    for stride in (1, 2):
        torch.manual_seed(0)
        made[stride] = Embedder(spec(backbone=name, last_stride=stride), shape).eval()
    x = torch.zeros(1, *shape)
    with torch.no_grad():
        assert made[1].backbone(x).shape[2:] == sides
        assert made[2].backbone(x).shape[2:] == tuple(side // 2 for side in sides)
    one, two = made[1].state_dict(), made[2].state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("options", "shape", "said"),
    [
        ({"backbone": "mlp", "pool": "gem"}, (7,), "model.pool = 'gem' is of a feature map, 'mlp' gives none"),
        ({"backbone": "timm/vit_tiny_patch16_224", "pool": "gem"}, (3, 32, 32), "'gem' is of a feature map"),
        ({"backbone": "mlp", "flip": True}, (7,), "model.flip mirrors images, the data are rows"),
        ({"backbone": "convnet", "last_stride": 1}, (1, 12, 10), "is for ResNets, 'convnet' has no last stage"),
        ({"backbone": "timm/resnest14d", "last_stride": 1}, (3, 32, 32), "in a way that cannot be undone"),
        ({"last_stride": 3}, (1, 12, 10), "model.last_stride must be 1 or 2, got 3"),
        ({"flip": "yes"}, (1, 12, 10), "model.flip must be true or false, got 'yes'"),
    ],
)
def test_what_means_nothing_is_refused(options, shape, said):
    with pytest.raises(RecipeError, match=said):
        Embedder(spec(**options), shape)


@pytest.mark.parametrize("more", [{}, {"unit": False}, {"neck": "batchnorm", "embedding": "after"}])
def test_flip_averaging_is_the_normalized_mean_of_both_and_the_same_for_both(more):
    made = {}
    for flip in (False, True):
        torch.manual_seed(0)
        made[flip] = Embedder(spec(flip=flip, **more), (1, 12, 10)).eval()
    plain, both, x = made[False], made[True], images()
    with torch.no_grad():
        mean = (plain(x) + plain(x.flip(-1))) / 2
        wanted = mean / mean.norm(dim=1, keepdim=True) if both.spec.unit else mean
        torch.testing.assert_close(both(x), wanted)
        assert torch.equal(both(x), both(x.flip(-1)))
        assert not torch.allclose(both(x), plain(x), atol=1e-4)
        assert torch.equal(both.train()(x), plain.train()(x)), "training sees each image once"


def test_options_that_are_off_leave_no_trace_and_others_are_rebuilt():
    assert not {"flip", "last_stride"} & set(spec().to_table())
    strong = spec(backbone="resnet18", last_stride=1, flip=True, pool="gem")
    assert EmbedderSpec(**strong.to_table()) == strong


def test_the_exported_graph_averages_over_flips_too():
    pytest.importorskip("onnxscript")
    model, x = Embedder(spec(flip=True, pool="gem"), (1, 12, 10)).eval(), images()
    found = OnnxEmbedder(encode_onnx(model, example=x).content)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)
