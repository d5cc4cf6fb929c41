import copy
import json
import re
import shutil
from dataclasses import replace

import pytest

from mettle.errors import InputError, RunError
from mettle.report import write_comparison, write_report
from mettle.report.comparison_page import (
    describe_comparison,
    describe_difference,
    describe_paired,
    recipe_differences,
    scenario_table,
)
from mettle.report.headline import question_tiles
from mettle.train import open_run_folder


@pytest.fixture
def altered(made, tmp_path):
    """A copy of a run whose metrics one may change."""

    def make(change, name="changed"):
        folder = tmp_path / name
        shutil.copytree(made.run.folder, folder)
        metrics = made.run.metrics()
        change(metrics)
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
        return open_run_folder(folder)

    return make


def with_eer(value, low, high):
    metrics = {
        "data": {"fingerprint": "x"},
        "question": {"name": "verification"},
        "scenarios": {"all": {"verification": {"eer": {"value": value}}, "retrieval": {"metrics": {}}}},
    }
    metrics["scenarios"]["all"]["verification"]["eer"]["interval"] = low and {"low": low, "high": high}
    return metrics


def test_page_has_every_run_and_number(made, other, tmp_path):
    path = write_comparison([made.run, other.run], tmp_path / "comparison.html")
    text = path.read_text(encoding="utf-8")
    for run in (made, other):
        assert f"</span>{run.run.name}</th>" in text
        for v in run.evaluation.results.verifications.values():
            assert f"{v.auc:.4f}" in text
    assert "not a paired test" in text
    assert "Not comparable" not in text
    assert text.count("data:image/svg+xml") == 6 + text.count('alt="t-SNE map')


def test_only_the_keys_that_differ(made, other):
    found = {row["key"]: row["values"] for row in recipe_differences([made.run, other.run])}
    assert found == {"seed": ["0", "1"], "loss.temperature": ["", "0.2"]}
    assert recipe_differences([made.run, made.run]) == []


def test_verdict():
    apart = [with_eer(0.2, 0.15, 0.25), with_eer(0.05, 0.04, 0.06)]
    assert (
        describe_difference(["a", "b"], apart) == "b has the lowest EER, all pairs. It does not overlap with that of a."
    )
    touching = [with_eer(0.05, 0.04, 0.06), with_eer(0.06, 0.06, 0.08), with_eer(0.2, 0.15, 0.25)]
    text = describe_difference(["a", "b", "c"], touching)
    assert "overlaps with that of b, so the intervals do not separate them" in text
    assert "not overlap with that of c" in text
    assert "nothing can be said" in describe_difference(
        ["a", "b"], [with_eer(0.1, 0.05, 0.2), with_eer(0.1, None, None)]
    )


def test_different_data_are_not_comparable(made, altered, tmp_path):
    moved = altered(lambda m: m["data"].update(fingerprint="elsewhere"))
    facts = describe_comparison([made.run, moved])
    assert facts["warnings"][0].startswith("Not comparable")
    assert "elsewhere" in facts["warnings"][0]
    assert "cannot be compared" in facts["verdict"]
    assert facts["about"] == ""


def test_the_verdict_is_a_paired_test_where_there_is_one(closed, made, other, tmp_path):
    rows = [
        {
            "name": "EER",
            "difference": "−2.0\N{NO-BREAK SPACE}points",
            "interval": "−3.0 to −1.0",
            "decided": True,
            "better": True,
        },
        {
            "name": "AUC",
            "difference": "+1.0\N{NO-BREAK SPACE}points",
            "interval": "+0.1 to +2.0",
            "decided": True,
            "better": True,
        },
    ]
    text = " ".join(describe_paired([{"first": "a", "second": "b", "rows": rows, "why_not": ""}]).split())
    assert text == "EER of b is 2.0 points lower than that of a (95 % interval of the difference −3.0 to −1.0): better."
    rows[0] |= {"decided": False}
    assert "which may be chance" in describe_paired([{"first": "a", "second": "b", "rows": rows, "why_not": ""}])
    (table,) = describe_comparison([made.run, other.run])["paired"]
    assert table["rows"][0]["interval"] == "no interval: too few subjects"  # five identities
    (same,) = describe_comparison([closed.run, closed.run])["paired"]
    assert [row["name"] for row in same["rows"]] == ["Top-1", "Worst class", "Worst group"]
    assert not any(row["decided"] for row in same["rows"])


def test_best_of_each_column(made):
    first = made.run.metrics()
    second = copy.deepcopy(first)
    way = second["scenarios"]["cross-domain"]
    way["verification"]["eer"]["value"] += 0.01
    way["verification"]["auc"]["value"] += 0.001
    found = scenario_table("cross-domain", [first, second])
    best = {name: [row[k]["best"] for row in found["rows"]] for k, name in enumerate(found["columns"])}
    assert best["EER"] == [True, False]  # lower is better
    assert best["AUC"] == [False, True]
    assert best["MAP@R"] == [False, False]  # equal: nobody is best
    for spot in found["ranges"]:
        assert 0 <= spot["left"] <= spot["dot"] <= spot["right"] <= 100


def test_tables_begin_with_the_numbers_of_the_question(closed, ranked, made, other, tmp_path):
    """The same numbers in the same order as the page of a single run."""
    for run, name in ((closed, "Closed set: all test samples"), (ranked, "Retrieval: cross-domain")):
        facts = describe_comparison([run.run, run.run])
        first = facts["tables"][0]
        assert first["columns"] == [tile["name"] for tile in question_tiles(run.evaluation.metrics)]
        assert [cell["text"] for cell in first["rows"][0]] == [
            tile["text"] for tile in question_tiles(run.evaluation.metrics)
        ]
        assert (first["better"], len(first["ranges"])) == ("right", 2)
        text = write_comparison([run.run, run.run], tmp_path / "page.html").read_text(encoding="utf-8")
        assert re.findall(r"<h2>(.*?)</h2>", text.split("Paired differences")[-1])[0] == name
    columns = describe_comparison([closed.run, closed.run])["tables"][0]["columns"]
    assert columns[:3] == ["Top-1, linear probe", "Worst class", "Worst group"]
    whole, *scenarios = describe_comparison([ranked.run, made.run])["tables"]
    assert whole["columns"][:2] == ["Recall@1", "MAP@R"] and {"NMI", "F1"} <= set(whole["columns"])
    assert all(table["columns"][:2] == ["Recall@1", "MAP@R"] for table in scenarios)
    assert "EER" in scenarios[0]["columns"]
    assert [table["columns"][0] for table in describe_comparison([made.run, other.run])["tables"]] == ["EER", "EER"]


def test_a_run_that_cannot_answer_the_question_of_the_first_has_empty_cells(closed, made, tmp_path):
    table = describe_comparison([closed.run, made.run])["tables"][0]
    assert {cell["value"] for cell in table["rows"][1]} == {None} and table["ranges"][1] is None
    write_comparison([closed.run, made.run], tmp_path / "page.html")


def test_the_verdict_is_about_the_first_number_of_the_question(ranked):
    first, second = ranked.run.metrics(), copy.deepcopy(ranked.run.metrics())
    for metrics, value in ((first, 0.5), (second, 0.9)):
        entry = metrics["scenarios"]["cross-domain"]["retrieval"]["metrics"]["recall@1"]
        entry |= {"value": value, "interval": {"low": value - 0.1, "high": value + 0.1}}
    assert describe_difference(["a", "b"], [first, second]) == (
        "b has the highest Recall@1, cross-domain. It does not overlap with that of a."
    )


def test_a_scenario_that_one_run_lacks(made, table, tmp_path):
    text = write_comparison([made.run, table.run], tmp_path / "c.html").read_text(encoding="utf-8")
    assert "Not comparable" in text
    assert "<h2>All pairs</h2>" in text
    assert "<h2>Cross-domain</h2>" in text


def test_names_that_clash_are_told_apart_and_escaped(made, altered, tmp_path):
    bold = altered(lambda m: m.update(title="<b>bold</b>"), name="one")
    text = write_comparison([made.run, bold], tmp_path / "c.html").read_text(encoding="utf-8")
    assert str(bold.folder) in text
    assert "<b>bold</b>" not in text
    assert "&lt;b&gt;bold" in text


def test_errors_name_the_remedy(made, other, altered, tmp_path):
    with pytest.raises(InputError, match="at least two runs"):
        write_comparison([made.run], tmp_path / "c.html")
    bare = replace(made.run, folder=tmp_path)
    with pytest.raises(RunError, match="mettle evaluate"):
        write_comparison([made.run, bare], tmp_path / "c.html")
    old = altered(lambda m: m.update(format=0))
    with pytest.raises(RunError, match=r"format 0.*evaluate it again"):
        write_comparison([made.run, old], tmp_path / "c.html")
    assert not (tmp_path / "c.html").exists()


def test_one_map_per_encoder_of_the_same_samples(made, other, two, tmp_path):
    for one in (made, other, two):
        write_report(one.run, one.evaluation)
    found = describe_comparison([made.run, other.run, two.run])["maps"]
    domain, by_class = found["panes"]
    assert (domain["name"], by_class["name"]) == ("domain", "class")
    assert list(domain["images"]) == list(by_class["images"]) == ["one", "two", "both", "both, E_b"]
    assert len({*domain["images"].values(), *by_class["images"].values()}) == 8
    assert found["missing"] == [] and found["points"] == 40 and found["identities"] == 5
    assert len(found["marked"]) == 5 and [name for *_, name in domain["legend"]] == ["indoors", "out & about"]
    text = write_comparison([made.run, two.run], tmp_path / "c.html").read_text(encoding="utf-8")
    assert text.count('alt="t-SNE map') == 2 * 3 and "<h2>Maps of the embeddings</h2>" in text


def test_maps_of_other_weights_or_damaged_ones_are_not_drawn(made, altered, tmp_path):
    write_report(made.run, made.evaluation)
    stale = altered(lambda m: m.update(weights="others"), "stale")
    broken = altered(lambda m: None, "broken")
    (broken.folder / "map.json").write_text("{", encoding="utf-8")
    found = describe_comparison([made.run, stale, broken])["maps"]
    assert list(found["panes"][0]["images"]) == ["one"] and found["missing"] == ["stale", "broken"]
    (made.run.folder / "map.json").unlink()
    assert describe_comparison([made.run, stale])["maps"] is None
    assert "Maps of the" not in write_comparison([made.run, stale], tmp_path / "c.html").read_text(encoding="utf-8")


def test_probes_of_all_runs_are_in_one_table(made, two):
    (table,) = describe_comparison([made.run, two.run])["probes"]
    assert [row["name"] for row in table["rows"]] == ["both: E_d, the model", "both: E_b, the biased encoder"]
