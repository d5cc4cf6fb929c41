"""An index on disk: whatever is off is seen, nothing of it is believed or run."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from mettle.gallery.index import persistence
from mettle.gallery.index.approximate import ApproximateIndex, SearchParams
from mettle.gallery.index.exact import ExactIndex
from mettle.gallery.index.persistence import IndexManifest, IndexMismatch
from mettle.gallery.index.selection import IndexSpec, build_index

KINDS = ["exact", "scan", "compressed", "ivf", "hnsw"]
MUTATIONS = 300


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def people(count=700, dim=16, seed=0):
    return unit(np.random.default_rng(seed).standard_normal((count, dim)))


def make(kind, vectors, numbers=None):
    numbers = np.arange(len(vectors)) * 5 + 2 if numbers is None else numbers
    if kind == "exact":
        index = ExactIndex(vectors.shape[1])
        index.add(numbers, vectors)
        return index
    return ApproximateIndex.build(kind, numbers, vectors, SearchParams(64, 64))


def facts(index, **changed):
    known = IndexManifest(
        sequence=41, count=len(index), dim=index.dim, metric="cosine", model="ab" * 32, fusion="best", kind=index.kind
    )
    return replace(known, **changed)


def saved(folder, kind="scan", seed=0, **changed):
    index = make(kind, people(seed=seed), np.arange(700) * 5 + 2 + seed)
    persistence.save_index(folder, index, facts(index, **changed))
    return index


@pytest.mark.parametrize("kind", KINDS)
class TestKept:
    def test_what_was_kept_comes_back(self, tmp_path, kind):
        x = people()
        index = make(kind, x)
        measured = build_index(x, np.arange(700), IndexSpec(kind=kind)).measured
        persistence.save_index(tmp_path / "index", index, facts(index, measured=measured))
        loaded = persistence.load_index(tmp_path / "index", facts(index, measured=None))
        assert loaded.sequence == 41 and loaded.measured == measured
        assert loaded.index.kind == kind and len(loaded.index) == 700
        for k in (1, 6):
            np.testing.assert_array_equal(loaded.index.search(x[:40], k)[1], index.search(x[:40], k)[1])
        loaded.index.remove(np.asarray([2]))
        loaded.index.add(np.asarray([1]), x[:1])
        assert loaded.index.search(x[:1], 1)[1][0, 0] == 1

    def test_removed_templates_are_not_on_disk(self, tmp_path, kind):
        index = make(kind, people())
        index.remove(np.arange(300) * 5 + 2)
        persistence.save_index(tmp_path, index, facts(index))
        loaded = persistence.load_index(tmp_path, facts(index)).index
        assert len(loaded) == 400 and loaded.rows.count == 400
        gone, kept = people()[:300], b"".join(file.read_bytes() for file in tmp_path.iterdir())
        dtype = loaded.rows.vectors.dtype
        assert all(vector.astype(dtype).tobytes() not in kept for vector in gone)
        assert people()[300].astype(dtype).tobytes() in kept
        if kind != "exact":
            assert len(loaded.engine) == 400
        assert len(index) == 400 and index.rows.count >= 400  # the one in use is not touched

    def test_empty(self, tmp_path, kind):
        index = make(kind, people()[:0])
        persistence.save_index(tmp_path, index, facts(index))
        loaded = persistence.load_index(tmp_path, facts(index)).index
        assert len(loaded) == 0
        loaded.add(np.arange(3), people()[:3])
        assert loaded.search(people()[:3], 1)[1][:, 0].tolist() == [0, 1, 2]


def damage(folder: Path, other: Path, rng: np.random.Generator, number: int) -> str:
    """One way or another to spoil an index on disk; what was done, in words."""
    files = sorted(folder.iterdir())
    file = files[int(rng.integers(len(files)))]
    content = bytearray(file.read_bytes())
    way = number % 10
    if way == 0:
        cut = int(rng.integers(len(content)))
        file.write_bytes(content[:cut])
        return f"{file.name} cut to {cut} bytes"
    if way in (1, 2, 3):
        at = int(rng.integers(len(content)))
        content[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        return f"{file.name}: a bit of byte {at} flipped"
    if way == 4:
        file.write_bytes(content + rng.bytes(int(rng.integers(1, 100))))
        return f"{file.name} lengthened"
    if way == 5:
        file.unlink()
        return f"{file.name} gone"
    if way == 6:
        twin = next(f for f in sorted(other.iterdir()) if f.name.split("-")[0] == file.name.split("-")[0])
        shutil.copy(twin, file)
        return f"{file.name} replaced by that of another gallery"
    if way == 7:
        second = files[(files.index(file) + 1) % len(files)]
        file.write_bytes(second.read_bytes())
        second.write_bytes(bytes(content))
        return f"{file.name} and {second.name} swapped"
    if way == 8:
        size = int(rng.integers(1, 65))
        at = int(rng.integers(max(1, len(content) - size)))
        content[at : at + size] = bytes(255 - b for b in content[at : at + size])
        file.write_bytes(content)
        return f"{file.name}: {size} bytes from {at} on overwritten"
    garbage = [rng.bytes(len(content)), bytes(len(content)), pickle.dumps([1, 2]), b"IxFI" + rng.bytes(200), b"{}"]
    file.write_bytes(garbage[number // 10 % len(garbage)])
    return f"{file.name}: garbage"


def detected(folder, index):
    try:
        persistence.load_index(folder, facts(index))
    except IndexMismatch:
        return True
    return False


@pytest.mark.parametrize("kind", ["exact", "scan", "hnsw"])
def test_g4_every_mutation_is_detected(tmp_path, kind):
    index = saved(tmp_path / "good", kind)
    saved(tmp_path / "other", kind, seed=1, sequence=40)
    rng = np.random.default_rng(0)
    for number in range(MUTATIONS):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        done = damage(tmp_path / "bad", tmp_path / "other", rng, number)
        assert detected(tmp_path / "bad", index), f"mutation {number} was not seen: {done}"
    assert len(persistence.load_index(tmp_path / "good", facts(index)).index) == 700


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dim": 17}, "dim"),
        ({"metric": "euclidean"}, "metric"),
        ({"model": "cd" * 32}, "model"),
        ({"model": None}, "model"),
        ({"fusion": "mean"}, "fusion"),
        ({"storage": "another"}, "storage"),
        ({"count": 699}, "699"),
        ({"sequence": 40}, "newer"),
    ],
)
def test_g4_of_something_else(tmp_path, changed, said):
    index = saved(tmp_path)
    with pytest.raises(IndexMismatch, match=said):
        persistence.load_index(tmp_path, facts(index, **changed))


def test_an_older_view_says_how_old_it_is(tmp_path):
    """The storage then tells what happened since; -1 stands for a storage that is not asked."""
    index = saved(tmp_path)
    assert persistence.load_index(tmp_path, facts(index, sequence=50, count=9)).sequence == 41
    assert persistence.load_index(tmp_path, facts(index, sequence=-1, count=0, kind="exact")).sequence == 41


@pytest.mark.parametrize(
    "edit",
    [
        {"sequence": 40},
        {"count": 699},
        {"kind": "exact"},
        {"kind": "hnsw"},
        {"model": None},
        {"dim": 8},
        {"sequence": "41"},
    ],
)
def test_g4_an_edited_manifest_without_its_checksum(tmp_path, edit):
    index = saved(tmp_path)
    path = tmp_path / persistence.MANIFEST
    content = json.loads(path.read_text())
    content["facts"] |= edit
    path.write_text(json.dumps(content))
    with pytest.raises(IndexMismatch, match="checksum"):
        persistence.load_index(tmp_path, facts(index, **({"model": None} if "model" in edit else {})))


def forged(folder, change):
    """A manifest that lies and carries the right checksum of its lies."""
    path = folder / persistence.MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    path.write_text(json.dumps(content | {"sha256": persistence._file_digest(content)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["facts"].update(count=699),
        lambda c: c["facts"].update(kind="exact_"),
        lambda c: c["facts"].update(kind="compressed"),
        lambda c: c["facts"].pop("sequence"),
        lambda c: c["facts"].update(measured={"recall_at": {}}),
        lambda c: c.update(effort=None),
        lambda c: c.update(effort={"exec": 1}),
        lambda c: c.update(files={}),
        lambda c: c["files"].pop("engine"),
        lambda c: c["files"]["vectors"].update(dtype="object"),
        lambda c: c["files"]["vectors"].update(dtype="float64"),
        lambda c: c["files"]["vectors"].update(shape=[16, 700]),
        lambda c: c["files"]["vectors"].update(shape=[10**9, 10**9]),
        lambda c: c["files"]["vectors"].update(bytes=-1),
        lambda c: c["files"]["vectors"].update(bytes=10**15),
        lambda c: c["files"]["engine"].update(name="../engine.bin"),
        lambda c: c["files"]["engine"].update(name="/etc/passwd"),
        lambda c: c["files"]["engine"].update(name=c["files"]["numbers"]["name"]),
        lambda c: c["files"].update(engine=c["files"]["vectors"] | {"name": c["files"]["engine"]["name"]}),
        lambda c: c.update(format=2),
    ],
)
def test_g4_a_manifest_that_lies_gives_stale_and_nothing_else(tmp_path, change):
    index = saved(tmp_path)
    forged(tmp_path, change)
    with pytest.raises(IndexMismatch):
        persistence.load_index(tmp_path, facts(index))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"sha256": 1}', b" " * (2 << 20)]
)
def test_g4_what_is_no_manifest(tmp_path, content):
    index = saved(tmp_path)
    (tmp_path / persistence.MANIFEST).write_bytes(content)
    with pytest.raises(IndexMismatch):
        persistence.load_index(tmp_path, facts(index))


def test_g4_a_faiss_index_of_another_size_under_the_right_checksum(tmp_path):
    """Even a manifest in order does not make Faiss's file belong to these rows."""
    index = saved(tmp_path)
    strange = faiss.serialize_index(faiss.IndexFlatIP(16))
    entry = persistence._write_array(tmp_path, "engine", strange)
    forged(tmp_path, lambda c: c["files"].update(engine=entry))
    with pytest.raises(IndexMismatch, match="belong together"):
        persistence.load_index(tmp_path, facts(index))


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_s1_a_pickle_in_place_of_any_file_is_never_run(tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    for name in ("numbers", "vectors", "engine", "manifest"):
        index = saved(tmp_path / "index")
        next((tmp_path / "index").glob(f"{name}*")).write_bytes(payload)
        with pytest.raises(IndexMismatch):
            persistence.load_index(tmp_path / "index", facts(index))
        entry = persistence._write_array(tmp_path / "index", "engine", np.frombuffer(payload, np.uint8))
        saved(tmp_path / "forged")
        shutil.copy(tmp_path / "index" / entry["name"], tmp_path / "forged")
        forged(tmp_path / "forged", lambda c, e=entry: c["files"].update(engine=e))
        with pytest.raises(IndexMismatch):
            persistence.load_index(tmp_path / "forged", facts(index))
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists()  # the payload would have worked


def test_absent(tmp_path):
    index = make("exact", people())
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(IndexMismatch, match="no manifest"):
            persistence.load_index(folder, facts(index))


def test_a_folder_where_a_file_should_be(tmp_path):
    index = saved(tmp_path)
    engine = next(tmp_path.glob("engine-*"))
    engine.unlink()
    engine.mkdir()
    with pytest.raises(IndexMismatch):
        persistence.load_index(tmp_path, facts(index))


def test_g5_leftovers_are_swept_and_strangers_left_alone(tmp_path):
    saved(tmp_path)
    (tmp_path / "vectors-1.bin.mettle-tmp-7").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    old = {file.name for file in tmp_path.glob("*.bin")}
    index = saved(tmp_path, seed=3, sequence=42)
    names = {file.name for file in tmp_path.iterdir()}
    assert "notes.txt" in names and not any(".mettle-tmp-" in name for name in names)
    assert len([n for n in names if n.endswith(".bin")]) == 3
    assert not {name for name in old if name.startswith(("vectors", "engine"))} & names
    assert persistence.load_index(tmp_path, facts(index, sequence=42)).sequence == 42


def test_g3_a_full_disk_leaves_the_former_view(tmp_path):
    """Files may not grow beyond some bytes, in a process of its own: the write fails as on a full disk."""
    index = saved(tmp_path)
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_persistence as t
from mettle.errors import GalleryUnavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
index = t.make("scan", t.people(seed=9))
for limit in (10, 5000, 6000, 44000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        t.persistence.save_index({str(tmp_path)!r}, index, t.facts(index, sequence=99))
    except GalleryUnavailable as error:
        assert "\\n" not in str(error)
    else:
        raise SystemExit(f"no error at {{limit}}")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert persistence.load_index(tmp_path, facts(index)).sequence == 41
    assert not list(tmp_path.glob("*.mettle-tmp-*"))


def test_g1_killed_while_writing_leaves_the_former_view_or_the_new(tmp_path):
    index = saved(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_persistence as t
index = t.make("exact", t.people())
print("ready", flush=True)
sequence = 42
while True:
    t.persistence.save_index({str(tmp_path)!r}, index, t.facts(index, sequence=sequence))
    print(sequence, flush=True)
    sequence += 1
"""
    rng, reached = np.random.default_rng(0), 0
    for _ in range(6):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "ready\n"
            for _ in range(int(rng.integers(1, 4))):
                reached = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
        loaded = persistence.load_index(tmp_path, facts(index, sequence=10**6))
        assert loaded.sequence >= reached and len(loaded.index) == 700


def test_the_limit_of_faiss_is_put_back(tmp_path):
    before = faiss.get_deserialization_vector_byte_limit()
    index = saved(tmp_path)
    persistence.load_index(tmp_path, facts(index))
    assert faiss.get_deserialization_vector_byte_limit() == before


def test_a_strange_index_cannot_be_kept(tmp_path):
    class Other:
        def compact(self):
            return self

    with pytest.raises(persistence.GalleryError, match="Other"):
        persistence.save_index(tmp_path, Other(), facts(make("exact", people())))
