"""What losses and difficulties may be built with: numbers, difficulties, bases; and what they print as."""

import numpy as np
import pytest
import torch
from torch import nn

import mettle.difficulty
import mettle.losses
from mettle.difficulty import (
    AdaptiveThreshold,
    Angular,
    DistanceWeighted,
    DistanceWeightedSampling,
    Hardest,
    Importance,
    MultiSimilarityMining,
    PairMargin,
    Product,
    SemiHard,
    Threshold,
    TripletMarginMining,
    curriculum,
)
from mettle.errors import InputError
from mettle.losses import (
    AdaCos,
    AdaFace,
    ArcFace,
    Center,
    Circle,
    Contrastive,
    CosFace,
    CurricularFace,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    MagFace,
    Margin,
    MultiSimilarity,
    NormFace,
    NPair,
    ProxyAnchor,
    SelfTriplet,
    SimilarityClassification,
    SimilarityRanking,
    Softmax,
    SoftTriple,
    SphereFace,
    SubCenterArcFace,
    SupCon,
    Triplet,
)

NUMBERS = {
    "temperature": [SupCon, InfoNCE, DASupCon, SimilarityRanking],
    "base_temperature": [SupCon],
    "prior": [InfoNCE, SelfTriplet],
    "margin": [
        Triplet,
        LiftedStructure,
        SimilarityRanking,
        SemiHard,
        TripletMarginMining,
        lambda **o: CosFace(4, 3, **o),
        lambda **o: ArcFace(4, 3, **o),
        lambda **o: SphereFace(4, 3, **o),
    ],
    "positive": [Contrastive, PairMargin, Threshold, AdaptiveThreshold],
    "negative": [Contrastive, PairMargin, Threshold, AdaptiveThreshold],
    "epsilon": [MultiSimilarityMining],
    "angle": [Angular],
    "cutoff": [DistanceWeighted, DistanceWeightedSampling],
    "limit": [DistanceWeighted, DistanceWeightedSampling],
    "dim": [DistanceWeighted, DistanceWeightedSampling],
    "norm_weight": [NPair],
    "scale": [
        SimilarityClassification,
        lambda **o: NormFace(4, 3, **o),
        lambda **o: CosFace(4, 3, **o),
        lambda **o: ArcFace(4, 3, **o),
    ],
    "bias": [SimilarityClassification],
    "subtract": [lambda **o: ArcFace(4, 3, **o)],
    "floor": [lambda **o: SphereFace(4, 3, **o)],
    "sample": [lambda **o: CosFace(4, 3, **o)],
    "label_smoothing": [lambda **o: CosFace(4, 3, **o)],
    "weight": [lambda **o: Center(4, 3, **o)],
    "alpha": [Threshold, AdaptiveThreshold, DASupCon, MultiSimilarity, lambda **o: ProxyAnchor(4, 3, **o)],
    "beta": [Threshold, Importance],
    "momentum": [AdaptiveThreshold, lambda **o: CurricularFace(4, 3, **o)],
    "base": [MultiSimilarity],
    "gamma": [Circle, lambda **o: SoftTriple(4, 3, **o)],
    "nu": [Margin],
    "push_factor": [SupCon, DASupCon],
    "concentration": [lambda **o: AdaFace(4, 3, **o)],
    "longest": [lambda **o: MagFace(4, 3, **o)],
    "vectors_per_class": [lambda **o: SubCenterArcFace(4, 3, **o)],
    "start": [lambda **o: curriculum(Threshold(), **o)],
}
CASES = [(name, k) for name, makers in NUMBERS.items() for k in range(len(makers))]
BAD = {
    "parameter": lambda: nn.Parameter(torch.tensor(0.5)),
    "tensor": lambda: torch.tensor(0.5),
    "text": lambda: "0.5",
    "list": lambda: [0.5],
    "infinity": lambda: float("inf"),
    "nan": lambda: float("nan"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_a_number_must_be_a_number(name, k, bad):
    with pytest.raises(InputError, match=rf"^{name} must be a (finite )?number, got") as caught:
        NUMBERS[name][k](**{name: BAD[bad]()})
    assert "\n" not in str(caught.value)


def test_whole_numbers_and_those_of_numpy_are_numbers():
    assert SupCon(1) and Triplet(np.float32(0.25)) and CosFace(np.int64(4), 3, scale=np.float64(16))


@pytest.mark.parametrize("given", ["hard", 3, Threshold, {"kind": "Threshold"}, torch.ones(3)], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda d: SupCon(0.1, difficulty=d),
        lambda d: InfoNCE(0.1, difficulty=d),
        lambda d: Triplet(difficulty=d),
        lambda d: Contrastive(difficulty=d),
        lambda d: LiftedStructure(difficulty=d),
        lambda d: NPair(difficulty=d),
        lambda d: SelfTriplet(difficulty=d),
        lambda d: CosFace(4, 3, difficulty=d),
        lambda d: AdaCos(4, 3, difficulty=d),
        lambda d: curriculum(d),
        lambda d: Product(Threshold(), d),
    ],
)
def test_a_difficulty_must_be_one(build, given):
    with pytest.raises(InputError, match="must be a difficulty"):
        build(given)


def test_the_message_says_what_to_write():
    with pytest.raises(InputError, match=r"got the class Threshold: write Threshold\(\)"):
        SupCon(0.1, difficulty=Threshold)
    with pytest.raises(InputError, match="first must be a difficulty"):
        Product(None, Threshold())
    with pytest.raises(InputError, match="must be a difficulty"):
        curriculum(None)


@pytest.mark.parametrize(
    "hard",
    [
        Threshold(alpha=6.0, form="literal"),
        curriculum(Threshold(alpha=6.0, form="literal")),
        Product(Threshold(alpha=6.0, form="literal"), Threshold()),
        curriculum(Product(Hardest(), Threshold(alpha=6.0, form="literal"))),
    ],
    ids=str,
)
def test_weights_that_may_be_negative_are_never_under_a_logarithm(hard):
    with pytest.raises(InputError, match="form 'in' takes their logarithm"):
        SupCon(0.1, "in", hard)
    with pytest.raises(InputError, match="pos_weight 'everywhere' takes their logarithm"):
        SupCon(0.1, "out", hard, pos_weight="everywhere")
    loss = SupCon(0.1, "out", hard, pos_weight="numerator")
    z, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    assert loss.per_anchor(z, y).isfinite().all()


def test_literal_weights_that_stay_above_0_may_act_everywhere():
    z, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    loss = SupCon(0.1, difficulty=Threshold(1.0, 2.0, form="literal"), pos_weight="everywhere")
    assert loss.per_anchor(z, y).isfinite().all()


def rebuilt(loss):
    return eval(repr(loss), vars(mettle.losses) | vars(mettle.difficulty))


@pytest.mark.parametrize(
    "loss",
    [
        SupCon(0.07, "in", Threshold(1.5)),
        SupCon(0.1, difficulty=curriculum(Product(Hardest(), Importance(0.5)), end=0.5)),
        Triplet(0.3, "semihard", squared=True),
        InfoNCE(0.2, 0.1, Importance(2.0)),
    ],
    ids=str,
)
def test_a_loss_prints_as_the_call_that_builds_it(loss):
    assert rebuilt(loss).settings == loss.settings
    assert repr(rebuilt(loss)) == repr(loss)


def test_an_adaptive_threshold_prints_as_what_it_is_now():
    hard = AdaptiveThreshold(alpha=5.0, beta=7.0, momentum=0.5, quantile=0.8)
    hard.observe(torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4)
    again = rebuilt(SupCon(0.1, difficulty=hard)).difficulty
    assert again.current_threshold() == hard.current_threshold() and (again.momentum, again.quantile) == (0.5, 0.8)
    assert "positive=0.7, negative=0.3" in repr(AdaptiveThreshold())


@pytest.mark.parametrize("kind", [Triplet, SelfTriplet])
def test_a_generator_is_a_state_and_no_setting(kind):
    drawn = kind(random=torch.Generator().manual_seed(0))
    assert drawn.settings == rebuilt(drawn).settings == kind().settings
    assert "random" not in drawn.settings and rebuilt(drawn).random is None


@pytest.mark.parametrize(
    "loss",
    [
        ArcFace(4, 3, scale=20.0, margin=0.2, mode="none", multiply=1.5, subtract=0.1),
        CosFace(4, 3, margin=0.1, sample=0.5, sparse=True, seed=7),
        SphereFace(4, 3, margin=3, start=10.0, fall=0.5, floor=2.0),
        Softmax(4, 3, unit_weights=True, bias=False),
        NormFace(4, 3, scale=5.0, difficulty=Threshold()),
    ],
    ids=repr,
)
def test_class_vector_losses_print_all_of_their_settings(loss):
    again = rebuilt(loss)
    plain = (bool, int, float, str, Threshold)
    settings = {k: v for k, v in vars(loss).items() if not k.startswith("_") and isinstance(v, plain)}
    assert settings and settings == {k: getattr(again, k) for k in settings}


class TestTracebacks:
    def test_the_base_of_center_must_be_a_loss(self):
        for base in ("Softmax", Softmax, SupCon()):
            with pytest.raises(InputError, match="base must be a class-vector loss such as Softmax"):
                Center(4, 3, base=base)

    @pytest.mark.parametrize("loss", [ArcFace(4, 3), Softmax(4, 3), Center(4, 3)], ids=lambda x: type(x).__name__)
    def test_no_embeddings_have_no_classes(self, loss):
        assert loss.predict(torch.randn(0, 3)).shape == (0,) and loss.predict(torch.randn(0, 3)).dtype == torch.long
        assert loss.logits(torch.randn(0, 3)).shape == (0, 4)

    def test_statistics_of_pairs_look_at_their_targets(self):
        loss, x = SimilarityClassification(), torch.randn(4, 3)
        with pytest.raises(InputError, match=r"one number per item, \(4,\)"):
            loss.statistics(x, x, torch.ones(3))
        with pytest.raises(InputError, match="is not in"):
            loss.statistics(x, x, torch.full((4,), 2.0))
        with pytest.raises(InputError, match="must be a tensor"):
            loss.statistics(x, x, [1, 1, 1, 1])

    def test_statistics_of_broken_embeddings_are_broken(self):
        x = torch.randn(4, 3)
        broken = x.clone()
        broken[2, 1] = float("nan")
        for found in (
            SimilarityClassification().statistics(broken, x, torch.zeros(4)),
            SimilarityRanking().statistics(broken, x, -x),
        ):
            assert all(v != v for k, v in found.items() if k in ("accuracy", "ordered", "gap"))

    def test_statistics_of_a_center_look_at_labels_first(self):
        with pytest.raises(InputError, match="out of range"):
            Center(4, 3).statistics(torch.randn(2, 3), torch.tensor([0, 9]))

    def test_views_look_at_labels_first(self):
        with pytest.raises(InputError, match="labels must be a tensor"):
            SupCon()(torch.randn(3, 2, 4), [0, 1, 2], views=True)
