"""The engine itself: choice, memory, queue, ids, statistics, determinism."""

from types import SimpleNamespace

import pytest
import torch

from laws.members import Given, batch, with_difficulty
from laws.memory import Largest
from mettle.difficulty import (
    AdaptiveThreshold,
    Angular,
    DistanceWeightedSampling,
    EasyHard,
    Hardest,
    Importance,
    Relative,
    SemiHard,
    Threshold,
)
from mettle.errors import InputError
from mettle.losses import Contrastive, CosFace, InfoNCE, LiftedStructure, NPair, SelfTriplet, SupCon, Triplet
from mettle.pairs import Queue

N = 1024  # four tiles a side: what holds them all at once is seen as well as with more of them
BIG = {
    "supcon": SupCon(0.1),
    "infonce": InfoNCE(0.5, 0.1),
    "contrastive": Contrastive(0.2, 1.0),
    "triplet": Triplet(0.2),
    "self triplet": SelfTriplet(0.1),
    "lifted": LiftedStructure(normalise=True),
    "n-pair": NPair(),
}
FORMS = {
    "supcon in": SupCon(0.1, "in"),
    "supcon penalty": SupCon(0.1, neg_weight="penalty"),
    "supcon cold": SupCon(0.01),
    "triplet hardest": Triplet(0.2, "hardest"),
    "triplet semihard": Triplet(0.2, "semihard"),
    "triplet random": Triplet(0.2, "random"),
}
HARD = {
    "none": None,
    "threshold": Threshold(),
    "importance": Importance(1.0),
    "relative": Relative(),
    "hardest": Hardest(),
    "semi-hard": SemiHard(0.5),
    "hard-semi-hard": EasyHard("hard", "semihard"),
    "angular": Angular(),
    "distance-weighted sampling": DistanceWeightedSampling(),
}


WHOLE = [(name, hard) for name in BIG for hard in HARD] + [(name, "none") for name in FORMS]
WHOLE.remove(("n-pair", "distance-weighted sampling"))  # it is about distances on the sphere


@pytest.mark.parametrize(("name", "difficulty"), WHOLE)
def test_no_toy_nothing_quadratic_is_ever_held(name, difficulty):
    """Every loss with every difficulty at four tiles a side, forward and backward: no tensor of N²/4 entries."""
    check_memory(name, difficulty, N, engine="tiled")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "difficulty"), WHOLE)
def test_nothing_quadratic_at_a_size_that_chooses_tiles_itself(name, difficulty):
    check_memory(name, difficulty, 8192, engine="auto")


def check_memory(name, difficulty, n, engine):
    loss = (BIG | FORMS)[name]
    loss = loss if HARD[difficulty] is None else with_difficulty(loss, HARD[difficulty])
    if name == "n-pair" and difficulty in ("threshold", "importance", "relative"):
        return  # cosine difficulties on raw dot products have no meaning
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n)[torch.randperm(n, generator=generator)] // 2
    z = torch.nn.functional.normalize(torch.randn(n, 4, generator=generator)).requires_grad_()
    options = {"biased": torch.randn(n, 4, generator=generator)} if difficulty == "relative" else {}
    with Largest() as seen:
        output = loss.output(z, y, engine=engine, **options)
        output.mean().backward()
    assert output.engine == "tiled"
    assert torch.isfinite(z.grad).all()
    assert seen.size < n * n // 4, f"a tensor of {seen.size} entries"


def test_the_measure_of_memory_sees_a_matrix():
    with Largest() as seen:
        SupCon(0.1)(torch.randn(512, 4), torch.arange(512) // 4, engine="dense")
    assert seen.size >= 512 * 512


def test_the_engine_is_chosen_by_size_and_said():
    small, large = torch.randn(64, 4), torch.randn(1500, 4)
    for loss, engine in ((SupCon(), "closed-form"), (SupCon(form="in"), "dense"), (Contrastive(), "dense")):
        assert loss.output(small, torch.arange(64) // 2).engine == engine
        assert loss.statistics(small, torch.arange(64) // 2).engine == engine
        assert loss.output(large, torch.arange(1500) // 2).engine == "tiled"
        assert loss.statistics(large, torch.arange(1500) // 2).engine == "tiled"
        for asked in ("dense", "tiled"):
            assert loss.output(small, torch.arange(64) // 2, engine=asked).engine == asked


def test_the_l1_measure_is_dense_only():
    z, y = batch()
    loss = Contrastive(0.2, 2.0, "linear", normalise=False, l1=True)
    d = (z[:, None] - z[None]).abs().sum(-1)
    pos = (y[:, None] == y[None]) & ~torch.eye(14, dtype=torch.bool)
    neg = y[:, None] != y[None]
    near = ((d - 0.2).clamp(min=0) * pos).sum(1) / pos.sum(1).clamp(min=1)
    wanted = near + (((2 - d).clamp(min=0) * neg).sum(1) / neg.sum(1).clamp(min=1))
    torch.testing.assert_close(loss.output(z, y).values, wanted)
    with pytest.raises(InputError, match="dense form only"):
        loss(z, y, engine="tiled")


def test_runs_are_identical_bit_for_bit():
    z = torch.randn(3000, 16)
    y = torch.arange(3000) // 3
    found = []
    for _ in range(3):
        leaf = z.clone().requires_grad_()
        value = SupCon(0.1, difficulty=Threshold())(leaf, y)
        value.backward()
        found.append((value.item(), leaf.grad))
    assert all(a == found[0][0] and torch.equal(g, found[0][1]) for a, g in found)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_against_itself_by_ids_is_the_batch_alone(engine):
    z, y = batch()
    at = torch.arange(14)
    wanted = SupCon(0.3)(z, y, engine=engine, tile=4)
    found = SupCon(0.3)(z, y, ref=(z, y, at), ids=at, engine=engine, tile=4)
    torch.testing.assert_close(found, wanted)
    (a,), (b,) = torch.autograd.grad(found, z), torch.autograd.grad(wanted, z)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("n", "size"), [(1100, 61), (300, 150), (300, 300)])
@pytest.mark.parametrize("loss", [SupCon(0.2), SupCon(0.2, difficulty=Threshold()), InfoNCE(0.5, 0.1)], ids=repr)
def test_large_classes_by_lists_and_by_tiles_equal_dense(loss, n, size):
    """61 of a class: more positive pairs than one list holds. 150 and 300: more than lists are good for."""
    from mettle.pairs.problem import build_problem
    from mettle.pairs.tiled import list_positive_pairs

    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    y = (torch.arange(n) // size)[torch.randperm(n, generator=generator)]
    lists = list_positive_pairs(build_problem(loss, z, y, None, None, None, None, sort=True)[0])
    assert lists is None if size > 61 else len(lists) == 2
    found, wanted = (loss.output(z, y, engine=engine) for engine in ("tiled", "dense"))
    torch.testing.assert_close(found.values, wanted.values)
    (a,), (b,) = (torch.autograd.grad(output.mean(), z) for output in (found, wanted))
    torch.testing.assert_close(a, b)


class TestQueue:
    def test_a_queue_is_a_larger_reference_without_gradient(self):
        z, y = batch()
        old, labels = batch(20, seed=7)
        queue = Queue(64, 5).double()
        queue.push(old, labels)
        found = SupCon(0.3).output(z, y, **queue.against(z, y))
        both, names = torch.cat([z, old.detach()]), torch.cat([y, labels])
        wanted = SupCon(0.3).output(both, names).values[:14]  # the same anchors among everything
        torch.testing.assert_close(found.values, wanted)
        assert old.grad is None

    def test_an_empty_queue_is_the_batch_alone(self):
        z, y = batch()
        torch.testing.assert_close(SupCon(0.3)(z, y, **Queue(8, 5).against(z, y)), SupCon(0.3)(z, y))

    def test_the_oldest_are_forgotten(self):
        queue = Queue(5, 1)
        for k in range(4):
            queue.push(torch.full((2, 1), float(k)), torch.full((2,), k))
        assert len(queue) == 5
        assert sorted(queue.labels.tolist()) == [1, 2, 2, 3, 3]
        queue.push(torch.arange(9.0)[:, None], torch.arange(9))
        assert sorted(queue.labels.tolist()) == [4, 5, 6, 7, 8]

    def test_state_survives(self):
        queue = Queue(4, 2)
        queue.push(torch.ones(3, 2), torch.arange(3))
        other = Queue(4, 2)
        other.load_state_dict(queue.state_dict())
        assert len(other) == 3 and torch.equal(other.embeddings, queue.embeddings)

    def test_the_wrong_width_is_named(self):
        with pytest.raises(InputError, match="dim 2, got 3"):
            Queue(4, 2).push(torch.ones(1, 3), torch.zeros(1, dtype=torch.long))


class TestStatistics:
    def test_hard_shares_and_weights_are_counted_by_hand(self):
        z, y = batch(28, 6, seed=1)
        hard = Threshold(1.0, 2.0, 0.6, 0.1)
        unit = torch.nn.functional.normalize(z.detach())
        s = unit @ unit.T
        pos = (y[:, None] == y[None]) & ~torch.eye(28, dtype=torch.bool)
        neg = y[:, None] != y[None]
        w_neg = 1 + 2 * ((s - 0.1) / 0.9).clamp(min=0)
        found = SupCon(0.2, difficulty=hard).statistics(z, y)
        assert found.hard_positives == pytest.approx(float((s[pos] < 0.6).double().mean()))
        assert found.hard_negatives == pytest.approx(float((s[neg] > 0.1).double().mean()))
        assert found.negative_weight == pytest.approx(float(w_neg[neg].mean()))
        assert found.positive_similarity == pytest.approx(float(s[pos].mean()))
        rows = [(w_neg[i][neg[i]].sum() ** 2 / w_neg[i][neg[i]].square().sum()).item() for i in range(28)]
        assert found.effective_negatives == pytest.approx(sum(rows) / 28)
        assert found.anchors == 28 and found.anchors_without_positives == int((pos.sum(1) == 0).sum())

    def test_mining_is_seen_as_pairs_kept(self):
        z, y = batch()
        found = SupCon(0.2, difficulty=Hardest()).statistics(z, y)
        assert found.hard_negatives == 0 and 0 < found.kept_negatives < 0.2
        assert found.effective_negatives == pytest.approx(1.0)

    def test_large_and_small_batches_agree(self):
        z, y = torch.randn(1200, 8), torch.arange(1200) // 3
        loss = SupCon(0.2, difficulty=Threshold())
        a = loss.statistics(z, y)
        some = torch.randperm(1200)
        b = loss.statistics(z[some], y[some])
        assert a.engine == "tiled"
        assert a.hard_negatives == pytest.approx(b.hard_negatives)
        assert set(a.as_dict()) >= {"hard_positives", "clamp_fraction", "anchors_without_positives"}

    @pytest.mark.parametrize("loss", [SupCon(), CosFace(4, 8), CosFace(4, 8, difficulty=Threshold())], ids=repr)
    def test_statistics_for_a_log_line_are_numbers_only(self, loss):
        found = loss.statistics(torch.randn(12, 8), torch.arange(12) // 3)
        found = found if isinstance(found, dict) else found.as_dict()
        assert found and {type(value) for value in found.values()} <= {int, float}


class TestAdaptive:
    def test_thresholds_move_towards_the_data_only_while_training(self):
        z, y = batch(28, 6)
        hard = AdaptiveThreshold(momentum=0.5)
        loss = SupCon(0.2, difficulty=hard)
        loss.statistics(z, y)
        with torch.no_grad():
            loss(z, y)
        assert (float(hard.positive), float(hard.negative)) == pytest.approx((0.7, 0.3))
        for _ in range(30):
            loss(z, y)
        unit = torch.nn.functional.normalize(z.detach())
        s = unit @ unit.T
        pos = (y[:, None] == y[None]) & ~torch.eye(28, dtype=torch.bool)
        assert float(hard.positive) == pytest.approx(max(float(s[pos].mean()), 0.05), abs=1e-3)
        assert float(hard.negative) == pytest.approx(float(s[y[:, None] != y[None]].quantile(0.9)), abs=0.05)

    def test_it_weighs_like_the_threshold_it_is_now(self):
        z, y = batch()
        hard = AdaptiveThreshold()
        with torch.no_grad():
            torch.testing.assert_close(
                SupCon(0.2, difficulty=hard)(z, y), SupCon(0.2, difficulty=hard.current_threshold())(z, y)
            )

    def test_its_state_is_saved(self):
        hard = AdaptiveThreshold()
        hard.positive.fill_(0.5)
        other = AdaptiveThreshold()
        other.load_state_dict(hard.state_dict())
        assert float(other.positive) == 0.5


def test_given_weights_need_not_be_symmetric():
    z, y = batch()
    w = torch.rand(14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = SupCon(0.2, difficulty=Given(w)).per_anchor(z, y, engine="dense")
    b = SupCon(0.2, difficulty=Given(w)).per_anchor(z, y, engine="tiled", tile=3)
    c = SupCon(0.2, difficulty=Given(w.T.contiguous())).per_anchor(z, y, engine="tiled", tile=3)
    torch.testing.assert_close(a, b, equal_nan=True)
    assert not torch.allclose(b, c, equal_nan=True)


@pytest.mark.parametrize(
    ("facts", "fits"),
    [
        ({"major": 9, "shared_memory_per_multiprocessor": 228 << 10}, True),
        ({"major": 8, "shared_memory_per_multiprocessor": 164 << 10}, False),
        ({"major": 12, "shared_memory_per_multiprocessor": 100 << 10}, False),
    ],
)
def test_fused_kernels_run_where_their_tiles_fit(monkeypatch, facts, fits):
    from mettle.pairs.kernels import available

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(**facts))
    monkeypatch.setattr("mettle.pairs.kernels.find_spec", lambda name: object())
    assert available.__wrapped__(0) is fits
