"""Similarity learning end to end on a small set: three losses on tables, resume, leaks, figures on pairs held out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from mettle.cli import app
from mettle.data import Pairs, Triplets, read
from mettle.errors import DataError, RecipeError, RunError
from mettle.evaluate.run import evaluate_run
from mettle.evaluate.run.pair_tables import (
    measure_tuples,
    rank_auc,
    rank_correlation,
    tuple_metrics,
    write_pair_metrics,
)
from mettle.losses import SimilarityClassification, SimilarityRanking, SimilarityRegression
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Similarity, checkpoint, load, open_run_folder
from mettle.train.datamodule import prepare_samples, prepare_training_data
from mettle.train.from_recipe import build_method_and_loader, train
from mettle.train.recipe import Recipe, parse_recipe
from oracles import similarity as oracle
from processes import run_mettle

from ..conftest import make_npz, tiny
from ..test_from_recipe import Stop, content, until

LOSSES = {
    "regression": {"kind": "SimilarityRegression"},
    "classification": {"kind": "SimilarityClassification", "scale": 5.0},
    "ranking": {"kind": "SimilarityRanking", "form": "hinge", "margin": 0.3},
}


def recipe_for(kind: str, source: Path, table: str | Path = "same-class", data: dict | None = None, **train) -> Recipe:
    loss = LOSSES[kind]
    return parse_recipe(
        {
            "data": {"source": str(source), "triplets" if kind == "ranking" else "pairs": str(table)} | (data or {}),
            "batch": {"size": 8, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": loss,
            "train": {"method": "similarity", "steps": 12, "checkpoint_every": 2, "log_every": 3} | train,
        }
    )


def write(path: Path, header: str, rows) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="session")
def tables(source, tmp_path_factory) -> dict[str, Path]:
    """A table for each loss, of rows of the NPZ by number; grades are graded, weights are uneven."""
    folder, samples = tmp_path_factory.mktemp("tables"), read(source)
    pairs, triplets = Pairs.same_class(samples), Triplets.same_class(samples)
    graded = [
        (*ids, round(target - 0.1 * (k % 5), 2), 1 + k % 2)
        for k, (ids, target) in enumerate(zip(pairs.members, pairs.target, strict=True))
    ]
    return {
        "regression": write(folder / "grades.csv", "first,second,target,weight", graded),
        "classification": write(
            folder / "pairs.csv", "first,second,target", zip(*pairs.members.T, pairs.target.astype(int), strict=True)
        ),
        "ranking": write(folder / "triplets.csv", "anchor,positive,negative", triplets.members),
    }


@pytest.fixture(scope="module")
def wholes(source, tables, tmp_path_factory) -> dict[str, Path]:
    """For each loss, the run that nobody interrupts."""
    folders = {}
    for kind in LOSSES:
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        write_pair_metrics(train(recipe_for(kind, source, tables[kind]), folders[kind], tensorboard=False))
    return folders


def everything(folder: Path) -> tuple:
    return *content(folder), json.loads((folder / "pairs.json").read_text())


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resumed_run_is_bit_identical(kind, cut, source, tables, wholes, tmp_path):
    folder, recipe = tmp_path / "run", recipe_for(kind, source, tables[kind])
    with pytest.raises(Stop):
        train(recipe, folder, tensorboard=False, on_step=until(cut))
    outcome = train(recipe, folder, resume=True, tensorboard=False)
    assert outcome.resumed_from == (cut - 1) // 2 * 2
    write_pair_metrics(outcome)
    assert everything(folder) == everything(wholes[kind])


@pytest.mark.parametrize("kind", LOSSES)
def test_the_artifact_is_that_of_an_ordinary_run(kind, source, wholes, tmp_path):
    train(tiny(source, steps=1), tmp_path / "ordinary", tensorboard=False)
    ordinary, run = open_run_folder(tmp_path / "ordinary"), open_run_folder(wholes[kind])
    assert run.contract().keys() == ordinary.contract().keys() and run.contract()["metric"] == "cosine"
    shapes = [{name: t.shape for name, t in load_file(r.folder / "model.safetensors").items()} for r in (run, ordinary)]
    assert shapes[0] == shapes[1]
    z = run.model()(torch.rand(3, 1, 12, 12))
    torch.testing.assert_close(z.norm(dim=1), torch.ones(3))


def test_scale_and_offset_are_trained_saved_and_reported(wholes):
    folder = wholes["classification"]
    _, state, _ = checkpoint.load_latest(folder / "checkpoints")
    learned = state["method"]["modules"]["loss"]
    assert learned["bias"].item() != -2.5 and learned["log_scale"].item() != pytest.approx(np.log(5.0), abs=1e-6)
    found = json.loads((folder / "pairs.json").read_text())
    assert found["threshold"] == pytest.approx((-learned["bias"] / learned["log_scale"].exp()).item())
    assert found["scale"] > 0


@pytest.mark.parametrize(("kind", "keys"), [("regression", {"spearman"}), ("classification", {"auc", "accuracy"}),
                                            ("ranking", {"ordered"})])  # fmt: skip
def test_pairs_that_were_held_out_are_judged(kind, keys, wholes, source, tables):
    found = json.loads((wholes[kind] / "pairs.json").read_text())
    assert found["weights"] == open_run_folder(wholes[kind]).contract()["weights"]
    for split, count in (("val", 12), ("test", 24)):
        assert found[split].keys() == {"count", "loss"} | keys
        assert found[split]["count"] == count * (1 if kind == "ranking" else 2)
        assert all(0 <= found[split][key] <= 1 for key in keys)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_log_says_how_it_goes(kind, wholes):
    line = content(wholes[kind])[4][-1]
    facts = {"regression": "error", "classification": "threshold", "ranking": "ordered"}
    assert facts[kind] in line and np.isfinite(line["loss"])


def test_only_training_rows_are_trained_on(source, tables):
    recipe = recipe_for("ranking", source, tables["ranking"])
    samples, table, notes = prepare_training_data(recipe)
    method, loader = build_method_and_loader(recipe, samples, table)
    trained = set(samples.part("train").ids.tolist())
    assert isinstance(method, Similarity) and notes == () and len(table.part("test")) == 24
    seen = {i for batch in loader.batches(0, 20) for i in batch.ids.tolist()}
    assert seen and seen <= trained


def test_rows_of_weight_0_are_never_seen(source, tmp_path):
    rows = [(k, k + 1, 1, int(k >= 18)) for k in range(35)]
    table = write(tmp_path / "p.csv", "first,second,target,weight", rows)
    recipe = recipe_for("classification", source, table)
    samples, found, _ = prepare_training_data(recipe)
    _, loader = build_method_and_loader(recipe, samples, found)
    assert min(i for batch in loader.batches(0, 10) for i in batch.ids.tolist()) == 18


def test_weights_of_a_batch_count_pairs_that_often():
    torch.manual_seed(0)
    loss = SimilarityRegression()
    method = Similarity(Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=3), (4,)), loss)
    from mettle.data.loader import Batch

    z, target = torch.randn(6, 3), torch.tensor([0.1, 0.5, -0.4])

    def batch(at, weight):
        at = torch.tensor(at)
        ids = torch.cat([at, at + 3])
        return z[ids], Batch(z[ids], ids, ids, 0, 0, 0.0, target[at], torch.tensor(weight))

    weighed = method.compute_loss(*batch([0, 1, 2], [2.0, 1.0, 0.0]), {})
    torch.testing.assert_close(weighed, method.compute_loss(*batch([0, 0, 1], [1.0, 1.0, 1.0]), {}))


def test_training_helps(source, tmp_path):
    recipe = recipe_for("ranking", source, steps=60, checkpoint_every=60, rate=1e-2)
    outcome = train(recipe, tmp_path / "run", tensorboard=False)
    samples, table, _ = prepare_training_data(recipe)
    losses = [line["loss"] for line in content(tmp_path / "run")[4]]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    assert measure_tuples(outcome.model, recipe.build_loss(), table.part("test"), samples)["ordered"] > 0.85


# --- tables and splits ---


def test_a_changed_table_is_refused(source, tables, tmp_path):
    table = tmp_path / "p.csv"
    table.write_text(tables["classification"].read_text())
    recipe = recipe_for("classification", source, table)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", tensorboard=False, on_step=until(5))
    table.write_text(table.read_text().replace(",1\n", ",0\n", 1))
    with pytest.raises(RunError, match="data of .* have changed"):
        train(recipe, tmp_path / "run", resume=True, tensorboard=False)


def test_a_training_pair_with_a_test_identity_is_refused_and_nothing_is_written(source, tmp_path):
    # Samples 0 to 35 are trained on, 48 to 71 tested on, six to a class.
    rows = [(0, 1, 1, "train"), (6, 7, 1, "train"), (8, 50, 0, "train"), (48, 49, 1, "test")]
    table = write(tmp_path / "p.csv", "first,second,target,split", rows)
    with pytest.raises(DataError, match=r"p\.csv' line 4: a train pair involves '8', which is in the test split too"):
        train(recipe_for("classification", source, table), tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()


def test_a_source_without_splits_is_split_as_the_pairs_are(tmp_path):
    source = make_npz(tmp_path / "x.npz")
    with np.load(source) as arrays:
        np.savez(source, **{name: a for name, a in arrays.items() if name != "split"})
    rows = [(k, k + 1, 1, "train") for k in range(0, 24, 2)] + [(k, k + 6, 0, "test") for k in range(48, 60)]
    table = write(tmp_path / "p.csv", "first,second,target,split", rows)
    samples, pairs, notes = prepare_training_data(recipe_for("classification", source, table))
    assert set(samples.part("train").labels) == {0, 1, 2, 3} and set(samples.part("test").labels) == {8, 9, 10}
    assert len(pairs) == 24 and notes == ()
    # Without a column split, identities are drawn, and pairs across splits are left out.
    table = write(tmp_path / "q.csv", "first,second,target", [(k, (k + 7) % 72, 0) for k in range(72)])
    samples, pairs, notes = prepare_training_data(recipe_for("classification", source, table))
    assert len(samples.part("test")) and 0 < len(pairs) < 72 and "lie across splits" in notes[0]
    labels = samples.split[pairs.positions(samples)]
    assert (labels == pairs.split[:, None]).all()


def test_domains_kept_out_of_training_take_their_pairs_along(source, tables):
    recipe = recipe_for("classification", source, tables["classification"], {"unseen": ["dark"]})
    samples, pairs, notes = prepare_training_data(recipe)
    assert "name samples that were left out" in notes[0]
    at = pairs.part("train").positions(samples)
    assert (at >= 0).all() and "dark" not in set(samples.domain.values()[at.reshape(-1)])


def test_pairs_of_pictures_by_name_also_when_one_is_broken(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(101):
        (tmp_path / "data" / f"{label:03}").mkdir(parents=True)
        for k in range(2):
            picture = Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8))
            picture.save(tmp_path / "data" / f"{label:03}" / f"{k}.png")
    rows = [(f"{a:03}/0.png", f"{a:03}/1.png", 1) for a in range(101)]
    table = write(tmp_path / "p.csv", "first,second,target", rows)
    recipe = recipe_for("classification", tmp_path / "data", table, {"policy": "skip"})
    samples, pairs, _ = prepare_training_data(recipe)
    assert samples.inputs.is_in_memory and len(pairs) == 101
    (tmp_path / "data" / "007" / "1.png").write_bytes(b"broken")
    samples, pairs, notes = prepare_training_data(recipe)
    assert len(samples) == 201 and len(pairs) == 100 and "1 of 101 pairs name samples" in notes[0]


def test_targets_that_the_loss_cannot_take_name_the_line(source, tmp_path):
    table = write(tmp_path / "p.csv", "first,second,target", [(0, 1, 0.5), (1, 2, -0.5)])
    with pytest.raises(DataError, match=r"line 3: target -0.5 is not in \[0, 1\]"):
        prepare_samples(recipe_for("classification", source, table))
    assert prepare_samples(recipe_for("regression", source, table))


def test_too_few_pairs_for_a_batch(source, tmp_path):
    table = write(tmp_path / "p.csv", "first,second,target", [(0, 1, 1), (1, 2, 1)])
    with pytest.raises(DataError, match=r"2 training pairs, fewer than the 8 of a batch: lower batch\.size"):
        train(recipe_for("classification", source, table), tmp_path / "run", tensorboard=False)


# --- recipes ---


@pytest.mark.parametrize("name", ["similarity-regression", "similarity-classification", "similarity-ranking"])
def test_shipped_recipes_need_no_data_of_ones_own(name, cache):
    recipe = load(name, ["train.steps=1"])
    assert recipe.data.source == "glyphs" and recipe.train.method == "similarity" and "same-class" in recipe.title()
    samples, table, notes = prepare_training_data(recipe, cache)
    assert notes == () and all(len(table.part(split)) > 500 for split in ("train", "val", "test"))
    label = samples.label.codes[table.positions(samples)]
    wanted = np.ones(len(table)) if table.target is None else table.target
    assert ((label[:, 0] == label[:, 1]) == (wanted == 1)).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.kind=SupCon"], "needs a loss over pairs or triplets: SimilarityClassification"),
        (["train.method=supervised"], "SimilarityRegression needs train.method = 'similarity'"),
        (["train.method=similarty"], "recipe key train.method"),
        (["data.triplets=t.csv"], "needs data.pairs .* and no other: got data.pairs and data.triplets"),
        (["loss.kind=SimilarityRanking"], "SimilarityRanking needs data.triplets .*: got data.pairs"),
        (["batch.views=2"], "batch.views does not apply"),
        (["batch.size=1"], "recipe key batch.size"),
        (["loss.measure=cosin"], "recipe key loss.measure"),
        (["loss.scale=3"], "unknown recipe key 'loss.scale'"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load("similarity-regression", overrides)


@pytest.mark.parametrize("override", ["data.pairs=p.csv", "data.triplets=t.csv", "batch.size=9"])
def test_tables_need_the_method(override):
    with pytest.raises(RecipeError, match="needs train.method = 'similarity'"):
        load("supcon", [override])


def test_a_bad_scale_is_named():
    with pytest.raises(RecipeError, match="scale must be above 0"):
        load("similarity-classification", ["loss.scale=-1"])


# --- figures ---


values = st.lists(st.integers(0, 5), min_size=4, max_size=14)


@settings(max_examples=60, deadline=None)
@given(score=values, data=st.data())
def test_figures_are_the_oracles_with_ties(score, data):
    target = data.draw(st.lists(st.integers(0, 3), min_size=len(score), max_size=len(score)))
    a, b = np.array(score, float), np.array(target, float)
    if len(set(score)) > 1 and len(set(target)) > 1:
        assert rank_correlation(a, b) == pytest.approx(oracle.spearman(score, target), abs=1e-12)
    else:
        assert rank_correlation(a, b) is None
    same = [t > 1 for t in target]
    if len(set(same)) == 2:
        assert rank_auc(a, np.array(same)) == pytest.approx(oracle.auc(score, same), abs=1e-12)
    else:
        assert rank_auc(a, np.array(same)) is None


def test_agreement_says_only_what_can_be_said():
    score = np.array([0.9, 0.2, 0.6, 0.1])
    assert tuple_metrics(score, np.array([1, 0, 0, 0.0]), 0.5) == {"auc": 1.0, "accuracy": 0.75}
    assert tuple_metrics(score, np.array([1, 1, 1, 1.0])) == {}
    assert tuple_metrics(score, np.array([1, 0.2, 0.4, 0])).keys() == {"spearman"}


@pytest.mark.parametrize("loss", [SimilarityRegression(), SimilarityClassification(), SimilarityRanking()])
def test_figures_of_a_model_are_those_of_its_embeddings(loss, source):
    from mettle.model import embed

    samples = read(source)
    kind = Triplets if loss.takes == "triplets" else Pairs
    rows = kind.same_class(samples, seed=2).assign_splits(samples)[0].part("test")
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec(width=2, depth=2, dim=4), (1, 12, 12))
    found = measure_tuples(model, loss, rows, samples)
    z = embed(model, samples).astype(float).tolist()
    members = [[z[i] for i in column] for column in rows.positions(samples).T]
    score = [oracle.alike(a, b, "cosine") for a, b in zip(members[0], members[1], strict=True)]
    if kind is Triplets:
        far = [oracle.alike(a, b, "cosine") for a, b in zip(members[0], members[2], strict=True)]
        assert found["ordered"] == pytest.approx(np.mean([s > f for s, f in zip(score, far, strict=True)]), abs=0.05)
    else:
        assert found["auc"] == pytest.approx(oracle.auc(score, rows.target == 1), abs=1e-3)
    assert found["count"] == len(rows)


# --- the command line ---


@pytest.mark.parametrize("kind", LOSSES)
def test_mettle_train_evaluates_and_reports(kind, source, tables, tmp_path):
    (tmp_path / "r.toml").write_text(recipe_for(kind, source, tables[kind]).to_toml())
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.toml"), "--runs", str(tmp_path)], catch_exceptions=False)
    noun, count = ("triplets", 24) if kind == "ranking" else ("pairs", 48)
    assert done.exit_code == 0 and "EER" in done.output and f"note: {count} test {noun}: loss" in done.output
    run = tmp_path / "r"
    assert {p.name for p in run.iterdir()} >= {"contract.json", "metrics.json", "pairs.json", "report.html"}
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["data"]["shared_identities"] == 0 and metrics["scenarios"]
    again = evaluate_run(open_run_folder(run), prepare_samples(open_run_folder(run).recipe), write=False)
    assert json.loads(json.dumps(again.metrics)) == metrics


def test_a_bad_table_is_one_line(source, tmp_path):
    table = write(tmp_path / "p.csv", "first,second,target", [(0, 1, 1), (1, 4000, 1)])
    (tmp_path / "r.toml").write_text(recipe_for("regression", source, table).to_toml())
    done = run_mettle("train", tmp_path / "r.toml", "--runs", tmp_path / "runs")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "line 3, column 'second': no sample '4000'" in done.stderr
    assert not (tmp_path / "runs").exists()
