"""The process that reads one file after another for a `ReaderPool`; it is run as a script and imports no torch.

    python -P reader_worker.py SOCKET ROOT     # the number of an open socket, and the folder that holds mettle

A request is a pickle, since it comes from our own process. An answer is never one: it is made of JSON and of the bytes
of arrays, so that a process that a hostile file has taken over cannot make its parent run anything.

    request   8 bytes of length, then the pickle of (seconds, bytes of memory, modules to import, function, arguments)
    answer    8 bytes of length, then JSON {"value" or "error": ..., "arrays": [[dtype, shape], ...]}, then the arrays
"""

import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import types
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<Q")
SETTINGS = {  # of libraries: one thread each, and no allocator that asks for addresses in gigabytes
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
GRACE = 1.0  # seconds after its limit in which the parent may kill this process; then the system does


def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill a buffer; False where the other end has closed."""
    while len(into):
        count = connection.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def receive_message(connection: socket.socket) -> bytearray | None:
    """One message behind its length; None at the end."""
    length = bytearray(LENGTH.size)
    if not receive(connection, memoryview(length)):
        return None
    content = bytearray(LENGTH.unpack(length)[0])
    return content if receive(connection, memoryview(content)) else None


def take_arrays_out(value: Any, arrays: list[Any]) -> Any:
    """A value with a number in the place of each array, as JSON can hold it."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"table": [[key, take_arrays_out(item, arrays)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        plain = all(isinstance(item, str | int | float) for item in value)
        return list(value) if plain else [take_arrays_out(item, arrays) for item in value]
    return value


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    import numpy as np

    arrays: list[Any] = []
    if "value" in answer:
        answer["value"] = take_arrays_out(answer["value"], arrays)
    arrays = [np.ascontiguousarray(array) for array in arrays]
    answer["arrays"] = [[array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps(answer).encode()
    connection.sendall(LENGTH.pack(len(head)) + head)
    for array in arrays:
        if array.size:
            connection.sendall(memoryview(array.reshape(-1).view(np.uint8)))


def _limit_memory(more: int) -> None:
    """Let this process have so many bytes beyond those that it has now."""
    with suppress(ImportError, OSError, ValueError):  # a system that has no such limit
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = now + more
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _harden() -> None:
    """No file is written, not even a core dump, and an interrupt of the terminal is the parent's to obey."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError, OSError, ValueError):
        import resource

        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(limit, (0, 0))


def _answer(request: bytearray) -> dict[str, Any]:
    """What a request comes to; its limits hold from here on."""
    from mettle.errors import MettleError

    seconds, memory, modules, function, arguments = pickle.loads(request)
    for name in modules:  # what a library needs for itself does not count
        with suppress(ImportError):
            importlib.import_module(name)
    _limit_memory(memory)
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)  # not caught: it ends the process even within a library
    try:
        return {"value": function(*arguments)}
    except MemoryError:
        return {"error": "", "kind": "memory"}
    except MettleError as problem:
        return {"error": str(problem), "kind": type(problem).__name__}
    except RecursionError:
        return {"error": "it is nested too deeply", "kind": "DataError"}


def main() -> None:
    """Answer requests until the parent closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path.append(sys.argv[2])
    _harden()
    for name, value in SETTINGS.items():
        os.putenv(name, value)
    import mettle

    # Their __init__ imports torch, which takes a second and 200 MB, and nothing that decodes needs it.
    for name in ("mettle.data", "mettle.model"):
        stub = types.ModuleType(name)
        stub.__path__ = [os.path.join(os.path.dirname(str(mettle.__file__)), *name.split(".")[1:])]
        sys.modules[name] = stub
    importlib.import_module("mettle.data.image_decoding")
    connection.sendall(LENGTH.pack(0))  # ready
    while (request := receive_message(connection)) is not None:
        answer = _answer(request)
        del request
        _send(connection, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if answer.get("kind") == "memory":  # what is left of it is in pieces: a new process takes the place of this one
            return


if __name__ == "__main__":
    with suppress(ConnectionError):  # the parent is gone, or had enough
        main()
