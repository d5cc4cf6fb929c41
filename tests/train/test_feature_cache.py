"""Features of a frozen backbone: computed once, the same training, and only where nothing else would be."""

import pytest
import torch

from mettle.evaluate import ValidationScore
from mettle.train import from_recipe, train
from mettle.train.datamodule import prepare_samples
from mettle.train.feature_cache import compute_features
from mettle.train.from_recipe import build_method_and_loader
from mettle.train.recipe import parse_recipe


def recipe(source, *, model=None, batch=None, method="supervised", **settings):
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 2, "augment": "none"} | (batch or {}),
            "model": {"width": 4, "depth": 2, "dim": 8} | (model or {}),
            "train": {"steps": 6, "checkpoint_every": 2, "device": "cpu", "freeze": "all", "collapse_gap": 0.0}
            | {"method": method, **settings},
        }
    )


class Halt(Exception):
    pass


def halt_at(last):
    def progress(step, line):
        if step == last:
            raise Halt

    return progress


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_training_on_features_is_training_on_images(source, tmp_path, monkeypatch, ema):
    one, told = recipe(source, ema=ema, select="eer", validate_every=3), []
    options = {"tensorboard": False, "score": ValidationScore()}
    fast = train(one, tmp_path / "features", on_note=told.append, **options)
    assert any("computed once" in note for note in told) and not fast.model.takes_features
    with pytest.raises(Halt):
        train(one, tmp_path / "cut", on_step=halt_at(5), **options)
    again = train(one, tmp_path / "cut", resume=True, **options)
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "features/model.safetensors").read_bytes()
    assert again.resumed_from == 4
    monkeypatch.setattr(from_recipe, "compute_features", lambda *rest: None)
    slow = train(one, tmp_path / "images", **options)
    for name, tensor in slow.model.state_dict().items():
        torch.testing.assert_close(fast.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
    assert not torch.equal(
        slow.model.head.weight, train(recipe(source, steps=1), tmp_path / "a", tensorboard=False).model.head.weight
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"freeze": "3"},
        {"freeze_steps": 3},
        {"batch": {"augment": "mild"}},
        {"model": {"pool": "gem"}},
        {"batch": {"queue": 16, "queue_encoder": "momentum"}},
        {"ema": 0.5, "distill": 1.0},
        {"batch": {"views": 2, "size": 8}, "method": "two-encoder"},
    ],
)
def test_what_changes_in_training_is_not_kept(source, changes):
    one = recipe(source, **changes)
    samples = prepare_samples(one)
    assert compute_features(*build_method_and_loader(one, samples), 1.0) is None


def test_features_that_do_not_fit_are_not_kept(source):
    one = recipe(source, batch={"queue": 16})
    samples = prepare_samples(one)
    method, loader = build_method_and_loader(one, samples)
    rows = len(samples.part("train"))
    assert compute_features(method, loader, rows * 8 * 4 / 2**30 - 1e-9) is None
    found = compute_features(method, loader, rows * 8 * 4 / 2**30)
    assert found is not None and found.width == 8
    with found.use() as batches:
        (batch,) = batches.batches(0, 1)
        (image,) = loader.batches(0, 1)
        assert torch.equal(batch.ids, image.ids) and batch.inputs.shape == (8, 8)
        assert torch.allclose(method.model.eval()(batch.inputs), method.model(image.inputs), atol=1e-6)
