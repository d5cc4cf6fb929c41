"""Records of both kinds: a file in a fresh folder, and a schema on a real PostgreSQL, one for each test process."""

import shutil
import tempfile
from pathlib import Path

import pytest
from storage_fixtures import FileShelf, Server, ServerShelf, memory


@pytest.fixture(scope="session")
def postgres():
    folder = Path(tempfile.mkdtemp(prefix="mettle-pg-", dir=memory()))
    server = Server(folder)
    yield server
    server.control("-m", "immediate", "stop")  # nothing of it is needed any more
    shutil.rmtree(folder)


@pytest.fixture
def folder():
    """An empty folder, in memory where there is room: most of these tests would only wait for the disk."""
    with tempfile.TemporaryDirectory(prefix="mettle-", dir=memory()) as place:
        yield Path(place)


@pytest.fixture(params=["sqlite", "postgresql"])
def shelf(request, folder):
    """A place for a storage of either kind."""
    if request.param == "sqlite":
        return FileShelf(folder / "people.mettle")
    return ServerShelf(request.getfixturevalue("postgres"))


@pytest.fixture
def storage(shelf):
    """A new storage of either kind."""
    made = shelf.create()
    yield made
    made.close()
