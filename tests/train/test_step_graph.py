"""When whole steps are recorded, and what is done where they cannot be; the graphs themselves are tested on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mettle.data.loader import Batch
from mettle.difficulty import AdaptiveThreshold, Hardest, Product, Threshold, curriculum
from mettle.losses import ArcFace, MultiSimilarity, SupCon, WeightedSum
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised, TwoEncoder, step_graph, train
from mettle.train.methods.distillation import DistillationSettings
from mettle.train.methods.past_embeddings import QueueSettings
from mettle.train.step_graph import RESUMES, StepRecorder, capturable_optimizers, explain_unrecordable, record_steps

from .conftest import tiny


def network(**options):
    torch.manual_seed(0)
    return Embedder(EmbedderSpec("convnet", width=4, depth=2, dim=4, **options), (1, 8, 8))


def as_on_a_gpu(method):
    """The same method, whose optimizer says that it is on CUDA: what is asked of it needs no device."""
    method.optimizer.device, method.optimizer.decides_on_device = "cuda", True
    return method


def batch(rows=12, **more):
    return Batch(torch.rand(rows, 1, 8, 8), torch.arange(rows) % 4, torch.arange(rows), 0, 0, 0.0, **more)


@pytest.mark.parametrize(
    "loss", [SupCon(), MultiSimilarity(), SupCon(difficulty=Threshold()), SupCon(neg_weight="linear")]
)
def test_steps_of_a_loss_without_a_state_can_be_recorded(loss):
    assert explain_unrecordable(as_on_a_gpu(Supervised(network(), loss, ema=0.9, clip=1.0))) is None


CLASSES = torch.arange(4)
SPACES = {"pairs": "before", "classes": "after"}
REASONS = {
    "a curriculum": ("progress", lambda: Supervised(network(), SupCon(difficulty=curriculum(Threshold())))),
    "a product": ("progress", lambda: Supervised(network(), SupCon(difficulty=Product(Threshold(), Hardest())))),
    "a sum": ("progress", lambda: Supervised(network(), WeightedSum({"a": SupCon()}, {"a": lambda done: done}))),
    "class vectors": ("state of its own", lambda: Supervised(network(), ArcFace(4, 4), classes=CLASSES)),
    "a temperature": ("state of its own", lambda: Supervised(network(), SupCon(learn_temperature=True))),
    "a threshold": ("state of its own", lambda: Supervised(network(), SupCon(difficulty=AdaptiveThreshold()))),
    "a queue": ("state of its own", lambda: Supervised(network(), SupCon(), queue=QueueSettings(24))),
    "a neck": ("state of its own", lambda: Supervised(network(neck="batchnorm", embedding="after"), SupCon())),
    "a teacher": (
        "state of its own",
        lambda: Supervised(network(), SupCon(), ema=0.9, distill=DistillationSettings(1.0)),
    ),
    "two encoders": ("TwoEncoder decides", lambda: TwoEncoder(network(), SupCon())),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_keeps_a_step_from_being_recorded_is_told(name):
    reason, build = REASONS[name]
    assert reason in str(explain_unrecordable(as_on_a_gpu(build())))


def test_the_device_the_precision_and_the_optimizer_are_told():
    method = Supervised(network(), SupCon())
    assert explain_unrecordable(method) == "there is no CUDA graph on cpu"
    method.optimizer.device = "cuda"
    assert "not a fused one" in str(explain_unrecordable(method))
    method.optimizer.decides_on_device = True
    method.optimizer.scaler = SimpleNamespace(is_enabled=lambda: True)
    assert "float16" in str(explain_unrecordable(method))


class Recorded:
    """Stands in for a graph: counts what is recorded and replayed."""

    problem: Exception | None = None

    def __init__(self, method, given, lrs, fraction_done):
        if self.problem is not None:
            raise self.problem
        self.replays = 0

    def replay(self, given, lrs):
        self.replays += 1
        return self


@pytest.fixture
def recorder(monkeypatch):
    class Own(Recorded):
        """One of this test."""

    monkeypatch.setattr(step_graph, "_RecordedStep", Own)
    method = as_on_a_gpu(Supervised(network(), SupCon(), ema=0.9, ema_start=0.5))
    monkeypatch.setattr(method, "must_read", lambda fraction_done: False)  # as after the first steps
    notes = []
    found = StepRecorder(method, notes.append)
    return SimpleNamespace(graphs=found.graphs, notes=notes, kind=Own, step=lambda b, t=0.0: found.step([b], {}, t))


def test_the_first_steps_of_a_kind_are_launched_and_later_ones_replayed(recorder):
    assert [recorder.step(batch()) is None for _ in range(6)] == [True] * step_graph.WARM + [False] * 3
    [graph] = recorder.graphs.values()
    assert graph.replays == 3 and recorder.notes == []


def test_shapes_and_stages_are_kinds_of_their_own_and_not_too_many_are_kept(recorder):
    for rows, share in ((12, 0.0), (16, 0.0), (16, 0.9), (20, 0.0), (24, 0.0), (28, 0.0)):
        results = [recorder.step(batch(rows), share) for _ in range(step_graph.WARM + 1)]
        assert (results[-1] is None) == (rows > 20)
    assert len(recorder.graphs) == step_graph.MOST


def test_batches_with_targets_and_steps_of_several_batches_are_launched(recorder):
    for _ in range(step_graph.WARM + 2):
        assert recorder.step(batch(target=torch.zeros(12))) is None
    method = as_on_a_gpu(Supervised(network(), SupCon()))
    several = StepRecorder(method, print)
    assert all(several.step([batch(), batch()], {}, 0.0) is None for _ in range(step_graph.WARM + 2))


def test_what_cuda_refuses_is_told_once(recorder):
    recorder.kind.problem = RuntimeError("operation not permitted\nwhen stream is capturing")
    assert all(recorder.step(batch()) is None for _ in range(8))
    assert len(recorder.notes) == 1 and "\n" not in recorder.notes[0] and "not permitted" in recorder.notes[0]


def test_memory_that_runs_out_is_an_error(recorder):
    recorder.kind.problem = torch.OutOfMemoryError("no memory")
    for _ in range(step_graph.WARM):
        recorder.step(batch())
    with pytest.raises(torch.OutOfMemoryError):
        recorder.step(batch())


def test_optimizers_are_capturable_while_a_step_is_recorded_only():
    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=0.25)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with capturable_optimizers({"a": adam, "b": sgd}):
        assert adam.param_groups[0]["capturable"] and "capturable" not in sgd.param_groups[0]
        adam.param_groups[0]["lr"] = torch.tensor(1.0)
    assert adam.param_groups[0]["lr"] == 0.25 and adam.param_groups[0]["capturable"] is False
    assert sgd.param_groups[0]["lr"] == 0.5


def test_a_method_forgets_its_recorder():
    method, notes = Supervised(network(), SupCon()), []
    with record_steps(method, notes.append):
        assert isinstance(method.recorder, StepRecorder)
        assert method.step(batch(), 1e-3, 0.0).applied
    assert method.recorder is None and "no CUDA graph on cpu" in notes[0]


def test_a_recipe_with_a_graph_trains_on_a_processor_and_says_what_holds(tmp_path, source):
    notes = []
    runs = {}
    for wants in (False, True):
        recipe = tiny(source).with_values({"train.cuda_graph": wants, "train.steps": 3, "train.device": "cpu"})
        runs[wants] = train(recipe, tmp_path / str(wants), tensorboard=False, on_note=notes.append if wants else print)
    assert RESUMES in notes and any("no CUDA graph on cpu" in note for note in notes)
    for a, b in zip(*(runs[wants].model.state_dict().values() for wants in (False, True)), strict=True):
        assert torch.equal(a, b)
