"""Options of the N-pair loss: those it has act, those it has not are refused; statistics refuse strangers too."""

import pytest
import torch

from mettle.difficulty import AdaptiveThreshold, Hardest, Product, Relative, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import InfoNCE, NPair, SupCon


def pairs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(12, 4, generator=generator, dtype=torch.float64), torch.arange(6).repeat(2)


@pytest.mark.parametrize("loss", [NPair(), SupCon(), InfoNCE()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("option", [{"enigne": "dense"}, {"foo": 1}])
@pytest.mark.parametrize("call", ["__call__", "per_anchor", "output", "statistics"])
def test_an_unknown_option_is_an_error(loss, call, option):
    z, y = pairs()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        getattr(loss, call)(z, y, **option)


def test_known_options_act():
    z, y = pairs()
    assert NPair().output(z, y, engine="dense").engine == "dense"
    assert NPair().output(z, y, engine="tiled", tile=2).engine == "tiled"
    torch.testing.assert_close(NPair()(z, y, engine="dense"), NPair()(z, y, engine="tiled", tile=2))
    with pytest.raises(InputError, match="no engine"):
        NPair()(z, y, engine="fast")
    for option in ({"ref": (z, y)}, {"ids": y}, {"views": True}, {"weights": torch.ones(6, 6)}):
        for call in (NPair(), NPair().statistics):
            with pytest.raises(InputError, match="does not apply"):
                call(z, y, **option)
    with pytest.raises(InputError, match="the same 12 rows"):
        NPair(difficulty=Relative())(z, y, biased=z[:5])
    assert NPair(difficulty=Relative())(z, y, biased=z.flip(0)).isfinite()


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: curriculum(d), lambda d: Product(d, Hardest())])
def test_a_difficulty_that_follows_the_data_sees_every_training_batch(wrap):
    z, y = pairs()
    hard = AdaptiveThreshold(momentum=0.5)
    before = hard.current_threshold()
    loss = NPair(difficulty=wrap(hard))
    with torch.no_grad():
        loss(z, y)
    loss.statistics(z, y)
    assert hard.current_threshold() == before
    loss(z, y)
    seen = AdaptiveThreshold(momentum=0.5)
    seen.observe(z, y)
    assert hard.current_threshold() == seen.current_threshold() != before
    assert isinstance(before, Threshold)
