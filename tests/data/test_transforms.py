import numpy as np
import pytest
import torch

from mettle.data import transforms
from mettle.data.transforms import PRESETS, Augment, find_preset
from mettle.errors import InputError, RecipeError

IDS = np.array([3, 9, 2**40])


def pictures(n=3, side=16):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("none", "rows")])
def test_a_sample_is_changed_the_same_way_in_any_company(name):
    x, ids, change = pictures(12), np.append(IDS, np.arange(20, 29)), find_preset(name)
    together = change(x, ids, seed=1, epoch=2)
    for k in range(3):
        alone = change(x[k : k + 1], ids[k : k + 1], seed=1, epoch=2)
        torch.testing.assert_close(alone[0], together[k], rtol=0, atol=1e-6)
    assert not torch.allclose(change(x, ids, seed=1, epoch=3), together)
    assert not torch.allclose(change(x, ids, seed=1, epoch=2, view=1), together)
    assert not torch.allclose(change(x, ids, seed=2, epoch=2), together)


def test_none_changes_nothing():
    x = pictures()
    assert find_preset("none")(x, IDS, seed=0, epoch=0) is x


def test_a_quarter_turn_is_a_quarter_turn():
    class Quarter(Augment):
        pass

    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 1, 3] = 1
    # With u = 1 for the angle the range is reached: search ids for one close to the end of the range.
    from mettle.rng import uniform_per_id

    ids = np.arange(4000)
    u = uniform_per_id(0, 0, ids, 16)[:, 0]
    turned = Augment(rotate=90)(x, ids[[u.argmax()]], seed=0, epoch=0)
    assert turned.argmax() in ((torch.rot90(x, k, (2, 3)).argmax()) for k in (1, 3))


def test_mirroring_with_certainty_mirrors():
    x = pictures()
    torch.testing.assert_close(Augment(flip=1.0)(x, IDS, seed=0, epoch=0), x.flip(3), rtol=0, atol=1e-5)


def test_a_window_stays_inside_the_picture():
    """A crop to half the side shows nothing but the picture: no border is repeated."""
    ramp = torch.linspace(0, 1, 64).expand(200, 1, 64, 64).contiguous()
    ids = np.arange(200)
    x = Augment(scale=(0.5, 0.5))(ramp, ids, seed=0, epoch=0)
    width = x[:, 0, 0, -1] - x[:, 0, 0, 0]
    torch.testing.assert_close(width, torch.full_like(width, 0.5), rtol=0.05, atol=0)
    assert x[:, 0, 0, 0].min() < 0.05 and x[:, 0, 0, -1].max() > 0.95


def test_erasing_blanks_a_window():
    x = Augment(erase=1.0)(torch.ones(50, 1, 20, 20), np.arange(50), seed=0, epoch=0)
    share = (x == 0).float().mean((1, 2, 3))
    assert (share > 0.02).all() and (share < 0.25).all()


def test_random_erasing_covers_windows_of_the_given_area_and_aspect():
    n, h, w = 400, 40, 20
    x, ids = torch.full((n, 3, h, w), 2.0), np.arange(n)
    change = Augment(erase=1.0, erase_area=(0.1, 0.2), erase_aspect=2.0, erase_fill="noise")
    found = change(x, ids, seed=0, epoch=0)
    gone = (found != 2).all(1)
    assert torch.equal(gone, (found != 2).any(1)), "all channels of a pixel or none"
    assert (gone.float().mean((1, 2)) > 0.07).all() and (gone.float().mean((1, 2)) < 0.24).all()
    high, wide = gone.any(2).sum(1), gone.any(1).sum(1)
    assert torch.equal(high * wide, gone.sum((1, 2))), "a window has no holes"
    ratio = high / wide
    assert ratio.min() > 0.35 and ratio.max() < 2.8 and ratio.min() < 0.65 and ratio.max() > 1.6
    values = found[(found != 2)]
    assert values.min() >= 0 and values.max() < 1 and abs(float(values.mean()) - 0.5) < 0.01
    assert not torch.equal(found[0][:, gone[0]], found[0][:, gone[0]].flip(1)), "pixels differ from each other"
    black = Augment(erase=1.0, erase_area=(0.1, 0.2), erase_aspect=2.0)(x, ids, seed=0, epoch=0)
    assert torch.equal((black == 0).all(1), gone)


def test_half_of_the_pictures_are_erased_and_the_others_are_as_they_were():
    x, ids = torch.full((1000, 1, 12, 12), 2.0), np.arange(1000)
    found = find_preset("erase")(x, ids, seed=0, epoch=0)
    changed = (found != x).flatten(1).any(1)
    assert 0.45 < changed.float().mean() < 0.55


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"erase_area": (0.4, 0.02)}, "the smaller first, got"),
        ({"erase_area": (0.1, 1.5)}, "two shares of the picture"),
        ({"erase_aspect": 0.0}, "erase_aspect must be above 0"),
        ({"erase_fill": "white"}, "'black' or 'noise', got 'white'"),
        ({"pad": 4}, "a share of the shorter side, got 4"),
    ],
)
def test_windows_that_cannot_be_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Augment(**options)


def test_padding_moves_pictures_by_whole_pixels_and_fills_with_black():
    x, ids = pictures(20, 16) + 1, np.arange(20)
    found = Augment(pad=2 / 16)(x, ids, seed=0, epoch=0)
    seen = set()
    for before, after in zip(x, found, strict=True):
        fits = []
        for down in range(-2, 3):
            for right in range(-2, 3):
                moved = torch.zeros_like(before)
                for i in range(16):
                    for j in range(16):
                        if 0 <= i + down < 16 and 0 <= j + right < 16:
                            moved[:, i, j] = before[:, i + down, j + right]
                if torch.equal(moved, after):
                    fits.append((down, right))
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) > 8, "of 25 places"


def test_presets_go_together_unless_they_set_the_same():
    assert find_preset("mild+erase+shift") == Augment(
        **{**vars(PRESETS["mild"]), "pad": 10 / 128, "erase": 0.5, "erase_area": (0.02, 0.4)}
        | {"erase_aspect": 10 / 3, "erase_fill": "noise"}
    )
    with pytest.raises(RecipeError, match="'photo.erase': 'erase' sets erase again"):
        find_preset("photo+erase")
    with pytest.raises(RecipeError, match="no augmentation 'eras'; did you mean 'erase'"):
        find_preset("mild+eras")


def test_rows_get_noise_and_other_rows_features():
    x = torch.arange(40.0).view(8, 5)
    ids = np.arange(8)
    noisy = Augment(noise=0.5)(x, ids, seed=0, epoch=0)
    assert 0.2 < (noisy - x).std() < 0.9
    mixed = Augment(corrupt=0.5)(x, ids, seed=0, epoch=0)
    assert (mixed % 5 == x % 5).all(), "a feature may only come from the same column"
    assert 0.2 < (mixed != x).float().mean() < 0.6


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'photo'"):
        find_preset("phot")


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"rows"}))
def test_how_many_pictures_are_changed_at_a_time_changes_no_pixel(preset, monkeypatch):
    x, ids = torch.rand(7, 3, 20, 24, generator=torch.Generator().manual_seed(0)), np.arange(7)
    aspect, augment = torch.linspace(0.5, 2, 7), find_preset(preset)
    for more in ({}, {"aspect": aspect, "size": (10, 12)}):
        whole = augment(x, ids, seed=1, epoch=2, **more)
        for some in (1, 3):
            monkeypatch.setattr(transforms, "CACHED", some * x[0].nbytes)
            assert torch.equal(augment(x, ids, seed=1, epoch=2, **more), whole)
        monkeypatch.undo()


UPRIGHT = ("none", "mirror", "shift", "erase", "reid", "large", "photo", "small")


def smooth_bytes(n=7, side=64):
    """(n, side, side + 8, 3) uint8 pictures whose pixels differ little from their neighbors."""
    places = torch.linspace(0, 3, side)[:, None, None] + torch.linspace(0, 2, side + 8)[None, :, None]
    waves = (places + torch.arange(n)[:, None, None, None] + torch.arange(3)).sin()
    return (waves * 100 + 128).to(torch.uint8)


@pytest.mark.parametrize("preset", UPRIGHT)
def test_bytes_are_changed_as_floats_are(preset):
    x, ids, change = smooth_bytes(), np.arange(7), find_preset(preset)
    assert change.moves_bytes(x) and not change.moves_bytes(smooth_bytes(side=16))
    found = change(x, ids, seed=1, epoch=2)
    wanted = change(transforms.to_input_tensor(x, "cpu"), ids, seed=1, epoch=2)
    assert found.dtype == torch.float32 and found.shape == (7, 3, 64, 72)
    if not change.takes_crops():
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    else:  # windows end at whole pixels
        assert (found - wanted).abs().mean() < 0.02
    given = x.clone()
    change(x, ids, seed=1, epoch=2)
    assert torch.equal(x, given)


@pytest.mark.parametrize("preset", UPRIGHT)
def test_how_many_pictures_of_bytes_are_changed_at_a_time_changes_no_pixel(preset, monkeypatch):
    x, ids, augment = smooth_bytes(), np.arange(7), find_preset(preset)
    for more in ({}, {"aspect": torch.linspace(0.5, 2, 7), "size": (40, 48)}):
        whole = augment(x, ids, seed=1, epoch=2, **more)
        monkeypatch.setattr(transforms, "CACHED", 2 * 4 * x[0].numel())
        assert torch.equal(augment(x, ids, seed=1, epoch=2, **more), whole)
        monkeypatch.undo()


def test_a_crop_of_bytes_keeps_the_proportions_of_the_picture():
    """A picture twice as wide as high, stretched to a square canvas: crops of its whole area show it unstretched."""
    ramp = torch.linspace(0, 255, 96).to(torch.uint8)[None, None, :, None].expand(40, 96, 96, 3).contiguous()
    augment = Augment(crop=(0.3, 0.3 + 1e-9))
    found = augment(ramp, np.arange(40), seed=0, epoch=0, aspect=torch.full((40,), 2.0), size=(64, 64))
    width = found[:, 0, 0, -1] - found[:, 0, 0, 0]  # of the picture
    expected = (0.3 / 2) ** 0.5  # a square window of 0.3 of its area is narrower than high on the canvas
    torch.testing.assert_close(width, torch.full_like(width, expected), rtol=0, atol=0.03)


@pytest.mark.parametrize("erase", ["erase", "photo"])
def test_erasing_in_place_is_erasing_together(erase):
    x, ids = torch.rand(30, 3, 20, 24, generator=torch.Generator().manual_seed(0)), np.arange(30)
    change = find_preset(erase)
    u = torch.from_numpy(transforms.uniform_per_id(3, 1, ids, 26, stream=0)).float()
    before = x.clone()
    assert torch.equal(change._erase_in_place(x.clone(), u), change._erase_together(x, u))
    change(x, ids, seed=3, epoch=1)
    assert torch.equal(x, before), "the pictures that were given are left alone"
