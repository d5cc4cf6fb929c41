import importlib

import numpy as np
import pytest

from mettle.data import glyphs
from mettle.data.sources.glyphs import FAMILIES, UNSEEN, draw_glyphs, shared_characters
from mettle.errors import InputError

module = importlib.import_module("mettle.data.sources.glyphs")  # `mettle.data.sources.glyphs` is the module


@pytest.fixture(scope="module")
def table(cache):
    return glyphs(cache=cache)


def test_sixteen_faces_share_hundreds_of_characters():
    shared, dejavu = shared_characters()
    assert sum(map(len, FAMILIES.values())) == 16
    assert 600 < len(shared) < 800 and 2000 < len(dejavu) < 2500
    assert set(shared) <= set(dejavu)


def test_open_split_is_disjoint_in_identity_and_probes_an_unseen_family(table):
    train, val, test = (table.part(name) for name in ("train", "val", "test"))
    for a, b in ((train, test), (train, val), (val, test)):
        assert not set(a.labels) & set(b.labels)
    unseen = list(FAMILIES).index(UNSEEN)
    assert unseen not in train.domain.codes and unseen not in val.domain.codes
    assert (test.domain.codes[test.role == 1] == unseen).all()
    assert (test.domain.codes[test.role == 2] != unseen).all()
    assert (test.role != 0).all()
    assert len(np.unique(test.labels)) == 300 and len(test) == 300 * 16


def test_closed_split_has_the_same_characters_on_both_sides(cache):
    closed = glyphs("closed", cache=cache)
    train, test = closed.part("train"), closed.part("test")
    assert set(train.labels) == set(test.labels)
    assert len(np.unique(test.domain.codes)) == 4 and len(train) == 2 * len(test)
    a, b = (part.read(np.arange(1))[0].astype(int) for part in (train, test))
    assert (a != b).any(), "a test picture is another picture of the character, not a copy"


def test_homoglyphs_are_kept(table):
    names = " ".join(table.label.names)
    for name in ("LATIN CAPITAL LETTER A", "GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"):
        assert name in names


def test_pictures_are_a_pure_function_of_seed_and_id():
    from mettle.data.sources.glyphs import GlyphTable

    plan = GlyphTable(*(np.array(v) for v in ([65, 66, 0x3B1], [0, 1, 3], [0, 1, 2], [0, 0, 0], [0, 0, 0])))
    ids = np.array([5, 6, 7])
    whole = draw_glyphs(plan, ids, 0)
    part = GlyphTable(*(column[1:] for column in vars(plan).values()))
    assert (draw_glyphs(part, ids[1:], 0) == whole[1:]).all()
    assert (draw_glyphs(plan, ids, 1) != whole).any()
    assert (draw_glyphs(plan, ids + 1, 0) != whole).any()
    assert whole.dtype == np.uint8 and (whole.max((1, 2)) > 150).all()


def test_every_character_leaves_ink(table):
    part = table.part("test")
    peak = np.concatenate([part.read(np.arange(i, i + 600)).max((1, 2, 3)) for i in range(0, len(part), 600)])
    assert (peak > 60).all()


def test_the_cache_is_used_and_a_broken_one_is_not(tmp_path, monkeypatch):
    small(monkeypatch)
    first = glyphs(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as inner:
        inner.setattr(module, "draw_glyphs", lambda *a: pytest.fail("drawn again"))
        assert glyphs(cache=tmp_path).fingerprint() == first.fingerprint()
    file.write_bytes(file.read_bytes()[:100])
    assert glyphs(cache=tmp_path).fingerprint() == first.fingerprint()


def test_an_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    small(monkeypatch)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert len(glyphs(cache=blocked / "cache")) > 0


def small(monkeypatch) -> None:
    """Fifteen characters instead of thousands."""
    monkeypatch.setattr(module, "HELD_OUT", {"test": 3, "val": 2})
    monkeypatch.setattr(module, "shared_characters", lambda: (np.arange(65, 75), np.arange(65, 80)))


def test_an_unknown_split_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'open'"):
        glyphs("opne")
