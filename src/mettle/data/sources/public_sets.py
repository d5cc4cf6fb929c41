"""Public sets as their authors hand them out, turned into a table that training takes: ``mettle data import``.

| name | what is read | identity | split | domain, groups |
|---|---|---|---|---|
| ``cub200`` | ``images.txt``, ``image_class_labels.txt``, ``classes.txt``, ``train_test_split.txt`` | species | the first 100 species train, the others test | ``official_split``: that of the file, for classification |
| ``cars196`` | ``cars_annos.mat``, or ``devkit/`` with both annotation files | model | the first 98 models train, the others test | ``official_split`` |
| ``sop`` | ``Ebay_train.txt``, ``Ebay_test.txt`` | product | as the files | ``category`` |
| ``cifar10``, ``cifar100`` | the binary version | class | as the files | ``superclass`` (cifar100) |
| ``celeba`` | ``identity_CelebA.txt``, ``list_attr_celeba.txt``, ``list_eval_partition.txt`` | person | as the file, validation too | every attribute as 0 or 1 |
| ``waterbirds`` | ``metadata.csv`` | landbird, waterbird | as the file, validation too | ``place``, ``species`` |
| ``tongji`` | ``session1/``, ``session2/``, files numbered from 1 | palm | palms 1 to 300 train, the others test | domain: session; ``hand`` |
| ``market1501`` | ``bounding_box_train/``, ``bounding_box_test/``, ``query/`` | person | as the folders, with roles | domain: camera |

Nothing is copied but the pixels of CIFAR, which has no picture files: its table is an ``.npz`` file. Nothing is unpickled.
"""  # noqa: E501

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_bytes
from mettle.data.image_decoding import SUFFIXES, quote_name
from mettle.data.sources.text_table import read_table
from mettle.errors import DataError, nearest
from mettle.rng import permutation

Columns = dict[str, list[str]]
PARTS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class PublicSet:
    """What was read of a set: columns of text, one entry a sample; pictures by path below ``root``, or as an array."""

    root: Path
    columns: Columns
    images: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    shares_labels: bool = False  # whether all splits have the same labels

    def __len__(self) -> int:
        return len(self.columns["label"])


# --- what every layout needs ---


def _locate(folder: Path, wanted: str, below: Sequence[str] = ()) -> Path:
    """A file or a folder that a layout has, right in the folder or in one of the places below it."""
    for place in ("", *below):
        if (folder / place / wanted).exists():
            return folder / place / wanted
    also = f" (nor in {', '.join(below)})" if below else ""
    raise DataError(f"no {wanted} in {quote_name(folder)}{also}: give the folder that the archive unpacks to")


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The fields of every line that has any, parted by white space, with the number of the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"cannot read {quote_name(path)}: {' '.join(str(problem).split())}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, line.split()


def _read_pairs(path: Path, values: Sequence[str] | None = None) -> dict[str, str]:
    """A file with a key and a value in every line; the values may be limited to some."""
    found: dict[str, str] = {}
    for number, fields in _read_lines(path):
        if len(fields) != 2 or (values is not None and fields[1] not in values):
            wanted = "two fields" if values is None else f"two fields, the second one of {', '.join(values)}"
            raise DataError(f"{quote_name(path)} line {number}: {wanted} wanted, got {' '.join(fields)[:60]!r}")
        found[fields[0]] = fields[1]
    if not found:
        raise DataError(f"{quote_name(path)} is empty")
    return found


def _look_up(table: Mapping[str, str], key: str, path: Path) -> str:
    if key not in table:
        raise DataError(f"{quote_name(path)} says nothing of {key!r}, which another file of the set names")
    return table[key]


def _check_files(root: Path, paths: Sequence[str]) -> None:
    """Refuse a set some of whose pictures are not there."""
    missing = [path for path in paths if not (root / path).is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} pictures are not in {quote_name(root)}, first: {quote_name(missing[0])}; "
            "unpack the pictures there too"
        )


def _list_pictures(folder: Path) -> list[str]:
    """The names of the picture files in a folder, in order."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.name.lower().endswith(SUFFIXES))
    except OSError as problem:
        raise DataError(f"cannot list {quote_name(folder)}: {problem.strerror}") from None


# --- the layouts ---


def read_cub200(folder: Path) -> PublicSet:
    """CUB-200-2011 (Wah et al. 2011): as in metric learning, the first 100 species train and the others test."""
    root = _locate(folder, "images.txt", ["CUB_200_2011"]).parent
    files = _read_pairs(_locate(root, "images.txt"))
    classes = _read_pairs(_locate(root, "image_class_labels.txt"))
    names = _read_pairs(_locate(root, "classes.txt"))
    official = _read_pairs(_locate(root, "train_test_split.txt"), ("0", "1"))
    found: Columns = {"path": [], "label": [], "split": [], "official_split": []}
    for number, file in files.items():
        species = _look_up(classes, number, root / "image_class_labels.txt")
        found["path"].append(f"images/{file}")
        found["label"].append(_look_up(names, species, root / "classes.txt"))
        found["split"].append("train" if int(species) <= 100 else "test")
        is_train = _look_up(official, number, root / "train_test_split.txt") == "1"
        found["official_split"].append("train" if is_train else "test")
    return PublicSet(root, found)


def read_cars196(folder: Path) -> PublicSet:
    """Cars196 (Krause et al. 2013): as in metric learning, the first 98 models train and the others test."""
    if (folder / "cars_annos.mat").exists() or not (folder / "devkit").is_dir():
        path = _locate(folder, "cars_annos.mat", ["devkit"])
        rows, names = _read_mat(path, "annotations"), _read_class_names(path)
        entries = [(_field(row, "relative_im_path"), row, int(_field(row, "test")) == 0) for row in rows]
    else:
        names = _read_class_names(_locate(folder / "devkit", "cars_meta.mat"))
        train = _locate(folder / "devkit", "cars_train_annos.mat")
        test = _locate(folder / "devkit", "cars_test_annos_withlabels.mat", [".."])
        parts = (("cars_train", train, True), ("cars_test", test, False))
        entries = [
            (f"{part}/{_field(row, 'fname')}", row, is_train)
            for part, path, is_train in parts
            for row in _read_mat(path, "annotations")
        ]
    found: Columns = {"path": [], "label": [], "split": [], "official_split": []}
    for path_of, row, is_train in entries:
        model = int(_field(row, "class"))
        if not 1 <= model <= len(names):
            raise DataError(f"{path_of} is of model {model}, but there are names of {len(names)}")
        found["path"].append(str(path_of))
        found["label"].append(f"{model:03d} {names[model - 1]}")
        found["split"].append("train" if model <= 98 else "test")
        found["official_split"].append("train" if is_train else "test")
    return PublicSet(folder, found)


def _read_mat(path: Path, name: str) -> list[Any]:
    """The records of a structure array of a MATLAB file."""
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), squeeze_me=True, struct_as_record=True)
    except Exception as problem:  # whatever a reader of a foreign binary format raises
        raise DataError(f"cannot read {quote_name(path)}: {' '.join(str(problem).split())[:200]}") from None
    if name not in content:
        raise DataError(f"no {name!r} in {quote_name(path)}{nearest(name, [k for k in content if k[0] != '_'])}")
    return list(np.atleast_1d(content[name]))


def _read_class_names(path: Path) -> list[str]:
    return [str(name) for name in _read_mat(path, "class_names")]


def _field(row: Any, name: str) -> Any:
    """A field of a record, where it has such a one."""
    known = row.dtype.names or ()
    if name not in known:
        raise DataError(f"the annotations have no field {name!r}{nearest(name, known)}")
    value = row[name]
    return value.item() if isinstance(value, np.ndarray) else value


def read_sop(folder: Path) -> PublicSet:
    """Stanford Online Products (Oh Song et al. 2016), with its own split by product."""
    root = _locate(folder, "Ebay_train.txt", ["Stanford_Online_Products"]).parent
    found: Columns = {"path": [], "label": [], "split": [], "category": []}
    for split in ("train", "test"):
        path = _locate(root, f"Ebay_{split}.txt")
        for number, fields in _read_lines(path):
            if number == 1 and fields[0] == "image_id":
                continue
            if len(fields) != 4:
                raise DataError(
                    f"{quote_name(path)} line {number}: image_id, class_id, super_class_id and path are wanted, got "
                    f"{' '.join(fields)[:60]!r}"
                )
            found["path"].append(fields[3])
            found["label"].append(f"product {int(fields[1]):05d}")
            found["split"].append(split)
            found["category"].append(fields[3].partition("/")[0].removesuffix("_final"))
    return PublicSet(root, found)


def _read_cifar(folder: Path, below: str, files: Mapping[str, str], pickled: str, heads: Sequence[str]) -> PublicSet:
    """The binary version: records of one byte for each label and 3,072 of red, green and blue rows of 32 x 32."""
    for place in (folder, folder / below):
        if all((place / file).exists() for file in files):
            break
    else:
        if any((place / pickled).exists() for place in (folder, *(p for p in folder.glob("cifar-*-p*") if p.is_dir()))):
            raise DataError(
                f"{quote_name(folder)} is the Python version, which is made of pickles: those can run code and are not "
                "read. Fetch the binary version of the same page instead"
            )
        place = _locate(folder, next(iter(files)), [below]).parent
        missing = next(file for file in files if not (place / file).exists())
        raise DataError(f"no {missing} in {quote_name(place)}: give the folder that the archive unpacks to")
    size = len(heads) + 3072
    parts, splits = [], []
    for file, split in files.items():
        content = np.frombuffer((place / file).read_bytes(), np.uint8)
        if len(content) == 0 or len(content) % size:
            raise DataError(f"{quote_name(place / file)} has {len(content)} bytes, not records of {size}")
        parts.append(content.reshape(-1, size))
        splits += [split] * (len(content) // size)
    records = np.concatenate(parts)
    columns: Columns = {}
    for k, (column, names_file) in enumerate(zip(("label", "superclass"), reversed(heads), strict=False)):
        path = _locate(place, names_file)
        names = [" ".join(fields) for _, fields in _read_lines(path)]
        codes = records[:, len(heads) - 1 - k]
        if int(codes.max()) >= len(names):
            raise DataError(f"{quote_name(path)} has {len(names)} names, but there is a label {int(codes.max())}")
        columns[column] = [names[code] for code in codes.tolist()]
    images = np.ascontiguousarray(records[:, len(heads) :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return PublicSet(place, columns | {"split": splits}, images, shares_labels=True)


def read_cifar10(folder: Path) -> PublicSet:
    """CIFAR-10 (Krizhevsky 2009), the binary version."""
    files = {f"data_batch_{k}.bin": "train" for k in range(1, 6)} | {"test_batch.bin": "test"}
    return _read_cifar(folder, "cifar-10-batches-bin", files, "data_batch_1", ["batches.meta.txt"])


def read_cifar100(folder: Path) -> PublicSet:
    """CIFAR-100 (Krizhevsky 2009), the binary version: a coarse and a fine label in front of every picture."""
    heads = ["coarse_label_names.txt", "fine_label_names.txt"]
    return _read_cifar(folder, "cifar-100-binary", {"train.bin": "train", "test.bin": "test"}, "train", heads)


def read_celeba(folder: Path) -> PublicSet:
    """CelebA (Liu et al. 2015), aligned: who it is, and 40 attributes, one of which ``data.label`` may name."""
    people = _read_pairs(_locate(folder, "identity_CelebA.txt", ["Anno"]))
    parts = _read_pairs(_locate(folder, "list_eval_partition.txt", ["Eval"]), ("0", "1", "2"))
    pictures = _locate(folder, "img_align_celeba", ["Img"])
    path = _locate(folder, "list_attr_celeba.txt", ["Anno"])
    lines = _read_lines(path)
    next(lines, None)  # how many there are
    attributes = next(lines, (0, []))[1]
    if not attributes or set(attributes) & {"path", "label", "split"}:
        raise DataError(f"{quote_name(path)} line 2: names of attributes are wanted")
    found: Columns = {name: [] for name in ("path", "label", "split", *attributes)}
    for number, fields in lines:
        if len(fields) != len(attributes) + 1 or set(fields[1:]) - {"1", "-1"}:
            raise DataError(f"{quote_name(path)} line {number}: a file and {len(attributes)} times 1 or -1 are wanted")
        found["path"].append((pictures / fields[0]).relative_to(folder).as_posix())
        found["label"].append(f"person {int(_look_up(people, fields[0], folder / 'identity_CelebA.txt')):05d}")
        found["split"].append(PARTS[int(_look_up(parts, fields[0], folder / "list_eval_partition.txt"))])
        for name, value in zip(attributes, fields[1:], strict=True):
            found[name].append("1" if value == "1" else "0")
    return PublicSet(folder, found)


def read_waterbirds(folder: Path) -> PublicSet:
    """Waterbirds (Sagawa et al. 2020): the bird is the label, the place behind it what a model falls for."""
    table = read_table(_locate(folder, "metadata.csv"))
    columns = {name: [value.strip() for value in table.columns[table.require_column(name)]] for name in WATERBIRDS}
    for name, words in WATERBIRDS.items():
        for row, value in enumerate(columns[name]):
            if words and value not in words:
                raise table.error(row, name, f"{value!r} is none of {', '.join(words)}")
    found: Columns = {
        "path": columns["img_filename"],
        "label": [WATERBIRDS["y"][value] for value in columns["y"]],
        "split": [WATERBIRDS["split"][value] for value in columns["split"]],
        "place": [WATERBIRDS["place"][value] for value in columns["place"]],
        "species": [Path(file).parent.name for file in columns["img_filename"]],
    }
    return PublicSet(folder, found, shares_labels=True)


WATERBIRDS: Mapping[str, dict[str, str]] = {
    "img_filename": {},
    "y": {"0": "landbird", "1": "waterbird"},
    "split": {"0": "train", "1": "val", "2": "test"},
    "place": {"0": "land", "1": "water"},
}

TONGJI_SHOTS = 10  # pictures of a palm in a session
TONGJI_TRAIN = 300  # palms of 600, so that nobody's two hands are on both sides


def read_tongji(folder: Path) -> PublicSet:
    """Tongji contactless palmprints (Zhang et al. 2017): files 1 to 10 of a session are of palm 1, 11 to 20 of palm 2.

    Palms 2k - 1 and 2k are the two hands of one person, so the first half of the palms is the first half of the people.
    """
    root = _locate(folder, "session1", ["ROI", "Roi", "roi"]).parent
    found: Columns = {name: [] for name in ("path", "label", "split", "domain", "role", "hand")}
    for session in (1, 2):
        place = _locate(root, f"session{session}")
        for name in _list_pictures(place):
            stem = Path(name).stem
            if not stem.isdigit() or int(stem) == 0:
                raise DataError(f"{quote_name(place / name)} is not named by a number from 1 on")
            palm = (int(stem) - 1) // TONGJI_SHOTS + 1
            is_train = palm <= TONGJI_TRAIN
            found["path"].append(f"session{session}/{name}")
            found["label"].append(f"palm {palm:03d}")
            found["split"].append("train" if is_train else "test")
            found["domain"].append(f"session {session}")
            found["role"].append("" if is_train else ("gallery", "query")[session - 1])
            found["hand"].append(("first", "second")[(palm - 1) % 2])
    return PublicSet(root, found)


MARKET_NAME = re.compile(r"(-1|\d{4})_c(\d)s(\d)_\d+_\d+\.")
JUNK, NOBODY = "-1", "0000"  # boxes that the evaluation passes over, and those that show none of the people


def read_market1501(folder: Path) -> PublicSet:
    """Market-1501 (Zheng et al. 2015): queries and gallery of unseen people, junk boxes left out."""
    root = _locate(folder, "bounding_box_train", ["Market-1501-v15.09.15"]).parent
    found: Columns = {name: [] for name in ("path", "label", "split", "role", "domain", "sequence")}
    junk = 0
    for part, split, role in (
        ("bounding_box_train", "train", ""),
        ("query", "test", "query"),
        ("bounding_box_test", "test", "gallery"),
    ):
        place = _locate(root, part)
        for name in _list_pictures(place):
            parsed = MARKET_NAME.match(name)
            if parsed is None:
                raise DataError(
                    f"{quote_name(place / name)} is not named as 0002_c1s1_000451_03.jpg: person, camera, sequence, ..."
                )
            person, camera, sequence = parsed.groups()
            if person == JUNK:
                junk += 1
                continue
            found["path"].append(f"{part}/{name}")
            found["label"].append(f"person {person}")
            found["split"].append(split)
            found["role"].append("distractor" if person == NOBODY else role)
            found["domain"].append(f"camera {camera}")
            found["sequence"].append(f"sequence {sequence}")
    return PublicSet(root, found, notes=(f"{junk} junk boxes (-1) were left out",) if junk else ())


PUBLIC_SETS: Mapping[str, Callable[[Path], PublicSet]] = {
    "cub200": read_cub200,
    "cars196": read_cars196,
    "sop": read_sop,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "celeba": read_celeba,
    "waterbirds": read_waterbirds,
    "tongji": read_tongji,
    "market1501": read_market1501,
}


# --- the table ---


def import_public_set(name: str, folder: str | Path, output: str | Path, *, val: float = 0.0) -> PublicSet:
    """Write the table of a public set, and return what it holds.

    Args:
        name: one of `PUBLIC_SETS`.
        folder: what its archive unpacks to.
        output: a ``.csv`` file; an ``.npz`` file for CIFAR. Paths in it are relative to its folder where the pictures
            lie below that, else absolute.
        val: share of the training identities (of CIFAR's training pictures) that becomes the validation split. For sets
            without one: the papers choose on the test split, which nobody should.

    Raises:
        DataError: there is no such set, a file of its layout is missing or is not what it should be.
    """
    if name not in PUBLIC_SETS:
        raise DataError(f"no public set {name!r}{nearest(name, PUBLIC_SETS)}")
    folder, output = Path(folder).expanduser(), Path(output).expanduser()
    if not folder.is_dir():
        raise DataError(f"no folder {quote_name(folder)}: give the folder that the archive of {name} unpacks to")
    wanted = ".npz" if name.startswith("cifar") else ".csv"
    if output.suffix.lower() != wanted:
        why = (
            "has no picture files, so its table holds the pictures" if wanted == ".npz" else "becomes a table of files"
        )
        raise DataError(f"{name} {why}: -o FILE{wanted} is wanted, got {quote_name(output)}")
    if not output.parent.is_dir():
        raise DataError(f"no folder {quote_name(output.parent)} to write {output.name} into: make it first")
    found = PUBLIC_SETS[name](folder)
    if not len(found):
        raise DataError(f"no pictures of {name} in {quote_name(folder)}")
    found.columns["split"] = _hold_out(found, val, name)
    if found.images is None:
        _check_files(found.root, found.columns["path"])
        write_bytes(output, _as_csv(found, output))
    else:
        write_bytes(output, _as_npz(found))
    return found


def _hold_out(found: PublicSet, val: float, name: str) -> list[str]:
    """The split column with a share of the training part as validation."""
    split, labels = np.array(found.columns["split"]), np.array(found.columns["label"])
    if val == 0:
        return split.tolist()
    if not 0 < val < 1:
        raise DataError(f"val is a share between 0 and 1, got {val}")
    if "val" in split:
        raise DataError(f"{name} has a validation split of its own: leave --val out")
    train = np.flatnonzero(split == "train")
    whom = train if found.shares_labels else np.unique(labels[train])
    count = round(val * len(whom))
    if count < 2 or len(whom) - count < 2:
        raise DataError(f"val = {val:g} of {len(whom)} is too little or too much: two are needed on each side")
    chosen = whom[permutation(len(whom), 0, 0, stream=23)[:count]]
    split[chosen if found.shares_labels else train[np.isin(labels[train], chosen)]] = "val"
    return split.tolist()


def _as_csv(found: PublicSet, output: Path) -> bytes:
    """The table, its paths relative to the folder that it goes to where the pictures lie below that."""
    root, beside = found.root.resolve(), output.parent.resolve()
    prefix = root.relative_to(beside) if root.is_relative_to(beside) else root
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.columns)
    paths = [(prefix / path).as_posix() for path in found.columns["path"]]
    writer.writerows(zip(*(found.columns | {"path": paths}).values(), strict=True))
    return text.getvalue().encode()


def _as_npz(found: PublicSet) -> bytes:
    """Pictures and columns, with nothing pickled."""
    content = io.BytesIO()
    columns: dict[str, Any] = {name: np.array(values) for name, values in found.columns.items()}
    columns["images"] = found.images
    np.savez_compressed(content, **columns)
    return content.getvalue()
