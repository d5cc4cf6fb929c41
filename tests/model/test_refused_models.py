"""Descriptions that describe no model are refused where they are written; a model that gives NaN is not exported."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mettle.errors import NumericError, RecipeError
from mettle.model import Embedder, EmbedderSpec
from mettle.model.onnx import export_onnx


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "liner"}, r"model.head = 'liner' is not known; did you mean 'linear'\?"),
        ({"head": None}, "model.head = None is not known; .*'none'"),
        ({"pool": "max"}, "model.pool = 'max' is not known; known are average, flatten, gem"),
        ({"pool": ["gem"]}, "model.pool = .* is not known"),
        ({"width": "x"}, "model.width must be a whole number, got 'x'"),
        ({"dim": 4.5}, "model.dim must be a whole number, got 4.5"),
        ({"dim": 4.0}, "model.dim must be a whole number, got 4.0"),
        ({"dim": math.nan}, "model.dim must be a whole number, got nan"),
        ({"dim": None}, "model.dim must be a whole number, got None"),
        ({"depth": True}, "model.depth must be a whole number, got True"),
        ({"depth": 0}, "model.depth must be between 1 and"),
        ({"backbone": 5}, "model.backbone must be a name.* got 5"),
        ({"unit": "no"}, "model.unit must be true or false, got 'no'"),
        ({"pretrained": 1}, "model.pretrained must be true or false, got 1"),
    ],
)
def test_a_description_that_describes_no_model_is_refused_in_one_line(options, message):
    with pytest.raises(RecipeError, match=message) as caught:
        EmbedderSpec(**options)
    assert "\n" not in str(caught.value)


def test_the_head_that_was_asked_for_is_there_where_features_and_dim_agree():
    def head(name):
        return Embedder(EmbedderSpec("mlp", width=1, depth=1, head=name, dim=8), (3,)).head

    assert isinstance(head("linear"), nn.Linear) and isinstance(head("none"), nn.Identity)


def test_whole_numbers_of_numpy_are_whole_numbers():
    spec = EmbedderSpec("mlp", width=np.int64(1), depth=1, dim=np.int32(5))
    assert Embedder(spec, (3,)).eval()(torch.rand(2, 3)).shape == (2, 5)


def network() -> Embedder:
    return Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4, unit=False), (3,))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_gives_no_numbers_is_not_exported(value, tmp_path):
    model = network()
    with torch.no_grad():
        model.head.weight.fill_(value)
    with pytest.raises(NumericError, match="NaN or infinity.*not written"):
        export_onnx(model, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_an_exported_model_that_gives_nan_where_torch_does_not_is_a_disagreement(tmp_path, monkeypatch):
    import mettle.model.onnx as module

    export = module._run_exporter

    def broken(model, example, metadata):
        with torch.no_grad():
            model.head.bias[1] = math.nan
            content = export(model, example, metadata)
            model.head.bias[1] = 0.0
        return content

    monkeypatch.setattr(module, "_run_exporter", broken)
    with pytest.raises(NumericError, match="differs from torch by nan"):
        export_onnx(network(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
