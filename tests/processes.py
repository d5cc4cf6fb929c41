"""Processes forked from one that has loaded what commands need: starting Python and torch for each takes seconds.

What a fresh interpreter does (its imports, its exit status) is tested with real ones, in
`tests.cli.test_main` and `test_imports`.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
LOADED = ["mettle.cli", "mettle.train.from_recipe", "mettle.evaluate.run", "mettle.evaluate.run.pair_tables"]
LOADED += ["mettle.report.run_page", "mettle.report.audit_page", "mettle.service", "mettle.gallery", "uvicorn"]
LOADED += ["torch._dynamo", "torch.distributed", "torch.utils.tensorboard"]  # what a first training step loads


@dataclass(frozen=True)
class Finished:
    returncode: int
    stdout: str
    stderr: str


class Forked:
    """A function in a process of its own: the part of `subprocess.Popen` that tests use."""

    def __init__(self, function: Callable[..., Any], *args: Any, cwd: Any = None, session: bool = False):
        (out, to_out), (err, to_err) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        place = os.fspath(cwd or os.getcwd()), dict(os.environ), session
        self.process = CONTEXT.Process(target=_begin, args=(function, args, place, to_out, to_err))
        CONTEXT.set_forkserver_preload(LOADED)  # heard where this process has started no other yet
        self.process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno()), encoding="utf-8") for end in (out, err))
        for end in (out, to_out, err, to_err):
            end.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"a process has not ended after {timeout} seconds"
        return self.process.exitcode

    def send_signal(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it said, all of it; less than a pipe holds, so that one is read after the other."""
        said = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return said


def start_mettle(*words: Any, before: Callable[[], Any] | None = None, **options: Any) -> Forked:
    """A command that runs; ``before`` is called in its process first."""
    return Forked(_run_command, tuple(map(str, words)), before, **options)


def run_mettle(*words: Any, **options: Any) -> Finished:
    """A command that has ended."""
    started = start_mettle(*words, **options)
    out, err = started.communicate(timeout=400)
    return Finished(started.wait(), out, err)


def run_code(code: str, *words: Any) -> None:
    """A script with its arguments."""
    sys.argv = ["script", *map(str, words)]
    exec(compile(code, "script", "exec"), {"__name__": "__main__"})


def _begin(function: Callable[..., Any], args: tuple, place: tuple[str, dict, bool], out: Any, err: Any) -> None:
    cwd, environ, session = place
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    for number, name, end in ((1, "stdout", out), (2, "stderr", err)):
        os.dup2(end.fileno(), number)
        end.close()
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    function(*args)


def _run_command(words: tuple[str, ...], before: Callable[[], Any] | None) -> None:
    from mettle.cli import main

    if before is not None:
        before()
    sys.argv = ["mettle", *words]
    main()
