"""Contrastive learning from two views, with a second encoder that is biased on purpose."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mettle.data.draws import hashed
from mettle.data.loader import Batch
from mettle.data.samples import Samples
from mettle.durable import write_bytes
from mettle.errors import DataError, InputError, RunError
from mettle.losses import SelfTriplet
from mettle.model import Embedder, EmbedderSpec
from mettle.pairs import pair_weights
from mettle.train.methods.base import StepResult, compares, progress_option, stateful
from mettle.train.optim import Optimisers
from mettle.train.run_folder import Run

WEIGHTS = ("pairs", "mean", "shuffled")
FEW = 6  # groups: up to so many, the weights of every pair of groups are logged


class Terms(NamedTuple):
    """Both losses of one batch and the embeddings that they are of."""

    loss: Tensor
    biased_loss: Tensor | None
    embeddings: Tensor
    biased: Tensor | None
    options: dict[str, Any]  # that the loss was called with: a control has weights of its own


class TwoEncoder:
    r"""Debiased contrastive learning by relative difficulty (WCL, Jang and Wang 2023), and what it is compared with.

    Formula, both encoders on the same two views, sample ids as labels:
        L(E_d) = InfoNCE(prior, difficulty=Relative()) with weights from both encoders, detached
        L(E_b) = SelfTriplet(prior): the bias-amplified encoder
        each with its own optimiser; neither loss has any gradient on the other network.
    Without a `Relative` in its difficulty the loss needs no second encoder and none is trained: SimCLR, DCL and HCL
    are this method with another loss.
    Controls:
        ``weights="mean"``      every negative weighs the batch's mean weight
        ``weights="shuffled"``  the weights of an anchor's negatives, dealt out at random
    """

    def __init__(
        self,
        model: Embedder,
        loss: Any,
        biased: Embedder | None = None,
        biased_loss: Any = None,
        *,
        weights: Literal["pairs", "mean", "shuffled"] = "pairs",
        pace: float = 1.0,
        attribute: "Attribute | None" = None,
        seed: int = 0,
        weight_decay: float = 0.01,
        clip: float = 0.0,
        precision: str = "float32",
    ):
        if weights not in WEIGHTS:
            raise InputError(f"weights must be one of {WEIGHTS}, got {weights!r}")
        if compares(loss) != (biased is not None):
            raise InputError(
                "a loss with a Relative difficulty needs a second encoder, biased=..."
                if biased is None
                else "the loss compares no encoders: leave biased= out, or give it difficulty=Relative()"
            )
        if weights != "pairs" and biased is None:
            raise InputError(f"weights={weights!r} is a control of Relative, which the loss does not have")
        self.model, self.loss, self.biased = model, loss, biased
        self.biased_loss = SelfTriplet() if biased_loss is None else biased_loss
        self.weights, self.pace, self.attribute, self.seed = weights, pace, attribute, seed
        networks = {"model": model} | ({} if biased is None else {"biased": biased})
        self.modules: dict[str, nn.Module] = {**networks, **stateful({"": loss, "biased ": self.biased_loss})}
        self.optimisers = Optimisers(
            {name: list(part.parameters()) for name, part in networks.items()},
            device=next(model.parameters()).device.type,
            weight_decay=weight_decay,
            clip=clip,
            precision=precision,
        )
        self.patience = self.optimisers.patience

    def step(self, batch: Batch, rate: float, progress: float) -> StepResult:
        """One step of both optimisers, unless something is not finite."""
        for module in self.modules.values():
            module.train()
        found = self.terms(batch, progress)
        losses = {"model": found.loss} | ({} if found.biased_loss is None else {"biased": found.biased_loss})
        norms, applied = self.optimisers.step(losses, {"model": rate, "biased": rate * self.pace})
        value, norm = found.loss.item(), norms["model"]
        if not applied and math.isfinite(value) and math.isfinite(norm) and found.biased_loss is not None:
            value, norm = found.biased_loss.item(), norms["biased"]  # the network that diverged is the other one
        return StepResult(value, norm, applied, found.embeddings.detach(), self._told(found, batch, norms))

    def terms(self, batch: Batch, progress: float = 1.0) -> Terms:
        """Both losses of a batch of two views, each with gradient on its own network only."""
        check_views(batch)
        with self.optimisers.autocast():
            z = self.model(batch.inputs)
            b = None if self.biased is None else self.biased(batch.inputs)
        options: dict[str, Any] = progress_option(self.loss, progress)
        if b is None:
            return Terms(self.loss(z, batch.ids, **options), None, z, None, options)
        options["biased"] = b.detach()
        if self.weights != "pairs":
            options["weights"] = self.control_weights(z.detach(), batch, b.detach())
        loss = self.loss(z, batch.ids, **options)
        return Terms(loss, self.biased_loss(b, batch.ids), z, b.detach(), options)

    def control_weights(self, z: Tensor, batch: Batch, other: Tensor) -> Tensor:
        """The weights that a control asks for in place of those of the difficulty."""
        w = pair_weights(self.loss, z, batch.ids, difficulty=self.loss.difficulty, biased=other)
        negative = batch.ids[:, None] != batch.ids[None, :]
        if self.weights == "mean":
            return torch.where(negative, w[negative].mean(), w)
        return w.masked_scatter(negative, dealt(w, negative, self.seed, batch.step))

    def _told(self, found: Terms, batch: Batch, norms: dict[str, float]) -> Callable[[], dict[str, Any]]:
        """What difficulty did, worked out only when a line is logged."""

        def told() -> dict[str, Any]:
            z, b = found.embeddings.detach(), found.biased
            facts: dict[str, Any] = {}
            if hasattr(self.loss, "statistics"):
                facts |= self.loss.statistics(z, batch.ids, **found.options).as_dict()
            if b is None or found.biased_loss is None:
                return facts
            negative = batch.ids[:, None] != batch.ids[None, :]
            w = found.options.get("weights")
            if w is None:
                w = pair_weights(self.loss, z, batch.ids, difficulty=self.loss.difficulty, biased=b)
            facts |= {"biased_loss": found.biased_loss.item(), "biased_gradient": norms["biased"]}
            facts |= {"weight_mean": w[negative].mean().item(), "weight_std": w[negative].std().item()}
            if self.attribute is not None:
                facts |= self.attribute.facts(w, negative, batch)
            return facts

        return told

    def facts(self, embeddings: Tensor, batch: Batch, progress: float) -> dict[str, Any]:
        """All facts need both encoders: they come with the step."""
        return {}

    def state(self) -> dict[str, Any]:
        """Both networks, both optimisers, and difficulties that follow the data."""
        return {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            **self.optimisers.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, module in self.modules.items():
            if name in self.optimisers.all or name in state["modules"]:  # earlier versions kept the networks only
                module.load_state_dict(state["modules"][name])
        self.optimisers.load_state(state)


@dataclass(frozen=True, eq=False)
class Attribute:
    """A spurious attribute of the training samples, found by sample id."""

    name: str
    ids: np.ndarray  # sorted
    codes: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(cls, samples: Samples, name: str) -> "Attribute":
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
    def known(cls, samples: Samples) -> "Attribute | None":
        """The domain, where the samples have two or more."""
        some = samples.domain is not None and len(np.unique(samples.domain.codes)) > 1
        return cls.of(samples, "domain") if some else None

    def facts(self, w: Tensor, negative: Tensor, batch: Batch) -> dict[str, Any]:
        """Mean weight of negatives by the groups of both ends; of other classes only, where groups agree or not."""
        at = np.searchsorted(self.ids, batch.ids.cpu().numpy())
        code = torch.from_numpy(self.codes[at]).to(w.device)
        same, other = code[:, None] == code[None, :], batch.labels[:, None] != batch.labels[None, :]
        found: dict[str, Any] = {
            "weight_same_group": _mean(w, negative & same & other),
            "weight_other_group": _mean(w, negative & ~same & other),
        }
        groups = code.unique().tolist()
        if len(groups) <= FEW:
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
    if len(batch.inputs) != len(batch.ids) or len(batch.ids) != 2 * n or not torch.equal(batch.ids[:n], batch.ids[n:]):
        raise InputError(
            f"two views of the same samples are needed, view by view: got {len(batch.inputs)} inputs for "
            f"{len(batch.ids)} ids. Use a Loader with views=2 (batch.views = 2)"
        )


def dealt(w: Tensor, negative: Tensor, seed: int, step: int) -> Tensor:
    """The negatives' weights, each anchor's in another order: a pure function of (seed, step)."""
    n = len(w)
    rows = w[negative].view(n, -1)  # every anchor of a batch of views has as many negatives
    random = torch.Generator().manual_seed(int(hashed(seed, step, 17)[0] >> np.uint64(1)))
    order = torch.rand(rows.shape, generator=random).argsort(1).to(w.device)
    return rows.gather(1, order)


def keep_biased(run: Run, model: Embedder) -> None:
    """Write the second encoder of a finished run, built like the first: ``biased.safetensors``."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    write_bytes(run.folder / "biased.safetensors", save(tensors))


def biased_model(run: Run, device: str = "cpu") -> Embedder:
    """The second encoder of a run, in eval mode."""
    path = run.folder / "biased.safetensors"
    if not path.is_file():
        raise RunError(f"{run.folder} has no biased encoder: only runs with a Relative difficulty train one")
    contract = run.contract()
    model = Embedder(EmbedderSpec(**contract["model"]), tuple(contract["input"]["shape"]), fetch=False)
    model.load_state_dict(load_file(path))
    return model.to(device).eval()
