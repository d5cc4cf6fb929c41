"""Numbers and cases that the pages state, held against the code."""

from pathlib import Path

import pytest
import torch

import mettle
from mettle.losses import Contrastive, InfoNCE, LiftedStructure, SelfTriplet, Triplet
from mettle.pairs.class_softmax import CHUNK

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
