"""Short trainings of every method on synthetic pictures, by one process or as one of several ranks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mettle.data.rank_share import RankShare
from mettle.train.datamodule import prepare_training_data
from mettle.train.from_recipe import build_method_and_loader
from mettle.train.recipe import Recipe, parse_recipe
from tests.train.conftest import make_npz

PK = {"classes": 4, "samples": 2}
VIEWS = {"size": 7, "views": 2}
SLOW = {"window": 4, "generator_rate": 1e-6, "head_rate": 1e-3}
# Name: method, loss, batch, further tables.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "supcon": ("supervised", {"kind": "SupCon"}, PK, {}),
    "supcon odd batch": ("supervised", {"kind": "SupCon"}, {"classes": 3, "samples": 3}, {}),
    "arcface": ("supervised", {"kind": "ArcFace"}, PK, {}),
    "wcl": ("two-encoder", {"kind": "InfoNCE", "prior": 0.1, "difficulty": {"kind": "Relative"}}, VIEWS, {}),
    "hdml-npair": ("hardness-aware", {"kind": "NPair"}, PK, {"synthesis": {**SLOW, "alpha": 7.0, "l2": 0.01}}),
}
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "hdml-triplet": (
        "hardness-aware",
        {"kind": "Triplet", "squared": True},
        PK,
        {"synthesis": SLOW, "train": {"rate": 1e-3}},
    ),
    "hdml-supcon": ("hardness-aware", {"kind": "SupCon"}, PK, {"synthesis": SLOW, "train": {"rate": 1e-3}}),
    "queue": ("supervised", {"kind": "SupCon"}, {**PK, "queue": 20, "queue_start": 0.2}, {}),
    "momentum queue": (
        "two-encoder",
        {"kind": "InfoNCE"},
        {**VIEWS, "queue": 100, "queue_encoder": "momentum", "queue_momentum": 0.9},
        {},
    ),
    "simclr": ("two-encoder", {"kind": "InfoNCE"}, VIEWS, {}),
    "wcl shuffled": (
        "two-encoder",
        {"kind": "InfoNCE", "prior": 0.1, "difficulty": {"kind": "Relative"}},
        VIEWS,
        {"biased": {"weights": "shuffled"}},
    ),
    "similarity": ("similarity", {"kind": "SimilarityClassification"}, {"size": 7}, {"data": {"pairs": "same-class"}}),
    "triplets": ("similarity", {"kind": "SimilarityRanking"}, {"size": 7}, {"data": {"triplets": "same-class"}}),
    "jtt": ("jtt", {"kind": "NormFace"}, {"size": 7}, {}),
    "neck": (
        "supervised",
        {
            "kind": "WeightedSum",
            "losses": [{"kind": "Triplet", "mining": "hardest"}, {"kind": "NormFace"}],
            "spaces": ["before", "after"],
        },
        PK,
        {"model": {"neck": "batchnorm", "embedding": "after"}},
    ),
    "distill": ("supervised", {"kind": "SupCon"}, PK, {"train": {"ema": 0.9, "distill": 1.0}}),
    "adaptive": ("supervised", {"kind": "SupCon", "difficulty": {"kind": "AdaptiveThreshold"}}, PK, {}),
    "random mining": ("supervised", {"kind": "Triplet", "mining": "random"}, PK, {}),
    "accumulate": ("supervised", {"kind": "SupCon"}, PK, {"train": {"accumulate": 2}}),
    "clip": ("supervised", {"kind": "ArcFace"}, PK, {"train": {"clip": 0.1, "ema": 0.9}}),
}


def make_recipe(
    folder: Path,
    name: str,
    optimizer: str = "SGD",
    own_loss: dict[str, Any] | None = None,
    cached: int = 0,
    **train: Any,
) -> Recipe:
    """The recipe of a case on the pictures in this folder, perhaps with another loss."""
    method, loss, batch, more = (CASES | MORE)[name]
    rate = 0.02 if optimizer == "SGD" else 1e-3
    table: dict[str, Any] = {
        "data": {"source": str(folder / "patterns.npz")},
        "batch": {**batch, "augment": "mild", "cached": cached},
        "model": {"width": 4, "depth": 2, "dim": 8},
        "loss": own_loss or loss,
        "train": {"method": method, "steps": 20, "rate": rate, "optimizer": optimizer, "device": "cpu", **train},
    }
    for key, value in more.items():
        table[key] = {**table.get(key, {}), **value}
    return parse_recipe(table)


def prepare(folder: Path) -> None:
    """The pictures that all cases train on."""
    make_npz(folder / "patterns.npz", classes=16)


def train_case(
    folder: Path,
    name: str,
    share: RankShare,
    *,
    optimizer: str = "SGD",
    steps: int = 12,
    double: bool = True,
    norms: bool = True,
    **more: Any,
) -> dict[str, torch.Tensor]:
    """The losses of every step and all weights at the end."""
    recipe = make_recipe(folder, name, optimizer, **more)
    samples, tuples, _ = prepare_training_data(recipe)
    method, loader = build_method_and_loader(recipe, samples, tuples)
    loader = replace(loader, share=share, keep_raw=False)  # inputs are made double below
    if not norms:
        leave_out_batch_norms(method)
    if double:
        averages = [] if method.average is None else method.average.averages.values()
        for module in (*method.modules.values(), *averages):
            module.double()
    losses, count = [], recipe.train.accumulate
    batches = list(loader.batches(0, steps * count))
    for step in range(steps):
        group = batches[step * count : (step + 1) * count]
        if double:
            group = [replace(batch, inputs=batch.inputs.double()) for batch in group]
        found = method.step(group, recipe.train.rate, step / steps)
        assert found.applied
        losses.append(found.numbers.mean_losses["model"])
    tensors = [
        x.detach().double().flatten() for module in method.modules.values() for x in module.state_dict().values()
    ]
    return {"losses": torch.tensor(losses, dtype=torch.float64), "weights": torch.cat(tensors)}


def leave_out_batch_norms(method: Any) -> None:
    """Networks whose rows do not see each other."""
    for network in (method.model, getattr(method, "biased", None)):
        for part in [] if network is None else list(network.backbone.modules()):
            for name, child in part.named_children():
                if isinstance(child, torch.nn.BatchNorm2d):
                    setattr(part, name, torch.nn.Identity())


def work(rank: int, ranks: int, folder: Path, jobs: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Train all jobs as one of the ranks, and keep what came out."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{ranks}", rank=rank, world_size=ranks)
    for k, (name, options) in enumerate(jobs):
        found = train_case(folder, name, RankShare(rank, ranks), **options)
        save_file(found, folder / f"{ranks}-{rank}-{k}.safetensors")
    if ranks > 1:
        dist.destroy_process_group()
