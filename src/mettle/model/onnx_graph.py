"""Opening an ONNX graph that may come from anywhere: it is arithmetic, but arithmetic can ask for any amount of memory.

Where a `ReaderPool` is active, one of its processes opens the graph first and runs it on zeros, within limits: a graph
that unfolds a few bytes into gigabytes ends that process and not this one. This file imports no torch, so that such a
process is small.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mettle.data.reader_pool import active_pool
from mettle.errors import DataError, InputError, MissingExtra

MAX_THREADS = 16
DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64"}


def open_checked_session(content: bytes, threads: int) -> Any:
    """`open_session`, once the graph has been opened and run within the limits of the active pool, if there is one."""
    pool = active_pool()
    if pool is not None:
        try:
            pool.call(try_graph, content, size=len(content), modules=("onnxruntime",))
        except DataError as problem:
            raise InputError(f"this graph cannot be used: {problem}") from None
    return open_session(content, threads)


def try_graph(content: bytes) -> None:
    """Open a graph and run it once, where its inputs have a shape.

    Raises:
        InputError: this is no graph, or it fails.
    """
    session = open_session(content, 1)
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type not in DTYPES:
        return  # whoever uses it says why not
    sides = list(inputs[0].shape or ())[1:]
    if all(isinstance(side, int) and side > 0 for side in sides):
        zeros = np.zeros((1, *sides), DTYPES[inputs[0].type])
        try:
            session.run(None, {inputs[0].name: zeros})
        except MemoryError:
            raise
        except Exception as problem:  # onnxruntime's errors have no base of their own
            raise InputError(f"the graph fails on inputs of shape {zeros.shape}: {first_line(problem)}") from None


def open_session(content: bytes, threads: int) -> Any:
    """A session of onnxruntime on the CPU; refuses what is no graph or reaches out of its file."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtra("running an ONNX graph needs onnxruntime: pip install onnxruntime") from None
    if has_external_data(content):
        raise InputError("the graph keeps tensors in other files: save it as one file (external_data=False)")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = min(threads, MAX_THREADS)
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4  # what is wrong is said once, by the error
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads leave their cores to others
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except MemoryError:
        raise
    except Exception as problem:  # onnxruntime's errors have no base of their own
        raise InputError(f"this is no ONNX graph that onnxruntime can run: {first_line(problem)}") from None


def first_line(problem: Exception) -> str:
    """What onnxruntime says, without the rest of its lines."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]


# Which fields of which message of ONNX hold messages that can hold tensors (onnx.proto3), by their numbers.
_MESSAGES = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL = (13, 14)  # of a tensor: where its data are (external_data), and that they are elsewhere (data_location)


def has_external_data(content: bytes) -> bool:
    """Whether any tensor of an ONNX file is kept in another one, or in memory.

    It is looked for in the encoded messages themselves, before anything reads the file, so that onnx need not be
    installed and onnxruntime never opens what a graph from elsewhere names.

    Raises:
        InputError: this is no ONNX file.
    """
    todo = [("model", 0, len(content))]
    while todo:
        kind, start, end = todo.pop()
        for number, value in _read_fields(content, start, end):
            if kind == "tensor" and number in _EXTERNAL and value != 0:
                return True
            inner = _MESSAGES[kind].get(number)
            if inner is not None and isinstance(value, range):
                todo.append((inner, value.start, value.stop))
    return False


def _read_fields(content: bytes, start: int, end: int) -> Iterator[tuple[int, int | range | None]]:
    """The fields of one protobuf message: their numbers, with the value of an integer or the place of a longer one."""
    at = start
    damaged = InputError("this is no ONNX file, or a damaged one")

    def varint() -> int:
        nonlocal at
        found = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise damaged
            byte = content[at]
            at += 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise damaged

    while at < end:
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
            yield number, None
        elif wire == 2:
            length = varint()
            at += length
            if at <= end:
                yield number, range(at - length, at)
        else:  # groups, which ONNX does not have
            raise damaged
        if at > end:
            raise damaged
