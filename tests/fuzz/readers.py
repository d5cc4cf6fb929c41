"""Every reader of files, with files that it reads: what the fuzzer starts from."""

import gzip
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

from mettle.atomic_files import sha256
from mettle.data import Pairs, read
from mettle.data.image_decoding import decode_image, read_image_header
from mettle.evaluate import read_embeddings
from mettle.evaluate.protocol import Protocol, read_trials
from mettle.model.onnx_graph import has_external_data
from mettle.model.weights import load_any_weights, load_state_dict, read_state_dict
from mettle.service.audit_log import AuditLog, entries_about, verify_audit_log
from mettle.service.auth import Keys, create_key
from mettle.train import load, open_run_folder
from mettle.train.callbacks import read_log
from mettle.train.checkpoint import read_checkpoint
from mettle.train.run_folder import TrainingIdentities
from mettle.train.search import read_trials as read_search
from tests.data import corpus
from tests.fuzz.engine import Change, Target

N = 12
RUN_FILES = ("run.json", "contract.json", "recipe.toml", "metrics.json", "trained.safetensors", "model.safetensors")
LABELS = [f"p{i // 2}" for i in range(N)]
VECTORS = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)


def build_targets(folder: Path, run: Path) -> dict[str, Target]:
    """All readers; ``run`` is the folder of a finished run, which is copied."""
    pictures = {name: one.data for name, one in corpus.good().items()}
    labels = _file(folder / "labels.npy", _npy(np.arange(N)))
    rows = read(_file(folder / "rows.csv", _csv_files()[0]))
    targets = {
        "NPZ data": Target(_read_data, _npz_files(), ".npz", _change_member),
        "NPZ embeddings": Target(read_embeddings, _npz_files(), ".npz", _change_member),
        "NPY embeddings": Target(partial(_read_npy, labels), [_npy(VECTORS)], ".npy"),
        "CSV data": Target(_read_data, _csv_files(), ".csv"),
        "CSV embeddings": Target(read_embeddings, _csv_files(), ".csv"),
        "CSV.gz": Target(
            _read_data, [gzip.compress(one, mtime=0) for one in _csv_files()], ".csv.gz", _change_unpacked
        ),
        "TSV": Target(_read_data, [one.replace(b",", b"\t") for one in _csv_files()], ".tsv"),
        "Parquet data": Target(_read_data, _parquet_files(), ".parquet"),
        "Parquet embeddings": Target(read_embeddings, _parquet_files(), ".parquet"),
        "pair table": Target(partial(_read_pairs, rows), [_pairs()], ".csv"),
        "images": Target(_read_image, list(pictures.values()), ".img"),
        "image headers": Target(_read_header, list(pictures.values()), ".img"),
        "trials": Target(read_trials, [b"0 1 1\n2 3 0\n", b"a,b,target\n1,2,1\n5,6,0\n# note\n"], ".txt"),
        "plan": Target(Protocol.read, [_plan()], ".json"),
        "safetensors": Target(load_state_dict, [_tensors()], ".safetensors", _change_header),
        "weights": Target(read_state_dict, [_tensors()], ".safetensors", _change_header),
        "weights of torch": Target(read_state_dict, [_torch_file()], ".pt", _change_member),
        "weights of a module": Target(_load_module, [_tensors()], ".safetensors", _change_header),
        "ONNX messages": Target(lambda path: has_external_data(path.read_bytes()), _onnx_files(), ".onnx"),
        "recipe": Target(load, [(run / "recipe.toml").read_bytes(), _recipe()], ".toml"),
        "log of training": Target(read_log, [(run / "log.jsonl").read_bytes()], ".jsonl"),
        "record of a search": _inside(folder / "search", "trials.jsonl", [_search()], read_search),
        "keys of the service": _keys(folder / "keys"),
    }
    for name in (
        "run.json",
        "contract.json",
        "recipe.toml",
        "metrics.json",
        "trained.safetensors",
        "model.safetensors",
    ):
        copy = shutil.copytree(run, folder / f"run-{name}")
        targets[f"run folder: {name}"] = _inside(copy, name, [(run / name).read_bytes()], _read_run)
    place = next((run / "checkpoints").iterdir())
    for name in ("manifest.json", "state.json", "state.safetensors"):
        copy = shutil.copytree(place, folder / f"checkpoint-{name}")
        targets[f"checkpoint: {name}"] = _inside(copy, name, [(place / name).read_bytes()], _read_checkpoint)
    targets |= _audit_log(folder / "log")
    return targets


def _inside(folder: Path, name: str, seeds: list[bytes], reader: Callable[[Path], Any]) -> Target:
    """A reader of a folder of which one file is changed."""
    folder.mkdir(exist_ok=True)

    def read_folder(path: Path) -> None:
        (folder / name).write_bytes(path.read_bytes())
        reader(folder)

    return Target(read_folder, seeds, Path(name).suffix)


def _read_data(path: Path) -> None:
    samples = read(path)
    samples.read(np.arange(min(len(samples), 20)))


def _read_npy(labels: Path, path: Path) -> None:
    read_embeddings(path, labels)


def _read_pairs(samples: Any, path: Path) -> None:
    Pairs.read(path, samples)


def _read_image(path: Path) -> None:
    decode_image(path, size=16)
    decode_image(path.read_bytes(), channels=1)


def _read_header(path: Path) -> None:
    read_image_header(path)


def _load_module(path: Path) -> None:
    import torch

    load_any_weights(torch.nn.Linear(3, 2), path)


def _read_run(folder: Path) -> None:
    run = open_run_folder(folder)
    run.preprocess  # noqa: B018
    run.metrics()
    run.training_identities()
    TrainingIdentities.load(folder)
    run.model()


def _read_checkpoint(place: Path) -> None:
    """With hashes that are right, as whoever changes a file on purpose writes them."""
    manifest = (place / "manifest.json").read_bytes()
    hashes = {name: sha256(place / name) for name in ("state.safetensors", "state.json")}
    if place.name != "checkpoint-manifest.json":
        (place / "manifest.json").write_text(json.dumps(hashes))
    read_checkpoint(place)
    (place / "manifest.json").write_bytes(manifest)


def _change_member(content: bytes, change: Change, rng: random.Random) -> bytes:
    """One member of an archive, most often its first bytes, with a checksum that is right."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(found, "w") as new:
        chosen = rng.choice(old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == chosen:
                data = change(data[:128]) + data[128:] if rng.random() < 0.7 else change(data)
            new.writestr(name, data)
    return found.getvalue()


def _change_unpacked(content: bytes, change: Change, rng: random.Random) -> bytes:
    return gzip.compress(change(gzip.decompress(content)), mtime=0)


def _change_header(content: bytes, change: Change, rng: random.Random) -> bytes:
    """The header of a file of tensors, with a length that is right."""
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npz_files() -> list[bytes]:
    at, pixels = np.arange(N), np.random.default_rng(0).integers(0, 255, (N, 4, 4, 1)).astype(np.uint8)
    vectors = {"embeddings": VECTORS, "label": np.asarray(LABELS), "split": at % 3, "camera": at % 2, "ids": at}
    images = {"images": pixels, "label": at // 2, "label_names": np.asarray(list("abcdef")), "role": at % 3}
    found = []
    for save, table in ((np.savez, vectors), (np.savez_compressed, vectors), (np.savez, images)):
        buffer = io.BytesIO()
        save(buffer, **table)
        found.append(buffer.getvalue())
    return found


def _csv_files() -> list[bytes]:
    rows = [f"{i},{LABELS[i]},{i % 2},{','.join(f'{v:.3f}' for v in VECTORS[i])}" for i in range(N)]
    quoted = [f'"{i}";"{LABELS[i]}";"{"train" if i < 6 else "test"}";"1.5";{VECTORS[i, 0]:.3f};2' for i in range(N)]
    first = "\n".join(["id,label,camera,e0,e1,e2", *rows]).encode()
    second = "\r\n".join(["id;label;split;note;e0;e1", *quoted]).encode()
    return [first, b"\xef\xbb\xbf" + second]


def _packed(files: list[bytes]) -> list[bytes]:
    return [gzip.compress(one, mtime=0) for one in files]


def _parquet_files() -> list[bytes]:
    """One of the usual kind, and one for each kind of column that pyarrow knows."""
    import pyarrow as arrow
    from pyarrow import parquet

    usual = {"label": LABELS, **{f"e{k}": VECTORS[:, k] for k in range(3)}, "split": np.arange(N) % 3}
    moments = np.arange(N).astype("datetime64[s]")
    texts = arrow.array(LABELS)
    odd: dict[str, Any] = {
        "lists": arrow.array([list(map(float, row)) for row in VECTORS]),
        "fixed": arrow.FixedSizeListArray.from_arrays(arrow.array(VECTORS.ravel()), 3),
        "lists of texts": arrow.array([["a", "b"]] * N),
        "lists of lists": arrow.array([[[1.0], [2.0]]] * N),
        "structures": arrow.array([{"a": 1, "b": "c"}] * N),
        "maps": arrow.array([[("a", 1)]] * N, arrow.map_(arrow.string(), arrow.int64())),
        "bytes": arrow.array([b"\xff\xfe"] * N),
        "moments": arrow.array(moments),
        "days": arrow.array(moments.astype("datetime64[D]")),
        "times": arrow.array([1] * N, arrow.time64("us")),
        "spans": arrow.array([1] * N, arrow.duration("s")),
        "decimals": arrow.array([1] * N).cast(arrow.decimal128(24, 2)),
        "halves": arrow.array(VECTORS[:, 0].astype(np.float16)),
        "codes": texts.dictionary_encode(),
        "nothing": arrow.nulls(N),
        "some missing": arrow.array([None if i % 3 else i for i in range(N)]),
        "some lists missing": arrow.array([None if i % 3 else [1.0, 2.0] for i in range(N)]),
        "true": arrow.array([i % 2 == 0 for i in range(N)]),
        "large": arrow.array(np.full(N, 2**64 - 1, np.uint64)),
    }
    tables = [usual, *({**usual, "embedding": column} for column in odd.values())]
    tables += [{**usual, "label": column} for column in odd.values()]
    found = []
    for k, table in enumerate(tables):
        buffer = io.BytesIO()
        parquet.write_table(arrow.table(table), buffer, compression="snappy" if k % 2 else "none")
        found.append(buffer.getvalue())
    return found


def _pairs() -> bytes:
    return b"first,second,target,weight\n0,1,1,1\n2,3,0,0.5\n4,5,0.25,2\n"


def _plan() -> bytes:
    plan = {"format": 1, "name": "p", "kind": "verification", "probes": [1, 2, 3], "gallery": [4, 5], "training": [9]}
    return json.dumps(plan | {"trials": [[1, 2, 1], [1, 3, 0]]}).encode()


def _tensors() -> bytes:
    return save_tensors({"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)})


def _torch_file() -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({"state_dict": {"weight": torch.ones(2, 3)}}, buffer)
    return buffer.getvalue()


def _onnx_files() -> list[bytes]:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy")
    constant = helper.make_tensor("c", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    graph = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"])], "g", [x], [y], [constant])
    return [helper.make_model(graph).SerializeToString()]


def _recipe() -> bytes:
    return b"""
seed = 3
[data]
source = "glyphs"
size = 24
[batch]
classes = 8
samples = 4
augment = "crop"
[model]
backbone = "convnet"
dim = 32
[loss]
kind = "Triplet"
margin = 0.2
difficulty = {kind = "Threshold", margin = 0.1}
[optim]
lr = 1e-3
[train]
steps = 100
[evaluate]
ks = [1, 5]
fars = [0.01]
"""


def _search() -> bytes:
    lines = [
        {
            "number": k,
            "state": "finished",
            "values": {"loss.scale": 2.0},
            "metric": 0.5,
            "folds": [{"metric": 0.5, "step": 10, "steps": [[10, 0.5]]}],
        }
        for k in (1, 2)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _keys(folder: Path) -> Target:
    folder.mkdir()
    create_key(folder / "keys.json", "front desk", ["verify", "identify"], days=5)
    token = create_key(folder / "keys.json", "office", ["enrol"], tenant="acme")

    def read_keys(path: Path) -> None:
        path.chmod(0o600)
        Keys(path).find(token)

    return Target(read_keys, [(folder / "keys.json").read_bytes()], ".json")


def _audit_log(folder: Path) -> dict[str, Target]:
    folder.mkdir()
    log = AuditLog(folder / "audit.jsonl")
    for k in range(4):
        log.append("desk", "verify", "match", subject=f"p{k}")
    log.close()

    def check(folder: Path) -> None:
        verify_audit_log(folder / "audit.jsonl")
        list(entries_about(folder / "audit.jsonl", "p1"))

    def go_on(folder: Path) -> None:
        AuditLog(folder / "audit.jsonl").close()

    found = {}
    for title, reader in (("check", check), ("start", go_on)):
        for name in ("audit.jsonl", "audit.jsonl.checkpoint", "audit.jsonl.key"):
            copy = shutil.copytree(folder, folder.parent / f"{title}-{name}")
            found[f"audit log, {title}: {name}"] = _inside(copy, name, [(folder / name).read_bytes()], reader)
    return found
