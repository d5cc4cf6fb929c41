"""Which name was meant: slips are recognized, other words are answered with the list of what is known."""

import pytest

from mettle.errors import edit_distance, nearest

KEYS = ["backbone", "width", "depth", "pool", "head", "dim", "unit", "pretrained"]
TRAIN = ["method", "steps", "rate", "warmup", "loss_rate", "weight_decay", "clip", "precision", "device", "log_every"]
LOSSES = ["SupCon", "DASupCon", "Triplet", "ArcFace", "CosFace", "InfoNCE"]


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("widht", KEYS, "width"),
        ("witdh", KEYS, "width"),
        ("depht", KEYS, "depth"),
        ("backbon", KEYS, "backbone"),
        ("pretained", KEYS, "pretrained"),
        ("setps", TRAIN, "steps"),
        ("step", TRAIN, "steps"),
        ("rates", TRAIN, "rate"),
        ("warm_up", TRAIN, "warmup"),
        ("weightdecay", TRAIN, "weight_decay"),
        ("supcon", LOSSES, "SupCon"),
        ("SupCom", LOSSES, "SupCon"),
        ("Arcface", LOSSES, "ArcFace"),
        ("prec", TRAIN, "precision"),
        ("jb", ["age", "job"], "job"),
    ],
)
def test_a_slip_is_recognized(typed, known, meant):
    assert nearest(typed, known) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("weights", KEYS),
        ("weight", KEYS),
        ("height", KEYS),
        ("epochs", TRAIN),
        ("patience", TRAIN),
        ("learning_rate", TRAIN),
        ("lr", TRAIN),
        ("we", TRAIN),
        ("de", KEYS),
        ("NTXent", LOSSES),
        ("x", ["y", "z"]),
        ("", LOSSES),
    ],
)
def test_another_word_is_answered_with_what_is_known(typed, known):
    assert nearest(typed, known) == f"; known are {', '.join(sorted(known))}"


def test_many_names_are_not_all_listed():
    said = nearest("nobody", [f"person {k:04d}" for k in range(3000)])
    assert said.endswith("person 0039 and 2960 more") and len(said) < 600
    assert nearest("x", []) == ""


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("ab", "ba", 1),
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),
        ("hnws", "hnsw", 1),
    ],
)
def test_edits_are_counted(a, b, edits):
    assert edit_distance(a, b) == edit_distance(b, a) == edits
