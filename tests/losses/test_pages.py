"""Numbers and cases that the pages state, held against the code."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import mettle.losses
from mettle.difficulty import Hardest
from mettle.losses import Contrastive, InfoNCE, LiftedStructure, SelfTriplet, SupCon, Triplet
from mettle.pairs.class_softmax import CHUNK
from mettle.pairs.distributed.wrapper import choose_strategy
from mettle.train import builtin_recipes, load

DOCS = Path(mettle.__file__).parents[2] / "docs"


def test_the_chunk_of_classes_is_the_one_that_is_written():
    power = str(CHUNK.bit_length() - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    page = (DOCS / "class-vectors.md").read_text(encoding="utf-8")
    assert f"chunks of 2{power} / batch" in page and f"{CHUNK * 4 >> 20} MB of similarities" in page


def test_anchors_without_negatives_do_what_the_page_says():
    page = " ".join((DOCS / "losses" / "README.md").read_text(encoding="utf-8").split())
    assert "`SelfTriplet` too in form `paired` and only its positive part in the others" in page
    z = torch.nn.functional.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    y = torch.zeros(3, dtype=torch.long)
    square = (z[:, None] - z[None]).square().sum(-1)
    near = square.sum(1) / 2
    for loss in (InfoNCE(), Triplet(), LiftedStructure(), SelfTriplet(form="paired")):
        assert (loss.per_anchor(z, y) == 0).all()
    for form in ("sum_N", "mean", "readme", "one_neg"):
        torch.testing.assert_close(SelfTriplet(form=form).per_anchor(z, y), near)
    torch.testing.assert_close(Contrastive(form="squared").per_anchor(z, y), near)


@pytest.mark.parametrize("word", ["a tensor or a learnable parameter", "`repr` rebuilds them"])
def test_the_page_says_what_settings_are(word):
    assert word in " ".join((DOCS / "losses" / "README.md").read_text(encoding="utf-8").split())


WAYS = {"anchors": "anchors", "own rows": "rows", "all rows": "replicated"}


COMPOSED = {  # made of other losses
    "CrossBatchMemory": lambda: mettle.losses.CrossBatchMemory(SupCon(), 8, 4),
    "Matryoshka": lambda: mettle.losses.Matryoshka(SupCon(), (2, 4)),
    "MinedLoss": lambda: mettle.losses.MinedLoss(SupCon(), Hardest()),
    "WeightedSum": lambda: mettle.losses.WeightedSum([SupCon(), Triplet()]),
}
TWO_TOWERS = {"CLIP", "SigLIP"}  # the trainer has one network


def test_the_table_of_losses_names_all_and_says_how_they_go_over_ranks():
    page = (DOCS / "losses" / "README.md").read_text(encoding="utf-8")
    table = page.split("## What runs how")[1].split("Losses with [class")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    told = {name: row[-1].strip() for row in rows for name in re.findall(r"[A-Z]\w+", row[0])}
    assert set(told) == set(mettle.losses.__all__)
    assert all(cell.strip() for row in rows for cell in row) and {len(row) for row in rows} == {5}
    for name, said in told.items():
        kind = getattr(mettle.losses, name)
        if name in COMPOSED:
            loss = COMPOSED[name]()
        else:
            loss = kind(5, 4) if "dim" in inspect.signature(kind).parameters else kind()
        assert said.startswith(next(words for words, how in WAYS.items() if how == choose_strategy(loss))), name


def test_every_loss_has_a_page_and_a_recipe():
    used = {load(name).loss.get("kind") for name in builtin_recipes()}
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "losses").glob("*.md") if path.stem != "README"]
    titles = {name for page in pages for name in re.findall(r"\w+", page.splitlines()[0])}
    for name in mettle.losses.__all__:
        assert name in titles, name
        # DASupCon is SupCon, SelfTriplet the loss of a second encoder.
        assert name in used or name in {"DASupCon", "SelfTriplet", *COMPOSED, *TWO_TOWERS}, name


def test_the_tests_that_the_table_of_oracles_names_are_there():
    root = Path(__file__).parents[2]
    section = (root / "docs/losses/README.md").read_text().split("## What each form is held to")[1].split("\n## ")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)`", section)
    assert len(set(named)) > 20
    assert not [name for name in named if not (root / name).is_file()]
