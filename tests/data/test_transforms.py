import numpy as np
import pytest
import torch

from mettle.data.transforms import PRESETS, Augment, find_preset
from mettle.errors import RecipeError

IDS = np.array([3, 9, 2**40])


def pictures(n=3, side=16):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("none", "rows")])
def test_a_sample_is_changed_the_same_way_in_any_company(name):
    x, change = pictures(), find_preset(name)
    together = change(x, IDS, seed=1, epoch=2)
    for k in range(3):
        alone = change(x[k : k + 1], IDS[k : k + 1], seed=1, epoch=2)
        torch.testing.assert_close(alone[0], together[k], rtol=0, atol=1e-6)
    assert not torch.allclose(change(x, IDS, seed=1, epoch=3), together)
    assert not torch.allclose(change(x, IDS, seed=1, epoch=2, view=1), together)
    assert not torch.allclose(change(x, IDS, seed=2, epoch=2), together)


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
