"""Tables of text: CSV, TSV (either with ``.gz``) and Parquet, read whole, with the place of every row for messages.

Fields are parted by what the header is parted by most: comma, semicolon or tab; in a ``.tsv`` by tabs.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mettle.data.image_decoding import quote_name
from mettle.data.parquet import read_parquet_schema, read_parquet_texts
from mettle.errors import DataError, nearest

LARGEST_FILE = 2 << 30
LARGEST_FIELD = 1 << 20
LONGEST_HINT = 300
DELIMITED = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SUFFIXES = (*DELIMITED, ".parquet", ".pq")


@dataclass(frozen=True)
class TextTable:
    """A table of text, as read: one list per column, and where each row stands in the file."""

    path: Path
    columns: Mapping[str, Sequence[str]]
    lines: Sequence[int]
    unit: str = "line"
    name: str = ""  # of a table that is no file

    def error(self, row: int, column: str, problem: str) -> DataError:
        """An error about one cell."""
        return DataError(
            f"{quote_name(self.path)} {self.unit} {self.lines[row]}, column {quote_name(column)}: {problem}"
        )

    def require_column(self, name: str) -> str:
        """The name of a column, if there is such a one."""
        if name not in self.columns:
            raise DataError(f"no column {quote_name(name)} in {quote_name(self.path)}{self.suggest_column(name)}")
        return name

    def suggest_column(self, name: str) -> str:
        """Which column was probably meant, or which there are, where these are not very many."""
        found = nearest(name, self.columns)
        return found if len(found) <= LONGEST_HINT else f"; it has {len(self.columns)} columns"


def read_table(path: Path) -> TextTable:
    """Read a ``.csv``, ``.tsv``, either with ``.gz``, or ``.parquet`` file.

    Raises:
        DataError: it cannot be read; one line says where and why.
        MissingExtra: Parquet support is not installed.
    """
    name = path.name.lower()
    if not path.is_file():
        raise DataError(f"no file {quote_name(path)}")
    if name.endswith((".parquet", ".pq")):
        table = _read_parquet(path)
    elif name.endswith(DELIMITED):
        table = _read_csv(path)
    else:
        raise DataError(f"{quote_name(path)} is not a manifest: {', '.join(SUFFIXES)} are read")
    if not table.lines:
        raise DataError(f"{quote_name(path)} has no rows")
    return table


def read_table_header(path: Path) -> TextTable:
    """The columns of a file that `read_table` reads, without its rows."""
    if path.name.lower().endswith((".parquet", ".pq")):
        names = read_parquet_schema(path).names
    else:
        names, _ = read_delimited(path)
    return TextTable(path, dict.fromkeys(names, ()), ())


def _read_csv(path: Path) -> TextTable:
    header, rows = read_delimited(path)
    lines, fields = [], []
    for line, row in rows:
        lines.append(line)
        fields.append(row)
    return TextTable(path, {name: [row[i] for row in fields] for i, name in enumerate(header)}, lines)


def read_delimited(path: Path) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The header of a CSV or TSV file, empty for an empty file, and its rows, each with its line.

    Raises:
        DataError: two columns of one name; on the way through the rows, one that does not fit the header.
    """
    rows = _iterate_rows(path)
    _, first = next(rows, (1, []))
    header, seen = [name.strip() for name in first], set()
    for name in header:
        if name in seen:
            raise DataError(f"{quote_name(path)} line 1: two columns are called {quote_name(name)}")
        seen.add(name)
    return header, rows


def _iterate_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows as they are split, all of one length, each with the line that it starts at; a blank line is no row."""
    reader, line, width = _csv_reader(path), 1, 0
    try:
        for row in reader:
            if row:
                width = width or len(row)
                if len(row) != width:
                    raise DataError(f"{quote_name(path)} line {line}: {len(row)} fields, but the header has {width}")
                if any(len(field) > LARGEST_FIELD for field in row):
                    raise DataError(f"{quote_name(path)} line {line}: a field of more than {LARGEST_FIELD} characters")
                yield line, row
            line = reader.line_num + 1
    except csv.Error as problem:
        raise DataError(f"{quote_name(path)} line {line}: {problem}") from None


def _csv_reader(path: Path) -> Any:
    """A reader of `csv` that knows its line."""
    lines = read_text_lines(path)
    head = list(_leading_lines(lines))
    tabs = path.name.lower().endswith((".tsv", ".tsv.gz"))
    mark = "\t" if tabs else _guess_delimiter(head[-1] if head else "")
    return csv.reader(chain(head, lines), strict=True, delimiter=mark)


def _leading_lines(lines: Iterator[str]) -> Iterator[str]:
    """Lines up to the first that is not blank."""
    for line in lines:
        yield line
        if line.strip():
            return


def _guess_delimiter(header: str) -> str:
    """What parts the fields of a header: the most frequent of comma, semicolon and tab outside of quotes."""
    bare = re.sub(r'"[^"]*"', "", header)
    return max(",;\t", key=bare.count)


def read_text_lines(path: Path) -> Iterator[str]:
    """Lines of UTF-8 text; what is none of it is an error with its line."""
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"cannot read {quote_name(path)}: {problem}") from None
    if len(data) > LARGEST_FILE:
        raise DataError(f"{quote_name(path)} unpacks to more than {LARGEST_FILE} bytes")
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), start=1):
        if b"\0" in line:
            raise DataError(f"{quote_name(path)} line {number}: a NUL byte; save the table as UTF-8 text")
        try:
            yield line.decode()
        except UnicodeDecodeError as problem:
            reason = f"byte {problem.start + 1} is not UTF-8; save the table as UTF-8"
            raise DataError(f"{quote_name(path)} line {number}: {reason}") from None


def _read_parquet(path: Path) -> TextTable:
    columns, count = read_parquet_texts(path)
    for name, values in columns.items():
        for row, value in enumerate(values):
            if "\0" in value or len(value) > LARGEST_FIELD:
                raise DataError(f"{quote_name(path)} row {row + 1}, column {quote_name(name)}: NUL or over 1 MB")
    return TextTable(path, columns, range(1, count + 1), unit="row")


def is_integer_text(text: str) -> bool:
    """Whether this is a whole number as one writes it (007 is a name, and so is --5)."""
    return text.removeprefix("-").isdecimal() and len(text) < 19 and str(int(text)) == text


def parse_number(text: str) -> float | None:
    """The number that a text is, as people write one."""
    try:
        return None if "_" in text else float(text)  # Python reads 1_000 as a number, people as a name
    except ValueError:
        return None
