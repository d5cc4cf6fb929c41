"""The command that builds the chapters of the notes again."""

from pathlib import Path
from typing import Annotated

import typer

from mettle.cli.options import app, cache_folder, check_output_folder, command_line
from mettle.errors import InputError


@app.command()
def notes(
    chapters: Annotated[list[int] | None, typer.Argument(help="Which of the chapters 1 to 5; default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Train for a few steps only.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the pages and runs.")] = Path("notes"),
) -> None:
    """Rebuild the five notes: train a chapter's runs, draw its figures, and write a page with its verdicts."""
    from mettle.notes import TITLES, build_chapter
    from mettle.notes.chapter import BuildSettings

    check_output_folder(output)
    settings = BuildSettings(output, quick, cache_folder(), lambda line: print(line, flush=True))
    wanted = list(dict.fromkeys(chapters or TITLES))
    for number in wanted:
        if number not in TITLES:
            raise InputError(f"there is no chapter {number}: they are {min(TITLES)} to {max(TITLES)}")
    for number in wanted:
        build_chapter(number, settings, command_line())
