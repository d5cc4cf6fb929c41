"""Pages begin with the question that the run answers."""

import copy
import re

from mettle.report.caveats import rank_caveats, training_verdict
from mettle.report.headline import headline_lines, question_tiles
from mettle.report.run_card import build_card, card_to_markdown
from mettle.report.run_page import write_report


def test_a_closed_set_begins_with_top_1_and_the_worst(closed, tmp_path):
    metrics = closed.evaluation.metrics
    assert metrics["question"]["name"] == "closed-set"
    labels = metrics["probe"]["labels"]
    one, before = labels["encoders"]["model"], labels["baselines"]["untrained network"]
    tiles = {tile["name"]: tile for tile in question_tiles(metrics)}
    assert list(tiles)[:3] == ["Top-1, linear probe", "Worst class", "Worst group"]
    for name, value in (
        ("Top-1, linear probe", one["linear"]["accuracy"]),
        ("Worst class", one["linear"]["worst_class"]["accuracy"]),
        ("Worst group", one["worst_group"]["linear"]),
    ):
        assert tiles[name]["text"].startswith(f"{100 * value:.1f}") and "–" in tiles[name]["interval"]
    gain = before["gain"]["top_1"]
    assert gain["difference"] == one["linear"]["accuracy"] - before["accuracy"]
    assert gain["interval"]["low"] <= gain["difference"] <= gain["interval"]["high"]
    assert set(before["gain"]) == {"top_1", "worst_class", "worst_group"}
    text = write_report(closed.run, closed.evaluation, tmp_path / "page.html").read_text()
    heads = re.findall(r"<h2>(.*?)</h2>", text)
    assert heads[0] == "What can be read from frozen features"
    assert "What training brought" in card_to_markdown(build_card(closed.run, metrics))
    assert headline_lines(metrics)[0].startswith("closed set")


def test_training_is_judged_by_the_number_of_the_question(closed, ranked):
    metrics = copy.deepcopy(closed.evaluation.metrics)
    gain = metrics["probe"]["labels"]["baselines"]["untrained network"]["gain"]["top_1"]
    for way in metrics["scenarios"].values():  # what EER says is another question
        way["verification"]["eer"]["value"] = 0.5
    gain |= {"first": 0.9, "difference": 0.2, "interval": {"low": 0.1, "high": 0.3}}
    assert training_verdict(metrics) == "" and "may be chance" not in " ".join(rank_caveats(metrics).decisive)
    gain["interval"]["low"] = -0.1
    assert "may be chance" in " ".join(rank_caveats(metrics).decisive)
    gain["difference"] = -0.1
    assert training_verdict(metrics).startswith("Training has not helped: top-1")
    metrics = copy.deepcopy(ranked.evaluation.metrics)
    own = metrics["scenarios"]["cross-domain"]["retrieval"]["metrics"]["recall@1"]
    before = metrics["baselines"]["untrained network"]["cross-domain"]
    own["value"], before["recall@1"], before["eer"] = 0.5, 0.4, 0.0
    metrics["baselines"]["untrained network"]["in-domain"]["recall@1"] = 0.0
    assert training_verdict(metrics) == ""
    before["recall@1"] = 0.6
    assert training_verdict(metrics).startswith("Training has not helped: cross-domain, Recall@1")


def test_retrieval_begins_with_recall_and_shows_clusters(ranked, tmp_path):
    metrics = ranked.evaluation.metrics
    assert metrics["question"]["name"] == "retrieval"
    names = [tile["name"] for tile in question_tiles(metrics)]
    assert names[:2] == ["Recall@1", "MAP@R"] and {"NMI", "F1"} <= set(names)
    value = metrics["clustering"]["metrics"]["nmi"]["value"]
    assert f"NMI {value:.3f}" in headline_lines(metrics)[0]
    card = build_card(ranked.run, metrics)
    assert card["rows"][0]["name"] == "Recall@1"
    text = write_report(ranked.run, ranked.evaluation, tmp_path / "page.html").read_text()
    assert text.index(">Recall@1, ") < text.index("EER")


def test_verification_begins_with_the_eer(made):
    assert made.evaluation.metrics["question"]["name"] == "verification"
    assert question_tiles(made.evaluation.metrics)[0]["name"] == "EER"
    assert headline_lines(made.evaluation.metrics) == []
