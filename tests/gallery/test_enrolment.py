"""Names in composed and decomposed letters, above all where an older version kept them as they came."""

import pytest
from storage_fixtures import units

from mettle import Gallery
from mettle.errors import InputError, UnknownIdentity

JOSE = ("Jos\u00e9", "Jose\u0301")  # composed, and in two letters
ZOE = ("Zo\u00eb", "Zoe\u0308")


def test_a_deletion_of_a_decomposed_name_is_repeated_however_it_is_typed(older):
    with Gallery.open(older) as gallery:
        assert JOSE[1] in list(gallery.ids()), "the dump holds it in two letters, or this tests nothing"
        first = gallery.delete(JOSE[0], request="delete jose")
        assert not first.repeated and len(first.numbers) == 1
        for name in JOSE * 2:
            again = gallery.delete(name, request="delete jose")
            assert again.repeated and (again.sequence, again.numbers) == (first.sequence, first.numbers)
        gallery.enrol(JOSE[0], units(70, 1, 4))
        for name in JOSE:
            assert gallery.delete(name, request="delete jose").repeated
        assert JOSE[0] in gallery, "who was enrolled later is another's to delete"
        for name in ("Joseph", "person 4"):
            with pytest.raises(InputError, match="used before"):
                gallery.delete(name, request="delete jose")
        assert "person 4" in gallery and gallery.check() == []


def test_requests_of_the_older_version_itself_are_answered_as_repeated(older):
    with Gallery.open(older) as gallery:
        sequence = gallery.info().sequence
        for name in ZOE:
            again = gallery.delete(name, request="delete zoe")
            assert again.repeated and len(again.numbers) == 1
            late = gallery.enrol(name, units(51, 1, 4), request="enrol zoe")
            assert late.repeated, "a late retry resurrects nobody"
            with pytest.raises(InputError, match="used before"):
                gallery.enrol(name, units(51, 1, 4), request="enrol zoe", replace=True)
            with pytest.raises(UnknownIdentity):
                gallery.delete(name, request="another")
        assert gallery.info().sequence == sequence
        for name in JOSE:
            assert gallery.enrol(name, units(50, 1, 4), request="enrol jose").repeated


def test_of_two_spellings_that_are_both_kept_the_older_goes_first(tmp_path):
    with Gallery.open(tmp_path / "g", dim=4) as gallery:
        for seed, name in enumerate(JOSE):
            gallery._record.enrol(name, units(seed, 1, 4))
        gallery.delete(JOSE[0], request="one")
        assert list(gallery.ids()) == [JOSE[0]]
        assert gallery.delete(JOSE[0], request="one").repeated and len(gallery) == 1
        gallery.delete(JOSE[0], request="two")
        assert len(gallery) == 0


@pytest.mark.parametrize("name", ["\u00e9" * 256, "\ud55c\uae00" * 60], ids=["latin", "hangul"])
def test_a_name_whose_decomposed_form_would_be_too_long_is_a_name(tmp_path, name):
    with Gallery.open(tmp_path / "g", dim=4) as gallery:
        gallery.enrol(name, units(1, 1, 4))
        gallery.enrol_many([(name, units(2, 1, 4))])
        assert name in gallery and gallery.verify(name, units(1, 1, 4)).templates == 2
        gallery.delete(name, request="r")
        assert gallery.delete(name, request="r").repeated and name not in gallery
    with Gallery.open(tmp_path / "g") as gallery, pytest.raises(InputError, match="512 bytes"):
        gallery.enrol("\u00e9" * 257, units(1, 1, 4))
