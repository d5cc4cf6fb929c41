"""What every pairwise loss shares: it is an `nn.Module` with immutable settings, and the engine evaluates it."""

from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from mettle.difficulty.fixed_weights import FixedWeights
from mettle.difficulty.settings import SettingsModule, view_with
from mettle.errors import InputError
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    Mask,
    Measure,
    NoKernel,
    PairOutput,
    PairStatistics,
    Pass,
    Reduction,
    RowValues,
    Tile,
    pair_loss,
    pair_statistics,
)
from mettle.pairs.compiled import compiled_mean, is_opaque, register_loss
from mettle.pairs.declarations import declared_traits
from mettle.pairs.diagnostics import pair_row_values
from mettle.pairs.dispatch import Engine
from mettle.pairs.kernel_spec import is_differentiable
from mettle.pairs.loss_reduction import LossReduction
from mettle.pairs.selection import IndicesTuple, PairSelection, select_pairs
from mettle.pairs.similarity import can_read, transforms_active
from mettle.pairs.validation import Reference, stack_views, validate_embeddings

SELECTING = ("indices_tuple", "positives", "negatives", "targets")  # options that name the pairs of a call


class PairwiseLoss(SettingsModule):
    """A loss over the pairs of a batch, or of a batch against a reference set.

    A member says what its rows accumulate (``reductions``) and what a row's loss is (``row_loss``); `mettle.pairs` does
    the rest. Its annotated fields are its settings.

    A batch in which no anchor has a positive is an error on the CPU; on a GPU and under ``torch.compile``, where nobody
    can look at values without waiting for them, its mean is NaN. With ``empty="zero"`` it is 0 with zero gradient.

    ``reduction`` says what is made of the values per anchor: their ``mean``, their mean over positive ``pairs``, the
    mean of the ``nonzero`` ones, their ``sum``, or ``none``: the values (`mettle.pairs.loss_reduction`).
    """

    takes_progress = True  # of training, as an argument of the call: for curricula
    takes_references = True  # whether a batch can be compared with a reference set, ``ref``
    takes_targets = False  # whether a soft target has a meaning
    takes_triplets = False  # whether given triplets are used as such (`given_triplets`), not as pairs

    empty: Literal["error", "zero"] = field(default="error", kw_only=True)
    reduction: LossReduction = field(default="mean", kw_only=True)

    temperature = 1.0  # without an annotation, which would make a setting of it
    if TYPE_CHECKING:

        @property
        def measure(self) -> Measure:
            """The similarity that tiles hold: a setting of some members, a property of others."""
            ...
    else:
        measure = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register()

    def _register(self) -> None:
        """What belongs to this object alone, and not to its copies."""
        self.__dict__["_known_kernel_specs"] = {}  # by weights; see `mettle.pairs.kernel_spec.declared_spec`
        self.__dict__["_compile_handle"] = register_loss(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register()

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """What each row accumulates over one tile."""
        raise NotImplementedError

    def row_loss(self, row_values: RowValues) -> Tensor:
        """One value per row."""
        raise NotImplementedError

    def is_defined(self, row_values: RowValues) -> Tensor:
        """Anchors with at least one positive that is present."""
        return row_values["positives"] > 0

    def anchor_weight(self, row_values: RowValues) -> Tensor | None:
        """Every anchor counts alike in the mean."""
        return None

    def passes(self) -> tuple[Pass, ...]:
        """One pass over all tiles, unless a member needs more."""
        return (Pass(self.reductions),)

    def current_temperature(self) -> float | Tensor:
        """The temperature that similarities are divided by: a number, or a learned one with gradient."""
        return self.temperature

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: IndicesTuple | None = None,
        **options: Any,
    ) -> Tensor:
        """The mean over anchors, or another ``reduction`` of them, with gradient. Options: see :meth:`output`.

        A list of pairs without any positive gives 0 with zero gradient: that a miner finds nothing is ordinary.
        """
        if indices_tuple is not None:
            output = self.output(embeddings, labels, indices_tuple=indices_tuple, **options)
            return output.reduce(self.reduction, zero_if_empty=True)
        if not options and labels is not None and is_opaque(embeddings) and self._is_plain():
            self.observe(embeddings, labels)
            return compiled_mean(self.__dict__["_compile_handle"], embeddings, labels)
        output = self.output(embeddings, labels, **options)
        if self.empty == "zero":
            return output.reduce(self.reduction, zero_if_empty=True)
        is_empty = not output.known_defined and can_read(output.defined) and output.is_empty()
        if is_empty and bool(torch.isfinite(output.values).all()):  # broken embeddings have NaN, whatever is mined
            raise InputError(
                f"no anchor has a positive among {len(embeddings)} samples: each class needs at least two samples in a "
                "batch. The usual cause is a sampler that draws samples one by one; draw P classes x K samples"
                + _hint_at_difficulty(self)
            )
        return output.reduce(self.reduction)

    def _is_plain(self) -> bool:
        """Whether a call is one number of the engine on this loss: no output of its own, nothing to be learned."""
        own_output = type(self).output is not PairwiseLoss.output or self.reduction == "none"
        return not own_output and not any(True for _ in self.parameters())

    def per_anchor(
        self, embeddings: Tensor, labels: Tensor | None, indices_tuple: IndicesTuple | None = None, **options: Any
    ) -> Tensor:
        """(n,) one value per anchor, NaN for anchors without positives. Options: see :meth:`output`."""
        if indices_tuple is not None:
            options["indices_tuple"] = indices_tuple
        return self.output(embeddings, labels, **options).per_anchor()

    def output(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        *,
        indices_tuple: IndicesTuple | None = None,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        targets: Tensor | None = None,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        biased: Tensor | tuple[Tensor, Tensor] | None = None,
        views: bool = False,
        progress: float | None = None,
        weights: Tensor | None = None,
        engine: Engine = "auto",
        tile: int | None = None,
    ) -> PairOutput:
        """Values, where they are defined, and the engine that computed them.

        Args:
            embeddings: (n, d), any floating type; normalised inside where the loss lives on the sphere.
            labels: (n,) whole numbers. For two views of unlabelled samples pass the sample ids. (n, C) of 0 and 1:
                samples of several classes, positive where they share one. None where one of the next four says it.
            indices_tuple: (anchors, positives, anchors, negatives) or (anchors, positives, negatives): positions of the
                pairs or triplets to use, and no others; a pair that is listed k times counts k times.
            positives: (n, m) booleans, in place of equal labels; negatives are the rest.
            negatives: (n, m) booleans with ``positives``: pairs of neither table are absent.
            targets: (n, m) soft targets from 0 to 1, for `SupCon` and `InfoNCE`.
            ref: (embeddings, labels) or (embeddings, labels, ids) to compare with instead of the batch itself.
            ids: (n,) sample ids, to leave out pairs of equal id against a ``ref`` with ids.
            biased: a second encoder's embeddings, for difficulties that compare two encoders.
            views: embeddings are (n, v, d): v views of each sample; values come view by view, (v * n,).
            progress: how much of training is done, from 0 to 1, for a difficulty that follows a curriculum.
            weights: (n, m) weights of the pairs, in place of those of the difficulty.
            engine: ``auto``, ``dense``, ``tiled`` or, on a GPU, ``triton``.
            tile: rows of a tile of the tiled engine; chosen by size when left out.
        """
        given = {"indices_tuple": indices_tuple, "positives": positives, "negatives": negatives, "targets": targets}
        if self.takes_triplets and isinstance(indices_tuple, tuple | list) and len(indices_tuple) == 3:
            others = {"ids": ids, "biased": biased, "weights": weights, **given, "indices_tuple": None}
            name = next((name for name, x in others.items() if x is not None), "views" if views else None)
            if name is not None:
                raise InputError(f"{type(self).__name__} takes given triplets as they are: {name}= does not apply")
            return self.given_triplets(embeddings, labels, ref, indices_tuple)
        if views:
            _refuse_views(given)
            embeddings, labels, biased = stack_views(embeddings, labels, biased)
        if weights is not None:
            validate_pair_weights(weights, embeddings, ref)
        selection = self._select_pairs(embeddings, labels, ref, given, weights)
        loss = self.resolve_difficulty(progress, weights)
        loss.observe(embeddings, labels)
        return pair_loss(
            loss,
            embeddings,
            labels,
            ref=ref,
            ids=ids,
            biased=biased,
            difficulty=difficulty_of(loss),
            selection=selection,
            engine=engine,
            tile=tile,
        )

    def given_triplets(
        self, embeddings: Tensor, labels: Tensor | None, ref: Reference | None, triplets: IndicesTuple
    ) -> PairOutput:
        """The loss of just these triplets, for a member that declares ``takes_triplets``."""
        raise NotImplementedError

    def _select_pairs(
        self, embeddings: Tensor, labels: Tensor | None, ref: Reference | None, given: dict[str, Any], weights: Any
    ) -> PairSelection | None:
        """The pairs that a call names, or None; refuses what this loss cannot take."""
        name = type(self).__name__
        if given["targets"] is not None:
            if not self.takes_targets:
                raise InputError(f"{name} has no form for soft targets=: use SupCon or InfoNCE, or give positives=")
            if difficulty_of(self) is not None or weights is not None:
                raise InputError(f"{name} takes targets= without a difficulty or weights=: they weigh the pairs")
        has_numbers = isinstance(labels, Tensor) and labels.ndim == 1
        if not has_numbers and getattr(self, "reads_labels", False):
            raise InputError(f"{name} has a number for each class and needs labels (n,), one for each sample")
        return select_pairs(embeddings, ref, **given)

    def observe(self, embeddings: Tensor, labels: Tensor | None) -> None:
        """Show a training batch to a difficulty that follows the data."""
        observe = getattr(difficulty_of(self), "observe", None)
        if observe is not None and torch.is_grad_enabled() and not transforms_active():
            if labels is None or (isinstance(labels, Tensor) and labels.ndim != 1):
                raise InputError(
                    f"{type(difficulty_of(self)).__name__} follows the pairs of equal labels and needs labels (n,), "
                    "one for each sample: use a difficulty that does not follow the data, such as Threshold"
                )
            validate_embeddings(embeddings, labels, "embeddings", "labels")
            observe(embeddings, labels)

    def statistics(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        *,
        views: bool = False,
        progress: float | None = None,
        weights: Tensor | None = None,
        **options: Any,
    ) -> PairStatistics:
        """What the difficulty did to this batch. Options: see :meth:`output`; there is no engine to choose."""
        if views:
            _refuse_views(options)
            embeddings, labels, options["biased"] = stack_views(embeddings, labels, options.get("biased"))
        options["selection"] = self._pop_selection(embeddings, labels, options, weights)
        loss = self.resolve_difficulty(progress, weights)
        return pair_statistics(loss, embeddings, labels, difficulty=difficulty_of(loss), **options)

    def row_values(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        *,
        progress: float | None = None,
        weights: Tensor | None = None,
        **options: Any,
    ) -> RowValues:
        """Everything that the rows of this batch accumulate, in no particular order."""
        options["selection"] = self._pop_selection(embeddings, labels, options, weights)
        loss = self.resolve_difficulty(progress, weights)
        return pair_row_values(loss, embeddings, labels, difficulty=difficulty_of(loss), **options)

    def _pop_selection(
        self, embeddings: Tensor, labels: Tensor | None, options: dict[str, Any], weights: Any
    ) -> PairSelection | None:
        """The pairs that the options of a call name, taken out of them."""
        given = {name: options.pop(name, None) for name in SELECTING}
        return self._select_pairs(embeddings, labels, options.get("ref"), given, weights)

    def resolve_difficulty(self, progress: float | None, weights: Tensor | None) -> Self:
        """The loss for one call: with given weights, or with its curriculum at this point of training."""
        if weights is not None:
            traits = declared_traits(difficulty_of(self))
            return view_with(self, difficulty=FixedWeights(weights, traits.positive_weights, traits.negatives))
        at = getattr(difficulty_of(self), "at", None)
        return self if progress is None or at is None else view_with(self, difficulty=at(progress))


def _hint_at_difficulty(loss: PairwiseLoss) -> str:
    """What else may leave no positive."""
    difficulty = difficulty_of(loss)
    if difficulty is None:
        return ""
    return f". Or {type(difficulty).__name__} leaves none in: if that is to be expected, give the loss empty='zero'"


class SoftmaxLoss(PairwiseLoss):
    """A pairwise loss of similarities over a temperature, which may be learned (CLIP, Radford et al. 2021).

    A learned temperature starts at ``temperature`` and is kept as its logarithm, ``log_temperature``. A learned bias of
    all logits, as a sigmoid loss has it, would cancel in the softmax.
    """

    learn_temperature: bool = field(default=False, kw_only=True)
    measure: Measure = field(default="cosine", kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        start = nn.Parameter(torch.tensor(float(self.temperature)).log()) if self.learn_temperature else None
        self.register_parameter("log_temperature", start)

    def current_temperature(self) -> float | Tensor:
        """The setting, or what was learned."""
        learned = self.learned_log_temperature()
        return self.temperature if learned is None else learned.exp()

    def learned_log_temperature(self) -> Tensor | None:
        """The logarithm of a learned temperature, a parameter; None where the temperature is a setting."""
        return self._parameters["log_temperature"]

    def refuse_learning(self, weights: KernelWeights | None) -> NoKernel | None:
        """Why the kernels do not learn a temperature under these weights; None where they do, or none is learned."""
        if self.learn_temperature and is_differentiable(weights):
            return NoKernel("the kernels learn a temperature under constant weights only")
        return None

    def logits(self, tile: Tile) -> Tensor:
        """Similarities over the temperature."""
        return tile.similarity / self.current_temperature()

    @property
    def logit_bound(self) -> float | None:
        """A bound of the size of logits; none where the temperature may move, or similarities are no cosines."""
        return None if self.learn_temperature or self.measure != "cosine" else 1 / self.temperature


def _refuse_views(options: dict[str, Any]) -> None:
    """Pairs are named by rows, and views are not rows yet."""
    for name in SELECTING:
        if options.get(name) is not None:
            raise InputError(
                f"{name}= names pairs of rows and does not go with views=True: stack the views to (views · n, d) first"
            )


def validate_pair_weights(weights: Any, embeddings: Tensor, ref: Reference | None) -> None:
    """Refuse a table that is not of the pairs of the call; what is no table is refused by `FixedWeights`."""
    wanted = (len(embeddings), len(embeddings) if ref is None else len(ref[0]))
    if isinstance(weights, Tensor) and weights.ndim == 2:
        came = tuple(weights.shape)
        require(came == wanted, f"weights must hold one weight per pair, {wanted}, got {came}")


def difficulty_of(loss: Any) -> Difficulty | None:
    """The difficulty of a loss, None where it has none."""
    return getattr(loss, "difficulty", None)


def any_pair(tile: Tile) -> Mask:
    """Every pair of a tile, positive or negative: all but a row with itself."""
    if tile.positive is False or tile.negative is False:
        return tile.negative if tile.positive is False else tile.positive
    return tile.positive | tile.negative


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """Log(eᵃ + eᵇ); -inf, with zero derivatives, where both are: those of torch's own are NaN beside an infinity."""
    largest = torch.maximum(a, b).detach()
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0)
    total = (a - largest).exp() + (b - largest).exp()
    return torch.where(empty, -torch.inf, total.masked_fill(empty, 1).log() + largest)


def log_share(t: Tensor) -> Tensor:
    """Log t, for exponents; 0 where t is 0 and the pair is masked."""
    return torch.where(t > 0, t, 1).log()


def softplus(x: Tensor) -> Tensor:
    """Log(1 + eˣ), exact in float64 too: torch's own stops counting the 1 at x = 20."""
    return torch.nn.functional.softplus(x, threshold=40)


def zero_if_empty(x: Tensor) -> Tensor:
    """Zero, with zero gradient, where a row had nothing to accumulate (-inf)."""
    return x.masked_fill(x == -torch.inf, 0)


def require(condition: bool, message: str) -> None:
    """Refuse a constructor argument."""
    if not condition:
        raise InputError(message)
