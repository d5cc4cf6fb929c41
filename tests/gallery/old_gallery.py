"""A gallery as the version before calibrations were kept left it: dumps of both kinds, made by that version itself.

Eleven people, five of them with two templates; somebody was deleted, somebody replaced. Two names were enrolled in
decomposed letters, one of them deleted under the request "delete zoe". Its own thresholds are 0.25 and 0.75.
"""

import sqlite3
import subprocess
from pathlib import Path

FOLDER = Path(__file__).with_name("format1")
DIGEST = "171af5852f188d40096991f4ab554d349a48168a5ca320ef97c53c5728f5429c"  # as that version gave it
NAME = "format1"  # of the schema in the dump


def restored_file(folder: Path) -> Path:
    """The folder of the embedded kind."""
    folder.mkdir(parents=True)
    connection = sqlite3.connect(folder / "record.sqlite")
    connection.executescript((FOLDER / "sqlite.sql").read_text(encoding="utf-8"))
    connection.close()
    return folder


def restored_server(server, database: str) -> str:
    """The address of the kind on a server, in a database of its own."""
    server.sql(f"CREATE DATABASE {database}")
    server.sql("CREATE EXTENSION vector", database=database)
    command = [server.server.bin_path / "psql", "-q", "-v", "ON_ERROR_STOP=1", server.url(database=database)]
    dump = (FOLDER / "postgres.sql").read_text(encoding="utf-8")
    subprocess.run(command, input=dump, text=True, check=True, stdout=subprocess.DEVNULL)
    return server.url(NAME, database=database)
