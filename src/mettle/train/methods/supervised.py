"""Supervised metric learning: one embedder, one loss on its embeddings and labels."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mettle.data.dataset import Samples
from mettle.data.loader import Batch
from mettle.errors import InputError
from mettle.model import Embedder, embed
from mettle.train.methods.base import (
    LEAVE_SPARSE,
    NO_NECK,
    LossTerms,
    Method,
    check_classes,
    class_indices,
    progress_option,
    takes_after,
    trainable_parts,
    wants_sparse_grad,
)
from mettle.train.methods.distillation import (
    NO_TEACHER,
    DistillationSettings,
    embed_with_teacher,
    similarity_distillation,
)
from mettle.train.methods.past_embeddings import QueueSettings
from mettle.train.optim import OptimSettings
from mettle.train.ranks.class_rows import is_spread

START_SAMPLES = 16  # of a class at most, for the mean that its vector starts at


class Supervised(Method):
    """One embedder, one loss on its embeddings and labels, one optimizer.

    The loss may be any callable ``loss(embeddings, labels)``; a loss or a difficulty with state of its own (an
    ``nn.Module``) is trained, saved and resumed with the model. A loss with one vector per class numbers its classes
    from 0: ``classes`` are the labels that occur in training, in order. With a ``queue``, a pairwise loss compares each
    batch with past embeddings too. With ``distill`` the network also learns the similarities of its moving average, see
    `mettle.train.methods.distillation`, from when there is one. ``options`` are those of `OptimSettings`.

    The embeddings of a loss are those before the neck of a model that has one; a loss that says ``takes_after``, as
    `mettle.losses.WeightedSum` does when one of its parts is in that space, is called with those after it too.
    """

    def __init__(
        self,
        model: Embedder,
        loss: Any,
        *,
        classes: Tensor | None = None,
        queue: QueueSettings | None = None,
        distill: DistillationSettings | None = None,
        **options: Any,
    ):
        if distill is not None and not options.get("ema"):
            raise InputError(f"distill= needs ema=: {NO_TEACHER}")
        self.distill = distill
        if wants_sparse_grad(loss):
            raise InputError(f"the optimizer, which moves these parameters, takes no sparse gradients: {LEAVE_SPARSE}")
        check_spaces(model, loss)
        if classes is not None:
            check_classes(classes)
        self.classes = classes
        super().__init__({"model": model}, {"model": loss}, OptimSettings(**options), queue=queue)

    def compute_losses(self, batch: Batch, fraction_done: float) -> LossTerms:
        """The loss of a batch."""
        neck, queued = getattr(self.model, "neck", None), None
        with self.autocast():
            forward = self.model if neck is None else self.model.before_neck
            embeddings = self.run_network(self.model, batch, forward)
            if self.past is not None:
                queued = self.past.compare(
                    self.embed_keys(batch), embeddings, self.class_indices(batch.labels), fraction_done
                )
        after = None if neck is None else neck(embeddings)  # also where no loss asks: its statistics are of training
        progress: dict[str, Any] = progress_option(self.loss, fraction_done)
        space = {"after": after} if takes_after(self.loss) else {}
        loss = self.compute_loss(embeddings, batch, progress | space | ({} if queued is None else queued.options))
        distance = self.distance_to_teacher(embeddings, batch)
        if distance is not None and self.distill is not None:
            loss = loss + self.distill.weight * distance
        told = {} if distance is None else {"distillation": distance.detach()}
        z = embeddings.detach()
        used = z if after is None or self.model.embedding == "before" else after.detach()

        def statistics(norms: Mapping[str, float]) -> dict[str, Any]:
            options = progress | ({"neck": self.model.neck.normalize_batch} if takes_after(self.loss) else {})
            distilled = {name: float(value) for name, value in told.items()}
            if self.past is None or queued is None:
                return self.statistics(z, batch, options) | distilled
            own = self.statistics(z, batch, options | queued.constant_options())
            return own | self.past.statistics(queued) | distilled

        return LossTerms({"model": loss}, used, statistics, queued=queued)

    @property
    def statistics_stay_valid(self) -> bool:
        """Where neither the loss nor a neck nor a queue has a state that the next step changes."""
        return self.past is None and not takes_after(self.loss) and not trainable_parts({"": self.loss})

    def distance_to_teacher(self, embeddings: Tensor, batch: Batch) -> Tensor | None:
        """How far the similarities of a batch are from those of the moving average; None where nothing is distilled."""
        if self.distill is None or self.average is None or not self.average.has_begun:
            return None
        with self.autocast():
            network = self.average.averages["model"].module
            teacher = self.gather_rows(partial(embed_with_teacher, network, cached=self.settings.cached), batch)
        return similarity_distillation(embeddings, teacher, self.distill.temperature)

    def compute_loss(self, embeddings: Tensor, batch: Batch, options: Mapping[str, Any]) -> Tensor:
        """The loss of these embeddings under these options of its call, a scalar with gradient."""
        return self.call_loss(self.loss, embeddings, self.class_indices(batch.labels), batch, **options)

    def class_indices(self, labels: Tensor) -> Tensor:
        """Labels as the loss counts them."""
        return labels if self.classes is None else class_indices(labels, self.classes)

    def statistics(self, embeddings: Tensor, batch: Batch, options: Mapping[str, Any]) -> dict[str, Any]:
        """What difficulty did, where the loss can say it."""
        if not hasattr(self.loss, "statistics") or is_spread(self.loss):  # no rank has all class vectors
            return {}
        found = self.loss.statistics(embeddings, self.class_indices(batch.labels), **options)
        return found.as_dict() if hasattr(found, "as_dict") else dict(found)


def check_spaces(model: Any, loss: Any) -> None:
    """Refuse a loss in the space after a neck that is not there, and a neck that nothing uses."""
    neck = getattr(model, "neck", None)
    if neck is None and takes_after(loss):
        raise InputError(NO_NECK)
    if neck is not None and model.embedding == "before" and not takes_after(loss):
        raise InputError(
            "nothing uses the neck of the model: put a part of a WeightedSum after it (spaces=), set model.embedding = "
            "'after', or leave model.neck out"
        )


def start_class_vectors(method: Method, samples: Samples) -> None:
    """Start the class vectors of a loss, if it has any, at the class means of the network as it is.

    Vectors at random tell the network nothing until each has been met a few times; with many classes it first learns
    to put all samples in one place. The means are centered, see `ClassVectors.start_from`, and of at most
    `START_SAMPLES` samples of a class.
    """
    if not isinstance(method, Supervised) or method.classes is None or not hasattr(method.loss, "start_from"):
        return
    some = samples.take(spread_over_classes(samples.labels, START_SAMPLES))
    z = torch.from_numpy(embed(method.model, some, before_neck=True)).to(method.classes.device)
    if not bool(torch.isfinite(z).all()):
        return  # the first step says what is broken
    labels = torch.from_numpy(some.labels).to(method.classes.device)
    options: dict[str, Any] = {}
    if takes_after(method.loss):
        with torch.no_grad():
            options["after"] = method.model.neck.normalize_batch(z)  # an untrained neck knows no mean yet
    method.loss.start_from(z, method.class_indices(labels), centered=True, **options)


def spread_over_classes(labels: np.ndarray, most: int) -> np.ndarray:
    """Positions of at most ``most`` samples of every class, evenly spaced over the class, in order."""
    order = np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    count = np.repeat(counts, counts)
    place = np.arange(len(labels)) - np.repeat(first, counts)
    slot = place * most // count
    chosen = (count <= most) | (place == 0) | (slot != (place - 1) * most // count)
    return np.sort(order[chosen])
