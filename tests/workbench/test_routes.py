"""The workbench over HTTP, on runs that were just trained: what it answers, and what it refuses."""

import io
import json
import struct

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

from mettle.errors import InputError
from mettle.workbench import routes
from mettle.workbench.lazy_run import LazyRun
from tests.workbench.runs import HOSTILE, pictures, rows, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="module")
def run(folder):
    pictures(folder / "pictures.npz")
    return trained(folder, folder / "pictures.npz", "one")


@pytest.fixture(scope="module")
def table(folder):
    rows(folder / "rows.npz")
    return trained(folder, folder / "rows.npz", "numbers")


@pytest.fixture(scope="module")
def client(run, table):
    app = FastAPI()
    app.include_router(routes([run, table]))
    with TestClient(app) as client:
        yield client


def test_facts_name_everything_and_numbers_are_those_of_the_metrics(client, run):
    facts = client.get("/workbench/api/runs/0").json()
    assert facts["samples"] == 64 and len(facts["labels"]) == 8 and HOSTILE in facts["labels"]
    assert {c["name"]: c["names"] for c in facts["columns"]} == {
        "domain": ["indoors", "out & about"],
        "hand": ["left", "right"],
    }
    eer = run.metrics()["scenarios"]["cross-domain"]["verification"]["eer"]
    assert facts["numbers"][0]["name"] == "EER" and facts["numbers"][0]["text"].startswith(f"{100 * eer['value']:.2f}")
    assert facts["numbers"][0]["has_interval"] == (eer["interval"] is not None)
    assert facts["warnings"] == []


def test_rows_have_no_pictures_but_all_the_rest(client):
    assert client.get("/workbench/api/runs/1").json()["kind"] == "row"
    assert client.get("/workbench/api/runs/1/picture/0").status_code == 404
    for part in ("points", "counts", "training", "pairs/negatives", "pairs/labels"):
        assert client.get(f"/workbench/api/runs/1/{part}").status_code == 200, part


def test_a_picture_is_the_sample(client, folder):
    with np.load(folder / "pictures.npz") as file:
        images = file["images"][file["split"] == 2]
    answer = client.get("/workbench/api/runs/0/picture/17")
    assert answer.headers["content-type"] == "image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), images[17, :, :, 0])


BAD = [
    "runs/2", "runs/-1", "runs/99999999999999999999", "runs/x", "runs/0/picture/64", "runs/0/picture/-1",
    "runs/0/picture/..%2f..%2fcontract.json", "runs/0/picture/1e3", "runs/0/pairs/everything",
    "runs/0/pairs/negatives?label=8", "runs/0/pairs/negatives?label=-1", "runs/0/pairs/negatives?quartile=9",
    "runs/0/pairs/negatives?column=0", "runs/0/pairs/negatives?column=2&value=0", "runs/0/pairs/negatives?count=0",
    "runs/0/pairs/negatives?column=0&value=2", "runs/0/pairs/negatives?count=1000", "runs/0/at",
    "runs/0/at?threshold=nan", "runs/0/pairs/accepts?threshold=inf",
    "compare/0/2", "compare/a/b", "identify", "verify",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD)
def test_S_ids_out_of_range_and_nonsense_are_refused(client, path):
    assert client.get(f"/workbench/api/{path}").status_code in (404, 422)


@pytest.mark.parametrize(
    "name", ["..%2froutes.py", "%2e%2e/routes.py", "index.html", "../routes.py", "no.js", "", "%00"]
)
def test_S_only_listed_files_are_sent(client, name):
    assert client.get(f"/workbench/static/{name}").status_code == 404


def test_S_every_answer_carries_a_strict_policy(client):
    page = client.get("/workbench")
    assert page.status_code == 200 and str(page.url).endswith("/workbench/")
    for path in ("", "/static/app.js", "/static/style.css", "/api/runs", "/api/runs/0", "/api/runs/0/picture/0"):
        headers = client.get(f"/workbench{path}").headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text and "style=" not in page.text and "://" not in page.text


def test_filters_keep_pairs_of_which_one_side_passes(client):
    facts = client.get("/workbench/api/runs/0").json()
    body = client.get("/workbench/api/runs/0/points").content
    (size,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + size])
    arrays = {
        a["name"]: np.frombuffer(body, f"<{a['type']}", a["length"], 4 + size + a["offset"]) for a in header["arrays"]
    }
    cases = [
        ({"label": 3}, arrays["label"] == 3),
        ({"text": "PERSON 1"}, np.asarray(["person 1" in facts["labels"][c] for c in arrays["label"]])),
        ({"quartile": 3}, arrays["quartile"] == 3),
        ({"column": [0, 1], "value": [1, 0]}, (arrays["column.0"] == 1) & (arrays["column.1"] == 0)),
        ({"text": "nobody of that name"}, np.zeros(64, bool)),
    ]
    for query, passes in cases:
        for kind in ("positives", "negatives", "accepts", "rejects"):
            asked = {"count": 96, "threshold": 0.5, **query}
            pairs = client.get(f"/workbench/api/runs/0/pairs/{kind}", params=asked).json()["pairs"]
            assert bool(pairs) == bool(passes.any()) or kind in ("accepts", "rejects"), (query, kind)
            assert all(passes[p["first"]] or passes[p["second"]] for p in pairs)


def test_what_was_computed_is_kept_and_follows_the_weights(folder, run):
    held = sorted(folder.glob("one/workbench-*.npz"))
    assert held
    weights = run.contract()["weights"][:16]
    assert all(weights in path.name for path in held)
    again = LazyRun(run)
    first = again.data().embeddings
    path = next(p for p in held if "embeddings" in p.name)
    path.write_bytes(path.read_bytes()[:100])
    assert np.array_equal(LazyRun(run).data().embeddings, first)


def test_changed_data_and_missing_metrics_are_told(folder):
    pictures(folder / "moved.npz")
    one = trained(folder, folder / "moved.npz", "moved")
    (folder / "moved" / "metrics.json").unlink()
    with np.load(folder / "moved.npz") as file:
        arrays = dict(file)
    arrays["images"] = arrays["images"] ^ 1
    np.savez(folder / "moved.npz", **arrays)
    facts = LazyRun(one).data().facts()
    assert facts["numbers"] == [] and len(facts["warnings"]) == 2
    assert "changed" in facts["warnings"][0]


def test_runs_on_other_data_are_not_compared(client):
    answer = client.get("/workbench/api/compare/0/1")
    assert answer.status_code == 422 and "cannot be compared" in answer.json()["error"]


def test_a_workbench_without_runs_is_refused():
    with pytest.raises(InputError, match="at least one run"):
        routes([])
