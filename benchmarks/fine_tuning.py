"""Fine-tuning on birds: species never seen, with the pretrained network as it is and after a shipped recipe.

    python benchmarks/fine_tuning.py FOLDER WEIGHTS --choose      candidates, judged on twice 20 training species
    python benchmarks/fine_tuning.py FOLDER WEIGHTS --seeds 3     the recipe on all hundred, judged on the other hundred

FOLDER holds cub200_96.npz (CUB-200-2011, crops of 96 pixels), WEIGHTS is a file of torchvision's MobileNetV2. The
standard split: species 0 to 99 train, 100 to 199 test; Recall@1 of every test image among all others. Settings were
chosen on species 80 to 99 after training on the other eighty, and on 60 to 79 likewise (``--choose``); test species
were not looked at for that. Every finished run is a line of ``--output``; what is there is not run again, so the
command can be stopped at any time, or by ``--seconds``, and goes on where it was, and several of them with other
``--candidates`` can share a GPU. It runs where only torch, torchvision, NumPy and Pillow are installed (`stand_ins`):
networks are trained and measured as `mettle train` does it, without a run folder.
"""

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from photo_folder import unpack_images
from stand_ins import MISSING
from strong_loop import read_lines

from mettle.data import Samples
from mettle.data.inputs import ImageArray
from mettle.errors import NumericError
from mettle.evaluate import retrieval
from mettle.model import embed
from mettle.start.backbone import build_frozen_backbone
from mettle.train import Schedule, load, run_loop
from mettle.train.callbacks.guards import CollapseGuard, DivergenceGuard
from mettle.train.datamodule import fill_settings
from mettle.train.from_recipe import build_method_and_loader
from mettle.train.methods.supervised import start_class_vectors
from mettle.train.optim import build_shape
from mettle.train.recipe import Recipe
from mettle.train.starting_weights import follow_starting_weights
from mettle.train.step_graph import record_steps
from mettle.train.trainer import count_steps

SIDE = 96
RECIPE = "fine-tune"
FROZEN = {"frozen": False, "frozen, mirror image": True}  # the network as it is, and where it sees both images
HELD_OUT = (80, 60)  # the first of twenty training species that settings are chosen on
PAIRS = {"kind": "MultiSimilarity"}
PROXIES = {"kind": "ProxyAnchor", "margin": 0.1, "alpha": 32.0}
AVERAGE = {"train.ema": 0.99, "train.ema_start": 0.5}
FEATURES = {"model.head": "none", "model.dim": 1280}
CANDIDATES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "without the mirror image": {"model.flip": False},
    "32 classes of 4": {"batch.classes": 32, "batch.samples": 4},
    "average of the weights": AVERAGE,
    "features instead of a head": FEATURES,
    "features, average": FEATURES | AVERAGE,
    "distillation of similarities": {"train.ema": 0.99, "train.ema_start": 0.25, "train.distill": 1.0},
    "GeM": {"model.pool": "gem"},
    "1024 dimensions": {"model.dim": 1024},
    "two spaces": {
        "model.neck": "batchnorm",
        "loss": {"kind": "WeightedSum", "losses": [PAIRS, PROXIES], "spaces": ["before", "after"]},
    },
    "pairs": {"loss": PAIRS, "train.loss_rate": 1.0},
    "20 epochs": {"train.epochs": 20},
    "60 epochs": {"train.epochs": 60},
    "frozen for 2 epochs": {"train.freeze": "all", "train.freeze_epochs": 2},
    "rate of the head in the backbone": {"train.backbone_rate": 1.0},
    "a quarter of it": {"train.backbone_rate": 0.25},
    "rates by layer": {"train.layer_decay": 0.9},
    "class vectors faster": {"train.loss_rate": 100.0},
    "more weight decay": {"train.weight_decay": 0.1},
    "crops of the larger part": {"batch.augment": "large"},
    "crops of small parts": {"batch.augment": "small"},
    "mirrored only": {"batch.augment": "mirror"},
}


def load_birds(folder: Path, held_out: int | None) -> Samples:
    """All birds with the standard split, or those of the training species, with twenty from ``held_out`` on as test."""
    arrays = dict(np.load(folder / "cub200_96.npz"))
    label = arrays["label"].astype(int)
    at = np.arange(len(label)) if held_out is None else np.flatnonzero(label < 100)
    first, last = (100, 199) if held_out is None else (held_out, held_out + 19)
    split = np.where((label[at] >= first) & (label[at] <= last), 2, 0).astype(np.int8)
    images = ImageArray(unpack_images(arrays).read(at))
    return replace(Samples.of(images, label[at], source_name="cub200_96"), split=split)


def build_recipe(weights: Path, samples: Samples, seed: int = 0, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The shipped recipe with these weights, at the size of the crops and with mean and spread of ImageNet."""
    model = {"model.backbone": "torchvision/mobilenet_v2", "model.weights": str(weights)}
    data = {"data.size": SIDE, "data.crop": 1.0}
    recipe = load(RECIPE).with_values({**model, **data, "seed": seed, **(changes or {})})
    return fill_settings(follow_starting_weights(recipe)[0], samples)[0]


def recall(model: Any, samples: Samples) -> float:
    """Recall@1 of the held-out species, in percent."""
    test = samples.part("test")
    return round(100 * float(retrieval(embed(model, test), test.labels).recall[1]), 2)


def train_recipe(recipe: Recipe, samples: Samples, steps: int | None) -> tuple[Any, int]:
    """The trained network of a recipe, and after how many steps; ``steps`` in place of its epochs is for a try."""
    method, loader = build_method_and_loader(recipe, samples)
    setup = recipe.train
    steps = steps or (setup.steps if setup.epochs is None else count_steps(loader, setup.epochs))
    start_class_vectors(method, samples.part("train"))
    guards = [
        DivergenceGuard(None, setup.log_every),
        CollapseGuard(
            setup.collapse_spread,
            setup.collapse_gap,
            setup.collapse_patience,
            every=setup.log_every,
            warmup=setup.warmup,
        ),
    ]
    recording = record_steps(method, lambda note: print(note, flush=True)) if setup.cuda_graph else nullcontext()
    with recording:
        run_loop(method, loader, Schedule(steps, setup.rate, build_shape(setup.schedule, setup.warmup)), guards)
    return method.final_module(), steps


def main() -> None:
    """Run what is missing, and print what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--choose", action="store_true", help="judge candidates on training species")
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), help="only these")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int, help="optimization steps of every run, for a try")
    parser.add_argument("--cuda-graph", action="store_true", help="as train.cuda_graph: record a step and replay it")
    parser.add_argument("--output", type=Path, default=Path("fine_tuning.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so long")
    options = parser.parse_args()
    began = time.perf_counter()
    if MISSING.missing:
        print(f"without {', '.join(sorted(MISSING.missing))}", flush=True)

    def add(line: dict[str, Any]) -> None:
        with options.output.open("a") as file:
            file.write(json.dumps(line | {"torch": torch.__version__}) + "\n")
        print(json.dumps(line), flush=True)

    def is_there(key: Mapping[str, Any]) -> bool:
        return any(key.items() <= line.items() for line in read_lines(options.output))

    names = options.candidates or (list(CANDIDATES) if options.choose else ["as shipped"])
    for held_out in HELD_OUT if options.choose else (None,):
        samples = load_birds(options.folder, held_out)
        for name, flip in FROZEN.items():
            frozen = {"held_out": held_out, "candidate": name}
            if not is_there(frozen):
                recipe = build_recipe(options.weights, samples, changes={"model.flip": flip})
                add({**frozen, "recall@1": recall(build_frozen_backbone(recipe, samples), samples)})
        for seed, name in product(range(options.seeds), names):
            key = {"held_out": held_out, "epochs": options.epochs, "steps": options.steps, "candidate": name}
            key |= {"seed": seed}
            if is_there(key) or time.perf_counter() - began > options.seconds:
                continue
            changes = CANDIDATES[name] | {"train.cuda_graph": options.cuda_graph}
            changes |= {} if options.epochs is None else {"train.epochs": options.epochs}
            recipe = build_recipe(options.weights, samples, seed, changes)
            since = time.perf_counter()
            try:
                model, steps = train_recipe(recipe, samples, options.steps)
            except NumericError as problem:  # a collapse, say; other candidates may do better
                print(f"{name}, seed {seed}: {problem}", flush=True)
                continue
            spent = {"took": steps, "seconds": round(time.perf_counter() - since, 1)}
            add({**key, "recall@1": recall(model, samples), **spent})
    lines = read_lines(options.output)
    lines = [line for line in lines if (line["held_out"] is not None) == options.choose]
    lines = [line for line in lines if line["candidate"] in FROZEN or line["steps"] == options.steps]
    for name in [*FROZEN, *names]:
        own = [line["recall@1"] for line in lines if line["candidate"] == name]
        if own:
            print(f"{name}: {np.mean(own):.2f} {own}")


if __name__ == "__main__":
    main()
