"""Class vectors spread over ranks: what one process with all of them has, value, gradient, state and checkpoint."""

import contextlib
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mettle.errors import InputError
from mettle.losses import (
    AdaCos,
    AdaFace,
    ArcFace,
    Center,
    CosFace,
    CurricularFace,
    MagFace,
    NormFace,
    ProxyAnchor,
    ProxyNCA,
    Softmax,
    SoftTriple,
    SphereFace,
    SubCenterArcFace,
    load_class_shards,
    save_class_shards,
    shard_classes,
)
from mettle.pairs import across_ranks, class_softmax
from mettle.pairs.distributed.handshake import HEAD, PLACES, SLOT
from processes import Forked

pytestmark = pytest.mark.timeout(600)

C, DIM, WIDE, N = 23, 5, 6, 13
SPLITS = {2: [5, 8], 3: [4, 9, 0], 4: [3, 1, 5, 4]}  # rows of every rank
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (Softmax, {}),
    "modified softmax": (Softmax, {"unit_weights": True, "bias": False}),
    "normface": (NormFace, {"scale": 20.0}),
    "cosface": (CosFace, {"scale": 30.0}),
    "sum": (CosFace, {"scale": 30.0, "reduction": "sum"}),
    "arcface": (ArcFace, {}),
    "combined margin": (ArcFace, {"mode": "none", "multiply": 1.1, "subtract": 0.1}),
    "sphereface": (SphereFace, {"start": 5.0}),
    "adacos": (AdaCos, {}),
    "fixed adacos": (AdaCos, {"dynamic": False}),
    "adaface": (AdaFace, {"momentum": 0.5}),
    "magface": (MagFace, {"shortest": 0.1, "longest": 3.0}),
    "curricularface": (CurricularFace, {"momentum": 0.5}),
    "subcenter": (SubCenterArcFace, {"scale": 20.0}),
    "proxy-nca": (ProxyNCA, {}),
}


class Pulled(CosFace):
    """Wrong classes are measured by the own one, with gradient to both."""

    modulates_negatives = True

    def modulate(self, similarity, own):
        return similarity + 0.3 * similarity * own


CASES["modulated"] = (Pulled, {"scale": 10.0})


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(kind, options, seed=3):
    torch.manual_seed(seed)
    return shard_classes(kind, C, DIM, **options).double()


def encoder():
    torch.manual_seed(1)
    return nn.Linear(WIDE, DIM).double()


def batch(step):
    return drawn(N, WIDE, seed=step), torch.randint(C, (N,), generator=torch.Generator().manual_seed(50 + step))


def train(loss, own, ranks, sampled=None):
    """Three steps; what every one of them found."""
    network = encoder()
    optimizer = torch.optim.AdamW([*network.parameters(), *loss.parameters()], lr=0.05)
    found = {}
    for step in range(3):
        x, y = batch(step)
        if sampled is not None:
            found[f"classes {step}"] = loss.sample_classes(y) + loss.class_range.start
            found[f"weight {step}"] = loss.weight.detach().clone()
        value = loss(network(x[own]), y[own])
        optimizer.zero_grad()
        value.backward()
        for p in network.parameters() if ranks > 1 else ():
            dist.all_reduce(p.grad)
            p.grad /= ranks
        found[f"value {step}"] = value.detach()
        gradients: list[Any] = [p.grad for p in network.parameters()]
        found |= {f"gradient {step} {k}": g.clone() for k, g in enumerate(gradients)}
        optimizer.step()
    found |= {f"state {name}": value.clone() for name, value in loss.state_dict().items()}
    with torch.no_grad():
        found["rows"] = loss.per_anchor(network(batch(9)[0][own]), batch(9)[1][own])
    return found, optimizer


# In the ranks


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / f"store {ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=90))
    class_softmax.CHUNK = 40  # a few classes at a time
    class_softmax.shard_reductions.__globals__["CHUNK"] = 40
    start = sum(SPLITS[ranks][:rank])
    own = slice(start, start + SPLITS[ranks][rank])
    found: dict[str, Any] = {}
    for name, (kind, options) in CASES.items():
        loss = build(kind, options)
        assert all(vars(p)["is_sharded"] for p in loss.parameters())
        found[name], optimizer = train(loss, own, ranks)
        if name in ("arcface", "subcenter", "softmax"):
            save_class_shards(Path(folder) / f"{name} {ranks}", loss, optimizer)
    found["sampled"] = train(build(ArcFace, {"sample": 0.4, "scale": 20.0}), own, ranks, sampled=True)[0]
    if ranks > 2:  # those of one rank fewer
        for name in ("arcface", "subcenter", "softmax"):
            kind, options = CASES[name]
            loss = build(kind, options, seed=11)
            optimizer = torch.optim.AdamW(loss.parameters())
            load_class_shards(Path(folder) / f"{name} {ranks - 1}", loss, optimizer)
            found[f"loaded {name}"] = {key: x.clone() for key, x in loss.state_dict().items()} | {
                f"moment {key}": optimizer.state[p]["exp_avg"] for key, p in loss.named_parameters()
            }
    for name in ("arcface", "subcenter"):
        kind, options = CASES[name]
        found[f"started {name}"] = build(kind, options).start_from(*starts(), centered=True).weight.detach()
    whole: Any = build(ArcFace, {})
    found["gathered"] = whole.collect_rows(whole.weight)
    found["sent"] = [bytes_sent(classes, own) for classes in (C, 10 * C)]
    found["refused"] = refusals(rank, folder, ranks)
    torch.save(found, Path(folder) / f"found {rank} of {ranks}.pt")
    dist.destroy_process_group()


def starts():
    """Embeddings of some classes, not of all."""
    return drawn(40, DIM, seed=7), torch.arange(40) * 3 % 19


def bytes_sent(classes, own):
    """What this rank hands over in a step."""
    loss, (x, y) = shard_classes(CosFace, classes, DIM).double(), batch(0)
    sent = []
    kept = dist.all_gather, dist.all_reduce
    dist.all_gather = lambda out, given, *rest: sent.append(given.nbytes) or kept[0](out, given, *rest)
    dist.all_reduce = lambda given, *rest: sent.append(given.nbytes) or kept[1](given, *rest)
    try:
        loss(encoder()(x[own]), y[own]).backward()
    finally:
        dist.all_gather, dist.all_reduce = kept
    return sum(sent)


def refusals(rank, folder, ranks):
    loss, z = build(ArcFace, {}), drawn(2, DIM, seed=rank)
    y = torch.zeros(2, dtype=torch.long)
    tries = {
        "label": lambda: loss(z, y + (C if rank == 1 else 0)),
        "width": lambda: loss(z[:, : DIM - rank], y),
        "settings": lambda: build(ArcFace, {"margin": 0.1 + rank})(z, y),
        "wrapped": lambda: across_ranks(loss),
        "predict": lambda: loss.predict(z),
        "statistics": lambda: loss.statistics(z, y),
        "again": lambda: save_class_shards(Path(folder) / f"arcface {ranks}", loss),
        "nothing": lambda: load_class_shards(Path(folder) / "nothing", loss),
        "other": lambda: load_class_shards(Path(folder) / f"subcenter {ranks}", loss),
        "few": lambda: shard_classes(ArcFace, ranks - 1, DIM),
        "after all": lambda: loss(z, y),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "nothing was refused"
        except InputError as error:
            found[name] = str(error)
    return found


def launch(folder: str, counts: tuple[int, ...]) -> None:
    """Ranks of several jobs, one job after the other, by forks of a process that has loaded everything."""
    for ranks in counts:
        children = []
        for rank in range(ranks):
            if (child := os.fork()) == 0:
                try:
                    work(rank, ranks, folder)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit(f"of {ranks} ranks not all came to an end")


# What is asked of them


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    started = Forked(launch, str(place), tuple(SPLITS), session=True)
    try:
        said = started.communicate(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, "".join(said)
    return place


def found_by(folder, ranks):
    return [torch.load(folder / f"found {rank} of {ranks}.pt", weights_only=True) for rank in range(ranks)]


def plain(kind, options, loss):
    """The loss of one process that has no idea of ranks, with the same vectors."""
    other = kind(C, DIM, **options).double()
    other.load_state_dict(loss.state_dict())
    return other


def close(found, wanted, what):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda said: f"{what}: {said}")


@pytest.mark.parametrize("ranks", SPLITS)
def test_ranks_find_what_one_process_finds(folder, ranks):
    parts = found_by(folder, ranks)
    for name, (kind, options) in CASES.items():
        loss = build(kind, options)
        wanted, _ = train(plain(kind, options, loss), slice(None), 1)
        for key, value in wanted.items():
            got = [part[name][key] for part in parts]
            if key == "rows" or key in ("state weight", "state bias"):  # each rank has a part
                close(torch.cat(got), value, f"{name}, {ranks} ranks, {key}")
                continue
            for rank, one in enumerate(got):
                close(one, value, f"{name}, {ranks} ranks, rank {rank}, {key}")
            if key.startswith("value"):
                assert all(torch.equal(one, got[0]) for one in got)


@pytest.mark.parametrize("ranks", SPLITS)
def test_sampled_classes_are_those_of_the_batch_and_a_share_of_every_rank(folder, ranks):
    """Against a softmax over the chosen classes, written down."""
    parts = [part["sampled"] for part in found_by(folder, ranks)]
    network = encoder()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    for step in range(3):
        x, y = batch(step)
        chosen = torch.cat([part[f"classes {step}"] for part in parts])
        assert torch.equal(chosen, chosen.unique())
        assert set(y.tolist()) <= set(chosen.tolist())
        assert len(chosen) < C
        weight = torch.cat([part[f"weight {step}"] for part in parts])
        cosine = nn.functional.normalize(network(x)) @ nn.functional.normalize(weight[chosen]).T
        place = torch.searchsorted(chosen, y)
        own = cosine.gather(1, place[:, None])
        turned = torch.where(
            own > -torch.cos(torch.tensor(0.5)), (own.acos() + 0.5).cos(), own - 0.5 * torch.sin(torch.tensor(0.5))
        )
        value = nn.functional.cross_entropy(20 * cosine.scatter(1, place[:, None], turned), place)
        optimizer.zero_grad()
        value.backward()
        for part in parts:
            torch.testing.assert_close(part[f"value {step}"], value.detach(), rtol=1e-7, atol=1e-8)
            for k, p in enumerate(network.parameters()):
                torch.testing.assert_close(part[f"gradient {step} {k}"], p.grad, rtol=1e-6, atol=1e-8)
        optimizer.step()


@pytest.mark.parametrize("name", ["arcface", "subcenter", "softmax"])
def test_a_checkpoint_is_read_by_another_number_of_ranks(folder, name):
    kind, options = CASES[name]
    whole = build(kind, options)
    wanted, optimizer = train(plain(kind, options, whole), slice(None), 1)
    moments = [state["exp_avg"] for p, state in optimizer.state.items()][2:]  # behind those of the network
    for ranks in SPLITS:
        alone = build(kind, options, seed=12)
        own = torch.optim.AdamW(alone.parameters())
        load_class_shards(folder / f"{name} {ranks}", alone, own)
        for key, value in alone.state_dict().items():
            close(value, wanted[f"state {key}"], f"{name} of {ranks} ranks, {key}")
        for p, moment in zip(alone.parameters(), moments, strict=True):
            close(own.state[p]["exp_avg"], moment, f"{name} of {ranks} ranks, moment")
            assert int(own.state[p]["step"]) == 3
    for ranks in (3, 4):
        parts = [part[f"loaded {name}"] for part in found_by(folder, ranks)]
        for key in dict(whole.named_parameters()):
            close(torch.cat([part[key] for part in parts]), wanted[f"state {key}"], f"{ranks} of {ranks - 1}, {key}")
        close(torch.cat([part["moment weight"] for part in parts]), moments[0], f"{ranks} of {ranks - 1}, moment")


@pytest.mark.parametrize("ranks", SPLITS)
def test_what_a_step_sends_does_not_grow_with_the_classes(folder, ranks):
    most = max(SPLITS[ranks])  # all ranks pad to it
    described = 8 * (len(HEAD) + len(PLACES) * len(SLOT))  # what ranks tell each other of a call
    expected = 8 * (most * DIM + most + 2 * N + N * DIM)  # embeddings, labels, row sums, the gradient of all embeddings
    for part in found_by(folder, ranks):
        few, many = part["sent"]
        assert few == many == expected + described


@pytest.mark.parametrize("ranks", SPLITS)
def test_vectors_start_at_class_means_as_in_one_process(folder, ranks):
    parts = found_by(folder, ranks)
    for name in ("arcface", "subcenter"):
        kind, options = CASES[name]
        wanted = plain(kind, options, build(kind, options)).start_from(*starts(), centered=True).weight
        close(torch.cat([part[f"started {name}"] for part in parts]), wanted, name)


@pytest.mark.parametrize("ranks", SPLITS)
def test_rank_0_gathers_the_rows_of_all_classes(folder, ranks):
    whole: Any = build(ArcFace, {})
    parts = found_by(folder, ranks)
    close(parts[0]["gathered"], whole.weight, "gathered")
    assert all(len(part["gathered"]) < C for part in parts[1:])
    assert torch.equal(whole.select_rows(whole.weight), whole.weight)
    assert whole.collect_rows(whole.weight) is whole.weight


WORDS = {
    "label": "label 23 is out of range: 23 classes",
    "width": "rank 1: embeddings are 4 wide",
    "settings": "hold different losses",
    "wrapped": "across ranks already",
    "predict": "predict needs all class vectors",
    "statistics": "statistics needs all",
    "again": "a folder of its own",
    "nothing": "has no classes.json",
    "other": "is of another loss",
    "few": "1 classes do not reach for 2 ranks",
    "after all": "nothing was refused",
}


def test_what_is_wrong_on_one_rank_is_one_line_on_all(folder):
    for part in found_by(folder, 2):
        for name, words in WORDS.items():
            assert words in part["refused"][name], name


def test_what_cannot_be_spread_is_refused():
    for kind in (ProxyAnchor, SoftTriple):
        with pytest.raises(InputError, match="looks at all class vectors at once"):
            shard_classes(kind, 8, 4)
    with pytest.raises(InputError, match="class vectors, got"):
        shard_classes(Center, 8, 4)  # type: ignore[type-var]
    with pytest.raises(InputError, match="label_smoothing does not go"):
        shard_classes(ArcFace, 8, 4, label_smoothing=0.1)
    with pytest.raises(InputError, match="use its state_dict"):
        save_class_shards("nowhere", ArcFace(8, 4))


def test_alone_it_is_the_loss_itself():
    for name, (kind, options) in CASES.items():
        loss = build(kind, options)
        wanted, _ = train(plain(kind, options, loss), slice(None), 1)
        found, _ = train(loss, slice(None), 1)
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            close(value, wanted[key], f"{name}, {key}")
    z, y = drawn(4, DIM, seed=1), torch.arange(4)
    assert not any(vars(p)["is_sharded"] for p in build(Softmax, {}).parameters())
    assert build(ArcFace, {}).predict(z).shape == (4,)
    assert "target_cosine" in build(ArcFace, {}).start_from(z, y).statistics(z, y)
