"""Reading embeddings from any file, and judging them: planted facts must be found, bad files refused in one line."""

import gzip
import json
import math

import numpy as np
import pytest

from command_line import mettle
from mettle.data.embeddings import read_embeddings
from mettle.errors import DataError, InputError, MettleError
from mettle.evaluate import probe
from mettle.evaluate.audit import audit, sample_identities
from mettle.report.caveats import rank_audit_caveats
from processes import run_mettle

PEOPLE, EACH, DIM = 24, 6, 12


def vectors(seed: int = 0, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(PEOPLE), EACH)
    return rng.normal(size=(PEOPLE, DIM))[y] + noise * rng.normal(size=(len(y), DIM)), y


def names(y: np.ndarray) -> np.ndarray:
    return np.asarray([f"person {k:02d}" for k in y])


@pytest.fixture
def csv_file(tmp_path):
    x, y = vectors()
    lines = ["id,label,camera,hand," + ",".join(f"e{k}" for k in range(DIM))]
    for k in range(len(y)):
        fields = [str(100 + k), names(y)[k], "ab"[k % 2], ("left", "right")[y[k] % 2], *map(repr, x[k].tolist())]
        lines.append(",".join(fields))
    path = tmp_path / "z.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


class TestReading:
    def test_every_format_gives_the_same_table(self, tmp_path, csv_file):
        import pyarrow as pa
        import pyarrow.parquet as pq

        x, y = vectors()
        camera, hand = np.asarray(list("ab"))[np.arange(len(y)) % 2], np.asarray(["left", "right"])[y % 2]
        folder = tmp_path / "pair"
        folder.mkdir()
        np.save(folder / "embeddings.npy", x)
        for name, values in (("labels", names(y)), ("camera", camera), ("hand", hand)):
            np.save(folder / f"{name}.npy", values)
        columns = {"label": names(y), "camera": camera, "hand": hand}
        np.savez(tmp_path / "z.npz", embeddings=x, **columns)
        pq.write_table(pa.table({**columns, "embedding": x.tolist()}), tmp_path / "lists.parquet")
        flat = {f"v_{k}": x[:, k] for k in reversed(range(DIM))}
        pq.write_table(pa.table({**columns, **flat}), tmp_path / "flat.parquet")
        with gzip.open(tmp_path / "z.csv.gz", "wb") as file:
            file.write(csv_file.read_bytes())
        listed = tmp_path / "listed.csv"
        rows = [f'{n},{c},{h},"{v.tolist()}"' for n, c, h, v in zip(names(y), camera, hand, x, strict=True)]
        listed.write_text("label,camera,hand,embedding\n" + "\n".join(rows))
        for path in (
            csv_file,
            tmp_path / "z.csv.gz",
            listed,
            tmp_path / "z.npz",
            tmp_path / "lists.parquet",
            tmp_path / "flat.parquet",
            folder / "embeddings.npy",
        ):
            t = read_embeddings(path)
            np.testing.assert_array_equal(t.values, x, err_msg=str(path))
            assert t.values.dtype == np.float64
            assert t.label.values().tolist() == names(y).tolist()
            assert t.domain is not None and t.domain.values().tolist() == camera.tolist()
            assert {k: c.values().tolist() for k, c in t.groups.items()} == {"hand": hand.tolist()}

    def test_a_pair_of_files_by_name(self, tmp_path):
        x, y = vectors()
        np.save(tmp_path / "vectors.npy", x.astype(np.float32))
        np.save(tmp_path / "who.npy", y + 2**40)
        t = read_embeddings(tmp_path / "vectors.npy", tmp_path / "who.npy")
        assert t.label.names[0] == str(2**40) and t.values.dtype == np.float32

    def test_names_of_codes_ids_and_pictures(self, tmp_path):
        x, y = vectors()
        np.savez(
            tmp_path / "z.npz",
            embeddings=x,
            label=y,
            label_names=names(np.arange(PEOPLE)),
            ids=np.arange(len(y)) + 2**53 + 1,
            path=np.asarray([f"{k}.png" for k in range(len(y))]),
        )
        t = read_embeddings(tmp_path / "z.npz")
        assert t.label.values()[0] == "person 00" and t.names[1] == str(2**53 + 2)
        assert t.images is not None and t.images[3] == "3.png" and t.groups == {}
        assert read_embeddings(tmp_path / "z.npz", image="").images is None

    def test_where_keeps_rows(self, csv_file):
        t = read_embeddings(csv_file, where=["hand=left"])
        assert len(t) == PEOPLE * EACH // 2 and set(t.label.values()) == set(names(np.arange(0, PEOPLE, 2)))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"label": "lable"}, "did you mean 'label'"),
            ({"domain": "camra"}, "did you mean 'camera'"),
            ({"groups": ["hnd"]}, "did you mean 'hand'"),
            ({"image": "pictures"}, "no column 'pictures'"),
            ({"embeddings": "q"}, "no columns 'q'"),
            ({"where": ["hand=both"]}, "no row"),
            ({"where": ["hand"]}, "column=value"),
            ({"labels": "other.npy"}, "leave it out"),
        ],
    )
    def test_wrong_names_are_answered_with_the_nearest(self, csv_file, options, said):
        with pytest.raises(MettleError, match=said):
            read_embeddings(csv_file, **options)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"embeddings": lambda x, y: np.full(x.shape, "a")}, "must be real numbers"),
            ({"label": lambda x, y: y + 0.5}, "whole numbers or text"),
            ({"label": lambda x, y: np.where(y == 3, "", names(y))}, "6 of 144 rows .* the first is row 18"),
            ({"label": None}, "no labels .*--label"),
            ({"label": lambda x, y: y[:-1]}, "no labels"),
        ],
    )
    def test_bad_arrays(self, tmp_path, change, said):
        x, y = vectors()
        arrays = {"embeddings": x, "label": y}
        for name, make in change.items():
            if make is None:
                del arrays[name]
            else:
                arrays[name] = make(x, y)
        np.savez(tmp_path / "z.npz", **arrays)
        with pytest.raises(DataError, match=said):
            read_embeddings(tmp_path / "z.npz")

    @pytest.mark.parametrize(("value", "said"), [(np.nan, "NaN"), (np.inf, "infinity"), (0.0, "zero vectors")])
    def test_rows_that_cannot_be_judged_are_counted_and_the_first_named(self, tmp_path, value, said):
        x, y = vectors()
        x[[40, 90]] = value
        np.savez(tmp_path / "z.npz", embeddings=x, label=y)
        with pytest.raises(DataError, match=rf"2 of 144 rows .*{said}.* row 40"):
            read_embeddings(tmp_path / "z.npz")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("label,e0,e1\na,1,2\nb,x,2\n", "line 3, column 'e0': 'x' is not a number"),
            ("label,e0,e1\na,1,2\nb,1\n", "line 3: 2 fields"),
            ("label,e0,e1\n", "no rows"),
            ("label,weight\na,1\n", "no embeddings"),
            ("label,e0,e0\na,1,2\n", "two columns"),
            ('label,embedding\na,"[1, 2]"\nb,"[1]"\n', "one length"),
            ("", "empty"),
        ],
    )
    def test_bad_tables_name_the_line(self, tmp_path, text, said):
        (tmp_path / "z.csv").write_text(text)
        with pytest.raises(DataError, match=said):
            read_embeddings(tmp_path / "z.csv")

    def test_pickles_and_unknown_files_are_refused(self, tmp_path):
        np.save(tmp_path / "z.npy", np.asarray([{"a": 1}], object), allow_pickle=True)
        (tmp_path / "z.txt").write_text("1")
        for name, said in (("z.npy", "Python objects"), ("z.txt", "are read"), ("none.npz", "no file")):
            with pytest.raises(DataError, match=said):
                read_embeddings(tmp_path / name)


def make(tmp_path, x, y, **columns):
    np.savez(tmp_path / "z.npz", embeddings=x, label=y, **columns)
    return read_embeddings(tmp_path / "z.npz")


class TestAudit:
    def test_numbers_are_those_of_a_plain_count(self, tmp_path):
        x, y = vectors(noise=1.2)
        found = audit(make(tmp_path, x, y), fars=(0.1, 0.01))
        u = x / np.linalg.norm(x, axis=1, keepdims=True)
        s, (i, j) = u @ u.T, np.triu_indices(len(y), 1)
        genuine, impostor = s[i, j][y[i] == y[j]], s[i, j][y[i] != y[j]]
        facts = found.summary()["scenarios"]["all"]["verification"]
        assert (facts["genuine"], facts["impostor"]) == (len(genuine), len(impostor))
        auc = np.mean(genuine[:, None] > impostor)
        assert facts["auc"]["value"] == pytest.approx(auc, abs=1e-9)
        for point in facts["tar"]:
            allowed = math.floor(point["far"] * len(impostor) + 1e-9)
            assert np.count_nonzero(impostor >= point["threshold"]) <= allowed
            assert point["tar"] == pytest.approx(np.mean(genuine >= point["threshold"]), abs=1e-12)
        np.fill_diagonal(s, -2)
        recall = np.mean(y[s.argmax(axis=1)] == y)
        assert found.ways["all"].retrieval.recall[1] == pytest.approx(recall)

    def test_planted_facts_are_found(self, tmp_path):
        x, y = vectors(noise=0.3)
        y = y.copy()
        y[7] = 20  # a wrong label: the row is of 1
        y[60:63] = 24  # half of subject 10 under another name
        camera = np.tile(["a", "b"], len(y) // 2)
        found = audit(
            make(tmp_path, x, y, camera=camera, hand=np.where(y % 2, "left", "right")), fars=(0.1, 0.01, 1e-4)
        )
        facts = found.summary()
        worst = facts["label_errors"]["ranked"][0]
        assert (worst["row"], worst["label"], worst["suggested"], worst["domain"]) == (7, "20", "1", "b")
        assert {facts["same_subject"][0]["first"], facts["same_subject"][0]["second"]} == {"10", "24"}
        hardest = facts["hardest"]["genuine"][0]
        assert 7 in (hardest["first"]["row"], hardest["second"]["row"])
        assert list(facts["scenarios"]) == ["all", "in-domain", "cross-domain"]
        assert facts["domains"]["domains"] == ["a", "b"] and set(facts["groups"]) == {"camera", "hand"}
        assert facts["groups"]["hand"]["worst"] is None  # fewer than 50 people
        assert [t["far"] for t in facts["thresholds"]] == [0.1, 0.01]
        assert "not measurable" in facts["missing"]["threshold for FAR 0.0001"]
        assert any("TAR at FAR 0.01\N{NO-BREAK SPACE}% is not measurable" in text for text in rank_audit_caveats(found))
        assert facts["scenarios"]["all"]["verification"]["tar"][-1]["tar"] is None

    def test_summary_is_json_without_nan(self, tmp_path):
        x, y = vectors(noise=0.01)  # perfect: infinite thresholds, empty lists
        text = json.dumps(audit(make(tmp_path, x, y)).summary(), allow_nan=False)
        assert json.loads(text)["scenarios"]["all"]["verification"]["eer"]["value"] == 0

    def test_collapse_is_said_first(self, tmp_path):
        x, y = vectors(noise=0.1)
        found = audit(make(tmp_path, x + 100, y))
        assert rank_audit_caveats(found).decisive[0].startswith("Collapse: all vectors point almost the same way")
        assert found.summary()["geometry"]["collapsed"]

    def test_a_training_split_is_pointed_out(self, tmp_path):
        x, y = vectors()
        found = audit(make(tmp_path, x, y, split=np.where(y < 12, "train", "test")))
        assert "--where split=test" in " ".join(rank_audit_caveats(found).decisive)

    @pytest.mark.parametrize("codes", [("train", "test"), (0, 2)])
    def test_probes_need_the_same_labels_in_train_and_test(self, tmp_path, codes):
        x, y = vectors(noise=1.0)
        late = np.arange(len(y)) % EACH > 3
        found = audit(make(tmp_path, x, y, split=np.where(late, codes[1], codes[0])))
        alone = probe((x[~late], y[~late]), (x[late], y[late]))
        assert found.probe.linear.accuracy == alone.linear.accuracy
        facts = found.summary()["probe"]
        assert facts["knn"]["accuracy"] == alone.knn.accuracy and facts["samples"] == np.count_nonzero(late)
        assert facts["linear"]["worst_class"]["label"] == str(alone.linear.worst_class[0])
        some = np.where(y < 6, "train", np.where(late & (y < 12), "test", "train"))  # 6 … 11 on both sides
        found = audit(make(tmp_path, x, y, split=some))
        assert found.summary()["probe"]["labels"] == 6

    @pytest.mark.parametrize(
        ("split", "said"),
        [
            (lambda y: np.where(y < 12, "train", "test"), "0 labels are in train and in test"),
            (lambda y: np.where(y < 12, "test", "val"), "no column split with train and test"),
            (None, "only you know which were trained on"),
        ],
    )
    def test_where_there_can_be_no_probe_it_is_said(self, tmp_path, split, said):
        x, y = vectors()
        columns = {} if split is None else {"split": split(y)}
        found = audit(make(tmp_path, x, y, **columns))
        assert found.probe is None and said in found.summary()["missing"]["probe"]

    @pytest.mark.parametrize(
        ("several", "said"),
        [
            (5, "Only 5 identities with two samples, of 100 in all: too few for any interval, which needs 6"),
            (12, "Only 12 identities with two samples, of 100 in all: intervals over identities are rough"),
            (40, None),
        ],
    )
    def test_people_with_one_sample_do_not_make_few_people_many(self, several, said):
        y = np.append(np.arange(100), np.arange(several))
        rng = np.random.default_rng(0)
        found = audit(rng.normal(size=(100, 8))[y] + 0.3 * rng.normal(size=(len(y), 8)), y)
        told = [text for text in rank_audit_caveats(found) if text.startswith("Only")]
        assert (said is None and told == []) or told[0].startswith(said)
        assert (found.summary()["scenarios"]["all"]["verification"]["eer"]["interval"] is None) == (several < 6)

    def test_people_of_two_samples_each_are_just_so_many(self):
        y = np.repeat(np.arange(20), 2)
        found = audit(np.random.default_rng(0).normal(size=(20, 8))[y] + 0.01 * np.arange(40)[:, None], y)
        assert "Only 20 identities: intervals over identities are rough, and probably too short." in rank_audit_caveats(
            found
        )

    def test_sampling_is_of_whole_identities_and_said(self, tmp_path):
        x, y = vectors(noise=1.0)
        found = audit(make(tmp_path, x, y), most=60)
        values, counts = np.unique(y[found.sample], return_counts=True)
        assert len(values) == 10 and set(counts) == {EACH}
        assert "60 rows of 10 identities" in found.limits[0]
        for pair in (*found.hardest["genuine"], *found.hardest["impostor"]):
            assert {pair.first, pair.second} <= set(found.sample.tolist())
            cosine = x[pair.first] @ x[pair.second] / math.prod(np.linalg.norm(x[[pair.first, pair.second]], axis=1))
            assert pair.score == pytest.approx(cosine)
        assert len(sample_identities(np.zeros(50, int), 20, 0)) == 20

    def test_two_rows_of_one_sample_are_no_pair(self, tmp_path):
        x, y = vectors(noise=0.8)
        twice = np.concatenate([np.arange(len(y)), [5]])
        once = audit(make(tmp_path, x, y))
        again = audit(make(tmp_path, x[twice], y[twice], ids=twice))
        # Sample 5 has two rows: pairs of them are left out, no pair is compared with itself.
        assert again.ways["all"].verification.genuine == once.ways["all"].verification.genuine + EACH - 1
        assert all(twice[p.first] != twice[p.second] for p in again.hardest["genuine"])

    @pytest.mark.parametrize(("labels", "said"), [(np.zeros, "impostor"), (np.arange, "genuine")])
    def test_one_kind_of_pairs_is_refused(self, tmp_path, labels, said):
        x, y = vectors()
        with pytest.raises(InputError, match=said):
            audit(make(tmp_path, x, labels(len(y)).astype(int)))

    @pytest.mark.parametrize("far", [0, 1, -0.1, float("nan")])
    def test_rates_must_be_rates(self, tmp_path, far):
        with pytest.raises(InputError, match="far"):
            audit(make(tmp_path, *vectors()), fars=(far,))

    def test_small_files_get_what_they_can(self, tmp_path):
        found = audit(make(tmp_path, np.asarray([[1.0, 0], [1, 0.1], [0, 1]]), np.asarray([0, 0, 1])))
        assert found.summary()["scenarios"]["all"]["verification"]["eer"]["value"] == 0
        assert found.missing


class TestCommand:
    """`mettle audit` as a user meets it."""

    def test_it_writes_a_page_and_a_json(self, csv_file):
        said = mettle("audit", csv_file, "--group", "hand", "--far", "0.1", "--far", "0.01")
        assert "EER" in said and "audit: " in said
        folder = csv_file.parent / "z-audit"
        assert {path.name for path in folder.iterdir()} == {"audit.html", "audit.json"}
        facts = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        assert facts["fars"] == [0.1, 0.01] and facts["columns"]["groups"] == ["hand"]

    def test_a_mistake_is_one_line_and_status_2(self, csv_file):
        done = run_mettle("audit", csv_file, "--label", "lable")
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.startswith("mettle: ") and done.stderr.count("\n") == 1
        assert "did you mean 'label'" in done.stderr
        assert not (csv_file.parent / "z-audit").exists()
