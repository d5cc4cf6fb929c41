"""Models as ONNX graphs: export, checked against torch before anyone relies on it, and an embedder that runs a graph.

A graph is arithmetic and no code: it is run by onnxruntime on the CPU, reads no file beside it and needs neither the
module that it came from nor the package that the module was written in.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mettle.atomic_files import write_bytes
from mettle.data.transforms import to_input_tensor
from mettle.errors import InputError, MissingExtra, NumericError
from mettle.model.embedder import EmbeddingModel, eval_mode, find_device
from mettle.model.inference import check_output_path
from mettle.model.module_embedder import check_embeddings
from mettle.model.onnx_graph import DTYPES, MAX_THREADS, first_line, open_checked_session

TOLERANCE = 1e-4  # of the largest number of an embedding, or of 1 where that is larger
MAX_BYTES = (1 << 31) - 1  # of a graph with its weights inside: protobuf has no larger messages


class OnnxExport(NamedTuple):
    """A model as the content of an ONNX file, and how far it is from torch."""

    content: bytes
    difference: float  # the largest, of any number of an embedding


def export_onnx(
    model: EmbeddingModel,
    path: Path,
    *,
    example: Tensor | np.ndarray | None = None,
    metadata: Mapping[str, str] | None = None,
) -> float:
    """Write ``path`` and return the largest difference from torch; see `encode_onnx`.

    Raises:
        InputError: there is no folder for the file, or torch cannot export the model.
        NumericError: the model gives NaN or infinity, or the exported one disagrees with torch; nothing is written
            then.
    """
    check_output_path(path)
    found = encode_onnx(model, example=example, metadata=metadata)
    write_bytes(path, found.content)
    return found.difference


def encode_onnx(
    model: EmbeddingModel,
    *,
    example: Tensor | np.ndarray | None = None,
    metadata: Mapping[str, str] | None = None,
) -> OnnxExport:
    """Export a model to ONNX: input ``input``, output ``embedding``, any batch size.

    Args:
        model: any `EmbeddingModel`; it is left on its device and in its mode.
        example: a batch of inputs, at least one; needed for models of token ids. Without it the inputs are random
            numbers in [0, 1].
        metadata: texts that are kept in the file, such as the JSON of a `mettle.model.Preprocess`.

    Raises:
        InputError: the example does not fit, or torch cannot export the model.
        NumericError: the model gives NaN or infinity, or the exported one disagrees with torch.
        MissingExtra: onnx, onnxruntime or onnxscript is not installed.
    """
    try:
        import onnxruntime  # noqa: F401 - runs the exported graph
        import onnxscript  # noqa: F401 - the exporter needs it and says so less clearly
    except ImportError:
        raise MissingExtra(
            "export to ONNX needs onnx, onnxruntime and onnxscript: pip install onnx onnxruntime onnxscript"
        ) from None
    inputs = _example_inputs(model, example)
    device = find_device(model)
    with eval_mode(model):
        try:
            model.to("cpu")
            content = _run_exporter(model, inputs[:4], dict(metadata or {}))
            return OnnxExport(content, _measure_difference(model, OnnxEmbedder(content), inputs))
        finally:
            model.to(device)


def _example_inputs(model: EmbeddingModel, example: Tensor | np.ndarray | None) -> Tensor:
    """At least seven inputs: those of the example, repeated, or random ones."""
    if example is None:
        if getattr(model, "dtype", "float32") != "float32":
            raise InputError("the model takes whole numbers, such as token ids: give example=, a batch of inputs")
        return torch.rand(12, *model.shape, generator=torch.Generator().manual_seed(0))
    x = to_input_tensor(example, "cpu")
    if tuple(x.shape[1:]) != model.shape or len(x) == 0:
        raise InputError(f"example must be a batch of inputs of shape {model.shape}, got shape {tuple(x.shape)}")
    return x if len(x) >= 7 else x.repeat(-(-7 // len(x)), *[1] * (x.ndim - 1))


@torch.inference_mode()
def _measure_difference(model: EmbeddingModel, exported: "OnnxEmbedder", inputs: Tensor) -> float:
    """The largest difference of the two models, which must be small."""
    difference, size = 0.0, 1.0
    for count in (1, 4, 7):  # the batch size is free: one that was not seen at export must work too
        x = inputs[-count:]
        wanted = check_embeddings(model(x), count).float().numpy()
        if not np.isfinite(wanted).all():
            raise NumericError(
                "the model gives NaN or infinity for ordinary inputs: not written; its weights are broken, train again"
            )
        size = max(size, float(np.abs(wanted).max()))
        difference = float(np.maximum(difference, np.abs(exported(x).numpy() - wanted).max()))  # NaN stays NaN
    if not difference <= TOLERANCE * size:
        raise NumericError(
            f"the ONNX model differs from torch by {difference:.1e}, more than {TOLERANCE * size:.0e}: not written"
        )
    return difference


def _run_exporter(model: EmbeddingModel, example: Tensor, metadata: Mapping[str, str]) -> bytes:
    """Run torch's exporter, without its chatter."""
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            tempfile.TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,  # type: ignore[arg-type]
                (example,),
                input_names=["input"],
                output_names=["embedding"],
                dynamic_shapes=({0: batch},),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            graph = program.model.graph
            inner = (value for part in graph for value in part.outputs if not value.is_graph_output())
            for at, value in enumerate(inner):  # an nn.Embedding is called "embedding" as well, which is one too many
                value.name = f"value_{at}"
            program.model.metadata_props.update(metadata)
            file = Path(folder) / "model.onnx"
            program.save(file, external_data=False)
            return file.read_bytes()
    except Exception as problem:  # the exporter has a dozen kinds, each with a page of advice
        said = (str(problem.__cause__ or problem).strip() or type(problem).__name__).splitlines()[0][:200]
        raise InputError(f"torch cannot export this model to ONNX: {said}") from problem
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


class OnnxEmbedder(nn.Module):
    """An ONNX graph with one input and one output (n, dim), run by onnxruntime on the CPU.

    It has no parameters and gives no gradients. The same inputs in the same batch give the same embeddings. It can be
    copied and pickled: the session is made again from the content.

    Args:
        graph: the file, or its content.
        threads: that one batch is computed by; torch's number without it, at most 16.

    Raises:
        InputError: this is no such graph, it keeps tensors in other files, or it is too large.
        MissingExtra: onnxruntime is not installed.
    """

    def __init__(self, graph: bytes | str | Path, *, threads: int | None = None):
        super().__init__()
        if threads is not None and (isinstance(threads, bool) or not 1 <= threads <= MAX_THREADS):
            raise InputError(f"threads must be between 1 and {MAX_THREADS}, got {threads!r}")
        self.content, self.threads = _read_graph(graph), threads
        self._open()

    def _open(self) -> None:
        """Make the session, and learn from it what comes in and what goes out."""
        self._session = open_checked_session(self.content, self.threads or torch.get_num_threads())
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise InputError(
                f"the graph must have one input and one output, got {len(inputs)} and {len(outputs)}: export a module "
                "that takes one tensor and gives the embeddings alone"
            )
        (given,), (found,) = inputs, outputs
        if given.type not in DTYPES or found.type != "tensor(float)":
            wanted = "float32 or int64 inputs and float32 embeddings"
            raise InputError(f"the graph must have {wanted}, got {given.type} and {found.type}")
        sides: list[Any] = list(given.shape or ())  # a free one is a name, or None
        self.shape: tuple[int, ...] = tuple(side for side in sides[1:] if isinstance(side, int) and side > 0)
        if len(sides) < 2 or isinstance(sides[0], int) or len(self.shape) != len(sides) - 1:
            raise InputError(f"the input of the graph must have a free batch size and a fixed shape, got {sides}")
        self.dtype: str = DTYPES[given.type]
        self._input = given.name
        declared = found.shape or []
        if len(declared) != 2:
            raise InputError(f"the output of the graph must be embeddings (n, dim), got shape {declared}")
        dim = declared[1]
        self._dim = dim if isinstance(dim, int) else self._run(np.zeros((1, *self.shape), self.dtype)).shape[1]
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)

    @property
    def dim(self) -> int:
        """How many numbers an embedding has."""
        return self._dim

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim) float32 embeddings, on the device of the inputs."""
        if tuple(x.shape[1:]) != self.shape:
            raise InputError(f"this model takes inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        if x.is_floating_point() != (self.dtype == "float32"):
            raise InputError(f"this model takes inputs of type {self.dtype}, got {str(x.dtype).removeprefix('torch.')}")
        if len(x) == 0:
            return torch.empty((0, self.dim), device=x.device)
        found = self._run(x.detach().cpu().to(getattr(torch, self.dtype)).contiguous().numpy())
        if found.shape != (len(x), self.dim):
            raise InputError(f"the graph must give ({len(x)}, {self.dim}) embeddings, got shape {found.shape}")
        return torch.from_numpy(found).to(x.device)

    def features(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings: nothing is known of a head."""
        return self(x)

    def _run(self, x: np.ndarray) -> np.ndarray:
        try:
            (found,) = self._session.run(None, {self._input: x})
        except Exception as problem:  # onnxruntime's errors have no base of their own
            raise InputError(f"the graph fails on inputs of shape {x.shape}: {first_line(problem)}") from None
        return np.asarray(found)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._open()


def _read_graph(graph: bytes | str | Path) -> bytes:
    if isinstance(graph, str | Path):
        path = Path(graph)
        try:
            if not path.is_file():
                raise InputError(f"{path} is not a file: an ONNX graph is wanted")
            if path.stat().st_size > MAX_BYTES:
                raise InputError(f"{path} has {path.stat().st_size} bytes, a graph at most {MAX_BYTES}")
            graph = path.read_bytes()
        except OSError as problem:
            raise InputError(f"cannot read {path}: {problem.strerror}") from None
    if not isinstance(graph, bytes):
        raise InputError(f"a graph is the path or the bytes of an ONNX file, got {type(graph).__name__}")
    if len(graph) > MAX_BYTES:
        raise InputError(f"the graph has {len(graph)} bytes, at most {MAX_BYTES} are read")
    return graph
