"""Losses over given pairs and triplets: oracles, gradients, identities, weights, broken input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mettle.errors import InputError
from mettle.losses import SimilarityClassification, SimilarityRanking, SimilarityRegression, SupCon
from oracles import similarity as oracle

MEASURES = ["cosine", "dot", "squared", "euclidean", "l1"]
FORMS = ["hinge", "logistic", "softmax"]


def rows(k: int, n: int = 7, d: int = 4, seed: int = 0, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(k)]


def grades(measure: str, n: int = 7) -> torch.Tensor:
    spread = torch.linspace(-1, 1, n, dtype=torch.float64)
    return spread if measure == "cosine" else 3 * spread if measure == "dot" else 2 * spread - 2


def every() -> dict[str, tuple]:
    """Every loss in every form, with something to feed it: (loss, embeddings, further arguments)."""
    found = {}
    for m in MEASURES:
        found[f"regression {m}"] = (SimilarityRegression(m), 2, (grades(m),))
        found[f"classification {m}"] = (SimilarityClassification(3.0, measure=m), 2, (torch.arange(7) % 2,))
        for form in FORMS:
            # A margin at which no hinge stands at its corner.
            found[f"ranking {form} {m}"] = (SimilarityRanking(form, 0.37, 0.7, m), 3, ())
    return found


EVERY = every()


@pytest.fixture(params=list(EVERY))
def case(request):
    loss, k, further = EVERY[request.param]
    return loss, rows(k), further


@pytest.mark.parametrize("measure", MEASURES)
def test_regression_is_the_oracle(measure):
    (x1, x2), y = rows(2), grades(measure)
    wanted = oracle.regression(x1.tolist(), x2.tolist(), y.tolist(), measure)
    np.testing.assert_allclose(SimilarityRegression(measure).per_item(x1, x2, y).tolist(), wanted, rtol=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("target", [[0, 1, 1, 0, 1, 0, 0], [0.0, 0.25, 1.0, 0.5, 0.9, 0.1, 0.0]])
def test_classification_is_the_oracle(measure, target):
    x1, x2 = rows(2)
    loss = SimilarityClassification(1.7, -0.4, measure).double()
    scale, bias = loss.scale.item(), loss.bias.item()
    y = torch.tensor(target, dtype=torch.float64 if isinstance(target[0], float) else torch.int64)
    wanted = oracle.classification(x1.tolist(), x2.tolist(), target, scale, bias, measure)
    np.testing.assert_allclose(loss.per_item(x1, x2, y).tolist(), wanted, rtol=1e-9, atol=1e-14)
    assert math.isclose(scale, 1.7, rel_tol=1e-6) and math.isclose(bias, -0.4, rel_tol=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("form", FORMS)
def test_ranking_is_the_oracle(form, measure):
    x = rows(3)
    loss = SimilarityRanking(form, 0.37, 0.7, measure)
    wanted = oracle.ranking(*(part.tolist() for part in x), form, 0.37, 0.7, measure)
    np.testing.assert_allclose(loss.per_item(*x).tolist(), wanted, rtol=1e-11, atol=1e-14)
    if form == "hinge":
        assert 0 in wanted and max(wanted) > 0, "both sides of the hinge are tried"


def test_gradient(case):
    loss, x, further = case
    parameters = [p.double().detach().requires_grad_() for p in getattr(loss, "parameters", list)()]
    assert gradcheck(lambda *a: loss.per_item(*a, *further), tuple(x))
    if parameters:
        from torch.func import functional_call

        names = [name for name, _ in loss.named_parameters()]

        def value(*p):
            return functional_call(loss, dict(zip(names, p, strict=True)), (*(part.detach() for part in x), *further))

        assert gradcheck(value, tuple(parameters))


def test_the_mean_is_over_items_and_comes_last(case):
    loss, x, further = case
    items = loss.per_item(*x, *further)
    assert items.shape == (7,) and items.dtype == torch.float64
    torch.testing.assert_close(loss(*x, *further), items.mean())


def test_a_pair_can_be_turned_round(case):
    loss, x, further = case
    if len(x) == 2:
        torch.testing.assert_close(loss.per_item(*x, *further), loss.per_item(x[1], x[0], *further))


@settings(max_examples=25, deadline=None)
@given(weight=st.lists(st.integers(0, 3), min_size=7, max_size=7), name=st.sampled_from(list(EVERY)))
def test_weight_0_is_absent_and_2_is_listed_twice(weight, name):
    loss, k, further = EVERY[name]
    x = rows(k)
    if not any(weight):
        return
    w = torch.tensor(weight)
    value = loss(*x, *further, weight=w)
    listed = [part.repeat_interleave(w, dim=0) for part in (*x, *further)]
    torch.testing.assert_close(value, loss(*listed))
    for a, b in zip(torch.autograd.grad(value, x), torch.autograd.grad(loss(*listed), x), strict=True):
        torch.testing.assert_close(a, b)
    wanted = oracle.mean(loss.per_item(*x, *further).tolist(), weight)
    assert math.isclose(value.item(), wanted, rel_tol=1e-9, abs_tol=1e-12)


# --- identities ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("constant", [-3.0, 0.5, 40.0])
def test_ranking_does_not_see_a_constant_added_to_the_similarity(form, constant):
    loss = SimilarityRanking(form)
    near, far = (torch.randn(50, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in (1, 2))
    near.requires_grad_()
    plain, moved = loss.from_similarity(near, far), loss.from_similarity(near + constant, far + constant)
    torch.testing.assert_close(plain, moved, rtol=1e-9, atol=1e-12)
    (a,), (b,) = (torch.autograd.grad(v.sum(), near) for v in (plain, moved))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_regression_does_see_it():
    f, y = torch.zeros(3), torch.zeros(3)
    assert SimilarityRegression().from_similarity(f + 1, y).tolist() == [1, 1, 1]


@pytest.mark.parametrize("threshold", [-0.4, 0.0, 0.3])
def test_classification_of_growing_scale_approaches_a_threshold_at_minus_b_over_a(threshold):
    f = torch.linspace(-1, 1, 401, dtype=torch.float64)
    f = f[(f - threshold).abs() > 1e-3]
    step = (f > threshold).double()
    errors = []
    for scale in (1.0, 10.0, 100.0, 1e3, 1e5):
        loss = SimilarityClassification(scale, -threshold * scale).double()
        assert math.isclose(loss.threshold, threshold, abs_tol=1e-5)
        errors.append((loss.logits(f).sigmoid() - step).abs().max().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12
    # ... and the loss of the pairs on the right side of it vanishes, of the others it grows without bound.
    values = loss.from_similarity(f, step)
    assert values.max() < 1e-12 and loss.from_similarity(f, 1 - step).min() > 50


@pytest.mark.parametrize("measure", ["squared", "euclidean", "l1"])
def test_row_14_logistic_ranking_of_distances_is_minus_log_softmax(measure):
    x = rows(3)
    anchor, *others = (part.tolist() for part in x)
    scores = [[oracle.alike(a, b, measure) for a, b in zip(anchor, other, strict=True)] for other in others]
    near, far = torch.tensor(scores, dtype=torch.float64)
    loss = SimilarityRanking("logistic", temperature=1.0, measure=measure)
    torch.testing.assert_close(loss.per_item(*x), torch.nn.functional.softplus(-near + far))
    torch.testing.assert_close(loss.per_item(*x), -torch.stack([near, far], 1).log_softmax(1)[:, 0])


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_logistic_ranking_of_cosines_is_supcon_with_one_positive_and_one_negative(temperature):
    x, positive, negative = rows(3)
    found = SimilarityRanking("logistic", temperature=temperature).per_item(x, positive, negative)
    for i in range(len(x)):
        anchor = SupCon(temperature).per_anchor(
            x[i : i + 1], torch.tensor([0]), ref=(torch.stack([positive[i], negative[i]]), torch.tensor([0, 1]))
        )
        torch.testing.assert_close(found[i], anchor[0])


def test_softmax_ranking_of_distances_is_half_the_squared_error_of_the_triplet_network():
    """Hoffer and Ailon: the softmax of (d₊, d₋) should be (0, 1)."""
    x = rows(3)
    d = torch.stack([(x[0] - x[k]).norm(dim=1) for k in (1, 2)], 1)
    error = (d.softmax(1) - torch.tensor([0.0, 1.0], dtype=torch.float64)).square().sum(1)
    found = SimilarityRanking("softmax", temperature=1.0, measure="euclidean").per_item(*x)
    torch.testing.assert_close(2 * found, error)


def test_learning_moves_scale_and_threshold_and_keeps_the_scale_positive():
    torch.manual_seed(0)
    loss = SimilarityClassification(scale=0.1, bias=0.0)
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.1)
    f = torch.tensor([0.9, 0.8, 0.4, 0.1])
    for _ in range(300):
        optimiser.zero_grad()
        loss.from_similarity(f, torch.tensor([1, 1, 0, 0])).mean().backward()
        optimiser.step()
        assert loss.scale > 0
    assert 0.4 < loss.threshold < 0.8


# --- numbers ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_lose_nothing_but_their_rounding(case, dtype):
    loss, x, further = case
    half = [part.detach().to(dtype).requires_grad_() for part in x]
    double = [part.detach().double().requires_grad_() for part in half]
    further = tuple(f.to(torch.float32) if f.is_floating_point() else f for f in further)
    a, b = loss(*half, *further), loss(*double, *further)
    assert a.dtype == torch.float32 and abs(a.item() - b.item()) <= 1e-5 * abs(b.item()) + 1e-6
    for g, w in zip(torch.autograd.grad(a, half), torch.autograd.grad(b, double), strict=True):
        assert g.dtype == dtype
        assert float((g.double() - w).norm()) <= 1e-2 * float(w.norm()) + 1e-6


def test_autocast_does_not_reach_the_similarities(case):
    loss, x, further = case
    x = [part.detach().float() for part in x]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(*x, *further)
    torch.testing.assert_close(inside, loss(*x, *further), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_embedding_never_gives_a_finite_loss(case, bad):
    loss, x, further = case
    for k in range(len(x)):
        broken = [part.detach().clone() for part in x]
        broken[k][3, 1] = bad
        items = loss.per_item(*broken, *further)
        assert not torch.isfinite(items[3]) and torch.isfinite(items[[0, 1, 2, 4, 5, 6]]).all()
        assert not torch.isfinite(loss(*broken, *further))


def test_a_broken_target_or_weight_never_gives_a_finite_loss(case):
    loss, x, further = case
    weight = torch.ones(7)
    weight[2] = math.nan
    assert not torch.isfinite(loss(*x, *further, weight=weight))
    if further:
        target = further[0].double().clone()
        target[2] = math.nan
        assert not torch.isfinite(loss(*x, target))


def test_coincident_opposite_and_zero_rows_have_finite_gradients(case):
    loss, x, further = case
    unit = torch.eye(4, dtype=torch.float64)[0]
    first = torch.stack([unit, unit, unit, unit * 0, unit * 0, unit * 1e-20, unit * 3]).requires_grad_()
    second = torch.stack([unit, -unit, unit * 2, unit, unit * 0, unit, unit]).requires_grad_()
    given = [first, second, second.detach().flip(0).clone().requires_grad_()][: len(x)]
    value = loss(*given, *further)
    gradients = torch.autograd.grad(value, given)
    assert torch.isfinite(value) and all(torch.isfinite(g).all() for g in gradients)
    if loss.measure == "cosine":
        assert (gradients[0][3] == 0).all(), "a row without a direction gets no gradient"


def test_state_of_the_classifier_is_saved_and_moved():
    a, b = SimilarityClassification(7.0, -2.0), SimilarityClassification()
    b.load_state_dict(a.state_dict())
    assert b.threshold == a.threshold and set(a.state_dict()) == {"log_scale", "bias"}
    assert "scale=7" in repr(a)


def test_facts():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    facts = SimilarityRegression().statistics(x, y, torch.tensor([1.0, 1.0, 1.0]))
    assert facts == pytest.approx({"similarity": 2 / 3, "error": math.sqrt(1 / 3)})
    facts = SimilarityClassification().statistics(x, y, torch.tensor([1, 0, 0]))
    assert facts == pytest.approx({"accuracy": 2 / 3, "scale": 10, "threshold": 0.5})
    facts = SimilarityRanking().statistics(x, y, y.roll(1, 0))
    assert facts == pytest.approx({"ordered": 0.5, "gap": 0.0})


# --- refusals ---

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("x1", "x2", "target", "message"),
    [
        (X, X[:3], torch.ones(4), "x2 has shape"),
        (X, X[:, :2], torch.ones(4), "x2 has shape"),
        (X[0], X[0], torch.ones(4), r"\(n, d\)"),
        (X[:0], X[:0], torch.ones(0), "not empty"),
        (X.long(), X, torch.ones(4), "x1 must be floating point"),
        (X.tolist(), X, torch.ones(4), "x1 must be a tensor"),
        (X, X.to("meta"), torch.ones(4), "one device"),
        (X, X, torch.ones(3), r"one number per item, \(4,\)"),
        (X, X, [1, 1, 1, 1], "got list"),
        (X, X, torch.tensor([0, 1, 0, 2]), "target 2 of pair 3"),
        (X, X, torch.tensor([0, -1.5, 0, 0]), "target -1.5 of pair 1"),
    ],
)
@pytest.mark.parametrize("loss", [SimilarityRegression(), SimilarityClassification()], ids=["regression", "class"])
def test_bad_pairs_are_refused(loss, x1, x2, target, message):
    with pytest.raises(InputError, match=message):
        loss(x1, x2, target)


@pytest.mark.parametrize("measure", ["squared", "euclidean", "l1"])
def test_distances_are_graded_by_their_negative(measure):
    with pytest.raises(InputError, match=r"\[-inf, 0\]"):
        SimilarityRegression(measure)(X, X, torch.ones(4))


@pytest.mark.parametrize("weight", [torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.ones(3), [1, 1, 1, 1]])
def test_bad_weights_are_refused(weight):
    with pytest.raises(InputError, match="weight"):
        SimilarityRanking()(X, X, X, weight)


def test_bad_triplets_are_refused():
    with pytest.raises(InputError, match="negative has shape"):
        SimilarityRanking()(X, X, X[:2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimilarityRegression("cosin"), "measure must be one of"),
        (lambda: SimilarityClassification(0.0), "scale must be above 0"),
        (lambda: SimilarityClassification(math.nan), "scale must be a finite number"),
        (lambda: SimilarityClassification(1.0, math.inf), "bias must be a finite number"),
        (lambda: SimilarityClassification(measure="l3"), "measure must be one of"),
        (lambda: SimilarityRanking("hnge"), "form must be one of"),
        (lambda: SimilarityRanking(margin=-1), "margin must be at least 0"),
        (lambda: SimilarityRanking(temperature=0), "temperature must be above 0"),
        (lambda: SimilarityRanking(measure=""), "measure must be one of"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
