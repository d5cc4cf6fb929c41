"""Moving a gallery between kinds of storage: everything or nothing, with proof."""

from dataclasses import replace

import numpy as np
import pytest
from storage_fixtures import FileShelf, ServerShelf, units
from test_storage import held

from mettle.errors import GalleryError
from mettle.gallery.binding import Binding
from mettle.gallery.storage.transfer import MoveResult, copy_storage

BOUND = Binding(16, "ab" * 32, '{"size": 64}', "mean", {"0.001": {"threshold": 0.5}})


@pytest.fixture(params=["sqlite to postgresql", "postgresql to sqlite", "sqlite to sqlite"])
def shelves(request, folder, postgres):
    kinds = {"sqlite": lambda name: FileShelf(folder / name), "postgresql": lambda name: ServerShelf(postgres)}
    source, target = request.param.split(" to ")
    return kinds[source]("source"), kinds[target]("target")


@pytest.fixture
def storages(shelves):
    source, target = shelves[0].create(BOUND), shelves[1].create(BOUND)
    for turn in range(30):
        source.enrol(f"pérson {turn}\n%s", units(turn, 1 + turn % 3, 16), request=f"r{turn}")
    for turn in range(0, 30, 4):
        source.delete(f"pérson {turn}\n%s")
    yield source, target
    source.close()
    target.close()


def people(storage) -> dict[str, list[bytes]]:
    return {name: sorted(rows.values()) for name, rows in held(storage).items()}


def is_empty(storage) -> bool:
    size = storage.size()
    return (size.identities, size.templates, storage.sequence()) == (0, 0, 0) and not held(storage)


def test_everything_comes_through(storages, shelves):
    source, target = storages
    moved = copy_storage(source, target)
    assert isinstance(moved, MoveResult) and moved.digest == source.digest() == target.digest()
    assert (moved.identities, moved.templates) == (source.size().identities, source.size().templates)
    assert people(source) == people(target) and target.check() == []
    assert str(moved.templates) in str(moved) and target.sequence() == 1
    target.close()
    reopened = shelves[1].open()
    assert people(reopened) == people(source)
    new = reopened.enrol("new", units(99, 1, 16))
    assert new.sequence == 2 and new.numbers[0] > max(n for rows in held(source).values() for n in range(len(rows)))
    assert new.numbers[0] not in {n for name, rows in held(reopened).items() if name != "new" for n in rows}
    reopened.close()


def test_an_empty_gallery_moves_too(shelves):
    source, target = shelves[0].create(BOUND), shelves[1].create(BOUND)
    assert copy_storage(source, target).templates == 0
    assert target.size().templates == 0
    source.close()
    target.close()


def test_a_target_that_is_not_empty_or_not_alike_is_refused(storages, shelves):
    source, target = storages
    target.enrol("anna", units(1, 1, 16))
    with pytest.raises(GalleryError, match="holds 1 templates"):
        copy_storage(source, target)
    assert people(target) == {"anna": [units(1, 1, 16)[0].tobytes()]}
    with pytest.raises(GalleryError, match="same gallery"):
        copy_storage(source, source)
    source._fixed = replace(source._fixed, binding=replace(BOUND, model="cd" * 32))
    with pytest.raises(GalleryError, match="bound to something else"):
        copy_storage(source, target)


class Faulty:
    """A source that lies, or breaks, in the middle of its scan."""

    def __init__(self, storage, fault: str):
        self._storage, self._fault = storage, fault
        self.binding, self.size, self.digest = storage.binding, storage.size, storage.digest
        self.calibration_status = storage.calibration_status

    def scan(self):
        for at, part in enumerate(self._storage.scan(batch=5)):
            if at == 3:
                if self._fault == "breaks":
                    raise GalleryError("the source broke")
                if self._fault == "misses some":
                    continue
                if self._fault == "changes a vector":
                    part = replace(part, vectors=-part.vectors)
                if self._fault == "changes a name":
                    part = replace(part, identities=("nobody", *part.identities[1:]))
                if self._fault == "has a NaN":
                    part = replace(part, vectors=np.full_like(part.vectors, np.nan))
            yield part


@pytest.mark.parametrize("fault", ["breaks", "misses some", "changes a vector", "changes a name", "has a NaN"])
def test_a_move_that_fails_leaves_the_target_empty(storages, fault):
    source, target = storages
    with pytest.raises(GalleryError if fault != "has a NaN" else ValueError):
        copy_storage(Faulty(source, fault), target)
    assert is_empty(target) and target.check() == []
    assert copy_storage(source, target).digest == target.digest(), "and it can be tried again"


def test_a_damaged_source_is_not_moved(storages, shelves):
    source, target = storages
    shelves[0].sql("UPDATE templates SET checksum = checksum + 1 WHERE number = 5")
    with pytest.raises(GalleryError, match="template 5"):
        copy_storage(source, target)
    assert is_empty(target)
