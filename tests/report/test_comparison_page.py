import copy
import json
import shutil
from dataclasses import replace

import pytest

from mettle.errors import InputError, RunError
from mettle.report import write_comparison, write_report
from mettle.report.comparison_page import describe_comparison, describe_difference, recipe_differences, scenario_table
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
        "scenarios": {"all": {"verification": {"eer": {"value": value}}}},
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
    assert [d["name"] for d in found["drawings"]] == ["one", "two", "both", "both, E_b"]
    assert len({d["image"] for d in found["drawings"]}) == 4
    assert found["missing"] == [] and found["points"] == 40 and found["identities"] == 5
    assert len(found["marked"]) == 5 and [name for *_, name in found["legend"]] == ["indoors", "out & about"]
    text = write_comparison([made.run, two.run], tmp_path / "c.html").read_text(encoding="utf-8")
    assert text.count('alt="t-SNE map') == 3 and "<h2>Maps of the embeddings</h2>" in text


def test_maps_of_other_weights_or_damaged_ones_are_not_drawn(made, altered, tmp_path):
    write_report(made.run, made.evaluation)
    stale = altered(lambda m: m.update(weights="others"), "stale")
    broken = altered(lambda m: None, "broken")
    (broken.folder / "map.json").write_text("{", encoding="utf-8")
    found = describe_comparison([made.run, stale, broken])["maps"]
    assert [d["name"] for d in found["drawings"]] == ["one"] and found["missing"] == ["stale", "broken"]
    (made.run.folder / "map.json").unlink()
    assert describe_comparison([made.run, stale])["maps"] is None
    assert "Maps of the" not in write_comparison([made.run, stale], tmp_path / "c.html").read_text(encoding="utf-8")


def test_probes_of_all_runs_are_in_one_table(made, two):
    (table,) = describe_comparison([made.run, two.run])["probes"]
    assert [row["name"] for row in table["rows"]] == ["both: E_d, the model", "both: E_b, the biased encoder"]
