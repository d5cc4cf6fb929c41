"""Names in composed and decomposed letters."""

import pytest
from storage_fixtures import units

from mettle import Gallery
from mettle.errors import InputError

JOSE = ("Jos\u00e9", "Jose\u0301")  # composed, and in two letters


def test_of_two_spellings_that_are_both_kept_the_older_goes_first(tmp_path):
    with Gallery.open(tmp_path / "g", dim=4) as gallery:
        for seed, name in enumerate(JOSE):
            gallery._storage.enrol(name, units(seed, 1, 4))
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
