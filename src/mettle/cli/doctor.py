"""One thing that `mettle doctor` looked at, and how to look without falling over what is found."""

import contextlib
import io
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mettle import __version__
from mettle.cli.options import app, cache_folder

Section = Literal["machine", "needed", "optional", "self-check"]
State = Literal["ok", "note", "missing", "broken"]

LONGEST = 200  # characters of somebody else's error


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: its line, and the same as facts for programs.

    ``broken`` is there and does not work, ``missing`` is optional and not there, ``note`` is worth knowing.
    """

    section: Section
    name: str
    state: State
    said: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {self.state:<7}  {self.name:<24}  {self.said}"


def try_call(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What this gives, or the error; what packages print and warn of on the way is not part of the report."""
    unheard = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
        warnings.simplefilter("ignore")
        try:
            return work(), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a package may raise anything when it is imported, SystemExit too
            return None, error


def one_line(error: object) -> str:
    """An error of somebody else in one line."""
    text = " ".join(str(error).split())
    text = f"{text[:LONGEST]}…" if len(text) > LONGEST else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(frozen=True)
class Part:
    """A package that mettle uses: as pip calls it, what of it is imported, what for, and the extra that brings it."""

    name: str
    module: str
    enables: str
    extra: str = ""  # none: mettle needs it
    requirement: str = ""  # what pip is asked for, where that is more than the name

    @property
    def remedy(self) -> str:
        """What to type to get it."""
        return f"pip install {self.requirement or self.name}"


PARTS = (
    Part("torch", "torch", "networks and losses"),
    Part("numpy", "numpy", "arrays"),
    Part("safetensors", "safetensors.torch", "weights on disk"),
    Part("pillow", "PIL.Image", "pictures"),
    Part("matplotlib", "matplotlib.figure", "figures, the embedded glyphs"),
    Part("scikit-learn", "sklearn", "maps of embeddings, mettle.metric"),
    Part("scipy", "scipy.stats", "intervals and thresholds"),
    Part("jinja2", "jinja2", "reports"),
    Part("pydantic", "pydantic", "recipes"),
    Part("tomli-w", "tomli_w", "recipes on disk"),
    Part("typer", "typer", "the command line"),
    Part("rich", "rich", "the progress of training"),
    Part("faiss-cpu", "faiss", "galleries", "gallery"),
    Part("torchvision", "torchvision", "backbones of torchvision", "vision"),
    Part("timm", "timm", "backbones of timm", "vision"),
    Part("pillow-heif", "pillow_heif", "HEIC photographs", "heic"),
    Part("pyarrow", "pyarrow.parquet", "Parquet tables", "parquet"),
    Part("pymilvus", "pymilvus", "galleries that a Milvus server searches", "milvus"),
    Part("tensorboard", "torch.utils.tensorboard", "training curves in TensorBoard", "logging"),
    Part("triton", "triton", "fused kernels on a GPU", "kernels"),
    Part("onnx", "onnx", "mettle export --onnx", "onnx"),
    Part("onnxruntime", "onnxruntime", "mettle export --onnx, its check", "onnx"),
    Part("onnxscript", "onnxscript", "mettle export --onnx", "onnx"),
    Part("fastapi", "fastapi", "mettle serve", "app"),
    Part("starlette", "starlette", "mettle serve", "app"),
    Part("uvicorn", "uvicorn", "mettle serve", "app"),
    Part("python-multipart", "python_multipart", "mettle serve, uploads", "app"),
    Part("prometheus-client", "prometheus_client", "mettle serve, metrics", "app"),
    Part("psycopg", "psycopg", "galleries on PostgreSQL", "postgres", "'psycopg[binary]'"),
    Part("psycopg-pool", "psycopg_pool", "galleries on PostgreSQL", "postgres"),
    Part("pgvector", "pgvector", "galleries on PostgreSQL", "postgres"),
    Part("optuna", "optuna", "mettle tune", "tune"),
    Part("peft", "peft", "train.lora", "lora"),
)


def check_package(part: Part) -> Finding:
    """Whether a package can be imported, which version it is, and what to do where it cannot."""
    section: Section = "optional" if part.extra else "needed"
    version = None
    from importlib import metadata  # a tenth of what `mettle --help` takes

    with contextlib.suppress(metadata.PackageNotFoundError):  # installed under another name, or not at all
        version = metadata.version(part.name)
    facts = {"version": version, "extra": part.extra or None, "enables": part.enables}
    root = "tensorboard" if part.name == "tensorboard" else part.module.partition(".")[0]
    found, error = try_call(lambda: _import_part(part, root))
    if isinstance(error, ModuleNotFoundError) and error.name == root:
        said = f"{part.enables}; not installed: {part.remedy}"
        return Finding(section, part.name, "missing" if part.extra else "broken", said, facts)
    if error:
        said = f"{part.enables}; {one_line(error)}; try pip install --force-reinstall {part.name}"
        return Finding(section, part.name, "broken", said, facts)
    version = version or str(getattr(found, "__version__", "of unknown version"))
    return Finding(section, part.name, "ok", f"{version}: {part.enables}", facts | {"version": version})


def _import_part(part: Part, root: str) -> Any:
    """The package, imported as mettle imports it."""
    if part.extra == "vision" and find_spec("torchvision") is not None:
        from mettle.model.backbones import import_torchvision

        import_torchvision()  # some builds need help, see there
    found = import_module(root)
    import_module(part.module)
    return found


TOLERANCE = 1e-5  # relative difference of two engines in float32
FUSED_TOLERANCE = 1e-3  # the same where products are made of halves


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine can do and try it out. Exit status 1 when something that is installed is broken."""
    import json

    found: list[Finding] = []
    for one in examine_machine(cache_folder()):
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


def examine_machine(kept: Path) -> Iterator[Finding]:
    """Everything there is to say, in the order of reading; ``kept`` is where the cache is."""
    basis = tuple(describe_machine())
    yield from basis
    yield check_folder("cache", kept)
    yield check_folder("this folder", Path())
    for part in PARTS:
        yield check_package(part)
    yield check_loss("SupCon, tiled engine", "tiled", "cpu", TOLERANCE)
    for one in basis:
        if one.facts.get("fused"):
            yield check_loss(f"SupCon, fused, {one.name}", "triton", one.facts["device"], FUSED_TOLERANCE)
    yield check_gallery()


def describe_machine() -> Iterator[Finding]:
    """Versions, processors and GPUs."""
    facts = {"mettle": __version__, "python": platform.python_version(), "system": platform.platform()}
    said = f"{__version__}, Python {facts['python']} on {facts['system']}"
    yield Finding("machine", "mettle", "ok", said, facts | {"executable": sys.executable})
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch, error = try_call(lambda: import_module("torch"))
    threads = None if error else torch.get_num_threads()
    said = f"{usable}{'' if error else f', of which torch uses {threads}'}"
    yield Finding("machine", "processors", "ok", said, {"processors": usable, "threads": threads})
    if error:
        yield Finding("machine", "GPU", "note", f"not known without torch ({one_line(error)})")
    else:
        yield from _describe_gpus(torch)


def _describe_gpus(torch: Any) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")  # an old driver is told by a warning
        there = torch.cuda.is_available()
    if not there:
        built = torch.version.cuda or torch.version.hip
        why = f"torch for {built} finds none" if built else "this torch is built without CUDA"
        why = one_line(heard[0].message) if heard else why
        yield Finding("machine", "GPU", "note", f"none: {why}; everything runs on the processors")
        return
    for index in range(torch.cuda.device_count()):
        facts, error = try_call(lambda at=index: describe_gpu(at))
        if error:
            yield Finding("machine", f"GPU {index}", "broken", one_line(error))
            continue
        fused = "run" if facts["fused"] else f"do not run: {facts['why']}"
        said = (
            f"{facts['name']}, {_format_gib(facts['memory'])}, {_format_gib(facts['free'])} free; fused kernels {fused}"
        )
        yield Finding("machine", f"GPU {index}", "ok", said, facts)


def describe_gpu(index: int) -> dict[str, Any]:
    """A GPU: its name, its memory, and whether the fused kernels run on it."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    why = fused_kernel_obstacle(index)
    facts = {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index), "memory": total, "free": free}
    return facts | {"fused": not why, "why": why}


def fused_kernel_obstacle(device: int) -> str:
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


def check_folder(name: str, path: Path) -> Finding:
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
        problem = error.strerror or one_line(error)
    room = "" if free is None else f", {_format_gib(free)} free"
    said = f"{path} {f'cannot be written ({problem})' if problem else 'can be written'}{room}"
    facts = {"path": str(path), "writable": not problem, "free": free}
    return Finding("machine", name, "note" if problem else "ok", said, facts)


def check_loss(name: str, engine: Any, device: str, tolerance: float) -> Finding:
    """Whether an engine gives the loss and the gradient that the dense one gives."""

    def compare() -> tuple[bool, str]:
        (value, slope), (wanted, steep) = _supcon(engine, device), _supcon("dense", "cpu")
        off = (float(abs(value / wanted - 1)), float((slope - steep).norm() / steep.norm()))
        right = all(one <= tolerance for one in off)  # NaN is not
        verdict = "agrees" if right else "does NOT agree"
        return right, f"{verdict} with the dense engine: loss off by {off[0]:.0e}, gradient by {off[1]:.0e}"

    return _self_check(name, compare)


def _supcon(engine: Any, device: str) -> tuple[Any, Any]:
    """A small SupCon loss and its gradient, in float64 on the CPU."""
    import torch

    from mettle.losses import SupCon

    z = torch.randn(96, 32, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    labels = torch.arange(96, device=device) // 4
    loss = SupCon(temperature=0.1)(z, labels, engine=engine, tile=32 if engine == "tiled" else None)
    (slope,) = torch.autograd.grad(loss, z)
    return loss.detach().double().cpu(), slope.double().cpu()


def check_gallery() -> Finding:
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

    return _self_check("gallery", enrol_and_identify)


def _self_check(name: str, work: Callable[[], tuple[bool, str]]) -> Finding:
    found, error = try_call(work)
    right, said = found or (False, one_line(error))
    return Finding("self-check", name, "ok" if right else "broken", said)


def _format_gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"
