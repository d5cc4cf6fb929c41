"""`glyphs`: the embedded data set. Characters, drawn from the typefaces that matplotlib carries.

Identity = character, domain = typeface family, group ``cut`` = regular, bold, slanted, bold slanted. Sixteen faces
(DejaVu Sans, Sans Mono, Serif, and STIX General) share about 700 characters; the twelve DejaVu faces share about
2,400. Every picture is turned, shifted, blurred and made noisy a little, as a pure function of (seed, sample id).

`open` split: training characters and test characters are disjoint, and the test probes (role ``query``) are set in
STIX General, a family that training never sees; the gallery is set in DejaVu. `closed` split: the same characters in
training and test, for linear probes and results by group.

Homoglyphs are kept: Latin A, Greek Alpha and Cyrillic A are different characters with the same picture. They are the
hardest negatives there are, and no embedding can tell them apart: part of the remaining error is theirs.

Pictures are made with integer arithmetic on rasters from Pillow's FreeType, so they are the same on every machine
with the same versions; the fingerprint of the data, kept with every run, says so.
"""

import hashlib
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np

from mettle.atomic_files import write_bytes
from mettle.data.dataset import Column, Samples
from mettle.data.inputs import ImageArray
from mettle.errors import InputError, nearest
from mettle.rng import hash_bits, uniform_per_id

SIZE = 32
RASTER = 64  # characters are drawn at twice the final size
CUTS = ("regular", "bold", "slanted", "bold slanted")
FAMILIES = {
    "DejaVu Sans": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    "DejaVu Sans Mono": (
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSansMono-BoldOblique",
    ),
    "DejaVu Serif": ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    "STIX General": ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
}
UNSEEN = "STIX General"
HELD_OUT = {"test": 300, "val": 60}  # characters, out of those that all sixteen faces share
VARIANTS = 3  # pictures of one character in one face, in the closed split: two to train on, one to test


@dataclass(frozen=True)
class GlyphTable:
    """What to draw: one row per sample."""

    characters: np.ndarray  # code points
    family: np.ndarray
    cut: np.ndarray
    split: np.ndarray
    role: np.ndarray


def glyphs(split: str = "open", *, seed: int = 0, cache: Path | None = None) -> Samples:
    """The embedded data set, drawn on first use and read from ``cache`` afterwards."""
    plans = {"open": _open_set, "closed": _closed_set}
    if split not in plans:
        raise InputError(f"glyphs has no split {split!r}{nearest(split, plans)}")
    plan = plans[split](seed)
    ids = np.arange(len(plan.characters), dtype=np.int64)
    pictures = _load_or_draw(plan, ids, seed, cache)
    return Samples.of(
        ImageArray(pictures),
        _name_characters(plan.characters),
        ids=ids,
        domain=Column(plan.family, tuple(FAMILIES)),
        groups={"cut": Column(plan.cut, CUTS), "script": Column.of(_find_scripts(plan.characters))},
        split=plan.split,
        role=plan.role,
        source_name="glyphs" if split == "open" else f"glyphs:{split}",
    )


def _open_set(seed: int) -> GlyphTable:
    shared, dejavu = shared_characters()
    order = np.argsort(hash_bits(seed, 1, shared), kind="stable")
    test, val = np.split(shared[order], [HELD_OUT["test"], HELD_OUT["test"] + HELD_OUT["val"]])[:2]
    train = np.setdiff1d(dejavu, np.concatenate([test, val]))
    trained = [k for k, name in enumerate(FAMILIES) if name != UNSEEN]
    parts = [(train, trained, 0), (val, trained, 1), (test, range(len(FAMILIES)), 2)]
    plans = [_glyph_grid(chosen, list(families), split) for chosen, families, split in parts]
    plan = GlyphTable(*(np.concatenate(columns) for columns in zip(*(vars(p).values() for p in plans), strict=True)))
    query = plan.family == list(FAMILIES).index(UNSEEN)
    return GlyphTable(
        plan.characters, plan.family, plan.cut, plan.split, np.where(plan.split < 2, 0, np.where(query, 1, 2))
    )


def _closed_set(seed: int) -> GlyphTable:
    shared, _ = shared_characters()
    parts = [_glyph_grid(shared, list(range(len(FAMILIES))), 0 if v < VARIANTS - 1 else 2) for v in range(VARIANTS)]
    return GlyphTable(*(np.concatenate(columns) for columns in zip(*(vars(p).values() for p in parts), strict=True)))


def _glyph_grid(chosen: np.ndarray, families: list[int], split: int) -> GlyphTable:
    """Every chosen character in every cut of every family."""
    c, f, k = (a.reshape(-1) for a in np.meshgrid(np.sort(chosen), families, range(len(CUTS)), indexing="ij"))
    return GlyphTable(c, f, k, np.full(len(c), split), np.zeros(len(c), np.int64))


@lru_cache(maxsize=1)
def shared_characters() -> tuple[np.ndarray, np.ndarray]:
    """Code points that all sixteen faces draw, and those that the twelve DejaVu faces draw; blanks left out."""
    from matplotlib.ft2font import FT2Font

    maps = {name: set(FT2Font(str(_font_path(name))).get_charmap()) for faces in FAMILIES.values() for name in faces}
    dejavu = set.intersection(*(found for name, found in maps.items() if name.startswith("DejaVu")))
    visible = {c for c in dejavu if unicodedata.category(chr(c))[0] not in "ZC"}
    every = set.intersection(*maps.values()) & visible
    return np.array(sorted(every), np.int64), np.array(sorted(visible), np.int64)


def _font_path(face: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _load_or_draw(plan: GlyphTable, ids: np.ndarray, seed: int, cache: Path | None) -> np.ndarray:
    """Pictures from the cache if it holds exactly these, else drawn (and put there; a cache that fails is no error)."""
    import matplotlib
    import PIL

    key = hashlib.sha256(f"1 {PIL.__version__} {matplotlib.__version__} {seed}".encode())
    for column in vars(plan).values():
        key.update(np.ascontiguousarray(column, np.int64).tobytes())
    file = None if cache is None else cache / f"glyphs-{key.hexdigest()[:16]}.npy"
    if file is not None and file.exists():
        try:
            held = np.load(file, allow_pickle=False)
            if held.shape == (len(ids), SIZE, SIZE) and held.dtype == np.uint8:
                return held
        except (OSError, ValueError):
            pass  # truncated or foreign: draw again
    pictures = draw_glyphs(plan, ids, seed)
    if file is not None:
        buffer = BytesIO()
        np.save(buffer, pictures)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, buffer.getvalue())
        except OSError:
            pass
    return pictures


def draw_glyphs(plan: GlyphTable, ids: np.ndarray, seed: int) -> np.ndarray:
    """(n, 32, 32) uint8 pictures, ink bright on black."""
    rasters: dict[tuple[int, int, int], int] = {}
    for key in zip(plan.family.tolist(), plan.cut.tolist(), plan.characters.tolist(), strict=True):
        rasters.setdefault(key, len(rasters))
    base = _draw_rasters(list(rasters))
    which = np.array(
        [rasters[k] for k in zip(plan.family.tolist(), plan.cut.tolist(), plan.characters.tolist(), strict=True)]
    )
    pictures = np.empty((len(ids), SIZE, SIZE), np.uint8)
    for start in range(0, len(ids), 1024):
        part = slice(start, start + 1024)
        pictures[part] = _perturb_images(base[which[part]], ids[part], seed)
    return pictures


def _draw_rasters(keys: list[tuple[int, int, int]]) -> np.ndarray:
    """Clean characters, 64 x 64, on a common baseline and at a common size: position and size tell them apart too."""
    from PIL import Image, ImageDraw, ImageFont

    faces = list(FAMILIES.values())
    fonts = {}
    out = np.zeros((len(keys), RASTER, RASTER), np.uint8)
    for row, (family, cut, character) in enumerate(keys):
        if (family, cut) not in fonts:
            path = str(_font_path(faces[family][cut]))
            fonts[family, cut] = ImageFont.truetype(path, 38, layout_engine=ImageFont.Layout.BASIC)
        canvas = Image.new("L", (RASTER, RASTER))
        ImageDraw.Draw(canvas).text((32, 45), chr(character), fill=255, font=fonts[family, cut], anchor="ms")
        out[row] = np.asarray(canvas)
    return out


def _perturb_images(base: np.ndarray, ids: np.ndarray, seed: int) -> np.ndarray:
    """Turn up to 10 degrees, scale up to 8 %, shift up to 2 pixels, blur, add noise; in fixed point throughout."""
    u = uniform_per_id(seed, 0, ids, 6, stream=7)
    angle, scale = (u[:, 0] - 0.5) * np.radians(20), 1 + (u[:, 1] - 0.5) * 0.16
    shift = np.rint((u[:, 2:4] - 0.5) * 2 * 4 * 256).astype(np.int64)  # in 1/256 raster pixels
    a, b = (
        np.rint(np.cos(angle) / scale * 4096).astype(np.int64),
        np.rint(np.sin(angle) / scale * 4096).astype(np.int64),
    )
    soft = np.pad(base.astype(np.int64), ((0, 0), (1, 1), (1, 1)))
    soft = soft[:, :-1, :-1] + soft[:, 1:, :-1] + soft[:, :-1, 1:] + soft[:, 1:, 1:]  # 2 x 2 box, times 4: 65 x 65
    grid = np.arange(SIZE, dtype=np.int64) * 2 - (SIZE - 1)  # raster pixels from the centre
    gy, gx = grid[None, :, None] * 256, grid[None, None, :] * 256
    y = ((a[:, None, None] * gy + b[:, None, None] * gx) >> 12) + shift[:, 0, None, None] + 32 * 256
    x = ((a[:, None, None] * gx - b[:, None, None] * gy) >> 12) + shift[:, 1, None, None] + 32 * 256
    warped = _sample_bilinear(soft, y, x)  # 0 .. 255 * 4 * 256 * 256
    picture = warped >> 18
    around = np.pad(picture, ((0, 0), (1, 1), (1, 1)))
    around = (around[:, :-2, 1:-1] + around[:, 2:, 1:-1] + around[:, 1:-1, :-2] + around[:, 1:-1, 2:]) >> 2
    blur = np.rint(u[:, 4] * 96).astype(np.int64)[:, None, None]  # of 256
    picture = (picture * (256 - blur) + around * blur) >> 8
    bits = hash_bits(seed, 8, ids[:, None, None], np.arange(SIZE)[:, None] * SIZE + np.arange(SIZE)[None, :])
    two = (bits & np.uint64(255)).astype(np.int64) + ((bits >> np.uint64(8)) & np.uint64(255)).astype(np.int64) - 255
    level = np.rint(u[:, 5] * 40).astype(np.int64)[:, None, None]
    return np.clip(picture + ((two * level) >> 8), 0, 255).astype(np.uint8)


def _sample_bilinear(image: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sample (n, h, w) integer images at coordinates in 1/256 pixels; the border repeats."""
    n, h, w = image.shape
    y, x = np.clip(y, 0, (h - 1) * 256 - 1), np.clip(x, 0, (w - 1) * 256 - 1)
    y0, x0, fy, fx = y >> 8, x >> 8, y & 255, x & 255
    flat = image.reshape(n, -1)
    at = y0 * w + x0

    def corner(offset: int) -> np.ndarray:
        return np.take_along_axis(flat, (at + offset).reshape(n, -1), axis=1).reshape(at.shape)

    top = corner(0) * (256 - fx) + corner(1) * fx
    bottom = corner(w) * (256 - fx) + corner(w + 1) * fx
    return top * (256 - fy) + bottom * fy


def _name_characters(points: np.ndarray) -> Column:
    distinct, codes = np.unique(points, return_inverse=True)
    return Column(codes.astype(np.int64), tuple(f"U+{p:04X} {unicodedata.name(chr(p), 'unnamed')}" for p in distinct))


def _find_scripts(points: np.ndarray) -> list[str]:
    """The first word of the Unicode name where it is a script, else ``symbol``."""
    scripts = {"LATIN", "GREEK", "CYRILLIC"}
    words = (unicodedata.name(chr(p), "").split(" ")[0] for p in points.tolist())
    return [word.lower() if word in scripts else "symbol" for word in words]
