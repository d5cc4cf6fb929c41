"""Fine-tuning on birds: species never seen, with the pretrained network as it is and after a shipped recipe.

    python benchmarks/fine_tuning.py FOLDER WEIGHTS --choose      candidates, judged on 20 of the training species
    python benchmarks/fine_tuning.py FOLDER WEIGHTS --seeds 3     the recipe on all hundred, judged on the other hundred

FOLDER holds cub200_96.npz (CUB-200-2011, crops of 96 pixels), WEIGHTS is a file of torchvision's MobileNetV2. The
standard split: species 0 to 99 train, 100 to 199 test; Recall@1 of every test image among all others. Settings were
chosen on species 80 to 99 after training on 0 to 79 (``--choose``); test species were not looked at for that. Every
finished run is a line of ``--output``; what is there is not run again.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from photo_folder import unpack_images

from mettle.data import Samples
from mettle.data.inputs import ImageArray
from mettle.evaluate import retrieval
from mettle.model import embed
from mettle.start.backbone import build_frozen_backbone
from mettle.train import load, train
from mettle.train.auto_settings import resolve_device
from mettle.train.datamodule import fill_settings
from mettle.train.from_recipe import GivenObjects
from mettle.train.recipe import Recipe

SIDE = 96
RECIPE = "fine-tune"
CANDIDATES: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "crops of the larger part": {"batch.augment": "large"},
    "half the rate": {"train.rate": 1.5e-4},
    "twice the rate": {"train.rate": 6e-4},
    "proxies": {"loss": {"kind": "ProxyAnchor", "margin": 0.1, "alpha": 32.0}, "train.loss_rate": 30.0},
    "20 epochs": {"train.epochs": 20},
}


def load_birds(folder: Path, choosing: bool) -> Samples:
    """All birds, or where settings are chosen those of the training species, with the split that is asked for."""
    arrays = dict(np.load(folder / "cub200_96.npz"))
    at = np.flatnonzero(arrays["split"] < 2) if choosing else np.arange(len(arrays["label"]))
    split = np.where(arrays["split"][at] == (1 if choosing else 2), 2, 0).astype(np.int8)
    images = ImageArray(unpack_images(arrays).read(at))
    samples = Samples.of(images, arrays["label"][at].astype(int), source_name="cub200_96")
    return replace(samples, split=split)


def build_recipe(weights: Path, seed: int, changes: dict[str, Any]) -> Recipe:
    """The shipped recipe with these weights at the size of the crops."""
    model = {"model.backbone": "torchvision/mobilenet_v2", "model.weights": str(weights)}
    data = {"data.size": SIDE, "data.crop": 1.0}
    return load(RECIPE).with_values({**model, **data, "seed": seed, **changes})


def recall(model: Any, samples: Samples) -> float:
    """Recall@1 of the held-out species, in percent."""
    test = samples.part("test")
    return 100 * float(retrieval(embed(model, test), test.labels).recall[1])


def main() -> None:
    """Run what is missing, and print what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--choose", action="store_true", help="judge candidates on species held out of training")
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), help="only these")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--output", type=Path, default=Path("fine_tuning.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so long")
    options = parser.parse_args()
    began, samples = time.perf_counter(), load_birds(options.folder, options.choose)
    lines = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    names = options.candidates or (list(CANDIDATES) if options.choose else ["as shipped"])
    for seed in range(options.seeds):
        for name in names:
            key = {"choosing": options.choose, "candidate": name, "seed": seed}
            if any(key.items() <= line.items() for line in lines) or time.perf_counter() - began > options.seconds:
                continue
            changes = CANDIDATES[name] | ({} if options.epochs is None else {"train.epochs": options.epochs})
            recipe = build_recipe(options.weights, seed, changes)
            with tempfile.TemporaryDirectory() as scratch:
                if not any("frozen" in line and line["choosing"] == options.choose for line in lines):
                    filled = fill_settings(recipe, samples)[0]
                    frozen = build_frozen_backbone(filled, samples).to(resolve_device("auto"))
                    lines.append({"choosing": options.choose, "frozen": round(recall(frozen, samples), 2)})
                    print(json.dumps(lines[-1]), flush=True)
                since = time.perf_counter()
                result = train(recipe, Path(scratch) / "run", tensorboard=False, given=GivenObjects(samples=samples))
                seconds = round(time.perf_counter() - since, 1)
                found = {"recall@1": round(recall(result.model, samples), 2), "seconds": seconds}
            lines.append({**key, **found, "torch": torch.__version__})
            print(json.dumps(lines[-1]), flush=True)
    options.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    frozen = [line["frozen"] for line in lines if "frozen" in line and line["choosing"] == options.choose]
    for name in names:
        own = [
            line["recall@1"] for line in lines if line.get("candidate") == name and line["choosing"] == options.choose
        ]
        if own:
            print(f"{name}: {np.mean(own):.2f} (seeds {own}), the frozen network {frozen}")


if __name__ == "__main__":
    main()
