"""What every benchmark does with its numbers: read the memory of a process, keep the last table in RESULTS.md."""

from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "RESULTS.md"
EMPTY = "# Results\n\nLast tables of each benchmark, with the command that made them.\n"


def status(key):
    """A line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def keep(heading, script, text, picture="", threads="one thread"):
    """Put a table, and the picture below it, into RESULTS.md under its own heading."""
    head, _, rest = (RESULTS.read_text() if RESULTS.exists() else EMPTY).partition(f"## {heading}")
    _, mark, after = rest.partition("\n## ")
    body = f"## {heading}\n\n`python benchmarks/{script}`, torch {torch.__version__}, {threads}.\n\n{text}\n"
    body += f"\n{picture}\n" if picture else ""
    RESULTS.write_text(head.rstrip() + "\n\n" + body + (mark + after if mark else ""))
