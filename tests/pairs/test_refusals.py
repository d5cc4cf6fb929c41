"""What cannot be compared is refused in one line that says what to do, on every engine and in the statistics."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from laws.members import Given, batch, second
from mettle.difficulty import Relative
from mettle.errors import InputError
from mettle.losses import InfoNCE, SupCon
from mettle.losses.base import PairwiseLoss
from mettle.pairs import Difficulty, Pass, Queue, logsumexp_over, sum_over

Z, Y = batch()
AT = torch.arange(14)
WRONG = {
    "a ref of one": ({"ref": (Z,)}, "ref must be .embeddings, labels. or .* got 1 entries"),
    "a ref of four": ({"ref": (Z, Y, AT, AT)}, "got 4 entries"),
    "a bare ref": ({"ref": Z}, "got Tensor"),
    "ids of the reference only": ({"ref": (Z, Y, AT)}, "ref has ids but the batch has none"),
    "ids of the batch only": ({"ref": (Z, Y), "ids": AT}, "pass ref="),
    "ids as a list": ({"ref": (Z, Y, AT), "ids": AT.tolist()}, "ids must be a tensor, got list"),
    "reference ids as a list": ({"ref": (Z, Y, AT.tolist()), "ids": AT}, "reference ids must be a tensor, got list"),
    "ids as a column": ({"ref": (Z, Y, AT), "ids": AT[:, None]}, r"one entry per embedding: got \(14, 1\)"),
    "too few reference ids": ({"ref": (Z, Y, AT[:5]), "ids": AT}, r"reference ids .* got \(5,\) for 14"),
    "ids with fractions": ({"ref": (Z, Y, AT / 2), "ids": AT}, "whole numbers"),
    "biased of one dimension": ({"biased": torch.randn(14)}, r"same rows: got \(14,\) for 14"),
    "biased whole numbers": ({"biased": torch.ones(14, 3, dtype=torch.long)}, "biased must be floating point"),
    "biased as a list": ({"biased": [[1.0]] * 14}, "biased must be a tensor"),
    "biased without columns": ({"biased": torch.randn(14, 0)}, r"got \(14, 0\)"),
    "biased of other rows": ({"biased": torch.randn(13, 3)}, r"same rows: got \(13, 3\) for 14"),
    "two biased without a ref": ({"biased": (Z, Z)}, "biased must be one tensor"),
    "one biased with a ref": ({"biased": Z, "ref": (Z, Y)}, "with ref=, biased must be a pair"),
    "biased of two widths": ({"biased": (Z, Z[:, :3]), "ref": (Z, Y)}, "one width, got 5 and 3"),
    "a broken tile": ({"tile": 2.5}, "tile must be at least 1, a whole number, got 2.5"),
    "a true tile": ({"tile": True}, "whole number, got True"),
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("case", WRONG)
def test_companions_that_do_not_fit_are_named(case, engine):
    options, said = WRONG[case]
    with pytest.raises(InputError, match=said) as found:
        SupCon(0.2)(Z, Y, **options, engine=engine)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("case", [case for case in WRONG if "tile" not in case])
def test_statistics_refuse_what_a_call_refuses(case):
    options, said = WRONG[case]
    with pytest.raises(InputError, match=said):
        SupCon(0.2).statistics(Z, Y, **options)


def test_embeddings_without_columns_are_refused():
    with pytest.raises(InputError, match="no columns"):
        SupCon(0.2)(torch.zeros(14, 0), Y)


def test_ids_on_one_side_would_make_a_sample_its_own_positive():
    """Why that is refused: with ids on both sides it is left out, and the value is that of the batch alone."""
    wanted = SupCon(0.3)(Z, Y)
    torch.testing.assert_close(SupCon(0.3)(Z, Y, ref=(Z, Y, AT), ids=AT), wanted)
    assert SupCon(0.3)(Z, Y, ref=(Z, Y)) != wanted


class TestPrecisions:
    """Two precisions are compared in the better one."""

    @pytest.mark.parametrize("engine", ["dense", "tiled"])
    @pytest.mark.parametrize(
        ("own", "other"),
        [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.float64)],
    )
    @pytest.mark.parametrize("loss", [SupCon(0.3), InfoNCE(0.5, difficulty=Relative())], ids=repr)
    def test_a_reference_of_another_type(self, loss, own, other, engine):
        zr, yr = batch(21, seed=3)
        z, r = Z.detach().to(own).requires_grad_(), zr.detach().to(other).requires_grad_()
        biased = {"biased": (second(Z).to(other), second(zr).to(own))} if loss.difficulty else {}
        value = loss(z, Y, ref=(r, yr), **biased, engine=engine, tile=4)
        value.backward()
        a, b = z.detach().double().requires_grad_(), r.detach().double().requires_grad_()
        biased = {"biased": tuple(x.double() for x in biased["biased"])} if biased else {}
        wanted = loss(a, Y, ref=(b, yr), **biased, engine="dense")
        wanted.backward()
        assert value.dtype == torch.float64 and (z.grad.dtype, r.grad.dtype) == (own, other)
        near = {"rtol": 1e-2, "atol": 1e-3} if own == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(value, wanted, **near)
        torch.testing.assert_close(z.grad.double(), a.grad, **near)
        torch.testing.assert_close(r.grad.double(), b.grad, **near)

    def test_a_second_encoder_of_another_type(self):
        loss = InfoNCE(0.5, difficulty=Relative())
        for engine in ("dense", "tiled"):
            found = loss.output(Z.float(), Y, biased=second(Z), engine=engine).values
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), loss.output(Z, Y, biased=second(Z)).values, rtol=1e-5, atol=1e-6)


SPOILING = {
    "too few labels": (torch.ones(4, 2), torch.arange(3), "one entry per embedding"),
    "labels with fractions": (torch.ones(4, 2), torch.rand(4), "whole numbers"),
    "labels as a list": (torch.ones(4, 2), [0, 1, 2, 3], "labels must be a tensor, got list"),
    "one dimension": (torch.ones(4), torch.arange(4), r"must be \(n, d\)"),
    "a list of rows": ([[1.0, 2.0]], torch.arange(1), "embeddings must be a tensor"),
    "another width": (torch.ones(4, 3), torch.arange(4), "dim 2, got 3"),
}


class TestQueues:
    """A queue refuses a batch that would spoil it, and stays as it was."""

    @pytest.mark.parametrize("verb", ["push", "against"])
    @pytest.mark.parametrize("case", SPOILING)
    def test_a_batch_that_does_not_fit(self, case, verb):
        z, y, said = SPOILING[case]
        queue = Queue(8, 2)
        queue.push(torch.zeros(3, 2), torch.arange(3))
        before = {name: value.clone() for name, value in queue.state_dict().items()}
        with pytest.raises(InputError, match=said):
            getattr(queue, verb)(z, y)
        assert all(torch.equal(value, before[name]) for name, value in queue.state_dict().items())

    @pytest.mark.parametrize(("size", "dim"), [(2.5, 2), (4, 2.0), (0, 2), (4, -1), (True, 2), ("4", 2)])
    def test_sizes_are_whole_numbers(self, size, dim):
        with pytest.raises(InputError, match="whole number of at least 1"):
            Queue(size, dim)


class Bare(PairwiseLoss):
    """A loss of one's own that forgot to count positives."""

    difficulty: Difficulty | None = None

    def reductions(self, tile, rows):
        return {"near": sum_over(tile.similarity, tile.positive), "far": logsumexp_over(tile.similarity, tile.negative)}

    def row_loss(self, rows):
        return rows["far"] - rows["near"]


class Hasty(Bare):
    """A loss that reads an earlier row without saying so."""

    def passes(self):
        return Pass(self.reductions), Pass(self.second)

    def second(self, tile, rows):
        return {"positives": sum_over(rows["far"] - tile.similarity, tile.positive)}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
class TestOwnLosses:
    def test_a_row_that_is_not_there_is_named(self, engine):
        with pytest.raises(InputError, match="Bare asks for a row 'positives', but the rows are 'near', 'far'"):
            Bare()(Z, Y, engine=engine, tile=4)

    def test_a_pass_reads_what_it_says_it_reads(self, engine):
        with pytest.raises(InputError, match=r"Hasty asks for a row 'far'.*reads='anchor'"):
            Hasty()(Z, Y, engine=engine, tile=4)

    def test_other_missing_keys_stay_what_they_are(self, engine):
        class Lost(Bare):
            def reductions(self, tile, rows):
                return {7: sum_over(tile.similarity, tile.positive)[8]} if {}[7] else {}

        with pytest.raises(KeyError):
            Lost()(Z, Y, engine=engine, tile=4)


class Learnt(PairwiseLoss):
    """A loss with a parameter of its own, inside the reductions or at the end."""

    inside: bool = True
    learn: bool = True
    difficulty: Difficulty | None = None

    def __post_init__(self):
        super().__post_init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64), requires_grad=self.learn)

    def reductions(self, tile, rows):
        x = tile.similarity * self.scale if self.inside else tile.similarity
        return {
            "positives": sum_over(1.0, tile.positive),
            "near": sum_over(x, tile.positive),
            "far": logsumexp_over(tile.similarity, tile.negative),
        }

    def row_loss(self, rows):
        return rows["far"] - rows["near"] * (1 if self.inside else self.scale)


class Hidden(Learnt):
    """A loss that learns something that it does not hold."""

    def reductions(self, tile, rows):
        return super().reductions(tile, rows) | {"near": sum_over(tile.similarity * HIDDEN, tile.positive)}


HIDDEN = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


@dataclass(frozen=True, eq=False)
class Trusted:
    """A weight per row that is learnt, if gradients flow through weights."""

    trust: nn.Parameter
    detach: bool = False

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, rows):
        return self.trust[tile.anchor_index].exp()


class TrustedModule(nn.Module):
    """The same as a module, whose parameter the engine finds."""

    def __init__(self, trust, detach=False):
        super().__init__()
        self.trust, self.detach = trust, detach

    row_statistics, weights = Trusted.row_statistics, Trusted.weights


class TestLearnable:
    """Tiles give gradients to embeddings and to parameters of loss and difficulty; to nothing that they cannot find."""

    @staticmethod
    def grown(loss, parameter, **options):
        parameter.grad = None
        z = Z.detach().clone().requires_grad_()
        loss(z, Y, **options).backward()
        return parameter.grad, z.grad

    @pytest.mark.parametrize("tile", [1, 4, 14])
    def test_a_parameter_inside_the_reductions_gets_all_of_its_gradient(self, tile):
        loss, outside = Learnt(), Learnt(inside=False)
        dense, tiled = (self.grown(loss, loss.scale, engine=engine, tile=tile) for engine in ("dense", "tiled"))
        wanted = self.grown(outside, outside.scale, engine="dense")
        assert wanted[0] != 0
        for a, b, c in zip(tiled, dense, wanted, strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a, c)

    def test_at_the_end_it_gets_all_of_its_gradient(self):
        loss = Learnt(inside=False)
        dense, tiled = (self.grown(loss, loss.scale, engine=engine) for engine in ("dense", "tiled"))
        assert dense[0] != 0
        for a, b in zip(tiled, dense, strict=True):
            torch.testing.assert_close(a, b)

    def test_what_the_loss_does_not_hold_is_refused_in_tiles_and_right_in_dense(self):
        loss = Learnt()
        found, _ = self.grown(Hidden(), HIDDEN, engine="dense")
        torch.testing.assert_close(found, self.grown(loss, loss.scale, engine="dense")[0])
        said = r"near of Hidden want a gradient .* make it an nn.Parameter of the loss, pass engine='dense'"
        with pytest.raises(InputError, match=said):
            Hidden()(Z, Y, engine="tiled", tile=4)

    @pytest.mark.parametrize("tile", [1, 4, 14])
    def test_live_weights_that_are_learnt_get_their_gradient_where_a_module_holds_them(self, tile):
        trust = nn.Parameter(torch.linspace(-1, 1, 14, dtype=torch.float64))
        loss = SupCon(0.2, difficulty=TrustedModule(trust))
        dense, tiled = (self.grown(loss, trust, engine=engine, tile=tile) for engine in ("dense", "tiled"))
        assert (dense[0] != 0).any()
        for a, b in zip(tiled, dense, strict=True):
            torch.testing.assert_close(a, b)

    def test_live_weights_that_are_learnt_are_refused_where_no_module_holds_them(self):
        trust = nn.Parameter(torch.zeros(14, dtype=torch.float64))
        with pytest.raises(InputError, match="the weights of SupCon want a gradient"):
            SupCon(0.2, difficulty=Trusted(trust))(Z, Y, engine="tiled", tile=4)
        for kind in (Trusted, TrustedModule):
            fixed = SupCon(0.2, difficulty=kind(trust, detach=True))
            torch.testing.assert_close(fixed(Z, Y, engine="tiled", tile=4), fixed(Z, Y, engine="dense"))

    def test_without_gradients_nothing_is_refused(self):
        with torch.no_grad():
            torch.testing.assert_close(Hidden()(Z, Y, engine="tiled", tile=4), Hidden()(Z, Y, engine="dense"))

    def test_constants_and_weights_of_the_pair_pass(self):
        """Parameters without gradient, and weights that are live in the similarities alone."""
        constant = Learnt(learn=False)
        torch.testing.assert_close(constant(Z, Y, engine="tiled", tile=4), Learnt()(Z, Y, engine="dense"))

        class Live(Given):
            def weights(self, tile, rows):
                return 1 + tile.similarity.square()

        live = SupCon(0.2, difficulty=Live(torch.ones(1), detach=False))
        (a,), (b,) = (torch.autograd.grad(live(Z, Y, engine=engine), Z) for engine in ("tiled", "dense"))
        torch.testing.assert_close(a, b)
