"""What a difficulty did to a batch, counted over its pairs."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import dense, tiled
from mettle.pairs.checks import Reference, check_all
from mettle.pairs.contract import Acc, Difficulty, PairLoss, Rows, Sweep, Tile, total
from mettle.pairs.engine import Engine, choose, layout
from mettle.pairs.job import stats_of, weights
from mettle.pairs.kernel_spec import NoKernel
from mettle.pairs.kernels import collect_inputs, explain_unavailable, lower_loss
from mettle.pairs.tilt import tilted


@dataclass(frozen=True)
class PairFacts:
    """Counts and means over the pairs of one batch.

    ``hard`` = the difficulty raised the weight above 1; ``kept`` = it left the pair in at all (weight above 0).
    ``effective_negatives`` = (Σw)² / Σw² per anchor, averaged: how many negatives the weights really use.
    ``engine`` computes a call on this batch; where that is not the fused one, ``not_fused`` says why: first what of the
    loss or its difficulty rules it out on any device, then what of the data, then the device.
    """

    engine: str
    anchors: int
    anchors_without_positives: int
    zero_rows: int
    positive_similarity: float
    negative_similarity: float
    hard_positives: float
    hard_negatives: float
    kept_positives: float
    kept_negatives: float
    positive_weight: float
    negative_weight: float
    effective_negatives: float
    clamp_fraction: float = 0.0  # of positive pairs, where a debiased loss is held up by its floor
    not_fused: str = ""

    def as_dict(self) -> dict[str, float | int]:
        """The numbers, for a log line: loggers take no text, so what is said of the engine stays an attribute."""
        return {name: value for name, value in asdict(self).items() if name not in ("engine", "not_fused")}


@dataclass(frozen=True)
class _Counts:
    """A "loss" that only counts: its terms are the weights themselves."""

    loss: PairLoss
    difficulty: Difficulty | None

    @property
    def measure(self):
        return self.loss.measure

    @property
    def temperature(self) -> float:
        return self.loss.temperature

    def sweeps(self) -> tuple[Sweep, ...]:
        return (Sweep(self.terms, reads="rows"),)

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        w = torch.ones_like(tile.s)
        if self.difficulty is not None:
            w = weights(self.difficulty, tile, stats_of(rows))
        found = {}
        for side, mask in (("positive", tile.pos), ("negative", tile.neg)):
            found |= {
                f"{side}.count": total(1.0, mask, weigh="none"),
                f"{side}.similarity": total(tile.s, mask, weigh="none"),
                f"{side}.weight": total(w, mask, weigh="none"),
                f"{side}.square": total(w * w, mask, weigh="none"),
                f"{side}.hard": total((w > 1).to(tile.s.dtype), mask, weigh="none"),
                f"{side}.kept": total((w != 0).to(tile.s.dtype), mask, weigh="none"),
            }
        return found

    def finish(self, rows: Rows) -> Tensor:
        return rows["positive.count"]

    def defined(self, rows: Rows) -> Tensor:
        return rows["positive.count"] > 0

    def share(self, rows: Rows) -> Tensor:
        return torch.ones_like(rows["positive.count"])


@torch.no_grad()
def pair_rows(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    difficulty: Difficulty | None = None,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> dict[str, Tensor]:
    """What the rows of a batch accumulate, in no particular order, without gradient. Arguments as in `pair_loss`."""
    check_all(z, labels, ref, ids, biased, tile)
    name = choose(engine, _pairs(z, ref), loss, difficulty)
    # The same products in the same order as in a call: whether two pairs tie may hang on a rounding.
    job, _ = layout(loss, z.detach(), labels, ref, ids, difficulty, biased, sort=name == "tiled")
    return tiled.rows(job, tile) if name == "tiled" else dense.rows(job)


def _pairs(z: Tensor, ref: Reference | None) -> int:
    return len(z) * (len(z) if ref is None else len(ref[0]))


@torch.no_grad()
def pair_facts(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    difficulty: Difficulty | None = None,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> PairFacts:
    """Count over a batch compared with itself, or with ``ref``, as the engine of a call sees it."""
    check_all(z, labels, ref, ids, biased, tile)
    found = choose(engine, _pairs(z, ref), *tilted(loss, difficulty))
    lowered = lower_loss(loss, difficulty, collect_inputs(z, labels, ref, ids, biased))
    reason = lowered.reason if isinstance(lowered, NoKernel) else explain_unavailable(z.device)
    if engine == "triton" and reason:
        raise InputError(f"engine='triton' is not possible because {reason}: leave engine out, which takes tiles")
    if engine in ("dense", "tiled"):
        reason = reason or f"engine={engine!r} was asked for"
    rows = pair_rows(
        _Counts(loss, difficulty),
        z,
        labels,
        difficulty=difficulty,
        ref=ref,
        ids=ids,
        biased=biased,
        engine="auto" if found == "triton" else found,
        tile=tile,
    )
    sums = {name: float(value.sum()) for name, value in rows.items() if not name.startswith("difficulty.")}

    def mean(side: str, what: str) -> float:
        return sums[f"{side}.{what}"] / max(sums[f"{side}.count"], 1.0)

    weight, square = rows["negative.weight"], rows["negative.square"]
    used = square > 0
    effective = float((weight[used] ** 2 / square[used]).mean()) if bool(used.any()) else 0.0
    return PairFacts(
        engine=found if reason else "triton",
        not_fused=reason,
        anchors=len(z),
        anchors_without_positives=int((rows["positive.count"] == 0).sum()),
        zero_rows=int((z.abs().amax(1) == 0).sum()),
        effective_negatives=effective,
        **{
            f"{what}_{side}s" if what in ("hard", "kept") else f"{side}_{what}": mean(side, what)
            for side in ("positive", "negative")
            for what in ("similarity", "hard", "kept", "weight")
        },  # type: ignore[arg-type]
    )
