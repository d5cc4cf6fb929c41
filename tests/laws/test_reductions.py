"""Every loss under every reduction, against the reductions written out over its values per anchor."""

from dataclasses import replace

import pytest
import torch

import mettle.losses
import mettle.train
from interpreted import interpreted
from laws.members import DIFFICULTIES, FORMS, batch, differentiable, fitting, pairs_batch, with_difficulty
from mettle.errors import InputError, MettleError
from mettle.losses import Center, InfoNCE, NPair, ProxyAnchor, SupCon, Triplet, WeightedSum
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs import NoKernel, PairOutput, pair_loss
from mettle.pairs.dispatch import count_positive_pairs
from mettle.pairs.kernels import collect_inputs, evaluate_fused

REDUCTIONS = ("pairs", "nonzero", "sum", "none")
CLASS_VECTORS = [
    name
    for name in mettle.losses.__all__
    if isinstance(kind := getattr(mettle.losses, name), type) and issubclass(kind, ClassVectors | Center)
]
every_form = pytest.mark.parametrize("form", FORMS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
ENGINES = {"auto": {}, "dense": {"engine": "dense"}, "tiled": {"engine": "tiled", "tile": 5}}


def reduce_by_hand(rows, weight, positives, reduction):
    """Row by row, in a loop, from values per anchor that are NaN where there is none."""
    known = [k for k in range(len(rows)) if not rows[k].isnan()]
    if reduction == "none":
        return torch.stack([rows[k] if k in known else rows[k].detach() * 0 for k in range(len(rows))]).nan_to_num(0)
    if reduction == "sum":
        return sum(rows[k] for k in known)
    if reduction == "pairs":
        return sum(positives[k] * rows[k] for k in known) / sum(positives[k] for k in known)
    active = [k for k in known if rows[k] != 0]
    return (
        sum(weight[k] * rows[k] for k in active) / sum(weight[k] for k in active) if active else 0 * rows[known].sum()
    )


def count_positives(loss, y):
    same = [int((y == y[k]).sum()) - 1 for k in range(len(y))]
    return [1] * len(y) if isinstance(loss, NPair) else same


def assert_alike(found, wanted, z, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    share = torch.linspace(0.5, 1.5, max(1, found.numel()), dtype=z.dtype).reshape(found.shape)
    a, b = (torch.autograd.grad((x * share).sum(), z, retain_graph=True)[0] for x in (found, wanted))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
@every_reduction
@every_form
def test_a_reduction_is_what_it_says_in_every_engine(form, reduction, engine):
    loss = replace(FORMS[form], reduction=reduction)
    z, y = fitting(loss)
    output = FORMS[form].output(z, y, engine="dense")
    weight = torch.ones(len(y), dtype=z.dtype) if output.anchor_weight is None else output.anchor_weight
    wanted = reduce_by_hand(output.per_anchor(), weight, count_positives(loss, y), reduction)
    assert_alike(loss(z, y, **ENGINES[engine]), wanted, z)


@every_reduction
@pytest.mark.parametrize("form", ["supcon out", "infonce", "triplet all", "lifted", "margin", "smooth ap", "n-pair"])
def test_gradients_are_those_of_finite_differences(form, reduction):
    loss = replace(differentiable(FORMS[form]), reduction=reduction)
    z, y = fitting(loss)
    for options in ({}, {"engine": "tiled", "tile": 5}):
        assert torch.autograd.gradcheck(lambda x, options=options: loss(x, y, **options), (z,), fast_mode=True)


@every_reduction
@every_form
def test_transforms_know_the_reductions(form, reduction):
    loss = replace(FORMS[form], reduction=reduction)
    z, y = fitting(loss)
    both = torch.stack([z.detach(), z.detach().flip(0)])
    found = torch.func.vmap(lambda x: loss(x, y))(both)
    torch.testing.assert_close(found, torch.stack([loss(x, y, engine="dense") for x in both]))


@pytest.mark.parametrize("difficulty", ["threshold", "importance", "hardest", "semi-hard"])
def test_pairs_are_those_that_the_difficulty_leaves_in_whichever_engine_counts(difficulty):
    loss = with_difficulty(InfoNCE(0.5, reduction="pairs"), DIFFICULTIES[difficulty])
    z, y = batch()
    present = loss.row_values(z, y)["positives"]
    values = loss.per_anchor(z, y).nan_to_num(0)
    assert (difficulty in ("hardest",)) == bool((present < torch.tensor(count_positives(loss, y))).any())
    for options in ENGINES.values():
        assert_alike(loss(z, y, **options), (present * values).sum() / present.sum(), z)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("against", ["itself", "references"])
@pytest.mark.parametrize(
    "loss", [SupCon(0.2), InfoNCE(0.5, learn_temperature=True), Triplet(0.3, "hardest")], ids=lambda x: type(x).__name__
)
def test_row_values_of_the_kernels_reduce_as_those_of_the_dense_engine(loss, against):
    z, y = (x.detach() for x in batch(28, 16, dtype=torch.float32))
    leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    ref = None if against == "itself" else (z.flip(1), y)
    found = evaluate_fused(loss, None, collect_inputs(leaf, y, ref, None, None))
    assert not isinstance(found, NoKernel)
    counts = count_positive_pairs(loss, leaf, y, difficulty=None, ref=ref)
    fused = PairOutput(found.values, found.defined, found.anchor_weight, "triton", found.mean, positives=counts)
    double = None if ref is None else (ref[0].double(), y)
    dense = pair_loss(loss, exact, y, ref=double, engine="dense")
    for reduction in ("mean", *REDUCTIONS):
        ours, theirs = fused.reduce(reduction), dense.reduce(reduction)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        share = torch.linspace(0.5, 1.5, max(1, ours.numel())).reshape(ours.shape)
        (a,) = torch.autograd.grad((ours * share).sum(), leaf, retain_graph=True)
        (b,) = torch.autograd.grad((theirs * share.double()).sum(), exact, retain_graph=True)
        assert float((a.double() - b).norm() / b.norm()) < 1e-5


@every_reduction
def test_a_pair_that_is_listed_twice_counts_twice(reduction):
    z, _ = batch(6)
    pairs = tuple(torch.tensor(x) for x in ([0, 0, 1, 2], [1, 1, 0, 3], [0, 1, 2, 2], [4, 5, 4, 5]))
    loss = SupCon(0.2, reduction=reduction)
    output = SupCon(0.2).output(z, None, indices_tuple=pairs)
    wanted = reduce_by_hand(output.per_anchor(), [1] * 6, [2, 1, 1, 0, 0, 0], reduction)
    assert_alike(loss(z, None, pairs), wanted, z)


def test_listed_triplets_under_pairs_are_a_mean_over_triplets():
    z, _ = batch(6)
    a, p, n = (torch.tensor(x) for x in ([0, 0, 0, 2], [1, 1, 3, 3], [4, 5, 5, 4]))
    found = Triplet(0.4, average="all", reduction="pairs")(z, None, (a, p, n))
    u = torch.nn.functional.normalize(z)
    wanted = ((u[a] - u[p]).norm(dim=1) - (u[a] - u[n]).norm(dim=1) + 0.4).clamp(min=0).mean()
    assert_alike(found, wanted, z)


class TestEmptyBatches:
    @every_reduction
    def test_without_positives_every_reduction_is_the_same_error(self, reduction):
        z, _ = batch(4)
        with pytest.raises(InputError, match="no anchor has a positive among 4 samples"):
            SupCon(reduction=reduction)(z, torch.arange(4))

    @every_reduction
    def test_or_zero_with_zero_gradient(self, reduction):
        z, _ = batch(4)
        value = SupCon(reduction=reduction, empty="zero")(z, torch.arange(4))
        (gradient,) = torch.autograd.grad(value.sum(), z)
        assert (value == 0).all() and (gradient == 0).all() and value.ndim == (reduction == "none")

    @every_reduction
    def test_or_nan_where_nobody_can_look(self, reduction):
        z, _ = batch(4)
        assert SupCon(reduction=reduction).output(z, torch.arange(4)).reduce(reduction).isnan().all()

    @every_reduction
    @pytest.mark.parametrize("empty", ["zero", "error"])
    def test_broken_embeddings_break_every_value(self, reduction, empty):
        z, y = batch(14)
        z = z.detach().clone()
        z[3, 0] = torch.nan
        assert SupCon(reduction=reduction, empty=empty)(z, y).isnan().all()

    def test_nothing_active_is_zero_with_zero_gradient(self):
        z = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]], requires_grad=True)
        value = Triplet(0.1, reduction="nonzero")(z, torch.tensor([0, 0, 1, 1]))
        value.backward()
        assert value == 0 and (z.grad == 0).all()


class TestClassVectors:
    @every_reduction
    @pytest.mark.parametrize("name", CLASS_VECTORS)
    def test_a_reduction_is_what_it_says(self, name, reduction):
        def make(**options):
            torch.manual_seed(0)
            return getattr(mettle.losses, name)(6, 5, **options).double().eval()

        if name == "ProxyAnchor" and reduction == "pairs":
            with pytest.raises(InputError, match="classes are the anchors"):
                make(reduction=reduction)
            return
        z, _ = batch()
        y = torch.arange(14) % 6
        rows = make().per_anchor(z, y)
        count = [1] * len(rows)
        assert_alike(make(reduction=reduction)(z, y), reduce_by_hand(rows, count, count, reduction), z)
        assert make()(z, y) == make(reduction="mean")(z, y)

    def test_a_sample_of_weight_0_is_absent_and_weights_count(self):
        z, _ = batch()
        y = torch.arange(14) % 6
        torch.manual_seed(0)
        loss = mettle.losses.CosFace(6, 5, difficulty=DIFFICULTIES["threshold"], reduction="nonzero").double()
        values, weight = loss._values(z, y)
        assert weight.std() > 0
        assert_alike(loss(z, y), (values * weight).sum() / weight.sum(), z)

    def test_the_setting_is_printed_and_checked(self):
        loss = mettle.losses.ArcFace(4, 3, reduction="sum")
        assert "reduction='sum'" in repr(loss) and loss.settings["reduction"] == "sum"
        assert "reduction" not in repr(mettle.losses.ArcFace(4, 3))
        for build in (lambda **o: mettle.losses.ArcFace(4, 3, **o), lambda **o: Center(4, 3, **o), SupCon):
            with pytest.raises(InputError, match=r"reduction must be one of .*'none'\), got 'avg'"):
                build(reduction="avg")

    def test_a_center_reduces_the_sum_of_both_parts(self):
        with pytest.raises(InputError, match="give it to Center"):
            Center(4, 3, base=mettle.losses.CosFace(4, 3, reduction="sum"))
        hard = mettle.losses.CosFace(4, 3, difficulty=DIFFICULTIES["threshold"])
        with pytest.raises(InputError, match="without a difficulty"):
            Center(4, 3, base=hard, reduction="nonzero")
        with pytest.raises(InputError, match="belong to classes"):
            Center(4, 3, base=ProxyAnchor(4, 3), reduction="sum")


def test_whoever_needs_one_number_refuses_none():
    with pytest.raises(InputError, match=r"losses\['SupCon'\] has reduction 'none'"):
        WeightedSum([SupCon(reduction="none")])
    with pytest.raises(InputError, match="across ranks a loss is one number"):
        mettle.pairs.across_ranks(SupCon(reduction="none"))
    with pytest.raises(InputError, match="is no mean: use how='auto'"):
        mettle.pairs.across_ranks(mettle.losses.ArcFace(4, 3, reduction="sum"), "rows")


@pytest.mark.parametrize("reduction", ["pairs", "nonzero", "sum"])
def test_a_sum_of_losses_adds_what_each_of_them_gives(reduction):
    z, y = pairs_batch()
    first, second = SupCon(0.2, reduction=reduction), Triplet(reduction=reduction)
    assert_alike(WeightedSum([first, second], [0.5, 2.0])(z, y), 0.5 * first(z, y) + 2 * second(z, y), z)


@pytest.mark.parametrize(("recipe", "kind"), [("supcon", SupCon), ("arcface", mettle.losses.ArcFace)])
def test_a_recipe_names_the_reduction(recipe, kind):
    loss = mettle.train.load(recipe, ['loss.reduction="sum"']).build_loss()
    assert isinstance(loss, kind) and loss.reduction == "sum"
    with pytest.raises(
        MettleError, match=r"loss.reduction: input should be 'mean', 'pairs', 'nonzero', 'sum' or 'none'"
    ):
        mettle.train.load(recipe, ['loss.reduction="total"'])
    silent = mettle.train.load(recipe, ['loss.reduction="none"']).build_loss()
    with pytest.raises(InputError, match=r"has reduction 'none', and training needs one number"):
        mettle.train.Supervised(torch.nn.Linear(3, 2), silent)
