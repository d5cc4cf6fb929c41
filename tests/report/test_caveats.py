"""What pages and cards must say: which file a pair is of, that few subjects carry no interval, who was trained on."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tables import make_results

from mettle.data.dataset import NO_SPLIT, Samples
from mettle.evaluate import audit, read_embeddings
from mettle.evaluate.run import evaluate_run
from mettle.evaluate.run.scenarios import summarize_scenarios
from mettle.report.audit_page import write_audit
from mettle.report.caveats import list_caveats, training_verdict
from mettle.report.comparison_page import describe_comparison, describe_difference
from mettle.report.metric_tables import headline_tiles, metric_cells, scenario_rows
from mettle.report.pair_cards import describe_sample
from mettle.report.run_card import build_card, card_to_markdown, describe_test
from mettle.report.run_page import write_report

WORDS = "no interval: too few subjects"


def test_a_card_of_five_identities_says_why_it_has_no_intervals(made):
    facts = build_card(made.run, made.evaluation.metrics)
    assert [t["interval"] for t in facts["tiles"] if t["value"] is not None and t["text"] != "–"]
    for tile in facts["tiles"]:
        assert tile["interval"] in ("", WORDS) and (tile["interval"] == WORDS or tile["text"] == "–")
    assert facts["rows"][0]["cells"][0]["interval"] == WORDS
    assert f"({WORDS})" in card_to_markdown(facts)
    assert "too few for any interval" in " ".join(facts["warnings"])


def test_a_page_of_five_identities_says_so_too(made, tmp_path):
    page = write_report(made.run, made.evaluation, tmp_path / "page.html").read_text()
    assert WORDS in page
    assert f"95 % interval {WORDS}" not in page


def test_enough_identities_have_intervals_everywhere():
    found = {"scenarios": summarize_scenarios(make_results("all"), (0.1, 0.01))}
    assert WORDS not in json.dumps(
        [metric_cells(found["scenarios"]["all"]), scenario_rows(found), headline_tiles(found)]
    )


def test_runs_without_intervals_are_not_told_apart(made, other):
    measured = [made.evaluation.metrics, other.evaluation.metrics]
    assert "too few subjects" in describe_difference(["a", "b"], measured)
    table = describe_comparison([made.run, other.run])["tables"][0]
    assert table["rows"][0][0]["interval"] == WORDS
    assert all(cell["interval"] == "" for cell in table["rows"][0][1:])


@pytest.mark.parametrize(
    ("shared", "said", "warned"),
    [
        (None, "whether they were trained on is not known", "Open or closed set unknown"),
        (0, "(open set)", None),
        (2, "2 of them were also trained on (mixed set)", "Mixed set: 2 of 5"),
        (5, "5 of them were also trained on (closed set)", "Closed set: 5 of 5"),
    ],
)
def test_who_was_trained_on_is_told_as_far_as_it_is_known(made, shared, said, warned):
    metrics = copy.deepcopy(made.evaluation.metrics)
    metrics["data"] |= {"shared_identities": shared, "training_identities": None if shared is None else 12}
    assert said in describe_test(metrics)
    assert describe_test(metrics).startswith("Tested on" if shared is None else "Trained on 12")
    others = (text for text in list_caveats(metrics) if text != training_verdict(metrics))
    first = next(text for text in others if not text.startswith("Raw inputs"))
    assert warned in first if warned else "set" not in first
    metrics["data"]["copied_samples"] = {"count": 3, "tested": 40, "test": "b.png", "train": "a.png"}
    assert "3 of 40 test samples are exact copies of training samples (first: b.png, a copy of a.png)" in " ".join(
        list_caveats(metrics)
    )


@pytest.mark.parametrize(
    ("first", "said", "warned"),
    [
        (15, "none of them was trained on, going by names (open set)", None),
        (
            0,
            "12 of them were also trained on, going by names (mixed set)",
            "12 of 20 test identities were also trained",
        ),
    ],
)
def test_of_other_data_names_are_all_that_tells_who_was_trained_on(made, tmp_path, first, said, warned):
    """As the command line says it: pictures of others who happen to be called the same look like acquaintances."""
    keep = np.flatnonzero(made.samples.labels >= first)
    strangers = replace(made.samples.take(keep), split=np.full(len(keep), NO_SPLIT, np.int8))
    found = evaluate_run(made.run, strangers, own_data=False, write=False)
    assert "going by names" in found.metrics["data"]["protocol"]
    facts = build_card(made.run, found.metrics)
    assert said in facts["about"]
    page = write_report(made.run, found, tmp_path / "page.html").read_text()
    assert said in card_to_markdown(facts) and said in page
    names = [text for text in facts["warnings"] if "Equal names may be chance" in text]
    assert len(names) == (warned is not None)
    assert all(warned in text and "on, going by names." in text for text in names)
    assert "going by names" not in card_to_markdown(build_card(made.run, made.evaluation.metrics))


def test_a_pair_of_a_run_names_its_files(tmp_path):
    from mettle.data.inputs import ImageFiles

    for k in range(4):
        Image.fromarray(np.full((8, 8), 40 * k, np.uint8)).save(tmp_path / f"{k}.png")
    files = [f"{k}.png" for k in range(4)]
    samples = Samples.of(ImageFiles(files, 8, 1, tmp_path), np.asarray([0, 0, 1, 1]))
    assert [describe_sample(samples.take(np.array([3, 1])), at)["name"] for at in (0, 1)] == ["3.png", "1.png"]


def test_an_audit_page_and_its_json_name_the_files(tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 5)
    x = rng.normal(size=(8, 6))[y] + 0.7 * rng.normal(size=(40, 6))
    x[7] = x[33]  # of another label: a suspect, and the hardest negative
    paths = np.asarray([f"shots/{k:03d}.jpg" for k in range(40)])
    np.savez(tmp_path / "z.npz", embeddings=x, label=y, path=paths)
    found = audit(read_embeddings(tmp_path / "z.npz"))
    page = write_audit(found, tmp_path / "out").read_text()
    facts = json.loads((tmp_path / "out" / "audit.json").read_text())
    hard = facts["hardest"]["impostor"][0]
    assert {hard["first"]["image"], hard["second"]["image"]} == {"shots/007.jpg", "shots/033.jpg"}
    assert facts["label_errors"]["ranked"][0]["image"].startswith("shots/")
    for name in (hard["first"]["image"], hard["second"]["image"], facts["label_errors"]["ranked"][0]["image"]):
        assert f"<code>{name}</code>" in page
    assert "shots/007.jpg and shots/033.jpg" in " ".join(facts["warnings"])
