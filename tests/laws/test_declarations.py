"""What losses and difficulties declare: fused equals the reference, subclasses inherit, overriding falls back.

The kernels run in triton's interpreter, in float32, against the dense engine in float64.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mettle.difficulty
import mettle.losses
import mettle.pairs
from interpreted import interpreted
from laws.members import DIFFICULTIES, FORMS, with_difficulty
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Product, Relative, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import ArcFace, Contrastive, InfoNCE, NPair, SimilarityRanking, SupCon, Triplet
from mettle.losses.base import PairwiseLoss, any_pair, zero_if_empty
from mettle.pairs import (
    ExponentialWeights,
    LinearWeights,
    NoKernel,
    SoftmaxSpec,
    Traits,
    across_ranks,
    logsumexp_over,
    pair_loss,
    sum_over,
)
from mettle.pairs.declarations import declared_traits, overridden_since
from mettle.pairs.kernel_spec import declared_spec, declared_weights
from mettle.pairs.kernels import collect_inputs, evaluate_fused, lower_loss

# The interpreter computes with NumPy, which warns where a masked entry divides by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class PlainSubclass(SupCon):
    """Nothing of its own."""


class OtherDefaults(InfoNCE):
    """Other defaults, and a method that nothing else has."""

    temperature: float = 0.2
    prior: float = 0.1

    def report(self) -> str:
        return "new"


class WrappedCall(SupCon):
    """Something around the maths, which stays what it is."""

    def output(self, embeddings, labels, **options):
        return super().output(embeddings.float(), labels, **options)


class PlainThreshold(Threshold):
    """Nothing of its own."""


class PlainHardest(Hardest):
    """Nothing of its own."""


class OutsideSoftmax(PairwiseLoss):
    """A loss written from public pieces: InfoNCE's relative in which positives count in the denominator too."""

    temperature: float = 0.3
    difficulty: Any = None

    def reductions(self, tile, rows):
        x = tile.similarity / self.temperature
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "count": sum_over(1.0, tile.positive),
            "away": logsumexp_over(x, any_pair(tile)),
            "attract": sum_over(x, tile.positive),
        }

    def row_loss(self, rows):
        count = torch.where(rows["count"] == 0, 1, rows["count"])
        return (rows["count"] * zero_if_empty(rows["away"]) - rows["attract"]) / count

    def kernel_spec(self, weights):
        return SoftmaxSpec("supcon_out", self.temperature, weights)


@dataclass(frozen=True)
class OutsideLine:
    """A difficulty written from public pieces: negatives above a cosine weigh more."""

    slope: float = 1.5
    start: float = 0.1
    detach: bool = True
    traits = Traits(symmetric=True, trusted=True, self_contained=True)

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, rows):
        w = 1 + self.slope * (tile.similarity - self.start).clamp(min=0)
        return w if tile.positive is False else torch.where(tile.positive, 1, w)

    def kernel_weights(self):
        return LinearWeights(negative_slope=self.slope, negative_threshold=self.start)


def is_declared(loss) -> bool:
    return not isinstance(declared_spec(loss, loss.difficulty), NoKernel)


WEIGHED = DIFFICULTIES | {"adaptive": AdaptiveThreshold(negative=0.1)}
FUSED: dict[str, Any] = {name: loss for name, loss in FORMS.items() if is_declared(loss)}
for _name in ("supcon out", "debiased", "triplet all"):
    _weighed = {f"{_name}, {x}": with_difficulty(FORMS[_name], it) for x, it in WEIGHED.items()}
    FUSED |= {name: loss for name, loss in _weighed.items() if is_declared(loss)}
FUSED |= {
    "plain subclass": PlainSubclass(0.2),
    "plain subclass of both": PlainSubclass(0.2, difficulty=PlainThreshold(positive=0.6, negative=0.1)),
    "other defaults": OtherDefaults(),
    "wrapped call": WrappedCall(0.2),
    "plain subclass of mining": Triplet(0.3, difficulty=PlainHardest()),
    "outside loss": OutsideSoftmax(),
    "outside difficulty": SupCon(0.2, difficulty=OutsideLine()),
    "outside both": OutsideSoftmax(difficulty=OutsideLine()),
    "outside loss, importance": OutsideSoftmax(difficulty=Importance(0.7)),
    "curriculum of importance at its end": InfoNCE(0.5, difficulty=curriculum(Importance(0.7))),
}


# Declared, and outside of what these kernels compute.
REFUSED = {
    "supcon out, hardest": "kernels that mine the hardest pairs have no softmax",
    "debiased, hardest": "kernels that mine the hardest pairs have no softmax",
    "debiased, multi-similarity mining": "the kernels mine positives and negatives, and no prior counts what is left",
    "debiased, threshold live": "the kernels count negatives by weight only where the weights are linear and constant",
}


def samples(loss, n: int = 21, d: int = 9):
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(n) // (2 if isinstance(loss, NPair) else 3)
    order = torch.randperm(n, generator=generator)
    return torch.randn(n, d, generator=generator), labels[order], torch.randn(n, 6, generator=generator)


def second_encoder(loss, other):
    return other if "Relative" in repr(loss.difficulty) else None


def test_every_family_that_is_shipped_is_tried():
    kinds = {type(loss) for loss in FUSED.values()}
    assert kinds >= {SupCon, InfoNCE, NPair, Contrastive, Triplet}
    weighed = {type(loss.difficulty) for loss in FUSED.values()}
    assert weighed >= {Threshold, AdaptiveThreshold, Importance, Relative, Hardest, curriculum}


@interpreted
@pytest.mark.parametrize("name", FUSED)
def test_a_declared_spec_equals_the_reference(name):
    loss = FUSED[name]
    z, y, other = samples(loss)
    ref, biased = None, second_encoder(loss, other)
    if isinstance(loss, NPair):  # it compares anchors with positives
        z, y, ref = z[:10], torch.arange(10), (z[10:20], torch.arange(10))
    leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    double = {"ref": None if ref is None else (ref[0].double(), ref[1])}
    if biased is not None:
        double["biased"] = tuple(b.double() for b in biased) if isinstance(biased, tuple) else biased.double()
    found = evaluate_fused(loss, loss.difficulty, collect_inputs(leaf, y, ref, None, biased))
    if name in REFUSED:
        assert found == NoKernel(REFUSED[name])
        return
    assert not isinstance(found, NoKernel), found
    wanted = pair_loss(loss, exact, y, difficulty=loss.difficulty, engine="dense", **double)
    assert torch.equal(found.defined, wanted.defined)
    a, b = (torch.where(x.defined, x.values, 0) for x in (found, wanted))
    torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    (ours,), (theirs,) = torch.autograd.grad(a.sum(), leaf), torch.autograd.grad(b.sum(), exact)
    assert float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)) < 1e-5


class OtherEnd(SupCon):
    def row_loss(self, rows):
        return 2 * super().row_loss(rows)


class OtherHelper(InfoNCE):
    """Not one of the contract's methods, but what they are made of."""

    def debiased_log_sum(self, x, far, count):
        return super().debiased_log_sum(x, far + 1, count)


class OtherMeasure(SupCon):
    measure = "dot"


class Logged:
    """A mixin that stands before the loss in the order of resolution."""

    def is_defined(self, rows):
        return super().is_defined(rows)  # type: ignore[misc]


class Mixed(Logged, SupCon):
    pass


class Restated(OtherEnd):
    """Restates what it inherits, so it answers for it."""

    self_contained = True

    def row_loss(self, rows):
        return SupCon.row_loss(self, rows)

    def kernel_spec(self, weights):
        return super().kernel_spec(weights)


class HalfWeights(Threshold):
    def weights(self, tile, rows):
        return super().weights(tile, rows) / 2


class HalfImportance(Importance):
    def weights(self, tile, rows):
        return super().weights(tile, rows) / 2


class NaNWeights(Threshold):
    def weights(self, tile, rows):
        return super().weights(tile, rows) * float("nan")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (OtherEnd(0.2), "OtherEnd overrides row_loss and does not restate kernel_spec"),
        (OtherHelper(), "OtherHelper overrides debiased_log_sum and does not restate kernel_spec"),
        (OtherMeasure(0.2), "the loss compares by 'dot', its kernel spec by 'cosine'"),
        (Mixed(0.2), "Mixed overrides is_defined and does not restate kernel_spec"),
        (SupCon(0.2, difficulty=HalfWeights()), "HalfWeights overrides weights and does not restate kernel_weights"),
        (
            SupCon(0.2, difficulty=curriculum(HalfWeights())),
            "HalfWeights overrides weights and does not restate kernel_weights",
        ),
        (SupCon(0.2, difficulty=Product(Threshold(), Threshold())), "Product declares no kernel_weights"),
        (FORMS["lifted"], "LiftedStructure declares no kernel_spec"),
        (SupCon(0.2, neg_weight="penalty"), "the kernels have no pass for neg_weight='penalty'"),
        (SupCon(0.2, neg_weight="linear"), "the kernels have no sum for neg_weight='linear'"),
        (SupCon(0.005, difficulty=Importance()), "a temperature of 0.005 with these weights is outside the range of"),
        (Triplet(), "of the triplet losses, the kernels know batch-hard on unit vectors"),
        (SupCon(0.2), "the embeddings are on cpu"),
        (Restated(0.2), "the embeddings are on cpu"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, PairwiseLoss) else None,
)
def test_the_statistics_say_why_a_loss_is_not_fused(loss, reason):
    z, y, _ = samples(loss)
    found = loss.statistics(z, y)
    assert found.engine == loss.output(z, y).engine in ("dense", "closed-form")
    assert found.not_fused.startswith(reason)
    assert "not_fused" not in found.as_dict()
    with pytest.raises(InputError, match="not fused because"):
        loss(z, y, engine="triton")


def test_an_overriding_loss_computes_what_it_says_and_no_more():
    z, y, _ = samples(None)
    torch.testing.assert_close(OtherEnd(0.2)(z, y), 2 * SupCon(0.2)(z, y))
    torch.testing.assert_close(Restated(0.2)(z, y), SupCon(0.2)(z, y))


def test_overridden_weights_of_an_exponential_difficulty_are_used():
    """Not folded into the sums by the log_weight that it inherits."""
    z, y, _ = samples(None)
    twice = InfoNCE(0.5, difficulty=HalfImportance(1.0, detach=True))
    wanted = InfoNCE(0.5, difficulty=Importance(1.0, detach=True)).per_anchor(z, y)
    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 5}):
        # Halved weights halve G: e^L − 1 = G / e^x is half as large for every single positive, so the loss falls.
        assert bool((twice.per_anchor(z, y, **options) < wanted).all())


def test_promises_end_where_weights_are_overridden_and_choices_stay():
    assert declared_traits(PlainThreshold()) == Threshold.traits
    left = declared_traits(HalfWeights())
    assert left == Traits(positive_weights="numerator")
    assert declared_traits(Product(Threshold(), HalfWeights())) == Traits(trusted=True, positive_weights="numerator")


def test_weights_that_were_overridden_are_looked_at():
    z, y, _ = samples(None)
    with pytest.raises(InputError, match="NaNWeights gave a negative or NaN weight"):
        SupCon(0.2, difficulty=NaNWeights())(z, y)


def test_traits_of_another_kind_are_refused_where_the_loss_is_built():
    wrong = type("Wrong", (OutsideLine,), {"traits": {"symmetric": True}})
    with pytest.raises(InputError, match="traits of a difficulty must be a mettle.pairs.Traits, got {'symmetric'"):
        SupCon(0.2, difficulty=wrong())


@pytest.mark.parametrize("kind", ["kernel_spec", "self_contained"])
def test_a_declaration_holds_until_something_it_describes_is_overridden(kind):
    assert overridden_since(SupCon, kind) is None
    assert overridden_since(PlainSubclass, kind) is None
    assert overridden_since(WrappedCall, kind) is None
    assert overridden_since(OtherEnd, kind) == "row_loss"
    assert overridden_since(Restated, kind) is None


class PlainFace(ArcFace):
    pass


class OtherTarget(ArcFace):
    def target(self, cosine):
        return cosine - 0.1


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (PlainSubclass(0.2), "anchors"),
        (PlainSubclass(0.2, difficulty=PlainThreshold()), "anchors"),
        (SupCon(0.2, difficulty=OutsideLine()), "anchors"),
        (SupCon(0.2, difficulty=HalfWeights()), "replicated"),
        (OtherEnd(0.2), "replicated"),
        (Restated(0.2), "anchors"),
        (WrappedCall(0.2), "replicated"),  # what it does around the call, every rank must do with the whole batch
        (OutsideSoftmax(), "replicated"),
        (PlainFace(4, 3), "rows"),
        (type("PlainRanking", (SimilarityRanking,), {})(), "rows"),
    ],
    ids=lambda x: None if isinstance(x, str) else type(x).__name__,
)
def test_ranks_treat_a_subclass_like_its_base(loss, how):
    assert across_ranks(loss).how == how


def test_settings_of_a_subclass_are_compared_between_ranks_like_those_of_its_base():
    assert across_ranks(PlainSubclass(0.2))._fingerprint() != across_ranks(PlainSubclass(0.3))._fingerprint()
    assert across_ranks(PlainSubclass(0.2))._fingerprint() != across_ranks(SupCon(0.2))._fingerprint()
    assert across_ranks(OtherEnd(0.2))._fingerprint() == across_ranks(OtherEnd(0.3))._fingerprint()


def test_a_subclass_draws_no_random_state_from_rank_0():
    assert not across_ranks(PlainSubclass(0.2))._is_random
    assert not across_ranks(PlainFace(4, 3))._is_random
    assert across_ranks(OtherTarget(4, 3))._is_random


def test_what_is_no_spec_is_refused():
    class Wrong(SupCon):
        def kernel_spec(self, weights):
            return "supcon"

    class Nothing(SupCon):
        def kernel_spec(self, weights):
            return None

    with pytest.raises(InputError, match="kernel_spec of Wrong must give one of SoftmaxSpec, .* got str"):
        declared_spec(Wrong(), None)
    assert declared_spec(Nothing(), None) == NoKernel("kernel_spec of Nothing gives none for these settings")
    assert declared_spec(OtherMeasureDeclared(), None) == NoKernel(
        "the loss compares by 'squared', its kernel spec by 'cosine'"
    )


class OtherMeasureDeclared(OutsideSoftmax):
    measure = "squared"

    def kernel_spec(self, weights):
        return super().kernel_spec(weights)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SoftmaxSpec("softmax"), "row_loss must be one of"),  # type: ignore[arg-type]
        (lambda: SoftmaxSpec("infonce", 0.0), "temperature must be above 0"),
        (lambda: SoftmaxSpec("infonce", prior=1.0), r"prior must be in \[0, 1\)"),
        (lambda: SoftmaxSpec("npair", 0.5), "temperature 1"),
        (lambda: SoftmaxSpec("infonce", 0.5, "hard"), "weights must be KernelWeights"),  # type: ignore[arg-type]
        (lambda: LinearWeights(-1.0), "slopes must be at least 0"),
        (lambda: LinearWeights(1.0, negative_floor=-2.0), "negative_floor must be at least -1"),
        (lambda: ExponentialWeights(-1.0), "beta must be at least 0"),
    ],
)
def test_a_spec_out_of_range_is_refused_where_it_is_made(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_a_curriculum_scales_what_is_inside():
    inside = Threshold(form="literal")
    rising = curriculum(inside, end=0.5).at(0.25)
    assert declared_weights(rising) == inside.kernel_weights().scaled(0.5)
    assert declared_weights(curriculum(Importance(), end=0.5).at(0.25)) == NoKernel(
        "of weights that fade in, the kernels know linear ones only"
    )


def test_a_form_is_found_once_for_equal_specs():
    z, y, _ = samples(None)
    given = collect_inputs(z, y, None, None, None)
    forms = [lower_loss(loss, None, given) for loss in (SupCon(0.2), PlainSubclass(0.2), WrappedCall(0.2))]
    assert forms[0] is forms[1] is forms[2]  # so that launches are remembered by what they compute, not for whom


PAIRS = Path(mettle.pairs.__file__).parent


CLASSES = {*mettle.losses.__all__, *mettle.difficulty.__all__}


def names_read(source: str) -> list[str]:
    """Where code reads the name of a class for anything but a message, or holds one to compare with."""
    tree = ast.parse(source)
    harmless, deciding = set(), set()
    for node in ast.walk(tree):
        inside = {id(x) for x in ast.walk(node)}
        if isinstance(node, ast.FunctionDef) and node.name == "name_class":
            harmless |= inside
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            harmless |= inside  # a message, a docstring
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            deciding |= {id(x) for x in ast.walk(node.test)}
        if isinstance(node, ast.Compare | ast.Subscript | ast.BoolOp | ast.Dict | ast.Set):
            deciding |= inside
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            deciding |= {id(x) for x in ast.walk(node.func)}
            deciding |= inside if node.func.attr == "get" else set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            (node.attr in ("__module__", "__qualname__") and id(node) not in harmless)
            or (node.attr == "__name__" and id(node) in deciding)
        ):
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in harmless:
            hidden = node.value in ("__module__", "__qualname__", "__name__") or node.value in CLASSES
            if hidden or node.value.startswith("mettle."):
                found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_nothing_is_decided_by_the_name_of_a_class():
    found = {str(path.relative_to(PAIRS)): names_read(path.read_text()) for path in PAIRS.rglob("*.py")}
    assert len(found) > 20 and {name: read for name, read in found.items() if read} == {}


@pytest.mark.parametrize(
    "source",
    [
        "type(x).__module__.startswith('a')",
        "x = type(y).__qualname__",
        "if type(x).__name__ == 'SupCon': pass",
        "x = 'mettle.losses.supcon.SupCon'",
        "getattr(type(x), '__module__')",
        "makers = {'SupCon': 1}; makers.get(type(x).__name__)",
        "f = makers[type(x).__name__]",
        "ours = type(x).__name__.startswith('Sup')",
    ],
)
def test_a_name_that_decides_is_seen(source):
    assert names_read(source)


def test_a_name_in_a_message_is_not_one_that_decides():
    assert not names_read("raise InputError(f'got {type(x).__name__}')\nwhose = type(x).__name__")


def test_the_names_of_classes_are_used_by_the_handshake_alone():
    users = {path.name for path in PAIRS.rglob("*.py") if "name_class" in path.read_text()}
    assert users == {"handshake.py", "wrapper.py"}
