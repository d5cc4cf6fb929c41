"""Pages of docs/results: a verdict that does not stand is marked wherever it is printed, with the reason."""

import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.evidence import report  # noqa: E402

FOLDER = REPOSITORY / "docs" / "results"
PUBLISHED = [name for name in report.PAGES if (FOLDER / f"{name}.md").exists()]
GONE = {
    "market": ["lower EER than SupCon", "higher AUC than SupCon", "more than ArcFace"],
    "cifar": ["E_b has a larger gap"],
    "tiny": ["E_b is below DCL (top-1)", "E_b is below DCL (worst class)"],
    "coloured": ["WCL raises", "colour is read better", "JTT raises"],
    "tables": ["WCL is more accurate", "smaller gap in accuracy", "smaller odds gap"],
    "birds": ["HDML beats the triplet", "HDML beats the hardest", "HDML beats the N-pair"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_prints_every_verdict_as_its_claim_stands(name):
    text, known = (FOLDER / f"{name}.md").read_text(), report.PAGES[name]
    assert all(notice in text for notice in report.withdrawn_notice(known))
    for claim in known.claims:
        rows = re.findall(rf"^\| {re.escape(claim.text)} \| .*? \| (.*) \|$", text, re.MULTILINE)
        assert len(rows) == len(known.tables)
        for here in rows:
            if claim.withdrawn:
                assert here == f"{report.WITHDRAWN}: {claim.withdrawn}"
            else:
                assert here.startswith(("holds", "contradicted", "not decided"))
    index = (FOLDER / "README.md").read_text()
    assert f"({name}.md) | {known.what} | {report.describe_withdrawn(known)} |" in index


def test_the_verdicts_that_an_audit_refused_are_withdrawn():
    for name, words in GONE.items():
        gone = [claim.text for claim in report.PAGES[name].claims if claim.withdrawn]
        assert all(any(word in text for text in gone) for word in words), name
        assert len(gone) == len(report.PAGES[name].claims) or name in ("market", "cifar", "tiny")


def test_few_seeds_decide_nothing():
    clear = [report.spread([0.5 + 0.001 * k for k in range(seeds)]) for seeds in (2, 4, 5)]
    assert [report.verdict(x, 1) for x in clear] == [
        "not decided: 2 seeds, 5 are needed",
        "not decided: 4 seeds, 5 are needed",
        "holds",
    ]
    assert report.verdict(clear[2], -1) == "contradicted"
    assert report.verdict(clear[2], 1, "it was not tuned") == "*withdrawn, being measured again*: it was not tuned"
