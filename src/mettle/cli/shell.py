"""The application that commands register with, and what several of them use."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Difficulty-aware metric learning: train embeddings, judge them honestly, see what is still hard.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: table.key=value. Repeatable.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, as `mettle train` writes it.")]


def group(name: str, help: str) -> typer.Typer:
    """A command with commands of its own."""
    made = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(made, name=name)
    return made


def samples_of(run: Any, data: str | None) -> Any:
    """The run's own data, or other data brought to the shape that the run's model takes."""
    from mettle.train import prepare

    recipe = run.recipe
    if data is not None:
        shape = run.contract()["input"]["shape"]
        own = {"source": data, "unseen": [], "pairs": None, "triplets": None}
        if len(shape) == 3:
            own |= {"size": shape[1], "channels": shape[0]}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=own)})
    return prepare(recipe, cache())


def cache() -> Path:
    """Where embedded data are kept between runs."""
    return Path(
        os.environ.get("METTLE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mettle"
    ).expanduser()


def typed() -> list[str]:
    """The command line as it was given."""
    return ["mettle", *sys.argv[1:]]


def print_scenario(name: str, v: dict[str, Any], r: dict[str, Any] | None) -> None:
    """The numbers of one way of pairing, in one line."""
    band = v["eer"]["interval"]
    extent = f" [{band['low']:.2%}, {band['high']:.2%}]" if band else ""
    tars = ", ".join(f"{p['tar']:.1%} at FAR {p['far']:g}" for p in v["tar"] if p["tar"] is not None)
    near = r["metrics"] if r else {}
    shown = f"  Recall@1 {near['recall@1']['value']:.1%}" if "recall@1" in near else ""
    shown += f"  MAP@R {near['map_at_r']['value']:.1%}" if "map_at_r" in near else ""
    eer, auc = share(v["eer"]["value"]), v["auc"]["value"]
    print(f"  {name:<13} EER {eer}{extent}  AUC {auc:.4f}  TAR {tars or 'not measurable'}{shown}")


def share(value: float | None) -> str:
    """A rate in per cent."""
    return "not measurable" if value is None else f"{value:.2%}"
