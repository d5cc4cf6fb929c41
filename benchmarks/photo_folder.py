"""Write a folder of photographs as a new user has them: JPEG files of mixed sizes and shapes, one folder per class.

    python benchmarks/photo_folder.py FOLDER --source cub200_96.npz      birds of CUB-200-2011
    python benchmarks/photo_folder.py FOLDER                             drawn pictures, for tests

Every picture is cut to a random shape (width over height 0.6 to 1.6) and scaled so that its longer side has 80 to 320
pixels. Nothing is squashed: a wide picture shows a wide window. The folder is not to be committed.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from mettle.data.image_decoding import Channels
from mettle.data.inputs import PackedImages

SIDES = (80, 320)
ASPECTS = (0.6, 1.6)


def reframe(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A window of random shape around the centre, in a random size."""
    aspect = math.exp(rng.uniform(*map(math.log, ASPECTS)))
    w, h = picture.size
    wide, high = min(w, h * aspect), min(h, w / aspect)
    window = picture.crop((round((w - wide) / 2), round((h - high) / 2), round((w + wide) / 2), round((h + high) / 2)))
    scale = rng.integers(SIDES[0], SIDES[1] + 1) / max(window.size)
    size = (max(1, round(window.width * scale)), max(1, round(window.height * scale)))
    return window.resize(size, Image.Resampling.BICUBIC)


def unpack_images(arrays: dict[str, np.ndarray], channels: Channels = 3) -> PackedImages:
    """The pictures of an NPZ file that are encoded end to end, decoded when they are read."""
    ends = [arrays[key].tobytes() if key in arrays else b"" for key in ("header", "trailer")]
    return PackedImages(arrays["data"], arrays["offsets"], *ends, channels=channels)


def read_packed(path: Path) -> Iterator[tuple[str, Image.Image]]:
    """(class, picture) of an NPZ file of packed pictures: data, offsets, header, trailer, label, class_names."""
    arrays = dict(np.load(path))
    images, names = unpack_images(arrays), arrays.get("class_names")
    for i, label in enumerate(arrays["label"].tolist()):
        name = f"class-{label:03d}" if names is None else str(names[label])
        yield name.replace("/", "-"), Image.fromarray(images.read(np.array([i]))[0])


def draw_pictures(classes: int, each: int, seed: int) -> Iterator[tuple[str, Image.Image]]:
    """Drawn stand-ins: a class is a colour, a number of corners and a stripe width; place, size and ground vary."""
    for label in range(classes):
        kind = np.random.default_rng([seed, label])
        color, stripe = tuple(kind.integers(40, 256, 3).tolist()), tuple(kind.integers(0, 216, 3).tolist())
        corners, period = int(kind.integers(3, 9)), int(kind.integers(8, 24))
        for number in range(each):
            rng = np.random.default_rng([seed, label, number])
            ground = tuple(rng.integers(0, 256, 3).tolist())
            picture = Image.new("RGB", (128, 128), ground)
            shape = Image.new("L", picture.size)
            center, radius, turn = rng.uniform(50, 78, 2), rng.uniform(34, 50), rng.uniform(0, 2 * math.pi)
            angles = turn + 2 * math.pi * np.arange(corners) / corners
            outline = [(center[0] + radius * math.cos(a), center[1] + radius * math.sin(a)) for a in angles]
            ImageDraw.Draw(shape).polygon(outline, fill=255)
            pattern = Image.new("RGB", picture.size, color)
            for x in range(0, 128, period):
                ImageDraw.Draw(pattern).rectangle((x, 0, x + period // 2 - 1, 127), fill=stripe)
            picture.paste(pattern.rotate(math.degrees(turn)), mask=shape)
            noise = rng.normal(0, 12, (128, 128, 3))
            noisy = (np.asarray(picture) + noise).clip(0, 255).astype(np.uint8)
            yield f"class-{label:03d}", Image.fromarray(noisy)


def write_folder(
    folder: Path,
    source: Path | None = None,
    *,
    classes: int = 40,
    each: int = 30,
    seed: int = 0,
    split: int | None = None,
) -> dict[str, int]:
    """Write the first ``each`` pictures of ``classes`` random classes; returns how many each class has."""
    pictures = draw_pictures(classes, each, seed) if source is None else read_packed(source)
    chosen: set[str] | None = None
    if source is not None:
        arrays = dict(np.load(source))
        labels = np.unique(arrays["label"] if split is None else arrays["label"][arrays["split"] == split])
        drawn = np.sort(np.random.default_rng(seed).choice(labels, min(classes, len(labels)), replace=False))
        names = arrays.get("class_names")
        chosen = {(f"class-{i:03d}" if names is None else str(names[i])).replace("/", "-") for i in drawn.tolist()}
    counts: dict[str, int] = {}
    for name, picture in pictures:
        if (chosen is not None and name not in chosen) or counts.get(name, 0) == each:
            continue
        number = counts.get(name, 0)
        rng = np.random.default_rng([seed, *name.encode(), number])
        (folder / name).mkdir(parents=True, exist_ok=True)
        reframe(picture, rng).save(folder / name / f"{number:03d}.jpg", quality=90)
        counts[name] = number + 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path, help="NPZ file of packed pictures; default: drawn ones")
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--each", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", type=int, help="only classes of this split of the source: 0 train, 1 val, 2 test")
    given = parser.parse_args()
    counts = write_folder(
        given.folder, given.source, classes=given.classes, each=given.each, seed=given.seed, split=given.split
    )
    print(f"{given.folder}: {sum(counts.values())} pictures of {len(counts)} classes")


if __name__ == "__main__":
    main()
