"""Features that hardly differ are read by a strong probe; no stronger one is tried than validation asks for."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from mettle.errors import NumericError
from mettle.evaluate import linear_probe
from mettle.evaluate.run import probes


def features(apart: float, noisy: bool, seed: int = 0):
    draw = np.random.default_rng(seed)
    centres, codes, z = draw.normal(size=(12, 16)), {}, {}
    for part, each in (("train", 20), ("val", 8), ("test", 12)):
        codes[part] = np.repeat(np.arange(12), each)
        own = centres[codes[part]] + 0.4 * draw.normal(size=(12 * each, 16))
        if noisy:
            own[:, 8:] = 10 * draw.normal(size=(12 * each, 8))  # what says nothing is louder than what does
        z[part] = (np.full(16, 2.0) + apart * own).astype(np.float32)
    return z, codes


def test_nearly_collapsed_features_are_read_as_well_as_they_can_be():
    z, codes = features(0.03, noisy=True)
    found = linear_probe.fit_probe(z, codes)
    assert found.strength > max(linear_probe.STRENGTHS)
    unit = {part: x / np.linalg.norm(x, axis=1, keepdims=True) for part, x in z.items()}
    best = LogisticRegression(C=found.strength, max_iter=5000).fit(unit["train"], codes["train"])
    wanted = best.score(unit["test"], codes["test"])
    weak = (
        LogisticRegression(C=100.0, max_iter=5000).fit(unit["train"], codes["train"]).score(unit["test"], codes["test"])
    )
    assert abs(found.probe.linear.accuracy - wanted) < 0.03 and wanted > weak + 0.1


def test_features_far_apart_need_none_of_that(monkeypatch):
    asked = []
    fit = linear_probe.probe
    monkeypatch.setattr(
        linear_probe, "probe", lambda *a, strength, **k: (asked.append(strength), fit(*a, strength=strength, **k))[1]
    )
    linear_probe.fit_probe(*features(3.0, noisy=False))
    assert asked[:3] == list(linear_probe.STRENGTHS) and len(asked) < 5


def noisy_features(seed: int = 3):
    """Few samples of loud noise: the weaker the probe, the better it reads."""
    draw = np.random.default_rng(seed)
    centres, codes, z = draw.normal(size=(4, 60)), {}, {}
    for part, each in (("train", 10), ("val", 250), ("test", 250)):
        codes[part] = np.repeat(np.arange(4), each)
        z[part] = centres[codes[part]] + 4.0 * draw.normal(size=(4 * each, 60))
    return z, codes


def test_a_weaker_probe_is_tried_while_the_weakest_is_the_best():
    z, codes = noisy_features()
    found = linear_probe.fit_probe(z, codes)
    assert found.strength < min(linear_probe.STRENGTHS)
    assert not any("may read more" in note for note in found.probe.warnings)  # it lies inside of what was tried


def test_the_best_of_equal_strengths_lies_inside_the_grid():
    found = linear_probe.fit_probe(*features(3.0, noisy=False))
    assert found.strength == linear_probe.STRENGTHS[1] and not found.probe.warnings


def test_a_best_strength_at_an_edge_is_said(monkeypatch):
    monkeypatch.setattr(linear_probe, "WEAKER", ())
    found = linear_probe.fit_probe(*noisy_features())
    assert found.strength == 1.0
    assert "the probe was best at the smallest strength tried, 1: a weaker one may read more" in found.probe.warnings


def test_a_strength_that_does_not_converge_is_never_chosen(monkeypatch):
    z, codes = features(0.03, noisy=True)
    fit = linear_probe.probe

    def stubborn(*args, strength, **options):
        if strength > 1:
            raise NumericError(f"the linear probe of strength {strength:g} has not converged")
        return fit(*args, strength=strength, **options)

    monkeypatch.setattr(linear_probe, "probe", stubborn)
    found = linear_probe.fit_probe(z, codes)
    assert found.strength <= 1
    monkeypatch.setattr(linear_probe, "STEP_RANGE", (1, 1))
    monkeypatch.setattr(linear_probe, "probe", fit)
    with pytest.raises(NumericError, match="no linear probe converged: the linear probe of strength 0.0001 has not"):
        linear_probe.fit_probe(z, codes)
    seen = {"E_d": z, "E_b": z}
    assert probes._fit_all(seen, codes)[1].startswith("not measurable: E_d: no linear probe converged")
