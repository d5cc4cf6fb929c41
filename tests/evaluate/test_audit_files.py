"""What is wrong with a file of embeddings is said of that file, and what is right with it is read all the same."""

import numpy as np
import pytest
import torch

from mettle.errors import DataError, InputError
from mettle.evaluate import audit, read_embeddings, same_subject, verification
from mettle.evaluate.verification import from_scores
from mettle.report.audit_page import write_audit


def people(count=8, each=5, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(count), each)
    return rng.normal(size=(count, 6))[y] + 0.5 * rng.normal(size=(len(y), 6)), y


class TestNeighbours:
    def test_an_unrelated_neighbour_does_no_harm(self, tmp_path):
        x, y = people()
        np.save(tmp_path / "embeddings.npy", x)
        np.save(tmp_path / "labels.npy", y)
        np.save(tmp_path / "notes.npy", np.asarray([{"a": 1}, None], dtype=object), allow_pickle=True)
        (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
        (tmp_path / "text.npy").write_text("no array at all")
        np.save(tmp_path / "other.npy", x[:3])
        found = read_embeddings(tmp_path / "embeddings.npy")
        assert len(found) == len(y)
        for name in ("notes", "torn", "text", "other"):
            with pytest.raises(DataError, match=f"label: '{name}' of .* cannot be used"):
                read_embeddings(tmp_path / "embeddings.npy", label=name)

    def test_unreadable_labels_are_named(self, tmp_path):
        x, y = people()
        np.save(tmp_path / "embeddings.npy", x)
        np.save(tmp_path / "labels.npy", y.astype(object), allow_pickle=True)
        with pytest.raises(DataError, match=r"'labels' cannot be used, for cannot read .*Python objects"):
            read_embeddings(tmp_path / "embeddings.npy")


class TestMessages:
    @pytest.mark.parametrize(("cut", "words"), [(slice(3), r"shape \(3,\)"), ((slice(None), None), r"ravel\(\)")])
    def test_labels_of_another_shape(self, tmp_path, cut, words):
        x, y = people()
        np.savez(tmp_path / "z.npz", embeddings=x, label=y[cut])
        for label in (None, "label"):
            with pytest.raises(DataError, match=rf"'label'.* cannot be used.*{words}"):
                read_embeddings(tmp_path / "z.npz", label=label)

    def test_a_file_of_no_rows(self, tmp_path):
        np.savez(tmp_path / "empty.npz", embeddings=np.empty((0, 4)), label=np.empty(0, int))
        with pytest.raises(DataError, match=r"has no rows: its embeddings have shape \(0, 4\)"):
            read_embeddings(tmp_path / "empty.npz")

    def test_a_missing_numbered_column(self, tmp_path):
        lines = ["label,e0,e2,e3", *(f"{k},{k}.5,{k + 1}.25,1" for k in range(4))]
        (tmp_path / "z.csv").write_text("\n".join(lines))
        with pytest.raises(DataError, match="from 'e0' to 'e2'; is one missing.*--embeddings e"):
            read_embeddings(tmp_path / "z.csv")
        assert read_embeddings(tmp_path / "z.csv", embeddings="e").values.shape == (4, 3)
        (tmp_path / "z.csv").write_text("\n".join(["label,e1,e2,e3", *lines[1:]]))
        assert read_embeddings(tmp_path / "z.csv").values.shape == (4, 3)

    @pytest.mark.parametrize(("argument", "words"), [({"domain": "label"}, "domain"), ({"groups": ["label"]}, "group")])
    def test_labels_are_no_domain_and_no_group(self, tmp_path, argument, words):
        x, y = people()
        np.savez(tmp_path / "z.npz", embeddings=x, label=y)
        with pytest.raises(DataError, match=f"^{words}: column 'label'"):
            read_embeddings(tmp_path / "z.npz", **argument)


class TestArrays:
    def test_an_audit_takes_arrays_and_tensors(self):
        x, y = people()
        side = np.where(np.arange(len(y)) % 2, "left", "right")
        plain = audit(x, y, domains=side, groups={"odd": y % 2}, fars=0.01)
        again = audit(
            torch.from_numpy(x), torch.from_numpy(y), domains=side.tolist(), groups={"odd": y % 2}, fars=[0.01]
        )
        assert plain.fars == (0.01,)
        assert plain.headline.verification.eer == verification(x, y, domains=side, trials="across").eer
        assert again.headline.verification.eer == plain.headline.verification.eer
        assert set(plain.groups) == {"domains", "odd"}
        text = audit(x, np.char.add("person ", y.astype(str)))
        assert text.table.label.names[0] == "person 0"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((people()[0],), "labels are missing"),
            (("f.npz",), r"audit\(read_embeddings\('f.npz'\)\)"),
            ((people()[0], people()[1][:3]), "one entry per embedding"),
            ((people()[0], people()[1] * 1.0), "integers or text"),
            ((np.full((4, 2), np.nan), [0, 0, 1, 1]), "finite"),
        ],
    )
    def test_what_is_no_table_is_refused(self, arguments, words):
        with pytest.raises(InputError, match=words):
            audit(*arguments)

    @pytest.mark.parametrize("fars", [2, "a", [], None, [0.1, "b"]])
    def test_rates_lie_between_0_and_1(self, fars):
        with pytest.raises(InputError, match="fars must be rates between 0 and 1"):
            audit(*people(), fars=fars)

    def test_a_table_brings_its_own_labels(self):
        x, y = people()
        with pytest.raises(InputError, match="labels goes with arrays"):
            audit(audit(x, y).table, y)
        with pytest.raises(InputError, match="groups must map names"):
            audit(x, y, groups=y)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_huge_and_tiny_embeddings_are_drawn_without_a_warning(tmp_path, scale):
    """Warnings are errors here."""
    x, y = people()
    found = audit(x * scale, y)
    assert found.headline.verification.eer == audit(x, y).headline.verification.eer
    assert write_audit(found, tmp_path).stat().st_size > 10_000


class TestSameSubject:
    def test_labels_far_apart_are_no_suspects(self):
        """Twelve labels at right angles: old lists held their least suspicious pairs at -0.998."""
        y = np.repeat(np.arange(12), 5)
        x = np.eye(12)[y] + 0.01 * np.random.default_rng(0).normal(size=(60, 12))
        assert same_subject(x, y) == []
        assert len(same_subject(x, y, near=None)) == 20
        found = audit(x, y)
        assert found.same_subject == () and found.summary()["same_subject"] == []

    @pytest.mark.parametrize("shift", [0.0, 0.5])
    def test_a_person_under_two_labels_is_found_across_sessions(self, shift):
        rng = np.random.default_rng(2)
        y = np.repeat(np.arange(40), 8)
        second = np.isin(y, (3, 17)) & (np.arange(len(y)) % 2 == 0)
        x = rng.normal(size=(40, 32))[y] + 0.5 * rng.normal(size=(len(y), 32))
        x += shift * rng.normal(size=(40, 32))[y] * second[:, None]
        found = same_subject(x, np.where(second, y + 100, y))
        assert {(t.first, t.second) for t in found} == {(3, 103), (17, 117)}


def test_only_scores_from_elsewhere_can_be_the_wrong_way_round():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 2)
    x = rng.normal(size=(10, 4))[y]
    x[1::2] *= -1  # relatives point away from each other
    x += 0.1 * rng.normal(size=x.shape)
    turned = verification(x, y)
    assert turned.auc < 0.5
    assert "do the labels belong to these embeddings" in turned.warnings[0]
    assert "distance" not in turned.warnings[0]
    assert "distance may have been passed" in from_scores([0.1, 0.2, 0.8], [1, 1, 0]).warnings[0]


@pytest.mark.parametrize("chunk", [2.5, 0, -1, True, "8"])
def test_a_chunk_is_a_whole_number(chunk):
    with pytest.raises(InputError, match="chunk must be a whole number from 1 up"):
        verification(*people(), chunk=chunk)


@pytest.mark.parametrize(("name", "mark"), [("z.tsv", "\t"), ("z.csv", ";")])
def test_tables_parted_by_tabs_or_semicolons(tmp_path, name, mark):
    rows = [mark.join(("e0", "e1", "label")), *(mark.join((str(i + 1), str(i % 3), f"p{i // 2}")) for i in range(8))]
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    found = read_embeddings(tmp_path / name)
    assert found.values.shape == (8, 2)
    assert len(set(found.label.names)) == 4
