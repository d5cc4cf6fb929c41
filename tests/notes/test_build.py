"""`mettle notes`: pages with figures, tables and claims; the shortest chapter whole, the others under `slow`."""

import re

import numpy as np
import pytest

from command_line import mettle, refused
from mettle.errors import InputError
from mettle.notes import TITLES, build_chapter
from mettle.notes.chapter import BuildSettings
from mettle.notes.hardness_aware import episode_accuracy
from mettle.notes.runs import within_and_between

SHORTEST = 3


def assert_page(folder, number):
    page = (folder / f"chapter-{number}.html").read_text(encoding="utf-8")
    assert TITLES[number] in page and "quick form" in page
    pictures = sorted((folder / "pictures").glob(f"chapter-{number}-*.png"))
    assert len(pictures) >= 3
    assert len(re.findall(r'<figure class="card"', page)) == len(pictures)
    assert "nan" not in re.sub(r'src="data:[^"]*"', "", page).lower().replace("instance", "")
    return page


def test_the_shortest_chapter_is_built_and_found_again(tmp_path):
    folder = tmp_path / "notes"
    said = mettle("notes", SHORTEST, "--quick", "-o", folder)
    page = assert_page(folder, SHORTEST)
    assert "mettle train triplet-network" in page and "not yet decided" in page
    assert said.count("training ") == 8 and "found " not in said
    lines: list[str] = []
    build_chapter(SHORTEST, BuildSettings(folder, True, None, lines.append))
    assert sum(line.startswith("found ") for line in lines) == 8


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in TITLES if n != SHORTEST])
def test_the_other_chapters_are_built(number, tmp_path, cache):
    build_chapter(number, BuildSettings(tmp_path, quick=True, cache=cache))
    assert_page(tmp_path, number)


def test_a_chapter_that_is_not_there_is_one_line(tmp_path):
    assert "no chapter 7: they are 1 to 5" in refused("notes", "7", "-o", tmp_path / "notes")
    with pytest.raises(InputError, match="no chapter 7: the notes are chapters 1 to 5"):
        build_chapter(7, BuildSettings(tmp_path))


def test_episodes_of_classes_that_are_told_apart_are_all_right_and_those_of_noise_are_guessed():
    labels = np.arange(120) // 12
    apart = np.eye(10)[labels]
    assert episode_accuracy(apart, labels, ways=5, shots=1, episodes=20).min() == 1
    noise = np.random.default_rng(0).normal(size=(120, 30))
    found = episode_accuracy(noise, labels, ways=5, shots=1, episodes=400)
    assert abs(found.mean() - 0.2) < 0.05


def test_within_and_between_by_loops():
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(12, 4)), np.arange(12) % 3
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    means = [sum(unit[labels == k]) for k in range(3)]
    means = [m / np.linalg.norm(m) for m in means]
    within, between = within_and_between(z, labels)
    for k in range(3):
        assert abs(within[k] - np.mean([np.dot(row, means[k]) for row in unit[labels == k]])) < 1e-12
        assert abs(between[k] - max(float(np.dot(means[k], means[j])) for j in range(3) if j != k)) < 1e-12
