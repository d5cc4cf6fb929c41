"""The command line: typed functions that parse, make one call and print.

Heavy imports happen inside the commands, so that ``mettle --help`` answers at once.
"""

# Help lists the commands in the order of these imports.
# isort: skip_file

import os
import sys
from typing import Annotated

import typer

from mettle import __version__
from mettle.cli import runs, files, galleries, upkeep, serving, doctor, ranks, reproduce
from mettle.cli.shell import app
from mettle.errors import MettleError

# Each module registers its commands.
__all__ = ["app", "doctor", "files", "galleries", "main", "ranks", "reproduce", "runs", "serving", "upkeep"]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mettle {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before any command."""


def _standing() -> None:
    """Told here, because numerical libraries end the process without a word when the folder they start in is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MettleError("this folder is gone: change to one that exists") from None


def main() -> None:
    """Run the command line; an error that a user can cause is one line and exit status 2."""
    try:
        _standing()
        app()
    except MettleError as error:
        print(f"mettle: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        print(f"mettle: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("mettle: interrupted", file=sys.stderr)
        sys.exit(130)
