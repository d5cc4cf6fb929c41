"""Embeddings that are cut or kept with fewer bits: round trips, scores against slow loops, files, refusals."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mettle.data import read
from mettle.data.dataset import Samples
from mettle.data.quantization import to_arrays
from mettle.errors import DataError, InputError, MettleError
from mettle.evaluate import read_embeddings
from mettle.model import (
    Embedder,
    EmbedderSpec,
    cut_embeddings,
    embed,
    measure_ranges,
    quantize_embeddings,
    quantized_similarity,
)
from mettle.model.inference import write_embeddings

PRECISIONS = ("float32", "float16", "int8", "binary")


def embeddings(n: int = 30, dim: int = 19, seed: int = 0) -> np.ndarray:
    z = np.random.default_rng(seed).normal(size=(n, dim))
    return (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32)


def slow_int8(z) -> list[list[int]]:
    """Each number of a row over the largest of it, in 127 steps to either side."""
    found = []
    for row in z.tolist():
        largest = max(abs(x) for x in row)
        found.append([round(127 * x / largest) for x in row])
    return found


def slow_cosine(a, b) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def slow_scores(z, other, precision) -> np.ndarray:
    if precision == "binary":
        signs = [[[x > 0 for x in row] for row in m.tolist()] for m in (z, other)]
        dim = z.shape[1]
        return np.array(
            [[1 - 2 * sum(x != y for x, y in zip(a, b, strict=True)) / dim for b in signs[1]] for a in signs[0]]
        )
    rows = [slow_int8(m) if precision == "int8" else m.astype(precision).tolist() for m in (z, other)]
    return np.array([[slow_cosine(a, b) for b in rows[1]] for a in rows[0]])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [1, 8, 19])
def test_scores_are_those_of_slow_loops_and_of_what_the_codes_stand_for(precision, dim):
    z, other = embeddings(dim=dim), embeddings(7, dim, seed=1)
    a, b = quantize_embeddings(z, precision), quantize_embeddings(other, precision)
    found = quantized_similarity(a, b)
    np.testing.assert_allclose(found, slow_scores(z, other, precision), atol=2e-7)
    x, y = (
        m.astype(np.float64) / np.linalg.norm(m.astype(np.float64), axis=1, keepdims=True)
        for m in (a.dequantize(), b.dequantize())
    )
    np.testing.assert_allclose(found, x @ y.T, atol=3e-7)


@pytest.mark.parametrize(
    ("precision", "bytes_each", "most"),
    [("float32", 76, 0), ("float16", 38, 2.5e-4), ("int8", 19, 4e-3), ("binary", 3, 0.7)],
)
def test_a_round_trip_changes_numbers_by_no_more_than_a_step(precision, bytes_each, most):
    z = embeddings()
    found = quantize_embeddings(torch.from_numpy(z), precision)
    assert len(found) == 30 and found.bytes_per_vector == bytes_each
    difference = np.abs(found.dequantize() - z).max()
    assert difference <= most and (difference > 0) == (most > 0)
    again = quantize_embeddings(found.dequantize(), precision)
    assert np.array_equal(again.codes, found.codes)


def test_ranges_give_each_dimension_steps_of_its_own():
    z = embeddings() * np.geomspace(1e-3, 1, 19)
    low, high = ranges = measure_ranges(z)
    found = quantize_embeddings(z, "int8", ranges=ranges)
    assert (np.abs(found.dequantize() - z) <= (high - low) / 255 * 0.501).all()
    assert found.codes.min() == -128 and found.codes.max() == 127
    by_row = quantize_embeddings(z, "int8").dequantize() * np.linalg.norm(z, axis=1, keepdims=True)
    assert np.abs(by_row - z)[:, 0].max() > 5 * np.abs(found.dequantize() - z)[:, 0].max()
    outside = quantize_embeddings(10 * z, "int8", ranges=ranges).dequantize()
    np.testing.assert_allclose(outside, np.clip(10 * z, low, high), atol=0.01)
    np.testing.assert_allclose(
        quantized_similarity(found, found), slow_scores(found.dequantize(), found.dequantize(), "float32"), atol=1e-6
    )


def test_a_dimension_that_is_always_the_same_has_no_steps():
    z = embeddings()
    z[:, 3] = 0.25
    assert (quantize_embeddings(z, "int8", ranges=measure_ranges(z)).dequantize()[:, 3] == 0.25).all()


def test_whole_numbers_of_any_length_are_multiplied_exactly():
    z = np.where(embeddings(3, 4000) > 0, 1.0, -1.0)
    assert np.array_equal(quantized_similarity(*[quantize_embeddings(z, "int8")] * 2).diagonal(), np.ones(3))
    tiny = quantize_embeddings(np.full((1, 4), 1e-45, np.float32), "int8")
    assert (tiny.codes == 127).all()


@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_directions_outlast_any_length(precision, size):
    z = embeddings().astype(np.float64)
    a, b = (quantize_embeddings(x, precision) for x in (z, z * size))
    np.testing.assert_allclose(quantized_similarity(b, b), quantized_similarity(a, a), atol=2e-3)
    np.testing.assert_allclose(cut_embeddings(z * size, 7), cut_embeddings(z, 7), atol=1e-6)


def test_a_prefix_is_scaled_to_length_one():
    z = embeddings()
    found = cut_embeddings(z, 5)
    for row, wanted in zip(found.tolist(), z.tolist(), strict=True):
        size = sum(x * x for x in wanted[:5]) ** 0.5
        assert row == pytest.approx([x / size for x in wanted[:5]], abs=1e-6)
    np.testing.assert_allclose(cut_embeddings(z, 19), z, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "function",
    [*(lambda z, p=p: quantize_embeddings(z, p) for p in PRECISIONS), measure_ranges, lambda z: cut_embeddings(z, 2)],
)
def test_nan_and_infinity_are_refused(function, bad):
    z = embeddings()
    z[4, 1] = bad
    with pytest.raises(InputError, match="1 rows hold NaN or infinity, the first is row 4"):
        function(z)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda z: quantize_embeddings(z, "int4"), "no precision 'int4'.*int8"),
        (lambda z: quantize_embeddings(z[0], "int8"), r"must be \(n, dim\) numbers, got float32 of shape \(19,\)"),
        (lambda z: quantize_embeddings(0 * z, "binary"), "no direction"),
        (lambda z: quantize_embeddings(z, "binary", ranges=measure_ranges(z)), "ranges= are of precision 'int8'"),
        (lambda z: quantize_embeddings(z, "int8", ranges=measure_ranges(z)[::-1]), "ranges must be"),
        (lambda z: quantize_embeddings(z, "int8", ranges=measure_ranges(z[:, :4])), "ranges must be"),
        (lambda z: cut_embeddings(z, 20), "from 1 to 19"),
        (lambda z: cut_embeddings(z, 2.0), "from 1 to 19"),
        (
            lambda z: quantized_similarity(quantize_embeddings(z, "int8"), quantize_embeddings(z, "binary")),
            "of their kind",
        ),
        (
            lambda z: quantized_similarity(
                quantize_embeddings(z, "int8"), quantize_embeddings(z, "int8", ranges=measure_ranges(z))
            ),
            "same ranges",
        ),
    ],
)
def test_what_cannot_be_kept_or_compared_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call(embeddings())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("codes")
    rows = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    np.savez(folder / "rows.npz", rows=rows, label=np.arange(24) // 4)
    model = Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=19), (5,))
    return folder, model, read(folder / "rows.npz")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dim", [None, 9])
def test_files_are_read_as_what_their_codes_stand_for(written, precision, dim):
    folder, model, samples = written
    path = folder / f"{precision}-{dim}.npz"
    said = write_embeddings(model, samples, path, precision=precision, dim=dim)
    wanted = embed(model, samples) if dim is None else cut_embeddings(embed(model, samples), dim)
    quantized = quantize_embeddings(wanted, precision)
    found = read_embeddings(path)
    np.testing.assert_array_equal(found.values.astype(np.float32), quantized.dequantize())
    assert found.label.names == read_embeddings(folder / "float32-None.npz").label.names
    assert ("bytes each" in said) == (precision != "float32")
    with np.load(path) as file:
        assert ("embeddings" in file) == (precision in ("float32", "float16"))


def test_ranges_are_kept_with_their_codes(tmp_path):
    z = embeddings()
    found = quantize_embeddings(z, "int8", ranges=measure_ranges(z))
    np.savez(tmp_path / "z.npz", label=np.arange(30) // 3, **to_arrays(found))
    np.testing.assert_array_equal(read_embeddings(tmp_path / "z.npz").values, found.dequantize())
    np.savez(tmp_path / "z.npz", label=np.arange(30) // 3, **(to_arrays(found) | {"ranges": found.ranges[:, :4]}))
    with pytest.raises(DataError, match="ranges must be"):
        read_embeddings(tmp_path / "z.npz")


def test_codes_are_never_taken_for_numbers(written, tmp_path):
    _, model, samples = written
    write_embeddings(model, samples, tmp_path / "z.npz", precision="binary")
    with pytest.raises(MettleError):
        read(tmp_path / "z.npz")
    with np.load(tmp_path / "z.npz") as file:
        arrays = dict(file)
    for change in ({"dim": np.asarray(99)}, {"precision": np.asarray("int8")}, {"precision": np.asarray("int4")}):
        np.savez(tmp_path / "broken.npz", **(arrays | change))
        with pytest.raises(DataError, match=r"broken\.npz"):
            read_embeddings(tmp_path / "broken.npz")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("z.csv", {"precision": "int8"}, "written as .npz"),
        ("z.npz", {"precision": "int9"}, "no precision 'int9'"),
        ("z.npz", {"dim": 20}, "dim must be from 1 to 19"),
        ("z.npz", {"dim": 0}, "dim must be from 1 to 19"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_work(written, tmp_path, name, options, said):
    _, model, samples = written
    assert isinstance(samples, Samples)
    with pytest.raises(InputError, match=said):
        write_embeddings(model, samples, tmp_path / name, **options)
    assert not (tmp_path / name).exists()


def test_the_script_of_the_page_prints_a_row_for_every_size(written, monkeypatch, capsys):
    folder, model, samples = written
    write_embeddings(model, samples, folder / "z.npz")
    script = Path(__file__).parents[2] / "benchmarks" / "embedding_sizes.py"
    monkeypatch.setattr(sys, "argv", [script.name, str(folder / "z.npz"), "--dims", "3", "8"])
    runpy.run_path(str(script), run_name="__main__")
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [tuple(int(x) if x.strip().isdigit() else x.strip() for x in row) for row in rows] == [
        (dim, precision, {"float32": 4 * dim, "float16": 2 * dim, "int8": dim, "binary": -(-dim // 8)}[precision])
        for dim in (3, 8, 19)
        for precision in PRECISIONS
    ]
