"""A pairwise loss over a batch and the embeddings of the batches before it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mettle.errors import InputError
from mettle.pairs import Queue
from mettle.pairs.memory_queue import check_mask

Miner = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class CrossBatchMemory(nn.Module):
    r"""Cross-batch memory (XBM, Wang et al. 2020): a pairwise loss of a batch against the last ``size`` embeddings.

    Formula, q the last ``size`` embeddings, those of the batch among them, without gradient:
        L = loss of the anchors z against (q, labels of q), no row against itself
        With an ``enqueue_mask``, its rows enter the queue and the others are the anchors (MoCo, He et al. 2020).
    Needs:
        a pairwise loss that takes a reference set (``takes_references``); labels that mean the same in every batch.
    Use when:
        batches are small for the number of classes, in a training loop of your own. Recipes and `mettle.fit` have
        ``batch.queue``, which also leaves refused steps out of the queue.
    Relations:
        `mettle.pairs.Queue.against` compares the batch with itself with gradient on both ends of a pair; here, as in
        the paper, only the anchors get any.
    """

    queue: Queue

    def __init__(self, loss: nn.Module, size: int, dim: int, miner: Miner | None = None):
        """Put loss and queue together.

        Args:
            loss: a pairwise loss.
            size: the most embeddings that are held.
            dim: their length.
            miner: called with anchors, their labels, references and theirs; gives the pairs or triplets to use, see
                ``indices_tuple`` of `PairwiseLoss.output`.
        """
        super().__init__()
        if isinstance(loss, type):
            raise InputError(f"loss must be a loss, and {loss.__name__} is a class: write {loss.__name__}(...)")
        if not takes_references(loss):
            raise InputError(f"{type(loss).__name__} cannot compare a batch with a queue: {WANTED}")
        if miner is not None and not callable(miner):
            raise InputError(f"miner must be callable, got {type(miner).__name__}")
        self.loss, self.miner, self.queue = loss, miner, Queue(size, dim)

    @property
    def takes_progress(self) -> bool:
        """Whether the loss inside follows a curriculum."""
        return getattr(self.loss, "takes_progress", False)

    def forward(
        self, embeddings: Tensor, labels: Tensor, *, enqueue_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The loss of this batch, a scalar with gradient; in training mode the batch is queued then.

        Args:
            embeddings: (n, d).
            labels: (n,) whole numbers.
            enqueue_mask: (n,) booleans: rows that enter the queue, by another encoder say; the others are anchors.
                Without it all rows are both. A mask on the CPU makes no GPU wait.
            options: those of the loss, see `PairwiseLoss.output`.
        """
        anchors, y, keys, key_labels = embeddings, labels, embeddings.detach(), labels
        if enqueue_mask is not None:
            mask = check_mask(enqueue_mask, embeddings)
            asking, entering = ((~mask).nonzero()[:, 0], mask.nonzero()[:, 0])
            if not len(asking) or not len(entering):
                raise InputError(
                    f"enqueue_mask must mark some rows, which enter the queue, and leave others, the anchors: got "
                    f"{len(entering)} of {len(mask)} marked"
                )
            asking, entering = asking.to(embeddings.device), entering.to(embeddings.device)
            anchors, y, keys, key_labels = embeddings[asking], labels[asking], keys[entering], labels[entering]
        # The queue as it is about to be: its oldest entries make room for the batch.
        last = max(self.queue.size - len(keys), 0)
        found: dict[str, Any]
        if enqueue_mask is None:
            found = self.queue.against(anchors, y, keys=keys, last=last)
        else:
            found = {"ref": self.queue.append_held(keys, key_labels, last)}
        if self.miner is not None:
            ref = found["ref"][:2]
            mined = self.miner(anchors, y, *ref)
            found = {"ref": ref, "indices_tuple": mined if enqueue_mask is not None else leave_out_own(mined)}
        value = self.loss(anchors, y, **found, **options)
        if self.training:
            self.queue.push(keys, key_labels)
        return value


WANTED = "a pairwise loss with a form against a reference set is wanted, such as SupCon, InfoNCE or Contrastive"


def takes_references(loss: Any) -> bool:
    """Whether a loss can compare a batch with a reference set: it declares so."""
    return bool(getattr(loss, "takes_references", False))


def leave_out_own(mined: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Mined pairs or triplets without those of a row and itself, where references begin with the batch."""
    keep = mined[0] != mined[1]
    own = 3 if len(mined) == 3 else 2  # of (anchors, positives, anchors, negatives) the first two belong together
    return tuple(index[keep] for index in mined[:own]) + tuple(mined[own:])
