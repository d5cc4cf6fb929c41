"""Public sets in their official layouts, as tiny made-up copies: what tables say, that they train, what is refused."""

import csv
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from mettle.data import read
from mettle.data.sources import import_public_set
from mettle.data.sources.public_sets import PUBLIC_SETS
from mettle.errors import DataError
from mettle.train import load, train
from tests.command_line import mettle, refused


def picture(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def make_cub200(root: Path) -> None:
    species = [1, 2, 100, 101, 200]
    names = {k: f"{k:03d}.Bird_{k}" for k in species}
    files = [f"{names[k]}/bird_{k}_{shot}.jpg" for k in species for shot in range(2)]
    for seed, file in enumerate(files):
        picture(root / "CUB_200_2011" / "images" / file, seed)
    root = root / "CUB_200_2011"
    write(root / "images.txt", *(f"{i} {file}" for i, file in enumerate(files, 1)))
    write(root / "image_class_labels.txt", *(f"{i} {species[(i - 1) // 2]}" for i in range(1, 11)))
    write(root / "classes.txt", *(f"{k} {name}" for k, name in names.items()))
    write(root / "train_test_split.txt", *(f"{i} {i % 2}" for i in range(1, 11)))


CAR_NAMES = np.array([f"Car {k} Sedan 2012" for k in range(1, 197)], dtype=object)
CARS = [1, 98, 99, 196]


def records(**fields: list) -> np.ndarray:
    found = np.zeros((1, len(next(iter(fields.values())))), dtype=[(name, object) for name in fields])
    for name, values in fields.items():
        found[name][0] = values
    return found


def make_cars196(root: Path) -> None:
    files = [f"car_ims/{i:06d}.jpg" for i in range(1, 9)]
    for seed, file in enumerate(files):
        picture(root / file, seed)
    fields = {"relative_im_path": files, "class": [CARS[i // 2] for i in range(8)], "test": [i % 2 for i in range(8)]}
    savemat(root / "cars_annos.mat", {"annotations": records(**fields), "class_names": CAR_NAMES})


def make_cars_devkit(root: Path) -> None:
    files = [f"{i:05d}.jpg" for i in range(1, 5)]
    for part in ("cars_train", "cars_test"):
        for seed, file in enumerate(files):
            picture(root / part / file, seed)
    (root / "devkit").mkdir()
    content = {"annotations": records(fname=files, **{"class": CARS})}
    savemat(root / "devkit" / "cars_train_annos.mat", content)
    savemat(root / "cars_test_annos_withlabels.mat", content)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": CAR_NAMES})


def make_sop(root: Path) -> None:
    head, place = "image_id class_id super_class_id path", root / "Stanford_Online_Products"
    for split, products in (("train", (1, 2, 3)), ("test", (11319, 11320))):
        lines = [f"{k} {k} 1 bicycle_final/{k}_{shot}.JPG" for k in products for shot in range(2)]
        write(place / f"Ebay_{split}.txt", head, *lines)
        for seed, line in enumerate(lines):
            picture(place / line.split()[-1], seed)


def make_cifar10(root: Path) -> np.ndarray:
    rng = np.random.default_rng(0)
    place = root / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    (place / "batches.meta.txt").write_text("\n".join([*(f"thing{k}" for k in range(10)), ""]))
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        images = rng.integers(0, 256, (6, 32, 32, 3), np.uint8)
        labels = np.array([0, 1, 2, 3, 4, 9], np.uint8)
        rows = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(6, -1)], 1)
        (place / f"{name}.bin").write_bytes(rows.tobytes())
    return images  # those of the test batch


def make_cifar100(root: Path) -> None:
    rng = np.random.default_rng(0)
    (root / "fine_label_names.txt").write_text("".join(f"fine{k}\n" for k in range(100)))
    (root / "coarse_label_names.txt").write_text("".join(f"coarse{k}\n" for k in range(20)))
    for name in ("train", "test"):
        rows = rng.integers(0, 256, (8, 3074), np.uint8)
        rows[:, 0], rows[:, 1] = [0, 0, 1, 1, 19, 19, 5, 5], [3, 3, 4, 4, 99, 99, 50, 50]
        (root / f"{name}.bin").write_bytes(rows.tobytes())


def make_celeba(root: Path) -> None:
    files = [f"{i:06d}.jpg" for i in range(1, 13)]
    for seed, file in enumerate(files):
        picture(root / "Img" / "img_align_celeba" / file, seed)
    write(root / "Anno" / "identity_CelebA.txt", *(f"{file} {1 + i // 2}" for i, file in enumerate(files)))
    head = ["12", "Blond_Hair Male"]
    write(
        root / "Anno" / "list_attr_celeba.txt",
        *head,
        *(f"{f} {' 1' if i % 2 else '-1'} {'-1' if i < 4 else '1'}" for i, f in enumerate(files)),
    )
    write(root / "Eval" / "list_eval_partition.txt", *(f"{file} {i // 4}" for i, file in enumerate(files)))


def make_waterbirds(root: Path) -> None:
    lines = ["img_id,img_filename,y,split,place,place_filename"]
    for i in range(12):
        file = f"{i:03d}.Bird/bird_{i}.jpg"
        picture(root / file, i)
        lines.append(f"{i},{file},{i % 2},{i // 4},{int(i % 4 > 1)},/b/bamboo/1.jpg")
    write(root / "metadata.csv", *lines)


def make_tongji(root: Path) -> None:
    for session in (1, 2):
        for number in (1, 2, 10, 11, 2981, 2991, 3001, 3010, 3011, 6000):
            picture(root / "ROI" / f"session{session}" / f"{number:05d}.bmp", number)


def make_market1501(root: Path) -> None:
    names = {
        "bounding_box_train": ["0002_c1s1_000451_03", "0002_c2s1_000776_01", "0007_c2s3_070952_01", "0007_c3s3_1_01"],
        "query": ["0001_c1s1_001051_00", "0003_c4s6_015641_00"],
        "bounding_box_test": ["0001_c2s1_1_00", "0003_c6s1_2_01", "0000_c1s1_3_02", "0000_c5s1_4_02", "-1_c1s1_5_01"],
    }
    for part, files in names.items():
        for seed, name in enumerate(files):
            picture(root / part / f"{name}.jpg", seed)


MAKERS = {
    "cub200": make_cub200,
    "cars196": make_cars196,
    "sop": make_sop,
    "cifar10": make_cifar10,
    "cifar100": make_cifar100,
    "celeba": make_celeba,
    "waterbirds": make_waterbirds,
    "tongji": make_tongji,
    "market1501": make_market1501,
}


def imported(name: str, folder: Path, **options):
    """A made-up copy, its table, and the samples that are read from it."""
    (folder / "set").mkdir()
    MAKERS[name](folder / "set")
    table = folder / f"table.{'npz' if name.startswith('cifar') else 'csv'}"
    import_public_set(name, folder / "set", table, **options)
    return table, read(table)


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def counts(samples, part: str) -> tuple[int, int]:
    found = samples.part(part)
    return len(found), len(np.unique(found.labels))


def test_every_set_has_a_made_up_copy():
    assert set(MAKERS) == set(PUBLIC_SETS)


@pytest.mark.parametrize("name", ["cub200", "cars196", "sop"])
def test_sets_of_unseen_classes_share_none(name, tmp_path):
    table, samples = imported(name, tmp_path)
    train_part, test_part = samples.part("train"), samples.part("test")
    assert len(train_part) and len(test_part) and not set(train_part.labels) & set(test_part.labels)
    assert counts(samples, "train") == {"cub200": (6, 3), "cars196": (4, 2), "sop": (6, 3)}[name]
    assert counts(samples, "test") == {"cub200": (4, 2), "cars196": (4, 2), "sop": (4, 2)}[name]
    assert not Path(rows_of(table)[0]["path"]).is_absolute(), "pictures below the table are named relative to it"
    assert np.isfinite(samples.read(np.arange(len(samples)))).all()


def test_the_official_split_of_birds_and_cars_is_kept_beside(tmp_path):
    table, samples = imported("cub200", tmp_path)
    assert Counter(row["official_split"] for row in rows_of(table)) == {"train": 5, "test": 5}
    assert samples.label.names[0] == "001.Bird_1" and "official_split" in samples.groups


def test_cars_of_the_devkit_have_the_labels_of_cars_annos(tmp_path):
    make_cars_devkit(tmp_path)
    import_public_set("cars196", tmp_path, tmp_path / "cars.csv")
    rows = rows_of(tmp_path / "cars.csv")
    assert [row["label"] for row in rows[:4]] == [f"{k:03d} Car {k} Sedan 2012" for k in CARS]
    assert [row["split"] for row in rows] == ["train", "train", "test", "test"] * 2
    assert [row["official_split"] for row in rows] == ["train"] * 4 + ["test"] * 4
    assert rows[4]["path"] == "cars_test/00001.jpg"


def test_pictures_of_cifar_are_those_that_were_packed(tmp_path):
    (tmp_path / "set").mkdir()
    wanted = make_cifar10(tmp_path / "set")
    import_public_set("cifar10", tmp_path / "set", tmp_path / "cifar.npz")
    samples = read(tmp_path / "cifar.npz")
    test = samples.part("test")
    assert (len(samples.part("train")), len(test)) == (30, 6)
    assert np.array_equal(test.read(np.arange(6)), wanted)
    assert [samples.label.names[code] for code in test.labels] == [f"thing{k}" for k in (0, 1, 2, 3, 4, 9)]


def test_cifar100_has_the_fine_label_and_its_superclass(tmp_path):
    _, samples = imported("cifar100", tmp_path)
    first = samples.take(np.arange(8))
    assert [samples.label.names[code] for code in first.labels[::2]] == ["fine3", "fine4", "fine99", "fine50"]
    assert first.groups["superclass"].values()[::2].tolist() == ["coarse0", "coarse1", "coarse19", "coarse5"]


def test_attributes_of_celeba_can_be_labels_and_groups(tmp_path):
    table, samples = imported("celeba", tmp_path)
    assert [counts(samples, part) for part in ("train", "val", "test")] == [(4, 2)] * 3
    hair = read(table, label="Blond_Hair", groups=["Male"])
    assert hair.label.values().tolist() == ["0", "1"] * 6
    assert hair.groups["Male"].values().tolist() == ["0"] * 4 + ["1"] * 8


def test_waterbirds_have_their_place_as_a_group(tmp_path):
    _, samples = imported("waterbirds", tmp_path)
    assert samples.label.values().tolist() == ["landbird", "waterbird"] * 6
    assert samples.groups["place"].values().tolist() == ["land", "land", "water", "water"] * 3
    assert [len(samples.part(part)) for part in ("train", "val", "test")] == [4, 4, 4]


def test_ten_files_of_tongji_are_a_palm_and_two_palms_a_person(tmp_path):
    table, samples = imported("tongji", tmp_path)
    rows = rows_of(table)[:10]
    assert [row["label"] for row in rows] == [f"palm {k:03d}" for k in (1, 1, 1, 2, 299, 300, 301, 301, 302, 600)]
    assert [row["hand"] for row in rows[:5]] == ["first"] * 3 + ["second", "first"]
    assert samples.domain.names == ("session 1", "session 2")
    test = samples.part("test")
    assert len(test) == 8 and (test.role == 2).sum() == 4, "session 1 of unseen palms is the gallery"
    assert not set(samples.part("train").labels) & set(test.labels)


def test_market_has_roles_cameras_and_distractors_and_no_junk(tmp_path):
    table, samples = imported("market1501", tmp_path)
    assert Counter(row["role"] for row in rows_of(table)) == {"": 4, "query": 2, "gallery": 2, "distractor": 2}
    assert counts(samples, "train") == (4, 2)
    assert len(set(samples.part("test").labels)) == 2 + 2, "every distractor is a label of its own"
    assert "camera 6" in samples.domain.names


def test_a_share_of_the_training_identities_becomes_validation(tmp_path):
    table, samples = imported("tongji", tmp_path, val=0.5)
    splits = {}
    for row in rows_of(table):
        splits.setdefault(row["label"], set()).add(row["split"])
    assert all(len(found) == 1 for found in splits.values()), "a palm is on one side"
    assert [counts(samples, part)[1] for part in ("train", "val", "test")] == [2, 2, 3]


def test_a_share_of_the_pictures_of_cifar_becomes_validation(tmp_path):
    _, samples = imported("cifar10", tmp_path, val=0.2)
    assert [len(samples.part(part)) for part in ("train", "val", "test")] == [24, 6, 6]


def test_a_table_elsewhere_has_absolute_paths(tmp_path):
    make_sop(tmp_path / "set")
    (tmp_path / "tables").mkdir()
    import_public_set("sop", tmp_path / "set", tmp_path / "tables" / "sop.csv")
    assert len(read(tmp_path / "tables" / "sop.csv")) == 10
    assert Path(rows_of(tmp_path / "tables" / "sop.csv")[0]["path"]).is_absolute()


def test_a_table_trains(tmp_path):
    table, _ = imported("sop", tmp_path)
    small = ["batch.classes=2", "batch.samples=2", "model.width=4", "model.dim=4", "train.steps=2", "data.size=16"]
    assert train(load("supcon", [f"data.source={table}", *small]), tmp_path / "run", tensorboard=False).finished


# --- what is refused, in one line ---


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        ("cub200", "CUB_200_2011/images.txt", r"no images\.txt in .*: give the folder that the archive unpacks to"),
        ("cub200", "CUB_200_2011/classes.txt", r"no classes\.txt"),
        ("cub200", "CUB_200_2011/images/001.Bird_1/bird_1_0.jpg", r"1 of 10 pictures are not in .*first: .*bird_1_0"),
        ("cars196", "cars_annos.mat", r"no cars_annos\.mat"),
        ("sop", "Stanford_Online_Products/Ebay_test.txt", r"no Ebay_test\.txt"),
        ("cifar10", "cifar-10-batches-bin/data_batch_3.bin", r"no data_batch_3\.bin in .*cifar-10-batches-bin"),
        ("cifar100", "fine_label_names.txt", r"no fine_label_names\.txt"),
        ("celeba", "Anno/identity_CelebA.txt", r"no identity_CelebA\.txt"),
        ("celeba", "Img/img_align_celeba", r"no img_align_celeba"),
        ("waterbirds", "metadata.csv", r"no metadata\.csv"),
        ("tongji", "ROI/session2", r"no session2 in .*ROI"),
        ("market1501", "query", r"no query in"),
    ],
)
def test_what_is_missing_is_named(name, gone, message, tmp_path):
    (tmp_path / "set").mkdir()
    MAKERS[name](tmp_path / "set")
    path = tmp_path / "set" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    output = tmp_path / f"t.{'npz' if name.startswith('cifar') else 'csv'}"
    with pytest.raises(DataError, match=message) as told:
        import_public_set(name, tmp_path / "set", output)
    assert "\n" not in str(told.value) and not output.exists()


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("cub200", "CUB_200_2011/train_test_split.txt", "1 2\n", r"line 1: two fields, the second one of 0, 1 wanted"),
        ("cub200", "CUB_200_2011/image_class_labels.txt", "1 1\n", r"says nothing of '2'"),
        ("cars196", "cars_annos.mat", "no matrix", r"cannot read .*cars_annos\.mat"),
        ("sop", "Stanford_Online_Products/Ebay_train.txt", "1 1 bicycle/1.JPG\n", r"line 1: image_id, class_id"),
        ("cifar10", "cifar-10-batches-bin/test_batch.bin", "short", r"5 bytes, not records of 3073"),
        ("cifar10", "cifar-10-batches-bin/batches.meta.txt", "one\n", r"1 names, but there is a label 9"),
        ("celeba", "Anno/list_attr_celeba.txt", "1\nMale\n000001.jpg 7\n", r"line 3: a file and 1 times 1 or -1"),
        ("waterbirds", "metadata.csv", "img_filename,y,split,place\na/b.jpg,3,0,0\n", r"'3' is none of 0, 1"),
        ("tongji", "ROI/session1/left.bmp", "", r"left\.bmp.* is not named by a number"),
        ("market1501", "query/anybody.jpg", "", r"anybody\.jpg.* is not named as 0002_c1s1"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(name, file, content, message, tmp_path):
    (tmp_path / "set").mkdir()
    MAKERS[name](tmp_path / "set")
    (tmp_path / "set" / file).write_text(content)
    with pytest.raises(DataError, match=message):
        import_public_set(name, tmp_path / "set", tmp_path / f"t.{'npz' if name.startswith('cifar') else 'csv'}")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps({b"data": 1}))
    for folder in (tmp_path, tmp_path / "cifar-10-batches-py"):
        with pytest.raises(DataError, match="made of pickles.*Fetch the binary version"):
            import_public_set("cifar10", folder, tmp_path / "cifar.npz")


@pytest.mark.parametrize(
    ("name", "output", "options", "message"),
    [
        ("sop", "sop.npz", {}, r"becomes a table of files: -o FILE\.csv"),
        ("cifar10", "cifar.csv", {}, r"has no picture files.*-o FILE\.npz"),
        ("sop", "none/sop.csv", {}, r"no folder .*none"),
        ("celeba", "c.csv", {"val": 0.5}, r"a validation split of its own: leave --val out"),
        ("sop", "sop.csv", {"val": 0.01}, r"too little or too much"),
        ("sop", "sop.csv", {"val": -1}, r"a share between 0 and 1"),
    ],
)
def test_what_cannot_be_written_is_told(name, output, options, message, tmp_path):
    MAKERS[name](tmp_path)
    with pytest.raises(DataError, match=message):
        import_public_set(name, tmp_path, tmp_path / output, **options)


def test_the_command_says_what_it_found(tmp_path):
    make_market1501(tmp_path)
    said = mettle("data", "import", "market1501", tmp_path, "-o", tmp_path / "market.csv")
    assert "10 pictures, 5 labels" in said and "query 2" in said and "camera 6 1" in said
    assert "note: 1 junk boxes (-1) were left out" in said
    assert "did you mean 'cub200'" in refused("data", "import", "cub20", tmp_path, "-o", tmp_path / "t.csv")
    assert "no folder" in refused("data", "import", "sop", tmp_path / "none", "-o", tmp_path / "t.csv")
