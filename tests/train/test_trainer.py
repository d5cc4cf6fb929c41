"""A request to stop that comes at any moment: the run ends with a checkpoint of the last step that was made."""

import os
import signal

import numpy as np
import pytest

from mettle.data import Augment, Loader, PKBatchSampler, Samples
from mettle.data.inputs import FeatureArray
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised, checkpoint, run_loop
from mettle.train.callbacks import Checkpoint, OnStep, StopOnSignal
from mettle.train.optim import Schedule


def started(folder, steps, on_step, stop=None):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    samples = Samples.of(FeatureArray(x), np.arange(40) // 4)
    model = Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (3,))
    loader = Loader(samples, PKBatchSampler(samples.labels, 4, 2), Augment())
    callbacks = [OnStep(on_step), stop or StopOnSignal(), Checkpoint(folder / "checkpoints", 50)]
    return run_loop(Supervised(model, SupCon()), loader, Schedule(steps, 1e-3), callbacks)


class Watched(StopOnSignal):
    """Sends a real signal the moment after it has looked whether one had come."""

    def __init__(self, number, look):
        super().__init__()
        self.number, self.look = number, look

    def on_step(self, state):
        super().on_step(state)
        if state.step == self.look:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("look", range(1, 7))
def test_a_signal_right_after_any_look_loses_no_step(tmp_path, number, look):
    made = []
    assert not started(tmp_path, 50, lambda step, line: made.append(step), Watched(number, look))
    step, _, _ = checkpoint.load_latest(tmp_path / "checkpoints")
    assert step == made[-1] == look + 1, "one look a step: the step after the signal is the last"


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_signal_within_a_step_ends_after_it(tmp_path, at):
    def send(step, line):
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    finished = started(tmp_path, 6, send)
    assert finished == (at == 6)
    assert checkpoint.load_latest(tmp_path / "checkpoints")[0] == at
