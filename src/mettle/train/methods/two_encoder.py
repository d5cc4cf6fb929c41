"""Contrastive learning from two views, with a second encoder that is biased on purpose."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mettle.data.dataset import Samples
from mettle.data.loader import Batch
from mettle.errors import DataError, InputError
from mettle.losses import SelfTriplet
from mettle.model import Embedder
from mettle.pairs import pair_weights
from mettle.rng import hash_bits
from mettle.train.methods.base import LossTerms, Method, progress_option, uses_second_encoder
from mettle.train.methods.past_embeddings import QueuedBatch, QueueSettings
from mettle.train.optim import OptimSettings

WEIGHTS = ("pairs", "mean", "shuffled")
FEW_GROUPS = 6  # up to so many, the weights of every pair of groups are logged


class TwoEncoderTerms(NamedTuple):
    """Both losses of one batch and the embeddings that they are of."""

    loss: Tensor
    biased_loss: Tensor | None
    embeddings: Tensor
    biased: Tensor | None
    options: dict[str, Any]  # that the loss was called with: a control has weights of its own
    queued: QueuedBatch | None = None  # what enters the queue of past embeddings, where there is one


class TwoEncoder(Method):
    r"""Debiased contrastive learning by relative difficulty (WCL, Jang and Wang 2023), and what it is compared with.

    Formula, both encoders on the same two views, sample ids as labels:
        L(E_d) = InfoNCE(prior, difficulty=Relative()) with weights from both encoders, detached
        L(E_b) = SelfTriplet(prior): the bias-amplified encoder
        each with its own optimizer; neither loss has any gradient on the other network.
    Without a `Relative` in its difficulty the loss needs no second encoder and none is trained: SimCLR, DCL and HCL
    are this method with another loss.
    Controls:
        ``weights="mean"``      every negative weighs the batch's mean weight
        ``weights="shuffled"``  the weights of an anchor's negatives, dealt out at random
    With a ``queue``, the views of earlier batches are negatives too; views of the same sample, embedded in an earlier
    epoch, are positives. With its momentum encoder every view is compared with the moving average's embeddings of all
    other views, in both directions (MoCo, He et al. 2020, with the symmetric loss of Chen et al. 2021).
    """

    def __init__(
        self,
        model: Embedder,
        loss: Any,
        biased: Embedder | None = None,
        biased_loss: Any = None,
        *,
        weights: Literal["pairs", "mean", "shuffled"] = "pairs",
        lr_scale: float = 1.0,
        attribute: "SpuriousAttribute | None" = None,
        seed: int = 0,
        queue: QueueSettings | None = None,
        **options: Any,
    ):
        """Put both networks together.

        Args:
            model: the encoder that becomes the artifact.
            loss: over the pairs of a batch.
            biased: the second encoder, where the difficulty of the loss compares with one.
            biased_loss: that it is trained by; by default `SelfTriplet` with the prior of ``loss``, as published.
            weights: ``pairs``, or one of the controls.
            lr_scale: times the learning rate, for the second encoder.
            attribute: by whose groups the log tells the weights.
            seed: of the control that shuffles weights.
            queue: of past embeddings, for a loss that takes a reference set and needs no second encoder.
            options: those of `OptimSettings`.
        """
        if weights not in WEIGHTS:
            raise InputError(f"weights must be one of {WEIGHTS}, got {weights!r}")
        if uses_second_encoder(loss) != (biased is not None):
            raise InputError(
                "a loss with a Relative difficulty needs a second encoder, biased=..."
                if biased is None
                else "the loss compares no encoders: leave biased= out, or give it difficulty=Relative()"
            )
        if weights != "pairs" and biased is None:
            raise InputError(f"weights={weights!r} is a control of Relative, which the loss does not have")
        self.biased = biased
        self.biased_loss = default_biased_loss(loss) if biased_loss is None else biased_loss
        self.weights, self.lr_scale, self.attribute, self.seed = weights, lr_scale, attribute, seed
        networks = {"model": model} | ({} if biased is None else {"biased": biased})
        losses = {"model": loss, "biased": self.biased_loss}
        super().__init__(networks, losses, OptimSettings(**options), queue=queue)

    def learning_rates(self, lr: float) -> dict[str, float]:
        """That of the second encoder is a multiple of the first one's."""
        return {"model": lr, "biased": lr * self.lr_scale}

    def compute_losses(self, batch: Batch, fraction_done: float) -> LossTerms:
        """Both losses of a batch, by the network that each trains."""
        found = self.terms(batch, fraction_done)
        losses = {"model": found.loss} | ({} if found.biased_loss is None else {"biased": found.biased_loss})
        statistics = partial(self._statistics, found, batch)
        return LossTerms(losses, found.embeddings.detach(), statistics, queued=found.queued)

    def terms(self, batch: Batch, fraction_done: float = 1.0) -> TwoEncoderTerms:
        """Both losses of a batch of two views, each with gradient on its own network only."""
        check_views(batch)
        with self.autocast():
            z = self.run_network(self.model, batch)
            b = None if self.biased is None else self.run_network(self.biased, batch)
            keys = self.embed_keys(batch)
        queued = None if self.past is None else self.past.compare(keys, z, batch.ids, fraction_done)
        options: dict[str, Any] = progress_option(self.loss, fraction_done)
        if queued is not None:  # there is no second encoder then
            loss = self.loss(z, batch.ids, **options, **queued.options)
            return TwoEncoderTerms(loss, None, z, None, options | queued.constant_options(), queued)
        if b is None:
            loss = self.call_loss(self.loss, z, batch.ids, batch, **options)
            return TwoEncoderTerms(loss, None, z, None, options)
        options["biased"] = b.detach()
        if self.weights != "pairs":
            options["weights"] = self.control_weights(z.detach(), batch, b.detach())
        loss = self.call_loss(self.loss, z, batch.ids, batch, **options)
        biased_loss = self.call_loss(self.biased_loss, b, batch.ids, batch)
        return TwoEncoderTerms(loss, biased_loss, z, b.detach(), options)

    def control_weights(self, z: Tensor, batch: Batch, other: Tensor) -> Tensor:
        """The weights that a control asks for in place of those of the difficulty."""
        w = pair_weights(self.loss, z, batch.ids, difficulty=self.loss.difficulty, biased=other)
        negative = batch.ids[:, None] != batch.ids[None, :]
        if self.weights == "mean":
            return torch.where(negative, w[negative].mean(), w)
        return w.masked_scatter(negative, shuffle_weights(w, negative, self.seed, batch.step))

    def _statistics(self, found: TwoEncoderTerms, batch: Batch, norms: Mapping[str, float]) -> dict[str, Any]:
        """What difficulty did."""
        z, b = found.embeddings.detach(), found.biased
        stats: dict[str, Any] = {}
        if hasattr(self.loss, "statistics"):
            stats |= self.loss.statistics(z, batch.ids, **found.options).as_dict()
        if self.past is not None and found.queued is not None:
            stats |= self.past.statistics(found.queued)
        if b is None or found.biased_loss is None:
            return stats
        negative = batch.ids[:, None] != batch.ids[None, :]
        w = found.options.get("weights")
        if w is None:
            w = pair_weights(self.loss, z, batch.ids, difficulty=self.loss.difficulty, biased=b)
        stats |= {"biased_loss": found.biased_loss.item(), "biased_gradient": norms["biased"]}
        stats |= {"weight_mean": w[negative].mean().item(), "weight_std": w[negative].std().item()}
        if self.attribute is not None:
            stats |= self.attribute.weight_statistics(w, negative, batch)
        return stats


def default_biased_loss(loss: Any) -> SelfTriplet:
    """What trains the second encoder where nothing is said: the triplets, debiased by the same prior as the loss."""
    return SelfTriplet(prior=getattr(loss, "prior", 0.0))


@dataclass(frozen=True, eq=False)
class SpuriousAttribute:
    """A spurious attribute of the training samples, found by sample id."""

    name: str
    ids: np.ndarray  # sorted
    codes: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def from_column(cls, samples: Samples, name: str) -> "SpuriousAttribute":
        """A column of these samples.

        Raises:
            DataError: no such column, or one group only.
        """
        column, order = samples.column(name), np.argsort(samples.ids)
        there = np.unique(column.codes)
        if len(there) < 2:
            only = column.names[there[0]] if len(there) else "nothing"
            raise DataError(f"column {name!r} has one group only in training ({only}): there is nothing to compare")
        return cls(name, samples.ids[order], column.codes[order], column.names)

    @classmethod
    def from_domain(cls, samples: Samples) -> "SpuriousAttribute | None":
        """The domain, where the samples have two or more."""
        some = samples.domain is not None and len(np.unique(samples.domain.codes)) > 1
        return cls.from_column(samples, "domain") if some else None

    def weight_statistics(self, w: Tensor, negative: Tensor, batch: Batch) -> dict[str, Any]:
        """Mean weight of negatives by the groups of both ends; of other classes only, where groups agree or not."""
        at = np.searchsorted(self.ids, batch.ids.cpu().numpy())
        code = torch.from_numpy(self.codes[at]).to(w.device)
        same, other = code[:, None] == code[None, :], batch.labels[:, None] != batch.labels[None, :]
        found: dict[str, Any] = {
            "weight_same_group": _mean(w, negative & same & other),
            "weight_other_group": _mean(w, negative & ~same & other),
        }
        groups = code.unique().tolist()
        if len(groups) <= FEW_GROUPS:
            found["weight_by_group"] = {
                f"{self.names[a]} / {self.names[b]}": _mean(w, negative & (code == a)[:, None] & (code == b)[None, :])
                for a in groups
                for b in groups
            }
        return {name: value for name, value in found.items() if value is not None}


def _mean(w: Tensor, mask: Tensor) -> float | None:
    return w[mask].mean().item() if bool(mask.any()) else None


def check_views(batch: Batch) -> None:
    """Two views of the same samples, all of the first before all of the second."""
    n = len(batch.ids) // 2
    may_ask = not batch.ids.is_cuda or batch.epoch_step == 0  # a GPU would stand still for the question
    is_view = len(batch.ids) == 2 * n and (batch.rank_rows is not None or len(batch.inputs) == 2 * n)
    if not is_view or (may_ask and not torch.equal(batch.ids[:n], batch.ids[n:])):
        raise InputError(
            f"two views of the same samples are needed, view by view: got {len(batch.inputs)} inputs for "
            f"{len(batch.ids)} ids. Use a Loader with views=2 (batch.views = 2)"
        )


def shuffle_weights(w: Tensor, negative: Tensor, seed: int, step: int) -> Tensor:
    """The negatives' weights, each anchor's in another order: a pure function of (seed, step)."""
    n = len(w)
    rows = w[negative].view(n, -1)  # every anchor of a batch of views has as many negatives
    random = torch.Generator().manual_seed(int(hash_bits(seed, step, 17)[0] >> np.uint64(1)))
    order = torch.rand(rows.shape, generator=random).argsort(1).to(w.device)
    return rows.gather(1, order)
