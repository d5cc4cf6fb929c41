import builtins
import copy
import hashlib
import pickle

import numpy as np
import pytest
import torch

from mettle.errors import InputError, MissingExtra, NumericError
from mettle.model import (
    Embedder,
    EmbedderSpec,
    EmbeddingModel,
    ModuleEmbedder,
    OnnxEmbedder,
    encode_onnx,
    export_onnx,
)
from mettle.model.weights import hash_state_dict


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
    with pytest.raises(MissingExtra, match=r"pip install onnxruntime"):
        OnnxEmbedder(b"")


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 5)

    def forward(self, tokens):
        return self.table(tokens).mean(1)


@pytest.fixture(scope="module")
def tokens():
    """A wrapped module of token ids, in training mode, and its graph."""
    torch.manual_seed(0)
    example = torch.randint(0, 11, (3, 7))
    model = ModuleEmbedder.from_example(Bag().train(), example)
    return model, encode_onnx(model, example=example, metadata={"about": "a test"})


def test_a_graph_embeds_like_the_module_that_it_came_from(tokens, tmp_path):
    model, exported = tokens
    assert exported.difference < 1e-6 and model.training
    (tmp_path / "graph.onnx").write_bytes(exported.content)
    x = torch.randint(0, 11, (13, 7))
    for graph in (OnnxEmbedder(exported.content), OnnxEmbedder(tmp_path / "graph.onnx", threads=1)):
        for copied in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
            torch.testing.assert_close(copied(x), model(x).detach())
            assert torch.equal(copied.features(x), graph(x))
            assert (copied.shape, copied.dim, copied.dtype) == ((7,), 5, "int64")
            assert copied.metadata["about"] == "a test"
    assert graph(x[:0]).shape == (0, 5) and not list(graph.parameters()) and isinstance(graph, EmbeddingModel)
    assert hash_state_dict(graph) == hashlib.sha256(exported.content).hexdigest()


def test_inputs_that_a_graph_does_not_take_are_named(tokens):
    graph = OnnxEmbedder(tokens[1].content)
    for x, message in (
        (torch.zeros(2, 8, dtype=torch.int64), r"shape \(7,\), got \(8,\)"),
        (torch.zeros(2, 7), "type int64, got float32"),
        (torch.full((2, 7), 99), "the graph fails on inputs"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            graph(x)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="give example="):
        encode_onnx(tokens[0])
    with pytest.raises(InputError, match=r"inputs of shape \(7,\), got shape \(3, 8\)"):
        encode_onnx(tokens[0], example=torch.zeros(3, 8, dtype=torch.int64))


def graph_of(inputs, outputs, nodes=(), tensors=()):
    """The content of a small graph: names with shapes, and nodes between them."""
    from onnx import TensorProto, helper

    def values(named):
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in named.items()]

    graph = helper.make_graph(list(nodes), "g", values(inputs), values(outputs), list(tensors))
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def node(kind, given, found, **attributes):
    from onnx import helper

    return helper.make_node(kind, given, found, **attributes)


def test_graphs_that_are_no_embedders_are_refused():
    from onnx import TensorProto

    same = [node("Identity", ["x"], ["z"])]
    assert OnnxEmbedder(graph_of({"x": ["n", 3]}, {"z": ["n", 3]}, same).SerializeToString()).dim == 3
    assert OnnxEmbedder(graph_of({"x": ["n", 3]}, {"z": ["n", "d"]}, same).SerializeToString()).dim == 3
    two = [*same, node("Identity", ["x"], ["w"])]
    added = [node("Add", ["x", "y"], ["z"])]
    for model, message in (
        (graph_of({"x": ["n", 3]}, {"z": ["n", 3], "w": ["n", 3]}, two), "got 1 and 2"),
        (graph_of({"x": ["n", 3], "y": ["n", 3]}, {"z": ["n", 3]}, added), "got 2 and 1"),
        (graph_of({"x": ["n", 3, 2]}, {"z": ["n", 3, 2]}, same), r"embeddings \(n, dim\), got shape"),
        (graph_of({"x": [4, 3]}, {"z": [4, 3]}, same), "free batch size"),
        (graph_of({"x": ["n", "w"]}, {"z": ["n", "w"]}, same), "a fixed shape"),
        (graph_of({"x": ["n", 3]}, {"z": ["n", 3]}, [node("NoSuch", ["x"], ["z"])]), "onnxruntime can run"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            OnnxEmbedder(model.SerializeToString())
        assert "\n" not in str(caught.value)
    outside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="secret.bin")
    hidden = [node("Constant", [], ["w"], value=outside), node("Add", ["x", "w"], ["z"])]
    for model in (
        graph_of({"x": ["n", 3]}, {"z": ["n", 3]}, [node("Add", ["x", "w"], ["z"])], [outside]),
        graph_of({"x": ["n", 3]}, {"z": ["n", 3]}, hidden),
    ):
        with pytest.raises(InputError, match="tensors in other files"):
            OnnxEmbedder(model.SerializeToString())


@pytest.mark.parametrize("content", [b"", b"no graph", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x0f", b"ORTM" * 20])
def test_what_is_no_graph_is_one_line(content, tmp_path):
    (tmp_path / "g.onnx").write_bytes(content)
    for graph in (content, tmp_path / "g.onnx"):
        with pytest.raises(InputError, match="ONNX") as caught:
            OnnxEmbedder(graph)
        assert "\n" not in str(caught.value)


def test_a_graph_that_is_not_there_or_too_large_is_not_read(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="not a file"):
        OnnxEmbedder(tmp_path)
    (tmp_path / "g.onnx").write_bytes(b"12345")
    monkeypatch.setattr("mettle.model.onnx.MAX_BYTES", 4)
    for graph in (tmp_path / "g.onnx", b"12345"):
        with pytest.raises(InputError, match="5 bytes.* at most 4"):
            OnnxEmbedder(graph)
    with pytest.raises(InputError, match="threads must be"):
        OnnxEmbedder(b"", threads=99)


def test_a_graph_that_unfolds_to_gigabytes_is_refused_where_a_pool_reads():
    from onnx import TensorProto, helper

    from mettle.data.reader_pool import ReaderLimits, ReaderPool

    def graph(count: int) -> bytes:
        """x plus the sum of so many zeros."""
        shape = helper.make_tensor("shape", TensorProto.INT64, [2], [count // 4, 4])
        axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
        nodes = [
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros", "axis"], ["sum"], keepdims=1),
            helper.make_node("Add", ["x", "sum"], ["y"]),
        ]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy")
        made = helper.make_graph(nodes, "g", [x], [y], [shape, axis])
        opset = [helper.make_opsetid("", 17)]
        return helper.make_model(made, opset_imports=opset, ir_version=8).SerializeToString()

    with ReaderPool(1, ReaderLimits(seconds=60, megabytes=256)) as pool, pool.active():
        assert OnnxEmbedder(graph(400)).dim == 4
        with pytest.raises(InputError, match="fails on inputs|cannot be used"):
            OnnxEmbedder(graph(1_000_000_000))
