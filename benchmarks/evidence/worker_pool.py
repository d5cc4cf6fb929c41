"""Jobs over a few workers on one device, against a deadline; every result is written when it comes.

What a step costs is measured first, all workers at once; from that follows how long everybody trains. Methods with
candidates try them at the first seed; the choice is made on validation, and what was chosen runs at all other seeds.
With ``workers = 0`` the jobs run one after the other in a thread of this process.
"""

import json
import multiprocessing
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mettle.train import Callback, TrainingState


@dataclass(frozen=True)
class Job:
    """One training run: a method, a seed, which of its candidates; or the judging of a kept one."""

    method: str
    seed: int
    candidate: int = 0
    steps: int = 0
    kind: str = "train"  # "try": validation only, outputs are kept; "judge": test of kept outputs


class Study(Protocol):
    """What a study says of itself."""

    name: str
    methods: dict[str, tuple[dict[str, Any], ...]]  # candidates of each method: one is used, several are tried
    steps: int  # at most so many
    least: int  # fewer make no sense
    seeds: int
    workers: int

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Decode, once."""
        ...

    def load(self, cache: Path) -> Any:
        """In a worker: everything that jobs need."""
        ...

    def time_steps(self, data: Any, clock: Callback, device: str) -> None:
        """Train the plainest method until the clock asks to stop."""
        ...

    def step_cost(self, method: str) -> float:
        """What a step of a method costs, in steps of the plainest."""
        ...

    def run(self, data: Any, job: Job, cache: Path, device: str) -> dict[str, Any]:
        """``rows`` of metrics by name; of a candidate ``score`` (validation, higher is better)."""
        ...


class StepClock(Callback):
    """Times steps for some seconds after the first few, while all workers do the same; then asks the run to stop."""

    def __init__(self, warm: int, seconds: float, meet: Callable[[], None] = lambda: None):
        self.warm, self.seconds, self.meet = warm, seconds, meet
        self.began, self.seconds_per_step = 0.0, float("nan")

    def on_step(self, state: TrainingState) -> None:
        """Start after the first steps, stop when the time is over."""
        if state.step < self.warm:
            return
        if state.step == self.warm:
            self.meet()
            self.began = time.perf_counter()
        elif time.perf_counter() - self.began >= self.seconds:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds_per_step = (time.perf_counter() - self.began) / (state.step - self.warm)
            state.stop_requested = True


@dataclass
class Limits:
    """How long everything may take."""

    began: float
    seconds: float  # for training jobs, all together
    deadline: float  # from ``began``; what has not started by then is not run
    record: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.began + self.deadline - time.perf_counter()


def run_study(study: Study, seeds: list[int], cache: Path, device: str, quick: bool, limits: Limits, out: Path) -> None:
    """The whole study, into ``limits.record`` and, after every job, into ``out``."""
    record = limits.record
    record |= {
        "study": study.name,
        "seeds": seeds,
        "device": describe_device(device),
        "torch": torch.__version__,
        "quick": quick,
        "workers": study.workers,
    }
    record |= {"candidates": study.methods, "jobs": [], "errors": [], "not_run": [], "chosen": {}}
    pool = WorkerPool(study, cache, device, quick)
    try:
        step = pool.measure_step(limits)
        several = [m for m, c in study.methods.items() if len(c) > 1]
        first, rest = plan_jobs(study, seeds)
        units = sum(study.step_cost(job.method) for job in [*first, *rest])
        afford = int(min(limits.seconds, limits.left()) * pool.rate / units)
        steps = 4 if quick else max(study.least, min(study.steps, afford))
        record |= {"seconds_per_step": step, "steps_per_second": pool.rate, "affordable": afford, "steps": steps}
        print_now(
            f"{study.name}: {1e3 * step:.1f} ms a step, {pool.rate:.0f} steps/s in all, "
            f"{len(first) + len(rest)} runs of {steps} steps"
        )
        pool.run_jobs([Job(j.method, j.seed, j.candidate, steps, j.kind) for j in first], limits, out)
        chosen = {m: choose_candidate(record["jobs"], m) for m in several}
        record["chosen"] = {m: c for m, c in chosen.items() if c is not None}
        (cache / "chosen.json").write_text(json.dumps(record["chosen"]))
        judged = [Job(m, seeds[0], c, steps, "judge") for m, c in chosen.items() if c is not None]
        rest = [Job(j.method, j.seed, chosen.get(j.method) or 0, steps, j.kind) for j in rest]
        pool.run_jobs([*judged, *rest], limits, out)
    except Exception:
        record["errors"].append({"job": "study", "error": traceback.format_exc()})
    finally:
        pool.close()
        record["seconds"] = time.perf_counter() - limits.began
        write_record(record, out)


def plan_jobs(study: Study, seeds: list[int]) -> tuple[list[Job], list[Job]]:
    """What runs before the choice and what after it; seed by seed, so that a short run is a balanced one."""
    tuned = [m for m, c in study.methods.items() if len(c) > 1]
    first = [Job(m, seeds[0], k, kind="try") for m in tuned for k in range(len(study.methods[m]))]
    rest = [Job(m, s) for s in seeds for m in study.methods if not (s == seeds[0] and m in tuned)]
    # Long runs first within a seed: the last ones to finish should be short.
    return first, sorted(rest, key=lambda job: (seeds.index(job.seed), -study.step_cost(job.method)))


def choose_candidate(jobs: Iterable[dict[str, Any]], method: str) -> int | None:
    """The candidate with the best validation score."""
    tried = [(j["score"], -j["candidate"]) for j in jobs if j["method"] == method and j.get("score") is not None]
    return -max(tried)[1] if tried else None


class WorkerPool:
    """Worker processes, each with the data; started fresh, because a fork cannot use CUDA."""

    def __init__(self, study: Study, cache: Path, device: str, quick: bool):
        context = multiprocessing.get_context("spawn")
        self.study, self.count = study, max(study.workers, 1)
        self.workers: list[Any]
        self.tasks: Any
        self.results: Any
        self.barrier: Any
        if study.workers:
            self.tasks, self.results = context.Queue(), context.Queue()
            self.barrier = context.Barrier(self.count)  # held: the workers look it up by name
        else:
            self.tasks, self.results, self.barrier = queue.Queue(), queue.Queue(), threading.Barrier(1)
        setup = (study, cache, device, quick, self.tasks, self.results, self.barrier)
        if study.workers:
            self.workers = [context.Process(target=work_alone, args=setup, daemon=True) for _ in range(self.count)]
        else:
            self.workers = [threading.Thread(target=work, args=setup, daemon=True)]
        for worker in self.workers:
            worker.start()
        self.rate, self.times = 0.0, {}

    def measure_step(self, limits: Limits) -> float:
        """Mean seconds a step, all workers busy; ``rate`` is how many steps they do together."""
        found = []
        while len(found) < self.count and limits.left() > 0:
            try:
                found.append(self.results.get(timeout=5)[1])
            except queue.Empty:
                if not any(w.is_alive() for w in self.workers):
                    raise RuntimeError("all workers ended before they had measured a step") from None
        fine = [f for f in found if isinstance(f, float)]
        limits.record["errors"] += [{"job": "start", "error": f} for f in found if not isinstance(f, float)]
        if not fine:
            raise RuntimeError("no worker could make a step")
        self.rate = sum(1 / f for f in fine)
        return sum(fine) / len(fine)

    def run_jobs(self, jobs: list[Job], limits: Limits, out: Path) -> None:
        """All these jobs, as long as there is time; none is started that would not end in time."""
        record, waiting, running = limits.record, list(jobs), {}
        while waiting or running:
            alive = sum(w.is_alive() for w in self.workers)
            while waiting and len(running) < alive and self.estimate_seconds(waiting[0], limits) < limits.left():
                job = waiting.pop(0)
                running[job] = time.perf_counter()
                self.tasks.put(job)
            if not running or limits.left() <= 0 or not alive:
                break
            try:
                job, found, spent = self.results.get(timeout=min(2.0, max(limits.left(), 0.1)))
            except queue.Empty:
                continue
            running.pop(job, None)
            self.times.setdefault((job.method, job.kind), []).append(spent)
            entry = {k: v for k, v in asdict(job).items()} | {"seconds": spent} | found
            record["errors" if "error" in found else "jobs"].append(entry)
            text = found.get("error", found.get("rows") or {"score": found.get("score")})
            print_now(
                f"{limits.deadline - limits.left():6.0f} s  {job.method} seed {job.seed} candidate {job.candidate} "
                f"{job.kind} {spent:.0f} s: {summarize(text)}"
            )
            write_record(record, out)
        record["not_run"] += [asdict(job) for job in [*running, *waiting]]

    def estimate_seconds(self, job: Job, limits: Limits) -> float:
        """Seconds that a job will take: as the last one of its kind, else from the cost of a step."""
        known = self.times.get((job.method, job.kind))
        if known:
            return known[-1]
        if job.kind == "judge":
            return 5.0
        return job.steps * self.study.step_cost(job.method) * limits.record["seconds_per_step"]

    def close(self) -> None:
        """No more jobs; a process that is still busy is stopped."""
        for _ in self.workers:
            self.tasks.put(None)
        for worker in self.workers:
            worker.join(timeout=3)
            if worker.is_alive() and hasattr(worker, "terminate"):
                worker.terminate()
        if hasattr(self.tasks, "cancel_join_thread"):
            self.tasks.cancel_join_thread()


def work_alone(study: Study, cache: Path, device: str, *rest: Any) -> None:
    """`work` in a process of its own, which shares the processor with others."""
    if device.startswith("cuda"):
        torch.set_num_threads(3)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    work(study, cache, device, *rest)


def work(study: Study, cache: Path, device: str, quick: bool, tasks: Any, results: Any, barrier: Any) -> None:
    """A worker: load, measure a step together with the others, then job after job."""
    try:
        data = study.load(cache)

        def meet() -> None:
            try:
                barrier.wait(120)
            except threading.BrokenBarrierError:
                return  # somebody is late or gone: measured alone, then

        clock = StepClock(*((1, 0.5) if quick else (25, 4.0)), meet)
        study.time_steps(data, clock, device)
        results.put(("step", clock.seconds_per_step))
    except Exception:
        barrier.abort()
        results.put(("step", traceback.format_exc()))
        return
    while (job := tasks.get()) is not None:
        began = time.perf_counter()
        try:
            found = study.run(data, job, cache, device)
        except Exception:
            found = {"error": traceback.format_exc()[-2000:]}
        results.put((job, found, time.perf_counter() - began))
        if "CUDA error" in found.get("error", ""):
            return  # such a process cannot go on


def write_record(record: dict[str, Any], out: Path) -> None:
    """Replace the file by what is known now."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, default=float) + "\n")
    part.replace(out)


def print_now(text: str) -> None:
    """A line now."""
    print(text, flush=True, file=sys.stdout)


def summarize(found: Any) -> str:
    """Numbers of a result on one line."""
    if isinstance(found, str):
        return found.strip().splitlines()[-1][:160]
    flat = [(f"{row} " if isinstance(values, dict) else "") + ", ".join(
        f"{k} {v:.3f}" for k, v in (values.items() if isinstance(values, dict) else [(row, values)])
        if isinstance(v, float)) for row, values in found.items()]  # fmt: skip
    return " | ".join(flat)


def describe_device(device: str) -> str:
    """The device in words."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
