"""Tables of pairs and triplets: reading, references, splits and leaks, same-class tables, batches."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.data import Loader, Pairs, Samples, ShuffledBatchSampler, Triplets, read
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.data.sources.manifest import read_manifest
from mettle.data.transforms import find_preset
from mettle.errors import DataError
from tests.data import corpus

PNG = corpus.encoded(corpus.BASE, "PNG")
FIVE = Samples.of(
    FeatureArray(np.arange(10.0).reshape(5, 2)),
    ["a", "a", "b", "b", "c"],
    ids=[10, 11, 12, 13, 14],
    source_name="five.csv",
)


def table(tmp_path, text: str, name: str = "pairs.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.fixture
def pictures(tmp_path):
    """A folder of pictures, read."""
    for place in ("ann/1.png", "ann/2.png", "bob/1.png", "bob/side view/2.png"):
        path = tmp_path / "pictures" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    return read(tmp_path / "pictures")


# --- reading ---


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.csv.gz"])
def test_pairs_by_id(tmp_path, name):
    path = table(tmp_path, "first,second,target,weight,split,note\n10,12,0.5,2,train,x\n11,10,-1,0,,y\n", name)
    pairs = Pairs.read(path, FIVE)
    assert pairs.members.tolist() == [[10, 12], [11, 10]] and pairs.members.dtype == np.int64
    assert pairs.target.tolist() == [0.5, -1] and pairs.weight.tolist() == [2, 0]
    assert pairs.split.tolist() == [0, -1] and pairs.lines.tolist() == [2, 3]


def test_weights_and_splits_are_optional_and_columns_in_any_order(tmp_path):
    pairs = Pairs.read(table(tmp_path, "target,second,first\n1,10,11\n"), FIVE)
    assert pairs.members.tolist() == [[11, 10]] and pairs.weight.tolist() == [1] and pairs.split.tolist() == [-1]


def test_triplets_from_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = {"anchor": [10, 12], "positive": [11, 13], "negative": [12, 14], "weight": [1.0, 0.5]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    triplets = Triplets.read(tmp_path / "t.parquet", FIVE)
    assert triplets.members.tolist() == [[10, 11, 12], [12, 13, 14]]
    assert triplets.weight.tolist() == [1, 0.5] and triplets.target is None


def test_pictures_of_a_folder_are_named_by_path_or_id(tmp_path, pictures):
    absolute = tmp_path / "pictures" / "bob" / "1.png"
    rows = f"ann/1.png,bob/side view/2.png,1\n./ann/2.png,ann/../bob/1.png,0\n0,{absolute},1\n"
    pairs = Pairs.read(table(tmp_path, "first,second,target\n" + rows), pictures)
    names = [pictures.inputs.name(int(i)) for i in pictures.storage_index]
    at = pairs.positions(pictures)
    found = [[names[i] for i in row] for row in at]
    assert found[:2] == [["ann/1.png", "bob/side view/2.png"], ["ann/2.png", "bob/1.png"]]
    assert found[2] == ["ann/1.png", "bob/1.png"]


def test_pictures_of_a_manifest_are_named_as_it_names_them(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG)
    manifest = table(tmp_path, "path,label,id\na.png,x,77\nb.png,y,5\na.png,x,6\n", "m.csv")
    samples = read_manifest(manifest)
    pairs = Pairs.read(table(tmp_path, "first,second,target\n77,b.png,0\n"), samples)
    assert pairs.members.tolist() == [[77, 5]]
    with pytest.raises(DataError, match="'a.png' is listed twice in .*name it by its id"):
        Pairs.read(table(tmp_path, "first,second,target\na.png,b.png,0\n"), samples)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "first,second,target\n10,99,1\n",
            r"line 2, column 'second': no sample '99' in 'five.csv'; its ids go from 10",
        ),
        ("first,second,target\n10,11,1\nx,11,1\n", r"line 3, column 'first': no sample 'x'"),
        ("first,second,target\n10,,1\n", r"line 2, column 'second': empty"),
        ("first,second,target\n10,11,high\n", r"line 2, column 'target': 'high' is not a finite number"),
        ("first,second,target\n10,11,\n", r"line 2, column 'target': '' is not a finite number"),
        ("first,second,target\n10,11,nan\n", r"line 2, column 'target': 'nan' is not a finite number"),
        ("first,second,target,weight\n10,11,1,-1\n", r"line 2: weight must be at least 0, got -1"),
        ("first,second,target,weight\n10,11,1,inf\n", r"line 2, column 'weight'"),
        ("first,second,target,split\n10,11,1,tset\n", r"line 2, column 'split': 'tset' is none of train"),
        ("first,second,target\n10,10,1\n", r"line 2: first and second are one sample"),
        ("first,secnd,target\n10,11,1\n", r"no column 'second' in .*; did you mean 'secnd'\?"),
        ("first,second\n10,11\n", r"no column 'target'"),
        ("first,second,target\n", r"has no rows"),
        ("", r"has no rows"),
        ("first,second,target\n10,11\n", r"line 2: 2 fields"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line_that_says_where(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        Pairs.read(table(tmp_path, text), FIVE)
    assert "\n" not in str(caught.value) and "pairs.csv" in str(caught.value)


def test_a_misspelt_picture_names_the_nearest(tmp_path, pictures):
    with pytest.raises(DataError, match=r"no sample 'ann/1.pgn' .*did you mean 'ann/1.png'\?"):
        Pairs.read(table(tmp_path, "first,second,target\nann/1.pgn,ann/2.png,1\n"), pictures)
    with pytest.raises(DataError, match=r"its pictures are named like 'ann/1.png'"):
        Pairs.read(table(tmp_path, "first,second,target\n900,ann/2.png,1\n"), pictures)


def test_a_missing_file_and_another_kind_of_file(tmp_path):
    with pytest.raises(DataError, match="no file"):
        Pairs.read(tmp_path / "none.csv", FIVE)
    with pytest.raises(DataError, match=r"\.csv\.gz, .*\.parquet.* are read"):
        Triplets.read(table(tmp_path, "x", "t.txt"), FIVE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pairs.of([], [], []), "has no pairs"),
        (lambda: Triplets.of([], [], []), "has no triplets"),
        (lambda: Pairs.of([1, 2], [3], [1, 1]), "as many as first"),
        (lambda: Pairs.of([1.5], [3], [1]), "whole numbers"),
        (lambda: Pairs.of([1], [2], [1, 2]), "target has shape"),
        (lambda: Pairs.of([1], [2], [np.nan]), "line 1: target is not a finite number"),
        (lambda: Pairs.of([1], [2], [1], weight=[1, 1]), "weight has shape"),
        (lambda: Pairs.of([1], [2], [1], split=["tst"]), "split must be one of"),
        (lambda: Triplets.of([1], [2], [1]), "anchor and negative are one sample"),
        (lambda: Triplets.of([1], [2], [2]), "positive and negative are one sample"),
    ],
)
def test_bad_columns_are_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_tables_are_frozen():
    with pytest.raises(Exception, match="cannot assign"):
        Pairs.of([1], [2], [1]).members = np.zeros((1, 2))  # type: ignore[misc]


def test_targets_out_of_range_name_the_line(tmp_path):
    pairs = Pairs.read(table(tmp_path, "first,second,target\n10,11,1\n11,12,1.5\n"), FIVE)
    assert pairs.check_target_range(-2, 2) is pairs
    with pytest.raises(DataError, match=r"line 3: target 1.5 is not in \[-1, 1\]"):
        pairs.check_target_range(-1, 1)


def test_fingerprints_follow_the_content():
    base = Pairs.of([1, 2], [3, 4], [1, 0])
    assert base.fingerprint() == Pairs.of([1, 2], [3, 4], [1, 0], source_name="elsewhere").fingerprint()
    others = [
        Pairs.of([1, 2], [3, 5], [1, 0]),
        Pairs.of([1, 2], [3, 4], [1, 0.5]),
        Pairs.of([1, 2], [3, 4], [1, 0], weight=[1, 2]),
        Pairs.of([1, 2], [3, 4], [1, 0], split=["train", "test"]),
    ]
    assert len({t.fingerprint() for t in [base, *others]}) == 5


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(-(2**62), 2**62), min_size=3, max_size=12, unique=True), data=st.data())
def test_positions_are_those_of_the_ids_also_of_huge_ones(ids, data):
    samples = Samples.of(FeatureArray(np.zeros((len(ids), 1))), ["x"] * len(ids), ids=ids)
    first = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=8))
    second = [(k + 1) % len(ids) for k in first]
    pairs = Pairs.of([ids[k] for k in first], [ids[k] for k in second], [0] * len(first))
    assert pairs.positions(samples).tolist() == [[a, b] for a, b in zip(first, second, strict=True)]
    fewer = samples.take(np.arange(1, len(ids)))
    wanted = [[a - 1, b - 1] for a, b in zip(first, second, strict=True)]
    assert pairs.positions(fewer).tolist() == wanted


# --- splits ---


def split(*parts: str) -> Samples:
    return Samples.of(FIVE.inputs, FIVE.label, ids=FIVE.ids, split=list(parts), source_name="five.csv")


def test_rows_take_the_split_of_their_samples_and_those_across_are_left_out():
    samples = split("train", "train", "test", "test", "test")
    pairs = Pairs.of([10, 12, 11, 13], [11, 13, 12, 14], [1, 1, 0, 0])
    found, notes = pairs.assign_splits(samples)
    assert found.members.tolist() == [[10, 11], [12, 13], [13, 14]] and found.split.tolist() == [0, 2, 2]
    assert notes == ("1 of 4 pairs lie across splits and are not used",)
    assert len(found.part("train")) == 1 and len(found.part("test")) == 2 and len(found.part("val")) == 0


def test_weight_0_is_left_out_of_every_part():
    found, _ = Pairs.of([10, 10], [11, 11], [1, 0], weight=[0, 2]).assign_splits(split(*["train"] * 5))
    assert len(found) == 2 and found.part("train").weight.tolist() == [2]


def test_rows_whose_samples_were_left_out_are_counted():
    found, notes = Pairs.of([10, 10], [11, 99], [1, 0]).assign_splits(split(*["train"] * 5))
    assert len(found) == 1 and notes == ("1 of 2 pairs name samples that were left out",)


@pytest.mark.parametrize(
    ("pairs", "who"),
    [
        (Pairs.of([10, 10], [11, 12], [1, 0], split=["train", "train"]), "'b'"),  # a test identity in a training pair
        (Pairs.of([12, 12], [13, 10], [1, 0], split=["test", "test"]), "'a'"),  # a training identity in a test pair
        (Pairs.of([10], [11], [1], split=["test"]), "'a'"),  # a pair that says it is another split's
        (Pairs.of([10], [11], [1], split=["val"]), "'a'"),
    ],
)
def test_an_identity_of_two_splits_is_a_leak(pairs, who):
    samples = split("train", "train", "test", "test", "test")
    with pytest.raises(DataError, match=f"line [12]: .* involves {who}, which is in the .* must not be tested on"):
        pairs.assign_splits(samples)


def test_a_closed_set_is_a_leak_too():
    samples = split("train", "test", "train", "train", "test")
    with pytest.raises(DataError, match="a train pair involves 'a', which is in the test split too"):
        Pairs.of([10], [12], [0]).assign_splits(samples)


def test_rows_split_samples_that_have_no_split():
    pairs = Pairs.of([10, 12], [11, 13], [1, 1], split=["train", "test"])
    samples = pairs.split_samples(FIVE)
    assert samples.split.tolist() == [0, 0, 2, 2, -1]
    found, notes = pairs.assign_splits(samples)
    assert found.split.tolist() == [0, 2] and notes == ()


def test_rows_that_would_put_an_identity_into_two_splits_are_a_leak():
    pairs = Pairs.of([10, 12, 11], [11, 13, 12], [1, 1, 0], split=["train", "test", "test"])
    with pytest.raises(DataError, match="involves 'a', which is in the"):
        pairs.assign_splits(pairs.split_samples(FIVE))


# --- same-class tables ---


def classes(sizes=(3, 1, 2, 5, 4), parts=(0, 0, 0, 2, 2), seed: int = 0) -> Samples:
    label = np.repeat(np.arange(len(sizes)), sizes)
    part = np.repeat(parts, sizes)
    mixed = np.random.default_rng(seed).permutation(len(label))
    return Samples.of(FeatureArray(label[:, None].astype(float)), label, split=part.astype(np.int8)).take(mixed)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("seed", [0, 5])
def test_same_class_triplets_are_what_they_say(each, seed):
    samples = classes()
    triplets = Triplets.same_class(samples, each=each, seed=seed)
    label = samples.labels[triplets.positions(samples)]
    part = samples.split[triplets.positions(samples)]
    assert (label[:, 0] == label[:, 1]).all() and (label[:, 0] != label[:, 2]).all()
    assert (triplets.members[:, 0] != triplets.members[:, 1]).all()
    assert (part == triplets.split[:, None]).all()
    anchors, counts = np.unique(triplets.members[:, 0], return_counts=True)
    assert len(anchors) == 14 and (counts == each).all(), "all but the class of one sample"


def test_same_class_pairs_are_half_same_half_different():
    samples = classes()
    pairs = Pairs.same_class(samples, seed=1)
    label = samples.labels[pairs.positions(samples)]
    assert ((label[:, 0] == label[:, 1]) == (pairs.target == 1)).all()
    assert (pairs.target == 1).sum() == (pairs.target == 0).sum() == 14
    assert pairs.assign_splits(samples)[1] == ()


def test_same_class_tables_depend_on_the_seed_alone():
    a, b = (Pairs.same_class(classes(seed=s), seed=3) for s in (0, 1))
    assert a.members.tolist() == b.members.tolist()  # the order of samples does not matter
    assert a.fingerprint() != Pairs.same_class(classes(), seed=4).fingerprint()


def test_every_partner_has_its_chance():
    samples = classes((3, 3), (0, 0))
    found = [set(), set()]
    for seed in range(60):
        triplets = Triplets.same_class(samples, seed=seed)
        for k in (1, 2):
            found[k - 1] |= {(a, b) for a, b in triplets.members[:, [0, k]].tolist()}
    assert len(found[0]) == 6 * 2 and len(found[1]) == 6 * 3


def test_labels_that_make_no_pairs_are_refused():
    with pytest.raises(DataError, match="no same-class pairs"):
        Pairs.same_class(classes((4,), (0,)))
    with pytest.raises(DataError, match="no same-class pairs"):
        Triplets.same_class(classes((1, 1, 1), (0, 0, 0)))


# --- batches ---


def numbered(n: int = 20) -> Samples:
    """Pictures whose pixels are their number."""
    pixels = np.arange(n, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    return Samples.of(ImageArray(pixels), np.arange(n) % 5, ids=1000 + np.arange(n))


def loader(samples: Samples, tuples, size: int = 4, augment: str = "none", **options) -> Loader:
    return Loader(
        samples, ShuffledBatchSampler(len(tuples), size, 7), find_preset(augment), 7, tuples=tuples, **options
    )


def test_a_batch_of_pairs_holds_first_members_then_second_ones_with_their_targets():
    samples = numbered()
    rng = np.random.default_rng(0)
    first, second = rng.permutation(20)[:10], np.arange(10) + 5
    first, second = first[first != second], second[first != second]
    n = len(first)
    pairs = Pairs.of(1000 + first, 1000 + second, np.arange(n) / 10, weight=1 + np.arange(n))
    truth = {(a, b): (t, w) for (a, b), t, w in zip(pairs.members.tolist(), pairs.target, pairs.weight, strict=True)}
    seen = []
    for batch in loader(samples, pairs).batches(0, len(pairs) // 4):
        a, b = batch.ids.split(4)
        pixel = (batch.inputs[:, 0, 0, 0] * 255).round().long()
        assert (pixel + 1000).tolist() == batch.ids.tolist() and batch.inputs.shape == (8, 1, 4, 4)
        assert batch.labels.tolist() == (pixel % 5).tolist()
        for k, pair in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
            assert (batch.target[k].item(), batch.weight[k].item()) == pytest.approx(truth[pair])
            seen.append(pair)
    assert len(set(seen)) == len(seen) == len(pairs) // 4 * 4, "no pair twice in an epoch"


def test_a_batch_of_triplets_has_weights_but_no_targets():
    triplets = Triplets.of([1000, 1001, 1002], [1003, 1004, 1005], [1006, 1007, 1008])
    (batch,) = loader(numbered(), triplets, size=3).batches(0, 1)
    assert batch.target is None and batch.weight.tolist() == [1, 1, 1]
    anchor, positive, negative = batch.ids.split(3)
    assert (positive - anchor == 3).all() and (negative - anchor == 6).all()


def test_batches_are_a_pure_function_of_seed_and_step():
    samples = numbered()
    pairs = Pairs.same_class(Samples.of(samples.inputs, samples.labels, ids=samples.ids, split=["train"] * 20))
    whole = list(loader(samples, pairs, augment="mild").batches(0, 25))
    assert len({batch.epoch for batch in whole}) > 2
    later = list(loader(samples, pairs, augment="mild").batches(13, 25))
    for a, b in zip(whole[13:], later, strict=True):
        assert a.step == b.step and a.inputs.numpy().tobytes() == b.inputs.numpy().tobytes()
        assert a.ids.tolist() == b.ids.tolist() and a.target.tolist() == b.target.tolist()


def test_workers_change_nothing(pictures):
    pairs = Pairs.of([0, 1, 2], [1, 2, 3], [0, 1, 1])
    hashes = []
    for workers in (0, 1):
        batches = loader(pictures, pairs, 3, "photo", workers=workers).batches(0, 3)
        hashes.append([batch.inputs.numpy().tobytes() for batch in batches])
    assert hashes[0] == hashes[1]


def test_a_sample_is_changed_in_another_way_on_either_side():
    samples = Samples.of(ImageArray(np.random.default_rng(0).integers(0, 255, (2, 9, 9), np.uint8)), [0, 1])
    (batch,) = loader(samples, Pairs.of([0, 1], [1, 0], [1, 1]), 2, "mild").batches(0, 1)
    (a, b), (c, d) = batch.ids.split(2)
    first, second = batch.inputs.split(2)
    assert (a, b) == (d, c) and not np.allclose(first[0], second[1]) and not np.allclose(first[1], second[0])


def test_members_that_are_not_there_are_named():
    with pytest.raises(DataError, match="line 1: sample 5 is not among the samples"):
        next(loader(numbered(), Pairs.of([1000, 1001], [5, 1002], [1, 1]), 2).batches(0, 1))
