"""A request to stop that comes at any moment: the run ends with a checkpoint of the last step that was made."""

import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from mettle.data import Augment, ClassBatches, Loader, Samples
from mettle.data.rows import Rows
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised, checkpoint
from mettle.train import trainer as loop


def started(folder, steps, **options):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    samples = Samples.of(Rows(x), np.arange(40) // 4)
    model = Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (3,))
    loader = Loader(samples, ClassBatches(samples.labels, 4, 2), Augment())
    pace = loop.Pace(steps, 1e-3, checkpoint_every=50, log_every=50)
    return loop.run(Supervised(model, SupCon()), loader, pace, folder=folder, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("look", range(1, 7))
def test_a_signal_right_after_any_look_loses_no_step(tmp_path, monkeypatch, number, look):
    """A real signal, sent the moment after the loop has looked whether one had come."""
    real, made, looks = loop.stop_requests, [], iter(range(1, 100))

    @contextmanager
    def watched():
        with real() as asked:

            def answer():
                found = asked()
                if next(looks) == look:
                    os.kill(os.getpid(), number)
                return found

            yield answer

    monkeypatch.setattr(loop, "stop_requests", watched)
    assert not started(tmp_path, 50, progress=lambda step, line: made.append(step))
    step, _, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert step == made[-1] == look + 1, "one look a step: the step after the signal is the last"


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_signal_within_a_step_ends_after_it(tmp_path, at):
    def send(step, line):
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    finished = started(tmp_path, 6, progress=send)
    assert finished == (at == 6)
    assert checkpoint.latest(tmp_path / "checkpoints")[0] == at
