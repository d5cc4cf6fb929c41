"""CIFAR-10 and Tiny-ImageNet-100 at 32 pixels: pre-training without labels, then probes of frozen features."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence import data as sets
from benchmarks.evidence.contrastive import Setting, classified, frozen, units
from benchmarks.evidence.fit import resnet18
from benchmarks.evidence.worker_pool import Job

from mettle.data.transforms import find_preset


def small(shape: tuple[int, ...]):
    """ResNet-18 with a 3x3 stem at stride 2, and the two-layer head whose output is 128-d."""
    return resnet18(shape, stem="half", dim=128, head="mlp")


@dataclass(frozen=True)
class Small:
    """A set of 32-pixel pictures."""

    name: str
    file: str
    held_out: int  # of every class, for validation
    methods: dict[str, tuple[dict[str, Any], ...]]
    setting: Setting = field(default_factory=lambda: Setting(small, find_preset("small")))
    steps: int = 8000
    least: int = 300
    seeds: int = 3
    workers: int = 4

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Decode, and take validation from the end of every class."""
        keep = sets.thinned("label", 40) if quick else None
        x, columns = sets.decoded(folder / self.file, keep)
        last = 10 if quick else self.held_out
        columns = {"label": columns["label"], "split": sets.hold_out(columns["split"], columns["label"], last)}
        sets.save(cache, x, columns)

    def load(self, cache: Path, device: str) -> sets.Set:
        """The set on the device."""
        return sets.load(cache, device)

    def step(self, data: sets.Set) -> Callable[[int], None]:
        """For the clock."""
        return self.setting.step(data)

    def units(self, method: str) -> float:
        """What a step costs."""
        return units(method)

    def run(self, data: sets.Set, job: Job, cache: Path) -> dict[str, Any]:
        """Train and probe; WCL yields its biased encoder too."""
        method, told = self.setting.trained(job.method, data, job.seed, job.steps)
        nets = {job.method: method.model} | ({} if method.biased is None else {"biased": method.biased})
        rows, classes = {}, {}
        for name, model in nets.items():
            rows[name], found = classified(frozen(model, data), data)
            classes[name] = [round(v, 4) for v in found.per_class.values()]
        return {"rows": rows, "per_class": classes, **told}


def cifar(quick: bool) -> Small:
    """CIFAR-10, published hyper-parameters."""
    methods = {name: ({},) for name in ("wcl", "simclr", "dcl", "hcl", "constant")}
    return smaller(Small("cifar", "cifar10_jpeg/cifar10_jpeg.npz", 500, methods), quick)


def tiny(quick: bool) -> Small:
    """Tiny-ImageNet-100: as published for CIFAR-100."""
    methods = {name: ({},) for name in ("wcl", "simclr", "dcl")}
    study = Small("tiny", "tinyimagenet100_32/tinyimagenet100_32.npz", 50, methods)
    return smaller(replace(study, setting=replace(study.setting, prior=0.05)), quick)


def smaller(study: Small, quick: bool) -> Small:
    """A minute on a CPU instead."""
    if not quick:
        return study
    return replace(study, workers=1, seeds=2, setting=replace(study.setting, size=16))
