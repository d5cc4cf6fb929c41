"""Groups against the same metric on the rows of a group, and who may be called the worst."""

import json

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import (
    NotMeasurable,
    class_size,
    from_scores,
    groups,
    identification,
    probe,
    quantile_bins,
    retrieval,
    sample_difficulty,
    verification,
)


def people(seed=0, subjects=120, each=4, d=16):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(subjects), each)
    kind = np.where(y % 3 == 0, "hard", "easy")
    noise = np.where(kind == "hard", 1.5, 0.6)[:, None]
    return (rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d))).astype(np.float32), y, kind


def test_a_group_is_what_its_rows_alone_give():
    x, y, kind = people()
    v = verification(x, y)
    g = groups(v, kind, minimum=20)
    tau = v.threshold(1e-2)
    for name in ("hard", "easy"):
        own = verification(x[kind == name], y[kind == name])
        values = g[name].values
        assert (values["eer"], values["auc"]) == (own.eer, own.auc)
        assert (values["fmr"], values["fnmr"]) == own.rates(tau)
        assert g[name].interval("eer") == own.interval("eer")
        assert g[name].subjects == len(np.unique(y[kind == name]))
    assert g.worst.name == "hard"
    assert g.gap == pytest.approx(g["hard"].values["eer"] - g["easy"].values["eer"])
    assert [w.name for w in g.rank_groups("fnmr")] == ["hard", "easy"]
    assert (g.threshold, g.far) == (tau, 1e-2)
    json.dumps(g.summary(), allow_nan=False)


def test_small_groups_are_listed_but_never_the_worst():
    x, y, kind = people()
    kind = np.where(y < 4, "few", kind)
    g = groups(verification(x, y), kind)
    assert g.small_groups == ("few", "hard")
    assert g.worst.name == "easy"
    assert "few" in g.warnings[0]
    with pytest.raises(NotMeasurable, match="no group has 500 subjects"):
        _ = groups(verification(x, y), kind, minimum=500).worst


def test_groups_may_overlap_and_one_without_pairs_says_why():
    x, y, kind = people()
    masks = {"all": np.ones(len(y), bool), "hard": kind == "hard", "one person": y == 0}
    g = groups(verification(x, y), masks, minimum=20)
    assert g["all"].values["eer"] == verification(x, y).eer
    assert g["one person"].values["eer"] is None
    assert "impostor" in g["one person"].why_not
    with pytest.raises(NotMeasurable, match="no interval"):
        g["one person"].interval()


def test_domains_galleries_and_trials_are_kept():
    x, y, kind = people()
    camera = np.tile([0, 1], len(y) // 2)
    v = verification(x, y, domains=camera, trials="across")
    own = verification(x[kind == "hard"], y[kind == "hard"], domains=camera[kind == "hard"], trials="across")
    assert groups(v, kind, minimum=2)["hard"].values["eer"] == own.eer
    half = camera == 0
    v = verification(x[half], y[half], gallery=(x[~half], y[~half]))
    g = groups(v, kind[half], gallery_attribute=kind[~half], minimum=2)
    a, b = half & (kind == "hard"), ~half & (kind == "hard")
    assert g["hard"].values["auc"] == verification(x[a], y[a], gallery=(x[b], y[b])).auc
    with pytest.raises(InputError, match="gallery_attribute"):
        groups(v, kind[half])
    i, j = np.triu_indices(len(y), 1)
    pick = np.random.default_rng(0).random(len(i)) < 0.2
    trials = np.stack([i, j, y[i] == y[j]], axis=1)[pick].astype(int)
    inside = (kind[trials[:, 0]] == "hard") & (kind[trials[:, 1]] == "hard")
    wanted = verification(x, y, trials=trials[inside])
    assert groups(verification(x, y, trials=trials), kind, minimum=2)["hard"].values["eer"] == wanted.eer
    ids = 10**12 + np.arange(len(y))
    named = np.stack([ids[trials[:, 0]], ids[trials[:, 1]], trials[:, 2]], axis=1)
    assert groups(verification(x, y, ids=ids, trials=named), kind, minimum=2)["hard"].values["eer"] == wanted.eer


def test_a_threshold_that_was_set_elsewhere_is_used_as_it_is():
    x, y, kind = people()
    g = groups(verification(x, y), kind, threshold=0.5)
    assert (g.threshold, g.far) == (0.5, None)
    assert g["easy"].values["fmr"] == verification(x[kind == "easy"], y[kind == "easy"]).rates(0.5)[0]


def test_per_item_results_are_averaged_by_group():
    x, y, kind = people()
    r = retrieval(x, y)
    g = groups(r, kind, minimum=20)
    at = kind[r.queries] == "hard"
    assert g["hard"].values["recall@1"] == pytest.approx(r.recall_at[1][at].mean())
    assert g.worst.name == "hard"
    assert groups(r, kind, metric="map_at_r", minimum=20).metric == "map_at_r"
    shelf = np.arange(0, len(y), 4)
    rest = np.setdiff1d(np.arange(len(y)), shelf)
    i = identification((x[shelf], y[shelf]), (x[rest], y[rest]))
    assert groups(i, kind[rest], minimum=20).worst.name == "hard"
    p = probe((x[shelf], y[shelf]), (x[rest], y[rest]), k=1)
    assert groups(p, kind[rest], minimum=20, metric="knn").worst.name == "hard"
    with pytest.raises(InputError, match="no metric named"):
        groups(r, kind, metric="recall@3")
    with pytest.raises(InputError, match="slices a result"):
        groups(3.0, kind)  # type: ignore[arg-type]


def test_slices_by_difficulty_and_class_size():
    x, y, _ = people()
    r = retrieval(x, y)
    hard = sample_difficulty(x, y)
    g = groups(r, quantile_bins(hard, 4), minimum=1)
    means = [g[f"{k} of 4"].values["recall@1"] for k in (1, 2, 3, 4)]
    assert means == sorted(means, reverse=True)
    assert means[0] == 1
    assert means[-1] < 0.5
    sizes = class_size([0, 0, 1, 1, 1, 1, 2])
    assert sizes.tolist() == ["fewer than 3"] * 2 + ["3 to 5"] * 4 + ["fewer than 3"]
    with pytest.raises(InputError, match="finite"):
        quantile_bins([1.0, np.nan])


def test_what_cannot_be_sliced_is_refused():
    x, y, kind = people()
    v = verification(x, y)
    with pytest.raises(InputError, match="one entry per embedding"):
        groups(v, kind[:-1])
    with pytest.raises(InputError, match="integers or text"):
        groups(v, np.linspace(0, 1, len(y)))
    with pytest.raises(InputError, match="mask"):
        groups(v, {"a": np.ones(3, bool)})
    with pytest.raises(InputError, match="from_scores"):
        groups(from_scores([0.9, 0.1], [1, 0]), ["a", "b"])


def test_a_metric_is_ranked_among_the_people_that_it_rests_on_whatever_metric_was_asked_for_first():
    """Group "few" has 60 people of whom ten have a second sample: enough for FMR, not for anything else."""
    x, y, _ = people()
    kind = np.where(y < 60, "few", "many")
    rows = (y < 10) | (y >= 60) | (np.arange(len(y)) % 4 == 0)
    v, kind = verification(x[rows], y[rows]), kind[rows]
    wanted = {"eer": {"many"}, "auc": {"many"}, "fnmr": {"many"}, "fmr": {"few", "many"}}
    for asked in wanted:
        g = groups(v, kind, metric=asked, minimum=50)
        for metric, names in wanted.items():
            assert {one.name for one in g.rank_groups(metric)} == names, (asked, metric)
        assert g["few"].subjects == (60 if asked == "fmr" else 10)
    with pytest.raises(InputError, match="no metric named 'fmmr'; did you mean 'fmr'"):
        groups(v, kind, metric="fmmr")
