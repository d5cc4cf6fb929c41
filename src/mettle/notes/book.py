"""All chapters, and their pages: one HTML page a chapter, its figures beside it as files."""

import importlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from mettle import __version__
from mettle.atomic_files import write_bytes, write_text
from mettle.errors import InputError
from mettle.notes.chapter import BuildSettings, Chapter
from mettle.report.page import render_page

MODULES = {1: "supcon", 2: "two_encoders", 3: "similarity", 4: "sphere", 5: "hardness_aware"}
TITLES = {
    1: "SupCon and difficulty-aware SupCon",
    2: "Debiased contrastive learning by difficulty (WCL)",
    3: "Similarity learning and metric learning",
    4: "Metric learning on the sphere",
    5: "Hardness-aware deep metric learning (HDML)",
}


def build_chapter(number: int, settings: BuildSettings, command: Sequence[str] = ()) -> Path:
    """Train what a chapter needs, draw its figures, and write ``chapter-N.html`` in the folder of the settings.

    Args:
        number: 1 to 5.
        settings: where, how long, and who hears what is done.
        command: what to print on the page as the way to build it again.
    """
    if number not in MODULES:
        raise InputError(f"there is no chapter {number}: the notes are chapters {min(MODULES)} to {max(MODULES)}")
    begun = time.perf_counter()
    settings.say(f"chapter {number}: {TITLES[number]}")
    settings.folder.mkdir(parents=True, exist_ok=True)
    chapter: Chapter = importlib.import_module(f"mettle.notes.{MODULES[number]}").build(settings)
    pictures = settings.folder / "pictures"
    pictures.mkdir(exist_ok=True)
    for figure in chapter.figures:
        write_bytes(pictures / f"chapter-{number}-{figure.name}.png", figure.png)
    page = settings.folder / f"chapter-{number}.html"
    spent = time.perf_counter() - begun
    text = render_page(
        "notes.html.j2",
        chapter=chapter,
        form="quick" if settings.quick else "full",
        seconds=f"{spent:.0f}",
        command=shlex.join(command),
        version=__version__,
        chapters=TITLES,
    )
    write_text(page, text)
    settings.say(f"{page}: {len(chapter.figures)} figures, {spent:.0f} s")
    return page
