"""The application that commands register with, and what they share or show."""

import os
import sys
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
RunFolder = Annotated[Path, typer.Argument(help="A run folder, as `mettle train` writes it.")]
Label = Annotated[str | None, typer.Option(help="Column of labels of other data; default: as in the recipe.")]
Domain = Annotated[str | None, typer.Option(help="Column of domains of other data; default: as in the recipe.")]
Image = Annotated[
    str | None, typer.Option(help="Column of picture files of other data, in a table; default: as in the recipe.")
]


def group(name: str, help: str) -> typer.Typer:
    """A command with commands of its own."""
    made = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(made, name=name)
    return made


def samples_of(
    run: Any,
    data: str | None,
    *,
    label: str | None = None,
    domain: str | None = None,
    image: str | None = None,
    **reading: Any,
) -> Any:
    """The run's own data, split as for training; or other data in the shape that its model takes, with their own split.

    Other data that have no split stay without one: nothing of them needs holding out. ``label``, ``domain`` and
    ``image`` name columns of other data, where they are not called as in the recipe.
    """
    from mettle.data.decode import HEIC_SUFFIXES, SUFFIXES
    from mettle.train import prepare
    from mettle.train.datamodule import recognised
    from mettle.train.run_folder import embedded

    named = {k: v for k, v in {"label": label, "domain": domain, "image": image}.items() if v is not None}
    flags = " and ".join(f"--{key}" for key in named)
    pictures = data is not None and (
        Path(data).expanduser().is_dir() or Path(data).suffix.lower() in SUFFIXES + HEIC_SUFFIXES
    )
    if named and data is None:
        raise InputError(f"{flags} only with --data: the run's own data are read as its recipe says")
    if named and (pictures or embedded(str(data))):
        raise InputError(f"{flags} only with a table or an .npz file: {data} has no columns to name, give it without")
    if data is None or recognised(run, data, cache()):
        if named:
            whose = f"{data} are those that {run.folder} was trained on, read as its recipe says"
            raise InputError(f"{flags} only with other data: {whose}; give them without")
        return prepare(run.located(data), cache())
    asked = run.contract()["input"]
    shape = asked["shape"]
    other: dict[str, Any] = {"source": data, "unseen": [], "pairs": None, "triplets": None}
    if len(shape) == 3:
        other |= {"size": shape[1:], "channels": shape[0]}
    elif image:
        raise InputError(f"--image only with a model of pictures: that of {run.folder} takes numbers, give none")
    if pictures or Path(data).suffix.lower() == ".npz":  # keys of a table say nothing about them
        other |= dict.fromkeys(("features", "categories", "missing", "text", "image"))
    if pictures:  # nor have these columns to name
        other |= dict.fromkeys(("label", "domain", "groups"))
    if asked.get("columns"):
        reading["like"] = asked["columns"]
    if not reading.get("labelled", True) and (columns := _columns(data)) is not None:
        if label is not None:
            columns.known(label)
        # What is only told about samples, not shown to the model, may be missing where they are just embedded.
        kept = run.recipe.data
        other["groups"] = [name for name in kept.groups or () if name in columns.columns] or None
        if kept.domain and kept.domain not in columns.columns:
            other["domain"] = None
    recipe = run.recipe.model_copy(update={"data": run.recipe.data.model_copy(update=other | named)})
    return prepare(recipe, cache(), divide=False, **reading)


def _columns(data: str) -> Any:
    """The columns of the table that the data are, if they are one."""
    from mettle.data.table import SUFFIXES, read_header

    path = Path(data).expanduser()
    return read_header(path) if path.is_file() and path.name.lower().endswith(SUFFIXES) else None


def in_folder(path: Path | None) -> Path | None:
    """A file to write, if there is a folder for it: told before the work, not after."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another place")
    return path


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


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
    from mettle.evaluate.intervals import TOO_FEW

    band = v["eer"]["interval"]
    why = "" if v["eer"]["value"] is None else f" ({TOO_FEW})"
    extent = f" [{band['low']:.2%}, {band['high']:.2%}]" if band else why
    near = r["metrics"] if r else {}
    shown = f"  Recall@1 {near['recall@1']['value']:.1%}" if "recall@1" in near else ""
    shown += f"  MAP@R {near['map_at_r']['value']:.1%}" if "map_at_r" in near else ""
    eer, auc = share(v["eer"]["value"]), v["auc"]["value"]
    print(f"  {name:<13} EER {eer}{extent}  AUC {auc:.4f}  TAR {accepted(v['tar'])}{shown}")


def accepted(points: list[dict[str, Any]]) -> str:
    """True accept rates; of those that rest on too few impostor pairs only which they are, and why."""
    told = [p for p in points if p["tar"] is not None and p["status"] != "refused as headline"]
    held = [f"{p['far']:g}" for p in points if p not in told]
    text = ", ".join(f"{p['tar']:.1%} at FAR {p['far']:g}" for p in told)
    if not held:
        return text
    why = f"not told at FAR {', '.join(held)} ({points[0]['impostors']:,} impostor pairs are too few)"
    return f"{text}, {why}" if text else why


def share(value: float | None) -> str:
    """A rate in per cent."""
    return "not measurable" if value is None else f"{value:.2%}"


WAITED = 0.1  # share of the time that batches may be waited for before it is worth a word


def progress(steps: int, every: int, has_difficulty: bool = True) -> Any:
    """A bar on a terminal, a plain line now and then elsewhere; what a difficulty did is told where there is one."""
    from contextlib import contextmanager

    def text(line: dict[str, Any]) -> str:
        return "  ".join([f"loss {line['loss']:.3f}", *(describe_difficulty(line) if has_difficulty else ())])

    @contextmanager
    def bar():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns) as shown:
            task = shown.add_task("", total=steps)
            last: dict[str, Any] = {}

            def update(step: int, line: dict[str, Any]) -> None:
                last.update(line)
                shown.update(task, completed=step, description=text(last))

            yield update

    @contextmanager
    def lines():
        def update(step: int, line: dict[str, Any]) -> None:
            if "seconds_per_step" in line and (step % (5 * every) == 0 or step == steps):
                left = (steps - step) * line["seconds_per_step"]
                waited = 1 - line["share_in_model_and_loss"]
                slow = f"  waited for data {waited:.0%}" if waited > WAITED else ""
                print(f"step {step}/{steps}  {text(line)}  {left:.0f} s left{slow}", flush=True)

        yield update

    return bar() if sys.stdout.isatty() else lines()


def describe_difficulty(line: dict[str, Any]) -> list[str]:
    """What a difficulty did to the pairs of a log line, in words: whom it weighed up or left out, and by how much."""
    found = []
    for side in ("positive", "negative"):
        if f"hard_{side}s" not in line:
            continue
        hard, kept, weight = line[f"hard_{side}s"], line[f"kept_{side}s"], line[f"{side}_weight"]
        if hard:
            found.append(f"hard {side}s {_whole_percent(hard)} (mean weight of all {side}s {weight:.2f})")
        elif kept < 1:  # mining: weights are 0 or 1
            found.append(f"{side}s kept {_whole_percent(kept)}")
        elif weight < 1:
            found.append(f"{side}s weighted down (mean weight {weight:.2f})")
        else:
            found.append(f"no hard {side}s")
    return [", ".join(found)] if found else []


def _whole_percent(value: float) -> str:
    """A share in whole per cent, unless that would hide that there is one."""
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"
