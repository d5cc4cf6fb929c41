import base64
import io
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from tables import make_results

from mettle.report import pair_cards


def obvious(found, kind: str, count: int, each: int) -> list[tuple[int, int]]:
    """All pairs in a list, sorted, taken from the top: no tiles, no shared code."""
    s, way = found.samples, found.headline
    z = found.embeddings.astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    if way.gallery is None:
        listed = list(combinations(range(len(s)), 2))
    else:
        listed = [(int(i), int(j)) for i in way.probe for j in way.gallery]
    if way.trials == "across":
        listed = [(i, j) for i, j in listed if s.domain.codes[i] != s.domain.codes[j]]
    listed = [(i, j) for i, j in listed if (s.labels[i] == s.labels[j]) == (kind == "genuine")]
    listed.sort(key=lambda p: (z[p[0]] @ z[p[1]]) * (1 if kind == "genuine" else -1))
    seen, taken = Counter(), []
    for i, j in listed:
        two = frozenset((s.labels[i], s.labels[j]))
        if seen[two] < each and len(taken) < count:
            taken.append((i, j))
        seen[two] += 1
    return taken


@pytest.mark.parametrize("mode", ["all", "domains", "roles"])
@pytest.mark.parametrize("kind", ["genuine", "impostor"])
def test_search_equals_sorting_all_pairs(mode, kind):
    found = make_results(mode)
    got = pair_cards.hardest_pairs(found, kind)
    assert [(p.first, p.second) for p in got] == obvious(found, kind, 12, 2)


def test_scores_are_those_of_the_evaluation(made):
    v = made.evaluation.results.verifications["cross-domain"].scores
    assert pair_cards.hardest_pairs(made.evaluation.results, "genuine")[0].score == v.genuine[0]
    assert pair_cards.hardest_pairs(made.evaluation.results, "impostor")[0].score == v.impostor[-1]


def test_few_identities_give_a_short_list():
    found = make_results("all", n=40, labels=2)
    assert len(pair_cards.hardest_pairs(found, "impostor")) == 2  # one pair of identities, two pictures of it
    assert len(pair_cards.hardest_pairs(found, "genuine")) == 4


def test_decision_takes_the_threshold_that_was_set(made):
    metrics = made.evaluation.metrics
    usable = [f for f, e in metrics["thresholds"]["set"].items() if e["threshold"] is not None]
    smallest = min(usable, key=float)
    decided = pair_cards.choose_threshold(metrics)
    assert decided.threshold == metrics["thresholds"]["set"][smallest]["threshold"]
    assert "validation identities" in decided.title
    bare = {k: v for k, v in metrics.items() if k != "thresholds"}
    assert "cross-domain test pairs" in pair_cards.choose_threshold(bare).title
    assert pair_cards.choose_threshold(bare, far=0.5) is None


def test_verdicts(made):
    s = made.evaluation.results.samples
    one = [pair_cards.HardPair(0, 9, 0.5)]
    at = pair_cards.PairThreshold(0.5, "")
    above = pair_cards.PairThreshold(0.51, "")
    told = {
        (kind, d): pair_cards.pair_rows(one, s, d, kind)[0]
        for kind in ("genuine", "impostor")
        for d in (at, above, None)
    }
    assert told["impostor", at]["verdict"] == "accepted"
    assert told["impostor", at]["wrong"]
    assert not told["impostor", above]["wrong"]
    assert told["genuine", above]["verdict"] == "rejected"
    assert told["genuine", above]["wrong"]
    assert told["genuine", None]["verdict"] == ""
    assert told["genuine", at]["sides"][1]["id"] == s.ids[9]
    assert told["genuine", at]["sides"][0]["domain"] == "indoors"


@pytest.mark.parametrize(("size", "channels", "kind"), [(32, 1, "PNG"), (64, 3, "PNG"), (300, 3, "JPEG")])
def test_thumbnails(size, channels, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (size, size // 2, channels), np.uint8)
    head, _, body = pair_cards.encode_thumbnail(pixels).partition(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(body)))
    assert image.format == kind
    assert head == f"data:image/{kind.lower()}"
    assert max(image.size) == min(size, 128)
    if kind == "PNG":
        assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


def test_rows_have_no_pictures(table):
    found = table.evaluation.results
    shown = pair_cards.pair_rows(pair_cards.hardest_pairs(found, "genuine"), found.samples, None, "genuine")
    assert shown
    assert all(side["picture"] is None for pair in shown for side in pair["sides"])
