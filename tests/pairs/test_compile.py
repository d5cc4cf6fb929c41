"""The kernels compiled ahead of time for compute capability 9.0: tensor cores in use, nothing spilled (few exceptions).

A process of its own, because the other tests run triton's interpreter: ``python tests/pairs/test_compile.py all``
prints registers, spills and shared memory of every entry of the table.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial

import pytest

ROOM = 227 * 1024  # shared memory of a block on the target
KINDS = ("plain", "threshold", "tilt", "tilt 1", "relative", "raw", "online", "hinge")
# Bytes of these that go to memory: measured 1.4 times as fast as the tiles of which nothing does.
SPILLS = {("far_backward", "split", 256, kind): 512 for kind in KINDS}
# And a few in the masked stretch, which is a tile or two of each row.
SPILLS |= {("far_backward", "half", 128, kind): most for kind, most in (("threshold", 144), ("relative", 24))}
SPILLS |= {("far_backward", "split", 128, "relative"): 88}
# Bytes by width that wait in memory while a sum is put away, once in 1024 columns:
BETWEEN = {64: 0, 128: 600, 256: 1100}
WIDTHS = (16, 64, 128, 256, 384, 512)
SMALL = ("supcon out", "supcon in", "infonce", "npair", "contrastive")


def cases(every: bool) -> list[tuple]:
    """(what, mode, width, kind)."""
    if not every:
        return [("far", "half", 128, "plain"), ("near", "split", 128, "supcon out"), ("rest", "split", 128, "")]
    found = [("far", mode, width, "plain") for mode in ("half", "split") for width in WIDTHS]
    found += [("far", mode, width, kind) for mode in ("half", "split") for width in (128, 512) for kind in KINDS[1:6]]
    found += [("far", "split", width, kind) for width in (128, 256, 512) for kind in KINDS[6:]]
    found += [("many", mode, 128, kind) for mode in ("half", "split") for kind in KINDS[:6]]
    found += [("many", mode, width, kind) for mode in ("half", "split") for width in (64, 256) for kind in KINDS[:4]]
    found += [("near", "split", width, kind) for width in (64, 128, 1024) for kind in SMALL]
    return found + [("rest", "split", width, "") for width in (64, 128, 512, 1024)]


def build(kernel, mode: str, flags: dict, warps: int = 4, stages: int = 3) -> dict:
    """Compile one kernel and read what the assembler says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    operand = {"half": "fp16", "split": "bf16"}[mode]
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in flags:
            signature[name] = "constexpr"
        else:
            signature[name] = _type(name, operand, flags)
            if signature[name].startswith("*") or name in ("padded", "columns_padded"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=flags, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        assembler = os.path.join(triton.__path__[0], "backends/nvidia/bin/ptxas")
        command = [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    return {
        "kernel": kernel.__name__,
        "registers": int(registers.group(1)) if registers else -1,
        "spilled": sum(int(x) for x in re.findall(r"(\d+) bytes spill", said)),
        "shared": made.metadata.shared,
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
        "mma": made.asm["ptx"].count("mma.sync"),
    }


def _type(name: str, operand: str, flags: dict) -> str:
    if flags.get("TMA") and name in ("Q", "QL", "K", "KL", "QB", "QBL", "KB", "KBL"):
        rows, depth = flags["BM" if name.startswith("Q") else "BN"], flags.get("BK", flags["WIDTH"])
        return f"tensordesc<{operand}[{rows}, {depth}]>"
    if name in ("Q", "QL", "K", "KL", "QB", "QBL", "KB", "KBL", "H", "HL", "HIGH", "LOW"):
        return f"*{operand}"
    if name in ("LO", "HI", "ORDER", "COLUMN_ORDER", "TILE", "COUNTS", "ABOVE", "COUNT", "PLACES"):
        return "*i32"
    if name in ("LABELS", "COLUMNS", "NEAR", "FAR", "AT", "WHERE", "BITS"):
        return "*i64"
    if name == "DEFINED":
        return "*i1"
    if name.isupper():
        return "*fp32"
    whole = (
        "n",
        "m",
        "padded",
        "columns_padded",
        "splits",
        "start",
        "across",
        "d",
        "stride",
        "stride_w",
        "stride_out",
        "other_splits",
        "chunk",
        "count",
        "first",
        "copies",
        "bins",
        "each",
        "steps",
        "size",
    )
    return "i32" if name in whole else "fp32"


def far(mode: str, width: int, kind: str, many: bool = False) -> list[dict]:
    from mettle.pairs.fused import back
    from mettle.pairs.fused import far as room
    from mettle.pairs.fused.plan import SUMMED
    from mettle.pairs.fused.table import choice

    two = kind in ("relative", "raw")
    picked = choice(
        mode, width, other=width if two else 0, heavy=kind != "plain", two=kind.startswith("tilt"), many=many
    )
    name = {"online": "threshold", "tilt 1": "tilt"}.get(kind, kind)
    found = []
    for shape, forward in ((picked.forward, True), (picked.backward, False)):
        depth = shape.depth
        flags = {
            "WIDTH": width, "BK": depth, "WIDTH2": width, "BK2": depth, "BM": shape.rows, "BN": shape.columns,
            "MODE": mode, "TMA": shape.tma, "FAR": name, "SQUARE": kind == "tilt 1", "SHAPE": "hadsell",
            "TWO": name == "tilt", "OTHER": two, "ONLINE": kind == "online",
        }  # fmt: skip
        if forward:
            once = shape.half and kind != "online"
            flags |= {"HALF": once, "WARPS": shape.row_warps, "FIRM": shape.firm}
            found.append(build(room.far_forward, mode, flags, shape.warps, shape.stages))
            if (alone := picked.one_sided) is not None:
                flags |= {"HALF": False, "BM": alone.rows, "BN": alone.columns, "BK": alone.depth, "BK2": alone.depth}
                found.append(build(room.far_forward, mode, flags, alone.warps, alone.stages))
            continue
        flags |= {"LIVE": name in ("threshold", "tilt"), "ROWS": True, "COLUMNS": True}
        if picked.written:
            found.append(build(back.far_scores, mode, flags, shape.warps, shape.stages))
            continue
        flags.pop("BK")
        for turn in (0, SUMMED // shape.columns) if mode == "split" else (0,):
            more = {"FIRM": shape.firm, "TURN": turn}
            ends = [(True, True), (True, False), (False, True)] if turn and kind == "plain" else [(True, True)]
            for rows, columns in ends:
                more |= {"ROWS": rows, "COLUMNS": columns}
                one = build(back.far_backward, mode, flags | more, shape.warps, shape.stages)
                found.append(one | {"between": bool(turn)})
    return found


def near(mode: str, width: int, kind: str) -> list[dict]:
    from mettle.pairs.fused import near as room

    base = {
        "WIDTH": width, "BK": width if width <= 128 else 64, "BR": 16, "BC": 16, "PRECISION": "tf32x3",
        "FINISH": kind, "SELF": True, "WEIGHTED": True, "NUMERATOR": True, "PRIOR": True, "SHAPE": "hadsell",
    }  # fmt: skip
    far = "hinge" if kind == "contrastive" else "tilt"
    ends = {"FAR": far, "ONLINE": False, "BY": "weight", "MEAN_ALL": False, "COUNT": False}
    back = {"LIVE": True, "ROWS": True, "COLUMNS": True}
    forward = build(room.near_forward, mode, base | ends, 1 if width <= 128 else 2)
    return [forward, build(room.near_backward, mode, base | back, 2)]


def rest(mode: str, width: int, kind: str) -> list[dict]:
    from mettle.evaluate import candidates
    from mettle.pairs.fused import counts, ends, own, peak, prepare
    from mettle.pairs.fused.table import PEAK, choice

    block, held, warps = prepare.span(width)
    rows = {"WIDTH": width, "BLOCK": block, "ROWS": held, "UNIT": True}
    ranks = ("count", "search", "group", "known")
    shape = choice(mode, width).forward
    mining = PEAK if width <= 128 else shape
    tile = {"WIDTH": width, "BK": shape.depth, "BM": shape.rows, "BN": shape.columns, "MODE": mode}
    mined = tile | {"BM": mining.rows, "BN": mining.columns}
    window = {"WINDOWS": 2, "WORDS": max(1, shape.columns // 64), "BITS_OF": 64}
    row = {"SELF": True, "WIDTH": width, "BLOCK": block, "BN": shape.columns, "BC": 32}
    return [
        *(build(prepare.prepare_kernel, mode, rows | {"RANK": rank, "MODE": mode}, warps) for rank in ranks),
        build(prepare.group_kernel, mode, {"SIZE": 128}),
        build(prepare.project_kernel, mode, rows | {"MEAN": True}, warps),
        build(ends.mean_kernel, mode, {"SIZE": 1024}, 8),
        build(ends.shift_kernel, mode, {"SIZE": 64}),
        build(peak.peak_kernel, mode, mined, mining.warps, mining.stages),
        build(peak.found_kernel, mode, row, warps),
        build(peak.pull_kernel, mode, {"WIDTH": width, "BLOCK": block, "ROWS": peak.PULLED}),
        build(counts.counts_kernel, mode, tile, shape.warps, shape.stages),
        build(candidates.window_kernel, mode, tile | window, shape.warps, shape.stages),
        build(own.class_rows_kernel, mode, {"WIDTH": width, "BLOCK": block, "ROWS": held, "MODE": mode}, warps),
        build(own.class_project_kernel, mode, {"BLOCK": block, "ROWS": held}, warps),
        build(own.own_kernel, mode, {"WIDTH": width, "BLOCK": block, "ROWS": held}, warps),
        build(own.attract_kernel, mode, {"WIDTH": width, "BLOCK": block, "ROWS": held}, warps),
        build(own.ranges_kernel, mode, {"SIZE": 64}),
        build(own.finish_kernel, mode, {"ONLINE": True, "SIZE": 64}),
        build(own.weights_kernel, mode, {"ONLINE": False, "SIZE": 1024}, 8),
    ]


def compiled(every: bool) -> list[dict]:
    """In a process of its own, without the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: nothing can be compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "all" if every else "some"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(found: list[dict]) -> None:
    assert found
    for one in found:
        most = SPILLS.get((one["kernel"], one["mode"], one["width"], one.get("kind")), 0)
        most = max(most, BETWEEN.get(one["width"], 0)) if one.get("between") else most
        assert one["spilled"] <= most, one
        assert one["shared"] <= ROOM, one
        if one["kernel"].startswith("far_"):
            assert one["wgmma"] > 0, one
        if one["kernel"].startswith("near_"):
            assert one["mma"] > 0, one


def test_the_main_kernels_compile_without_spills():
    judge(compiled(False))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_kernel_of_the_table_compiles_without_spills():
    judge(compiled(True))


if __name__ == "__main__":
    for what, mode, width, kind in cases(sys.argv[1:] == ["all"]):
        for one in {"far": far, "many": partial(far, many=True), "near": near, "rest": rest}[what](mode, width, kind):
            if one["kernel"] in ("near_forward", "near_backward") or one["kernel"].startswith("far"):
                one |= {"kind": kind}
            print(json.dumps(one | {"mode": mode, "width": width}), flush=True)
