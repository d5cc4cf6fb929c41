"""WCL and its baselines: two networks that never train each other, controls, groups, resuming; and JTT."""

import json
import re
import tomllib

import numpy as np
import pytest
import torch

from mettle.data import Samples, read
from mettle.data.inputs import FeatureArray
from mettle.data.loader import Batch, Loader
from mettle.data.sampler import UpsampledSampler
from mettle.data.transforms import Augment
from mettle.difficulty import Importance, Relative
from mettle.errors import DataError, InputError, NumericError, RecipeError, RunError
from mettle.losses import InfoNCE, SelfTriplet
from mettle.model import Embedder, EmbedderSpec, embed
from mettle.pairs import pair_weights
from mettle.train import TwoEncoder, builtin_recipes, checkpoint, load, open_run_folder
from mettle.train import callbacks as logs
from mettle.train.from_recipe import train
from mettle.train.methods.jtt import describe_error_set, find_misclassified
from mettle.train.methods.two_encoder import SpuriousAttribute
from mettle.train.optim import MultiOptimizer
from mettle.train.recipe import parse_recipe

from ..test_from_recipe import Stop, content, until

WCL = InfoNCE(temperature=0.5, prior=0.1, difficulty=Relative())


def batch(n=6, seed=0, step=0):
    ids = torch.arange(n).repeat(2) * 5 + 3
    x = torch.randn(2 * n, 5, generator=torch.Generator().manual_seed(seed))
    return Batch(x, ids % 2, ids, step, 0, 0.0)


def network(seed):
    torch.manual_seed(seed)
    return Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (5,))


def method(loss=WCL, **options):
    biased = network(1) if loss.difficulty == Relative(form=getattr(loss.difficulty, "form", "")) else None
    return TwoEncoder(network(0), loss, biased, SelfTriplet(prior=0.1), **options)


def test_neither_loss_has_any_gradient_on_the_other_network():
    both = method()
    found = both.terms(batch())
    for loss, own, other in (
        (found.loss, both.model, both.biased),
        (found.biased_loss, both.biased, both.model),
    ):
        foreign = torch.autograd.grad(loss, list(other.parameters()), retain_graph=True, allow_unused=True)
        assert all(g is None for g in foreign), "exactly zero: there is no path"
        mine = torch.autograd.grad(loss, list(own.parameters()), retain_graph=True, allow_unused=True)
        assert any(g is not None and (g != 0).any() for g in mine)


def only(both, name, loss):
    """A step of one of the two networks."""
    optimizer = MultiOptimizer({name: list(both.modules[name].parameters())}, device="cpu")
    optimizer.backward({name: loss})
    assert optimizer.step([{name: loss}], {name: 1e-2}).applied


def test_a_step_is_that_of_two_networks_trained_apart():
    both, alone = method(), method()
    both.step(batch(), 1e-2, 0.0)
    w_model = [p.detach().clone() for p in both.model.parameters()]
    w_biased = [p.detach().clone() for p in both.biased.parameters()]
    only(alone, "model", alone.terms(batch()).loss)
    assert all(torch.equal(a, b) for a, b in zip(w_model, alone.model.parameters(), strict=True))
    other = method()
    only(other, "biased", other.terms(batch()).biased_loss)
    assert all(torch.equal(a, b) for a, b in zip(w_biased, other.biased.parameters(), strict=True))


def test_losses_are_those_of_the_losses_room_on_sample_ids():
    both, b = method(), batch()
    found = both.terms(b)
    z, other = found.embeddings.detach(), found.biased
    torch.testing.assert_close(found.loss, WCL(z, b.ids, biased=other))
    torch.testing.assert_close(found.biased_loss, SelfTriplet(prior=0.1)(other, b.ids))


@pytest.mark.parametrize("loss", [InfoNCE(0.5), InfoNCE(0.5, prior=0.1), InfoNCE(0.5, 0.1, Importance(0.5))])
def test_baselines_train_one_encoder(loss):
    one = TwoEncoder(network(0), loss)
    result = one.step(batch(), 1e-2, 0.0)
    assert result.applied and list(one.modules) == ["model"]
    assert "clamp_fraction" in result.lazy_stats()


def weights_of(z, ids, other):
    """All weights, and which of them are of negatives."""
    return pair_weights(WCL, z, ids, difficulty=WCL.difficulty, biased=other), ids[:, None] != ids


def test_weights_are_those_of_the_formula():
    both, b = method(), batch()
    found = both.terms(b)
    z, o = (torch.nn.functional.normalize(x.detach().double()) for x in (found.embeddings, found.biased))
    w, negative = weights_of(z, b.ids, o)
    n = len(b.ids)
    for i in range(n):
        others = [j for j in range(n) if b.ids[i] != b.ids[j]]
        d, s = ([float(torch.exp(x[i] @ x[j] / 0.5)) for j in others] for x in (z, o))
        d, s = (np.array(x) / np.sqrt((np.array(x) ** 2).sum()) for x in (d, s))
        np.testing.assert_allclose(w[i, others].numpy(), 1 + d / (d + s), rtol=1e-9)
        assert negative[i].nonzero().flatten().tolist() == others


def test_the_mean_control_has_one_weight_and_the_mean_of_the_pairs():
    pairs, mean = method(), method(weights="mean")
    b = batch()
    w, negative = weights_of(pairs.terms(b).embeddings.detach(), b.ids, pairs.terms(b).biased)
    used = mean.terms(b).options["weights"]
    assert len(used[negative].unique()) == 1
    torch.testing.assert_close(used[negative].mean(), w[negative].mean())
    assert pairs.terms(b).loss != mean.terms(b).loss


def test_the_shuffled_control_deals_out_the_same_weights():
    pairs, shuffled = method(), method(weights="shuffled")
    b = batch()
    w, negative = weights_of(pairs.terms(b).embeddings.detach(), b.ids, pairs.terms(b).biased)
    used = shuffled.terms(b).options["weights"]
    assert not torch.equal(used, w)
    for i in range(len(w)):
        torch.testing.assert_close(used[i, negative[i]].sort().values, w[i, negative[i]].sort().values)
    assert torch.equal(used, shuffled.terms(b).options["weights"]), "a pure function of (seed, step)"
    assert not torch.equal(used, shuffled.terms(batch(step=1)).options["weights"])


def test_facts_say_mean_and_spread_of_the_weights_and_their_means_by_group():
    ids = np.arange(6) * 5 + 3
    attribute = SpuriousAttribute("place", ids, np.array([0, 0, 0, 1, 1, 1]), ("land", "water"))
    both, b = method(attribute=attribute), batch()
    found = both.terms(b)
    facts = both.step(b, 0.0, 0.0).lazy_stats()
    w, negative = (x.numpy() for x in weights_of(found.embeddings.detach(), b.ids, found.biased))
    assert facts["weight_mean"] == pytest.approx(w[negative].mean(), rel=1e-5)
    assert facts["weight_std"] == pytest.approx(w[negative].std(ddof=1), rel=1e-4)
    place = np.tile([0, 0, 0, 1, 1, 1], 2)
    label = b.labels.numpy()
    cells = {(a, c): [] for a in (0, 1) for c in (0, 1)}
    same, other = [], []
    for i in range(12):
        for j in range(12):
            if negative[i, j]:
                cells[place[i], place[j]].append(w[i, j])
                if label[i] != label[j]:
                    (same if place[i] == place[j] else other).append(w[i, j])
    names = ("land", "water")
    for (a, c), values in cells.items():
        assert facts["weight_by_group"][f"{names[a]} / {names[c]}"] == pytest.approx(np.mean(values), rel=1e-5)
    assert facts["weight_same_group"] == pytest.approx(np.mean(same), rel=1e-5)
    assert facts["weight_other_group"] == pytest.approx(np.mean(other), rel=1e-5)
    assert 0 <= facts["clamp_fraction"] <= 1
    json.dumps(facts)


def test_a_step_with_a_broken_input_changes_neither_network():
    both = method()
    before = [p.clone() for m in both.modules.values() for p in m.parameters()]
    b = batch()
    b.inputs[2, 1] = torch.nan
    assert not both.step(b, 1e-2, 0.0).applied
    after = [p for m in both.modules.values() for p in m.parameters()]
    assert all(torch.equal(a, p) for a, p in zip(before, after, strict=True))


@pytest.mark.parametrize("which", [InfoNCE, SelfTriplet], ids=["debiased", "biased"])
def test_a_diverging_run_names_its_samples_and_keeps_its_checkpoint(source, tmp_path, monkeypatch, which):
    calls, original = iter(range(100)), which.__call__

    def broken(self, z, y, **options):
        return original(self, z, y, **options) * (float("nan") if next(calls) >= 5 else 1.0)

    monkeypatch.setattr(which, "__call__", broken)
    with pytest.raises(NumericError, match=r"diverged: loss nan .* at step 8, .*samples \[") as caught:
        train(tiny(source), tmp_path / "run", tensorboard=False)
    ids = json.loads(re.search(r"samples (\[.*?\])", str(caught.value))[1])
    assert set(ids) <= set(read(source).part("train").ids.tolist())
    step, state, _ = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert step == 6
    assert all(torch.isfinite(t).all() for t in checkpoint.flatten_state(state)[0].values() if t.is_floating_point())


def test_views_of_different_length_are_refused():
    b = batch()
    for wrong in (
        Batch(b.inputs[:-1], b.labels[:-1], b.ids[:-1], 0, 0, 0.0),
        Batch(b.inputs, b.labels, torch.cat([b.ids[:6], b.ids[:6].flip(0)]), 0, 0, 0.0),
        Batch(b.inputs[:-2], b.labels, b.ids, 0, 0, 0.0),
    ):
        with pytest.raises(InputError, match="two views of the same samples"):
            method().step(wrong, 1e-2, 0.0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((WCL,), {}, "needs a second encoder"),
        ((InfoNCE(), 1), {}, "compares no encoders"),
        ((InfoNCE(),), {"weights": "mean"}, "control of Relative"),
        ((WCL, 1), {"weights": "even"}, "weights must be one of"),
    ],
)
def test_an_impossible_pair_is_refused(arguments, options, message):
    loss, *second = arguments
    with pytest.raises(InputError, match=message):
        TwoEncoder(network(0), loss, network(1) if second else None, **options)


def lines_of(name):
    return builtin_recipes()[name].read_text().splitlines()


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("simclr", "dcl", "prior"),
        ("dcl", "hcl", "difficulty"),
        ("wcl", "wcl-mean", "weights"),
        ("wcl", "wcl-shuffled", "weights"),
        ("wcl", "wcl-distance", "difficulty"),
    ],
)
def test_methods_differ_by_one_line(first, second, key):
    """But for the name of the recipe that another one extends."""
    a, b = lines_of(first), lines_of(second)
    new = [line for line in b if line not in (*a, f'extends = "{first}"')]
    assert len(new) == 1 and new[0].startswith(key)


def test_wcl_is_dcl_with_relative_difficulty_and_its_encoder():
    new = [line for line in lines_of("wcl") if line not in lines_of("dcl")]
    assert [line.split(" ")[0] for line in new] == ["difficulty", "[biased]", "loss"]


def test_recipes_mean_what_their_names_say():
    assert load("simclr").build_loss().settings == InfoNCE(0.5).settings
    assert load("dcl").build_loss().settings == InfoNCE(0.5, prior=0.1).settings
    assert load("hcl").build_loss().settings == InfoNCE(0.5, prior=0.1, difficulty=Importance(0.5)).settings
    assert load("wcl").build_loss().settings == WCL.settings
    assert load("wcl").build_biased_loss().settings == SelfTriplet(prior=0.1).settings


def tiny(source, loss=None, **tables):
    relative = {"kind": "InfoNCE", "prior": 0.1, "difficulty": {"kind": "Relative"}}
    train_ = {"method": "two-encoder", "steps": 12, "checkpoint_every": 2, "log_every": 3} | tables.pop("train", {})
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"size": 8, "views": 2, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": loss or relative,
            "train": train_,
            **tables,
        }
    )


@pytest.mark.parametrize("prior", [0.0, 0.1, 0.3])
def test_the_triplets_are_debiased_by_the_prior_of_the_loss(prior, source):
    loss = InfoNCE(0.5, prior=prior, difficulty=Relative())
    assert TwoEncoder(network(0), loss, network(1)).biased_loss.settings == SelfTriplet(prior=prior).settings
    recipe = tiny(source, {"kind": "InfoNCE", "prior": prior, "difficulty": {"kind": "Relative"}})
    assert recipe.build_biased_loss().settings == SelfTriplet(prior=prior).settings
    said = tiny(source, biased={"loss": {"kind": "SelfTriplet", "form": "mean"}})
    assert said.build_biased_loss().settings == SelfTriplet(form="mean").settings
    assert parse_recipe(tomllib.loads(recipe.to_toml())) == recipe


AUTHORS = {"CIFAR-10": (10.0, 0.5, 0.1), "Waterbirds": (1.0, 0.5, 0.1), "ImageNet-100": (1 / 3, 0.07, 0.01)}


@pytest.mark.parametrize("form", ["similarity", "distance"])
@pytest.mark.parametrize("data", AUTHORS)
def test_the_authors_settings_are_keys_of_a_recipe_that_trains(data, form, source, tmp_path):
    """The rate of the biased encoder, both readings of the weight, one prior for both losses."""
    rate, temperature, prior = AUTHORS[data]
    loss = {"kind": "InfoNCE", "temperature": temperature, "prior": prior}
    loss |= {"difficulty": {"kind": "Relative", "form": form}}
    recipe = tiny(source, loss, biased={"rate": rate}, train={"steps": 10, "log_every": 1})
    result = train(recipe, tmp_path / "run", tensorboard=False)
    lines = logs.read_log(tmp_path / "run" / "log.jsonl")
    assert result.finished and len(lines) == 10
    assert all(1 < line["weight_mean"] < 2 and np.isfinite(line["biased_loss"]) for line in lines)


def test_the_recipe_of_the_authors_trains_as_theirs(source, tmp_path):
    keys = [
        "train.steps=10",
        "train.log_every=1",
        "batch.size=8",
        "model.width=4",
        "model.dim=8",
        f"data.source={source}",
    ]
    recipe = load("wcl-author", keys)
    assert recipe.biased.rate == 10 and recipe.loss["prior"] == recipe.build_biased_loss().prior == 0.1
    assert train(recipe, tmp_path / "run", tensorboard=False).finished
    rates = [line["rate"] for line in logs.read_log(tmp_path / "run" / "log.jsonl")]
    assert rates[0] == 1e-3 and rates[-1] == pytest.approx(1e-4), "a tenth after seven tenths"


@pytest.mark.parametrize("weights", ["pairs", "shuffled"])
def test_a_resumed_run_is_bit_identical(source, tmp_path, weights):
    recipe = tiny(source, biased={"weights": weights, "rate": 3.0})
    train(recipe, tmp_path / "whole", tensorboard=False)
    for cut in (3, 7, 8):
        with pytest.raises(Stop):
            train(recipe, tmp_path / "run", resume=(tmp_path / "run").exists(), tensorboard=False, on_step=until(cut))
    train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert (tmp_path / "run/biased.safetensors").read_bytes() == (tmp_path / "whole/biased.safetensors").read_bytes()


def test_the_biased_encoder_is_kept_with_the_run(source, tmp_path):
    recipe = tiny(source, evaluate={"spurious": "domain"})
    outcome = train(recipe, tmp_path / "run", tensorboard=False)
    run, test = open_run_folder(tmp_path / "run"), outcome.samples.part("test")
    kept = embed(run.biased_model(), test)
    assert kept.shape == (len(test), 8) and not np.allclose(kept, embed(run.model(), test))
    last = logs.read_log(tmp_path / "run" / "log.jsonl")[-1]
    assert {"bright / dark", "dark / dark"} <= set(last["weight_by_group"])
    plain = train(tiny(source, {"kind": "InfoNCE"}), tmp_path / "plain", tensorboard=False)
    with pytest.raises(RunError, match="no biased encoder"):
        plain.run.biased_model()


def test_a_missing_column_and_a_column_of_one_group_are_refused(source, tmp_path):
    with pytest.raises(DataError, match="no column 'palce'"):
        train(tiny(source, evaluate={"spurious": "palce"}), tmp_path / "run", tensorboard=False)
    arrays = dict(np.load(source))
    np.savez(tmp_path / "one.npz", **arrays | {"place": np.zeros(len(arrays["label"]), int)})
    with pytest.raises(DataError, match="one group only"):
        train(tiny(tmp_path / "one.npz", evaluate={"spurious": "place"}), tmp_path / "run", tensorboard=False)
    supervised = parse_recipe(
        {"data": {"source": str(source)}, "batch": {"classes": 3}, "evaluate": {"spurious": "palce"}}
    )
    with pytest.raises(DataError, match="no column 'palce'"):
        train(supervised, tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"batch": {"size": 8}}, "batch.views = 2"),
        ({"train": {"method": "supervised"}, "batch": {"classes": 3}}, "needs train.method = 'two-encoder'"),
        ({"loss": {"kind": "ArcFace"}}, "loss over the pairs of a batch"),
        ({"loss": {"kind": "InfoNCE"}, "biased": {"weights": "mean"}}, "\\[biased\\] needs a loss with"),
        ({"biased": {"loss": {"kind": "SelfTriplet", "piror": 0.1}}}, "did you mean 'prior'"),
        ({"jtt": {"copies": 3}}, "\\[jtt\\] needs"),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_line(source, tables, message):
    base = {"batch": {"size": 8, "views": 2}, "train": {"method": "two-encoder"}}
    base |= {"loss": {"kind": "InfoNCE", "difficulty": {"kind": "Relative"}}, "data": {"source": str(source)}}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(base | tables)


def test_rows_are_changed_the_same_way_in_any_company_when_a_pool_is_known():
    pool = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 100.0, 0.0])
    change, x, ids = Augment(noise=0.1, corrupt=0.3, pool=pool), pool[:8] + 0.5, np.arange(8)
    together = change(x, ids, seed=1, epoch=2)
    for k in range(8):
        torch.testing.assert_close(change(x[k : k + 1], ids[k : k + 1], seed=1, epoch=2)[0], together[k])
    noisy = Augment(noise=0.1, pool=pool)(pool.repeat(20, 1), np.arange(1000), seed=0, epoch=0) - pool.repeat(20, 1)
    torch.testing.assert_close(noisy.std(0), 0.1 * pool.std(0), rtol=0.1, atol=1e-6)


def pictures(n=200, side=16):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.3


def changed(x, **options):
    return Augment(**options)(x, np.arange(len(x)), seed=3, epoch=1)


def test_a_crop_keeps_the_asked_share_of_the_area_within_the_picture():
    ramp = torch.linspace(0, 1, 64).expand(300, 1, 64, 64)
    both = torch.cat([ramp, ramp.transpose(2, 3)], 1).contiguous()  # one channel rises along x, one along y
    x = changed(both, crop=(0.25, 0.25), aspect=4 / 3)
    wide, high = x[:, 0, 5, -1] - x[:, 0, 5, 0], x[:, 1, -1, 5] - x[:, 1, 0, 5]
    torch.testing.assert_close(wide * high, torch.full_like(wide, 0.25), rtol=0.1, atol=0)
    ratio = wide / high
    assert 0.7 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.4
    assert x[:, 0].min() < 0.05 and x[:, 0].max() > 0.95


def test_grey_pictures_have_three_equal_channels_and_keep_their_brightness():
    x = pictures()
    grey = changed(x, grey=1.0)
    assert torch.equal(grey[:, 0], grey[:, 1]) and torch.equal(grey[:, 1], grey[:, 2])
    torch.testing.assert_close(grey[:, 0], 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2])
    share = (changed(x, grey=0.2) == grey).flatten(1).all(1).float().mean()
    assert 0.1 < share < 0.3


def test_smoothing_is_a_three_tap_gaussian():
    from mettle.rng import uniform_per_id

    x = torch.zeros(50, 1, 9, 9)
    x[:, 0, 4, 4] = 1
    y = changed(x, blur=1.0)
    width = 0.1 + 1.9 * uniform_per_id(3, 1, np.arange(50), 24)[:, 21]
    tap = np.exp(-1 / (2 * width**2))
    kernel = np.stack([tap, np.ones(50), tap], 1) / (1 + 2 * tap[:, None])
    np.testing.assert_allclose(y[:, 0, 3:6, 3:6], kernel[:, :, None] * kernel[:, None, :], atol=1e-6)
    torch.testing.assert_close(changed(torch.full((9, 1, 5, 5), 0.3), blur=1.0), torch.full((9, 1, 5, 5), 0.3))


def test_jitter_changes_what_it_says_and_nothing_else():
    x = pictures()
    still = changed(x, jitter=(0.4, 0.4, 0.4, 0.1), jitter_share=0.0)
    torch.testing.assert_close(still, x, rtol=0, atol=1e-5)
    brighter = changed(x, jitter=(0.2, 0, 0, 0)) / x
    assert (brighter.flatten(1).std(1) < 1e-5).all() and 0.79 < brighter.min() < 0.9 < 1.1 < brighter.max() < 1.21
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    for options in ((0, 0, 0.3, 0), (0, 0, 0, 0.05)):  # colours change, brightness does not
        y = changed(x, jitter=options)
        assert (y - x).abs().max() > 0.02
        torch.testing.assert_close((y * weights).sum(1), (x * weights).sum(1), rtol=0, atol=2e-3)
    flat = changed(x, jitter=(0, 0.3, 0, 0))
    means = [(v * weights).sum(1).mean((1, 2)) for v in (x, flat)]
    torch.testing.assert_close(*means, rtol=0, atol=2e-3)
    assert changed(x[:, :1], jitter=(0.4, 0.4, 0.4, 0.1)).shape == (200, 1, 16, 16)


# Just train twice.


def classifier(source, copies=2, **train_options):
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"size": 12, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": {"kind": "NormFace", "scale": 8.0},
            "jtt": {"first": 0.5, "copies": copies},
            "train": {"method": "jtt", "steps": 8, "checkpoint_every": 2, "log_every": 4, **train_options},
        }
    )


def pictured(count=10):
    rows = np.arange(count, dtype=np.float32)[:, None].repeat(4, 1)
    return Samples.of(FeatureArray(rows), np.arange(count) % 2, ids=np.arange(count) * 7 + 2**40)


def test_copies_are_changed_each_in_its_own_way_and_batches_name_the_samples():
    loader = Loader(pictured(), UpsampledSampler(10, np.array([2, 7]), 3, 4, 1), Augment(noise=0.1), seed=5)
    found = list(loader.batches(0, 4))  # one epoch
    ids = torch.cat([b.ids for b in found])
    seen = np.bincount((ids.numpy() - 2**40) // 7, minlength=10)
    assert seen.tolist() == [1, 1, 4, 1, 1, 1, 1, 4, 1, 1]
    x = torch.cat([b.inputs for b in found])
    for sample in (2, 7):
        mine = x[ids == 2**40 + 7 * sample]
        assert len(mine) == 4 and len(mine.unique(dim=0)) == 4
        assert ((mine - sample).abs() < 1).all()
    again = torch.cat([b.inputs for b in loader.batches(2, 4)])
    assert torch.equal(again, x[8:]), "a pure function of (seed, epoch, sample, copy)"
    plain = Loader(pictured(), UpsampledSampler(10, np.array([], int), 3, 5, 1), Augment())
    assert sorted(torch.cat([b.ids for b in plain.batches(0, 2)]).tolist()) == pictured().ids.tolist()


def test_jtt_trains_twice_and_resumes_bit_identically_in_either_stage(source, tmp_path):
    recipe = classifier(source)
    outcome = train(recipe, tmp_path / "whole", tensorboard=False)
    assert any("training samples wrong" in note for note in outcome.notes)
    stages = iter([3, 6])  # of the first stage (4 steps), then of the second

    class Cut:
        def __init__(self):
            self.at = next(stages)
            self.count = 0

        def __call__(self, step, line):
            self.count += 1
            if self.count == self.at:
                raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            train(recipe, tmp_path / "run", resume=(tmp_path / "run").exists(), tensorboard=False, on_step=Cut())
    train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0, "nothing to repeat.*Lower jtt.first"),
        (
            6,
            r"got 6 of 10 training samples wrong \(60.0 %\): .* plain training. Raise jtt.first or train.steps",
        ),
        (10, "close to plain training"),
    ],
)
def test_an_error_set_that_means_little_is_told_with_the_keys_to_change(wrong, said):
    assert re.search(said, describe_error_set(wrong, 10, 4))


def test_a_minority_of_mistakes_is_only_counted():
    assert describe_error_set(5, 10, 4) == "the first classifier (4 steps) got 5 of 10 training samples wrong (50.0 %)"


def test_the_error_set_is_told_before_the_second_training(source, tmp_path):
    told = []

    def progress(step, line):
        told.append(step)

    outcome = train(
        classifier(source, rate=1e-9), tmp_path / "run", tensorboard=False, on_step=progress, on_note=told.append
    )
    notes = [k for k, note in enumerate(told) if isinstance(note, str) and "training samples wrong" in note]
    assert notes == [4], "after the four steps of the first classifier"
    assert told[4] in outcome.notes and "jtt.first" in told[4]


def test_without_copies_it_is_an_ordinary_classifier(source, tmp_path):
    train(classifier(source, copies=0), tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run" / "first").exists()


def test_mistakes_are_those_of_the_classifier(source):
    from mettle.losses import Softmax

    samples = read(source).part("train")
    model = Embedder(EmbedderSpec(width=2, depth=1, dim=4), (1, 12, 12))
    classes = torch.from_numpy(np.unique(samples.labels))
    loss = Softmax(len(classes), 4)
    z = torch.from_numpy(embed(model, samples))
    each = torch.stack([loss.per_anchor(z, torch.full((len(z),), c)) for c in range(len(classes))], 1)
    wrong = np.flatnonzero(each.argmin(1).detach().numpy() != np.searchsorted(classes.numpy(), samples.labels))
    assert find_misclassified(model, loss, classes, samples).tolist() == wrong.tolist()


def test_jtt_needs_a_classifier(source):
    with pytest.raises(RecipeError, match="one vector per class"):
        load("jtt", ["loss={kind='SupCon'}"])


def test_small_and_large_pictures_have_the_published_changes():
    from mettle.data.transforms import find_preset

    assert find_preset("large") == Augment(crop=(0.7, 1.0), aspect=4 / 3, flip=0.5)
    small = find_preset("small")
    assert (small.crop, small.flip, small.jitter, small.jitter_share) == ((0.08, 1.0), 0.5, (0.4, 0.4, 0.4, 0.1), 0.8)
    assert (small.grey, small.blur) == (0.2, 0.5)
