"""Files from strangers: refused in one line, nothing executed, nothing swallowed whole."""

import json
import pickle
import resource
import struct
import zipfile

import numpy as np
import pytest

from mettle import Gallery
from mettle.atomic_files import sha256
from mettle.errors import MettleError, RunError
from mettle.train import load, open_run_folder
from processes import run_mettle
from small_runs import small_run


class Trap:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs"), steps=3)


@pytest.fixture
def run(trained, tmp_path):
    """A copy that may be spoilt."""
    import shutil

    return open_run_folder(shutil.copytree(trained.run.folder, tmp_path / "run"))


@pytest.fixture
def trap(tmp_path):
    canary = tmp_path / "executed"
    yield Trap(canary)
    assert not canary.exists(), "a pickle was executed"


def agree(run, content: bytes) -> None:
    """Weights whose hash the contract names: a stranger writes both files."""
    path = run.folder / "model.safetensors"
    path.write_bytes(content)
    contract = json.loads((run.folder / "contract.json").read_text())
    contract["weights"], contract["files"][path.name]["size"] = sha256(path), len(content)
    (run.folder / "contract.json").write_text(json.dumps(contract))


def test_s1_a_pickle_in_place_of_weights_is_never_loaded(run, trap):
    agree(run, pickle.dumps(trap))
    with pytest.raises(RunError, match="holds no tensors"):
        open_run_folder(run.folder).model()


def test_s1_a_torch_archive_in_place_of_weights_is_never_loaded(run, trap):
    path = run.folder / "model.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(trap))
    agree(run, path.read_bytes())
    with pytest.raises(RunError, match="holds no tensors"):
        open_run_folder(run.folder).model()


@pytest.mark.parametrize("name", ["run.json", "contract.json", "recipe.toml"])
def test_s1_a_pickle_in_place_of_any_other_file_is_never_loaded(run, trap, name):
    (run.folder / name).write_bytes(pickle.dumps(trap))
    with pytest.raises(MettleError):
        open_run_folder(run.folder).model()


def test_s1_pickled_embeddings_are_never_loaded(tmp_path, trap):
    gallery = tmp_path / "g"
    Gallery.open(gallery, dim=4).close()
    np.save(tmp_path / "x.npy", np.array([trap], dtype=object), allow_pickle=True)
    (tmp_path / "y.npy").write_bytes(pickle.dumps(trap))
    for name in ("x.npy", "y.npy"):
        done = run_mettle("gallery", "enrol", gallery, "a", "--embeddings", tmp_path / name)
        assert done.returncode == 2
        assert done.stderr.startswith("mettle: ") and done.stderr.count("\n") == 1


def test_s2_a_weights_file_larger_than_its_model_is_refused_before_it_is_read(run):
    path = run.folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it would take an hour
    with pytest.raises(RunError, match="another file|not the file"):
        open_run_folder(run.folder).model()


@pytest.mark.parametrize("length", [0, 7, 1 << 40, 2**64 - 1])
def test_s2_a_header_that_lies_about_its_length_is_refused(run, length):
    agree(run, struct.pack("<Q", length) + b"{}" * 40)
    with pytest.raises(RunError, match="holds no tensors"):
        open_run_folder(run.folder).model()


@pytest.mark.parametrize(
    "model",
    [
        {"dim": 10**12},
        {"width": 10**9},
        {"depth": 10**9},
        {"backbone": "os.system"},
        {"unknown": 1},
        {"dim": "many"},
        {"pool": ["average"]},
    ],
)
def test_s2_a_contract_that_describes_no_model_is_refused(run, model):
    contract = json.loads((run.folder / "contract.json").read_text())
    contract["model"] |= model
    (run.folder / "contract.json").write_text(json.dumps(contract))
    with pytest.raises(RunError):
        open_run_folder(run.folder).model()


@pytest.mark.parametrize("text", ["[1]", "{", "null", "[" * 100_000, '{"format": "1"}', b"\xff\xfe\x00\xd8"])
def test_s4_odd_json_is_refused(run, text):
    content = text if isinstance(text, bytes) else text.encode()
    (run.folder / "run.json").write_bytes(content)
    with pytest.raises(RunError):
        open_run_folder(run.folder)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "[data]\nsource = 'x'\nsource = 'y'\n",
        "!!python/object/apply:os.system ['true']",
        "a: &a [*a, *a]",
        "x = '" + "y" * (4 << 20) + "'",
    ],
    ids=["nested", "twice", "yaml tag", "yaml alias", "long"],
)
def test_s4_odd_recipes_are_refused(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(MettleError) as told:
        load(path)
    assert len(str(told.value)) < 2000


@pytest.mark.parametrize("name", ["../outside.npy", "/etc/outside.npy", "images.npy/../../x.npy"])
def test_s3_names_in_an_archive_are_never_paths(tmp_path, name):
    from mettle.data import read

    path = tmp_path / "data" / "set.npz"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"\x93NUMPY")
    with pytest.raises(MettleError):
        read(path)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_s3_an_archive_that_inflates_beyond_reason_is_refused(tmp_path):
    from mettle.data import read

    path = tmp_path / "bomb.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (40000000000,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("images.npy", "w") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(MettleError):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"width": 4096, "depth": 5}},
        {"model": {"dim": 65536, "pool": "flatten"}, "input": {"shape": [3, 2048, 2048]}},
        {"input": {"shape": [3, 1 << 20, 1 << 20]}},
    ],
    ids=["wide", "long embeddings", "large inputs"],
)
def test_a_small_contract_that_describes_a_large_model_takes_no_memory(run, change):
    """A contract of 1 kB once took 9 GB before the weights, which do not fit, were looked at."""
    contract = json.loads((run.folder / "contract.json").read_text())
    contract = contract | {name: contract[name] | entries for name, entries in change.items()}
    (run.folder / "contract.json").write_text(json.dumps(contract))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match="describes no model of mettle: .*(it takes|more than)"):
        open_run_folder(run.folder).model()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # in units of 1024 bytes


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"model.safetensors": 5}},
        {"input": None},
        {"input": {"shape": 5}},
        {"model": [1]},
        {"dim": "x"},
    ],
)
def test_a_contract_of_another_form_is_refused(run, change):
    contract = json.loads((run.folder / "contract.json").read_text())
    (run.folder / "contract.json").write_text(json.dumps(contract | change))
    with pytest.raises(RunError, match="contract.json is damaged"):
        open_run_folder(run.folder).model()
    with pytest.raises(RunError, match="contract.json is damaged"):
        open_run_folder(run.folder).preprocess  # noqa: B018
