"""Which parts of a pretrained network train, and how fast: freezing, and learning rates that fall towards the input.

A frozen layer keeps its weights and its running statistics: it is in eval mode while the rest trains. Layer-wise
learning rates are those of BEiT (Bao et al. 2022) as timm has them: the head has the learning rate of the run, the last
layer of the backbone ``layer_decay`` times that, and each layer before it as many times less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mettle.errors import RecipeError, nearest

WHOLE = "all"  # instead of the name of a layer: the backbone as a whole


@dataclass(frozen=True, eq=False)
class FrozenLayers:
    """Layers of one network that do not train, all the time or at first.

    Args:
        modules: those that stay in eval mode.
        parameters: those that are not moved.
        share: of training, from its beginning, for which this is so; None for all of it.
    """

    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]
    share: float | None = None

    def is_frozen(self, fraction_done: float) -> bool:
        """Whether they do not train at this share of training."""
        return self.share is None or fraction_done < self.share

    def update(self, fraction_done: float) -> None:
        """Freeze or release the layers: a function of the share of training that is done, so that runs resume."""
        frozen = self.is_frozen(fraction_done)
        for parameter in self.parameters:
            parameter.requires_grad_(not frozen)
        if frozen:
            for module in self.modules:
                module.training = False


def find_backbone(network: nn.Module) -> nn.Module | None:
    """The part of a network that comes pretrained: the backbone of an embedder, or a module of somebody else."""
    found = getattr(network, "backbone", None) or getattr(network, "module", None)
    return found if isinstance(found, nn.Module) else None


def freeze_layers(network: nn.Module, name: str, share: float | None) -> FrozenLayers:
    """Freeze a backbone up to the layer of this name, which is frozen too, or ``"all"`` of it.

    Layers come in the order in which a module registers them; tensors of its own, such as class tokens, come first.

    Raises:
        RecipeError: there is no such layer, or nothing would be left to train.
    """
    backbone = find_backbone(network)
    if backbone is None:
        raise RecipeError(f"train.freeze: {type(network).__name__} has no backbone to freeze: leave it out")
    if name == WHOLE and getattr(network, "backbone", None) is None:
        known = [child for child, _ in backbone.named_children()]
        raise RecipeError(
            f"train.freeze = 'all': nothing of {type(backbone).__name__} is known to be its head: name the last layer "
            f"that is frozen, such as {' or '.join(map(repr, known[:-1][:3]))}"
        )
    modules = list(backbone.modules()) if name == WHOLE else _modules_up_to(backbone, name)
    own = {p for module in modules for p in module.parameters(recurse=False)}
    parents = [module for key, module in backbone.named_modules() if name.startswith(f"{key}." if key else "")]
    if name != WHOLE:
        own |= {p for module in parents for p in module.parameters(recurse=False)}
    parameters = [p for p in backbone.parameters() if p in own and p.requires_grad]
    frozen = FrozenLayers(modules, parameters, share)
    if share is None:
        frozen.update(0.0)
        if not any(p.requires_grad for p in network.parameters()):
            raise RecipeError(f"train.freeze = {name!r} leaves nothing to train: give the model a head, or freeze less")
    return frozen


def _modules_up_to(backbone: nn.Module, name: str) -> list[nn.Module]:
    """The layers before and including one, without those that it is part of."""
    modules = dict(backbone.named_modules())
    if not name or name not in modules:
        known = [key for key in modules if key and key.count(".") <= 1]
        raise RecipeError(f"train.freeze: the backbone has no layer {name!r}{nearest(name, ['all', *known])}")
    found = []
    for key, module in modules.items():
        if key == name:
            return [*found, *module.modules()]
        if not name.startswith(f"{key}." if key else ""):
            found.append(module)
    raise AssertionError(name)


def list_layers(backbone: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """The layers of a backbone from the input on, by name, with their parameters.

    Where timm says what the layers of its networks are, these; else what stands one after the other in the lists of
    modules, a normalization together with the layer before it.
    """
    matcher = getattr(backbone, "group_matcher", None)
    if callable(matcher):
        return _timm_layers(backbone, matcher(coarse=False))
    layers: list[tuple[str, list[nn.Parameter]]] = []
    own = [p for p in backbone.parameters(recurse=False)]
    for name, module in _open_lists(backbone):
        parameters = list(module.parameters())
        if not parameters:
            continue
        if layers and all(p.ndim <= 1 for p in parameters):
            layers[-1][1].extend(parameters)
        else:
            layers.append((name, parameters))
    if own:
        layers = [("", own), *layers] if not layers else [(layers[0][0], [*own, *layers[0][1]]), *layers[1:]]
    return layers


def _timm_layers(backbone: nn.Module, matcher: Any) -> list[tuple[str, list[nn.Parameter]]]:
    from timm.models import group_parameters

    group_of = group_parameters(backbone, matcher, reverse=True)
    found: dict[Any, tuple[str, list[nn.Parameter]]] = {}
    for name, parameter in backbone.named_parameters():
        found.setdefault(group_of[name], (name.rpartition(".")[0] or name, []))[1].append(parameter)
    return [found[key] for key in sorted(found)]


def _open_lists(module: nn.Module, before: str = "") -> list[tuple[str, nn.Module]]:
    """The parts of a module, lists among them opened."""
    found = []
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            found += _open_lists(child, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", child))
    return found


def layer_rates(backbone: nn.Module, layer_decay: float) -> list[tuple[str, list[nn.Parameter], float]]:
    """The layers of a backbone, each with what its learning rate is times that of the head."""
    layers = list_layers(backbone)
    return [(name, own, layer_decay ** (len(layers) - k)) for k, (name, own) in enumerate(layers)]


def describe_groups(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """One line: what an optimizer moves, and how fast; neighbours of one name and rate are told together."""
    told: dict[tuple[str, float], int] = {}
    for group in groups:
        key = (str(group.get("name", "network")), float(group["lr_scale"]))
        told[key] = told.get(key, 0) + sum(p.numel() for p in group["params"])
    parts = [f"{name} {count:,} at {scale:.3g}" for (name, scale), count in told.items()]
    return f"{kind} moves these numbers, each at so many times the learning rate: {', '.join(parts)}"


def describe_frozen(frozen: FrozenLayers, name: str, network: nn.Module) -> str:
    """One line: what is frozen, for how long, and how many parameters train."""
    total = sum(p.numel() for p in network.parameters())
    still = sum(p.numel() for p in frozen.parameters)
    part = "the whole backbone is" if name == WHOLE else f"the backbone up to {name} is"
    when = "" if frozen.share is None else f" for the first {100 * frozen.share:.3g} % of the steps"
    return f"{part} frozen{when}: {total - still:,} of {total:,} parameters train"
