"""From a folder of images to a gallery that names what a new image shows, or says that it is not enrolled.

python examples/match_images.py [FOLDER]
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import mettle

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/flags")
rng = np.random.default_rng(0)
for label in range(48):  # one folder for each identity: flags of three colors, from several distances
    colors = [tuple(rng.integers(0, 256, 3).tolist()) for _ in range(3)]
    place = folder / "images" / f"flag-{label:02d}"
    place.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        image = Image.new("RGB", (36, 36), tuple(rng.integers(90, 200, 3).tolist()))
        left, top, width = (int(rng.integers(*limits)) for limits in ((1, 8), (1, 10), (18, 27)))
        for stripe, color in enumerate(colors):
            box = (left, top + 7 * stripe, left + width, top + 7 * stripe + 6)
            ImageDraw.Draw(image).rectangle(box, fill=color)
        image.save(place / f"{number}.png")

options = {"folder": folder / "run", "steps": 40, "batch": (12, 4), "select": "eer", "quiet": True}
run = mettle.fit("convnet", folder / "images", "SupCon", **options)
print(f"EER of flags that were not trained on: {run.evaluate().verification.eer:.2%}")

enrolled, stranger = sorted((folder / "images").iterdir())[:40], folder / "images" / "flag-45" / "0.png"
with mettle.Gallery.open(folder / "flags.mettle", model=run) as gallery:
    gallery.enrol_many((flag.name, [flag / f"{number}.png" for number in range(4)]) for flag in enrolled)
    gallery.calibrate()  # thresholds, measured on what is enrolled
    for probe in (enrolled[7] / "5.png", stranger):
        answer = gallery.identify(probe, far=0.01)
        print(probe.parent.name, "->", answer.verdict, [(c.identity, round(c.score, 2)) for c in answer.candidates[:2]])
    print(gallery.verify("flag-07", enrolled[7] / "4.png", far=0.01).verdict)
