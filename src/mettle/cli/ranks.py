"""`mettle check-ranks`: whether several processes train here as one would."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import AllowImport, allow_packages, app
from mettle.errors import InputError, MettleError

WIDE, DIM, CLASSES = 6, 5, 4
MOST = 16
SECONDS = 120  # for all ranks together; a few are enough
CLOSE = 1e-10  # float64, relative to the largest entry
CODE = (
    "import sys; sys.path.append(sys.argv[4]); from mettle.cli.ranks import work; work(*sys.argv[1:4], *sys.argv[5:])"
)


@app.command("check-ranks")
def check_ranks(
    ranks: Annotated[int, typer.Option(help="How many processes to start.")] = 2,
    loss: Annotated[
        str | None,
        typer.Option(help="A loss of yours instead: the import path of its class or factory, shop.losses:make."),
    ] = None,
    allow_import: AllowImport = None,
) -> None:
    """Compare losses and gradients of several local processes with those of one. Exit status 1 where they differ."""
    if not 2 <= ranks <= MOST:
        raise InputError(f"--ranks must be between 2 and {MOST}, got {ranks}")
    given = None if loss is None else GivenLoss(loss, allow_packages(allow_import))
    trials = build_trials(given)
    if given is not None:
        trials[given.path]()  # what is wrong with it is told before anything starts
    with (
        tempfile.TemporaryDirectory(prefix="mettle-ranks-") as folder,
        start_children(ranks, Path(folder), given) as children,
    ):
        wanted = compute_alone(ranks, given)  # while they start
        finish_children(children)
        found = [_read(Path(folder) / f"{rank}.safetensors") for rank in range(ranks)]
    sizes = " + ".join(str(part.stop - part.start) for part in split_on_ranks(ranks))
    print(f"{ranks} processes with {sizes} rows against one with all of them; largest difference of")
    print(f"  {'loss':<24}{'how':<12}{'value':>10}{'gradient':>10}{'parameters':>12}")
    bad = [name for name, make in trials.items() if not _line(name, make, wanted, found)]
    if bad:
        print(f"parity fails: {', '.join(bad)}")
        raise typer.Exit(1)
    print("parity holds")


@dataclass(frozen=True)
class GivenLoss:
    """A loss of the user by its import path, and the packages that may be imported."""

    path: str
    allowed: tuple[str, ...]

    def make(self) -> Any:
        """The loss, in float64 where it holds numbers."""
        import torch

        from mettle.train.factory import call_factory, import_object, is_import_path

        if not is_import_path(self.path):
            raise InputError(f"--loss takes an import path such as shop.losses:make, got {self.path!r}")
        factory = import_object(self.path, self.allowed, "--loss")
        made = call_factory(factory, {}, "--loss", {"num_classes": CLASSES, "dim": DIM})
        if not callable(made):
            raise InputError(f"--loss {self.path} makes nothing to call: {type(made).__name__}")
        return made.double() if isinstance(made, torch.nn.Module) else made


def _line(name: str, make: Callable[[], Any], wanted: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    """Print one loss, the worst of all ranks; whether it is the same as in one process."""
    from mettle.pairs import across_ranks

    worst = {}
    for what in ("value", "gradient", "parameters"):
        if (right := wanted.get(f"{name} {what}")) is not None:
            size = max(1.0, float(right.abs().max()))
            apart = [float((one[f"{name} {what}"] - right).abs().max()) / size for one in found]
            worst[what] = max(apart, key=lambda x: float("inf") if x != x else x)
    shown = [f"{worst[what]:.1e}" if what in worst else "" for what in ("value", "gradient", "parameters")]
    fine = all(x < CLOSE for x in worst.values())
    how = across_ranks(make()).how
    print(f"  {name:<24}{how:<12}{shown[0]:>10}{shown[1]:>10}{shown[2]:>12}{'' if fine else '  differs'}")
    return fine


def build_trials(given: GivenLoss | None = None) -> dict[str, Callable[[], Any]]:
    """That of the user; or a few of every kind: pairs, mining, weights, both ends of a pair, class vectors, state."""
    if given is not None:
        return {given.path: given.make}
    from mettle.difficulty import Importance
    from mettle.losses import AdaCos, ArcFace, Center, InfoNCE, LiftedStructure, SupCon, Triplet

    return {
        "SupCon": lambda: SupCon(0.1),
        "Triplet hardest": lambda: Triplet(0.3, "hardest"),
        "InfoNCE with Importance": lambda: InfoNCE(0.5, prior=0.1, difficulty=Importance(0.5)),
        "LiftedStructure": lambda: LiftedStructure(),
        "ArcFace": lambda: ArcFace(CLASSES, DIM).double(),
        "AdaCos": lambda: AdaCos(CLASSES, DIM).double(),
        "Center": lambda: Center(CLASSES, DIM).double(),
    }


def split_on_ranks(ranks: int) -> list[slice]:
    """Which rows of the batch each rank has: never equally many."""
    ends = [0]
    for rank in range(ranks):
        ends.append(ends[-1] + 5 + 4 * (rank % 3))
    return [slice(ends[rank], ends[rank + 1]) for rank in range(ranks)]


def compute_alone(ranks: int, given: GivenLoss | None = None) -> dict[str, Any]:
    """What one process gets with the whole batch."""
    whole = slice(0, split_on_ranks(ranks)[-1].stop)
    return _try_part(build_trials(given), whole, ranks, lambda loss: loss, lambda gradient: gradient)


def _try_part(
    trials: dict[str, Callable[[], Any]], part: slice, ranks: int, wrap: Callable, average: Callable
) -> dict[str, Any]:
    """Value and gradients of every loss on these rows, by a small encoder."""
    import torch

    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(WIDE, 8), torch.nn.Tanh(), torch.nn.Linear(8, DIM)).double()
    rows = split_on_ranks(ranks)[-1].stop
    x, y = torch.randn(rows, WIDE, dtype=torch.float64)[part], (torch.arange(rows) * 7 % CLASSES)[part]
    found = {}
    for k, (name, make) in enumerate(trials.items()):
        torch.manual_seed(k)
        loss = make()
        own = [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, torch.nn.Module) else []
        value = wrap(loss)(encoder(x), y)
        learned = [*encoder.parameters(), *own]
        gradients = torch.autograd.grad(value, learned, allow_unused=True)
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(learned, gradients, strict=True)
        ]
        found |= {f"{name} value": value.detach(), f"{name} gradient": average(torch.cat(flat[: -len(own) or None]))}
        if own:
            found[f"{name} parameters"] = torch.cat(flat[-len(own) :])
    return found


def work(rank: str, ranks: str, folder: str, loss: str = "", *allowed: str) -> None:
    """What one of the processes does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from datetime import timedelta

    import torch
    from safetensors.torch import save_file
    from torch import distributed as dist

    from mettle.pairs import across_ranks
    from mettle.pairs.distributed import start_process_group

    if not (dist.is_available() and dist.is_gloo_available()):
        sys.exit("this build of torch has no gloo processes (torch.distributed): install another build of torch")
    torch.set_num_threads(1)
    where, at, size = Path(folder), int(rank), int(ranks)
    meeting, patience = f"file://{where / 'meeting'}", timedelta(seconds=SECONDS)
    try:
        start_process_group("gloo", where=meeting, rank=at, size=size, rendezvous_timeout=patience, patience=patience)
    except MettleError as problem:
        sys.exit(str(problem))

    def average(gradient: Any) -> Any:  # as DistributedDataParallel does
        dist.all_reduce(gradient)
        return gradient / size

    given = GivenLoss(loss, allow_packages(list(allowed))) if loss else None
    found = _try_part(build_trials(given), split_on_ranks(size)[at], size, across_ranks, average)
    save_file({name: x.contiguous() for name, x in found.items()}, where / f"{at}.safetensors")
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """A parent that is gone, however it went, closes this process's input."""
    while os.read(0, 1):  # not by a reader that Python would wait for at its end
        pass
    os._exit(1)


@dataclass(frozen=True)
class Child:
    """A rank, and where it writes its complaints."""

    rank: int
    process: subprocess.Popen
    log: Path


@contextmanager
def start_children(ranks: int, folder: Path, given: GivenLoss | None = None) -> Iterator[list[Child]]:
    """The processes; none of them is left, however this ends."""
    import mettle

    root = str(Path(mettle.__file__).parents[1])
    children: list[Child] = []
    with _stop_on_signal():
        try:
            for rank in range(ranks):
                children.append(_start(rank, ranks, folder, root, given))
            yield children
        finally:
            for child in children:
                child.process.kill()
            for child in children:
                child.process.wait()
                if child.process.stdin is not None:
                    child.process.stdin.close()


def _start(rank: int, ranks: int, folder: Path, root: str, given: GivenLoss | None) -> Child:
    command = [sys.executable, "-P", "-c", CODE, str(rank), str(ranks), str(folder), root]
    command += [] if given is None else [given.path, *given.allowed]
    path = folder / f"{rank}.log"
    try:
        with open(path, "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    except OSError as error:
        raise MettleError(f"cannot start {ranks} local processes of {sys.executable}: {error.strerror}") from error
    return Child(rank, process, path)


@contextmanager
def _stop_on_signal() -> Iterator[None]:
    """Let SIGTERM end this like Ctrl-C does: by the way out that ends the children too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finish_children(children: list[Child]) -> None:
    """Wait for all of them; the first that fails ends it."""
    deadline = time.monotonic() + SECONDS
    while any(child.process.poll() is None for child in children):
        if time.monotonic() > deadline:
            raise MettleError(
                f"{len(children)} local processes did not meet within {SECONDS} seconds: is the machine busy?"
            )
        if any(child.process.poll() for child in children):
            break
        time.sleep(0.05)
    for child in children:
        if child.process.poll():
            said = child.log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "it did not say why")
            raise MettleError(
                f"process {child.rank} of {len(children)} ended with status {child.process.poll()}: {last}"
            )


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)
