"""Which layers of a pretrained network train on a machine without a GPU."""

import pytest

from mettle.model import Embedder, EmbedderSpec
from mettle.start.choose import find_last_stage
from mettle.train.fine_tuning import freeze_layers


@pytest.mark.parametrize(
    ("backbone", "before", "frozen"),
    [
        ("torchvision/mobilenet_v2", 14, "features.13"),
        ("torchvision/resnet18", 7, "layer3"),
        ("torchvision/squeezenet1_1", 5, "features.7"),
        ("timm/test_resnet", 4, "layer3"),
        ("timm/test_vit", 4, "blocks.2"),
        ("convnet", 3, "8"),
    ],
)
def test_the_last_stage_is_what_follows_the_last_smaller_map(backbone, before, frozen):
    model = Embedder(EmbedderSpec(backbone, width=4), (3, 64, 64))
    assert find_last_stage(model) == (before, frozen)
    freeze_layers(model, frozen, None)
    trained = [p.requires_grad for p in model.backbone.parameters()]
    # All that is frozen comes before all that trains, and there is some of both.
    assert trained == sorted(trained) and len(set(trained)) == 2


def test_a_backbone_of_one_stage_trains_as_a_whole():
    assert find_last_stage(Embedder(EmbedderSpec("convnet", width=4, depth=1), (3, 16, 16))) is None
