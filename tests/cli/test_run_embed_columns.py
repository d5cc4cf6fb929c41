"""New samples need not have the columns that only told about the old ones."""

import numpy as np
import pytest

from mettle.evaluate import read_embeddings
from mettle.model import cut_embeddings
from tests.command_line import mettle, refused


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding")
    draw = np.random.default_rng(0)
    lines = ["name,place,kind,a,b,c,split"]
    for person in range(24):
        for shot in range(4):
            x = person % 5 + draw.normal(size=3)
            split = "train" if person < 12 else "val" if person < 16 else "test"
            lines.append(f"p{person},{'ab'[shot % 2]},{'uv'[person % 2]},{x[0]:.3f},{x[1]:.3f},{x[2]:.3f},{split}")
    (folder / "all.csv").write_text("\n".join(lines))
    columns = ["data.label=name", "data.domain=place", 'data.groups=["kind"]', 'data.features=["a","b","c"]']
    less = ["model.backbone=mlp", "train.steps=3", "batch.classes=4", "batch.samples=2"]
    words = [word for value in (*columns, *less) for word in ("--set", value)]
    mettle("train", "supcon", "--data", folder / "all.csv", "--name", "r", "--runs", folder, "--no-report", *words)
    return folder


@pytest.mark.parametrize(
    "columns", [["a", "b", "c"], ["kind", "a", "b", "c"], ["place", "a", "b", "c"], ["name", "a", "b", "c"]]
)
def test_embed_takes_what_there_is(run, tmp_path, columns):
    rows = [line.split(",") for line in (run / "all.csv").read_text().splitlines()]
    at = [rows[0].index(name) for name in columns]
    (tmp_path / "new.csv").write_text("\n".join(",".join(row[i] for i in at) for row in rows))
    mettle("embed", run / "r", tmp_path / "new.csv", "-o", tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz") as made:
        assert len(made["embeddings"]) == 96
        assert ("kind" in made) == ("kind" in columns) and ("domain" in made) == ("place" in columns)


def test_what_the_model_needs_and_what_was_asked_for_must_be_there(run, tmp_path):
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    assert "'c'" in refused("embed", run / "r", tmp_path / "new.csv", "-o", tmp_path / "e.npz")
    (tmp_path / "new.csv").write_text("a,b,c\n1,2,3\n")
    for flag in ("--label", "--domain"):
        assert "'who'" in refused("embed", run / "r", tmp_path / "new.csv", flag, "who", "-o", tmp_path / "e.npz")


def test_smaller_embeddings_are_audited_and_enrolled_as_what_they_stand_for(run, tmp_path):
    for name, options in {"whole": [], "codes": ["--dim", "20", "--precision", "int8"]}.items():
        said = mettle("embed", run / "r", run / "all.csv", "-o", tmp_path / f"{name}.npz", *options)
    assert "dimension 20, int8: 20 bytes each" in said
    whole, codes = (read_embeddings(tmp_path / f"{name}.npz").values for name in ("whole", "codes"))
    np.testing.assert_allclose(codes, cut_embeddings(whole, 20), atol=0.01)
    assert "96 embeddings of dimension 20" in mettle("audit", tmp_path / "codes.npz", "-o", tmp_path / "audit")
    shared = ["--embeddings", tmp_path / "codes.npz"]
    assert "96" in mettle("gallery", "enrol", tmp_path / "g", "anna", *shared, "--dim", "20")
    assert "written as .npz" in refused(
        "embed", run / "r", run / "all.csv", "-o", tmp_path / "z.csv", "--precision", "int8"
    )
    assert "no precision 'int4'" in refused(
        "embed", run / "r", run / "all.csv", "-o", tmp_path / "z.npz", "--precision", "int4"
    )
