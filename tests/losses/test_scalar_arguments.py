"""L rows of the catalogue: temperatures, half precision, broken input."""

import pytest
import torch

from laws.members import DIFFICULTIES, FORMS, ON_SPHERE, Given, batch, extra, fitting, with_difficulty
from mettle.difficulty import Product
from mettle.errors import InputError, MettleError
from mettle.losses import DASupCon, InfoNCE, NPair, SelfTriplet, SupCon, Triplet

SOFTMAX = {
    "supcon": lambda t: SupCon(t),
    "supcon in": lambda t: SupCon(t, "in"),
    "da-supcon": lambda t: DASupCon(t),
    "infonce": lambda t: InfoNCE(t),
    "debiased": lambda t: InfoNCE(t, 0.1),
    "hard": lambda t: with_difficulty(InfoNCE(t, 0.1), DIFFICULTIES["importance"]),
    "relative": lambda t: with_difficulty(InfoNCE(t, 0.1), DIFFICULTIES["relative"]),
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.1, 0.03, 0.02, 0.01, 1e-3, 1e-4])
@pytest.mark.parametrize("name", SOFTMAX)
def test_L4_float32_stays_close_to_float64_at_any_temperature(name, temperature, engine):
    loss = SOFTMAX[name](temperature)
    z, y = batch(42, 16, seed=1, dtype=torch.float32)
    options = extra(loss, z)
    single = loss(z, y, engine=engine, tile=16, **options)
    options = {k: v.double() for k, v in options.items()}
    double = loss(z.double(), y, engine="dense", **options)
    assert torch.isfinite(single) and torch.isfinite(torch.autograd.grad(single, z)[0]).all()
    assert abs(single.item() - double.item()) <= 1e-5 * abs(double.item()) + 2e-6 / temperature


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [f for f in ON_SPHERE if "cold" not in f])
def test_L9_half_precision_inputs_lose_nothing_but_their_rounding(form, dtype):
    """Against float64 on the same rounded inputs: loss within 1e-3, gradient within 2.5e-3."""
    loss = FORMS[form]
    z, y = batch(42, 32, seed=2)
    half = z.detach().to(dtype).requires_grad_()
    double = half.detach().double().requires_grad_()
    a, b = loss(half, y, engine="tiled", tile=16), loss(double, y, engine="dense")
    assert a.dtype == torch.float32 and abs(a.item() - b.item()) <= 1e-3 * abs(b.item()) + 1e-5
    ga, gb = torch.autograd.grad(a, half)[0].double(), torch.autograd.grad(b, double)[0]
    assert float((ga - gb).norm() / gb.norm()) <= 2.5e-3


def test_L9_autocast_does_not_reach_the_similarities():
    z, y = batch(42, 32, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = SupCon(0.05)(z, y, engine="tiled")
    torch.testing.assert_close(inside, SupCon(0.05)(z, y, engine="tiled"), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("form", list(FORMS))
def test_float64_stays_float64(form, engine):
    loss = FORMS[form]
    z, y = fitting(loss)
    value = loss(z, y, engine=engine)
    assert value.dtype == torch.float64
    assert torch.autograd.grad(value, z)[0].dtype == torch.float64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("form", list(FORMS))
def test_L5_a_broken_embedding_never_gives_a_finite_loss(form, engine, bad):
    loss = FORMS[form]
    clean, y = fitting(loss)
    for row in range(0, len(y), 3):
        z = clean.detach().clone()
        z[row, 1] = bad
        assert not torch.isfinite(loss(z, y, engine=engine, tile=4)), row


@pytest.mark.parametrize("difficulty", list(DIFFICULTIES))
def test_L5_also_with_every_difficulty(difficulty):
    loss = with_difficulty(InfoNCE(0.5, 0.1), DIFFICULTIES[difficulty])
    clean, y = batch()
    for row in range(14):
        z = clean.detach().clone()
        z[row, 0] = float("nan")
        assert not torch.isfinite(loss(z, y, **extra(loss, clean)))


@pytest.mark.parametrize("form", ON_SPHERE)
def test_L2_zero_rows_are_counted_and_get_no_gradient(form):
    loss = FORMS[form]
    z, y = batch()
    z = z.detach().clone()
    z[[2, 7]] = 0
    z.requires_grad_()
    value = loss(z, y, engine="tiled", tile=4)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    assert (gradient[[2, 7]] == 0).all()
    assert loss.statistics(z, y).zero_rows == 2


class TestBadInput:
    @pytest.mark.parametrize("loss", [SupCon(), InfoNCE(), Triplet(), SelfTriplet(), NPair()], ids=repr)
    @pytest.mark.parametrize(
        ("z", "y", "message"),
        [
            (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "empty"),
            (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long), "floating point"),
            (torch.randn(4, 2, 3), torch.zeros(4, dtype=torch.long), "stack them"),
            (torch.randn(4, 3), torch.zeros(3, dtype=torch.long), r"labels.repeat\(2\)"),
            (torch.randn(4, 3), torch.zeros(4), "whole numbers"),
            (torch.randn(4, 3), torch.zeros(4, dtype=torch.bool), "whole numbers"),
            (torch.randn(4, 3), [0, 0, 1, 1], "must be a tensor"),
            (torch.randn(4, 3), torch.zeros(4, dtype=torch.long, device="meta"), "one device"),
        ],
    )
    def test_L8_labels_and_embeddings_are_checked_before_any_work(self, loss, z, y, message):
        with pytest.raises(InputError, match=message):
            loss(z, y)

    @pytest.mark.parametrize("labels", [[0], [0, 1, 2, 3]])
    def test_no_anchor_with_a_positive_names_the_sampler(self, labels):
        with pytest.raises(InputError, match="sampler"):
            SupCon()(torch.randn(len(labels), 3), torch.tensor(labels))

    def test_one_class_is_defined(self):
        z = torch.randn(4, 3)
        assert torch.isfinite(SupCon()(z, torch.zeros(4, dtype=torch.long)))
        assert float(InfoNCE()(z, torch.zeros(4, dtype=torch.long))) == 0

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: SupCon(0.0), "temperature must be above 0"),
            (lambda: SupCon(-1.0), "temperature"),
            (lambda: SupCon(float("nan")), "temperature"),
            (lambda: InfoNCE(0.5, prior=1.0), r"prior is a probability in \[0, 1\)"),
            (lambda: InfoNCE(0.5, prior=-0.1), "prior"),
            (lambda: SelfTriplet(1.5), "prior"),
            (lambda: DASupCon(positive=0.0), "positive is a cosine"),
            (lambda: DASupCon(negative=1.0), "negative is a cosine"),
            (lambda: DASupCon(alpha=-1), "alpha and beta"),
            (lambda: SupCon(form="both"), "form must be"),
            (lambda: SupCon(normalise="mean"), "normalise must be"),
            (lambda: Triplet(mining="semi-hard"), "mining must be one of"),
            (lambda: Triplet(-0.1), "margin"),
            (lambda: DASupCon(preset="other"), "preset"),
        ],
    )
    def test_constructors_refuse_what_has_no_meaning(self, make, message):
        with pytest.raises(MettleError, match=message):
            make()

    def test_n_pair_needs_exactly_two_of_each(self):
        with pytest.raises(InputError, match="class 1 has 3"):
            NPair()(torch.randn(5, 3), torch.tensor([0, 0, 1, 1, 1]))

    def test_relative_needs_the_second_encoder(self):
        z, y = batch()
        with pytest.raises(InputError, match="biased=z_b"):
            with_difficulty(InfoNCE(), DIFFICULTIES["relative"])(z, y)

    def test_an_unknown_engine_and_a_mismatched_reference(self):
        z, y = batch()
        with pytest.raises(InputError, match="no engine"):
            SupCon()(z, y, engine="fast")
        with pytest.raises(InputError, match="one width"):
            SupCon()(z, y, ref=(torch.randn(4, 9), torch.zeros(4, dtype=torch.long)))

    def test_companions_of_the_embeddings_must_fit_them(self):
        z, y = batch()
        hard = with_difficulty(InfoNCE(), DIFFICULTIES["relative"])
        for rows in (13, 15):
            with pytest.raises(InputError, match=rf"got \D*{rows}\b.* for 14"):
                hard(z, y, biased=torch.randn(rows, 5))
        with pytest.raises(InputError, match="pass ref="):
            SupCon()(z, y, ids=torch.arange(14))
        with pytest.raises(InputError, match="ids must have one entry"):
            SupCon()(z, y, ref=(z, y, torch.arange(14)), ids=torch.arange(13))
        with pytest.raises(InputError, match="tile must be at least 1"):
            SupCon()(z, y, engine="tiled", tile=0)
        with pytest.raises(InputError, match="does not apply"):
            NPair()(z[:4], torch.tensor([0, 0, 1, 1]), ref=(z, y))

    @pytest.mark.parametrize("form", [f for f in FORMS if f not in ("n-pair", "lifted", "lifted unit")])
    def test_L5_a_broken_reference_never_gives_a_finite_loss(self, form):
        z, y = batch()
        zr, yr = batch(21, seed=3)
        for row in range(0, 21, 4):
            spoiled = zr.detach().clone()
            spoiled[row, 2] = float("nan")
            for engine in ("dense", "tiled"):
                assert not torch.isfinite(FORMS[form](z, y, ref=(spoiled, yr), engine=engine))

    def test_L5_a_broken_second_encoder_never_gives_a_finite_loss(self):
        z, y = batch()
        other = torch.randn(14, 5, dtype=torch.float64)
        other[3, 0] = float("nan")
        for prior in (0.0, 0.1):
            loss = with_difficulty(InfoNCE(0.5, prior), DIFFICULTIES["relative"])
            assert not torch.isfinite(loss(z, y, biased=other))

    @pytest.mark.parametrize("bad", [float("nan"), -0.5])
    @pytest.mark.parametrize("loss", [SupCon(), InfoNCE(), Triplet(mining="hardest"), Triplet()], ids=repr)
    def test_L6_a_strangers_bad_weights_are_refused(self, loss, bad):
        z, y = batch()
        table = torch.ones(14, 14, dtype=torch.float64)
        table[5, 9] = bad
        with pytest.raises(InputError, match="Given gave a negative or NaN weight"):
            with_difficulty(loss, Given(table))(z, y)
        with pytest.raises(InputError, match="Given gave a negative or NaN weight"):
            with_difficulty(loss, Product(Given(table), Given(table)))(z, y)

    def test_L6_all_weights_zero_leaves_no_anchor(self):
        z, y = batch()
        with pytest.raises(InputError, match="no anchor has a positive"):
            with_difficulty(SupCon(), Given(torch.zeros(14, 14)))(z, y)

    def test_views_flag(self):
        z = torch.randn(6, 2, 4, dtype=torch.float64)
        y = torch.arange(6)
        flat = torch.cat([z[:, 0], z[:, 1]])
        torch.testing.assert_close(SupCon()(z, y, views=True), SupCon()(flat, y.repeat(2)))
        with pytest.raises(InputError, match="views=True takes"):
            SupCon()(flat, y.repeat(2), views=True)
