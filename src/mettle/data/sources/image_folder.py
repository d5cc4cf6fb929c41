"""A folder of pictures: the folder a file lies in says what it is.

    root/<label>/*.jpg                      a set without splits
    root/<split>/<label>/*.jpg              with splits: train (training), val (valid, validation, dev), test (testing)
    root/[<split>/]<label>/<domain>/*.jpg   a folder below the label names how the picture was taken

Files are taken in the order of their paths, and a sample's id is its place in that order, counted before
anything is left out. Hidden files are passed over; so are files of other kinds, which ``notes`` count. Symbolic
links are followed, also out of the root; within one label every real folder is read once, which cuts loops.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mettle.data.check import Policy, drop_unreadable
from mettle.data.dataset import SPLIT_WORDS, SPLITS, Column, Samples
from mettle.data.image_decoding import HEIC_REMEDY, HEIC_SUFFIXES, Channels, Resize, Sides, image_suffixes, quote_name
from mettle.data.inputs import ImageFiles
from mettle.errors import DataError


class _ImageEntry(NamedTuple):
    path: str  # relative to the root, with forward slashes; first, because files are sorted by it
    label: str
    domain: str
    split: str


def read_image_folder(
    path: str | Path,
    *,
    size: Sides | None = None,
    resize: Resize = "crop",
    channels: Channels = 3,
    policy: Policy = "fail",
    splits: bool | None = None,
    labeled: bool = True,
) -> Samples:
    """Read a folder of pictures.

    Args:
        path: The root.
        size: (height, width), or one side, of every picture; None when all files have one size already.
        resize: How they get that size: ``crop`` from the centre, ``pad``, or ``stretch``.
        channels: 1 for grey, 3 for RGB.
        policy: What to do about pictures that cannot be read, see `mettle.data.drop_unreadable`.
        splits: Whether the folders below the root are splits; None: they are when all of them are named so.
        labeled: Whether every picture needs a label; where not, those beside the label folders have the label ``""``.

    Raises:
        DataError: No such folder, no pictures, a picture outside any label folder, or a bad one (by policy).
    """
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"no folder {quote_name(root)}: give the folder that holds one folder per label")
    folders = _list_subfolders(root)
    parts = _find_splits(root, folders, splits)
    tops = (
        [(label, parts[f.name]) for f in folders for label in _list_subfolders(f)]
        if parts
        else [(f, "") for f in folders]
    )
    strays = list(_list_unlabeled(root, {root: ""} | ({f: parts[f.name] for f in folders} if parts else {})))
    if strays and labeled:
        remedy = "move it into the folder of its label (pictures without labels can be embedded, not trained on)"
        raise DataError(f"picture {quote_name(strays[0].path)} has no label: {remedy}")
    found = sorted([*strays, *(one for top, split in tops for one in _list_images(root, top, split))])
    if not found:
        raise DataError(
            f"no pictures in {quote_name(root)}: one folder per label, with {', '.join(image_suffixes())} files"
        )
    # Label folders without pictures are named too: `check` reports them.
    names = sorted({_check_utf8(top.name) for top, _ in tops} | {one.label for one in strays})
    code = {name: i for i, name in enumerate(names)}
    samples = Samples.of(
        ImageFiles([one.path for one in found], size, channels, root, resize),
        Column(np.array([code[one.label] for one in found], np.int64), tuple(names)),
        domain=[one.domain for one in found] if any(one.domain for one in found) else None,
        split=[one.split for one in found] if parts else None,
        source_name=str(root),
        notes=_describe_other_files(root),
    )
    return drop_unreadable(samples, policy)


def read_image(
    path: str | Path,
    *,
    size: Sides | None = None,
    resize: Resize = "crop",
    channels: Channels = 3,
    policy: Policy = "fail",
    labeled: bool = True,
) -> Samples:
    """Read one picture file, which has no label; options as in `read_image_folder`."""
    path = Path(path)
    if labeled:
        remedy = "give the folder that holds one folder per label (a picture alone can be embedded, not trained on)"
        raise DataError(f"{quote_name(path)} is one picture without a label: {remedy}")
    inputs = ImageFiles([path.name], size, channels, path.parent, resize)
    return drop_unreadable(Samples.of(inputs, [""], source_name=str(path)), policy)


def _find_splits(root: Path, folders: list[Path], splits: bool | None) -> dict[str, str]:
    """The split that each folder below the root stands for; empty when they are labels."""
    parts = {folder.name: SPLIT_WORDS.get(folder.name.lower(), "") for folder in folders}
    others = [name for name, split in parts.items() if not split]
    if splits is None and "train" in parts.values() and len(parts) - len(others) > 1 and others:
        problem = f"{quote_name(root)} holds splits and {quote_name(others[0])}"
        remedy = "move that folder away, or rename the others if all of them are labels (in Python: splits=False)"
        raise DataError(f"{problem}: {remedy}")
    if splits and others:
        raise DataError(f"{quote_name(others[0])} is not a split: name the folders {', '.join(SPLITS)}")
    return {} if splits is False or others else parts


def _list_images(root: Path, top: Path, split: str) -> Iterator[_ImageEntry]:
    """Every picture below one label folder."""
    label = _check_utf8(top.name)
    seen, todo = set(), [top]
    while todo:
        folder = todo.pop()
        real = os.stat(folder)
        if (real.st_dev, real.st_ino) in seen:
            continue
        seen.add((real.st_dev, real.st_ino))
        inside = folder.relative_to(top).parts
        for entry in _list_entries(folder):
            if entry.is_dir():
                todo.append(Path(entry.path))
            elif _is_image(entry):
                place = Path(entry.path).relative_to(root).as_posix()
                yield _ImageEntry(place, label, _check_utf8(inside[0]) if inside else "", split)


def _list_unlabeled(root: Path, folders: Mapping[Path, str]) -> Iterator[_ImageEntry]:
    """Pictures that lie in none of the label folders, with their split."""
    for folder, split in folders.items():
        for entry in _list_entries(folder):
            if not entry.is_dir() and _is_image(entry):
                yield _ImageEntry(Path(entry.path).relative_to(root).as_posix(), "", "", split)


def _list_subfolders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _list_entries(folder) if entry.is_dir()]


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, hidden entries left out, in order of name."""
    try:
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as problem:
        raise DataError(f"cannot list {quote_name(folder)}: {problem.strerror}") from None
    return sorted(kept, key=lambda entry: entry.name)


def _is_image(entry: os.DirEntry[str]) -> bool:
    # By name only: a dangling link or a pipe that is called a picture is a bad picture, not nothing.
    return entry.name.lower().endswith(image_suffixes())


def _describe_other_files(root: Path) -> tuple[str, ...]:
    """Notes about files that are not read: how many of which ending, and the first of them."""
    others: dict[str, list[str]] = {}
    seen: set[str] = set()  # links are followed, as for pictures; a folder that was seen is not entered again
    for folder, inner, names in os.walk(root, onerror=lambda _: None, followlinks=True):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        if (real := os.path.realpath(folder)) in seen:
            inner.clear()
            continue
        seen.add(real)
        for name in sorted(names):
            if not name.startswith(".") and not name.lower().endswith(image_suffixes()):
                ending = os.path.splitext(name)[1].lower() or "no ending"
                others.setdefault(ending, []).append(os.path.relpath(os.path.join(folder, name), root))
    heic = [name for ending in HEIC_SUFFIXES for name in others.pop(ending, [])]
    notes = []
    if heic:
        files = "1 HEIC picture was" if len(heic) == 1 else f"{len(heic)} HEIC pictures were"
        notes.append(f"{files} passed over, first: {quote_name(heic[0])}; {HEIC_REMEDY}")
    if others:
        total = sum(map(len, others.values()))
        kinds = sorted(others.items(), key=lambda item: (-len(item[1]), item[0]))
        counts = ", ".join(f"{len(names)} {ending}" for ending, names in kinds[:6])
        counts += f" and {len(kinds) - 6} more endings" if len(kinds) > 6 else ""
        files = "1 file that is no picture was" if total == 1 else f"{total} files that are no pictures were"
        notes.append(f"{files} passed over ({counts}), first: {quote_name(kinds[0][1][0])}")
    return tuple(notes)


def _check_utf8(name: str) -> str:
    """The name of a label or a domain; those end up in files and reports, so they must be text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"folder name {quote_name(name)} is not valid UTF-8: rename it") from None
    return name
