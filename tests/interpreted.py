"""What tests of the kernels need: triton's interpreter, asked for before anything imports triton, and no GPU."""

import importlib.util
import os
import sys

import pytest
import torch


def ask_for_interpreter() -> str | None:
    """Let kernels that are imported from now on be interpreted; or why they cannot be."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: the fused kernels cannot run"
    if torch.cuda.is_available():
        return "a GPU is here: tests/gpu runs the same kernels on it"
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            return "triton was imported before its interpreter was asked for"
        os.environ["TRITON_INTERPRET"] = "1"
    return None


problem = ask_for_interpreter()
interpreted = pytest.mark.skipif(problem is not None, reason=str(problem))
"""Of a test that needs it."""
