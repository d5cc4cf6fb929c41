"""What the compiler makes of every fused kernel, on a machine without a GPU: registers, spills and a hash of its PTX.

python benchmarks/kernel_fingerprint.py --out before.json            a representative set, a few minutes
python benchmarks/kernel_fingerprint.py --compare before.json        differences, and exit status 1 where there are any
python benchmarks/kernel_fingerprint.py --all --jobs 8 --out F       every precision, width and kind of the table

The kernels are compiled ahead of time for compute capability 9.0. The hash covers instructions only: without line
information, comments and the name of the kernel, so moving or renaming a kernel, its arguments or its variables keeps
it, and any other arithmetic, launch shape or order of arguments changes it. Entries are named by what they compute
(``negatives/fp16/128/plain/backward``), not by function names, so that tables from before and after a rename can be
compared.
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

KINDS = (
    "plain", "threshold", "importance", "importance 1", "relative", "relative_raw", "online", "hinge", "circle",
    "mined",
)  # fmt: skip
WIDTHS = (16, 64, 128, 256, 384, 512)
ROW_LOSSES = ("supcon_out", "supcon_in", "infonce", "npair", "contrastive", "two_sided", "circle")
COMPARED = ("hash", "registers", "spilled", "shared")

Case = tuple[str, str, int, str]
"""(which kernels, precision, width, kind)."""


def representative_cases() -> list[Case]:
    """Every entry kernel, every kind of pair function and every ending of a row, at one width each."""
    found = [("negatives", precision, 128, "plain") for precision in ("fp16", "bf16x3")]
    found += [("negatives", "fp16", 128, kind) for kind in KINDS[1:6]]
    found += [("negatives", "bf16x3", 128, kind) for kind in KINDS[6:]]
    found += [("large", "fp16", 128, kind) for kind in KINDS[8:]]
    found += [("negatives", "bf16x3", 512, "plain"), ("large", "bf16x3", 128, "plain")]
    found += [("positives", "bf16x3", 128, kind) for kind in ROW_LOSSES]
    return [*found, ("rest", "fp16", 128, ""), ("rest", "bf16x3", 128, "")]


def all_cases() -> list[Case]:
    """Every precision, width and kind that the table of tile sizes knows."""
    found = [("negatives", precision, width, "plain") for precision in ("fp16", "bf16x3") for width in WIDTHS]
    found += [
        ("negatives", precision, width, kind)
        for precision in ("fp16", "bf16x3")
        for width in (128, 512)
        for kind in KINDS[1:6]
    ]
    found += [("negatives", "bf16x3", width, kind) for width in (128, 256, 512) for kind in KINDS[6:]]
    found += [("large", precision, 128, kind) for precision in ("fp16", "bf16x3") for kind in (*KINDS[:6], *KINDS[8:])]
    found += [
        ("large", precision, width, kind)
        for precision in ("fp16", "bf16x3")
        for width in (64, 256)
        for kind in KINDS[:4]
    ]
    found += [("positives", "bf16x3", width, kind) for width in (64, 128, 1024) for kind in ROW_LOSSES]
    found += [("rest", "bf16x3", width, "") for width in (64, 128, 512, 1024)]
    return [*found, ("rest", "fp16", 128, "")]


def strip_names(ptx: str, kernel: str) -> str:
    """The instructions of a kernel: without comments, line information, debug sections and its name."""
    ptx = re.split(r"^\s*\.section\s+\.debug", ptx, maxsplit=1, flags=re.MULTILINE)[0]
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(rf"\b{re.escape(kernel)}(?=_param_|\b)", "kernel", ptx)
    lines = (line.strip() for line in ptx.splitlines())
    return "\n".join(x for x in lines if x and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)\w*:", x))


def build(entry: str, kernel, precision: str, constexprs: dict) -> dict:
    """Compile one kernel and read what the assembler says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    operand = {"fp16": "fp16", "bf16x3": "bf16"}[precision]
    options = {"num_warps": 4, "num_stages": 3} | {x: constexprs[x] for x in OPTIONS if x in constexprs}
    constexprs = {name: value for name, value in constexprs.items() if name not in OPTIONS}
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
        else:
            signature[name] = argument_type(name, operand, constexprs)
            if signature[name].startswith("*") or name in ("padded", "columns_padded"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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


OPTIONS = ("num_warps", "num_stages")
OPERANDS = ("Q", "Q_LO", "K", "K_LO", "Q2", "Q2_LO", "K2", "K2_LO")
INT32_POINTERS = (
    "POS_BEGIN", "POS_END", "SELF_COLUMN", "ORDER", "BEST_TILE", "TABLE", "ABOVE", "COUNT", "COUNTS",
)  # fmt: skip
INT64_POINTERS = ("LABELS", "COLUMN_LABELS", "SOURCE", "INDEX", "TARGET_CLASS", "WHERE", "BITS", "SLOTS")
INTEGERS = (
    "n", "m", "padded", "columns_padded", "splits", "splits2", "row_start", "column_start", "d", "stride", "stride_w",
    "stride_out", "chunk", "blocks", "first_block", "copies", "bins", "capacity", "steps", "size", "group",
)  # fmt: skip


def argument_type(name: str, operand: str, constexprs: dict) -> str:
    """The type that the launches give an argument of this name."""
    if constexprs.get("USE_TMA") and name in OPERANDS:
        rows = constexprs["BLOCK_M" if name.startswith("Q") else "BLOCK_N"]
        return f"tensordesc<{operand}[{rows}, {constexprs.get('BLOCK_K', constexprs['HEAD_DIM'])}]>"
    if name in (*OPERANDS, "DS", "DS_LO", "HI", "LO"):
        return f"*{operand}"
    if name in INT32_POINTERS:
        return "*i32"
    if name in INT64_POINTERS:
        return "*i64"
    if name == "DEFINED":
        return "*i1"
    if name.isupper():
        return "*fp32"
    return "i32" if name in INTEGERS else "fp32"


def build_negatives(precision: str, width: int, kind: str, large: bool = False) -> list[dict]:
    """The kernels over all negatives, with the tiles that the table gives them."""
    from mettle.pairs.kernels.backward import negatives_backward, score_gradients_kernel
    from mettle.pairs.kernels.config import SUMMED_COLUMNS, NegativesConfig, select_config
    from mettle.pairs.kernels.forward import negatives_forward

    term = {"online": "threshold", "importance 1": "importance", "mined": "plain"}.get(kind, kind)
    importance, second = term == "importance", width if term in ("relative", "relative_raw") else 0
    picked = select_config(
        precision, width, second_head_dim=second, register_heavy=kind != "plain",
        two_numbers_per_end=importance or kind == "mined", large=large,
    )  # fmt: skip

    def config(tile) -> NegativesConfig:
        return NegativesConfig(
            tile, precision, width, second, term, square=kind == "importance 1", online=kind == "online",
            mined=kind == "mined",
        )  # fmt: skip

    symmetric = picked.forward.symmetric and kind not in ("online", "mined")
    made = config(picked.forward).forward_constexprs(has_second_sum=importance, symmetric=symmetric)
    found = [build("forward", negatives_forward, precision, made)]
    if picked.one_sided is not None:
        made = config(picked.one_sided).forward_constexprs(has_second_sum=importance, symmetric=False)
        found.append(build("forward one-sided", negatives_forward, precision, made))
    tile = picked.backward
    ends = {"second_sum_has_grad": importance, "differentiable_weights": term in ("threshold", "importance")}
    if picked.scores_in_memory:
        made = config(tile).score_gradients_constexprs(**ends, row_end=True, column_end=True)
        return [*found, build("scores", score_gradients_kernel, precision, made)]
    for flush_every in (0, SUMMED_COLUMNS // tile.block_n) if precision == "bf16x3" else (0,):
        which = [(True, True)]
        if flush_every and kind == "plain":
            which += [(True, False), (False, True)]
        for rows, columns in which:
            made = config(tile).backward_constexprs(flush_every=flush_every, **ends, row_end=rows, column_end=columns)
            name = f"backward flush={flush_every} rows={rows:d} columns={columns:d}"
            found.append(build(name, negatives_backward, precision, made) | {"flushes": bool(flush_every)})
    return found


def build_large(precision: str, width: int, kind: str) -> list[dict]:
    """The same with the tiles of large batches."""
    return build_negatives(precision, width, kind, large=True)


def build_positives(precision: str, width: int, kind: str) -> list[dict]:
    """The kernels over positives, which also end each row."""
    from mettle.pairs.kernels.backward import positives_backward
    from mettle.pairs.kernels.config import PositivesConfig
    from mettle.pairs.kernels.forward import positives_forward

    config = PositivesConfig(
        precision,
        width,
        kind,
        self_pairs="diagonal",
        weighted=True,
        numerator_only=True,
        debiased=True,
        hinge_form="hadsell",
    )
    forward = config.forward_constexprs(
        negative_term={"contrastive": "hinge", "circle": "circle"}.get(kind, "importance"), online=False,
        divide_by="weight", all_anchors=False, count_by_weight=False,
    )  # fmt: skip
    backward = config.backward_constexprs(differentiable_weights=True, row_end=True, column_end=True)
    return [
        build("forward", positives_forward, precision, forward),
        build("backward", positives_backward, precision, backward),
    ]


def build_rest(precision: str, width: int, kind: str) -> list[dict]:
    """Everything else: preparing rows, means, mining, histograms, class vectors."""
    from mettle.pairs.kernels import (
        class_softmax,
        forward,
        histograms,
        margin_loss,
        mining,
        nearest_vector,
        operands,
    )
    from mettle.pairs.kernels.config import (
        NegativesConfig,
        PositivesConfig,
        next_power_of_2,
        select_config,
        select_mining_tile,
    )

    def compile_kernel(entry: str, kernel, **constexprs) -> dict:
        return build(entry, kernel, precision, constexprs)

    block, tile = operands.select_row_block(width), select_config(precision, width).forward
    warps, rows = {"num_warps": block.num_warps}, {"HEAD_DIM": width, "BLOCK": block.columns, "ROWS": block.rows}
    nearest_tiles = nearest_vector.select_nearest_tiles(precision, select_config(precision, width))

    def nearest(tile) -> dict:
        return NegativesConfig(tile, precision, width).nearest_constexprs(3)

    mining_tile = select_mining_tile(precision, width)
    mined = mining_tile.constexprs(precision, width) | mining_tile.launch_options
    refine = {"SELF": True, "HEAD_DIM": width, "BLOCK": block.columns, "BLOCK_N": tile.block_n, "CHUNK": 32}
    pairs = tile.constexprs(precision, width) | tile.launch_options
    window = {"WINDOWS": 2, "WORDS": max(1, tile.block_n // 64), "WORD": 64}
    prepared = rows | {"NORMALIZE": True, "PRECISION": precision} | warps
    scores = []
    if precision == "bf16x3":  # evaluation counts scores in one precision
        scores = [
            compile_kernel("score histogram", histograms.score_histogram_kernel, **pairs),
            compile_kernel("score window", histograms.list_impostor_pairs_kernel, **pairs, **window),
        ]
    return [
        *scores,
        *(
            compile_kernel(f"prepare {ranking}", operands.prepare_kernel, **prepared, RANKING=ranking)
            for ranking in ("count", "search", "hash", "given")
        ),
        compile_kernel("hash labels", operands.hash_labels_kernel, SIZE=operands.HASH_BLOCK),
        compile_kernel(
            "normalize backward", operands.normalize_backward_kernel, **rows, **warps, NORMALIZE=True, MEAN=True
        ),
        compile_kernel("mean", forward.mean_kernel, SIZE=1024, num_warps=8),
        compile_kernel("shift", forward.shift_kernel, SIZE=64),
        build(
            "mining thresholds", forward.mining_threshold_kernel, precision,
            PositivesConfig(precision, width, "supcon_out", self_pairs="diagonal").threshold_constexprs(),
        ),
        compile_kernel("hardest tile", mining.block_max_kernel, **mined),
        compile_kernel("hardest pair", mining.refine_kernel, **refine, **warps),
        compile_kernel(
            "hardest backward", mining.batch_hard_backward_kernel,
            HEAD_DIM=width, BLOCK=next_power_of_2(width), ROWS=mining.BACKWARD_ROWS,
        ),
        compile_kernel(
            "class rows", class_softmax.normalize_classes_kernel, **rows, **warps, PRECISION=precision
        ),
        compile_kernel(
            "class rows backward", class_softmax.normalize_classes_backward_kernel,
            BLOCK=block.columns, ROWS=block.rows, **warps,
        ),
        compile_kernel("class target", class_softmax.target_cosine_kernel, **rows, **warps),
        compile_kernel("class target backward", class_softmax.target_cosine_backward_kernel, **rows, **warps),
        compile_kernel("class ranges", class_softmax.class_ranges_kernel, SIZE=class_softmax.SMALL_BLOCK),
        compile_kernel(
            "class log-sum-exp", class_softmax.class_logsumexp_kernel, ONLINE=True, SIZE=class_softmax.SMALL_BLOCK
        ),
        compile_kernel("class row state", class_softmax.class_row_state_kernel, ONLINE=False, SIZE=1024, num_warps=8),
        compile_kernel("nearest negatives", nearest_vector.nearest_negatives_kernel, **nearest(nearest_tiles.forward)),
        compile_kernel("nearest gradients", nearest_vector.nearest_gradients_kernel, **nearest(nearest_tiles.backward)),
        compile_kernel("margin", margin_loss.margin_loss_kernel, MODE="keep", SIZE=margin_loss.BLOCK),
    ]  # fmt: skip


BUILDERS = {"negatives": build_negatives, "large": build_large, "positives": build_positives, "rest": build_rest}


def case_name(case: Case) -> str:
    """As ``--only`` takes it."""
    return "/".join(str(part) for part in case if part != "")


def fingerprint_case(case: Case) -> list[dict]:
    """All kernels of one case, compiled."""
    what, precision, width, kind = case
    about = {"precision": precision, "width": width} | ({"kind": kind} if kind else {})
    return [
        one | about | {"entry": f"{case_name(case)}/{one['entry']}"} for one in BUILDERS[what](precision, width, kind)
    ]


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
    parser.add_argument(
        "--only", metavar="CASES", help="only these, by comma: negatives/fp16/128/plain,rest/bf16x3/128"
    )
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
