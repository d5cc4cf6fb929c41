"""A small coverage-guided fuzzer: it changes files, and keeps the changes that made a reader go somewhere new.

An input that reaches a transition between two lines of Python that no input before it has reached joins the corpus, and
is changed further. Whatever is not an error of mettle in one line is a finding.
"""

import random
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mettle.errors import MettleError

LONGEST = 2000  # characters of one line that a person is to read
LARGEST = 1 << 20  # bytes of an input
BYTES = (0x00, 0x01, 0x7F, 0x80, 0xFF, 0x0A, 0x20, 0x22, 0x2C, 0x2D, 0x30, 0x39, 0x5B, 0x7B, 0x7D)
NUMBERS = (0, 1, -1, 127, 128, 255, 256, 32767, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62)
TEXTS = [
    *(b"NaN", b"Infinity", b"-1", b"1e999", b"1" + b"0" * 400, b"null", b"true", b"[]", b"{}", b'""', b"[[[[[[[["),
    *(b"\xef\xbb\xbf", b"\x00", b"\xff\xfe", b"\r", b"\n\n", b'"', b"'", b",,", b";", b"\t", b"../", b"\xed\xa0\x80"),
    *("é".encode(), b"<f8", b"|O", b"|S0", b"<U0", b"(0,)", b"(-1,)", b"(1, 2", b"99999999999"),
]
WATCHED = (
    "/mettle/",
    "/numpy/lib/",
    "/zipfile",
    "/gzip.py",
    "/csv.py",
    "/json/",
    "/tomllib/",
    "/PIL/",
    "/safetensors/",
)


Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Target:
    """A reader, files that it reads, and the name that a file must have."""

    read: Callable[[Path], Any]
    seeds: Sequence[bytes]
    suffix: str
    change_inside: Callable[[bytes, "Change", random.Random], bytes] | None = None  # a part, with its checksums right


@dataclass(frozen=True)
class Finding:
    """Something other than an answer or one line."""

    target: str
    problem: str
    place: str
    content: bytes

    def __str__(self) -> str:
        return f"{self.target}: {self.problem} at {self.place} ({len(self.content)} bytes)"


@dataclass
class Counts:
    """What fuzzing one target came to."""

    runs: int = 0
    accepted: int = 0
    refused: int = 0
    corpus: int = 0
    transitions: int = 0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)


class Coverage:
    """Transitions between lines, while a function runs."""

    def __init__(self):
        self.seen: set[tuple[str, int, int]] = set()
        self._known: dict[str, bool] = {}

    def run(self, function: Callable[[Path], Any], path: Path) -> tuple[BaseException | None, int]:
        """How a call ends, and how many transitions nobody had seen before it."""
        before, self._last, former = len(self.seen), 0, sys.gettrace()
        problem = None
        sys.settrace(self._enter)
        try:
            function(path)
        except Exception as error:
            problem = error
        finally:
            sys.settrace(former)
        return problem, len(self.seen) - before

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable | None:
        name = frame.f_code.co_filename
        watched = self._known.get(name)
        if watched is None:
            watched = self._known[name] = any(part in name for part in WATCHED)
        return self._step if watched else None

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable:
        if event == "line":
            self.seen.add((frame.f_code.co_filename, self._last, frame.f_lineno))
            self._last = frame.f_lineno
        return self._step


def mutate(content: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """One to some changes: bits, bytes, numbers, pieces taken out, doubled or moved, words, parts of another input."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 1, 2, 2, 4, 4, 8, 16, 64)))
        kind = rng.choices(range(10), (4, 4, 3, 2, 2, 3, 3, 1, 0.3, 1))[0]
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice(BYTES)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(NUMBERS) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
        elif kind == 5:
            data[at:end] = rng.choice(TEXTS)
        elif kind == 6:
            data[at:at] = rng.choice(TEXTS)
        elif kind == 7:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at:end] = other[start : start + rng.choice((4, 16, 64, 512))]
        elif kind == 8:
            del data[rng.randrange(len(data) + 1) :]
        else:
            data[at:end] = bytes(rng.randrange(256) for _ in range(end - at))
    return bytes(data[:LARGEST])


def replace_number(content: bytes, rng: random.Random) -> bytes:
    """A text with one of its numbers, or one of its words, in another's place; for JSON, TOML and tables."""
    starts = [i for i in range(len(content)) if content[i : i + 1].isdigit() and not content[i - 1 : i].isdigit()]
    if not starts:
        return content
    at = rng.choice(starts)
    end = at
    while end < len(content) and content[end : end + 1] in b"0123456789.eE+-":
        end += 1
    return content[:at] + rng.choice(TEXTS + [str(n).encode() for n in NUMBERS]) + content[end:]


def fuzz(name: str, target: Target, folder: Path, runs: int, seed: int = 0) -> Counts:
    """Change the files of a target so many times, and read each."""
    rng, coverage, counts = random.Random(f"{name} {seed}"), Coverage(), Counts()
    path = folder / f"input{target.suffix}"
    corpus, sound = list(target.seeds), []

    def change(content: bytes) -> bytes:
        return replace_number(content, rng) if rng.random() < 0.3 else mutate(content, corpus, rng)

    refusals = []
    for content in target.seeds:
        path.write_bytes(content)
        problem, _ = coverage.run(target.read, path)
        if problem is None:
            sound.append(content)
        else:
            refusals.append(problem)
            if not is_one_line(problem):
                found = describe(name, problem, content)
                counts.findings.setdefault((found.problem, found.place), found)
    assert len(refusals) < len(corpus), f"no file of {name} is read: {refusals[0]!r}"
    while counts.runs < runs:
        parent = rng.choice(sound[-64:] if rng.random() < 0.7 else corpus)
        content = change(parent)
        if target.change_inside is not None and rng.random() < 0.8:
            with suppress(Exception):  # the parent is damaged already
                content = target.change_inside(parent, change, rng)
        path.write_bytes(content)
        problem, new = coverage.run(target.read, path)
        counts.runs += 1
        if problem is None:
            counts.accepted += 1
        elif is_one_line(problem):
            counts.refused += 1
        else:
            found = describe(name, problem, content)
            counts.findings.setdefault((found.problem, found.place), found)
        if new and len(content) < LARGEST // 4:
            corpus.append(content)
            if problem is None:
                sound.append(content)
    counts.corpus, counts.transitions = len(corpus), len(coverage.seen)
    return counts


def is_one_line(problem: BaseException) -> bool:
    """Whether an error is one that a person can read: of mettle, and one line."""
    return isinstance(problem, MettleError) and 0 < len(str(problem)) < LONGEST and "\n" not in str(problem)


def describe(name: str, problem: BaseException, content: bytes) -> Finding:
    """Where an error came from, as far as it was our code."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [f for f in frames if "/mettle/" in f.filename] or frames
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    what = type(problem).__name__ if not isinstance(problem, MettleError) else f"{type(problem).__name__}, not one line"
    return Finding(
        name, f"{what}: {str(problem)[:100]!r}" if isinstance(problem, MettleError) else what, place, content
    )


def summarize(counts: Mapping[str, Counts]) -> str:
    """One line for each target, and their sum."""
    lines = [
        f"{name:<24} {c.runs:>7} files  {c.accepted:>7} read  {c.refused:>7} refused  {c.corpus:>5} kept  "
        f"{c.transitions:>6} transitions  {len(c.findings):>3} findings"
        for name, c in counts.items()
    ]
    runs, findings = sum(c.runs for c in counts.values()), sum(len(c.findings) for c in counts.values())
    return "\n".join([*lines, f"{runs} files read by {len(counts)} readers, {findings} untyped exceptions"])
