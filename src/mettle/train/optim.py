"""Several networks, an optimiser each: every loss moves its own network only, and all of them move or none does."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError, nearest


class Optimisers:
    """One AdamW per network. Gradients are taken of each loss with respect to its own parameters and nothing else.

    So a loss may pass through another network without training it, and no graph needs to be cut for that.
    """

    def __init__(
        self,
        parameters: Mapping[str, list[nn.Parameter]],
        *,
        device: str,
        weight_decay: Mapping[str, float] | float = 0.0,
        clip: float = 0.0,
        precision: str = "float32",
    ):
        self.parameters, self.clip, self.device = dict(parameters), clip, device
        self.all: dict[str, torch.optim.AdamW] = {}
        for name, own in parameters.items():
            decay = weight_decay if isinstance(weight_decay, int | float) else weight_decay.get(name, 0.0)
            self.all[name] = torch.optim.AdamW(decayed(own, decay), lr=1e-3)
        self.dtype = half(precision)
        self.scaler = torch.amp.GradScaler(device, enabled=self.dtype is torch.float16)
        # A loss scale that starts too high is lowered by refusing steps: that is no divergence yet.
        self.patience = 20 if self.scaler.is_enabled() else 3

    def autocast(self) -> torch.autocast:
        """For the forward passes of the networks; losses are computed outside."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None)

    def step(self, losses: Mapping[str, Tensor], rates: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """Gradients, then a step of all, unless a loss or a gradient is not finite.

        Returns:
            the norm of each network's gradient, and whether the step was made.
        """
        self.gradients(losses)
        norms = {}
        for name, optimiser in self.all.items():
            for group in optimiser.param_groups:
                group["lr"] = rates[name]
            self.scaler.unscale_(optimiser)
            norms[name] = nn.utils.clip_grad_norm_(self.parameters[name], self.clip or torch.inf)
        seen = torch.stack([x.detach().float() for x in (*norms.values(), *losses.values())])
        applied = bool(torch.isfinite(seen).all())
        if applied:
            for optimiser in self.all.values():
                self.scaler.step(optimiser)
        if self.scaler.is_enabled():
            self.scaler.update()
        return {name: value for name, value in zip(norms, seen.tolist(), strict=False)}, applied

    def gradients(self, losses: Mapping[str, Tensor]) -> None:
        """Put the gradient of each loss into its own parameters; those that it does not reach have none."""
        for k, (name, loss) in enumerate(losses.items()):
            own = self.parameters[name]
            keep = k < len(losses) - 1  # losses may share a graph
            found = torch.autograd.grad(self.scaler.scale(loss), own, retain_graph=keep, allow_unused=True)
            for p, g in zip(own, found, strict=True):
                p.grad = g

    def state(self) -> dict[str, Any]:
        """All optimisers and the loss scale."""
        return {"optimisers": {k: o.state_dict() for k, o in self.all.items()}, "scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, optimiser in self.all.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self.scaler.load_state_dict(state["scaler"])


def half(precision: str) -> torch.dtype | None:
    """The type that forward passes are cast to; None for float32, which they are in anyway."""
    known = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if precision not in known:
        raise InputError(f"no precision {precision!r}{nearest(str(precision), known)}")
    return known[precision]


def decayed(parameters: list[nn.Parameter], weight_decay: float, **more: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels, none for biases and norms."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay, **more},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, **more},
    ]
    return [group for group in groups if group["params"]]
