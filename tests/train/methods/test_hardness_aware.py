"""HDML: who trains what, its identities, its batches, resuming."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mettle.data.loader import Batch
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Relative, Threshold, curriculum
from mettle.errors import DataError, InputError, NumericError, RecipeError
from mettle.losses import (
    ArcFace,
    Circle,
    Contrastive,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    Margin,
    MultiSimilarity,
    NPair,
    SelfTriplet,
    SmoothAP,
    SupCon,
    Triplet,
)
from mettle.model import Embedder, EmbedderSpec
from mettle.train import HardnessAware, builtin_recipes, load
from mettle.train import callbacks as logs
from mettle.train.from_recipe import train
from mettle.train.methods.base import LossTerms
from mettle.train.methods.hardness_aware import Synthesis, WindowMean
from mettle.train.methods.tuple_layouts import tuple_layout
from mettle.train.recipe import parse_recipe
from oracles import synthesis as oracle

from ..conftest import make_npz
from ..test_from_recipe import Stop, content, until

TRIPLET = Triplet(margin=1.0, squared=True, normalise=False)
NPAIR = NPair(norm_weight=0.01)


def inputs(n=12, seed=0, width=6):
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(labels=(7, 7, 3, 3, 9, 9, 1, 1, 4, 4, 6, 6), x=None):
    labels = torch.tensor(labels)
    x = inputs(len(labels)) if x is None else x
    return Batch(x, labels, torch.arange(len(labels)), 0, 0, 0.0)


def method(loss=TRIPLET, *, unit=False, **options):
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4, unit=unit), (6,)).double()
    found = HardnessAware(loss, model, classes=torch.tensor([1, 3, 4, 6, 7, 9]), synthesis=Synthesis(**options))
    # As in the middle of a run: something is pulled, and both kinds of tuples count.
    for window, value in ((found.average_metric, 60.0), (found.average_generator, 2e4)):
        window.mean = window.first = value
    return found


def test_a_label_outside_the_classes_is_refused_by_name():
    with pytest.raises(InputError, match="label 8 is none of the 6 classes"):
        method().step(batch((7, 7, 3, 3, 8, 8)), 1e-3, 0.0)


class Away(torch.Tensor):
    """Labels that say they are on a GPU, until they are brought home."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("loss", [TRIPLET, NPAIR], ids=["triplet", "npair"])
def test_labels_on_a_gpu_are_refused_by_name_before_they_index_anything(loss, monkeypatch):
    """There an index that is none ends the process; here it would be an IndexError of torch's."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)  # asked where a GPU seems to be
    strange = batch((7, 7, 3, 3, 8, 8))
    aware, away = method(loss), strange.labels.as_subclass(Away)
    assert away.is_cuda
    with pytest.raises(InputError, match="label 8 is none of the 6 classes"):
        aware.step(replace(strange, labels=away), 1e-3, 0.0)
    fine = batch()
    assert aware.step(replace(fine, labels=fine.labels.as_subclass(Away)), 1e-3, 0.0).applied


def arrays(module):
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("loss", [TRIPLET, NPAIR], ids=["triplet", "npair"])
def test_all_three_losses_are_those_of_the_oracle(loss):
    aware, b = method(loss, hidden=5), batch()
    found = aware.terms(b)
    aware.model.train()
    with torch.no_grad():
        y = aware.model.features(b.inputs)
        z = aware.model.head(y).numpy()
    y, level, weight = y.numpy(), oracle.decay(90, 60), oracle.decay(1e4, 2e4)
    head, generator = arrays(aware.head), arrays(aware.generator)
    embedding = arrays(aware.model.head)

    def embed(features):
        return features @ embedding["weight"].T + embedding["bias"]

    def logits(features):
        return features @ head["weight"].T + head["bias"]

    labels = np.searchsorted([1, 3, 4, 6, 7, 9], b.labels.numpy())
    anchors, positives = np.arange(0, 12, 2), np.arange(1, 12, 2)
    if loss is TRIPLET:
        negatives = np.roll(anchors, -1)  # the next class of the batch, whatever its name
        triples = np.stack([anchors, positives, negatives], 1)
        made = np.array([oracle.pulled(z[a], z[p], z[n], level) for a, p, n in triples])
        back = oracle.generate(np.concatenate([z, made]), generator)
        zb = embed(back)
        real = oracle.triplet_sum([z[t] for t in triples], 1.0)
        synthetic = oracle.triplet_sum([(zb[a], zb[p], zb[12 + k]) for k, (a, p, _) in enumerate(triples)], 1.0)
        used = np.concatenate([anchors, positives, np.arange(12, 18)])
        soft = oracle.cross_entropy(logits(back[used]), [*labels[anchors], *labels[positives], *labels[negatives]])
    else:
        order = np.argsort(labels[anchors])
        anchors, positives = anchors[order], positives[order]
        made = [oracle.pulled(z[a], z[p], z[n], level) for a, p in np.stack([anchors, positives], 1) for n in positives]
        back = oracle.generate(np.concatenate([z, np.array(made)]), generator)
        zb = embed(back)
        real = oracle.npair_rows(z[anchors], [z[positives]] * 6, 0.01)
        bank = zb[12:].reshape(6, 6, -1)
        synthetic = oracle.npair_rows(zb[anchors], bank, 0.01)
        positives_only = oracle.npair_rows(zb[anchors], bank, 0.01, "positives")
        assert method(NPAIR, hidden=5, norm_rows="positives").terms(b).synthetic.item() == pytest.approx(positives_only)
        assert positives_only != pytest.approx(synthetic, rel=1e-6)
        soft = oracle.cross_entropy(logits(back[12:]), np.tile(labels[positives], 6))
        soft += oracle.cross_entropy(logits(back[anchors]), labels[anchors])
    missed = ((back[:12] - y) ** 2).sum()
    assert found.plain.item() == pytest.approx(real, rel=1e-9)
    assert found.synthetic.item() == pytest.approx(synthetic, rel=1e-9)
    assert found.metric.item() == pytest.approx(weight * real + (1 - weight) * synthetic, rel=1e-9)
    assert found.generator.item() == pytest.approx(0.5 * missed + 0.5 * 1e4 * soft, rel=1e-9)
    assert found.head.item() == pytest.approx(oracle.cross_entropy(logits(y), labels), rel=1e-9)
    assert found.metric.dtype == torch.float64


PAIRWISE = {
    "supcon": (SupCon(0.5), oracle.supcon_row(0.5)),
    "contrastive": (Contrastive(0.2, 1.6), oracle.contrastive_row(0.2, 1.6)),
}


@pytest.mark.parametrize("each", [2, 3, 4])
@pytest.mark.parametrize("name", PAIRWISE)
def test_any_pairwise_loss_is_that_of_the_oracle(name, each):
    """Every anchor against the positives of all pairs: its class's as they are, the others pulled for it alone."""
    loss, row = PAIRWISE[name]
    aware = method(loss, hidden=5)
    b = batch(np.repeat([7, 3, 9], each))
    found = aware.terms(b)
    with torch.no_grad():
        y = aware.model.features(b.inputs)
        z = aware.model.head(y).numpy()
    starts = [each * k + i for k in range(3) for i in range(0, each - 1, 2)]
    anchors, positives = np.array(starts), np.array(starts) + 1
    classes, m, level = b.labels.numpy()[anchors], len(starts), oracle.decay(90, 60)
    bank = oracle.bank_of(z[anchors], z[positives], classes, level)
    back = oracle.generate(np.concatenate([z, bank.reshape(m * m, -1)]), arrays(aware.generator))
    embedding = arrays(aware.model.head)
    zb = back @ embedding["weight"].T + embedding["bias"]
    real = oracle.pairwise_mean(z[anchors], [z[positives]] * m, classes, row)
    synthetic = oracle.pairwise_mean(zb[anchors], zb[3 * each :].reshape(m, m, -1), classes, row)
    assert found.plain.item() == pytest.approx(real, rel=1e-9)
    assert found.synthetic.item() == pytest.approx(synthetic, rel=1e-9)
    assert found.synthetic.item() != pytest.approx(real, rel=1e-3)
    other = classes[:, None] != classes[None, :]
    moved = [[not np.allclose(bank[i][j], z[positives[j]]) for j in range(m)] for i in range(m)]
    assert found.statistics["pulled"].item() == pytest.approx(np.mean(np.array(moved)[other]))
    assert not np.array(moved)[~other].any() and np.array(moved).any()


MEMBERS = {
    "contrastive": Contrastive(),
    "contrastive l1": Contrastive(normalise=False, l1=True),
    "supcon": SupCon(),
    "difficulty-aware": DASupCon(),
    "as its author coded it": DASupCon(preset="author"),
    "infonce": InfoNCE(prior=0.1, difficulty=Importance(1.0)),
    "multi-similarity": MultiSimilarity(),
    "circle": Circle(),
    "margin": Margin(boundary="class", num_classes=6),
    "smooth ap": SmoothAP(0.1),
    "self triplet": SelfTriplet(),
    "hardest triplets": Triplet(mining="hardest"),
    "semihard triplets": Triplet(mining="semihard"),
    "weighed triplets": Triplet(difficulty=Hardest()),
    "summed": Contrastive(reduction="sum"),
    "fading in": SupCon(difficulty=curriculum(Threshold(), end=0.5)),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_pairwise_losses_of_every_kind_train(name):
    aware = method(MEMBERS[name])
    before = [p.detach().clone() for p in aware.model.parameters()]
    result = aware.step(batch((7, 7, 7, 7, 3, 3, 3, 3, 9, 9, 9, 9)), 1e-3, 0.25)
    facts = result.lazy_stats()
    assert result.applied and np.isfinite([facts["loss_real"], facts["loss_synthetic"]]).all()
    assert any((p != q).any() for p, q in zip(aware.model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", MEMBERS)
def test_row_11_holds_for_every_pairwise_loss(name):
    """λ = 1 and no generator: synthetic tuples are the real ones, value and gradient."""
    aware = method(MEMBERS[name], level=1.0, generator=False)
    found = aware.terms(batch((7, 7, 7, 7, 3, 3, 3, 3, 9, 9, 9, 9)))
    parameters = list(aware.model.parameters())
    for g, e in zip(
        torch.autograd.grad(found.synthetic, parameters, retain_graph=True, allow_unused=True),
        torch.autograd.grad(found.plain, parameters, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.synthetic, found.plain, rtol=1e-9, atol=1e-9)


def test_real_tuples_of_a_pairwise_loss_are_anchors_against_positives():
    loss = SupCon(0.3)
    found, labels = method(loss).terms(batch()), batch().labels
    z = found.embeddings
    torch.testing.assert_close(found.plain, loss(z[0::2], labels[0::2], ref=(z[1::2], labels[1::2])))


def test_a_curriculum_follows_the_progress_of_training():
    hard = Threshold(beta=20.0, negative=-1.0)
    fading = method(SupCon(difficulty=curriculum(hard)))
    values = [fading.terms(batch(), done).plain.item() for done in (0.0, 1.0)]
    wanted = [method(SupCon(difficulty=one)).terms(batch()).plain.item() for one in (None, hard)]
    assert values == pytest.approx(wanted) and values[0] != pytest.approx(values[1])


@pytest.mark.parametrize("loss", [TRIPLET, NPAIR, SupCon()], ids=["triplet", "npair", "supcon"])
def test_who_trains_what(loss):
    """Each loss alone moves its own network and no other, though J(T̃) passes through the generator."""
    for own, name in (("metric", "model"), ("generator", "generator"), ("head", "head")):
        aware = method(loss)
        aware.optimizer.backward({name: getattr(aware.terms(batch()), own)})
        for other, module in aware.modules.items():
            moved = [p.grad is not None and bool((p.grad != 0).any()) for p in module.parameters()]
            assert any(moved) == (other == name), f"{own} on {other}"


def test_the_three_gradients_of_a_step_are_those_of_each_loss_alone():
    aware = method()
    found = aware.terms(batch())
    aware.optimizer.backward({"model": found.metric, "generator": found.generator, "head": found.head})
    together = {n: [p.grad.clone() for p in m.parameters()] for n, m in aware.modules.items()}
    for name, own in (("model", "metric"), ("generator", "generator"), ("head", "head")):
        alone = method()
        parameters = list(alone.modules[name].parameters())
        expected = torch.autograd.grad(getattr(alone.terms(batch()), own), parameters)
        for g, e in zip(together[name], expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


def test_synthetic_tuples_reach_the_backbone_through_generator_and_augmentor():
    """Against differences: the gradient of J(T̃) counts what moving the backbone does to d⁺, d⁻ and the generator."""
    aware = method(hidden=5)
    weight = aware.model.head.weight
    (exact,) = torch.autograd.grad(aware.terms(batch()).synthetic, weight)
    for i, j in ((0, 0), (2, 5), (3, 1)):
        with torch.no_grad():
            values = []
            for step in (1e-6, -2e-6):
                weight[i, j] += step
                values.append(aware.terms(batch()).synthetic.item())
            weight[i, j] += 1e-6
        assert exact[i, j].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-5)
    assert exact.abs().max() > 0


def test_a_batch_norm_before_the_embedding_layer_is_shared_and_keeps_real_statistics():
    aware = method(hidden=5)
    norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)
    aware.model.head = torch.nn.Sequential(norm, aware.model.head)
    aware.model.train()
    found = aware.terms(batch())
    with torch.no_grad():
        y = aware.model.features(batch().inputs)
    torch.testing.assert_close(norm.running_mean, 0.1 * y.mean(0))
    assert norm.momentum == 0.1
    # Synthetic features have statistics of their own, and the same weights.
    grads = torch.autograd.grad(found.synthetic, [norm.weight, norm.bias])
    assert all((g != 0).any() for g in grads)


def test_levels_in_the_exponents_are_constants():
    """J_avg and J_gen come from windows: the loss of this very batch changes no weight of it."""
    aware = method()
    before = aware.levels()
    aware.terms(batch(x=100 * inputs()))
    assert aware.levels() == before


def test_row_11_alpha_0_without_a_generator_is_the_plain_loss():
    for loss in (TRIPLET, NPAIR):
        found = method(loss, alpha=0.0, generator=False).terms(batch())
        torch.testing.assert_close(found.synthetic, found.plain, rtol=1e-12, atol=1e-12)


def test_row_12_beta_0_is_the_plain_metric_loss_value_and_gradient():
    for loss in (TRIPLET, NPAIR):
        aware = method(loss, beta=0.0)
        found = aware.terms(batch())
        assert found.metric.item() == found.plain.item()
        parameters = list(aware.model.parameters())
        for g, e in zip(
            torch.autograd.grad(found.metric, parameters, retain_graph=True, allow_unused=True),
            torch.autograd.grad(found.plain, parameters, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(g, e)


def test_row_12_a_perfect_generator_leaves_only_the_synthetic_loss():
    aware = method()
    aware.average_generator.mean = 1e-6
    found = aware.terms(batch())
    assert found.metric.item() == found.synthetic.item()


def test_the_plain_n_pair_loss_is_that_of_the_losses_room():
    found = method(NPAIR).terms(batch())
    torch.testing.assert_close(found.plain, NPAIR(found.embeddings, batch().labels), rtol=1e-12, atol=1e-12)


def test_one_triple_is_that_of_the_losses_room():
    """Of one anchor, one positive, one negative, and nobody else."""
    z = inputs(3, width=4)
    aware = method()
    rows = {"anchor": torch.tensor([0]), "positive": torch.tensor([1]), "negative": torch.tensor([2])}
    for loss in (TRIPLET, Triplet(0.3), Triplet(0.3, soft=True, squared=True)):
        tuples = tuple_layout(loss)
        anchors = loss.per_anchor(z, torch.tensor([0, 0, 1]))
        torch.testing.assert_close(tuples.tuple_loss(z, z, z[2:], rows), anchors[0], rtol=1e-12, atol=1e-12)
    assert aware.tuples.share_movable(z, rows).item() in (0.0, 1.0)


@pytest.mark.parametrize("each", [2, 3, 4])
def test_triples_of_a_batch_are_triples(each):
    labels = torch.tensor([5, 2, 8, 0]).repeat_interleave(each)[torch.randperm(4 * each)]
    rows = method().tuples.tuple_rows(labels)
    a, p, n = (labels[rows[name]] for name in ("anchor", "positive", "negative"))
    assert len(a) == 4 * (each // 2)
    assert (a == p).all() and (a != n).all()
    assert (rows["anchor"] != rows["positive"]).all()
    assert len(torch.cat([rows["anchor"], rows["positive"]]).unique()) == 2 * len(a)


def test_the_next_class_is_that_of_the_batch_not_of_the_alphabet():
    rows = method().tuples.tuple_rows(torch.tensor([5, 5, 2, 2, 8, 8]))
    assert rows["negative"].tolist() == [2, 4, 0]


def test_coincident_embeddings_train_on():
    for loss in (TRIPLET, NPAIR):
        aware = method(loss)
        result = aware.step(batch(x=torch.zeros(12, 6, dtype=torch.float64)), 1e-3, 0.0)
        assert result.applied and np.isfinite(result.gradient)


def test_a_step_with_a_broken_input_changes_nothing():
    aware = method()
    before = {k: v.clone() for m in aware.modules.values() for k, v in m.named_parameters()}
    broken = inputs()
    broken[3, 2] = torch.nan
    result = aware.step(batch(x=broken), 1e-3, 0.0)
    assert not result.applied and aware.average_metric.count == 0
    after = {k: v for m in aware.modules.values() for k, v in m.named_parameters()}
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_what_is_averaged_is_as_asked():
    aware, metric = method(l2=0.1), method(l2=0.1, javg="metric")
    weight = oracle.decay(1e4, 2e4)
    linear = [m for m in aware.model.modules() if isinstance(m, torch.nn.Linear)]
    squares = sum((p.detach() ** 2).sum().item() for m in linear for p in m.parameters()) / 2
    plain = aware.terms(batch()).plain.item()
    aware.step(batch(), 1e-3, 0.0)
    metric.step(batch(), 1e-3, 0.0)
    assert aware.average_metric.total == pytest.approx(weight * (plain + 0.1 * squares), rel=1e-5)
    assert metric.average_metric.total == pytest.approx(plain, rel=1e-5)


def test_the_l2_term_is_that_of_weights_and_biases_without_norms():
    """Published: factor · ½ Σ|v|² over backbone and embedding layer, inside the real loss, so that it fades with it."""
    aware = method(l2=0.1)
    norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)
    aware.model.head = torch.nn.Sequential(norm, aware.model.head)
    with torch.no_grad():
        norm.weight.mul_(100)
        linear = [m for m in aware.model.modules() if isinstance(m, torch.nn.Linear)]
        squares = sum((m.weight.square().sum() + m.bias.square().sum()).item() for m in linear) / 2
    assert len(linear) == 2
    found, weight = aware.terms(batch()), oracle.decay(1e4, 2e4)
    assert (found.real - found.plain).item() == pytest.approx(0.1 * squares)
    mixed = weight * (found.plain + 0.1 * squares) + (1 - weight) * found.synthetic
    assert found.metric.item() == pytest.approx(mixed.item())


@pytest.mark.parametrize("javg", ["repo", "metric"])
def test_lambda_of_a_history_written_by_hand(javg):
    """Published units: alpha = 90 against sums over 40 triples, beta = 1e4 against sums over 1,024 features."""
    steps = 11
    plain = [60 - 4.5 * k for k in range(steps)]
    real = [value + 12.0 for value in plain]
    made = [1.5e5 / (1 + k) for k in range(steps)]
    wanted = oracle.levels(list(zip(real, plain, strict=True)), made, 90, 1e4, 4, javg)
    aware = method(window=4, javg=javg)
    aware.average_metric, aware.average_generator = WindowMean(4), WindowMean(4)
    found = [(aware.levels()["lambda"], aware.levels()["weight_real"])]
    for k in range(steps):
        losses = {"real": real[k], "plain": plain[k], "generator": made[k]}
        details = SimpleNamespace(**{name: torch.tensor(value, dtype=torch.float64) for name, value in losses.items()})
        aware.after_step([LossTerms({}, torch.zeros(1), details=details)])
        found.append((aware.levels()["lambda"], aware.levels()["weight_real"]))
    assert np.array(found) == pytest.approx(np.array(wanted), rel=1e-6)
    # After two windows: the mean of steps 4 to 7, times the weight of the real tuples where the program averages that.
    weight = math.exp(-1e4 / (sum(made[:4]) / 4))
    mean = sum(plain[4:8]) / 4 if javg == "metric" else weight * sum(real[4:8]) / 4
    assert found[8][0] == pytest.approx(math.exp(-90 / mean), rel=1e-6)
    assert found[0][0] == pytest.approx(1, abs=1e-4) and found[8][0] < 0.2


def test_every_step_says_lambda_and_both_weights():
    facts = method().step(batch(), 1e-3, 0.0).lazy_stats()
    assert facts["lambda"] == oracle.decay(90, 60)
    assert facts["weight_real"] == oracle.decay(1e4, 2e4)
    assert facts["weight_real"] + facts["weight_synthetic"] == 1
    for key in (
        "loss_real",
        "loss_synthetic",
        "loss_generator",
        "reconstruction",
        "head_real",
        "head_synthetic",
        "pulled",
    ):
        assert np.isfinite(facts[key])
    json.dumps(facts)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (ArcFace(6, 4), "for a loss over the pairs of a batch, got ArcFace"),
        (lambda z, y: z.sum(), "for a loss over the pairs of a batch, got function"),
        (NPair(difficulty=Hardest()), "NPair harder itself: leave it without a difficulty"),
        (Triplet(reduction="sum"), "reduces Triplet itself: reduction must be 'mean', got 'sum'"),
        (SupCon(reduction="none"), "SupCon has reduction 'none'"),
        (LiftedStructure(), "gives LiftedStructure negatives as references of each anchor: the lifted structured loss"),
        (InfoNCE(difficulty=Relative()), "compares two encoders, of which HardnessAware has one"),
        (SupCon(difficulty=AdaptiveThreshold()), "AdaptiveThreshold follows the pairs of a whole batch"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        HardnessAware(loss, method().model, classes=torch.arange(3))


def test_a_class_with_one_sample_is_refused():
    with pytest.raises(InputError, match="exactly two rows"):
        method(NPAIR).terms(batch((7, 7, 3, 3, 9, 9, 1, 1, 4, 4, 6, 9)))
    with pytest.raises(InputError, match="P classes x K samples"):
        method().terms(batch((7, 7, 3, 3, 9, 9, 1, 1, 4, 4, 6, 9)))


def tiny(source, loss=None, synthesis=None, **train_options):
    loss = loss or {"kind": "Triplet", "margin": 1.0, "squared": True, "normalise": False}
    plan = {"alpha": 1.0, "alpha_mode": "relative", "beta": 0.1, "beta_mode": "relative", "window": 3, "hidden": 16}
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 5, "samples": 2, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8, "unit": False},
            "loss": loss,
            "synthesis": plan | (synthesis or {}),
            "train": {"method": "hardness-aware", "steps": 12, "checkpoint_every": 2, "log_every": 3, **train_options},
        }
    )


@pytest.mark.parametrize("kind", ["Triplet", "NPair", "SupCon"])
def test_a_resumed_run_is_bit_identical(source, tmp_path, kind):
    recipe = tiny(source, None if kind == "Triplet" else {"kind": kind})
    train(recipe, tmp_path / "whole", tensorboard=False)
    for cut in (3, 7, 8):
        with pytest.raises(Stop):
            train(recipe, tmp_path / "run", resume=(tmp_path / "run").exists(), tensorboard=False, on_step=until(cut))
    train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    lines = logs.read_log(tmp_path / "run" / "log.jsonl")
    assert lines[0]["lambda"] == 1.0 and lines[-1]["lambda"] < 1.0, "the windows must matter for this test to"


@pytest.mark.parametrize(
    "ablation",
    [{"soft": 0.0}, {"soft": 1.0}, {"level": 0.5}, {"generator": False}, {"level": 1.0}],
    ids=["without softmax", "without reconstruction", "fixed lambda", "augmentor only", "generator only"],
)
def test_ablations_are_one_line_of_a_recipe(source, tmp_path, ablation):
    train(tiny(source, synthesis=ablation, steps=8), tmp_path / "run", tensorboard=False)
    last = logs.read_log(tmp_path / "run" / "log.jsonl")[-1]
    if "level" in ablation:
        assert last["lambda"] == ablation["level"]
    if ablation.get("generator") is False:
        assert last["weight_synthetic"] == 1.0 and last["loss_generator"] == 0.0


def test_bfloat16_trains_and_losses_stay_single(source, tmp_path):
    train(tiny(source, steps=4, precision="bfloat16"), tmp_path / "run", tensorboard=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": {"kind": "Softmax"}}, "for a loss over the pairs of a batch, got Softmax"),
        ({"loss": {"kind": "LiftedStructure"}}, "LiftedStructure negatives as references"),
        ({"synthesis": {"norm_rows": "all"}}, "norm_rows"),
        ({"synthesis": {"alhpa": 1}}, "did you mean 'alpha'"),
        ({"synthesis": {"window": 0}}, "window"),
        ({"batch": {"samples": 3}, "loss": {"kind": "NPair"}}, "batch.samples = 2"),
        ({"train": {"method": "supervised"}}, "needs train.method = 'hardness-aware'"),
        ({"batch": {"views": 2}}, "batch.views does not apply"),
    ],
)
def test_a_recipe_that_does_not_fit_is_one_line(source, change, message):
    content_ = tiny(source).model_dump(exclude_none=True)
    for table, keys in change.items():
        content_[table] = keys if table == "loss" else content_[table] | keys
    with pytest.raises(RecipeError, match=message):
        parse_recipe(content_)


def test_npair_refuses_other_batches_in_every_method():
    with pytest.raises(RecipeError, match=r"batch\.samples = 2"):
        load("npair", ["batch.samples=4"])


def test_classes_of_one_sample_cannot_fill_an_n_pair_batch(tmp_path):
    source = make_npz(tmp_path / "single.npz", each=1)
    with pytest.raises(DataError, match="two or more samples"):
        train(tiny(source, {"kind": "NPair"}), tmp_path / "run", tensorboard=False)


def test_a_diverging_run_names_its_samples_and_keeps_its_checkpoint(source, tmp_path, monkeypatch):
    calls, original = iter(range(100)), Triplet.margin_violation

    def broken(self, gap):
        return original(self, gap) * (float("nan") if next(calls) >= 8 else 1.0)

    monkeypatch.setattr(Triplet, "margin_violation", broken)
    with pytest.raises(NumericError, match=r"diverged.*samples \["):
        train(tiny(source), tmp_path / "run", tensorboard=False)
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", ["triplet", "npair"])
def test_plain_and_hardness_aware_recipes_share_data_model_and_loss(kind):
    plain, aware = load(kind), load(f"hdml-{kind}")
    for table in ("data", "batch", "model", "loss"):
        assert getattr(plain, table) == getattr(aware, table)
    assert aware.train.method == "hardness-aware" and "triplet-hard" in builtin_recipes()
