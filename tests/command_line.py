"""The command line in this process: what a command prints, and how it ends."""

from typer.testing import CliRunner

from mettle.cli import app
from mettle.errors import MettleError


def mettle(*words, status: int = 0) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words])
    if isinstance(done.exception, MettleError):
        assert status == 2, done.exception
        return str(done.exception)
    assert done.exit_code == status, f"{done.output}{done.exception!r}"
    return done.output


def refused(*words) -> str:
    """The one line of a command that is refused."""
    said = mettle(*words, status=2)
    assert "\n" not in said, said
    return said
