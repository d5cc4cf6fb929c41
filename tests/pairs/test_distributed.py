"""Losses across real processes, against one process that has the whole batch."""

import contextlib
import json
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mettle.losses
from laws.members import DIFFICULTIES, FORMS, Given, with_difficulty
from mettle.difficulty import (
    AdaptiveThreshold,
    DistanceWeightedSampling,
    Importance,
    Product,
    Relative,
    Threshold,
    curriculum,
)
from mettle.errors import InputError
from mettle.losses import (
    CLIP,
    AdaCos,
    AdaFace,
    ArcFace,
    Center,
    CosFace,
    CurricularFace,
    InfoNCE,
    LiftedStructure,
    MagFace,
    Margin,
    NormFace,
    ProxyAnchor,
    ProxyNCA,
    SelfTriplet,
    SigLIP,
    SimilarityClassification,
    SimilarityRanking,
    SimilarityRegression,
    Softmax,
    SoftTriple,
    SphereFace,
    SubCenterArcFace,
    SupCon,
    Triplet,
)
from mettle.pairs import across_ranks, sum_over
from processes import Forked

pytestmark = pytest.mark.timeout(900)  # five processes, hundreds of small steps: half a minute on an idle machine

N, WIDE, DIM, C = 14, 6, 5, 7
SPLITS = {2: ([5, 9], [0, 14]), 3: ([3, 7, 4], [6, 0, 8])}
PLAIN = ("supcon out", "triplet hardest", "n-pair", "lifted", "contrastive raw")  # tried in every way
OTHERS = ("views", "ArcFace", "AdaCos", "Center", "classes sampled", "SimilarityRanking", "a stranger's")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Curve(nn.Module):
    """A stranger's loss: batch statistics, a parameter, and a draw."""

    def __init__(self):
        super().__init__()
        self.power = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        spread = (z - z.mean(0)).square().sum(1)
        return ((spread + 1) ** self.power * (y + 1)).std() * torch.rand((), dtype=torch.float64)


class RaisedTo(SupCon):
    """A stranger's pairwise loss."""

    def reductions(self, tile, rows):
        return super().reductions(tile, rows) | {"extra": sum_over(tile.similarity, tile.negative)}


@dataclass(frozen=True)
class Case:
    make: Callable[[int], Any]  # of the rank, so that ranks may start apart
    kind: str = "labels"
    options: dict[str, Any] = field(default_factory=dict)
    how: tuple[str, ...] = ("auto", "replicated")
    auto: str = "replicated"
    float32: bool = False


def seeded(make: Callable[[], Any], seed: int = 3) -> Callable[[int], Any]:
    """Parameters that differ between ranks before the first call."""

    def made(rank: int):
        torch.manual_seed(seed + rank)
        return make().double()

    return made


def vectors(kind: type, **options) -> Case:
    return Case(seeded(lambda: kind(C, DIM, **options)), "classes", how=("auto", "rows", "replicated"))


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, loss in FORMS.items():
        own = "replicated" if name.startswith(("lifted", "n-pair")) else "anchors"
        how = ("auto", "replicated") if own == "anchors" and name in PLAIN else ("auto",)
        found[name] = Case(lambda rank, loss=loss: loss, "twos" if name == "n-pair" else "labels", how=how, auto=own)
    biased = {"biased": drawn(N, 3, seed=8)}
    for name, difficulty in DIFFICULTIES.items():
        for short, loss in (("supcon", SupCon(0.2)), ("infonce", InfoNCE(0.5))):
            made = with_difficulty(loss, difficulty)
            options = biased if isinstance(difficulty, Relative) else {}
            if short == "supcon" or name in ("importance", "relative", "hardest"):
                found[f"{short} {name}"] = Case(
                    lambda rank, made=made: made, options=options, how=("auto",), auto="anchors"
                )
    found["follows"] = Case(lambda rank: SupCon(0.2, difficulty=AdaptiveThreshold(momentum=0.5)), auto="anchors")
    found["follows inside"] = Case(
        lambda rank: SupCon(0.2, difficulty=Product(Threshold(), AdaptiveThreshold(momentum=0.5))), auto="anchors"
    )
    table = drawn(N, N, seed=9).abs()
    found["by position"] = Case(lambda rank: SupCon(0.2, difficulty=Given(table)))
    found["a stranger's pairs"] = Case(lambda rank: RaisedTo(0.2), how=("auto", "anchors"))
    found["label sets"] = Case(lambda rank: SupCon(0.2), "sets", auto="anchors")
    found["da"] = Case(lambda rank: mettle.losses.DASupCon(0.2), auto="anchors")
    found["da author"] = Case(lambda rank: mettle.losses.DASupCon(preset="author"), auto="anchors")
    found["tiles"] = Case(
        lambda rank: SupCon(0.2, difficulty=Threshold()), options={"engine": "tiled", "tile": 4}, auto="anchors"
    )
    found["views"] = Case(lambda rank: InfoNCE(0.5), "views", {"views": True}, auto="anchors")
    found["references"] = Case(lambda rank: SupCon(0.2), "references", auto="anchors")
    found["learned temperature"] = Case(seeded(lambda: SupCon(0.2, learn_temperature=True)), auto="anchors")
    found["learned, weighed"] = Case(
        seeded(lambda: InfoNCE(0.5, difficulty=Importance(0.7), learn_temperature=True)), auto="anchors"
    )
    for measure in ("dot", "euclidean", "snr"):
        found[f"supcon {measure}"] = Case(
            lambda rank, measure=measure: SupCon(0.5, measure=measure), how=("auto",), auto="anchors"
        )
    for reduction in ("pairs", "nonzero", "sum"):
        for name in ("supcon out", "triplet hardest", "margin", "lifted"):
            loss, own = replace(FORMS[name], reduction=reduction), "replicated" if name == "lifted" else "anchors"
            found[f"{name} {reduction}"] = Case(lambda rank, loss=loss: loss, how=("auto",), auto=own)
        own = "rows" if reduction == "pairs" else "replicated"
        found[f"CosFace {reduction}"] = Case(
            seeded(lambda reduction=reduction: CosFace(C, DIM, reduction=reduction)), "classes", how=("auto",), auto=own
        )
    rising = curriculum(Threshold(), end=0.5)
    found["fades in"] = Case(lambda rank: SupCon(0.2, difficulty=rising), options={"progress": 0.2}, auto="anchors")
    found["random"] = Case(lambda rank: Triplet(mining="random", random=torch.Generator().manual_seed(rank)))
    found["random pairs"] = Case(
        lambda rank: SupCon(0.2, difficulty=DistanceWeightedSampling(random=torch.Generator().manual_seed(rank)))
    )
    found["random too"] = Case(lambda rank: SelfTriplet(form="one_neg"))
    for kind, options in (
        (Softmax, {}), (NormFace, {}), (CosFace, {}), (ArcFace, {}), (AdaCos, {}), (Center, {}), (SphereFace, {}),
        (SoftTriple, {"vectors_per_class": 2}), (SubCenterArcFace, {}), (MagFace, {}), (ProxyNCA, {}),
    ):  # fmt: skip
        found[kind.__name__] = vectors(kind, **options)
    found["Center"] = Case(found["Center"].make, "classes")
    for kind in (CurricularFace, AdaFace, ProxyAnchor):
        found[kind.__name__] = Case(seeded(lambda kind=kind: kind(C, DIM)), "classes")
    found["boundaries"] = Case(
        seeded(lambda: Margin(nu=0.1, boundary="class", num_classes=C)), "classes", auto="anchors"
    )
    hard = Threshold(positive=0.6, negative=0.1)
    weighed = Case(seeded(lambda: ArcFace(C, DIM, difficulty=hard)), "classes")
    sampled = Case(seeded(lambda: CosFace(C, DIM, sample=0.9, sparse=True)), "classes")
    found |= {"classes weighed": weighed, "classes sampled": sampled, "fixed scale": vectors(AdaCos, dynamic=False)}
    every = ("auto", "rows", "replicated")
    grades = drawn(N, seed=4).sigmoid()
    weight = {"weight": drawn(N, seed=5).abs()}
    made = {
        "SimilarityRegression": (lambda rank: SimilarityRegression(), "items"),
        "SimilarityClassification": (seeded(lambda: SimilarityClassification()), "items"),
        "SimilarityRanking": (lambda rank: SimilarityRanking(), "triplets"),
    }
    for name, (make, kind) in made.items():
        found[name] = Case(make, kind, {"target": grades} if kind == "items" else {}, every)
        found[f"{name} weighed"] = Case(make, kind, found[name].options | weight, every)
    for kind in (CLIP, SigLIP):
        found[kind.__name__] = Case(seeded(lambda kind=kind: kind()), "towers")
    found["CLIP with labels"] = Case(seeded(lambda: CLIP(reduction="nonzero")), "labelled towers", how=("auto",))
    found["a stranger's"] = Case(lambda rank: Curve(), "classes")
    found["a function"] = Case(lambda rank: lambda z, y: (z.std(0).sum() + (z.sum(1) * y).mean()) ** 2)
    for name in ("supcon out", "triplet hardest", "ArcFace", "SimilarityRanking"):
        found[f"{name} float32"] = Case(**{**vars(found[name]), "float32": True})
    return found


def labels(kind: str) -> Tensor:
    if kind == "twos":
        return torch.tensor([0, 1, 2, 3, 4, 5, 6, 3, 2, 6, 5, 0, 1, 4])
    if kind == "classes":
        return torch.arange(N) * 3 % C
    if kind == "sets":  # of classes: samples of several
        return drawn(N, C, seed=4) > 0.5
    return torch.tensor([0, 0, 1, 2, 0, 1, 3, 1, 3, 4, 3, 2, 5, 3]) * 2**40  # some without a positive, all huge


def encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, DIM)).double()


def cut(x: Any, part: slice, every: int = N) -> Any:
    if isinstance(x, tuple):
        return tuple(cut(one, part, every) for one in x)
    return x[part] if isinstance(x, Tensor) and len(x) == every else x


def call_of(case: Case, network: nn.Module, part: slice, step: int) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of one call on these rows of the batch; the network is asked once."""
    copies = {"views": 2, "references": 2, "items": 2, "triplets": 3, "towers": 2, "labelled towers": 2}.get(
        case.kind, 1
    )
    x = drawn(N, copies, WIDE, seed=20 + step)[part]
    z = network(x.flatten(0, 1)).unflatten(0, (len(x), copies))
    z = z.float() if case.float32 else z
    y, options = labels(case.kind)[part], {name: cut(value, part) for name, value in case.options.items()}
    if case.kind == "views":
        return [z, y], options
    if case.kind == "references":
        ids = torch.arange(N)[part]
        return [z[:, 0], y], {"ref": (z[:, 1], y, ids + 1), "ids": ids}
    if case.kind == "items":
        return [z[:, 0], z[:, 1], options.pop("target")], options
    if case.kind == "triplets":
        return list(z.unbind(1)), options
    if case.kind == "towers":
        return list(z.unbind(1)), options
    if case.kind == "labelled towers":
        return [*z.unbind(1), y], options
    return [z[:, 0], y], options


def state_of(loss: Any) -> list[nn.Module]:
    """Whatever of a loss has a state."""
    loss = getattr(loss, "loss", loss)
    inside = getattr(loss, "difficulty", None)
    found = [loss, inside, getattr(inside, "second", None)]
    return [part for part in found if isinstance(part, nn.Module)][:1]


def run(case: Case, loss: Any, network: nn.Module, part: slice, per_row: bool, luck: int) -> dict[str, Tensor]:
    """Two steps of training, and one value per row after them."""
    found: dict[str, Tensor] = {}
    own = [p for module in state_of(loss) for p in module.parameters()]
    optimiser = torch.optim.SGD([*network.parameters(), *own], lr=0.05)
    for step in range(2):
        torch.manual_seed(100 * step + luck)
        args, options = call_of(case, network, part, step)
        value = loss(*args, **options)
        optimiser.zero_grad()
        value.backward()
        found |= {f"value {step}": value.detach(), f"encoder {step}": flat(network.parameters())}
        if own:
            found[f"parameters {step}"] = flat(own)
        optimiser.step()
    for module in state_of(loss):
        found |= {f"state {k}": b.clone() for k, b in enumerate(module.buffers())}
    if per_row:
        torch.manual_seed(luck)
        args, options = call_of(case, network, part, 0)
        ask = loss.per_item if case.kind in ("items", "triplets") else loss.per_anchor
        options.pop("weight", None)
        with torch.no_grad():
            found["rows"] = ask(*args, **options)
        values = ask(*args, **options)
        network.zero_grad()
        for p in own:
            p.grad = None
        share = drawn(N, 2, seed=30)[part]
        share = share.T.flatten() if case.kind == "views" else share[:, 0]
        (values.nan_to_num(0) * share).sum().backward()
        found["encoder of rows"] = flat(network.parameters())
        if own:
            found["parameters of rows"] = flat(own)
    return found


def flat(parameters) -> Tensor:
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in parameters]
    return torch.cat([g.flatten() for g in dense])


def ranks_of(split: list[int]) -> list[slice]:
    ends = torch.tensor([0, *split]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def has_rows(case: Case) -> bool:
    weighed = isinstance(case.make(0), SupCon) and case.how == ("auto",)  # these are many, and much the same
    if getattr(case.make(0), "anchors_are_classes", False):  # its values are of classes, which no rank has a part of
        return False
    return not weighed and hasattr(case.make(0), "per_item" if case.kind in ("items", "triplets") else "per_anchor")


def trials(ranks: int) -> list[tuple[str, Case, int, str]]:
    """Every case on uneven parts of two ranks; fewer with a rank that has no rows, and on three ranks."""
    every = cases()
    if ranks == 3:
        return [(name, every[name], k, "auto") for name in (*PLAIN[:3], *OTHERS) for k in (0, 1)]
    uneven = [(name, case, 0, how) for name, case in every.items() for how in case.how]
    return uneven + [(name, case, 1, "auto") for name, case in every.items() if case.kind != "labels" or name in PLAIN]


# What a rank does


def work(rank: int, ranks: int, folder: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{where / 'meeting'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    found = laws(rank, ranks) | (refusals(rank) if ranks == 2 else {})
    tensors = {name: x.contiguous() for name, x in found.items() if isinstance(x, Tensor)}
    save_file(tensors, where / f"{rank}.safetensors")
    (where / f"{rank}.json").write_text(json.dumps({k: v for k, v in found.items() if not isinstance(v, Tensor)}))
    dist.destroy_process_group()


def laws(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case, k, how in trials(ranks):
        loss = across_ranks(case.make(rank), how)
        network = DistributedDataParallel(encoder())
        got = run(case, loss, network, ranks_of(SPLITS[ranks][k])[rank], has_rows(case), luck=rank)
        found |= {f"{name}|{k}|{how}|{key}": x for key, x in got.items()}
    return found


class Breaks:
    """Fails on one rank only, with an error that is not ours."""

    def __init__(self, rank: int):
        self.rank = rank

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        if self.rank == 1:
            raise ZeroDivisionError("nothing left")
        return z.sum()

    def per_anchor(self, z: Tensor, y: Tensor) -> Tensor:
        return self(z, y) + z[:, 0]


class Gives:
    """Returns what it was made with, whatever that is."""

    def __init__(self, made: Callable[[Tensor], Any]):
        self.made = made

    def __call__(self, z: Tensor, y: Tensor) -> Any:
        return self.made(z)

    per_anchor = __call__


def refusals(rank: int) -> dict[str, Any]:
    second = rank == 1
    z, y = drawn(4, 3, seed=rank).requires_grad_(), torch.tensor([0, 0, 1, 1])
    pairs, arc = across_ranks(SupCon(0.2)), across_ranks(ArcFace(3, 3).double(), "rows")
    other = CosFace(3, 3) if second else ArcFace(3, 3)
    lifted = across_ranks(LiftedStructure())
    tries: dict[str, Callable[[], Any]] = {
        "width": lambda: pairs(z[:, : 3 - rank], y),
        "type": lambda: pairs(z.float() if second else z, y),
        "no tensor": lambda: pairs(z, [0, 0, 1, 1] if second else y),
        "no embeddings": lambda: pairs(None if second else z, y),
        "length": lambda: pairs(z, y[: 4 - rank]),
        "flat": lambda: pairs(z[:, 0] if second else z, y),
        "labels of a wrong type": lambda: pairs(z, y.double() if second else y),
        "fractions": lambda: pairs(z, y.double()),
        "range": lambda: arc(z, y + 2 * rank),
        "range of all": lambda: across_ranks(ArcFace(3, 3).double(), "replicated")(z, y + 2 * rank),
        "range per anchor": lambda: arc.per_anchor(z, y + 2 * rank),
        "call": lambda: (pairs.per_anchor if second else pairs)(z, y),
        "gradients": lambda: without(pairs, z, y) if second else pairs(z, y),
        "training": lambda: arc.train(second)(z, y),
        "nobody": lambda: pairs(z[:0], y[:0]),
        "no positives": lambda: pairs(z[:1], y[:1] + rank),
        "option": lambda: pairs(z, y, tile=0 if second else 2, engine="tiled"),
        "option of all": lambda: lifted(z, y, engine="dens" if second else "tiled"),
        "option of all per anchor": lambda: lifted.per_anchor(z, y, engine="dens" if second else "tiled"),
        "option missing": lambda: pairs(z, y, **({} if second else {"engine": "tiled"})),
        "wrong option": lambda: pairs(z, y, tile=0, engine="tiled"),
        "wrong option of all": lambda: lifted(z, y, engine="dens"),
        "missing": lambda: pairs(z, y, **({} if second else {"biased": z})),
        "ids": lambda: pairs(z, y, ref=(z, y, torch.arange(4)), ids=torch.arange(4)),
        "losses": lambda: across_ranks(other.double(), "rows")(z, y),
        "sizes": lambda: across_ranks(ArcFace(3 + rank, 3).double(), "rows")(z, y),
        "settings": lambda: across_ranks(SupCon(0.2 + rank))(z, y),
        "margins": lambda: across_ranks(ArcFace(3, 3, margin=0.3 + rank / 5).double(), "rows")(z, y),
        "margins inside": lambda: across_ranks(Center(3, 3, base=CosFace(3, 3, margin=0.3 + rank / 5)).double())(z, y),
        "settings of what follows": lambda: across_ranks(SupCon(0.2, difficulty=AdaptiveThreshold(1.0 + rank)))(z, y),
        "types of parameters": lambda: across_ranks(Center(3, 3).double() if second else Center(3, 3))(z, y),
        "frozen": lambda: across_ranks(ArcFace(3, 3).double().requires_grad_(second))(z, y),
        "failure": lambda: across_ranks(Breaks(rank), "rows")(z, y),
        "failure per anchor": lambda: across_ranks(Breaks(rank), "rows").per_anchor(z, y),
        "failure of all": lambda: across_ranks(Breaks(rank), "replicated")(z, y),
        "failure of all per anchor": lambda: across_ranks(Breaks(rank), "replicated").per_anchor(z, y),
        "no mean": lambda: across_ranks(lambda z, y: z.sum(1))(z, y),
        "no mean on one": lambda: across_ranks(Gives(lambda z: z.sum(1) if second else z.sum()))(z, y),
        "no mean of rows": lambda: across_ranks(Gives(lambda z: z.sum(1)), "rows")(z, y),
        "a float": lambda: across_ranks(Gives(lambda z: 3.0), "rows")(z, y),
        "none": lambda: across_ranks(Gives(lambda z: None), "rows")(z, y),
        "none on one": lambda: across_ranks(Gives(lambda z: None if second else z.sum()), "rows")(z, y),
        "none of all": lambda: across_ranks(Gives(lambda z: None))(z, y),
        "no rows": lambda: across_ranks(Gives(lambda z: z.sum()), "rows").per_anchor(z, y),
        "no rows of all": lambda: across_ranks(Gives(lambda z: z.sum())).per_anchor(z, y),
        "method": lambda: across_ranks(lambda z, y: z.sum()).per_anchor(z, y),
        "indices": lambda: across_ranks(lambda z, y, indices: z.sum())(z, y, indices=torch.arange(4)),
        "twice": lambda: torch.autograd.grad(pairs(z, y), z, create_graph=True),
    }
    found: dict[str, Any] = {name: refused(attempt) for name, attempt in tries.items()}
    arc.train()
    broken = z.detach().clone()
    broken[0, 0] = torch.nan if second else 1.0
    for name, loss in (("anchors", pairs), ("rows", arc), ("replicated", across_ranks(SupCon(0.2), "replicated"))):
        leaf = broken.clone().requires_grad_()
        value = loss(leaf, y)
        value.backward()
        found |= {f"nan {name}": value.detach(), f"nan rows {name}": loss.per_anchor(leaf.detach(), y).detach()}
    # No anchor has a positive: 0 where that was asked for, and still NaN where an embedding is broken.
    for how in ("anchors", "replicated"):
        quiet = across_ranks(SupCon(0.2, empty="zero"), how)
        leaf = z.detach()[:1].clone().requires_grad_()
        value = quiet(leaf, y[:1] + rank)
        value.backward()
        found |= {f"empty {how}": value.detach(), f"empty gradient {how}": leaf.grad}
        found[f"empty nan {how}"] = quiet(broken[:1].clone().requires_grad_(), y[:1] + rank).detach()
    # One rank's rows want no gradient: the others get theirs, and nobody waits for ever.
    leaf = z.detach().clone().requires_grad_(not second)
    pairs(leaf, y).backward()
    found["gradient of one"] = torch.zeros(4, 3).double() if leaf.grad is None else leaf.grad
    found["after all"] = pairs(z, y).detach()
    for k, dtype in enumerate((torch.bfloat16, torch.float16)):
        half = z.detach().to(dtype).requires_grad_()
        pairs(half, y).backward()
        assert half.grad is not None
        found[f"half {k}"] = half.grad
    large = large_rows()[4 * rank : 4 * rank + 4].requires_grad_()
    value = pairs(large, y)
    (value * 2**12).backward()  # or the gradient is among the smallest numbers, which have few digits
    assert large.grad is not None
    found |= {"large": value.detach(), "large gradient": large.grad}
    found["large rows"] = pairs.per_anchor(large, y).detach()
    # What reads differently on every rank, but may well be the same, is let pass; so is a loss that has moved on.
    plain = across_ranks(lambda z, y, by: by(z))(z, y, by=(lambda z: z.sum()) if second else (lambda z: z.sum() * 1))
    found["an object"] = plain.detach()
    follows = AdaptiveThreshold(momentum=0.5)
    follows.positive += rank  # type: ignore[operator]
    found["moved on"] = across_ranks(SupCon(0.2, difficulty=follows))(z, y).detach()
    # One rank starts afresh with a loss that the other has called before: both go on from rank 0.
    arc = arc if second else across_ranks(ArcFace(3, 3).double(), "rows")
    found["fresh"] = arc(z, y).detach()
    found["fresh vectors"] = arc.loss.weight.detach().clone()
    for how in ("rows", "replicated"):  # averaging what is the same on all ranks changes nothing
        torch.manual_seed(6)
        wrapped = DistributedDataParallel(across_ranks(ArcFace(3, 3).double(), how))
        wrapped(z, y).backward()
        found[f"twice averaged {how}"] = wrapped.module.loss.weight.grad
    before = torch.get_rng_state()
    across_ranks(lambda z, y: torch.rand(()) * z.sum())(z, y)
    found["luck"] = "same" if torch.equal(before, torch.get_rng_state()) else "moved"
    return found


def large_rows() -> Tensor:
    """Half precision in which a row's sum is beyond the largest number."""
    return (drawn(8, 512, seed=12) * 40 + 200).half()


def without(loss: Any, z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return loss(z, y)


def refused(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except InputError as error:
        return str(error)
    return "nothing was refused"


def launch(folder: Path, ranks: int) -> None:
    """Ranks by the fork of a process that has loaded everything and computed nothing: loading is what takes time."""
    started = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            try:
                work(rank, ranks, str(folder))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        started.append(child)
    if any([os.waitpid(child, 0)[1] for child in started]):
        raise SystemExit(f"of {ranks} ranks not all came to an end")


# What is asked of them


Found = tuple[list[dict[str, Tensor]], list[dict[str, Any]]]


def run_ranks(count: int, folder: Path) -> Found:
    """What each of so many real ranks found: tensors, and words."""
    started = Forked(launch, folder, count, session=True)
    try:
        said = started.communicate(timeout=800)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, said
    tensors = [load_file(folder / f"{rank}.safetensors") for rank in range(count)]
    return tensors, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Found:
    return run_ranks(2, tmp_path_factory.mktemp("ranks"))


def test_every_loss_gives_over_ranks_what_it_gives_in_one_process(two_ranks):
    compare(2, two_ranks[0])


@pytest.mark.slow
def test_every_loss_gives_over_three_ranks_what_it_gives_in_one_process(tmp_path):
    compare(3, run_ranks(3, tmp_path)[0])


def compare(ranks: int, found: list[dict[str, Tensor]]) -> None:
    wanted, compared = {}, 0
    for name, case, k, how in trials(ranks):
        if name not in wanted:
            wanted[name] = run(case, case.make(0), encoder(), slice(None), has_rows(case), luck=0)
        alone = wanted[name]
        tolerance = {"rtol": 1e-4, "atol": 2e-5} if case.float32 else {"rtol": 1e-10, "atol": 1e-12}
        for rank, part in enumerate(ranks_of(SPLITS[ranks][k])):
            got = {key: found[rank][f"{name}|{k}|{how}|{key}"] for key in alone}
            here = alone | ({"rows": own_rows(alone["rows"], part)} if "rows" in alone else {})
            what = f"{name}, {how}, {SPLITS[ranks][k]}, rank {rank}"
            for key, x in here.items():
                close(got[key], x, f"{what} {key}", **tolerance)
                compared += 1
            exact = {"rtol": 1e-6, "atol": 1e-7} if case.float32 else {"rtol": 1e-12, "atol": 1e-12}
            close(got["value 0"], alone["value 0"], f"{what} value", **exact)
            assert torch.equal(got["value 0"], found[0][f"{name}|{k}|{how}|value 0"]), f"{what}: not the same"
    assert compared > 400


def close(found: Tensor, wanted: Tensor, what: str, **tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance, msg=lambda said: f"{what}: {said}")


def own_rows(rows: Tensor, part: slice) -> Tensor:
    """Of views stacked one behind the other, a rank has a piece of each."""
    return torch.cat([view[part] for view in rows.split(N)])


def test_every_loss_there_is_was_tried():
    composed = {"CrossBatchMemory", "DASupCon", "Matryoshka", "MinedLoss", "WeightedSum"}  # made of others
    tried = {type(case.make(0)).__name__ for case in cases().values()} | composed
    assert tried >= set(mettle.losses.__all__)


def test_a_rank_computes_no_more_than_it_must():
    for name, case in cases().items():
        loss = case.make(0)
        wanted = "rows" if getattr(loss, "by_row", False) is True else case.auto
        assert across_ranks(loss).how == wanted, name


WORDS = {
    "width": r"embeddings must be alike on all ranks .* rank 0 has \(n, 3\) float64 on cpu, rank 1 has \(n, 2\)",
    "type": "rank 0 has .* float64 on cpu, rank 1 has .* float32",
    "no tensor": "rank 1: labels must be a tensor, got list",
    "no embeddings": "rank 1: embeddings must be a tensor, got NoneType",
    "length": r"rank 1: labels must have one entry per embedding: got \(3,\) for 4",
    "flat": r"embeddings must be alike .* \(n, 3\) .* \(n\) ",
    "labels of a wrong type": "labels must be alike .* int64 .* float64",
    "fractions": "rank 0: labels must be whole numbers",
    "range": "rank 1: label 3 is out of range",
    "range of all": "rank 0: label 3 is out of range",
    "range per anchor": "rank 1: label 3 is out of range",
    "call": "ranks 0 and 1 make different calls",
    "gradients": "differ in whether gradients are on",
    "training": "differ in whether the loss is training",
    "nobody": "embeddings are empty",
    "no positives": "no anchor has a positive among 2 samples of 2 ranks",
    "option": "ranks 0 and 1 give different options",
    "option of all": "ranks 0 and 1 give different options",
    "option of all per anchor": "ranks 0 and 1 give different options",
    "option missing": "ranks 0 and 1 give different options",
    "wrong option": "rank 0: tile must be at least 1",
    "wrong option of all": "rank 0: .*dens",
    "missing": r"biased\[0\] must be alike .* rank 1 has none",
    "ids": "the same reference id comes from two ranks",
    "losses": "hold different losses",
    "sizes": "hold different losses",
    "settings": "hold different losses",
    "margins": "hold different losses",
    "margins inside": "hold different losses",
    "settings of what follows": "hold different losses",
    "types of parameters": "hold different losses: .* same shapes and types",
    "frozen": "hold different losses",
    "failure": "rank 1: ZeroDivisionError: nothing left",
    "failure per anchor": "rank 1: ZeroDivisionError: nothing left",
    "failure of all": "rank 1: ZeroDivisionError: nothing left",
    "failure of all per anchor": "rank 1: ZeroDivisionError: nothing left",
    "no mean": r"rank 0: across ranks, a loss must give one number, .* got \(8,\): use one that takes the mean",
    "no mean on one": r"rank 1: across ranks, a loss must give one number, .* got \(8,\)",
    "no mean of rows": r"rank 0: across ranks, a loss must give one number, .* got \(4,\)",
    "a float": "rank 0: across ranks, a loss must give one number, .* got float",
    "none": "rank 0: across ranks, a loss must give one number, .* got NoneType",
    "none on one": "rank 1: across ranks, a loss must give one number, .* got NoneType",
    "none of all": "rank 0: across ranks, a loss must give one number, .* got NoneType",
    "no rows": r"one number per row, a tensor \(4,\), got \(\): change what its per_anchor returns",
    "no rows of all": r"one number per row, a tensor \(8,\), got \(\)",
    "method": "function has no per_anchor",
    "indices": "indices= is not known across ranks",
    "twice": "first derivatives only",
}


def test_what_does_not_fit_is_one_error_on_all_ranks_and_never_a_hang(two_ranks):
    found, said = two_ranks
    for name, words in WORDS.items():
        assert said[0][name] == said[1][name], name
        assert re.search(words, said[0][name]), f"{name}: {said[0][name]}"
    assert {name for name in said[0] if name != "luck"} == set(WORDS)
    for rank in (0, 1):
        for name in ("anchors", "rows", "replicated"):
            assert found[rank][f"nan {name}"].isnan()
            assert found[rank][f"nan rows {name}"].isnan().all()
        for how in ("anchors", "replicated"):
            assert found[rank][f"empty {how}"] == 0 and (found[rank][f"empty gradient {how}"] == 0).all()
            assert found[rank][f"empty nan {how}"].isnan(), how
    z, y = torch.cat([drawn(4, 3, seed=0), drawn(4, 3, seed=1)]).requires_grad_(), torch.tensor([0, 0, 1, 1] * 2)
    value = SupCon(0.2)(z, y)
    (gradient,) = torch.autograd.grad(value, z)
    for rank in (0, 1):
        torch.testing.assert_close(found[rank]["after all"], value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0]["gradient of one"], 2 * gradient[:4], rtol=1e-12, atol=1e-12)
    for k, step in enumerate((2**-7, 2**-10)):
        got = torch.cat([found[rank][f"half {k}"] for rank in (0, 1)]).double()
        assert (got - 2 * gradient).abs().max() < 4 * step * gradient.abs().max() * 2
    large = large_rows().double().requires_grad_()
    (gradient,) = torch.autograd.grad(SupCon(0.2)(large, y), large)
    rows = SupCon(0.2).per_anchor(large.detach(), y)
    for rank in (0, 1):
        part = slice(4 * rank, 4 * rank + 4)
        close(found[rank]["large"].double(), rows.mean(), "large", rtol=2e-3, atol=0)
        close(found[rank]["large rows"].double(), rows[part], "large rows", rtol=2e-3, atol=0)
        off = found[rank]["large gradient"].double() / 2**12 - 2 * gradient[part]
        assert off.abs().max() < 4 * 2**-10 * gradient.abs().max() * 2
        assert found[rank]["an object"].isfinite() and found[rank]["moved on"].isfinite()
    torch.manual_seed(6)
    arc = ArcFace(3, 3).double()
    arc(z, y).backward()
    for how in ("rows", "replicated"):
        for rank in (0, 1):
            close(found[rank][f"twice averaged {how}"], arc.weight.grad, how, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0]["fresh"], found[1]["fresh"])
    assert torch.equal(found[0]["fresh vectors"], found[1]["fresh vectors"])
    assert [s["luck"] for s in said] == ["moved", "same"]


def test_without_other_ranks_it_is_the_loss_itself(tmp_path):
    z, y = drawn(8, DIM).requires_grad_(), torch.arange(8) // 2
    loss = SupCon(0.2)
    wrapped = across_ranks(loss)
    assert torch.equal(wrapped(z, y), loss(z, y)) and torch.equal(wrapped.per_anchor(z, y), loss.per_anchor(z, y))
    pair = SimilarityRegression()
    assert torch.equal(
        across_ranks(pair).per_item(z, z, y.double().sigmoid()), pair.per_item(z, z, y.double().sigmoid())
    )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    try:
        assert torch.equal(wrapped(z, y), loss(z, y))
    finally:
        dist.destroy_process_group()


def test_state_is_the_losss_own_and_follows_training():
    arc = ArcFace(C, DIM)
    wrapped = across_ranks(arc)
    assert [p is q for p, q in zip(wrapped.parameters(), arc.parameters(), strict=True)] == [True]
    assert set(wrapped.state_dict()) == {"loss.weight", "loss.draw"}
    follows = across_ranks(SupCon(difficulty=Product(Threshold(), AdaptiveThreshold())))
    assert set(follows.state_dict()) == {f"loss.difficulty.second.{name}" for name in ("positive", "negative")}
    assert follows.difficulty is follows.loss.difficulty

    rising = across_ranks(SupCon(difficulty=curriculum(Threshold(), end=0.5)))
    z, y = drawn(8, DIM), torch.arange(8) // 2
    assert rising.how == "anchors" and rising.takes_progress
    assert torch.equal(rising(z, y, progress=0.25), rising.loss(z, y, progress=0.25))
    assert rising(z, y, progress=0.25) != rising(z, y)
    assert "SupCon" in repr(rising) and "how='anchors'" in repr(rising) and "ArcFace" in repr(wrapped)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: across_ranks(3), "loss must be a callable"),
        (lambda: across_ranks(SupCon), r"got the class SupCon: write SupCon\(...\)"),
        (lambda: across_ranks(across_ranks(SupCon())), "wrap it once"),
        (lambda: across_ranks(SupCon(), "anchor"), "how must be one of .*did you mean 'anchors'"),
        (lambda: across_ranks(ArcFace(3, 4), "anchors"), "how='anchors' needs a loss of mettle.pairs, got ArcFace"),
        (lambda: across_ranks(lambda z, y: z.sum()).per_anchor(1, 2), "has no per_anchor"),
    ],
)
def test_a_mistake_is_told_at_once(attempt, words):
    with pytest.raises(InputError, match=words):
        attempt()
