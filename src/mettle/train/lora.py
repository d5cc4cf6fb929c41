"""LoRA: a backbone stays as it is, and every one of its matrices learns an addition of low rank.

A matrix W becomes W + (α / r) B A with A of r rows and B of r columns; B starts at 0, so training starts from the very
network that was loaded (Hu et al. 2022, "LoRA: Low-rank adaptation of large language models"). The additions are those
of the package peft, an optional extra. After training they are added to the weights, so that a run needs no peft.
"""

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mettle.errors import InputError, MissingExtra, RecipeError
from mettle.model.backbones import import_torchvision
from mettle.train.fine_tuning import find_backbone


@dataclass(frozen=True)
class LoraSettings:
    """What is added.

    Args:
        rank: r, of every addition.
        alpha: α; additions count α / r times.
        dropout: share of the inputs of an addition that are zero in training.
        targets: names of layers, or parts of their names between dots, such as ``"qkv"``; None: every linear layer and
            every convolution that is not depthwise.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            given = f"{self.rank}, {self.alpha}, {self.dropout}"
            raise InputError(f"rank is at least 1, alpha above 0 and dropout in [0, 1): got {given}")


def add_lora(network: nn.Module, settings: LoraSettings) -> tuple[str, ...]:
    """Freeze the backbone of a network and put additions on its layers, in place; returns the names of these layers.

    Raises:
        MissingExtra: peft is not installed.
        RecipeError: the backbone has no such layers.
    """
    peft = import_peft()
    backbone = find_backbone(network)
    if backbone is None:
        raise RecipeError(f"train.lora: {type(network).__name__} has no backbone to add to: leave it out")
    names = find_targets(backbone, settings.targets)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="|".join(map(re.escape, names)),  # whole names: an ending alone may be that of other layers too
        bias="none",
    )
    backbone.requires_grad_(False)
    peft.inject_adapter_in_model(config, backbone)
    return names


def find_targets(backbone: nn.Module, targets: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the layers that an addition is put on."""
    known = [
        name
        for name, part in backbone.named_modules()
        if isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1)
    ]
    chosen = known if targets is None else [n for n in known if n in targets or set(n.split(".")) & set(targets)]
    if not chosen:
        some = f"; it has {', '.join(known[:6])}" if known else ""
        raise RecipeError(f"train.lora: the backbone has no linear layer or convolution named {targets}{some}")
    return tuple(chosen)


def merge_lora(network: nn.Module) -> None:
    """Add what was learned to the weights of the layers, in place, and leave nothing of the additions."""
    parts: list[tuple[str, Any]] = list(network.named_modules())
    for name, part in parts:
        if hasattr(part, "get_base_layer") and hasattr(part, "merge"):
            part.merge()
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, part.get_base_layer())
    backbone = find_backbone(network)
    if backbone is not None:
        backbone.requires_grad_(True)


def describe_lora(network: nn.Module, names: Sequence[str], settings: LoraSettings) -> str:
    """One line: on what it is, and how many parameters train."""
    total = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return (
        f"LoRA of rank {settings.rank} on {len(names)} layers of the backbone, which is frozen otherwise: {trained:,} "
        f"of {total:,} parameters train"
    )


def import_peft() -> Any:
    """Import peft."""
    try:
        if importlib.util.find_spec("torchvision") is not None:
            import_torchvision()  # which peft imports too, and fails where it was built for another torch
        return importlib.import_module("peft")
    except ImportError:
        raise MissingExtra('train.lora needs peft: pip install "mettle-ml[lora]"') from None


def frozen_norms(network: nn.Module) -> list[nn.Module]:
    """The normalizations of a backbone, which keep their statistics while additions train."""
    backbone = find_backbone(network)
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return [] if backbone is None else [part for part in backbone.modules() if isinstance(part, kinds)]
