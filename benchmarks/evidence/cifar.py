"""CIFAR-10 and Tiny-ImageNet-100 at 32 pixels: pre-training without labels, then probes of frozen features."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence.contrastive import ContrastiveStudy, Setting, probe_labels
from benchmarks.evidence.study import (
    build_resnet18,
    choose_few,
    decode_npz,
    embed_parts,
    hold_out,
    save_samples,
)
from benchmarks.evidence.worker_pool import Job

from mettle.data import Samples
from mettle.data.transforms import find_preset
from mettle.model import Embedder


def build_network(shape: tuple[int, ...]) -> Embedder:
    """ResNet-18 with a 3x3 stem at stride 2, and the two-layer head whose output is 128-d."""
    return build_resnet18(shape, stem="half", dim=128, head="mlp")


@dataclass(frozen=True)
class SmallImages(ContrastiveStudy):
    """A set of 32-pixel pictures."""

    name: str
    file: str
    held_out: int  # of every class, for validation
    methods: dict[str, tuple[dict[str, Any], ...]]
    setting: Setting = field(default_factory=lambda: Setting(build_network, find_preset("small")))
    steps: int = 8000
    least: int = 300
    seeds: int = 3
    workers: int = 4

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Decode, and take validation from the end of every class."""
        x, columns = decode_npz(folder / self.file, choose_few("label", 40) if quick else None)
        last = 10 if quick else self.held_out
        split = hold_out(columns["split"], columns["label"], last)
        save_samples(cache, x, {"label": columns["label"], "split": split})

    def run(self, data: Samples, job: Job, cache: Path, device: str) -> dict[str, Any]:
        """Train and probe; WCL yields its biased encoder too."""
        method, trace = self.setting.train(job.method, data, job.seed, job.steps, device)
        networks = {job.method: method.model} | ({} if method.biased is None else {"biased": method.biased})
        rows, classes = {}, {}
        for name, model in networks.items():
            rows[name], found = probe_labels(embed_parts(model, data), data)
            classes[name] = [round(v, 4) for v in found.per_class.values()]
        return {"rows": rows, "per_class": classes, **trace}


def cifar_study(quick: bool) -> SmallImages:
    """CIFAR-10, published hyper-parameters."""
    methods = {name: ({},) for name in ("wcl", "simclr", "dcl", "hcl", "constant")}
    return shrink(SmallImages("cifar", "cifar10_jpeg/cifar10_jpeg.npz", 500, methods), quick)


def tiny_study(quick: bool) -> SmallImages:
    """Tiny-ImageNet-100: as published for CIFAR-100."""
    methods = {name: ({},) for name in ("wcl", "simclr", "dcl")}
    study = SmallImages("tiny", "tinyimagenet100_32/tinyimagenet100_32.npz", 50, methods)
    return shrink(replace(study, setting=replace(study.setting, prior=0.05)), quick)


def shrink(study: SmallImages, quick: bool) -> SmallImages:
    """A minute on a CPU instead."""
    if not quick:
        return study
    return replace(study, workers=1, seeds=2, setting=replace(study.setting, size=16))
