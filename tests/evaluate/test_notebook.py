"""Results in notebooks: tables with the numbers of the summary, escaped, whatever is missing."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from mettle import evaluate
from mettle.evaluate.notebook import html_table

HOSTILE = '<b>a</b> & "b"'


def read_cells(text):
    """Every row of the tables in some HTML, which must be well-formed: its name and its values."""
    tree = ET.fromstring(f"<div>{text}</div>")
    return {row[0].text: [cell.text for cell in row[1:]] for row in tree.iter("tr")}


def rows_of(seed=0, subjects=12, each=5):
    rng, y = np.random.default_rng(seed), np.repeat(np.arange(subjects), each)
    return rng.normal(size=(subjects, 6))[y] + 0.5 * rng.normal(size=(len(y), 6)), y


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (math.nan, "–"),
        (np.float32("nan"), "–"),
        (math.inf, "inf"),
        (0.25, "0.2500"),
        (np.float64(0.25), "0.2500"),
        (12345, "12,345"),
        (np.int64(12345), "12,345"),
        ("text", "text"),
        (HOSTILE, HOSTILE),
    ],
)
def test_values_are_written_one_way(value, said):
    assert read_cells(html_table(HOSTILE, [("x", value)], [HOSTILE])) == {"x": [said]}
    assert "<b>a" not in html_table(HOSTILE, [(HOSTILE, value)], [HOSTILE], [HOSTILE]).replace("<b>&lt;", "")


def test_notebooks_show_results_as_tables_that_escape_names():
    rng = np.random.default_rng(0)
    y = np.repeat(["<b>a", "<b>b", "<b>c"], 20)
    x = rng.normal(size=(3, 6))[np.repeat(np.arange(3), 20)] + 0.5 * rng.normal(size=(60, 6))
    v, r = evaluate.verification(x, y), evaluate.retrieval(x, y, k=1)
    p = evaluate.probe((x[::2], y[::2]), (x[1::2], y[1::2]), k=3)
    many = np.repeat(np.arange(12), 5)
    z = rng.normal(size=(12, 6))[many] + 0.5 * rng.normal(size=(60, 6))
    better = evaluate.compare(*(evaluate.verification(z + s * rng.normal(size=z.shape), many) for s in (0, 1)))
    clusters = evaluate.clustering(x, y, seeds=1)
    shown = ((v, v.eer), (r, r.map_at_r), (clusters, clusters.nmi), (p, p.linear.accuracy), (better, better.first))
    for result, value in shown:
        text = result._repr_html_()
        ET.fromstring(f"<div>{text}</div>")
        assert "<b>a" not in text and f"{value:.4f}" in text


def test_an_identification_shows_the_numbers_of_its_summary():
    x, y = rows_of()
    gallery, probes = (x[::5][:8], y[::5][:8]), (np.delete(x, np.s_[::5], 0), np.delete(y, np.s_[::5]))
    found = evaluate.identification(gallery, probes)
    cells, facts = read_cells(found._repr_html_()), found.summary()
    for name, entry in facts["metrics"].items():
        assert [f"{entry['value']:.4f}"] in cells.values(), name
    for point in facts["tpir"]:
        said = f"{point['tpir']:.4f}" if point["status"] == "ok" else point["status"]
        assert cells[f"TPIR at FPIR {point['fpir']:g}"] == [said]
    counts = ["enrolled identities", "mated probes", "unknown probes"]
    assert [cells[name] for name in counts] == [[f"{facts[k]}"] for k in ("enrolled", "mated", "unknown")]
    closed = evaluate.identification((x[::5], y[::5]), probes)  # no strangers: nothing at an FPIR
    assert read_cells(closed._repr_html_())["TPIR at FPIR 0.01"] == ["not measurable"]


def test_groups_show_the_numbers_of_their_summary_worst_first():
    x, y = rows_of()
    names = np.where(y < 5, HOSTILE, np.where(y < 11, "second", "alone"))  # one person makes no impostor pair
    for result in (evaluate.verification(x, y), evaluate.retrieval(x, y, k=1)):
        found = evaluate.groups(result, names, far=0.1, minimum=3)
        cells, facts = read_cells(found._repr_html_()), found.summary()
        head = cells.pop(None)
        assert head[0] == facts["metric"] and head[-2:] == ["samples", "subjects"]
        assert next(iter(cells)) == facts["worst"] and set(cells) == {HOSTILE, "second", "alone"}
        for row in facts["groups"]:
            for name, text in zip(head, cells[row["name"]], strict=True):
                value = row.get(name)
                assert text == ("–" if value is None else f"{value}" if isinstance(value, int) else f"{value:.4f}")
        assert "<b>a" not in found._repr_html_()


def test_an_audit_shows_the_numbers_of_its_summary():
    x, y = rows_of()
    names, room = np.char.add(HOSTILE, y.astype(str)), np.tile(["in", "out"], 30)
    for given in ({}, {"domains": room}):
        found = evaluate.audit(x, names, fars=(0.1, 1e-6), **given)
        text = found._repr_html_()
        cells, scenarios = read_cells(text), list(found.summary()["scenarios"].values())
        assert cells.pop(None) == [way.title for way in found.ways.values()]
        assert cells["EER"] == [f"{s['verification']['eer']['value']:.4f}" for s in scenarios]
        assert cells["AUC"] == [f"{s['verification']['auc']['value']:.4f}" for s in scenarios]
        near = [s["retrieval"] for s in scenarios]  # None where a way of pairing leaves too few candidates
        assert cells["Recall@1"] == ["–" if r is None else f"{r['metrics']['recall@1']['value']:.4f}" for r in near]
        assert cells["TAR at FAR 1e-06"] == ["not measurable"] * len(scenarios)
        assert cells["NMI"][0] == f"{found.clustering.nmi:.4f}"
        assert all(why in "".join(ET.fromstring(f"<div>{text}</div>").itertext()) for why in found.missing.values())
        assert "<b>a" not in text
