"""Which parts of a backbone train and how fast: frozen layers stay as they are, rates fall towards the input."""

import numpy as np
import pytest
import torch
from torch import nn

from mettle.data.loader import Batch
from mettle.errors import InputError, RecipeError
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec, ModuleEmbedder
from mettle.model.backbones import import_timm
from mettle.train import Supervised, train
from mettle.train.fine_tuning import freeze_layers, layer_rates, list_layers
from mettle.train.recipe import parse_recipe

SHAPE = (3, 16, 16)


def embedder(**spec):
    torch.manual_seed(0)
    return Embedder(EmbedderSpec(**({"width": 4, "depth": 3, "dim": 8} | spec)), SHAPE)


def batch():
    x = torch.rand(8, *SHAPE, generator=torch.Generator().manual_seed(1))
    return Batch(x, torch.arange(8) // 2, torch.arange(8), 0, 0, 0.0)


def changed(method, steps=2, fractions=(0.0, 0.5)):
    before = {name: t.clone() for name, t in method.model.state_dict().items()}
    for fraction in fractions[:steps]:
        assert method.step(batch(), 1e-2, fraction).applied
    after = method.model.state_dict()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_a_frozen_backbone_keeps_its_weights_and_its_statistics():
    method = Supervised(embedder(), SupCon(), freeze="all")
    assert changed(method) == {"head.weight", "head.bias"}
    assert not any(part.training for part in method.model.backbone.modules()) and method.model.head.training
    moved = {p for group in method.optimizer.optimizers["model"].param_groups for p in group["params"]}
    assert moved == set(method.model.head.parameters()), "what never moves is in no group of the optimizer"
    line, groups = method.describe_training()
    count = sum(p.numel() for p in method.model.head.parameters())
    total = sum(p.numel() for p in method.model.parameters())
    assert f"{count:,} of {total:,} parameters train" in line and "the whole backbone is frozen" in line
    assert groups == f"AdamW moves these numbers, each at so many times the learning rate: network {count:,} at 1"


def test_frozen_up_to_a_layer_means_that_layer_too():
    model = embedder()
    names = [name for name, part in model.backbone.named_modules() if isinstance(part, nn.Conv2d)]
    method = Supervised(model, SupCon(), freeze=names[1])
    found = changed(method)
    assert not any(name.startswith((f"backbone.{names[0]}.", f"backbone.{names[1]}.")) for name in found)
    assert f"backbone.{names[2]}.weight" in found and "head.weight" in found
    after = str(int(names[1]) + 1)  # the norm behind it comes after it, and trains
    assert f"backbone.{after}.running_mean" in found


def test_what_is_frozen_at_first_trains_later():
    early = Supervised(embedder(), SupCon(), freeze="all", freeze_share=0.5)
    assert changed(early, fractions=(0.0, 0.25)) == {"head.weight", "head.bias"}
    assert "backbone.0.weight" in changed(early, fractions=(0.5, 0.75))
    assert all(part.training for part in early.model.modules())


def test_layers_inside_others_and_tensors_of_the_module_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(4))
            self.stem = nn.Linear(4, 4)
            self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.blocks(self.stem(x + self.token)))

    module = Net()
    model = ModuleEmbedder.from_example(module, torch.rand(4, 4))
    freeze_layers(model, "blocks.0", None)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"blocks.1.weight", "blocks.1.bias", "last.weight", "last.bias"}
    with pytest.raises(RecipeError, match="name the last layer that is frozen, such as 'stem' or 'blocks'"):
        freeze_layers(ModuleEmbedder.from_example(Net(), torch.rand(4, 4)), "all", None)
    assert [name for name, _ in list_layers(Net())] == ["stem", "blocks.0", "blocks.1", "last"]
    first = list_layers(Net())[0][1]
    assert [p.shape for p in first] == [(4,), (4, 4), (4,)], "the token goes with the first layer"


@pytest.mark.parametrize(
    ("freeze", "spec", "message"),
    [
        ("layer9", {}, "the backbone has no layer 'layer9'; known are"),
        ("all", {"head": "none", "dim": 16}, "leaves nothing to train"),
    ],
)
def test_what_cannot_be_frozen_is_one_line(freeze, spec, message):
    with pytest.raises(RecipeError, match=message):
        Supervised(embedder(**spec), SupCon(), freeze=freeze)


def test_keys_that_belong_together():
    for table, message in (
        ({"freeze_steps": 3}, "train.freeze_steps needs train.freeze"),
        ({"freeze": "all", "freeze_steps": 3, "freeze_epochs": 1}, "say the same thing"),
        ({"layer_decay": 0.0}, "train.layer_decay"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe({"train": table})
    with pytest.raises(InputError, match="layer_decay must be above 0"):
        Supervised(embedder(), SupCon(), layer_decay=1.5)


def test_rates_fall_from_layer_to_layer_towards_the_input():
    model = embedder()
    rates = layer_rates(model.backbone, 0.5)
    assert [scale for _, _, scale in rates] == [0.125, 0.25, 0.5]
    assert [len(own) for _, own, _ in rates] == [3, 3, 3], "a norm goes with its convolution"
    method = Supervised(model, SupCon(), layer_decay=0.5, backbone_rate=0.1)
    scale = {p: g["lr_scale"] for g in method.optimizer.optimizers["model"].param_groups for p in g["params"]}
    assert scale[model.head.weight] == 1.0 and scale[model.backbone[0].weight] == pytest.approx(0.0125)
    assert set(scale) == set(model.parameters())
    assert "backbone 0" in method.describe_training()[-1]


def test_layers_of_timm_are_those_that_timm_names():
    from timm.optim import param_groups_layer_decay

    net = import_timm().create_model("test_vit", num_classes=0)
    rates = {id(p): scale for _, own, scale in layer_rates(net, 0.7) for p in own}
    with_head = import_timm().create_model("test_vit", num_classes=10)
    scales = {}
    names = {id(p): name for name, p in with_head.named_parameters()}
    for group in param_groups_layer_decay(with_head, layer_decay=0.7):
        scales |= {names[id(p)]: group["lr_scale"] for p in group["params"]}
    for name, p in net.named_parameters():
        assert rates[id(p)] == pytest.approx(scales[name]), name
    assert scales["head.weight"] == 1.0


def test_epochs_of_freezing_follow_from_the_data(source, tmp_path):
    one = parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 3, "samples": 2, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "train": {"epochs": 4, "freeze": "all", "freeze_epochs": 1, "device": "cpu", "collapse_gap": 0.0},
        }
    )
    told = []
    found = train(one, tmp_path / "run", tensorboard=False, on_note=told.append)
    assert found.finished
    assert any("the whole backbone is frozen for the first 25 % of the steps" in note for note in told)
    assert np.isfinite(found.model.state_dict()["backbone.0.weight"].numpy()).all()
