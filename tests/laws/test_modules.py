"""What every pairwise loss obeys as a module: state, copies, identity, settings, and the options of a call."""

import copy
import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from covering import cover_axes, take_turns
from laws.members import DIFFICULTIES, FORMS, ON_SPHERE, batch, extra, fitting, frozen, with_difficulty
from mettle.difficulty import AdaptiveThreshold, Importance, Product, Relative, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import InfoNCE, Margin, NPair, SelfTriplet, SupCon, Triplet
from mettle.losses.base import PairwiseLoss
from mettle.pairs.diagnostics import pair_weights


class CallCounter(TorchDispatchMode):
    """Counts the operators that run inside it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


STATEFUL: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "adaptive": lambda: AdaptiveThreshold(momentum=0.5),
    "product": lambda: Product(AdaptiveThreshold(momentum=0.5), Threshold(0.5, 0.5)),
    "curriculum": lambda: curriculum(AdaptiveThreshold(momentum=0.5), end=0.5),
    "all of them": lambda: curriculum(Product(Importance(0.5), AdaptiveThreshold(momentum=0.5)), end=0.5),
}
LEARNED = {
    "supcon learned": SupCon(0.2, learn_temperature=True),
    "infonce learned": InfoNCE(0.5, learn_temperature=True),
    "margin learned": Margin(0.2, 1.1, nu=0.1),
    "margin per class": Margin(0.2, 1.1, nu=0.1, boundary="class", num_classes=40),
}
EVERY = [(form, hard) for form in FORMS | LEARNED for hard in STATEFUL]
IDS = [f"{form}-{hard}" for form, hard in EVERY]
every_member = pytest.mark.parametrize(("form", "hard"), EVERY, ids=IDS)
ENGINES = {"auto": {}, "dense": {"engine": "dense"}, "tiled": {"engine": "tiled", "tile": 8}}
RANDOM: dict[str, Callable[[int], PairwiseLoss]] = {
    "triplet": lambda seed: Triplet(0.3, "random", random=torch.Generator().manual_seed(seed)),
    "self triplet": lambda seed: SelfTriplet(0.1, "one_neg", random=torch.Generator().manual_seed(seed)),
}


def member(form: str, hard: str) -> PairwiseLoss:
    """A new one, with a state of its own."""
    return with_difficulty((FORMS | LEARNED)[form], STATEFUL[hard]())


def inner(loss: PairwiseLoss) -> list[AdaptiveThreshold]:
    return [part for part in loss.modules() if isinstance(part, AdaptiveThreshold)]


def trained(form: str, hard: str) -> tuple[PairwiseLoss, torch.Tensor, torch.Tensor]:
    """A member whose state has left where it started."""
    loss = member(form, hard)
    z, y = fitting(loss)
    loss(z, y)
    with torch.no_grad():
        for p in loss.parameters():
            p.add_(0.3)
    return loss, z, y


def value(loss: PairwiseLoss, z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():  # or thresholds would follow the batch
        return loss(z, y, **options)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


class Model(nn.Module):
    """A user's module."""

    def __init__(self, loss: PairwiseLoss):
        super().__init__()
        self.encoder = nn.Linear(5, 5)
        self.criterion = loss


# State


@every_member
def test_a_loss_is_a_module_whose_state_is_that_of_its_parts(form, hard):
    loss = member(form, hard)
    assert isinstance(loss, nn.Module)
    assert len(list(loss.parameters())) == (1 if form in LEARNED else 0)
    assert len(list(loss.buffers())) == (0 if hard == "none" else 2)
    assert len(inner(loss)) == (0 if hard == "none" else 1)
    names = {name.rsplit(".", 1)[-1] for name in loss.state_dict()}
    assert names >= ({"positive", "negative"} if hard != "none" else set())
    assert bool({"log_temperature", "boundaries"} & names) == (form in LEARNED)


@every_member
def test_a_loss_is_moved_as_a_module_is(form, hard):
    loss, z, y = trained(form, hard)
    before = value(loss, z, y)
    assert loss.to(torch.float64) is loss
    held = [*loss.parameters(), *loss.buffers()]
    assert all(x.dtype == torch.float64 for x in held)
    close(value(loss, z, y), before, 1e-5 if form in LEARNED else 1e-7)  # thresholds were kept in single precision
    assert all(x.dtype == torch.float32 for x in [*loss.float().parameters(), *loss.buffers()])
    assert loss.eval().training is False and loss.train().training is True
    assert loss.settings == member(form, hard).settings


WRAPS: dict[str, Callable[[PairwiseLoss], nn.Module]] = {
    "itself": lambda x: x,
    "list": lambda x: nn.ModuleList([nn.Identity(), x]),
    "model": Model,
}


@pytest.mark.parametrize(("form", "hard", "inside"), take_turns(EVERY, WRAPS))
def test_a_trained_state_survives_a_save_and_a_strict_load(form, hard, inside):
    wrap = WRAPS[inside]
    loss, z, y = trained(form, hard)
    fresh = member(form, hard)
    file = io.BytesIO()
    torch.save(wrap(loss).state_dict(), file)
    file.seek(0)
    wrap(fresh).load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(value(fresh, z, y), value(loss, z, y))
    for mine, other in zip(inner(loss), inner(fresh), strict=True):
        assert float(mine.positive) != pytest.approx(0.7, abs=1e-4)
        assert mine.current_threshold() == other.current_threshold()


def test_what_was_learned_is_not_what_it_started_from():
    model = Model(SupCon(difficulty=AdaptiveThreshold()))
    model.criterion.difficulty.positive.fill_(0.787)
    other = Model(SupCon(difficulty=AdaptiveThreshold()))
    assert float(other.criterion.difficulty.positive) == pytest.approx(0.7)
    other.load_state_dict(model.state_dict(), strict=True)
    assert float(other.criterion.difficulty.positive) == pytest.approx(0.787)
    with pytest.raises(RuntimeError, match="criterion.difficulty.positive"):
        Model(SupCon(difficulty=Threshold())).load_state_dict(model.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="criterion.difficulty.positive"):
        model.load_state_dict(Model(SupCon(difficulty=Threshold())).state_dict(), strict=True)


def test_an_optimiser_moves_what_is_learned_inside_a_module():
    model = Model(SupCon(0.2, learn_temperature=True))
    z, y = batch(dtype=torch.float32)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.criterion(model.encoder(z.detach()), y).backward()
    optimiser.step()
    assert float(model.criterion.current_temperature().detach()) != pytest.approx(0.2, abs=1e-4)
    assert model.criterion.temperature == 0.2


# Copies, identity, settings

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize(("form", "hard", "how"), take_turns(EVERY, COPIES))
def test_a_copy_has_the_same_settings_and_the_same_value(form, hard, how):
    loss, z, y = trained(form, hard)
    wanted = value(loss, z, y)
    other = COPIES[how](loss)
    assert type(other) is type(loss) and other is not loss
    assert other.settings == loss.settings and repr(other) == repr(loss)
    for options in ENGINES.values():
        close(value(other, z, y, **options), value(loss, z, y, **options))
    with pytest.raises(FrozenInstanceError):
        other.difficulty = None
    other(z, y)  # a training step of the copy
    same = torch.equal(value(loss, z, y), wanted)
    assert same or how == "copy", "state of a deep copy is its own"


@every_member
def test_losses_are_equal_by_identity_and_settings_by_value(form, hard):
    loss, twin, other = member(form, hard), member(form, hard), member(form, hard)
    assert loss == loss and loss != twin and loss in {loss} and twin not in {loss, other}
    assert len({loss, twin, other}) == 3 and hash(loss) == hash(loss)
    assert loss.settings == twin.settings
    assert loss.settings != {**loss.settings, "empty": "zero"} == replace(twin, empty="zero").settings


@every_member
def test_settings_cannot_be_changed(form, hard):
    loss = member(form, hard)
    before, said = loss.settings, repr(loss)
    for field in dataclasses.fields(loss):
        with pytest.raises(FrozenInstanceError, match=f"{field.name} of {type(loss).__name__} cannot be changed"):
            setattr(loss, field.name, getattr(loss, field.name))
    if hard in ("product", "curriculum"):
        name = "first" if hard == "product" else "difficulty"
        with pytest.raises(FrozenInstanceError, match=f"{name} of "):
            setattr(loss.difficulty, name, Threshold())
    assert (loss.settings, repr(loss)) == (before, said)


@pytest.mark.parametrize("loss", [SupCon(0.2, difficulty=Product(Threshold(), Importance())), Triplet()], ids=repr)
def test_settings_cannot_be_taken_away(loss):
    before = loss.settings
    for field in dataclasses.fields(loss):
        with pytest.raises(FrozenInstanceError):
            delattr(loss, field.name)
    assert loss.settings == before


@pytest.mark.parametrize("form", list(FORMS))
def test_a_replaced_setting_makes_another_loss(form):
    loss = FORMS[form]
    hard = Threshold()
    other = replace(loss, difficulty=hard)
    assert other is not loss and other.difficulty is hard and loss.difficulty is None
    assert {k: v for k, v in other.settings.items() if k != "difficulty"} == {
        k: v for k, v in loss.settings.items() if k != "difficulty"
    }
    with pytest.raises(InputError, match="empty must be one of"):
        replace(loss, empty="nothing")


@pytest.mark.parametrize("form", list(FORMS | LEARNED))
def test_building_computes_nothing(form):
    """Building is checks of plain numbers; a learned temperature takes the few operators of its first value."""
    loss = (FORMS | LEARNED)[form]
    settings = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}
    with CallCounter() as counter:
        type(loss)(**settings)
    assert counter.count <= (4 if form in LEARNED else 0)


# Random numbers


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: nn.ModuleList([x]), Model])
@pytest.mark.parametrize("form", RANDOM)
def test_draws_go_on_where_the_state_was_saved(form, wrap):
    z, y = batch()
    loss = RANDOM[form](1)
    first = [float(value(loss, z, y)) for _ in range(3)]
    file = io.BytesIO()
    torch.save(wrap(loss).state_dict(), file)
    wanted = [float(value(loss, z, y)) for _ in range(5)]
    fresh = RANDOM[form](99)
    file.seek(0)
    wrap(fresh).load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert [float(value(fresh, z, y)) for _ in range(5)] == wanted
    assert len({*first, *wanted}) > 1, "nothing was drawn"


@pytest.mark.parametrize("form", RANDOM)
def test_a_generator_stays_where_it_is(form):
    z, y = batch()
    loss, other = RANDOM[form](1), RANDOM[form](1)
    generator, state = loss.random, loss.random.get_state()
    for moved in (loss.to(torch.float64), loss.to("cpu"), loss.half(), loss.to("meta")):
        assert moved.random is generator and generator.device.type == "cpu"
        assert torch.equal(generator.get_state(), state)
    assert [float(value(loss, z, y)) for _ in range(4)] == [float(value(other, z, y)) for _ in range(4)]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("form", RANDOM)
def test_a_deep_copy_draws_the_same_by_itself(form, how):
    z, y = batch()
    loss = RANDOM[form](1)
    loss(z, y)
    other = COPIES[how](loss)
    assert other.random is not loss.random
    assert [float(value(other, z, y)) for _ in range(4)] == [float(value(loss, z, y)) for _ in range(4)]


@pytest.mark.parametrize("kind", [lambda: Triplet(0.3, "random"), lambda: SelfTriplet(0.1, "one_neg")])
def test_torchs_own_generator_is_nobodys_state(kind):
    before = torch.get_rng_state()
    loss = kind()
    kind().load_state_dict(loss.state_dict(), strict=True)
    assert torch.equal(torch.get_rng_state(), before)


# progress=


@pytest.mark.parametrize(("form", "engine"), cover_axes(list(FORMS), list(ENGINES)))
def test_a_curriculum_starts_at_nothing_and_ends_at_the_difficulty_inside(form, engine):
    options = ENGINES[engine]
    hard = Threshold(1.0, 5.0, 0.6, 0.1)
    plain, full = FORMS[form], with_difficulty(FORMS[form], hard)
    rising = with_difficulty(FORMS[form], curriculum(hard, start=0.2, end=0.6))
    z, y = fitting(plain)
    for progress in (0.0, 0.1, 0.2):
        close(rising.per_anchor(z, y, progress=progress, **options), plain.per_anchor(z, y, **options))
        close(rising(z, y, progress=progress, **options), plain(z, y, **options))
    for at in ({"progress": 0.6}, {"progress": 1.0}, {}):
        close(rising.per_anchor(z, y, **at, **options), full.per_anchor(z, y, **options))
        close(rising(z, y, **at, **options), full(z, y, **options))
    close(plain(z, y, progress=0.3, **options), plain(z, y, **options))
    if form in ON_SPHERE:
        half = with_difficulty(FORMS[form], Threshold(0.5, 2.5, 0.6, 0.1))
        close(rising(z, y, progress=0.4, **options), half(z, y, **options))
        assert rising.statistics(z, y, progress=0.4).negative_weight == pytest.approx(
            half.statistics(z, y).negative_weight
        )


@pytest.mark.parametrize("form", list(FORMS))
def test_a_point_of_training_shares_the_state_and_leaves_no_trace(form):
    loss = member(form, "curriculum")
    z, y = fitting(loss)
    (followed,) = inner(loss)
    seen = AdaptiveThreshold(momentum=0.5)
    for step in range(3):
        loss(z, y, progress=step / 10)
        seen.observe(z, y)
        assert followed.current_threshold() == seen.current_threshold()
    close(value(loss, z, y), value(loss, z, y, progress=1.0))
    assert loss.settings == member(form, "curriculum").settings


# weights=


@pytest.mark.parametrize("options", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("form", [name for name, loss in FORMS.items() if not isinstance(loss, NPair)])
def test_weights_of_one_are_no_difficulty(form, options):
    z, y = batch()
    ones = torch.ones(len(z), len(z))
    wanted = FORMS[form].per_anchor(z, y, **options)
    close(FORMS[form].per_anchor(z, y, weights=ones, **options), wanted)
    close(with_difficulty(FORMS[form], Threshold()).per_anchor(z, y, weights=ones, **options), wanted)


def explicit(loss: PairwiseLoss) -> PairwiseLoss:
    """A loss that asks its difficulty for nothing but weights: a table cannot tell it more."""
    if isinstance(loss, SupCon):
        return replace(loss, pos_weight="numerator" if loss.numerator_only else "everywhere")
    return replace(loss, count=loss.negative_count) if isinstance(loss, InfoNCE) else loss


CONSTANT = [(form, name) for form in ON_SPHERE for name, hard in DIFFICULTIES.items() if hard.detach]


@pytest.mark.parametrize(("form", "hard", "engine"), take_turns(CONSTANT, ENGINES))
def test_the_weights_of_a_difficulty_as_a_table_are_that_difficulty(form, hard, engine):
    options = ENGINES[engine]
    loss = explicit(with_difficulty(FORMS[form], DIFFICULTIES[hard]))
    z, y = batch()
    second = extra(loss, z)
    table = pair_weights(loss, z, y, difficulty=loss.difficulty, **second)
    assert table.shape == (14, 14) and not table.requires_grad

    def both(**given):
        leaf = z.detach().clone().requires_grad_()
        output = loss.output(leaf, y, **given, **options)
        return output.per_anchor().detach(), torch.autograd.grad(output.mean(), leaf)[0]

    for a, b in zip(both(weights=table), both(**second), strict=True):
        close(a, b, 1e-8)


def test_weights_that_are_no_table_are_refused():
    z, y = batch()
    for wrong in (torch.ones(14), torch.ones(14, 14, dtype=torch.long), [[1.0] * 14] * 14, 2.0):
        with pytest.raises(InputError, match=r"weights must be a floating point tensor \(anchors, references\)"):
            SupCon()(z, y, weights=wrong)
    for wrong in (torch.ones(13, 14), torch.ones(14, 15), torch.ones(1, 1)):
        for options in ENGINES.values():
            with pytest.raises(InputError, match="weights"):
                SupCon()(z, y, weights=wrong, **options)
    with pytest.raises(InputError, match="negative or NaN weight"):
        SupCon()(z, y, weights=-torch.ones(14, 14))


# empty=


@pytest.mark.parametrize(("form", "hard", "engine"), take_turns(EVERY, ENGINES))
def test_a_batch_without_positives_is_an_error_or_zero(form, hard, engine):
    options = ENGINES[engine]
    loss = member(form, hard)
    z, _ = batch()
    alone = torch.arange(len(z))
    if isinstance(loss, NPair):
        with pytest.raises(InputError, match="exactly two rows of every class"):
            replace(loss, empty="zero")(z, alone, **options)
        return
    with pytest.raises(InputError, match="no anchor has a positive among 14 samples"):
        loss(z, alone, **options)
    quiet = replace(loss, empty="zero")
    found = quiet(z, alone, **options)
    (gradient,) = torch.autograd.grad(found, z)
    assert found == 0 and found.dtype == z.dtype and (gradient == 0).all()
    assert quiet.per_anchor(z, alone, **options).isnan().all()
    other = z.detach().flip(0).requires_grad_()
    found = quiet(z, alone, ref=(other, alone + 14), **options) if "lifted" not in form else other.sum() * 0
    assert found == 0
    assert all((g == 0).all() for g in torch.autograd.grad(found, (z, other), allow_unused=True) if g is not None)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("form", "engine"),
    cover_axes([name for name, loss in (FORMS | LEARNED).items() if not isinstance(loss, NPair)], list(ENGINES)),
)
def test_what_is_broken_is_not_zero(form, engine, broken):
    options = ENGINES[engine]
    quiet = replace((FORMS | LEARNED)[form], empty="zero")
    z, y = batch()
    z = z.detach().clone()
    z[3, 1] = broken
    for labels in (torch.arange(len(z)), y):
        assert quiet(z.requires_grad_(), labels, **options).isnan()


@pytest.mark.parametrize(("form", "hard", "engine"), take_turns(EVERY, ENGINES))
def test_where_there_are_positives_nothing_changes(form, hard, engine):
    options = ENGINES[engine]
    loss = member(form, hard)
    z, y = fitting(loss)
    quiet = replace(loss, empty="zero")
    found, wanted = (one(z, y, progress=0.5, **options) for one in (quiet, member(form, hard)))
    close(found, wanted)
    close(*(torch.autograd.grad(one, z)[0] for one in (found, wanted)))


# learn_temperature=

TEMPERED: dict[str, Any] = {
    "supcon out": SupCon(0.2),
    "supcon in": SupCon(0.2, "in"),
    "supcon sum": SupCon(0.2, normalise="sum"),
    "supcon rescaled": SupCon(0.2, base_temperature=0.07),
    "supcon penalty": SupCon(0.2, neg_weight="penalty"),
    "infonce": InfoNCE(0.5),
    "debiased": InfoNCE(0.5, prior=0.1),
    "debiased clamped": InfoNCE(0.1, prior=0.4),
}
WEIGHED: dict[str, Any] = {
    "none": None,
    "threshold": Threshold(positive=0.6, negative=0.1),
    "threshold live": Threshold(positive=0.6, negative=0.1, detach=False),
    "importance": Importance(0.7),
    "importance detached": Importance(0.7, detach=True),
    "relative": Relative(),
    "relative live": Relative(detach=False),
    "relative raw": Relative("raw"),
    "relative distance": Relative("distance"),
    "curriculum": curriculum(Importance(0.7), end=0.5).at(0.25),
}


LEARNING = [(form, hard) for form in TEMPERED for hard in WEIGHED]


def learning(form: str, hard: str) -> Any:
    return replace(TEMPERED[form], difficulty=WEIGHED[hard], learn_temperature=True).double()


def options_of(loss: Any, z: torch.Tensor, engine: str) -> dict[str, Any]:
    return ENGINES[engine] | extra(loss, z)


@pytest.mark.parametrize(("form", "hard", "engine"), take_turns(LEARNING, ENGINES))
def test_a_learned_temperature_starts_as_the_fixed_one(form, hard, engine):
    loss, fixed = learning(form, hard), replace(TEMPERED[form], difficulty=WEIGHED[hard])
    z, y = batch()
    found, wanted = (one.per_anchor(z, y, **options_of(one, z, engine)) for one in (loss, fixed))
    close(found, wanted, 1e-5)  # its logarithm was rounded to single precision
    (leaf,) = loss.parameters()
    assert float(leaf.detach().exp()) == pytest.approx(fixed.temperature, rel=1e-6)
    assert loss.settings == {**fixed.settings, "learn_temperature": True}
    same = replace(fixed, temperature=float(leaf.detach().exp()))
    slopes = [torch.autograd.grad(one(z, y, **options_of(one, z, engine)), z)[0] for one in (loss, same)]
    close(*slopes, 1e-8)


@pytest.mark.parametrize(("form", "hard", "engine"), take_turns(LEARNING, ENGINES))
def test_its_gradient_is_the_slope(form, hard, engine):
    """Weights that are constants for the gradient are held while the temperature moves."""
    loss = learning(form, hard)
    z, y = batch()
    options = options_of(loss, z, engine)
    found, towards = torch.autograd.grad(loss(z, y, **options), (loss.log_temperature, z))
    start, step = float(loss.log_temperature.detach()), 1e-5
    held = loss
    if loss.difficulty is not None and loss.difficulty.detach:
        held = frozen(loss, z, y, **extra(loss, z))
        options = ENGINES[engine]
    moved = []
    for log in (start + step, start - step):
        at = replace(held, temperature=math.exp(log), learn_temperature=False)
        moved.append(float(value(at, z, y, **options)))
    assert float(found) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5, abs=1e-7)
    assert abs(float(found)) > 1e-4 and towards.isfinite().all()


@pytest.mark.parametrize(("form", "hard", "tile"), take_turns(LEARNING, (1, 5, 14)))
def test_its_gradient_is_the_same_in_every_engine_and_tiling(form, hard, tile):
    loss = learning(form, hard)
    z, y = batch()
    wanted = torch.autograd.grad(loss(z, y, engine="dense", **extra(loss, z)), (loss.log_temperature, z))
    found = torch.autograd.grad(loss(z, y, engine="tiled", tile=tile, **extra(loss, z)), (loss.log_temperature, z))
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_its_second_derivatives_are_slopes_too(engine):
    loss = learning("supcon out", "none")
    z, y = batch(8, 3)

    def found(z, log_temperature):
        return torch.func.functional_call(loss, {"log_temperature": log_temperature}, (z, y), ENGINES[engine])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what tiles cost
        assert torch.autograd.gradgradcheck(found, (z, loss.log_temperature))


def test_a_temperature_that_is_not_learned_has_no_parameter():
    for loss in (SupCon(), InfoNCE()):
        assert list(loss.parameters()) == [] and loss.current_temperature() == loss.temperature
        assert "log_temperature" not in loss.state_dict()
