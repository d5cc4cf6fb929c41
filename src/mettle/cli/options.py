"""The application that commands register with, the options that they share, and how they print."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.errors import InputError

app = typer.Typer(
    help="Difficulty-aware metric learning: train embeddings, judge them honestly, see what is still hard.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: table.key=value. Repeatable.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder, as `mettle train` writes it.")]
Label = Annotated[str | None, typer.Option(help="Column of labels of other data; default: as in the recipe.")]
Domain = Annotated[str | None, typer.Option(help="Column of domains of other data; default: as in the recipe.")]
Image = Annotated[
    str | None, typer.Option(help="Column of picture files of other data, in a table; default: as in the recipe.")
]
ReadSeconds = Annotated[float, typer.Option(help="Seconds that reading one picture or table may take.")]
ReadMegabytes = Annotated[int, typer.Option(help="Megabytes of memory that reading one picture or table may take.")]
AllowImport = Annotated[
    list[str] | None,
    typer.Option("--allow-import", help="A package of yours that a recipe may import from. Repeatable."),
]


def allow_packages(names: list[str] | None) -> tuple[str, ...]:
    """The packages that may be imported; they are looked for in this folder too, as `python -m` does."""
    if names and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return tuple(names or ())


def add_command_group(name: str, help: str) -> typer.Typer:
    """A command with commands of its own."""
    made = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(made, name=name)
    return made


def load_samples(
    run: Any,
    data: str | None,
    *,
    label: str | None = None,
    domain: str | None = None,
    image: str | None = None,
    **reading: Any,
) -> Any:
    """The run's own data, or other data that its options name."""
    from mettle.train import load_run_samples

    columns = {"label": label, "domain": domain, "image": image}
    return load_run_samples(run, data, cache_folder(), columns=columns, **reading)


@contextmanager
def read_within_limits(seconds: float, megabytes: int) -> Iterator[None]:
    """Read files in processes that can be killed: data that one wants to look at first may come from anywhere."""
    from mettle.data.reader_pool import ReaderLimits, ReaderPool

    with ReaderPool(limits=ReaderLimits(seconds, megabytes), only_costly=True) as pool, pool.active():
        yield


def check_output_folder(path: Path | None) -> Path | None:
    """A file to write, if there is a folder for it: told before the work, not after."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another place")
    return path


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def cache_folder() -> Path:
    """Where embedded data are kept between runs."""
    return Path(
        os.environ.get("METTLE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mettle"
    ).expanduser()


def command_line() -> list[str]:
    """The command line as it was given."""
    return ["mettle", *sys.argv[1:]]


def print_scenario(name: str, v: dict[str, Any], r: dict[str, Any] | None) -> None:
    """The numbers of one way of pairing, in one line."""
    from mettle.evaluate.bootstrap import TOO_FEW
    from mettle.report.format import GAP, NONE
    from mettle.report.metric_tables import is_shown, metric_cells

    cells = [cell for cell in metric_cells({"verification": v, "retrieval": r}) if is_shown(cell, "terminal")]
    told = [f"{c['name']} {c['text']}" for c in cells if ("far" not in c and c["value"] is not None) or c is cells[0]]
    told[0] = told[0].replace(NONE, "not measurable")
    if cells[0]["interval"]:
        told[0] += f" ({TOO_FEW})" if cells[0]["interval"] == TOO_FEW else f" [{cells[0]['interval']}]"
    told.insert(2, f"TAR {format_true_accepts(v['tar'])}")
    print(f"  {name:<13} {'  '.join(told).replace(GAP, '')}")


def format_true_accepts(points: list[dict[str, Any]]) -> str:
    """True accept rates; of those that rest on too few impostor pairs only which they are, and why."""
    told = [p for p in points if p["tar"] is not None and p["status"] != "refused as headline"]
    held = [f"{p['far']:g}" for p in points if p not in told]
    text = ", ".join(f"{p['tar']:.1%} at FAR {p['far']:g}" for p in told)
    if not held:
        return text
    why = f"not told at FAR {', '.join(held)} ({points[0]['impostors']:,} impostor pairs are too few)"
    return f"{text}, {why}" if text else why


def format_rate(value: float | None) -> str:
    """A rate in per cent."""
    return "not measurable" if value is None else f"{value:.2%}"
