"""The command that searches for values of recipe keys."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import AllowImport, Set, allow_packages, app, cache_folder
from mettle.cli.run import RUNS, check_run_name
from mettle.errors import InputError


@app.command()
def tune(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A TOML file with ranges in [tune.ranges], or a shipped recipe; with --resume, its own."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the folder of the search; default: tune-<recipe>.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders go.")] = RUNS,
    label: Annotated[str | None, typer.Option(help="Column of labels; short for --set data.label=.")] = None,
    domain: Annotated[str | None, typer.Option(help="Column of domains; short for --set data.domain=.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of image files; short for --set data.image=.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials in all; short for --set tune.trials=.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no other trial after so long; continue later with --resume.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the named search if it is there.")] = False,
    allow_import: AllowImport = None,
    overrides: Set = None,
) -> None:
    """Search for the values of recipe keys that do best on validation identities; needs the extra `tune`."""
    from mettle.report.search_page import describe_trial
    from mettle.train import load
    from mettle.tuning import RECIPE
    from mettle.tuning import tune as search

    check_run_name(name)
    if recipe is None and not (resume and name):
        raise InputError("name the recipe to search, or the search to continue with --name and --resume")
    folder = runs / (name or f"tune-{Path(recipe or '').stem}")
    source: str | Path = folder / RECIPE if recipe is None else recipe
    if recipe is None and not source.exists():  # type: ignore[union-attr]
        raise InputError(f"there is no search {folder} to continue: name its place with --runs and --name, or a recipe")
    allowed = allow_packages(allow_import)
    columns = {"source": data, "label": label, "domain": domain, "image": image}
    given = {key: value for key, value in columns.items() if value is not None}
    say: Any = lambda note: print(note, flush=True)  # noqa: E731
    plan = load(source, overrides or [], on_note=say, **({"data": given} if given else {}))
    print(f"searching {', '.join(plan.tune.ranges) or 'nothing'} of {plan.title()}: {folder}", flush=True)
    limits: dict[str, Any] = {"trials": trials, "seconds": seconds}
    found = search(plan, folder, resume=resume, cache=cache_folder(), allow_import=allowed, on_note=say, **limits)
    imports = [word for package in allowed for word in ("--allow-import", package)]
    if found.best is not None:
        print(f"best: trial {found.best.number}, {describe_trial(found.best, plan.tune.metric)}")
        print(f"next: {shlex.join(['mettle', 'train', str(folder / 'best.toml'), *imports])}")
    for text in found.warnings:
        print(f"warning: {text}")
    print(f"search: {found.page}")
    if not found.finished:
        again = ["mettle", "tune", *([] if runs == RUNS else ["--runs", str(runs)]), "--name", folder.name, "--resume"]
        again += imports
        why = "stopped on request" if found.interrupted else "the time is up"
        print(f"{why} after {len(found.trials)} trials; continue with: {shlex.join(again)}")
        if found.interrupted:
            raise typer.Exit(1)
