"""Declared losses of small batches on the CPU: the whole matrix at once, with the gradient written down.

A loss that declares a `SoftmaxSpec` is known by its formula, so its value and gradient take half of the operators that
autograd would record; at 64 to 512 rows these are what a step costs. `reference` computes the same from the loss itself
and remains what this is compared with. With x = s / temperature, w the weights of pairs (constants) and P, N the
positives and negatives of an anchor:

    supcon_out   L = scale · (W·D − Σ_P w·x) / divisor,    D = log Σ_{P∪N} v·eˣ,  W = Σ_P w
                 ∂L/∂x = scale · (W·v·e^{x−D} − w·[P]) / divisor
    infonce      L = Σ_P w·softplus(R − x) / W,            R = log Σ_N v·eˣ
                 ∂L/∂x = −w·σ(R − x) / W on P,             v·e^{x−R} · Σ_P w·σ(R − x) / W on N

v are the weights inside the sum: those of negatives, and of positives where the loss weighs them there too.

A loss that declares a `BatchHardSpec` sees two pairs of each anchor only: these are mined, and the loss does the rest.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mettle.pairs.interface import Difficulty, PairLoss, Tile
from mettle.pairs.kernel_spec import BatchHardSpec, LinearWeights, SoftmaxSpec, declared_spec
from mettle.pairs.similarity import differentiable_gradients, normalize_rows, ordinary_lengths

MAX_ROWS = 512  # beyond this, tiles are faster and smaller
NEARLY_EQUAL = 0.02  # squared distance below which the seventh digit of a cosine matters to which pair is farther


def find_spec(loss: PairLoss, difficulty: Difficulty | None, z: Tensor) -> SoftmaxSpec | BatchHardSpec | None:
    """The spec of a loss that has a closed form here, for a batch of this size; else None."""
    if z.device.type != "cpu" or z.dtype not in (torch.float32, torch.float64) or not 1 < z.shape[0] <= MAX_ROWS:
        return None
    spec = declared_spec(loss, difficulty)
    if isinstance(spec, BatchHardSpec):
        return spec
    if not isinstance(spec, SoftmaxSpec) or spec.on_device:  # numbers that are tensors are for kernels
        return None
    weights = spec.weights
    if weights is not None:
        if not isinstance(weights, LinearWeights) or weights.differentiable:
            return None
        if weights.negative_floor < 0 or weights.positive_floor < 0:
            return None  # such weights may be 0, and pairs of weight 0 are absent
    return spec if spec.row_loss in ("supcon_out", "infonce") and spec.prior == 0 else None


def softmax_loss(
    spec: SoftmaxSpec, z: Tensor, labels: Tensor, reference: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor, bool] | None:
    """(n,) values, their mean, (n,) where they are defined, and whether that is known to be everywhere.

    None where rows cannot simply be divided by their lengths. ``reference`` computes values and mean of the same batch
    with a graph, for second derivatives.
    """
    length = torch.linalg.vector_norm(z.detach(), dim=1, keepdim=True)
    if not ordinary_lengths(length):
        return None
    positives = _find_positives(spec, labels, z.dtype)
    values, mean = _SoftmaxFunction.apply(z, length, positives, spec, reference)  # type: ignore[misc]
    defined = positives.defined if isinstance(positives, Positives) else None
    if defined is None or spec.all_anchors:
        return values, mean, torch.ones_like(labels, dtype=torch.bool), True
    return values, mean, defined, False


def batch_hard_rows(loss: Any, z: Tensor, labels: Tensor) -> dict[str, Tensor] | None:
    """What the rows of a batch-hard loss accumulate, with gradient, as `kernels.mining.batch_hard_rows`.

    None where the whole matrix must be looked at: where pairs tie, because these share the gradient; where points
    nearly coincide, because a cosine does not tell which pair is farther; and where rows cannot simply be divided by
    their lengths.
    """
    length = torch.linalg.vector_norm(z.detach(), dim=1, keepdim=True)
    if not ordinary_lengths(length):
        return None
    n = len(z)
    u = z.detach() / length
    s = torch.mm(u, u.T).fill_diagonal_(torch.inf)  # -inf among the positives, and no negative
    same = labels[:, None] == labels
    scores = torch.stack([torch.where(same, -s, -torch.inf), torch.where(same, -torch.inf, s)])
    best = scores.amax(2)
    reached = scores == best[:, :, None]
    alike = same.sum(1)
    fewest, most = (int(x) for x in torch.aminmax(alike))
    there = None if fewest > 1 and most < n else best > -torch.inf
    if there is not None:
        reached.logical_and_(there[:, :, None])
    index = reached.nonzero()[:, 2]  # of one pair for each anchor and side, unless pairs tie
    if len(index) > (2 * n if there is None else int(there.sum())):
        return None
    if there is not None:
        index = index.new_zeros(2 * n).masked_scatter_(there.flatten(), index)
    others = u.index_select(0, index).view(2, n, -1)
    apart = (others - u).square_().sum(2, dtype=torch.float64)
    if float((apart if there is None else apart[there]).amin()) < NEARLY_EQUAL:
        return None
    mined: Tensor = _MinedFunction.apply(z, u, length, index, others, apart)  # type: ignore[assignment]
    return mined_row_values(loss, mined, (alike - 1, n - alike), there, z.dtype)


def mined_row_values(
    loss: Any, scores: Tensor, counts: Sequence[Tensor] | Tensor, there: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The row values that a `BatchHardSpec` promises, from the mined pairs of each anchor.

    Args:
        loss: whose ``distance`` similarities become.
        scores: (2, n) similarities of the farthest positive and of the closest negative.
        counts: how many positives and how many negatives there are, (n,) each.
        there: (2, n) where there are any; None for everywhere.
        dtype: of the distances.
    """
    none = scores.new_empty(0)
    d = loss.distance(Tile(scores, False, False, none, none)).to(dtype)  # both at once: on few rows calls count
    farthest, closest = d.unbind(0)
    closest = -closest
    if there is not None:
        farthest, closest = torch.where(there[0], farthest, -torch.inf), torch.where(there[1], closest, -torch.inf)
    return {"positives": counts[0], "negatives present": counts[1], "farthest": farthest, "closest": closest}


class _MinedFunction(torch.autograd.Function):
    """Cosines of each row with some rows of the same batch, (2, n) in float64, which keeps the digits of 1 − s."""

    @staticmethod
    def forward(ctx, z: Tensor, u: Tensor, length: Tensor, index: Tensor, others: Tensor, apart: Tensor):  # type: ignore[override]
        ctx.save_for_backward(z, u, length, index, others)
        return torch.rsub(apart, 1, alpha=0.5)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        z, u, length, index, others = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: what is written down here has no graph
            rows = normalize_rows(z)
            scores = (rows * rows[index].view_as(others)).sum(2, dtype=torch.float64)
            return *differentiable_gradients((scores,), (g,), (z,)), None, None, None, None, None
        g = g.to(u.dtype)[:, :, None]
        du = (g * others).sum(0).index_add_(0, index, (g * u).flatten(0, 1))
        along = (du * u).sum(1, keepdim=True)
        return du.addcmul_(u, along, value=-1).div_(length), None, None, None, None, None


class Positives(NamedTuple):
    """The positive pairs of a batch."""

    same: Tensor  # (n, n) which pairs
    counts: Tensor  # (n,) how many an anchor has
    defined: Tensor | None  # (n,) which anchors have any; None for all of them


def _find_positives(spec: SoftmaxSpec, labels: Tensor, dtype: torch.dtype) -> Positives | Tensor:
    """The positives of a batch; (n,) the one of each anchor, where there is a formula for that."""
    if spec.weights is None and spec.scale == 1:
        partner = find_partners(labels)
        if partner is not None:
            return partner
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    count = same.sum(1, dtype=dtype)  # divides numbers of this type
    return Positives(same, count, None if count.amin().item() > 0 else count > 0)


def find_partners(labels: Tensor) -> Tensor | None:
    """(n,) the other sample of the same label, where every label stands exactly twice, as in two views; else None."""
    found = labels.tolist()  # a few hundred integers: dictionaries beat a dozen operators
    n = len(found)
    last = dict(zip(found, range(n), strict=True))
    if 2 * len(last) != n:
        return None
    first = dict(zip(reversed(found), range(n - 1, -1, -1), strict=True))
    partner = [first[label] + last[label] - i for i, label in enumerate(found)]
    return None if any(map(operator.eq, partner, range(n))) else torch.tensor(partner)


class _SoftmaxFunction(torch.autograd.Function):
    """Values and mean as functions of the embeddings."""

    @staticmethod
    def forward(ctx, z: Tensor, length: Tensor, positives: Positives | Tensor, spec: SoftmaxSpec, reference):  # type: ignore[override]
        u = z / length
        if isinstance(positives, Tensor):
            formula, defined = SinglePositive, None
            values, *saved = SinglePositive.evaluate(spec, u, positives)
        else:
            formula, defined = SupConOut if spec.row_loss == "supcon_out" else OnePositiveAtATime, positives.defined
            values, *saved = formula.evaluate(spec, u, positives)
        if defined is not None and spec.all_anchors:
            values = values.masked_fill(~defined, 0)
        mean = values.mean() if defined is None or spec.all_anchors else values[defined].mean()
        ctx.save_for_backward(u, length, defined, z, *saved)  # z so that torch notices a change in place
        ctx.spec, ctx.formula, ctx.reference = spec, formula, reference
        ctx.set_materialize_grads(False)
        return values, mean

    @staticmethod
    def backward(ctx, g_values: Tensor | None, g_mean: Tensor | None):  # type: ignore[override]
        u, length, defined, z, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: what is written down here has no graph
            found = differentiable_gradients(ctx.reference(z), (g_values, g_mean), (z,))
            return *found, None, None, None, None
        if g_values is None and g_mean is None:
            return None, None, None, None, None
        factor = 1 / ctx.spec.temperature
        g: Tensor | float = 0.0 if g_values is None else g_values * factor
        if g_mean is not None:
            anchors = len(u) if defined is None or ctx.spec.all_anchors else int(defined.sum())
            g = g + g_mean.item() * factor / anchors
        if defined is not None:
            g = defined.to(u.dtype) * g if g_values is None else torch.where(defined, g, 0)
        du = ctx.formula.gradient(ctx.spec, g, u, *saved)
        along = (du * u).sum(1, keepdim=True)
        return du.addcmul_(u, along, value=-1).div_(length), None, None, None, None


def as_column(g: Tensor | float) -> Tensor | float:
    """A gradient per anchor as a column; one for all anchors as it is."""
    return g[:, None] if isinstance(g, Tensor) else g


def add_transpose(x: Tensor) -> Tensor:
    """The sum x + xᵀ; from 256 rows on, a copy of the transpose is cheaper than reading it across."""
    return x + x.T if len(x) < 256 else x.T.contiguous().add_(x)


class SinglePositive:
    """SupCon and InfoNCE where every anchor has one positive and all pairs count alike: both are a cross-entropy."""

    @staticmethod
    def evaluate(spec: SoftmaxSpec, u: Tensor, partner: Tensor):
        """Values, and what the gradient needs."""
        n = len(u)
        x = u.new_empty(n, n).addmm_(u, u.T, beta=0, alpha=1 / spec.temperature).fill_diagonal_(-torch.inf)
        log_p = torch.log_softmax(x, 1)
        return torch.nn.functional.nll_loss(log_p, partner, reduction="none"), log_p, partner

    @staticmethod
    def gradient(spec: SoftmaxSpec, g: Tensor | float, u: Tensor, log_p: Tensor, partner: Tensor) -> Tensor:
        """∂L/∂u, given the gradient of the values over the temperature."""
        p, others = log_p.exp(), u.index_select(0, partner)
        if not isinstance(g, Tensor):
            return torch.addmm(others, add_transpose(p), u, beta=-2 * g, alpha=g)
        du = torch.mm(add_transpose(p.mul_(g[:, None])), u)
        return du.addcmul_(others, (g + g[partner])[:, None], value=-1)


class SupConOut:
    """The formula ``supcon_out``."""

    @staticmethod
    def evaluate(spec: SoftmaxSpec, u: Tensor, positives: Positives):
        """Values, and what the gradient needs."""
        s, same, count = torch.mm(u, u.T), positives.same, positives.counts
        w_positive, w_negative = _linear_weights(spec, s)
        x = s.mul_(1 / spec.temperature).fill_diagonal_(-torch.inf)
        inside = x
        v_negative = w_negative if spec.weigh_negatives else None
        v_positive = w_positive if spec.positive_weights == "everywhere" else None
        if v_negative is not None or v_positive is not None:
            v = torch.where(same, 1.0 if v_positive is None else v_positive, 1.0 if v_negative is None else v_negative)
            inside = v.log_().add_(x)
        log_denominator = torch.logsumexp(inside, 1)
        attraction = torch.where(same, x, 0.0)
        w: Tensor = same
        if w_positive is not None:
            w = w_positive.mul_(same)
            attraction.mul_(w)
        total = count if w_positive is None else w.sum(1)
        # An anchor without any other sample has nothing in its denominator.
        values = total * log_denominator.clamp_(min=torch.finfo(x.dtype).min) - attraction.sum(1)
        by = {"sum": None, "count": count, "weight": total}[spec.divide_by]
        if by is not None:
            by = by if positives.defined is None else by.clamp(min=1)
            values.div_(by)
        if spec.scale != 1:
            values.mul_(spec.scale)
        return values, inside, log_denominator, total, by, w

    @staticmethod
    def gradient(
        spec: SoftmaxSpec,
        g: Tensor | float,
        u: Tensor,
        inside: Tensor,
        log_denominator: Tensor,
        total: Tensor,
        by: Tensor | None,
        w: Tensor,
    ) -> Tensor:
        """∂L/∂u, given the gradient of the values over the temperature."""
        g = g if spec.scale == 1 else g * spec.scale
        g = g if by is None else g / by
        p = (inside - log_denominator[:, None]).exp_()
        w = w if isinstance(g, Tensor) else w.to(u.dtype)  # a mask times a number would be float32
        gs = p.mul_((total * g)[:, None]).sub_(w * as_column(g))
        return torch.mm(add_transpose(gs), u)


class OnePositiveAtATime:
    """The formula ``infonce``."""

    @staticmethod
    def evaluate(spec: SoftmaxSpec, u: Tensor, positives: Positives):
        """Values, and what the gradient needs."""
        s, same, count = torch.mm(u, u.T), positives.same, positives.counts
        w_positive, w_negative = _linear_weights(spec, s)
        x = s.mul_(1 / spec.temperature)
        negatives = x if w_negative is None else w_negative.log_().add_(x)
        negatives = negatives.masked_fill(same, -torch.inf).fill_diagonal_(-torch.inf)
        # Without negatives there is nothing to be told apart from: the loss is 0.
        log_sum = torch.logsumexp(negatives, 1).clamp_(min=torch.finfo(x.dtype).min)
        i, j = same.nonzero(as_tuple=True)  # positives are few
        gap = log_sum[i] - x[i, j]
        value = torch.nn.functional.softplus(gap, threshold=40)
        w = by = None
        if w_positive is not None:
            w = w_positive[i, j]
            value.mul_(w)
            by = torch.zeros_like(log_sum).index_add_(0, i, w)
        by = count if by is None else by
        by = by if positives.defined is None else by.clamp(min=1)
        values = torch.zeros_like(log_sum).index_add_(0, i, value).div_(by)
        return values, negatives, log_sum, gap, i, j, by, w

    @staticmethod
    def gradient(
        spec: SoftmaxSpec,
        g: Tensor | float,
        u: Tensor,
        negatives: Tensor,
        log_sum: Tensor,
        gap: Tensor,
        i: Tensor,
        j: Tensor,
        by: Tensor,
        w: Tensor | None,
    ) -> Tensor:
        """∂L/∂u, given the gradient of the values over the temperature."""
        attraction = torch.sigmoid(gap).mul_((g / by)[i])
        if w is not None:
            attraction.mul_(w)
        total = torch.zeros_like(log_sum).index_add_(0, i, attraction)
        gs = (negatives - log_sum[:, None]).exp_().mul_(total[:, None])
        return torch.mm(add_transpose(gs.index_put_((i, j), attraction.neg_())), u)


def _linear_weights(spec: SoftmaxSpec, s: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weights of positives and of negatives at every pair, None where all of them are 1."""
    weights = spec.weights
    if not isinstance(weights, LinearWeights):
        return None, None
    positive = negative = None
    if weights.positive_slope > 0:
        positive = (weights.positive_threshold - s).mul_(weights.positive_slope)
        positive.clamp_(min=weights.positive_floor).add_(1)
    if weights.negative_slope > 0:
        negative = (s - weights.negative_threshold).mul_(weights.negative_slope)
        negative.clamp_(min=weights.negative_floor).add_(1)
    return positive, negative
