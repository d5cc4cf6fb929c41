"""The kernels compiled ahead of time for compute capability 9.0: tensor cores in use, nothing spilled (few exceptions).

`benchmarks/kernel_fingerprint.py` builds them in a process of its own: the other tests run triton's interpreter.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covering import mark_slow_except

MAIN = "negatives/fp16/128/plain,positives/bf16x3/128/supcon_out,rest/bf16x3/128"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_fingerprint.py"
ROOM = 227 * 1024  # shared memory of a block on the target
KINDS = ("plain", "threshold", "importance", "importance 1", "relative", "relative_raw", "online", "hinge")
# Bytes of these that go to memory: measured 1.4 times as fast as the tiles of which nothing does.
SPILLS = {("negatives_backward", "bf16x3", 256, kind): 512 for kind in KINDS}
# And a few in the masked stretch, which is a tile or two of each row.
SPILLS |= {("negatives_backward", "fp16", 128, kind): most for kind, most in (("threshold", 144), ("relative", 24))}
SPILLS |= {("negatives_backward", "bf16x3", 128, "relative"): 88}
SPILLS |= {("nearest_gradients_kernel", "bf16x3", 64, None): 8}
# Bytes by width that wait in memory while a sum is put away, once in 1024 columns:
BETWEEN = {64: 0, 128: 600, 256: 1100}

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: nothing can be compiled", allow_module_level=True)


def run_script(*command: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


def fingerprint(folder: Path, *options: str) -> list[dict]:
    done = run_script(str(SCRIPT), *options, "--out", str(folder / "table.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "table.json").read_text())["entries"]


def judge(found: list[dict]) -> None:
    assert found
    for one in found:
        most = SPILLS.get((one["kernel"], one["precision"], one["width"], one.get("kind")), 0)
        most = max(most, BETWEEN.get(one["width"], 0)) if one.get("flushes") else most
        assert one["spilled"] <= most, one
        assert one["shared"] <= ROOM, one
        if one["kernel"].startswith("negatives_"):
            assert one["wgmma"] > 0, one
        if one["kernel"].startswith("positives_"):
            assert one["mma"] > 0, one


@pytest.fixture(scope="module")
def main_kernels(tmp_path_factory) -> Path:
    """The table of the main kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    fingerprint(folder, "--only", MAIN)
    return folder / "table.json"


def test_the_main_kernels_compile_without_spills(main_kernels):
    judge(json.loads(main_kernels.read_text())["entries"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_of_the_table_compiles_without_spills(tmp_path):
    judge(fingerprint(tmp_path, "--all", "--jobs", "2"))


KERNELS = """
import triton
import triton.language as tl


@triton.jit
def scale_rows(X, OUT, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(OUT + at, x * 2.0, mask=at < n)


@triton.jit
def scale_rows_by_another_name(VALUES, SCALED, n, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)

    # the same, further down, in other words
    values = tl.load(VALUES + columns, mask=columns < n, other=0.0)
    tl.store(SCALED + columns, values * 2.0, mask=columns < n)


@triton.jit
def scale_rows_otherwise(X, OUT, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(X + at, mask=at < n, other=0.0)
    tl.store(OUT + at, x * 3.0, mask=at < n)
"""


@pytest.mark.parametrize("line_information", mark_slow_except(["0", "1"], ["0"]))
def test_the_hash_follows_arithmetic_and_no_names(tmp_path, monkeypatch, line_information):
    (tmp_path / "kernels.py").write_text(KERNELS)
    program = f"""
import sys
sys.path[:0] = [{str(SCRIPT.parent)!r}, {str(tmp_path)!r}]
import kernels
from kernel_fingerprint import build
made = [(kernels.scale_rows, "SIZE"), (kernels.scale_rows_by_another_name, "BLOCK"),
        (kernels.scale_rows_otherwise, "SIZE")]
print(*(build("", kernel, "fp16", {{size: 64}})["hash"] for kernel, size in made))
"""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", line_information)
    done = run_script("-c", program)
    assert done.returncode == 0, done.stderr[-3000:]
    first, renamed, changed = done.stdout.split()
    assert first == renamed
    assert first != changed


def test_a_difference_between_two_tables_is_told_by_the_exit_status(main_kernels, tmp_path, monkeypatch, capsys):
    table = json.loads(main_kernels.read_text())
    found = importlib.util.spec_from_file_location("kernel_fingerprint", SCRIPT)
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    monkeypatch.setattr(script, "fingerprint", lambda cases, jobs: table)  # compiled once already

    def compare(path: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kernel_fingerprint", "--only", MAIN, "--compare", str(path)])
        return script.main(), capsys.readouterr().out

    assert compare(main_kernels) == (0, f"{len(table['entries'])} entries, nothing changed\n")
    entries = [dict(entry) for entry in table["entries"]]
    entries[1]["hash"] = "0" * 16
    (tmp_path / "changed.json").write_text(json.dumps(table | {"entries": entries}))
    status, said = compare(tmp_path / "changed.json")
    assert status == 1
    assert said == f"{entries[1]['entry']}: hash 0000000000000000 -> {table['entries'][1]['hash']}\n"
