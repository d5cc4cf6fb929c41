"""Losses of two towers against the matrix of their logits, in plain torch and in loops."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mettle.train
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Product, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import CLIP, InfoNCE, SigLIP, SupCon, Triplet
from mettle.pairs import across_ranks
from mettle.pairs.distributed.wrapper import choose_strategy

KINDS = {"CLIP": CLIP, "SigLIP": SigLIP}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
ENGINES = {"auto": {}, "dense": {"engine": "dense"}, "tiled": {"engine": "tiled", "tile": 4}}
every_engine = pytest.mark.parametrize("engine", ENGINES)
LABELS = torch.tensor([3, 0, 0, 7, 3, 5, 3, 2, 0, 9])


def towers(n: int = 10, d: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = (x.requires_grad_() for x in made)
    return a, b


def logits(loss, a, b):
    return F.normalize(a) @ F.normalize(b).T / loss.direction.current_temperature()


def cross_entropy(loss, a, b):
    """CLIP as its authors write it down."""
    x, own = logits(loss, a, b), torch.arange(len(a))
    return (F.cross_entropy(x, own, reduction="none") + F.cross_entropy(x.T, own, reduction="none")) / 2


def sigmoid(loss, a, b, y=None):
    """SigLIP as its authors write it down, the mean of rows and columns."""
    y = torch.arange(len(a)) if y is None else y
    x = logits(loss, a, b) + loss.direction.current_bias()
    value = -F.logsigmoid(torch.where(y[:, None] == y, 1, -1) * x)
    return (value.sum(0) + value.sum(1)) / 2


def cross_entropy_by_loops(loss, a, b, y):
    """Each positive alone against the negatives, in both directions, sample by sample."""
    x, rows = logits(loss, a, b), []
    for k in range(len(y)):
        parts = []
        for row in (x[k], x[:, k]):
            negatives = [row[j] for j in range(len(y)) if y[j] != y[k]]
            terms = [torch.stack([row[p], *negatives]).logsumexp(0) - row[p] for p in range(len(y)) if y[p] == y[k]]
            parts.append(sum(terms) / len(terms))
        rows.append(sum(parts) / 2)
    return torch.stack(rows)


def assert_alike(found, wanted, inputs, tolerance=1e-9):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    share = torch.linspace(0.5, 1.5, max(1, found.numel()), dtype=found.dtype).reshape(found.shape)
    mine, other = (torch.autograd.grad((x * share).sum(), inputs, retain_graph=True) for x in (found, wanted))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_engine
@pytest.mark.parametrize(("kind", "formula"), [(CLIP, cross_entropy), (SigLIP, sigmoid)], ids=KINDS)
def test_values_and_gradients_are_those_of_the_published_formula(kind, formula, engine):
    (a, b), loss = towers(), kind().double()
    inputs = [a, b, *loss.parameters()]
    assert len(inputs) == (3 if kind is CLIP else 4)
    assert_alike(loss(a, b, **ENGINES[engine]), formula(loss, a, b).mean(), inputs)
    assert_alike(loss.per_anchor(a, b, **ENGINES[engine]), formula(loss, a, b), inputs)


@every_engine
@pytest.mark.parametrize(("kind", "formula"), [(CLIP, cross_entropy_by_loops), (SigLIP, sigmoid)], ids=KINDS)
def test_rows_of_equal_label_belong_together(kind, formula, engine):
    (a, b), loss = towers(), kind().double()
    inputs = [a, b, *loss.parameters()]
    wanted = formula(loss, a, b, LABELS)
    assert_alike(loss(a, b, LABELS, **ENGINES[engine]), wanted.mean(), inputs)
    assert_alike(loss.per_anchor(a, b, LABELS, **ENGINES[engine]), wanted, inputs)
    assert_alike(loss(a, b, torch.arange(10) * 2**40), loss(a, b), inputs)


@every_kind
@pytest.mark.parametrize("reduction", ["mean", "pairs", "nonzero", "sum", "none"])
def test_reductions(kind, reduction):
    (a, b), loss = towers(), kind(reduction=reduction).double()
    values, count = kind().double().per_anchor(a, b, LABELS), (LABELS[:, None] == LABELS).sum(1)
    wanted = {
        "mean": values.mean(),
        "pairs": (values * count).sum() / count.sum(),
        "nonzero": values[values != 0].mean(),
        "sum": values.sum(),
        "none": values,
    }[reduction]
    assert_alike(loss(a, b, LABELS), wanted, [a, b])


@every_kind
def test_gradients_are_those_of_finite_differences(kind):
    (a, b), loss = towers(6, 3), kind().double()
    names = [name for name, _ in loss.named_parameters()]

    def value(a, b, *parameters):
        return torch.func.functional_call(loss, dict(zip(names, parameters, strict=True)), (a, b, LABELS[:6]))

    inputs = (a, b, *(p.detach().clone().requires_grad_() for p in loss.parameters()))
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)
    tiled = {"engine": "tiled", "tile": 4}
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, LABELS[:6], **tiled), (a, b), fast_mode=True)


@every_kind
@pytest.mark.parametrize("difficulty", [Threshold(positive=0.6, negative=0.1), Importance(0.7), Hardest()], ids=str)
def test_a_difficulty_weighs_both_directions_in_every_engine(kind, difficulty):
    (a, b), loss = towers(), kind(difficulty=difficulty).double()
    inputs = [a, b, *loss.parameters()]
    dense = loss(a, b, LABELS, engine="dense")
    assert abs(dense - kind().double()(a, b, LABELS)) > 1e-4
    assert_alike(loss(a, b, LABELS, engine="tiled", tile=4), dense, inputs)
    assert_alike(loss(b, a, LABELS), dense, inputs)  # which tower comes first does not matter


@every_kind
def test_a_curriculum_follows_the_progress_of_training(kind):
    (a, b), hard = towers(), Threshold(positive=0.6, negative=0.1)
    loss = kind(difficulty=curriculum(hard, end=0.5)).double()
    assert loss.takes_progress
    torch.testing.assert_close(loss(a, b, progress=0.0), kind().double()(a, b))
    torch.testing.assert_close(loss(a, b, progress=0.5), kind(difficulty=hard).double()(a, b))


class TestLearned:
    def test_clip_is_info_nce_in_both_directions(self):
        (a, b), loss = towers(), CLIP(0.2, learn_temperature=False)
        ids, one = torch.arange(10), InfoNCE(0.2)
        wanted = (one(a, ids, ref=(b, ids)) + one(b, ids, ref=(a, ids))) / 2
        assert_alike(loss(a, b), wanted, [a, b])
        assert not list(loss.parameters())

    def test_the_published_starts(self):
        scale, bias = SigLIP().state_dict().values()
        assert math.isclose(-scale, math.log(10), rel_tol=1e-6) and bias == -10
        (log_temperature,) = CLIP().parameters()
        assert math.isclose(log_temperature.detach().exp(), 0.07, rel_tol=1e-6)

    def test_a_training_call_lifts_the_temperature_to_one_hundredth_and_leaves_it_its_gradient(self):
        (a, b), loss = towers(), CLIP().double()
        (learned,) = loss.parameters()
        with torch.no_grad():
            learned.fill_(math.log(0.001))
            loss(a, b)
        loss.eval()(a, b)
        assert math.isclose(learned.detach().exp(), 0.001), "only training moves it"
        loss.train()(a, b).backward()
        assert math.isclose(learned.detach().exp(), 0.01) and learned.grad.abs() > 0
        assert_alike(loss(a, b), cross_entropy(replace(loss, temperature=0.01).double(), a, b).mean(), [a, b], 1e-6)

    def test_what_is_learned_is_saved(self):
        loss = SigLIP()
        for p in loss.parameters():
            nn.init.normal_(p)
        again = SigLIP()
        again.load_state_dict(loss.state_dict())
        assert [p.item() for p in again.parameters()] == [p.item() for p in loss.parameters()]
        assert loss.settings == again.settings and "learn_bias=False" in repr(SigLIP(learn_bias=False))

    def test_training_pulls_the_towers_together(self):
        torch.manual_seed(0)
        source = torch.randn(16, 6)
        for kind in KINDS.values():
            loss, first, second = kind(), nn.Linear(6, 4), nn.Linear(6, 4)
            moved = [*first.parameters(), *second.parameters(), *loss.parameters()]
            optimizer = torch.optim.Adam(moved, lr=0.02)
            start = loss(first(source), second(source)).item()
            for _ in range(60):
                optimizer.zero_grad()
                loss(first(source), second(source)).backward()
                optimizer.step()
            assert loss(first(source), second(source)).item() < 0.5 * start


@every_kind
class TestCalls:
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:.*lru_cache.*:UserWarning")
    def test_transforms_and_compilation(self, kind):
        (a, b), loss = towers(), kind().double()
        wanted = torch.autograd.grad(loss(a, b), a)[0]
        plain = (a.detach(), b.detach())
        torch.testing.assert_close(torch.func.grad(lambda x: loss(x, plain[1]))(plain[0]), wanted)
        both = torch.func.vmap(loss)(torch.stack([plain[0], plain[1]]), torch.stack([plain[1], plain[0]]))
        torch.testing.assert_close(both, loss(a, b).expand(2))
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert_alike(compiled(a, b), loss(a, b), [a, b])

    def test_half_precision(self, kind):
        a, b = (x.detach() for x in towers())
        found = kind()(a.bfloat16(), b.bfloat16())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, kind()(a.bfloat16().float(), b.bfloat16().float()))

    def test_broken_embeddings_give_no_number(self, kind):
        for tower in range(2):
            x = [x.detach().clone() for x in towers()]
            x[tower][2, 1] = torch.nan
            assert kind()(*x).isnan() and kind().per_anchor(*x).isnan().all()

    def test_one_sample_alone(self, kind):
        a, b = towers(1)
        assert kind()(a, b) == 0 if kind is CLIP else kind()(a, b) > 0

    def test_statistics_are_of_pairs_of_both_towers(self, kind):
        a, b = towers()
        found, s = kind().statistics(a, b), F.normalize(a) @ F.normalize(b).T
        s = s.detach()
        assert math.isclose(found.positive_similarity, s.diagonal().mean(), rel_tol=1e-9)
        assert math.isclose(found.negative_similarity, (s.sum() - s.trace()) / 90, rel_tol=1e-9)

    def test_every_rank_computes_all_rows(self, kind):
        (a, b), loss = towers(), kind()
        assert choose_strategy(loss) == "replicated" and across_ranks(loss)(a, b) == loss(a, b)
        with pytest.raises(InputError, match="how='anchors' needs a loss of mettle.pairs"):
            across_ranks(loss, "anchors")

    def test_what_is_not_two_towers_is_one_line(self, kind):
        a, b = (x.detach() for x in towers())
        name, y = kind.__name__, torch.arange(10)
        for given, text in (
            ((a, y), rf"^{name} compares the embeddings of two towers.*texts must be .*got torch.int64 \(10,\)"),
            ((None, b), r"images must be floating point \(n, d\), got NoneType"),
            ((a, b[:9]), r"row i of images belongs to row i of texts.*\(10, 5\) and \(9, 5\)"),
            ((a, b, a), r"labels must be \(10,\) numbers"),
            ((a, b, y[:9]), r"labels must be \(10,\) numbers"),
            ((a, b, y.double()), r"labels must be whole numbers"),
        ):
            with pytest.raises(InputError, match=text) as caught:
                kind()(*given)
            assert "\n" not in str(caught.value)
        for hard in (AdaptiveThreshold(), Product(Threshold(), AdaptiveThreshold())):
            with pytest.raises(InputError, match="here two are compared: use Threshold"):
                kind(difficulty=hard)
        for options in ({"temperature": 0.0}, {"temperature": torch.tensor(0.1)}, {"reduction": "avg"}):
            with pytest.raises(InputError):
                kind(**options)

    def test_the_trainer_has_one_network(self, kind):
        method = mettle.train.Supervised(nn.Linear(5, 4), kind())
        with pytest.raises(InputError, match="For one tower and labels use InfoNCE or SupCon"):
            method.loss(torch.randn(4, 4), torch.arange(4))


def test_the_least_temperature_is_below_the_first_one():
    with pytest.raises(InputError, match="at most the temperature that learning starts from, 0.005, got 0.01"):
        CLIP(0.005)
    assert CLIP(0.005, learn_temperature=False) and CLIP(0.005, min_temperature=0.001)
    with pytest.raises(InputError, match="min_temperature must be above 0"):
        CLIP(min_temperature=0.0)


@pytest.mark.parametrize("loss", [InfoNCE(), SupCon(), Triplet()], ids=lambda x: type(x).__name__)
def test_a_loss_of_one_tower_names_those_of_two(loss):
    a, b = towers()
    for call in (loss, loss.per_anchor, loss.statistics):
        with pytest.raises(InputError, match=r"labels of shape \(10, 5\) are sets of classes .* CLIP or SigLIP"):
            call(a, b)
