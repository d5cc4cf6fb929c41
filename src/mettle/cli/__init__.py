"""The command line: typed functions that parse, make one call and print.

Heavy imports happen inside the commands, so that ``mettle --help`` answers at once.
"""

# Help lists the commands in the order of these imports.
# isort: skip_file

import os
import sys
from typing import Annotated, Any

import typer

from mettle import __version__
from mettle.cli import start, run, tune, data, mine, gallery, service, doctor, ranks, reproduce, notes
from mettle.cli.options import app
from mettle.errors import MettleError, nearest

UsageError: Any = typer.BadParameter.__base__  # of the click inside typer, or of click itself: versions differ
# Each module registers its commands.
__all__ = [
    "app",
    "data",
    "doctor",
    "gallery",
    "main",
    "mine",
    "notes",
    "ranks",
    "reproduce",
    "run",
    "service",
    "start",
    "tune",
]


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


def _check_working_folder() -> None:
    """Told here, because numerical libraries end the process without a word when the folder they start in is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MettleError("this folder is gone: change to one that exists") from None


def main() -> None:
    """Run the command line; an error that a user can cause is one line and exit status 2."""
    try:
        _check_working_folder()
        status = app(standalone_mode=False, prog_name="mettle")  # else a usage error is four lines
    except UsageError as error:
        sys.exit(_explain_usage(error))
    except MettleError as error:
        _print_line(error)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        print(f"mettle: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    if status == 130:
        print("mettle: interrupted", file=sys.stderr)
    sys.exit(status if isinstance(status, int) else 0)


def _explain_usage(error: Any) -> int:
    """Print what is wrong with a command line in one line; where no command was given, print the help."""
    if error.ctx is not None and error.message == error.ctx.get_help():
        error.show()
    else:
        more = "" if error.ctx is None else f" (see {error.ctx.command_path} --help)"
        text = error.format_message()
        if getattr(error, "option_name", None) and getattr(error, "possibilities", None) is not None:
            text = f"no option {error.option_name}{_suggest_option(error)}"
        _print_line(f"{text}{more}")
    return error.exit_code


def _suggest_option(error: Any) -> str:
    """What to write instead of an option that there is not: a recipe key of that name, or the nearest option."""
    from mettle.train.recipe import BatchConfig, DataConfig, TrainConfig

    known = [name for one in error.ctx.command.params for name in one.opts if name.startswith("-")]
    key = error.option_name.lstrip("-").replace("-", "_")
    tables = {"train": TrainConfig, "batch": BatchConfig, "data": DataConfig}
    found = [name for name, table in tables.items() if key in table.model_fields]
    if "--set" in known and found:
        return f": it is a recipe key, write --set {found[0]}.{key}=..."
    return nearest(error.option_name, known)


def _print_line(problem: object) -> None:
    print(f"mettle: {' '.join(str(problem).split())}", file=sys.stderr)
