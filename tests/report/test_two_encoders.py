"""The pictures that only a run of two encoders has, against weights worked out by hand."""

import json
import re

import numpy as np
import pytest
import torch
from tables import make_two

from mettle.report import write_report
from mettle.report.embedding_map import MapLayout, compute_layout, tsne
from mettle.report.run_card import build_card, card_to_markdown
from mettle.report.two_encoders import (
    choose_anchors,
    encoder_maps,
    negatives_by_difficulty,
    read_maps,
    weights_by_group,
    write_maps,
)
from mettle.train import callbacks as logs


def unit(model, samples):
    x = torch.from_numpy(samples.read(np.arange(len(samples)))).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        z = model.eval()(x).double().numpy()
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def weights_by_hand(run, samples, temperature=0.1):
    """1 + ŝ_d / (ŝ_d + ŝ_b) with e^{s/t} divided by its norm over the anchor's negatives."""
    n = len(samples)
    rows = []
    for model in (run.model(), run.biased_model()):
        e = np.exp(unit(model, samples) @ unit(model, samples).T / temperature)
        e[np.eye(n, dtype=bool)] = 0
        rows.append(e / np.sqrt((e**2).sum(1, keepdims=True)))
    return 1 + rows[0] / (rows[0] + rows[1] + 1e-300)


def test_negatives_are_ordered_by_w(two):
    found = negatives_by_difficulty(two.run, two.samples)
    part = two.samples.part("train")  # validation has too few samples
    assert (found["split"], found["count"]) == ("training", len(part))
    temperature = two.run.recipe.build_loss().temperature
    w = weights_by_hand(two.run, part, temperature)
    at = {int(i): k for k, i in enumerate(part.ids)}
    for entry in found["anchors"]:
        row = at[entry["anchor"]["id"]]
        others = np.array([j for j in range(len(part)) if j != row])
        order = others[np.argsort(w[row, others], kind="stable")]
        for kind, expected in (("easy", order[:5]), ("hard", order[::-1][:5])):
            shown = [at[other["id"]] for other in entry[kind]]
            np.testing.assert_allclose(w[row, shown], w[row, expected], rtol=1e-5)
            for other, j in zip(entry[kind], shown, strict=True):
                assert other["w"] == f"{w[row, j]:.2f}" and other["same"] == (part.labels[row] == part.labels[j])
    off = w[~np.eye(len(part), dtype=bool)]
    assert float(found["mean"]) == pytest.approx(off.mean(), abs=1e-3)
    assert float(found["spread"]) == pytest.approx(off.std(), abs=1e-3)
    same = part.labels[:, None] == part.labels[None, :]
    assert found["alike"][0]["shares"][0] == f"{100 * (same.sum() - 96) / (96 * 95):.1f}\N{NO-BREAK SPACE}%"
    assert [row["name"] for row in found["alike"]] == ["same label", "same domain"]


def test_the_same_run_shows_the_same_negatives(two):
    assert negatives_by_difficulty(two.run, two.samples) == negatives_by_difficulty(two.run, two.samples)


def test_anchors_have_different_labels_and_groups_in_turn():
    labels, groups = np.repeat(np.arange(10), 6), np.tile([0, 0, 0, 0, 0, 1], 10)
    found = choose_anchors(labels, groups)
    assert len(set(labels[found].tolist())) == 4
    assert sorted(groups[found].tolist()) == [0, 0, 1, 1]
    assert len(choose_anchors(np.zeros(9, int), None)) == 1


def test_the_log_has_means_by_group_and_the_table_shows_late_ones(two):
    lines = logs.read_log(two.run.folder / "log.jsonl")
    assert all("weight_by_group" in line for line in lines), "the domain is watched without being asked for"
    found = weights_by_group(two.run, two.samples, lines)
    assert found["names"] == ["indoors", "out & about"] and found["lines"] == 3
    expected = np.mean([line["weight_by_group"]["indoors / out & about"] for line in lines[-3:]])
    assert found["rows"][0]["cells"][1]["text"] == f"{expected:.3f}"
    shades = [cell["shade"] for row in found["rows"] for cell in row["cells"]]
    assert min(shades) == 0 and max(shades) == 45
    assert weights_by_group(two.run, two.samples, [{"step": 1}]) is None


def test_maps_of_both_encoders_show_the_same_samples(two):
    found = encoder_maps(two.run, two.evaluation.results)
    assert list(found) == ["E_d", "E_b"]
    d, b = found.values()
    assert np.array_equal(d.rows, b.rows) and d.marked == b.marked
    assert not np.allclose(d.place, b.place)
    test = two.samples.part("test")
    own = unit(two.run.biased_model(), test).astype(np.float32)[b.rows]
    assert np.array_equal(tsne(own, 0).shape, b.place.shape)
    near = np.argsort(np.linalg.norm(b.place[:, None] - b.place[None], axis=2), axis=1)[:, 1]
    assert (own * own[near]).sum(1).mean() > (own @ own.T).mean(), "neighbours on the map are neighbours in E_b"


def test_maps_are_kept_and_read_back(two):
    found = encoder_maps(two.run, two.evaluation.results)
    write_maps(two.run, found, two.evaluation.results, two.evaluation.metrics)
    again, names = read_maps(two.run, two.evaluation.metrics)
    for name, one in found.items():
        np.testing.assert_allclose(again[name].place, one.place, atol=1e-3 * np.ptp(one.place))
        assert np.array_equal(again[name].rows, one.rows) and again[name].colorings[0].names == one.colorings[0].names
    assert names == [two.samples.label.names[k] for k in found["E_d"].marked]
    assert (two.run.folder / "map.json").stat().st_size < 60_000
    assert read_maps(two.run, {**two.evaluation.metrics, "weights": "others"}) is None
    write_maps(two.run, {}, two.evaluation.results, two.evaluation.metrics)
    assert read_maps(two.run, two.evaluation.metrics) is None


def test_located_reads_back_itself(made):
    one = compute_layout(made.evaluation.results)
    back = MapLayout.of(json.loads(json.dumps(one.as_dict())))
    assert np.array_equal(back.colorings[0].codes, one.colorings[0].codes) and back.marked == one.marked


@pytest.fixture(scope="module")
def page(two):
    return write_report(two.run, two.evaluation).read_text(encoding="utf-8")


def test_the_page_has_what_two_encoders_have(page, two):
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert "What can be read from frozen features" in heads and "Negatives by relative difficulty" in heads
    assert page.count('class="anchor card"') == 4
    assert "Mean w by group, in training" in page
    assert page.count('alt="t-SNE map') == 2 * 2  # of both encoders, coloured by domain and by class
    for title in ("Weight of negatives", "Weight by group", "Loss of the biased encoder"):
        assert f'alt="{title} over training steps"' in page
    assert write_report(two.run, two.evaluation).read_text(encoding="utf-8") == page
    assert len(page) < 3_000_000


def test_a_run_of_one_encoder_has_none_of_it(made):
    text = write_report(made.run, made.evaluation).read_text(encoding="utf-8")
    assert "Negatives by relative difficulty" not in text and text.count('alt="t-SNE map') == 2


def test_card_and_page_tell_the_probes(page, two):
    facts = build_card(two.run, two.evaluation.metrics)
    labels, attribute = facts["probe"]["targets"]
    assert labels["status"].startswith("not applicable (open set)") and labels["rows"] == []
    measured = two.evaluation.metrics["probe"]["attribute"]["encoders"]
    for row, name in zip(attribute["rows"], ("E_d", "E_b"), strict=True):
        value = measured[name]["linear"]["accuracy"]
        assert row["cells"][0]["text"] == f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
        assert row["cells"][0]["text"] in page
    assert any("than from E_b" in note for note in attribute["notes"])
    text = card_to_markdown(facts)
    assert "## Probes" in text and "**Who or what it is**: not applicable (open set)" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_rows_get_a_table_and_controls_are_named(folder, table):
    one = make_two(folder, folder / "rows.npz", "rows-two", weights="mean")
    text = write_report(one.run, one.evaluation).read_text(encoding="utf-8")
    assert "hardest by w: w, sample, label" in text and 'class="anchor card"' not in text
    assert "their mean instead (a control)" in " ".join(text.split())
    assert "Mean w by group" not in text, "no column, no groups"


def test_a_closed_set_shows_worst_class_and_groups(folder, made):
    arrays = dict(np.load(folder / "pictures.npz"))
    arrays["split"] = np.tile([0, 1, 2, 2], 40)
    np.savez(folder / "shut-pictures.npz", **arrays)
    one = make_two(folder, folder / "shut-pictures.npz", "shut")
    labels = one.evaluation.metrics["probe"]["labels"]
    assert labels["status"] == "ok" and labels["tested_on"] == 80
    found = build_card(one.run, one.evaluation.metrics)["probe"]
    assert found["targets"][0]["columns"][-2:] == ["worst (class, group)", "adjusted"]
    assert [group["title"] for group in found["groups"]] == ["domain"]
    assert any("partly chance" in note for note in found["targets"][0]["notes"])
    text = write_report(one.run, one.evaluation).read_text(encoding="utf-8")
    assert "Who or what it is" in text and "<h3>By group</h3>" in text
