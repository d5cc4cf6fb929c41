"""The packages that mettle uses: whether each can be imported, what it is for, and what to type to get it."""

import contextlib
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mettle.cli.finding import Finding, Section, line, tried


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
    Part("tensorboard", "torch.utils.tensorboard", "training curves in TensorBoard", "logging"),
    Part("triton", "triton", "fused kernels on a GPU", "kernels"),
    Part("onnx", "onnx", "mettle export --onnx", "onnx"),
    Part("onnxruntime", "onnxruntime", "mettle export --onnx, its check", "onnx"),
    Part("onnxscript", "onnxscript", "mettle export --onnx", "onnx"),
    Part("fastapi", "fastapi", "mettle serve", "app"),
    Part("starlette", "starlette", "mettle serve", "app"),
    Part("uvicorn", "uvicorn", "mettle serve", "app"),
    Part("python-multipart", "python_multipart", "mettle serve, uploads", "app"),
    Part("psycopg", "psycopg", "galleries on PostgreSQL", "postgres", "'psycopg[binary]'"),
    Part("optuna", "optuna", "mettle tune", "tune"),
    Part("peft", "peft", "train.lora", "lora"),
)


def package(part: Part) -> Finding:
    """Whether a package can be imported, which version it is, and what to do where it cannot."""
    section: Section = "optional" if part.extra else "needed"
    version = None
    from importlib import metadata  # a tenth of what `mettle --help` takes

    with contextlib.suppress(metadata.PackageNotFoundError):  # installed under another name, or not at all
        version = metadata.version(part.name)
    facts = {"version": version, "extra": part.extra or None, "enables": part.enables}
    root = "tensorboard" if part.name == "tensorboard" else part.module.partition(".")[0]
    found, error = tried(lambda: _imported(part, root))
    if isinstance(error, ModuleNotFoundError) and error.name == root:
        said = f"{part.enables}; not installed: {part.remedy}"
        return Finding(section, part.name, "missing" if part.extra else "broken", said, facts)
    if error:
        said = f"{part.enables}; {line(error)}; try pip install --force-reinstall {part.name}"
        return Finding(section, part.name, "broken", said, facts)
    version = version or str(getattr(found, "__version__", "of unknown version"))
    return Finding(section, part.name, "ok", f"{version}: {part.enables}", facts | {"version": version})


def _imported(part: Part, root: str) -> Any:
    """The package, imported as mettle imports it."""
    if part.extra == "vision" and find_spec("torchvision") is not None:
        from mettle.model.backbones import import_torchvision

        import_torchvision()  # some builds need help, see there
    found = import_module(root)
    import_module(part.module)
    return found
