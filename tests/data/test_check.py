import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mettle.data import read
from mettle.data.check import DataProblem, check, drop_unreadable, load_readable
from mettle.data.dataset import Column, Samples
from mettle.data.inputs import FeatureArray, ImageArray, ImageFiles, load_into_memory
from mettle.errors import DataError, InputError
from tests.data import corpus


def pictures(n, seed=0):
    """Pictures that are nothing like each other, smooth enough to survive JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 6, 6, 3)).astype(np.uint8)
    return np.stack([np.kron(one, np.ones((8, 8, 1), np.uint8)) for one in coarse])


def on_disk(folder, contents, labels=None, **columns):
    names = [name for name, _ in contents]
    for name, data in contents:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    inputs = ImageFiles(names, columns.pop("size", None), root=folder)
    return Samples.of(inputs, labels or [name.split("/")[0] for name in names], **columns)


def png_set(folder, n=8, **columns):
    contents = [(f"{'ab'[i % 2]}/{i}.png", corpus.encoded(one, "PNG")) for i, one in enumerate(pictures(n))]
    return on_disk(folder, contents, **columns)


def kinds(findings, severity=None):
    """Kinds of problems, but for "few": the sets of these tests have few labels."""
    return sorted({p.kind for p in findings.problems if severity in (None, p.severity)} - {"few"})


def test_a_sound_set_has_no_problems_and_right_counts(tmp_path):
    split = ["train"] * 4 + ["test"] * 3 + [""]
    findings = check(png_set(tmp_path, split=split, domain=[0, 0, 0, 1, 1, 1, 1, 1]))
    assert findings.problems == ()
    assert findings.samples == 8
    assert findings.splits == {"train": 4, "test": 3, "none": 1}
    assert findings.labels == {"a": 4, "b": 4}
    assert findings.domains == {"0": 3, "1": 5}
    findings.raise_if_errors()


def test_d1_every_bad_file_is_found_and_only_those(tmp_path):
    bad, bombs, good = corpus.bad(), corpus.bombs(), corpus.good()
    files = [(f"x/{name}", case.data) for name, case in (bad | bombs).items()]
    files += [(f"y/{name}", case.data) for name, case in good.items()]
    findings = check(on_disk(tmp_path, files, size=(24, 16)), policy="trust", limit=1000)
    found = {p.file for p in findings.problems if p.kind == "unreadable"}
    assert found == {f"x/{name}" for name in bad | bombs}
    assert all(p.severity == "error" for p in findings.problems if p.kind == "unreadable")


def test_d1_fail_names_the_first_and_counts(tmp_path):
    samples = png_set(tmp_path, 8)
    for name in ("a/2.png", "b/5.png"):
        (tmp_path / name).write_bytes(b"")
    message = r"2 of 8 pictures cannot be used, first: cannot decode 'a/2\.png': the file is empty; .*policy='skip'"
    for action in (check, drop_unreadable):
        with pytest.raises(DataError, match=message):
            action(samples)


def test_d1_skip_is_offered_only_where_it_will_do(tmp_path):
    samples = png_set(tmp_path, 100)
    (tmp_path / "a/2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"repair or remove it, or leave it out: data\.policy='skip' .*policy=skip"):
        drop_unreadable(samples)
    assert len(drop_unreadable(samples, "skip")) == 99
    for i in range(1, 20, 2):
        (tmp_path / f"b/{i}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"repair or remove them \(data\.policy='skip' will not do: .* 10% at most"):
        drop_unreadable(samples)
    with pytest.raises(DataError, match=r"over the 10% limit"):
        drop_unreadable(samples, "skip")


def test_d1_skip_leaves_out_what_is_bad_and_keeps_the_rest(tmp_path):
    samples = png_set(tmp_path, 8, split=["train", "test"] * 4)
    (tmp_path / "a/2.png").write_bytes(b"")
    want = np.delete(pictures(8), 2, axis=0)
    kept = drop_unreadable(samples, "skip", tolerance=0.2)
    assert kept.ids.tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert kept.split.tolist() == [0, 2, 2, 0, 2, 0, 2]
    assert kept.skipped == ("cannot decode 'a/2.png': the file is empty",)
    assert np.array_equal(kept.read(np.arange(7)), want)
    assert np.array_equal(
        load_into_memory(kept.inputs).read(kept.storage_index), want
    )  # the bad file must not come back
    findings = check(samples, policy="skip", tolerance=0.2)
    assert [p.severity for p in findings.problems if p.kind == "unreadable"] == ["warning"]
    findings.raise_if_errors()


def test_screen_of_a_part_looks_at_that_part_only(tmp_path):
    samples = png_set(tmp_path, 8, split=["train", "test"] * 4)
    (tmp_path / "b/1.png").write_bytes(b"")
    assert drop_unreadable(samples.part("train")).ids.tolist() == [0, 2, 4, 6]
    kept = drop_unreadable(samples.part("test"), "skip", tolerance=0.5)
    assert kept.ids.tolist() == [3, 5, 7]
    assert np.array_equal(kept.read(np.array([0])), pictures(8)[3:4])


@pytest.mark.parametrize(("bad", "stops"), [(10, False), (11, True)])
def test_d2_more_than_a_tenth_stops_with_the_list(bad, stops, tmp_path):
    data = corpus.encoded(corpus.BASE, "PNG")
    files = [(f"a/{i}.png", b"" if i < bad else data) for i in range(100)]
    samples = on_disk(tmp_path, files)
    for action in (lambda: drop_unreadable(samples, "skip"), lambda: check(samples, policy="skip")):
        if stops:
            with pytest.raises(DataError, match=r"11 of 100 .*over the 10% limit: .*a/0\.png.*a/1\.png"):
                action()
        else:
            action()
    assert len(check(samples, policy="trust").errors) == bad


def test_d4_classes_of_one_and_none_are_warned_about(tmp_path):
    inputs = ImageArray(pictures(3))
    samples = Samples.of(inputs, Column(np.array([0, 0, 2]), ("many", "none", "one")))
    findings = check(samples)
    assert [(p.kind, p.severity) for p in findings.problems[:2]] == [("empty", "warning"), ("single", "warning")]
    assert kinds(findings) == ["empty", "single"]
    assert "'none' has no sample" in findings.problems[0].text
    assert findings.problems[1].id == 2
    assert kinds(check(samples.take(np.array([0, 1])))) == []  # a part lacks labels by right


def test_d4_the_same_content_under_two_labels_is_an_error(tmp_path):
    one, two, three = (corpus.encoded(p, "PNG") for p in pictures(3))
    files = [("a/1.png", one), ("a/2.png", two), ("b/1.png", one), ("b/3.png", three)]
    findings = check(on_disk(tmp_path, files))
    assert findings.errors == (
        DataProblem(
            "error",
            "conflict",
            "'a/1.png' and 'b/1.png' have the same content, under the labels 'a' and 'b'",
            0,
            "a/1.png",
        ),
    )
    with pytest.raises(DataError, match="under the labels 'a' and 'b'"):
        findings.raise_if_errors()


def test_d4_copies_under_one_label_are_warnings(tmp_path):
    one, two = (corpus.encoded(p, "PNG") for p in pictures(2))
    findings = check(on_disk(tmp_path, [("a/1.png", one), ("a/2.png", one), ("a/3.png", two)]))
    assert kinds(findings, "warning") == ["copy"] and kinds(findings, "error") == []


def test_d5_identical_pictures_in_two_splits_are_leakage(tmp_path):
    one, two, three = (corpus.encoded(p, "PNG") for p in pictures(3))
    files = [("a/1.png", one), ("a/2.png", one), ("b/1.png", two), ("b/2.png", three)]
    findings = check(on_disk(tmp_path, files, split=["train", "test", "train", "test"]))
    assert kinds(check(on_disk(tmp_path, files, split=["train", "", "train", "test"])), "error") == []
    assert kinds(findings, "error") == ["leakage"]
    assert "'a/1.png' and 'a/2.png' have the same content, in train and test" in findings.errors[0].text


def test_d5_near_copies_in_two_splits_are_warnings(tmp_path):
    shown = pictures(6)
    again = [
        corpus.encoded(np.clip(shown[i].astype(int) + 3, 0, 255).astype(np.uint8), "JPEG", quality=80) for i in (0, 1)
    ]
    files = [(f"a/{i}.png", corpus.encoded(one, "PNG")) for i, one in enumerate(shown)]
    files += [("a/copy0.jpg", again[0]), ("a/copy1.jpg", again[1])]
    findings = check(on_disk(tmp_path, files, split=["train"] * 6 + ["test", "train"]))
    near = [p for p in findings.problems if p.kind == "near"]
    assert [(p.severity, p.file) for p in near] == [("warning", "a/0.png")]  # copy1 is in the split of its original
    assert "'a/copy0.jpg'" in near[0].text


def test_d5_mirrored_and_smaller_copies_are_found_and_can_be_errors(tmp_path):
    shown = pictures(4)
    smaller = Image.fromarray(shown[1]).resize((30, 30)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    files = [(f"a/{i}.png", corpus.encoded(one, "PNG")) for i, one in enumerate(shown)]
    files.append(("a/copy.png", corpus.encoded(np.asarray(smaller), "PNG")))
    samples = on_disk(tmp_path, files, split=["train"] * 3 + ["test"] * 2, size=None)
    (near,) = [p for p in check(samples).problems if p.kind == "near"]
    assert near.severity == "warning" and "mirror images" in near.text and "'a/1.png'" in near.text
    with pytest.raises(DataError, match="mirror images"):
        check(samples, near="error").raise_if_errors()


def test_d5_sparse_drawings_are_not_taken_for_copies():
    drawings = np.zeros((40, 32, 32), np.uint8)
    for i, drawing in enumerate(drawings):
        drawing[4 + i % 20 : 8 + i % 20, 3 + i // 2 : 6 + i // 2] = 255
    samples = Samples.of(ImageArray(drawings), np.arange(40) % 4, split=np.arange(40) % 2 * 2)
    assert "near" not in kinds(check(samples))


@pytest.mark.parametrize(
    ("test_labels", "protocol", "shared"),
    [([2, 2, 3, 3], "open-set", 0), ([0, 0, 1, 1], "closed-set", 2), ([0, 0, 2, 2], "mixed", 1)],
)
def test_d5_labels_in_train_and_test_are_a_fact_or_an_error(test_labels, protocol, shared):
    labels = [0, 0, 1, 1, *test_labels]
    samples = Samples.of(ImageArray(pictures(8)), labels, split=[0] * 4 + [2] * 4)
    findings = check(samples)
    assert (findings.protocol, findings.shared_labels) == (protocol, shared)
    assert findings.errors == ()
    assert kinds(check(samples, disjoint=True), "error") == (["overlap"] if shared else [])


@pytest.mark.parametrize(
    ("split", "said", "meant"),
    [
        ("0022", "train and test share 1 identity of 2 in test ('x')", "mixes known and new identities"),
        ("0012", "train and test share 1 identity of 1 in test ('x'), train and val 1, val and test 1", "about new"),
        ("0000", "", ""),
        ("0011", "train and val share 1 identity of 2 in val ('x')", "thresholds are set on val"),
        ("1122", "val and test share 1 identity of 2 in test ('x')", "thresholds are set on val"),
    ],
)
def test_d5_identities_in_two_splits_are_told_in_one_line(split, said, meant):
    """x is once in each split that ``split`` names, y in the first of them and z in the last only."""
    parts = sorted(set(split))
    rows = [("x", part) for part in parts for _ in "ab"]
    rows += [("y", parts[0])] * 2 + ([("z", parts[-1])] * 2 if len(parts) == 2 else [])
    labels, splits = zip(*rows, strict=True)
    samples = Samples.of(ImageArray(pictures(len(rows))), list(labels), split=np.array(splits, np.int8))
    findings = check(samples)
    texts = [p.text for p in findings.problems if p.kind == "overlap"] + list(findings.notes)
    if not said:
        assert texts == []
        return
    (text,) = texts
    assert text.startswith(said + ":") and meant in text
    assert "keep each identity in one split, or leave the split out" in text and "\n" not in text
    assert findings.errors == ()
    assert (findings.notes == (text,)) == (findings.protocol == "closed-set")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=60))
def test_d5_shared_identities_are_counted_by_the_plain_definition(facts):
    label, split = (list(column) for column in zip(*facts, strict=True))
    samples = Samples.of(
        FeatureArray(np.arange(len(facts))[:, None].astype(float)), label, split=np.array(split, np.int8)
    )
    findings = check(samples)
    said = " ".join([*(p.text for p in findings.problems if p.kind == "overlap"), *findings.notes])
    for first, second in ((0, 2), (0, 1), (1, 2)):
        names = ("train", "val", "test")[first], ("train", "val", "test")[second]
        both = sum((k, first) in facts and (k, second) in facts for k in range(21))
        told = re.search(rf"{names[0]} and {names[1]} (?:share )?(\d+)", said)
        assert both == (0 if told is None else int(told[1]))


def test_d6_case_collisions_and_repeated_paths(tmp_path):
    data = [corpus.encoded(one, "PNG") for one in pictures(4)]
    files = [("a/x.png", data[0]), ("a/X.png", data[1]), ("b/e\u0301.png", data[2]), ("b/\xe9.png", data[3])]
    findings = check(on_disk(tmp_path, files))
    assert [p.file for p in findings.problems if p.kind == "case"] == ["a/X.png", "b/e\u0301.png"]
    labels = Samples.of(ImageArray(pictures(4)), ["Cat", "Cat", "cat", "cat"])
    assert kinds(check(labels), "warning") == ["case"]
    twice = Samples.of(ImageFiles(["a/x.png", "a/x.png"], root=tmp_path), ["a", "a"])
    assert [p.text for p in check(twice).problems if p.kind == "copy"] == ["'a/x.png' is listed twice"]
    torn = Samples.of(ImageFiles(["a/x.png", "a/x.png", "a/X.png"], root=tmp_path), ["a", "b", "b"])
    assert "'a/x.png' is listed twice, under the labels 'a' and 'b'" in check(torn).errors[0].text


def test_pictures_of_several_sizes_are_told(tmp_path):
    files = [
        ("a/1.png", corpus.encoded(corpus.BASE, "PNG")),
        ("a/2.png", corpus.encoded(pictures(1)[0], "PNG")),
    ]
    found = check(on_disk(tmp_path, files))
    assert kinds(found) == []
    assert ["come in 2 sizes" in note and "data.size" in note for note in found.notes] == [True]
    assert check(on_disk(tmp_path, files, size=(9, 9))).notes == ()


def test_rows_are_searched_for_odd_numbers_and_constant_columns():
    rows = np.random.default_rng(0).normal(size=(300, 3))
    rows[:, 1] = 5
    samples = Samples.of(FeatureArray(rows, ["u", "v", "w"]), np.arange(300) % 4)
    assert [p.text for p in check(samples).problems] == ["column 'v' is 5 in every row"]
    rows[7, 2], rows[9, 0] = np.inf, np.nan
    samples = Samples.of(FeatureArray(rows, ["u", "v", "w"]), np.arange(300) % 2)
    with pytest.raises(DataError, match=r"2 of 300 rows .*row 8, column 'w': inf is not finite"):
        check(samples)
    kept = drop_unreadable(samples, "skip")
    assert kept.ids.tolist() == [i for i in range(300) if i not in (7, 9)]
    assert kept.skipped[1] == "row 10, column 'u': nan is not finite"


def test_equal_rows_are_only_warned_about():
    rows = np.array([[1.0, 2], [1, 2], [3, 4], [5, 7]])
    samples = Samples.of(FeatureArray(rows), [0, 1, 0, 1], split=[0, 2, 0, 2])
    findings = check(samples)
    assert findings.errors == ()
    assert kinds(findings) == ["conflict", "leakage"]


def test_long_lists_are_cut_and_counted():
    samples = Samples.of(ImageArray(pictures(9)), range(9))
    problems = check(samples, limit=4).problems
    assert len(problems) == 5
    assert problems[-1].text.startswith("and 5 more of: ")


def test_an_unknown_policy_is_an_input_error(tmp_path):
    samples = png_set(tmp_path, 2)
    with pytest.raises(InputError, match="policy must be"):
        drop_unreadable(samples, "ignore")  # type: ignore[arg-type]
    assert drop_unreadable(samples, "trust") is samples


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12))
def test_d4_d5_conflicts_and_leaks_are_found_exactly(facts):
    """Against the plain definition: some two samples have one content and two labels, or two splits."""
    content, label, split = (list(column) for column in zip(*facts, strict=True))
    samples = Samples.of(ImageArray(pictures(4)[content]), label, split=split)
    pairs = [(a, b) for a in facts for b in facts if a[0] == b[0]]
    want = {"conflict"} if any(a[1] != b[1] for a, b in pairs) else set()
    want |= {"leakage"} if any(a[2] != b[2] for a, b in pairs) else set()
    assert {problem.kind for problem in check(samples).errors} == want


def test_every_copy_is_named(tmp_path):
    one, two = (corpus.encoded(p, "PNG") for p in pictures(2))
    files = [(f"a/{i}.png", one) for i in range(4)] + [("b/9.png", two), ("c/9.png", two), ("d/9.png", two)]
    texts = {p.kind: p.text for p in check(on_disk(tmp_path, files)).problems}
    assert texts["copy"] == "'a/0.png', 'a/1.png', 'a/2.png' and 'a/3.png' have the same content"
    same = "'b/9.png', 'c/9.png' and 'd/9.png' have the same content"
    assert texts["conflict"] == f"{same}, under the labels 'b', 'c' and 'd'"
    split = ["train", "val", "test", "test", "train", "train", "train"]
    texts = {p.kind: p.text for p in check(on_disk(tmp_path, files, split=split)).problems}
    assert texts["leakage"].endswith("'a/3.png' have the same content, in train, val and test")


def test_very_many_copies_are_counted(tmp_path):
    one = corpus.encoded(corpus.BASE, "PNG")
    findings = check(on_disk(tmp_path, [(f"a/{i:02}.png", one) for i in range(30)]))
    (text,) = (p.text for p in findings.problems if p.kind == "copy")
    assert "'a/07.png' and 22 more have the same content" in text


def test_problems_that_are_not_listed_are_counted(tmp_path):
    files = [(f"a/{i:02}.png", b"") for i in range(50)]
    findings = check(on_disk(tmp_path, files, size=(8, 8)), policy="trust", limit=20)
    assert len(findings.errors) == 21 and findings.count("error") == 50
    with pytest.raises(DataError, match=r"and 49 more"):
        findings.raise_if_errors()


def folder_of(tmp_path, *places):
    for i, (place, one) in enumerate(zip(places, pictures(len(places)), strict=True)):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / f"{i}.png").write_bytes(corpus.encoded(one, "PNG"))
    return check(read(tmp_path))


def test_domains_that_are_really_labels_are_warned_about(tmp_path):
    species = [
        f"{part}/species {k}" for part, ks in (("old", range(4)), ("new", range(4, 8))) for k in ks for _ in "ab"
    ]
    texts = {p.kind: p.text for p in folder_of(tmp_path, *species).problems}
    assert "8 domains occurs under one label only, as 'species 0' under 'old'" in texts["layout"]
    assert "only 2 labels ('new' and 'old')" in texts["few"] and "at least 4" in texts["few"]


def test_one_wrapping_folder_is_warned_about(tmp_path):
    texts = {p.kind: p.text for p in folder_of(tmp_path, *(f"all/{k}" for k in range(5) for _ in "ab")).problems}
    assert "each of the 5 domains" in texts["layout"] and "only 1 label ('all')" in texts["few"]


def test_a_gallery_and_queries_are_warned_about(tmp_path):
    places = [f"{part}/{k}" for part in ("gallery", "query") for k in range(5)]
    assert "only 2 labels" in {p.kind: p.text for p in folder_of(tmp_path, *places).problems}["few"]


def test_sound_layouts_are_not_warned_about(tmp_path):
    places = [f"{label}/{domain}" for label in "abcd" for domain in ("lab", "van")]
    assert folder_of(tmp_path / "domains", *places).problems == ()
    labels = [f"{label}" for label in "abcd" for _ in "xy"]
    assert folder_of(tmp_path / "plain", *labels).problems == ()
    closed = [f"{part}/{label}" for part in ("train", "test") for label in "ab" for _ in "xy"]
    assert folder_of(tmp_path / "closed", *closed).problems == ()


def test_notes_of_the_reader_are_told(tmp_path):
    (tmp_path / "m.csv").write_text("g,v,label\n1,2,a\n1,3,b\n")
    assert "'g'" in check(read(tmp_path / "m.csv")).notes[0]


def test_images_are_held_in_memory_up_to_the_limit_and_bad_ones_are_left_out_either_way(tmp_path):
    for k in range(12):
        (tmp_path / f"{k % 3}").mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 20 * k, np.uint8)).save(tmp_path / f"{k % 3}" / f"{k}.png")
    samples = read(tmp_path)
    (tmp_path / "0" / "3.png").write_bytes(b"no image")
    for limit, in_memory in ((12 * 48, True), (12 * 48 - 1, False)):
        loaded = load_readable(samples, "skip", limit_bytes=limit)
        assert loaded.inputs.is_in_memory == in_memory
        assert len(loaded) == 11 and len(loaded.skipped) == 1 and "3.png" in loaded.skipped[0]
        assert sorted(loaded.read(np.arange(11))[:, 0, 0, 0].tolist()) == [20 * k for k in range(12) if k != 3]
        with pytest.raises(DataError, match="1 of 12 pictures cannot be used"):
            load_readable(samples, "fail", limit_bytes=limit)
