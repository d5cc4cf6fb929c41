"""Features that hardly differ are read by a strong probe; no stronger one is tried than validation asks for."""

import numpy as np
from sklearn.linear_model import LogisticRegression

from mettle.evaluate import reading


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
    found = reading.reading(z, codes)
    assert found.strength > max(reading.STRENGTHS)
    unit = {part: x / np.linalg.norm(x, axis=1, keepdims=True) for part, x in z.items()}
    best = LogisticRegression(C=found.strength, max_iter=5000).fit(unit["train"], codes["train"])
    wanted = best.score(unit["test"], codes["test"])
    weak = (
        LogisticRegression(C=100.0, max_iter=5000).fit(unit["train"], codes["train"]).score(unit["test"], codes["test"])
    )
    assert abs(found.probe.linear.accuracy - wanted) < 0.03 and wanted > weak + 0.1


def test_features_far_apart_need_none_of_that(monkeypatch):
    asked = []
    fit = reading.probe
    monkeypatch.setattr(
        reading, "probe", lambda *a, strength, **k: (asked.append(strength), fit(*a, strength=strength, **k))[1]
    )
    reading.reading(*features(3.0, noisy=False))
    assert asked[:3] == list(reading.STRENGTHS) and len(asked) < 5
