"""What the compiler makes of every fused kernel, on a machine without a GPU: registers, spills and a hash of its PTX.

python benchmarks/kernel_fingerprint.py --out before.json            a representative set, a few minutes
python benchmarks/kernel_fingerprint.py --compare before.json        differences, and exit status 1 where there are any
python benchmarks/kernel_fingerprint.py --all --jobs 8 --out F       every precision, width and kind of the table

The kernels are compiled ahead of time for compute capability 9.0. The hash covers instructions only: without line
information, comments and the name of the kernel, so moving or renaming a kernel, its arguments or its variables keeps
it, and any other arithmetic, launch shape or order of arguments changes it. Entries are named by what they compute
(``far/half/128/plain/backward``), not by function names, so that tables from before and after a rename can be compared.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

KINDS = ("plain", "threshold", "tilt", "tilt 1", "relative", "raw", "online", "hinge")
WIDTHS = (16, 64, 128, 256, 384, 512)
ENDINGS = ("supcon out", "supcon in", "infonce", "npair", "contrastive")
COMPARED = ("hash", "registers", "spilled", "shared")

Case = tuple[str, str, int, str]
"""(which kernels, precision, width, kind)."""


def representative_cases() -> list[Case]:
    """Every entry kernel, every kind of pair function and every ending of a row, at one width each."""
    found = [("far", mode, 128, "plain") for mode in ("half", "split")]
    found += [("far", "half", 128, kind) for kind in KINDS[1:6]]
    found += [("far", "split", 128, kind) for kind in KINDS[6:]]
    found += [("far", "split", 512, "plain"), ("many", "split", 128, "plain")]
    found += [("near", "split", 128, kind) for kind in ENDINGS]
    return [*found, ("rest", "half", 128, ""), ("rest", "split", 128, "")]


def all_cases() -> list[Case]:
    """Every precision, width and kind that the table of tile sizes knows."""
    found = [("far", mode, width, "plain") for mode in ("half", "split") for width in WIDTHS]
    found += [("far", mode, width, kind) for mode in ("half", "split") for width in (128, 512) for kind in KINDS[1:6]]
    found += [("far", "split", width, kind) for width in (128, 256, 512) for kind in KINDS[6:]]
    found += [("many", mode, 128, kind) for mode in ("half", "split") for kind in KINDS[:6]]
    found += [("many", mode, width, kind) for mode in ("half", "split") for width in (64, 256) for kind in KINDS[:4]]
    found += [("near", "split", width, kind) for width in (64, 128, 1024) for kind in ENDINGS]
    found += [("rest", "split", width, "") for width in (64, 128, 512, 1024)]
    return [*found, ("rest", "half", 128, "")]


def strip_names(ptx: str, kernel: str) -> str:
    """The instructions of a kernel: without comments, line information, debug sections and its name."""
    ptx = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(rf"\b{re.escape(kernel)}(?=_param_|\b)", "kernel", ptx)
    lines = (line.strip() for line in ptx.splitlines())
    return "\n".join(x for x in lines if x and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)\w*:", x))


def build(entry: str, kernel, mode: str, flags: dict, warps: int = 4, stages: int = 3) -> dict:
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
            signature[name] = argument_type(name, operand, flags)
            if signature[name].startswith("*") or name in ("padded", "columns_padded"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=flags, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        assembler = os.path.join(triton.__path__[0], "backends/nvidia/bin/ptxas")
        command = [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    return {
        "entry": entry,
        "kernel": kernel.__name__,
        "hash": hashlib.sha256(strip_names(ptx, kernel.__name__).encode()).hexdigest()[:16],
        "registers": int(registers.group(1)) if registers else -1,
        "spilled": sum(int(x) for x in re.findall(r"(\d+) bytes spill", said)),
        "shared": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
    }


OPERANDS = ("Q", "QL", "K", "KL", "QB", "QBL", "KB", "KBL")
INTEGERS = (
    "n", "m", "padded", "columns_padded", "splits", "start", "across", "d", "stride", "stride_w", "stride_out",
    "other_splits", "chunk", "count", "first", "copies", "bins", "each", "steps", "size",
)  # fmt: skip


def argument_type(name: str, operand: str, flags: dict) -> str:
    """The type that the launches give an argument of this name."""
    if flags.get("TMA") and name in OPERANDS:
        rows, depth = flags["BM" if name.startswith("Q") else "BN"], flags.get("BK", flags["WIDTH"])
        return f"tensordesc<{operand}[{rows}, {depth}]>"
    if name in (*OPERANDS, "H", "HL", "HIGH", "LOW"):
        return f"*{operand}"
    if name in ("LO", "HI", "ORDER", "COLUMN_ORDER", "TILE", "COUNTS", "ABOVE", "COUNT", "PLACES"):
        return "*i32"
    if name in ("LABELS", "COLUMNS", "NEAR", "FAR", "AT", "WHERE", "BITS"):
        return "*i64"
    if name == "DEFINED":
        return "*i1"
    if name.isupper():
        return "*fp32"
    return "i32" if name in INTEGERS else "fp32"


def build_negatives(mode: str, width: int, kind: str, many: bool = False) -> list[dict]:
    """The kernels over all negatives, with the tiles that the table gives them."""
    from mettle.pairs.kernels import backward
    from mettle.pairs.kernels import forward as room
    from mettle.pairs.kernels.config import choice
    from mettle.pairs.kernels.function import SUMMED

    two = kind in ("relative", "raw")
    picked = choice(
        mode, width, other=width if two else 0, heavy=kind != "plain", two=kind.startswith("tilt"), many=many
    )
    name = {"online": "threshold", "tilt 1": "tilt"}.get(kind, kind)
    found = []
    for shape, ahead in ((picked.forward, True), (picked.backward, False)):
        depth = shape.depth
        flags = {
            "WIDTH": width, "BK": depth, "WIDTH2": width, "BK2": depth, "BM": shape.rows, "BN": shape.columns,
            "MODE": mode, "TMA": shape.tma, "FAR": name, "SQUARE": kind == "tilt 1", "SHAPE": "hadsell",
            "TWO": name == "tilt", "OTHER": two, "ONLINE": kind == "online",
        }  # fmt: skip
        if ahead:
            once = shape.half and kind != "online"
            flags |= {"HALF": once, "WARPS": shape.row_warps, "FIRM": shape.firm}
            found.append(build("forward", room.far_forward, mode, flags, shape.warps, shape.stages))
            if (alone := picked.one_sided) is not None:
                flags |= {"HALF": False, "BM": alone.rows, "BN": alone.columns, "BK": alone.depth, "BK2": alone.depth}
                found.append(build("forward one-sided", room.far_forward, mode, flags, alone.warps, alone.stages))
            continue
        flags |= {"LIVE": name in ("threshold", "tilt"), "ROWS": True, "COLUMNS": True}
        if picked.written:
            found.append(build("scores", backward.far_scores, mode, flags, shape.warps, shape.stages))
            continue
        flags.pop("BK")
        for turn in (0, SUMMED // shape.columns) if mode == "split" else (0,):
            more = {"FIRM": shape.firm, "TURN": turn}
            ends = [(True, True), (True, False), (False, True)] if turn and kind == "plain" else [(True, True)]
            for rows, columns in ends:
                more |= {"ROWS": rows, "COLUMNS": columns}
                name_of = f"backward turn={turn} rows={rows:d} columns={columns:d}"
                one = build(name_of, backward.far_backward, mode, flags | more, shape.warps, shape.stages)
                found.append(one | {"between": bool(turn)})
    return found


def build_many(mode: str, width: int, kind: str) -> list[dict]:
    """The same with the tiles of large batches."""
    return build_negatives(mode, width, kind, many=True)


def build_positives(mode: str, width: int, kind: str) -> list[dict]:
    """The kernels over positives, which also end each row."""
    from mettle.pairs.kernels import positives as room

    base = {
        "WIDTH": width, "BK": width if width <= 128 else 64, "BR": 16, "BC": 16, "PRECISION": "tf32x3",
        "FINISH": kind, "SELF": True, "WEIGHTED": True, "NUMERATOR": True, "PRIOR": True, "SHAPE": "hadsell",
    }  # fmt: skip
    far = "hinge" if kind == "contrastive" else "tilt"
    ends = {"FAR": far, "ONLINE": False, "BY": "weight", "MEAN_ALL": False, "COUNT": False}
    back = {"LIVE": True, "ROWS": True, "COLUMNS": True}
    forward = build("forward", room.near_forward, mode, base | ends, 1 if width <= 128 else 2)
    return [forward, build("backward", room.near_backward, mode, base | back, 2)]


def build_rest(mode: str, width: int, kind: str) -> list[dict]:
    """Everything else: preparing rows, means, mining, counting, class vectors."""
    from mettle.evaluate import candidates
    from mettle.pairs.kernels import class_rows, histograms, mining, operands, row_sums
    from mettle.pairs.kernels.config import PEAK, choice

    block, held, warps = operands.span(width)
    rows = {"WIDTH": width, "BLOCK": block, "ROWS": held, "UNIT": True}
    ranks = ("count", "search", "group", "known")
    shape = choice(mode, width).forward
    mined = PEAK if width <= 128 else shape
    tile = {"WIDTH": width, "BK": shape.depth, "BM": shape.rows, "BN": shape.columns, "MODE": mode}
    mined_tile = tile | {"BM": mined.rows, "BN": mined.columns}
    window = {"WINDOWS": 2, "WORDS": max(1, shape.columns // 64), "BITS_OF": 64}
    row = {"SELF": True, "WIDTH": width, "BLOCK": block, "BN": shape.columns, "BC": 32}
    alone = {"WIDTH": width, "BLOCK": block, "ROWS": held}
    scores = []
    if mode == "split":  # evaluation counts scores in one precision
        scores = [
            build("score counts", histograms.counts_kernel, mode, tile, shape.warps, shape.stages),
            build("score window", candidates.window_kernel, mode, tile | window, shape.warps, shape.stages),
        ]
    return [
        *scores,
        *(build(f"prepare {r}", operands.prepare_kernel, mode, rows | {"RANK": r, "MODE": mode}, warps) for r in ranks),
        build("group", operands.group_kernel, mode, {"SIZE": 128}),
        build("project", operands.project_kernel, mode, rows | {"MEAN": True}, warps),
        build("mean", row_sums.mean_kernel, mode, {"SIZE": 1024}, 8),
        build("shift", row_sums.shift_kernel, mode, {"SIZE": 64}),
        build("hardest tile", mining.peak_kernel, mode, mined_tile, mined.warps, mined.stages),
        build("hardest pair", mining.found_kernel, mode, row, warps),
        build("hardest backward", mining.pull_kernel, mode, {"WIDTH": width, "BLOCK": block, "ROWS": mining.PULLED}),
        build("class rows", class_rows.class_rows_kernel, mode, alone | {"MODE": mode}, warps),
        build("class project", class_rows.class_project_kernel, mode, {"BLOCK": block, "ROWS": held}, warps),
        build("class target", class_rows.own_kernel, mode, alone, warps),
        build("class target backward", class_rows.attract_kernel, mode, alone, warps),
        build("class ranges", class_rows.ranges_kernel, mode, {"SIZE": 64}),
        build("class finish", class_rows.finish_kernel, mode, {"ONLINE": True, "SIZE": 64}),
        build("class weights", class_rows.weights_kernel, mode, {"ONLINE": False, "SIZE": 1024}, 8),
    ]


BUILDERS = {"far": build_negatives, "many": build_many, "near": build_positives, "rest": build_rest}


def case_name(case: Case) -> str:
    """As ``--only`` takes it."""
    return "/".join(str(part) for part in case if part != "")


def fingerprint_case(case: Case) -> list[dict]:
    """All kernels of one case, compiled."""
    what, mode, width, kind = case
    about = {"mode": mode, "width": width} | ({"kind": kind} if kind else {})
    return [one | about | {"entry": f"{case_name(case)}/{one['entry']}"} for one in BUILDERS[what](mode, width, kind)]


def entry_kernels() -> set[str]:
    """The kernels of the fused engine that no other kernel calls: those that are launched."""
    from mettle.pairs import kernels

    defined, called = set(), set()
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
                defined.add(node.name)
                called |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    return defined - called


def differences(before: dict, after: dict) -> list[str]:
    """One line for each entry that is not what it was; none where nothing changed."""
    if before["triton"] != after["triton"]:
        return [f"the tables come from triton {before['triton']} and {after['triton']}: make both with one version"]
    old, new = ({one["entry"]: one for one in table["entries"]} for table in (before, after))
    found = [f"{entry}: only in the first table" for entry in old if entry not in new]
    found += [f"{entry}: only in the second table" for entry in new if entry not in old]
    for entry in (entry for entry in old if entry in new):
        changes = [f"{x} {old[entry][x]} -> {new[entry][x]}" for x in COMPARED if old[entry][x] != new[entry][x]]
        if changes:
            found.append(f"{entry}: {', '.join(changes)}")
    return found


def fingerprint(cases: list[Case], jobs: int) -> dict:
    """The table of these cases."""
    import triton

    if jobs == 1:
        made = [fingerprint_case(case) for case in cases]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            made = list(pool.map(fingerprint_case, cases))
    return {"triton": triton.__version__, "entries": [one for found in made for one in found]}


def print_table(table: dict) -> None:
    """One line an entry."""
    wide = max(len(one["entry"]) for one in table["entries"])
    print(f"{'entry':{wide}}  registers  spilled  shared  hash")
    for one in table["entries"]:
        numbers = f"{one['registers']:9}  {one['spilled']:7}  {one['shared']:6}  {one['hash']}"
        print(f"{one['entry']:{wide}}  {numbers}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every precision, width and kind, not a representative set")
    parser.add_argument("--only", metavar="CASES", help="only these, by comma: far/half/128/plain,rest/split/128")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the table to this file, as JSON")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="print what differs from this table")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    given = parser.parse_args()
    cases = all_cases() if given.all else representative_cases()
    if given.only:
        known = {case_name(case): case for case in (*representative_cases(), *all_cases())}
        unknown = [name for name in given.only.split(",") if name not in known]
        if unknown:
            parser.error(f"no case {unknown[0]!r}: the cases are {', '.join(known)}")
        cases = [known[name] for name in given.only.split(",")]
    table = fingerprint(cases, given.jobs)
    missing = entry_kernels() - {one["kernel"] for one in table["entries"]}
    if missing and not given.only:
        parser.error(f"no case builds {', '.join(sorted(missing))}: add one, or a change there goes unseen")
    if given.out:
        given.out.write_text(json.dumps(table, indent=1) + "\n")
    if not given.compare:
        print_table(table)
        return 0
    before = json.loads(given.compare.read_text())
    if given.only:  # a part is compared with its part
        built = {one["entry"] for one in table["entries"]}
        before["entries"] = [one for one in before["entries"] if one["entry"] in built]
    found = differences(before, table)
    print("\n".join(found) if found else f"{len(table['entries'])} entries, nothing changed")
    return 1 if found else 0


if __name__ == "__main__":
    # Both must be set before triton is imported, here and in the processes that compile.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    sys.exit(main())
