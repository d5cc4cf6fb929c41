"""What a difficulty did to a batch, counted over its pairs."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import closed_form, reference, tiled
from mettle.pairs.dispatch import Engine, choose_engine
from mettle.pairs.interface import Difficulty, PairLoss, Pass, Reduction, RowValues, Tile, sum_over
from mettle.pairs.kernel_spec import NoKernel
from mettle.pairs.kernels import collect_inputs, explain_unavailable, lower_loss
from mettle.pairs.problem import STATISTIC, build_problem, difficulty_statistics, evaluate_weights
from mettle.pairs.selection import PairSelection, resolve_labels
from mettle.pairs.self_normalized import fold_weights
from mettle.pairs.similarity import widest_dtype
from mettle.pairs.validation import Reference, validate_inputs


@dataclass(frozen=True)
class PairStatistics:
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
class _WeightCounts:
    """A "loss" that only counts: it sums the weights themselves."""

    loss: PairLoss
    difficulty: Difficulty | None

    @property
    def measure(self):
        return self.loss.measure

    @property
    def temperature(self) -> float:
        return self.loss.temperature

    def passes(self) -> tuple[Pass, ...]:
        return (Pass(self.reductions, reads="anchor"),)

    def reductions(self, tile: Tile, rows: RowValues) -> dict[str, Reduction]:
        w = torch.ones_like(tile.similarity)
        if self.difficulty is not None:
            w = evaluate_weights(self.difficulty, tile, difficulty_statistics(rows))
        found = {}
        for side, mask in (("positive", tile.positive), ("negative", tile.negative)):
            found |= {
                f"{side}.count": sum_over(1.0, mask, weighting="none"),
                f"{side}.similarity": sum_over(tile.similarity, mask, weighting="none"),
                f"{side}.weight": sum_over(w, mask, weighting="none"),
                f"{side}.square": sum_over(w * w, mask, weighting="none"),
                f"{side}.hard": sum_over((w > 1).to(tile.similarity.dtype), mask, weighting="none"),
                f"{side}.kept": sum_over((w != 0).to(tile.similarity.dtype), mask, weighting="none"),
            }
        return found


@torch.no_grad()
def pair_row_values(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor | None,
    *,
    difficulty: Difficulty | None = None,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    selection: PairSelection | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> dict[str, Tensor]:
    """What the rows of a batch accumulate, in no particular order, without gradient. Arguments as in `pair_loss`."""
    labels, ref, selection = resolve_labels(z, labels, ref, selection)
    validate_inputs(z, labels, ref, ids, biased, tile)
    name = choose_engine(engine, _count_pairs(z, ref), loss, difficulty)
    # The same products in the same order as in a call: whether two pairs tie may hang on a rounding.
    sort = name == "tiled"
    problem, _ = build_problem(loss, z.detach(), labels, ref, ids, difficulty, biased, sort=sort, selection=selection)
    return tiled.reduce_problem(problem, tile) if name == "tiled" else reference.reduce_problem(problem)


def _count_pairs(z: Tensor, ref: Reference | None) -> int:
    return len(z) * (len(z) if ref is None else len(ref[0]))


@torch.no_grad()
def pair_statistics(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor | None,
    *,
    difficulty: Difficulty | None = None,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    biased: Tensor | tuple[Tensor, Tensor] | None = None,
    selection: PairSelection | None = None,
    engine: Engine = "auto",
    tile: int | None = None,
) -> PairStatistics:
    """Count over a batch compared with itself, or with ``ref``, as the engine of a call sees it."""
    labels, ref, selection = resolve_labels(z, labels, ref, selection)
    validate_inputs(z, labels, ref, ids, biased, tile)
    found = choose_engine(engine, _count_pairs(z, ref), *fold_weights(loss, difficulty))
    lowered = lower_loss(loss, difficulty, collect_inputs(z, labels, ref, ids, biased))
    reason = lowered.reason if isinstance(lowered, NoKernel) else ""
    reason = reason or (explain_unavailable(z.device) if selection is None else selection.description)
    if engine == "triton" and reason:
        raise InputError(f"engine='triton' is not possible because {reason}: leave engine out, which takes tiles")
    if engine in ("dense", "tiled"):
        reason = reason or f"engine={engine!r} was asked for"
    plain = ref is None and selection is None
    in_closed_form = engine == "auto" and plain and closed_form.find_spec(loss, difficulty, z) is not None
    rows = pair_row_values(
        _WeightCounts(loss, difficulty),  # type: ignore[arg-type]
        z,
        labels,
        difficulty=difficulty,
        ref=ref,
        ids=ids,
        biased=biased,
        selection=selection,
        engine="auto" if found == "triton" else found,
        tile=tile,
    )
    names = [name for name in rows if not name.startswith(STATISTIC)]
    # One copy from the device, which is waited for once.
    wide = widest_dtype(z.device)
    table = torch.stack([rows[name].to(wide) for name in names] + [(z.abs().amax(1) == 0).to(wide)]).cpu().double()
    values = dict(zip([*names, "zero"], table, strict=True))
    sums = {name: float(value.sum()) for name, value in values.items()}

    def mean(side: str, what: str) -> float:
        return sums[f"{side}.{what}"] / max(sums[f"{side}.count"], 1.0)

    weight, square = values["negative.weight"], values["negative.square"]
    used = square > 0
    effective = float((weight[used] ** 2 / square[used]).mean()) if bool(used.any()) else 0.0
    return PairStatistics(
        engine="triton" if not reason else "closed-form" if in_closed_form else found,
        not_fused=reason,
        anchors=len(z),
        anchors_without_positives=int((values["positive.count"] == 0).sum()),
        zero_rows=int(sums["zero"]),
        effective_negatives=effective,
        **{
            f"{what}_{side}s" if what in ("hard", "kept") else f"{side}_{what}": mean(side, what)
            for side in ("positive", "negative")
            for what in ("similarity", "hard", "kept", "weight")
        },  # type: ignore[arg-type]
    )


@torch.no_grad()
def pair_weights(
    loss: PairLoss,
    z: Tensor,
    labels: Tensor,
    *,
    difficulty: Difficulty,
    biased: Tensor | None = None,
) -> Tensor:
    """(n, n) weights of all pairs of a batch, as one matrix."""
    validate_inputs(z, labels, None, None, biased)
    problem, _ = build_problem(loss, z, labels, None, None, difficulty, biased, sort=False)
    tile = problem.tile(*problem.whole_blocks())
    statistics = reference.run_passes(problem, problem.resolve_statistics(), tile)
    return evaluate_weights(difficulty, tile, difficulty_statistics(statistics))
