"""One rank's share of a fused loss on one GPU, beside the whole batch: what a GPU of several has to do per step.

    python benchmarks/gpu_ranks.py OUT              n = 65,536, d = 128, a quarter of the rows: OUT/gpu_ranks.json
    python benchmarks/gpu_ranks.py OUT --rows 16384 --dim 256 --ranks 8
    TRITON_INTERPRET=1 python benchmarks/gpu_ranks.py OUT --rows 96 --dim 12     without a GPU: checks the numbers only

Three steps of forward + backward from raw embeddings are timed in turn, CUDA events, medians of rounds; beside them
stands what torch's profiler counts of kernels and copies, for a host that is behind makes a GPU wait between them:

    whole      the batch with itself, as one process computes it: every pair is visited once in the forward pass
    rank       the rows of one rank against all columns; the statistics of the other ranks' rows are given
    both ends  the same rows without them: gradients of the rows and of all columns, to be summed over ranks

A rank visits every pair of its rows, so of R ranks each takes at least 3 / (2.5 R) of the whole: 0.30 for four. Before
anything is timed, the gradients of all ranks together are compared with that of the whole batch.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mettle.difficulty import Importance, Threshold
from mettle.losses import InfoNCE, SupCon
from mettle.pairs.kernels import KernelInputs, LoweredSpec, lower_loss
from mettle.pairs.kernels.function import default_precision, evaluate_spec
from mettle.pairs.kernels.rank_rows import RankRowsCall, evaluate_rank_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSSES = {
    "SupCon": SupCon(0.1),
    "DA-SupCon": SupCon(0.1, difficulty=Threshold()),
    "SupCon, t 0.01": SupCon(0.01),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
}
DTYPES = {"half": torch.float16, "float32": torch.float32} if DEVICE == "cuda" else {"float32": torch.float32}
WITHIN = {"half": 2e-3, "float32": 2e-4}


def draw(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embeddings in mixed order, four of each label."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, d, generator=generator).to(DEVICE, dtype)
    return z, (torch.arange(n)[torch.randperm(n, generator=generator)] // 4).to(DEVICE)


def lower(loss, z: Tensor, y: Tensor) -> LoweredSpec:
    found = lower_loss(loss, loss.difficulty, KernelInputs(z, y))
    assert isinstance(found, LoweredSpec), found
    return found


def split_rows(n: int, ranks: int) -> list[slice]:
    """The rows of every rank, as many for each up to one."""
    return [slice(n * rank // ranks, n * (rank + 1) // ranks) for rank in range(ranks)]


def all_states(spec: LoweredSpec, z: Tensor, y: Tensor, parts: list[slice]) -> Tensor:
    """What every rank tells the others."""
    found = []
    for part in parts:
        number = torch.arange(part.start, part.stop, dtype=torch.int32, device=z.device)
        call = RankRowsCall(spec, y[part].contiguous(), y, None, default_precision(spec, z), None, number)
        values, _ = call.forward(z[part].contiguous(), z)
        found.append(call.gradient_state(torch.full_like(values, 1 / len(z))))
    return torch.cat(found)


def make_steps(spec: LoweredSpec, z: Tensor, y: Tensor, parts: list[slice], states: Tensor) -> dict[str, Callable]:
    """A step of each kind; the rank is the last one."""
    part, leaf = parts[-1], z.clone().requires_grad_()
    own, labels = z[part].clone().requires_grad_(), y[part].contiguous()
    number = torch.arange(part.start, part.stop, dtype=torch.int32, device=z.device)
    columns = z.clone().requires_grad_()

    def whole() -> tuple[Tensor, ...]:
        return torch.autograd.grad(evaluate_spec(spec, leaf, y).mean, leaf)

    def rank() -> tuple[Tensor, ...]:
        values, _ = evaluate_rank_rows(spec, own, labels, (z, y), part, lambda state: states)
        return torch.autograd.grad(values.sum() / len(z), own)

    def both_ends() -> tuple[Tensor, ...]:
        found = evaluate_spec(spec, own, labels, (columns, y), self_column=number)
        return torch.autograd.grad(found.values.sum() / len(z), (own, columns))

    return {"whole": whole, "rank": rank, "both ends": both_ends}


def compare(spec: LoweredSpec, z: Tensor, y: Tensor, parts: list[slice], states: Tensor) -> float:
    """How far the gradients of all ranks are from that of the whole batch, as a share of its length."""
    leaf = z.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(evaluate_spec(spec, leaf, y).mean, leaf)
    found = []
    for part in parts:
        own = z[part].clone().requires_grad_()
        values, _ = evaluate_rank_rows(spec, own, y[part].contiguous(), (z, y), part, lambda state: states)
        found += torch.autograd.grad(values.sum() / len(z), own)
    return float((torch.cat(found).double() - wanted.double()).norm() / wanted.double().norm())


def time_steps(steps: dict[str, Callable], rounds: int, count: int) -> dict[str, float]:
    """Milliseconds of each kind of step, medians of rounds that take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3):
        for step in steps.values():
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                step()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / count)
    return {name: round(statistics.median(found), 4) for name, found in times.items()}


def time_kernels(steps: dict[str, Callable], count: int = 10) -> dict[str, float]:
    """Milliseconds that the GPU is busy in each kind of step."""
    found = {}
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                step()
            torch.cuda.synchronize()
        busy = sum(event.self_device_time_total for event in profiler.key_averages())
        found[name] = round(busy / 1000 / count, 4)
    return found


def measure(n: int, d: int, ranks: int, rounds: int) -> list[dict]:
    rows = []
    for kind, dtype in DTYPES.items():
        z, y = draw(n, d, dtype)
        parts = split_rows(n, ranks)
        for name, loss in LOSSES.items():
            spec = lower(loss, z, y)
            states = all_states(spec, z, y, parts)
            row = {"loss": name, "dtype": kind, "n": n, "d": d, "ranks": ranks}
            row["gradient differs by"] = compare(spec, z, y, parts, states)
            assert row["gradient differs by"] < WITHIN[kind], row
            steps = make_steps(spec, z, y, parts, states)
            if DEVICE == "cuda":
                row |= time_steps(steps, rounds, 5)
                row["share"] = round(row["rank"] / row["whole"], 3)
                row["share of both ends"] = round(row["both ends"] / row["whole"], 3)
                row["kernels"] = time_kernels(steps)
                row["share of kernels"] = round(row["kernels"]["rank"] / row["kernels"]["whole"], 3)
            else:
                for step in steps.values():
                    step()
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    rows = measure(given.rows, given.dim, given.ranks, given.rounds)
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "triton's interpreter"
    found = {"device": device, "torch": torch.__version__, "rows": rows}
    (given.out / "gpu_ranks.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
