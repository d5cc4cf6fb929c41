import builtins

import numpy as np
import pytest
import torch

from mettle.errors import MissingExtra, NumericError
from mettle.model import Embedder, EmbedderSpec
from mettle.model.onnx import export_onnx


def model():
    torch.manual_seed(0)
    made = Embedder(EmbedderSpec(width=4, depth=2, dim=6), (1, 12, 12))
    made.fit_normalization(torch.rand(8, 1, 12, 12))
    return made.eval()


def test_the_exported_model_agrees_with_torch_at_any_batch_size(tmp_path):
    import onnxruntime

    made, file = model(), tmp_path / "m.onnx"
    assert export_onnx(made, file) < 1e-5
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    x = torch.rand(13, 1, 12, 12)
    (got,) = session.run(["embedding"], {"input": x.numpy()})
    np.testing.assert_allclose(got, made(x).detach().numpy(), atol=1e-5)


def test_a_disagreement_is_refused_and_nothing_written(tmp_path, monkeypatch):
    import mettle.model.onnx as module

    monkeypatch.setattr(module, "TOLERANCE", -1.0)
    with pytest.raises(NumericError, match="not written"):
        export_onnx(model(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_names_the_remedy(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("onnx"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install onnx"):
        export_onnx(model(), tmp_path / "m.onnx")
