"""`mettle doctor`: what this machine can do, and whether what is installed works.

Everything that is looked at becomes a `Finding`; the functions below give findings and never raise, the command prints.
"""

import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle import __version__
from mettle.cli.finding import Finding, line, tried
from mettle.cli.packages import PARTS, package
from mettle.cli.shell import app, cache

ALIKE = 1e-5  # relative difference of two engines in float32
FUSED_ALIKE = 1e-3  # the same where products are made of halves


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine can do and try it out. Exit status 1 when something that is installed is broken."""
    import json

    found: list[Finding] = []
    for one in examined(cache()):
        if not as_json:
            if not found or found[-1].section != one.section:
                print(one.section)
            print(one, flush=True)
        found.append(one)
    broken = [one.name for one in found if one.state == "broken"]
    if as_json:
        print(json.dumps({"works": not broken, "findings": [asdict(one) for one in found]}, indent=1))
    else:
        print(f"broken: {', '.join(broken)}" if broken else "everything that is installed works")
    raise typer.Exit(1 if broken else 0)


def examined(kept: Path) -> Iterator[Finding]:
    """Everything there is to say, in the order of reading; ``kept`` is where the cache is."""
    basis = tuple(machine())
    yield from basis
    yield place("cache", kept)
    yield place("this folder", Path())
    for part in PARTS:
        yield package(part)
    yield loss_check("SupCon, tiled engine", "tiled", "cpu", ALIKE)
    for one in basis:
        if one.facts.get("fused"):
            yield loss_check(f"SupCon, fused, {one.name}", "triton", one.facts["device"], FUSED_ALIKE)
    yield gallery_check()


def machine() -> Iterator[Finding]:
    """Versions, processors and GPUs."""
    facts = {"mettle": __version__, "python": platform.python_version(), "system": platform.platform()}
    said = f"{__version__}, Python {facts['python']} on {facts['system']}"
    yield Finding("machine", "mettle", "ok", said, facts | {"executable": sys.executable})
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch, error = tried(lambda: import_module("torch"))
    threads = None if error else torch.get_num_threads()
    said = f"{usable}{'' if error else f', of which torch uses {threads}'}"
    yield Finding("machine", "processors", "ok", said, {"processors": usable, "threads": threads})
    if error:
        yield Finding("machine", "GPU", "note", f"not known without torch ({line(error)})")
    else:
        yield from _gpus(torch)


def _gpus(torch: Any) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")  # an old driver is told by a warning
        there = torch.cuda.is_available()
    if not there:
        built = torch.version.cuda or torch.version.hip
        why = f"torch for {built} finds none" if built else "this torch is built without CUDA"
        why = line(heard[0].message) if heard else why
        yield Finding("machine", "GPU", "note", f"none: {why}; everything runs on the processors")
        return
    for index in range(torch.cuda.device_count()):
        facts, error = tried(lambda at=index: gpu_facts(at))
        if error:
            yield Finding("machine", f"GPU {index}", "broken", line(error))
            continue
        fused = "run" if facts["fused"] else f"do not run: {facts['why']}"
        said = f"{facts['name']}, {_gib(facts['memory'])}, {_gib(facts['free'])} free; fused kernels {fused}"
        yield Finding("machine", f"GPU {index}", "ok", said, facts)


def gpu_facts(index: int) -> dict[str, Any]:
    """A GPU: its name, its memory, and whether the fused kernels run on it."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    why = fused_obstacle(index)
    facts = {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index), "memory": total, "free": free}
    return facts | {"fused": not why, "why": why}


def fused_obstacle(device: int) -> str:
    """Why the fused kernels do not run on a GPU; empty where they do."""
    import torch

    from mettle.pairs.kernels import REQUIRED_SHARED_MEMORY, available

    if available(device):
        return ""
    if not available():
        return next(f"triton is not installed: {part.remedy}" for part in PARTS if part.name == "triton")
    if torch.version.hip is not None:
        return "they are written for NVIDIA GPUs"
    held = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    needed = f"{REQUIRED_SHARED_MEMORY >> 10} KiB of shared memory in a multiprocessor, as an H100 has"
    return f"they need {needed}: it has {held >> 10} KiB"


def place(name: str, path: Path) -> Finding:
    """Whether files can be made in a folder, or where it would be made, and how much room there is."""
    problem, free = "", None
    try:
        there = path = path.absolute()
        while not os.path.exists(there) and there != there.parent:
            there = there.parent
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
    except OSError as error:
        problem = error.strerror or line(error)
    room = "" if free is None else f", {_gib(free)} free"
    said = f"{path} {f'cannot be written ({problem})' if problem else 'can be written'}{room}"
    facts = {"path": str(path), "writable": not problem, "free": free}
    return Finding("machine", name, "note" if problem else "ok", said, facts)


def loss_check(name: str, engine: Any, device: str, tolerance: float) -> Finding:
    """Whether an engine gives the loss and the gradient that the dense one gives."""

    def compare() -> tuple[bool, str]:
        (value, slope), (wanted, steep) = _supcon(engine, device), _supcon("dense", "cpu")
        off = (float(abs(value / wanted - 1)), float((slope - steep).norm() / steep.norm()))
        right = all(one <= tolerance for one in off)  # NaN is not
        verdict = "agrees" if right else "does NOT agree"
        return right, f"{verdict} with the dense engine: loss off by {off[0]:.0e}, gradient by {off[1]:.0e}"

    return _checked(name, compare)


def _supcon(engine: Any, device: str) -> tuple[Any, Any]:
    """A small SupCon loss and its gradient, in float64 on the CPU."""
    import torch

    from mettle.losses import SupCon

    z = torch.randn(96, 32, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.arange(96, device=device) // 4
    loss = SupCon(temperature=0.1)(z, labels, engine=engine, tile=32 if engine == "tiled" else None)
    (slope,) = torch.autograd.grad(loss, z)
    return loss.detach().double().cpu(), slope.double().cpu()


def gallery_check() -> Finding:
    """Whether somebody who is enrolled is found again, and a stranger is not."""

    def enrol_and_identify() -> tuple[bool, str]:
        import numpy as np

        from mettle.gallery import Gallery

        people = np.eye(8, dtype=np.float32)
        with tempfile.TemporaryDirectory() as folder, Gallery.open(Path(folder) / "gallery", dim=8) as gallery:
            for k in range(4):
                gallery.enrol(f"person {k}", people[k])
            known, stranger = gallery.identify_many(people[[2, 6]] + 0.01, k=1, threshold=0.5)
        right = bool(known.match) and known.candidates[0].identity == "person 2" and not stranger.match
        return right, f"one of 4 people: {known.verdict}; a stranger: {stranger.verdict}"

    return _checked("gallery", enrol_and_identify)


def _checked(name: str, work: Callable[[], tuple[bool, str]]) -> Finding:
    found, error = tried(work)
    right, said = found or (False, line(error))
    return Finding("self-check", name, "ok" if right else "broken", said)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
