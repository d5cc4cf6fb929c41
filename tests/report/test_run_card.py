import copy
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tables import make_results
from typer.testing import CliRunner

from mettle.cli import app
from mettle.evaluate.run.scenarios import summarize_scenarios
from mettle.report.caveats import list_caveats, training_verdict
from mettle.report.format import format_measured_rate, format_percent, format_rate
from mettle.report.metric_tables import headline_tiles, metric_cells
from mettle.report.run_card import build_card, card_to_markdown
from mettle.report.run_page import write_report

NBSP = "\N{NO-BREAK SPACE}"


def test_numbers_as_text():
    assert format_percent(0.043611) == f"4.36{NBSP}%"
    assert format_percent(None) == "–"
    assert [format_rate(v) for v in (0.1, 0.01, 1e-3, 1e-6)] == [f"{v}{NBSP}%" for v in ("10", "1", "0.1", "0.0001")]
    assert [format_measured_rate(v) for v in (0.10983, 0.000268, 1.0)] == [
        f"{v}{NBSP}%" for v in ("11.0", "0.0268", "100")
    ]


def test_every_number_comes_with_its_interval():
    found = make_results("all")
    v = found.verifications["all"]
    eer = metric_cells(summarize_scenarios(found, (0.1,))["all"])[0]
    band = v.interval("eer")
    assert band.low < band.high
    assert eer["text"] == format_percent(v.eer)
    assert eer["interval"] == f"{100 * band.low:.2f}–{100 * band.high:.2f}{NBSP}%"


def test_card_is_plain_and_tells_the_protocol(made):
    facts = build_card(made.run, made.evaluation.metrics)
    assert json.loads(json.dumps(facts))["headline"] == "cross-domain"
    assert "open set" in facts["about"]
    assert "40 samples of 5 identities" in facts["about"]
    assert [bar["name"] for bar in facts["bars"]] == ["this model", "untrained network", "raw inputs"]
    assert max(bar["width"] for bar in facts["bars"]) == pytest.approx(100)
    stated = dict(facts["provenance"])
    assert stated["weights (SHA-256)"] == made.run.contract()["weights"]
    assert stated["data fingerprint"] == made.run.state["data"]


def test_thresholds_show_what_they_do_on_test(made):
    metrics = made.evaluation.metrics
    for row, (far, entry) in zip(
        build_card(made.run, metrics)["thresholds"], metrics["thresholds"]["set"].items(), strict=True
    ):
        assert row["far"] == format_rate(float(far))
        for cell in row["test"]:
            if entry["threshold"] is not None:
                assert cell["scenario"] in metrics["scenarios"]
                point = metrics["thresholds"]["on test"][cell["scenario"]][far]
                assert cell["far"] == format_measured_rate(point["far"])
                assert cell["above"] == (point["far"] > float(far))


def test_warnings_say_what_is_weak(made, table):
    found = " ".join(list_caveats(made.evaluation.metrics))
    assert "Only 5 test identities" in found
    assert "TAR at FAR" in found  # a thousandth of so few impostor pairs is less than one
    assert "Closed set" not in found
    assert "no domains" in " ".join(list_caveats(table.evaluation.metrics))
    closed = copy.deepcopy(made.evaluation.metrics)
    closed["data"]["shared_identities"] = 3
    del closed["baselines"]
    assert "Mixed set: 3 of 5" in list_caveats(closed)[0]
    closed["data"]["shared_identities"] = 5
    assert "Closed set: 5 of 5" in list_caveats(closed)[0]


def test_a_baseline_that_wins_leads_all_warnings_in_one_sentence(made):
    metrics = copy.deepcopy(made.evaluation.metrics)
    eer = metrics["scenarios"]["cross-domain"]["verification"]["eer"]["value"]
    for values in metrics["baselines"].values():
        for way in values.values():
            way["eer"] = 0.9
    assert training_verdict(metrics) == "" and "has not helped" not in " ".join(list_caveats(metrics))
    metrics["baselines"]["raw inputs"]["cross-domain"]["eer"] = eer
    model = f"cross-domain, EER {format_percent(eer)} of this model against"
    assert training_verdict(metrics) == ""  # it was worse before: raw inputs are another matter
    assert list_caveats(metrics)[0] == f"Raw inputs do as well: {model} {format_percent(eer)} of the raw inputs."
    metrics["baselines"]["untrained network"]["cross-domain"]["eer"] = 0.0
    metrics["data"]["shared_identities"] = 5
    first, second, *others = list_caveats(metrics)
    assert first == training_verdict(metrics)
    assert first == f"Training has not helped: {model} {format_percent(0.0)} of the untrained network."
    assert second.startswith("Raw inputs do as well") and others[0].startswith("Closed set")
    metrics["scenarios"]["cross-domain"]["verification"]["eer"]["value"] = 0.0
    assert training_verdict(metrics) == ""  # no error is left that training could have removed


def test_what_decides_is_marked_on_the_card_and_the_page(made, tmp_path):
    metrics = copy.deepcopy(made.evaluation.metrics)
    for values in metrics["baselines"].values():
        for way in values.values():
            way["eer"] = 0.0
    run = replace(made.run, folder=Path(shutil.copytree(made.run.folder, tmp_path / "run")))  # its card is written too
    page = write_report(run, replace(made.evaluation, metrics=metrics), tmp_path / "page.html").read_text()
    facts = build_card(run, metrics)
    assert page.count("Training has not helped") == 1
    assert page.index('<p class="decisive">Training has not helped') < page.index("Before you trust these numbers")
    quoted = [line for line in card_to_markdown(facts).splitlines() if line.startswith("> **")]
    assert quoted[0].startswith("> **Training has not helped: ") and quoted[0].endswith(".**")
    count = len(facts["decisive"])
    assert len(quoted) == len(facts["warnings"]) > count and facts["warnings"][:count] == facts["decisive"]
    assert [line.startswith("> **Warning.** ") for line in quoted] == [False] * count + [True] * (len(quoted) - count)


def test_unmeasurable_rate_is_no_headline(made):
    found = {tile["name"]: tile for tile in headline_tiles(made.evaluation.metrics)}
    tile = found[f"TAR at FAR 0.1{NBSP}%"]
    assert tile["text"] == "–"
    assert "too few impostor pairs" in tile["meaning"]


def test_changed_data_are_pointed_out(made):
    moved = replace(made.run, state={**made.run.state, "data": "another"})
    assert not any("fingerprint" in text for text in build_card(made.run, made.evaluation.metrics)["warnings"])
    assert any("another then" in text for text in build_card(moved, made.evaluation.metrics)["warnings"])


def test_metrics_without_baselines_and_thresholds(made):
    bare = {k: v for k, v in made.evaluation.metrics.items() if k not in ("baselines", "thresholds")}
    facts = build_card(made.run, bare)
    assert facts["thresholds"] == []
    assert len(facts["bars"]) == 1
    assert "## Thresholds" not in card_to_markdown(facts)


def test_markdown_tables_are_whole(made):
    text = card_to_markdown(build_card(made.run, made.evaluation.metrics, notes=["a | b <b>"]))
    assert "a \\| b &lt;b>" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1
    assert "cross-domain" in text
    assert made.run.contract()["weights"] in text


def test_commands_are_ones_that_the_command_line_knows(made):
    for command in build_card(made.run, made.evaluation.metrics)["commands"]:
        program, verb, *rest = shlex.split(command["line"])
        shown = CliRunner().invoke(app, [verb, "--help"])
        assert program == "mettle"
        assert shown.exit_code == 0
        assert all(option in shown.output for option in rest if option.startswith("-"))
