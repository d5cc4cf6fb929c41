"""Self-distillation of similarities: its formula, its gradient, its teacher."""

import math

import numpy as np
import pytest
import torch

from mettle.errors import InputError, RecipeError
from mettle.losses import SupCon
from mettle.train import Supervised, load
from mettle.train.methods.distillation import DistillationSettings, similarity_distillation
from mettle.train.recipe import parse_recipe

from .test_base import labelled, network


def row(z, i, temperature):
    """The softmax over all others of the cosines of row i, as loops."""
    lengths = [math.sqrt(sum(float(v) ** 2 for v in one)) for one in z]
    cosines = {
        j: sum(float(a) * float(b) for a, b in zip(z[i], z[j], strict=True)) / lengths[i] / lengths[j]
        for j in range(len(z))
        if j != i
    }
    total = sum(math.exp(c / temperature) for c in cosines.values())
    return {j: math.exp(c / temperature) / total for j, c in cosines.items()}


def embeddings(seed, n=6, dim=3):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_the_distance_is_the_mean_divergence_of_the_rows(temperature):
    z, teacher, total = embeddings(0), embeddings(1, dim=5), 0.0
    for i in range(6):
        p, q = row(teacher, i, temperature), row(z, i, temperature)
        total += sum(p[j] * math.log(p[j] / q[j]) for j in p)
    np.testing.assert_allclose(similarity_distillation(z, teacher, temperature).item(), total / 6, rtol=1e-9)


def test_the_gradient_is_the_difference_of_the_rows():
    """Of unit vectors, to first order: dL = Σ_ij (q_ij − p_ij) ds_ij / (n τ)."""
    z, teacher = embeddings(0).requires_grad_(), embeddings(1)
    similarity_distillation(z, teacher, 0.2).backward()
    x = z.detach().requires_grad_()
    unit = torch.nn.functional.normalize(x, dim=1)
    factor = torch.zeros(6, 6, dtype=torch.float64)
    for i in range(6):
        p, q = row(teacher, i, 0.2), row(z.detach(), i, 0.2)
        for j in p:
            factor[i, j] = (q[j] - p[j]) / (6 * 0.2)
    (factor * (unit @ unit.T)).sum().backward()
    torch.testing.assert_close(z.grad, x.grad)
    assert torch.autograd.gradcheck(lambda z: similarity_distillation(z, teacher, 0.2), z)


def test_a_teacher_with_the_same_similarities_teaches_nothing():
    z = embeddings(0).requires_grad_()
    turn = torch.linalg.qr(embeddings(2, 3))[0]
    for teacher in (z, 2 * z.detach() @ turn):
        value = similarity_distillation(z, teacher)
        (slope,) = torch.autograd.grad(value, z)
        assert abs(value.item()) < 1e-12 and slope.abs().max() < 1e-12
    assert similarity_distillation(z[:1], z[:1]).item() == 0.0


def test_the_teacher_is_the_average_from_when_it_has_begun():
    torch.manual_seed(0)
    settings = {"ema": 0.5, "ema_start": 0.5, "distill": DistillationSettings(2.0)}
    plain, taught = (Supervised(network(), SupCon(), **more) for more in ({"ema": 0.5, "ema_start": 0.5}, settings))
    for k in range(6):
        if k == 4:
            x, teacher = labelled(k).inputs, taught.final_module().eval()
            assert teacher is not taught.model
            with torch.no_grad():
                taught.model.train(), plain.model.load_state_dict(taught.model.state_dict())
                distance = similarity_distillation(taught.model(x), teacher(x))
                taught.model.load_state_dict(plain.model.state_dict())  # statistics of batch norms too
            assert float(distance) > 0
        found = [method.step(labelled(k), 1e-2, k / 6) for method in (plain, taught)]
        told = found[1].lazy_stats()
        assert ("distillation" in told) == (k > 3), "the first average is that of the fourth step"
        if k <= 3:
            assert found[0].loss == found[1].loss
        if k == 4:
            assert told["distillation"] == pytest.approx(float(distance), rel=1e-4)
            assert found[1].loss == pytest.approx(found[0].loss + 2 * float(distance), rel=1e-5)


@pytest.mark.parametrize(
    ("train_table", "said"),
    [
        ({"distill": 1.0}, "set train.ema, such as 0.995"),
        ({"distill": 1.0, "ema": 0.9, "method": "jtt"}, "train.distill needs train.method = 'supervised', got 'jtt'"),
        ({"distill": -1.0, "ema": 0.9}, "train.distill"),
        ({"distill": 1.0, "ema": 0.9, "distill_temperature": 0.0}, "train.distill_temperature"),
        ({"ema": 0.9, "ema_start": 1.0}, "train.ema_start"),
    ],
)
def test_what_means_nothing_is_refused(train_table, said):
    with pytest.raises(RecipeError, match=said):
        parse_recipe({"train": train_table, "loss": {"kind": "NormFace"}})


@pytest.mark.parametrize("key", ["train.ema_start=0.5", "train.distill_temperature=0.2"])
def test_an_override_that_decides_nothing_is_refused(key):
    with pytest.raises(RecipeError, match="changes nothing here"):
        load("supcon", [key])


def test_wrong_settings_are_named():
    with pytest.raises(InputError, match="weight of a distillation must be above 0, got 0"):
        DistillationSettings(0.0)
    with pytest.raises(InputError, match="distill= needs ema="):
        Supervised(network(), SupCon(), distill=DistillationSettings(1.0))
