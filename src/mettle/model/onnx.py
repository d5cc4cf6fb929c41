"""Export to ONNX, checked against torch before anyone relies on it."""

import contextlib
import io
import logging
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from mettle.atomic_files import write_bytes
from mettle.errors import MissingExtra, NumericError
from mettle.model.embedder import Embedder
from mettle.model.inference import check_output_path

TOLERANCE = 1e-4


def export_onnx(model: Embedder, path: Path) -> float:
    """Write ``path`` (input ``input``, output ``embedding``, any batch size) and return the largest error.

    Raises:
        InputError: there is no folder for the file.
        NumericError: the model gives NaN or infinity, or the exported one disagrees with torch; nothing is written
            then.
    """
    check_output_path(path)
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - the exporter needs it and says so less clearly
    except ImportError:
        raise MissingExtra(
            "export to ONNX needs onnx, onnxruntime and onnxscript: pip install onnx onnxruntime onnxscript"
        ) from None
    model = model.cpu().eval()
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(4, *model.shape, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        _run_exporter(model, example, file)
        content = file.read_bytes()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    difference = 0.0
    for count in (1, 4, 7):  # the batch size is free: one that was not seen at export must work too
        x = torch.rand(count, *model.shape, generator=generator)
        with torch.inference_mode():
            wanted = model(x).numpy()
        if not np.isfinite(wanted).all():
            raise NumericError(
                "the model gives NaN or infinity for ordinary inputs: not written; its weights are broken, train again"
            )
        (got,) = session.run(["embedding"], {"input": x.numpy()})
        difference = float(np.maximum(difference, np.abs(np.asarray(got) - wanted).max()))  # NaN stays NaN
    if not difference <= TOLERANCE:
        raise NumericError(
            f"the ONNX model differs from torch by {difference:.1e}, more than {TOLERANCE:.0e}: not written"
        )
    write_bytes(path, content)
    return difference


def _run_exporter(model: Embedder, example: torch.Tensor, file: Path) -> None:
    """Run torch's exporter, without its chatter."""
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (example,),
                file,
                input_names=["input"],
                output_names=["embedding"],
                dynamic_shapes=({0: batch},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
