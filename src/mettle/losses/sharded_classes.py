"""Class vectors that are spread over ranks: each rank holds C / R classes, and no rank all of them.

    loss = shard_classes(ArcFace, 10_000_000, 512, margin=0.5, sample=0.1)

is the loss of one process that holds all classes, for the batch of all ranks: the same value on every rank, the
gradient of the encoder as `mettle.pairs.across_ranks` has it, and the gradient of each class vector where that vector
is. A step of R ranks with B samples of width d in all sends

    embeddings and labels     B · d numbers to all, and their gradient back
    row sums                  2 · B numbers of every rank to all, in one exchange (`pairs.distributed.class_shards`)

and nothing that grows with the number of classes. With ``sample`` each rank compares with that share of its own
classes: those that occur in the batch and a random rest (partial FC, An et al. 2022).

`save_class_shards` writes one file for every rank, `load_class_shards` reads them with any number of ranks.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mettle.atomic_files import write_text
from mettle.difficulty.settings import validate_integers, view_with
from mettle.errors import InputError
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors, draw_classes
from mettle.pairs.class_softmax import log_sum_of_others, shard_reductions
from mettle.pairs.distributed.class_shards import (
    ClassRange,
    combine_classes,
    combine_targets,
    sum_gradient_over_ranks,
)
from mettle.pairs.distributed.collectives import distribute, fail_everywhere, sum_over_ranks
from mettle.pairs.distributed.handshake import (
    CallSummary,
    CallTensors,
    RankInfo,
    control_device,
    exchange_descriptions,
    has_other_ranks,
)
from mettle.pairs.interface import RowValues
from mettle.pairs.similarity import at_least_float32, normalize_rows
from mettle.rng import hash_bits

Kind = TypeVar("Kind", bound=ClassVectors)
BLOCK = 1024  # rows that are drawn at a time: vectors start at the same numbers for any number of ranks
FILE = "classes-{rank}-of-{ranks}.safetensors"
MANIFEST = "classes.json"


def shard_classes(kind: type[Kind], num_classes: int, dim: int, **options: Any) -> Kind:
    """A loss with one vector per class whose classes are spread over the ranks of `torch.distributed`.

    Called on every rank with that rank's embeddings and labels (of all classes, from 0), like
    ``across_ranks(kind(...))``; batches may differ in size. Without a process group it holds all classes.

    Its parameters belong to this rank alone: they go into this rank's optimizer, and neither into
    `DistributedDataParallel` nor into any average over ranks. Their gradient is complete as it stands.

    Args:
        kind: a class of `mettle.losses` with class vectors, such as `ArcFace`, or a subclass of your own.
        num_classes: C, of all ranks together.
        dim: width of the embeddings.
        options: those of ``kind``, but for ``difficulty`` and ``label_smoothing``.
    """
    check_shardable(kind, options)
    made: Any = _sharded_kind(kind)
    return made(num_classes, dim, **options)


def check_shardable(kind: Any, options: Mapping[str, Any]) -> None:
    """Refuse what `shard_classes` cannot spread over ranks."""
    if not (isinstance(kind, type) and issubclass(kind, ClassVectors)):
        raise InputError(f"shard_classes takes a class of mettle.losses with class vectors, got {kind!r}")
    for name in ("difficulty", "label_smoothing"):
        if options.get(name):
            raise InputError(f"{name} does not go with classes that are spread over ranks: leave it out")
    if kind.anchors_are_classes or kind.regularizes_vectors:
        raise InputError(
            f"{kind.__name__} looks at all class vectors at once, and no rank has them: choose a loss of samples "
            "against classes, such as CosFace or ArcFace"
        )


class ShardedClasses(ClassVectors):
    """What `shard_classes` makes of a loss: its maths, over the classes of all ranks."""

    is_sharded = True

    def __init__(self, num_classes: int, dim: int, **options: Any):
        validate_integers(num_classes=num_classes)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)
        require(num_classes >= ranks, f"{num_classes} classes do not reach for {ranks} ranks: use across_ranks")
        self.__dict__["_class_range"] = ClassRange(rank, ranks, num_classes)  # constructors ask for it
        super().__init__(num_classes, dim, **options)
        for p in self.class_parameters().values():  # what averages over ranks leaves them as they are
            p.is_sharded = ranks > 1  # type: ignore[attr-defined]

    def class_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that have rows of this rank's classes, by name."""
        rows = len(self.weight)
        return {name: p for name, p in self.named_parameters() if p.ndim and len(p) == rows}

    @property
    def class_range(self) -> ClassRange:
        """Which classes this rank has."""
        return self.__dict__["_class_range"]

    @property
    def num_classes(self) -> int:
        """How many classes there are on all ranks together."""
        return self.class_range.classes

    @property
    def is_spread(self) -> bool:
        """Whether other ranks have classes too."""
        return self.class_range.ranks > 1

    def collect_rows(self, x: Tensor) -> Tensor:
        """On rank 0 the rows of all classes, where ``x`` has those of this rank's; called on all ranks.

        Other ranks get back what they gave.
        """
        if not self.is_spread:
            return x
        classes, each = self.class_range, len(x) // len(self.class_range)
        ranges = [ClassRange(rank, classes.ranks, classes.classes) for rank in range(classes.ranks)]
        device, most = control_device(), max(len(other) for other in ranges)
        mine = torch.zeros((most * each, *x.shape[1:]), dtype=x.dtype, device=device)
        mine[: len(x)] = x.detach().to(device)
        parts = [torch.empty_like(mine) for _ in ranges] if classes.rank == 0 else None
        dist.gather(mine, parts)
        return x if parts is None else torch.cat([y[: len(r) * each] for y, r in zip(parts, ranges, strict=True)])

    def select_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of what has rows of all classes."""
        classes, each = self.class_range, len(x) // self.class_range.classes
        return x[classes.start * each : classes.stop * each]

    @property
    def by_row(self) -> bool:
        """Ranks are inside of it already."""
        return False

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The loss of the samples of all ranks over all classes, the same on every rank, with gradient."""
        if self.class_range.ranks == 1 or "_ranks" in self.__dict__:
            return super().forward(embeddings, labels, progress=progress)
        ranks, z, y = self._gather_batch(embeddings, labels, 0)
        return view_with(self, _ranks=ranks).forward(z, y, progress=progress)

    @torch.no_grad()
    def per_anchor(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """(n,) one value per sample of this rank, without gradient."""
        if self.class_range.ranks == 1:
            return super().per_anchor(embeddings, labels, progress=progress)
        ranks, z, y = self._gather_batch(embeddings, labels, 1)
        return ClassVectors.per_anchor(view_with(self, _ranks=ranks), z, y, progress=progress)[ranks.own]

    def sample_classes(self, labels: Tensor) -> Tensor:
        """This rank's classes of the batch and a random rest of its own, numbered from its first one, in order."""
        known = len(self.class_range)
        own = self.class_range.positions(labels).unique()
        seed = hash_bits(self.seed, int(self.draw), self.class_range.start)[0]
        return draw_classes(own[own < known], known, self.sample, seed)

    def own_similarity(self, z: Tensor, labels: Tensor) -> Tensor:
        """(B,) of every sample to the class of its label, wherever that is."""
        if self.class_range.ranks == 1:
            return super().own_similarity(z, labels)
        return combine_targets(self._own_part(z, self._vectors(), self.class_range.positions(labels)))

    def all_class_values(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) similarity to the own class, and (B,) log-sum-exp of scaled similarities to all others."""
        return super().all_class_values(embeddings, self.class_range.positions(labels))

    def vectors(self) -> Tensor:
        """Those of this rank's classes, `class_range`."""
        return super().vectors()

    def logits(self, embeddings: Tensor) -> Tensor:
        """(n, c) to the classes of this rank, `class_range`."""
        return super().logits(embeddings)

    def predict(self, embeddings: Tensor, chunk: int = 4096) -> Tensor:
        """Refused where there are other ranks."""
        self._refuse_among_ranks("predict")
        return super().predict(embeddings, chunk)

    @torch.no_grad()
    def start_from(self, embeddings: Tensor, labels: Tensor, *, centered: bool = False) -> Self:
        """As one process does, on every rank with the same embeddings: those of all classes."""
        if not self.is_spread:
            return super().start_from(embeddings, labels, centered=centered)
        known, start = self._find_starts(self._check(embeddings, labels), embeddings, centered)
        here = self.class_range.positions(known) < len(self.class_range)
        self._set_vectors(known[here] - self.class_range.start, start[here])
        return self

    def statistics(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> dict[str, Any]:
        """Refused where there are other ranks."""
        self._refuse_among_ranks("statistics")
        return super().statistics(embeddings, labels, progress=progress)

    def _refuse_among_ranks(self, name: str) -> None:
        if self.class_range.ranks > 1:
            raise InputError(
                f"{name} needs all class vectors, and they are spread over {self.class_range.ranks} ranks: save them "
                "with save_class_shards, and load them in one process"
            )

    def _random_vectors(self, rows: int, dim: int) -> Tensor:
        """The rows of this rank's classes, out of blocks that follow from the seed alone."""
        each = rows // self.num_classes
        start, stop = self.class_range.start * each, self.class_range.stop * each
        seed = int(torch.randint(1 << 62, ()))  # of the global generator, as one process draws from it
        if self.class_range.ranks > 1:
            told = torch.tensor(seed, device=control_device())
            dist.broadcast(told, 0)
            seed = int(told)
        found = torch.empty(stop - start, dim)
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            generator = torch.Generator().manual_seed(int(hash_bits(seed, block)[0] >> 1))
            drawn = torch.randn(BLOCK, dim, generator=generator)
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            found[first - start : last - start] = drawn[first - block * BLOCK : last - block * BLOCK]
        return found / dim**0.5

    def _gather_batch(self, embeddings: Tensor, labels: Tensor, call: int) -> tuple[RankInfo, Tensor, Tensor]:
        """The batches of all ranks in rank order; what is wrong on one rank is the same error on all."""
        call_tensors, error = None, None
        try:
            if not isinstance(embeddings, Tensor) or len(embeddings):  # a rank may have nothing to bring
                self._validate_shapes(embeddings, labels)
            call_tensors = CallTensors.from_call((embeddings, labels), {})
        except Exception as wrong:  # whatever it is, the others must not wait
            error = wrong
        tensors, names = ({}, {}) if call_tensors is None else (call_tensors.tensors, call_tensors.names)
        settings = zlib.crc32(repr(self).encode())
        ranks = exchange_descriptions(
            tensors, names, CallSummary(call, self.training, settings, 0, fresh=False, fuses=False), error
        )
        found, _ = distribute(ranks, tensors, "gather", reduce_gradients=True)
        return ranks, found["1"], found["2"]

    def _evaluate(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool) -> tuple[Tensor, Tensor | None]:
        ranks: RankInfo | None = self.__dict__.get("_ranks")
        if ranks is None:
            return super()._evaluate(z, vectors, labels, half)
        row_values = self._class_values(z, vectors, labels, half)
        # Every rank computes the loss of all rows, and gradients are summed over ranks: the part that does not go
        # through class vectors, as the length of a feature does not, is taken from the rank that the row belongs to.
        constant = z.detach()
        own = torch.cat([constant[: ranks.own.start], z[ranks.own], constant[ranks.own.stop :]])
        return self._sample_values(row_values, own, vectors)

    def _class_values(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool = False) -> RowValues:
        target, others = self._reduce_classes(z, vectors, labels, half)
        return {"target": target, "others_lse": others}

    def _select_classes(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's vectors to compare with in this step, and labels as positions among them, or their number."""
        positions = self.class_range.positions(labels)
        if self.sample == 1 or not (self.training and torch.is_grad_enabled()):
            return self._vectors(), positions
        classes = self.sample_classes(labels)
        self.draw += 1
        vectors = nn.functional.embedding(self._rows_of(classes), self._vectors(), sparse=self.sparse)
        here = positions < len(self.class_range)
        return vectors, torch.where(here, torch.searchsorted(classes, positions), len(classes))

    def _reduce_classes(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool = False) -> tuple[Tensor, Tensor]:
        if self.class_range.ranks == 1:
            return super()._reduce_classes(z, vectors, labels, half)
        z = at_least_float32(z)
        z = normalize_rows(z) if self.unit_features else z
        scale = self._logit_scale()
        if self.vectors_per_class == 1 and not self.modulates_negatives:
            return combine_classes(*shard_reductions(z, vectors, labels, scale, self.unit_vectors))
        own, similarity = self._own_part(z, vectors, labels), self._similarity()
        if not self.modulates_negatives:
            return combine_classes(own, log_sum_of_others(z, vectors, labels, scale, own, similarity))
        target = combine_targets(own)  # wrong classes are measured by the own one, which may be on another rank
        shared = sum_gradient_over_ranks(target)
        others = log_sum_of_others(z, vectors, labels, scale, shared, similarity, self.modulate)
        return target, combine_classes(own.detach(), others)[1]

    def _own_part(self, z: Tensor, vectors: Tensor, positions: Tensor) -> Tensor:
        """(B,) of every sample to the class of its label; 0 where that is on another rank."""
        (here,) = (positions < len(vectors) // self.vectors_per_class).nonzero(as_tuple=True)
        found = self._similarity().to_own(z[here], vectors, positions[here])
        return z.new_zeros(len(z)).index_put((here,), found)


@cache
def _sharded_kind(kind: type[Kind]) -> type[Kind]:
    made: Any = type(f"Sharded{kind.__name__}", (ShardedClasses, kind), {"__doc__": kind.__doc__})
    return made


def save_class_shards(folder: Path | str, loss: ClassVectors, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the classes of every rank, each rank its own, with what its optimizer knows of them; called on all ranks.

    Args:
        folder: of this checkpoint alone, which all ranks can write to. What is in it counts once all of them are done.
        loss: made by `shard_classes`.
        optimizer: that moves its parameters; settings of its groups, such as learning rates, are not written.
    """
    from safetensors.torch import save_file

    folder, sharded = Path(folder), _check_sharded(loss)
    classes = sharded.class_range
    name = FILE.format(rank=classes.rank, ranks=classes.ranks)
    rows: dict[str, int] = {}

    def write_rows() -> None:
        require(not (folder / MANIFEST).exists(), f"{folder} holds class vectors already: give a folder of its own")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _collect_tensors(sharded, optimizer, rows)
        save_file(tensors, folder / f"{name}.part")
        (folder / f"{name}.part").replace(folder / name)

    def write_manifest() -> None:
        if classes.rank == 0:
            files = [FILE.format(rank=rank, ranks=classes.ranks) for rank in range(classes.ranks)]
            content = {"classes": classes.classes, "files": files, "rows_per_class": rows}
            write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")

    _run_together(classes, write_rows)
    _run_together(classes, write_manifest)


def load_class_shards(folder: Path | str, loss: ClassVectors, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save_class_shards` wrote, with any number of ranks: every rank reads the rows of its own classes."""
    folder, sharded = Path(folder), _check_sharded(loss)
    _run_together(sharded.class_range, lambda: _load_rows(folder, sharded, optimizer))


def _check_sharded(loss: Any) -> ShardedClasses:
    if not isinstance(loss, ShardedClasses):
        raise InputError(f"the loss must be one of shard_classes, got {type(loss).__name__}: use its state_dict")
    return loss


def _run_together(classes: ClassRange, function: Callable[[], None]) -> None:
    """Do something on all ranks and go on once all are done; an error of one is raised on all."""
    try:
        function()
    except Exception as error:
        if classes.ranks > 1:
            fail_everywhere(0, control_device(), error)
        raise
    if classes.ranks > 1:
        sum_over_ranks([], control_device())


def _collect_tensors(
    loss: ShardedClasses, optimizer: torch.optim.Optimizer | None, rows: dict[str, int]
) -> dict[str, Tensor]:
    """All tensors by name; ``rows`` then says how many a class has in those that are of this rank's classes."""
    parameters = dict(loss.named_parameters())
    found = {f"loss {name}": tensor for name, tensor in loss.state_dict().items()}
    rows |= {f"loss {name}": len(p) // len(loss.class_range) for name, p in loss.class_parameters().items()}
    state: Any = {} if optimizer is None else optimizer.state
    for name, p in parameters.items():
        for key, value in state.get(p, {}).items():
            if not isinstance(value, Tensor):
                raise InputError(f"the optimizer keeps {key} as a {type(value).__name__}: only tensors can be saved")
            found[f"optimizer {name} {key}"] = value
            if value.shape == p.shape and f"loss {name}" in rows:
                rows[f"optimizer {name} {key}"] = rows[f"loss {name}"]
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


@torch.no_grad()
def _load_rows(folder: Path, loss: ShardedClasses, optimizer: torch.optim.Optimizer | None) -> None:
    classes = loss.class_range
    if not (folder / MANIFEST).exists():
        raise InputError(
            f"{folder} has no {MANIFEST}: it holds no class vectors, or not all ranks finished writing them"
        )
    content = json.loads((folder / MANIFEST).read_text())
    require(
        content["classes"] == classes.classes,
        f"{folder} has {content['classes']} classes, the loss {classes.classes}: build it with as many",
    )
    found = _read_own_rows(folder, content, classes)
    state = {name.removeprefix("loss "): x for name, x in found.items() if name.startswith("loss ")}
    try:
        loss.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{folder} is of another loss: {' '.join(str(error).split())[:300]}") from None
    for name, p in loss.named_parameters():
        start = f"optimizer {name} "
        own = {key.removeprefix(start): x for key, x in found.items() if key.startswith(start)}
        if own and optimizer is not None:  # where a value is one number, optimizers want it on the processor
            optimizer.state[p] = {key: x.to(p.device) if x.shape == p.shape else x for key, x in own.items()}


def _read_own_rows(folder: Path, content: dict[str, Any], classes: ClassRange) -> dict[str, Tensor]:
    """All tensors, of those that have rows of classes the rows of these."""
    from safetensors import safe_open

    parts: dict[str, list[Tensor]] = {}
    count = len(content["files"])
    for rank, name in enumerate(content["files"]):
        there = ClassRange(rank, count, classes.classes)
        first, last = max(classes.start, there.start), min(classes.stop, there.stop)
        if first >= last and rank > 0:
            continue
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                each = content["rows_per_class"].get(key)
                if each is None and rank == 0:  # the same on all ranks
                    parts[key] = [file.get_tensor(key)]
                elif each is not None and first < last:
                    rows = file.get_slice(key)[(first - there.start) * each : (last - there.start) * each]
                    parts.setdefault(key, []).append(rows)
    return {key: torch.cat(some) if len(some) > 1 else some[0] for key, some in parts.items()}
