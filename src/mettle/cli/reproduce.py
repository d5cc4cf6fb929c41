"""What is said of the methods and can be tried on any machine, without data that do not come with the package.

One function tries one claim and returns what it measured and its control; what is drawn by chance is drawn for several
seeds, and a difference counts where its 95 % interval (Student's t, paired by seed) leaves out 0.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mettle.cli.options import app, cache_folder
from mettle.errors import InputError

Verdict = Literal["holds", "contradicted", "not decided", "withdrawn"]

WITHDRAWN = "verdict withdrawn, being measured again"
STEPS = 150  # of a small network: enough for the claims below, seconds on a laptop
PEOPLE, WIDE, PROBES, REPEATS = 10_000, 128, 20, 5


@dataclass(frozen=True)
class Outcome:
    """What came out: lines to read, the same as numbers, and whether the claim holds here."""

    lines: Sequence[str]
    verdict: Verdict
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """Something that is said of a method, and the function that tries it with so many seeds."""

    says: str
    trial: Callable[[int, Path | None], Outcome]
    withdrawn: str = ""  # why its verdict does not stand; what was measured is still shown

    def judge(self, seeds: int, cache: Path | None) -> Outcome:
        """Try it; a claim whose set-up cannot decide it has no verdict but that."""
        found = self.trial(seeds, cache)
        if not self.withdrawn:
            return found
        return replace(found, lines=[*found.lines, f"{WITHDRAWN}: {self.withdrawn}"], verdict="withdrawn")


def try_literal_beta(seeds: int, cache: Path | None) -> Outcome:
    """Gradients with and without beta, of the formula as first written and of the default."""
    import torch

    from mettle.losses import DASupCon

    y, change = torch.arange(32) // 4, {}
    for preset in ("literal", "default"):
        most = 0.0
        for seed in range(seeds):
            z = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
            a, b = (torch.autograd.grad(DASupCon(beta=beta, preset=preset)(z, y), z)[0] for beta in (0.0, 10.0))
            most = max(most, float((a - b).norm() / a.norm()))
        change[preset] = most
    lines = [f"beta 0 to 10 changes the gradient by {x:.3g} of itself, {name}" for name, x in change.items()]
    return Outcome(lines, "holds" if change["literal"] == 0 < change["default"] else "contradicted", change)


def try_stalled_push(seeds: int, cache: Path | None) -> Outcome:
    """How hard two strangers at a distance are pushed apart by each form of the contrastive loss."""
    import torch

    from mettle.losses import Contrastive

    push: dict[str, dict[float, float]] = {}
    for form in ("squared", "hadsell"):
        for apart in (0.5, 0.001):
            z = torch.tensor([[0.0], [0.0], [apart], [apart]], dtype=torch.float64, requires_grad=True)  # two twins
            value = Contrastive(0.0, 1.0, form, normalise=False)(z, torch.tensor([0, 0, 1, 1]))
            push.setdefault(form, {})[apart] = float(torch.autograd.grad(value, z)[0][0].norm())
    lines = [
        f"{form}: pushed with {at[0.5]:.3g} at distance 0.5, with {at[0.001]:.3g} at 0.001" for form, at in push.items()
    ]
    fades, stays = (push[form][0.001] / push[form][0.5] for form in ("squared", "hadsell"))
    return Outcome(lines, "holds" if fades < 0.01 and stays >= 1 else "contradicted", push)


def try_faiss_speed(seeds: int, cache: Path | None) -> Outcome:
    """Exact search by Faiss against the exact ways of NumPy, on one thread: a probe at a time, and all at once."""
    import faiss
    import numpy as np
    from threadpoolctl import threadpool_limits

    times: dict[str, list[float]] = {}  # milliseconds a probe, one entry for each draw
    alike, threads = True, faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(1)
        with threadpool_limits(1):
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                people, probes = (rng.standard_normal((n, WIDE)).astype(np.float32) for n in (PEOPLE, PROBES))
                people, probes = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (people, probes))
                found = {name: _time_search(way, probes) for name, way in _search_ways(people).items()}
                for name, (spent, _) in found.items():
                    times.setdefault(name, []).append(spent)
                first = found[FAISS][1]
                alike &= all(np.array_equal(np.sort(first), np.sort(rows)) for _, rows in found.values())
    finally:
        faiss.omp_set_num_threads(threads)
    lines, ratios = [], []
    for together, ways in ((False, (ARGPARTITION, PARTITION, SORT)), (True, (PRODUCT,))):
        own = times[FAISS_BATCH if together else FAISS]
        fastest = [min(of) for of in zip(*(times[way] for way in ways), strict=True)]
        ratios.append([a / b for a, b in zip(fastest, own, strict=True)])
        for way in ways:
            ratio = statistics.median(a / b for a, b in zip(times[way], own, strict=True))
            spent = f"{statistics.median(times[way]):.3f} ms a probe, Faiss {statistics.median(own):.3f} ms"
            lines.append(f"{PEOPLE:,} people, {way}: {spent}: {ratio:.1f} times as fast")
    lines.append(f"the ten nearest of {PROBES} probes are {'the same' if alike else 'not the same'} in all ways")
    verdict, said = _judge_ratio(3.0, [min(pair) for pair in zip(*ratios, strict=True)])
    numbers = {"milliseconds": times, "same": alike}
    return Outcome([*lines, f"against the fastest of NumPy: {said}"], verdict if alike else "contradicted", numbers)


FAISS, FAISS_BATCH = "Faiss, a probe at a time", "Faiss, all probes at once"
ARGPARTITION = "matrix x vector and argpartition"
PARTITION = "matrix x vector and what partition leaves above"
SORT = "matrix x vector and a full sort"
PRODUCT = "one matrix product for all probes and partition"


def _search_ways(people: Any) -> dict[str, Callable[[Any], Any]]:
    """Exact ways to find the ten nearest of (q, d) probes, as functions that return (q, 10) rows, best first."""
    import faiss
    import numpy as np

    index = faiss.IndexFlatIP(people.shape[1])
    index.add(people)  # pyright: ignore[reportCallIssue]

    def best(s: Any, at: Any) -> Any:
        return at[np.argsort(-s[at])][:10]

    def by_argpartition(s: Any) -> Any:
        return best(s, np.argpartition(s, -10)[-10:])

    def by_partition(s: Any) -> Any:
        return best(s, np.flatnonzero(s >= np.partition(s, -10)[-10]))

    return {
        ARGPARTITION: lambda probes: np.stack([by_argpartition(people @ q) for q in probes]),
        PARTITION: lambda probes: np.stack([by_partition(people @ q) for q in probes]),
        SORT: lambda probes: np.stack([np.argsort(-(people @ q))[:10] for q in probes]),
        FAISS: lambda probes: np.concatenate([index.search(q[None], 10)[1] for q in probes]),  # pyright: ignore
        PRODUCT: lambda probes: np.stack([by_partition(s) for s in probes @ people.T]),
        FAISS_BATCH: lambda probes: index.search(probes, 10)[1],  # pyright: ignore[reportCallIssue]
    }


def _time_search(way: Callable[[Any], Any], probes: Any) -> tuple[float, Any]:
    """The shortest of a few times, in milliseconds a probe, and what was found; the first call warms up."""
    found, times = way(probes), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        way(probes)
        times.append(time.perf_counter() - began)
    return 1000 * min(times) / len(probes), found


def try_learned_metric(seeds: int, cache: Path | None) -> Outcome:
    """Neighbours among characters never seen: raw pixels by Euclid and by a metric learned on other characters."""
    from mettle.metric import Mahalanobis

    differences, lines = [], []
    for seed in range(seeds):
        (x, y), (u, v) = (_glyph_pixels(seed, split, cache) for split in ("train", "test"))
        learned = Mahalanobis(n_components=32, random_state=seed).fit(x, y)
        plain, better = (_nearest_accuracy(e, v) for e in (u, learned.transform(u)))
        differences.append(better - plain)
        lines.append(
            f"seed {seed}: the nearest is of the same kind for {plain:.1f} % by Euclid, {better:.1f} % learned"
        )
    return _judge_difference(lines, differences, "the same kind, learned − Euclid")


def try_center_weight(seeds: int, cache: Path | None) -> Outcome:
    """Spread inside classes, relative to that of all, as the weight of the distance to the centre grows."""
    from mettle.losses import Center

    weights, lines, falls = (0.0, 0.01, 0.1, 1.0), [], []
    for seed in range(seeds):
        x, y = _glyph_pixels(seed, "train", cache)
        spreads = [_within_class_share(*_train_small(Center, x, y, seed, weight=weight)) for weight in weights]
        falls.append(all(a > b for a, b in pairwise(spreads)))
        shown = ", ".join(f"{spread:.3f} at {weight:g}" for weight, spread in zip(weights, spreads, strict=True))
        lines.append(f"seed {seed}: spread inside classes {shown}")
    verdict = "holds" if all(falls) else "not decided" if any(falls) else "contradicted"
    return Outcome(lines, verdict, {"monotone": falls})


def try_margin_annealing(seeds: int, cache: Path | None) -> Outcome:
    """Classes recognised after training by SphereFace, its margin full from the first step or growing."""
    from mettle.losses import SphereFace

    differences, lines = [], []
    for seed in range(seeds):
        x, y = _glyph_pixels(seed, "train", cache)
        at_once = _class_accuracy(*_train_small(SphereFace, x, y, seed, start=0.0, floor=0.0))
        slowly = _class_accuracy(*_train_small(SphereFace, x, y, seed))
        differences.append(slowly - at_once)
        lines.append(f"seed {seed}: {at_once:.1f} % of the training set recognised at once, {slowly:.1f} % annealed")
    return _judge_difference(lines, differences, "recognised, annealed − at once")


CLAIMS = {
    "literal": Claim("difficulty-aware SupCon as first written down: beta has no effect at all", try_literal_beta),
    "stall": Claim(
        "the push of margin² − d² fades for strangers that nearly coincide, that of (margin − d)² does not",
        try_stalled_push,
    ),
    "search": Claim(
        "Faiss finds the same people at least 3 times as fast as the fastest exact way in NumPy", try_faiss_speed
    ),
    "metric": Claim(
        "a learned Mahalanobis metric beats Euclid on raw features (here pixels), for classes never seen",
        try_learned_metric,
        "one estimator at its defaults, not tuned on validation data; the test typefaces were never trained on; "
        "whitening, LDA, NCA and a deep network are missing as controls",
    ),
    "center": Claim("the larger the weight of center loss, the smaller the spread inside classes", try_center_weight),
    "annealing": Claim(
        "SphereFace needs its margin annealed: with all of it at once it hardly trains", try_margin_annealing
    ),
}


def _judge_ratio(wanted: float, ratios: list[float]) -> tuple[Verdict, str]:
    """Whether a ratio of times reaches what is wanted, by the 95 % interval of its geometric mean over draws."""
    from mettle.evaluate.bootstrap import mean_interval

    mean, half = mean_interval([math.log(ratio) for ratio in ratios])
    low, middle, high = (math.exp(x) for x in (mean - half, mean, mean + half))
    verdict: Verdict = "holds" if low >= wanted else "contradicted" if high < wanted else "not decided"
    return verdict, f"{middle:.2f} times as fast [{low:.2f}, {high:.2f}], {wanted:g} wanted"


def _judge_difference(lines: list[str], differences: list[float], what: str) -> Outcome:
    """Whether a difference is above 0, by its interval over seeds."""
    from mettle.evaluate.bootstrap import mean_interval

    (mean, half), n = mean_interval(differences), len(differences)
    verdict: Verdict = "holds" if mean - half > 0 else "contradicted" if mean + half < 0 else "not decided"
    return Outcome([*lines, f"{what}: {mean:+.1f} ± {half:.1f}"], verdict, {"mean": mean, "half": half, "n": n})


def _glyph_pixels(seed: int, split: str, cache: Path | None) -> tuple[Any, Any]:
    """A hundred characters of the embedded glyphs, 16 x 16 grey values, and which they are; others for each seed."""
    import numpy as np

    from mettle.data.dataset import SPLITS
    from mettle.data.sources.glyphs import glyphs

    samples = glyphs(cache=cache)
    known = np.unique(samples.labels[samples.split == SPLITS.index(split)])
    chosen = np.random.default_rng(seed).permutation(known)[:100]
    at = np.flatnonzero(np.isin(samples.labels, chosen) & (samples.split == SPLITS.index(split)))
    pictures = samples.read(at).astype(np.float32).reshape(len(at), 16, 2, 16, 2).mean((2, 4)) / 255
    return pictures.reshape(len(at), 256), np.unique(samples.labels[at], return_inverse=True)[1]


def _train_small(kind: Any, x: Any, y: Any, seed: int, **options: Any) -> tuple[Any, Any, Any]:
    """Embeddings, labels and the loss, after a few steps of a small network."""
    import torch

    torch.manual_seed(seed)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    loss = kind(int(y.max()) + 1, 32, **options)
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], 3e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(x), (256,))
        optimizer.zero_grad()
        loss(net(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return net(x), y, loss


def _nearest_accuracy(x: Any, y: Any) -> float:
    """Percent whose nearest neighbour has their label."""
    import torch

    x, y = torch.as_tensor(x), torch.as_tensor(y)
    apart = torch.cdist(x, x).fill_diagonal_(float("inf"))
    return 100 * float((y[apart.argmin(1)] == y).float().mean())


def _within_class_share(z: Any, y: Any, loss: Any) -> float:
    """Variance about the class means, as a part of all variance."""
    import torch

    count = torch.bincount(y)[:, None]
    means = torch.zeros(len(count), z.shape[1]).index_add_(0, y, z) / count
    return float((z - means[y]).square().sum() / (z - z.mean(0)).square().sum())


def _class_accuracy(z: Any, y: Any, loss: Any) -> float:
    """Percent whose nearest class vector, by angle, is their own."""
    import torch

    nearest = (torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(loss.weight).T).argmax(1)
    return 100 * float((nearest == y).float().mean())


LEAST, MOST = 2, 20


@app.command()
def reproduce(
    claims: Annotated[list[str] | None, typer.Argument(help="Which to try; `all` for all. None: list them.")] = None,
    seeds: Annotated[int, typer.Option(help="How often what is drawn by chance is drawn.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines.")] = False,
) -> None:
    """Try claims about the methods on this machine, each with its control. A claim that fails is a result, no error."""
    if not LEAST <= seeds <= MOST:
        raise InputError(f"--seeds must be between {LEAST} and {MOST}, got {seeds}")
    if not claims:
        if as_json:
            print(json.dumps({name: _describe_claim(claim) for name, claim in CLAIMS.items()}, indent=1))
            return
        for name, claim in CLAIMS.items():
            print(f"  {name:<10}  {claim.says}{f' ({WITHDRAWN})' if claim.withdrawn else ''}")
        print("Try some with `mettle reproduce NAME ...`. Claims that need real data: docs/results.")
        return
    unknown = [name for name in claims if name not in (*CLAIMS, "all")]
    if unknown:
        raise InputError(f"no claim {unknown[0]!r}: one of {', '.join(CLAIMS)}, or all")
    found = {}
    for name in CLAIMS if "all" in claims else dict.fromkeys(claims):
        outcome = CLAIMS[name].judge(seeds, cache_folder())
        found[name] = {**_describe_claim(CLAIMS[name]), **asdict(outcome)}
        if not as_json:
            print(f"{name}: {CLAIMS[name].says}", *(f"  {line}" for line in outcome.lines), sep="\n")
            print(f"  {outcome.verdict}", flush=True)
    if as_json:
        print(json.dumps(found, indent=1))


def _describe_claim(claim: Claim) -> dict[str, str]:
    """A claim, with the reason where its verdict is withdrawn."""
    return {"says": claim.says} | ({"withdrawn": claim.withdrawn} if claim.withdrawn else {})
