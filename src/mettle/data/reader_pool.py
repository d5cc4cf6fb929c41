"""Reading files from elsewhere in processes that can be killed, each file within a limit of time and one of memory.

A picture of 248 kB can ask its decoder for gigabytes, and one of several hundred passes for minutes. No check of a
header foresees all of that, and a thread cannot be stopped. So the service, and the commands that look at data of
others, decode in a few processes that are started once and used again: while a pool is active, pictures, Parquet files
and graphs of ONNX are read there. Training reads in place, as does Python code that activates no pool.

    with ReaderPool() as pool, pool.active():
        samples = read("photographs")

What does not fit in its limits is a `ReaderLimitExceeded`, one line like any other about a file that cannot be read.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mettle
from mettle.data import reader_worker
from mettle.data.reader_worker import LENGTH
from mettle.errors import DataError, InputError, MettleError, MissingExtra

START_SECONDS = 60.0  # in which a process must be ready, however busy the machine
MOST_PROCESSES = 16
BUFFER = 1 << 20  # bytes of a socket's buffers: a picture passes in few steps
_KINDS = "biufU"  # of the arrays that an answer may hold
_ERRORS = {kind.__name__: kind for kind in (DataError, InputError, MissingExtra)}


class ReaderLimitExceeded(DataError):
    """Reading a file takes more time or memory than it may."""


class ReaderUnavailable(MettleError):
    """No process to read with: it could not be started, or the pool was closed."""


@dataclass(frozen=True)
class ReaderLimits:
    """What reading one file may take; a large file is given more, in proportion to its size."""

    seconds: float = 5.0
    megabytes: int = 1024
    bytes_per_second: float = 10e6  # of a large file, beyond `seconds`
    bytes_per_byte: float = 10.0  # of memory, for each of the file, beyond `megabytes`
    pixels: int | None = None  # that the header of a picture may announce; None: as whoever decodes it says

    def __post_init__(self):
        whole = isinstance(self.megabytes, int) and not isinstance(self.megabytes, bool)
        if not (self.seconds > 0 and whole and self.megabytes >= 1):
            raise InputError(
                f"limits of a reader are seconds above 0 and at least 1 megabyte: got {self.seconds!r} and "
                f"{self.megabytes!r}"
            )

    def for_file(self, size: int) -> tuple[float, int]:
        """Seconds and bytes of memory for a file of so many bytes."""
        return self.seconds + size / self.bytes_per_second, int((self.megabytes << 20) + size * self.bytes_per_byte)


class ReaderPool:
    """Up to ``processes`` processes that read; they are started when they are needed, or all by `start`.

    It may be used from many threads at once. A call waits for a free process, and then for its answer, at most as long
    as the limits say; a process that exceeds them is killed, and the next call starts another one.

    Args:
        processes: as many as there are cores by default.
        limits: of each file.
        only_costly: pictures that are cheap whatever they hold, by what their headers say, are decoded in place. That
            is faster where there are many small ones.
    """

    def __init__(self, processes: int | None = None, limits: ReaderLimits | None = None, *, only_costly: bool = False):
        self.processes = processes or min(MOST_PROCESSES, os.cpu_count() or 1)
        self.limits, self.only_costly = limits or ReaderLimits(), only_costly
        self._free = threading.BoundedSemaphore(self.processes)
        self._lock = threading.Lock()
        self._idle: list[_ReaderProcess] = []
        self._all: set[_ReaderProcess] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start all processes now, so that no call waits for one."""
        missing = max(0, self.processes - len(self._all))
        started = [self._create_process() for _ in range(missing)]
        for process in started:
            process.wait_until_ready()
        with self._lock:
            self._idle += started

    @property
    def is_ready(self) -> bool:
        """Whether processes can be had: the pool is open, and those that wait for work are alive."""
        with self._lock:
            return not self._is_closed and all(process.is_alive for process in self._idle)

    def call(self, function: Callable, *arguments: Any, size: int = 0, modules: Sequence[str] = ()) -> Any:
        """What a function of a module says, called in one of the processes.

        Args:
            function: one that can be pickled; it gives arrays, texts and numbers, and lists and tables of these.
            arguments: what it is called with.
            size: bytes of the file that it reads.
            modules: to import first: what a library takes for itself does not count.

        Raises:
            ReaderLimitExceeded: it took too long, or too much memory, or it crashed.
            ReaderUnavailable: there is no process to call it in.
        """
        seconds, memory = self.limits.for_file(size)
        request = pickle.dumps((seconds, memory, tuple(modules), function, arguments), pickle.HIGHEST_PROTOCOL)
        with self._free:
            process = self._take_process()
            try:
                answer = process.call(request, seconds, memory)
            except BaseException:
                self._drop(process)
                raise
            if answer.get("kind") == "memory":
                self._drop(process)
                raise ReaderLimitExceeded(f"reading it takes more than {memory >> 20} MB of memory")
            with self._lock:
                if not self._is_closed:
                    self._idle.append(process)
        if "error" in answer:
            raise _ERRORS.get(str(answer.get("kind")), DataError)(str(answer["error"]))
        return answer["value"]

    @contextmanager
    def active(self) -> "Iterator[ReaderPool]":
        """Read in this pool for a while, in this thread and in those that it starts to read with."""
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    def close(self) -> None:
        """Kill all processes, also those that are reading; may be called twice."""
        with self._lock:
            self._is_closed, all_processes = True, list(self._all)
            self._idle.clear()
            self._all.clear()
        for process in all_processes:
            process.kill()

    def __enter__(self) -> "ReaderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_process(self) -> "_ReaderProcess":
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = self._create_process()
                process.wait_until_ready()
                return process
            if process.is_alive:
                return process
            self._drop(process)  # killed from outside, as by a system that is out of memory

    def _create_process(self) -> "_ReaderProcess":
        with self._lock:
            if self._is_closed:
                raise ReaderUnavailable("the processes that read files are closed")
            process = _ReaderProcess()
            self._all.add(process)
        return process

    def _drop(self, process: "_ReaderProcess") -> None:
        with self._lock:
            self._all.discard(process)
        process.kill()


_ACTIVE: ContextVar[ReaderPool | None] = ContextVar("active_reader_pool", default=None)


def active_pool() -> ReaderPool | None:
    """The pool that files are to be read in now; None: here."""
    return _ACTIVE.get()


def activate_in_thread(pool: ReaderPool | None) -> None:
    """Let a new thread read where the one that started it does."""
    _ACTIVE.set(pool)


def call_reader(function: Callable, *arguments: Any, size: int = 0, modules: Sequence[str] = ()) -> Any:
    """What a function that reads a file says: called in the active pool, or here where there is none."""
    pool = active_pool()
    return function(*arguments) if pool is None else pool.call(function, *arguments, size=size, modules=modules)


class _ReaderProcess:
    """One process and the socket to it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, BUFFER)
        root = str(Path(mettle.__file__).parent.parent)
        words = [sys.executable, "-P", str(reader_worker.__file__), str(theirs.fileno()), root]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the terminal is for the parent, which ends them
            )
        except OSError as error:
            self._socket.close()
            raise ReaderUnavailable(f"no process to read files with can be started: {error.strerror}") from None
        finally:
            theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        self._deadline = time.monotonic() + START_SECONDS
        try:
            self._receive(bytearray(LENGTH.size))
        except (OSError, EOFError):
            self.kill()
            raise ReaderUnavailable("a process to read files with did not start") from None

    def call(self, request: bytes, seconds: float, memory: int) -> dict[str, Any]:
        """The answer to a request, with its arrays in their places."""
        self._deadline = time.monotonic() + seconds
        try:
            self._send(LENGTH.pack(len(request)))
            self._send(request)
            length = LENGTH.unpack(self._receive(bytearray(LENGTH.size)))[0]
            if length > memory:
                raise ReaderLimitExceeded(f"reading it takes more than {memory >> 20} MB of memory")
            return self._read_answer(json.loads(self._receive(bytearray(length))), memory)
        except TimeoutError:
            raise ReaderLimitExceeded(f"reading it takes more than {_round(seconds)} s") from None
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            if self._process.returncode == -signal.SIGALRM:
                raise ReaderLimitExceeded(f"reading it takes more than {_round(seconds)} s") from None
            what = f"crashes its decoder, or takes more than {memory >> 20} MB of memory"
            raise ReaderLimitExceeded(f"reading it {what}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):  # it is not ours any more
            raise ReaderLimitExceeded("reading it confuses its decoder") from None

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _read_answer(self, answer: dict[str, Any], memory: int) -> dict[str, Any]:
        arrays = []
        for dtype, shape in answer["arrays"]:
            kind = np.dtype(str(dtype))
            count = kind.itemsize
            for side in shape:
                if not isinstance(side, int) or side < 0:
                    raise ValueError
                count *= side
            if kind.kind not in _KINDS or count > memory:
                raise ValueError
            array = np.empty(tuple(shape), kind)
            if array.size:
                self._receive(array.reshape(-1).view(np.uint8))
            arrays.append(array)
        if "value" in answer:
            answer["value"] = _put_arrays_in(answer["value"], arrays)
        return answer

    def _send(self, content: bytes) -> None:
        self._socket.settimeout(self._time_left())
        self._socket.sendall(content)

    def _receive(self, into: Any) -> Any:
        view = memoryview(into)
        while len(view):
            self._socket.settimeout(self._time_left())
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return into

    def _time_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _round(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1f}"


def _put_arrays_in(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, dict):
        if "array" in value:
            return arrays[value["array"]]
        return {key: _put_arrays_in(item, arrays) for key, item in value["table"]}
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return [_put_arrays_in(item, arrays) for item in value]
    return value
