"""Pretrained weights of timm's models: where they are on this machine, and one line where they cannot be had.

timm fetches weights from a hub, whose library tries for more than a minute before it gives up. So the hub's own cache
is looked into first: weights that are there are loaded from their file, without any question to the network; for
others somebody must answer at the address that they would come from.
"""

import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import torch
from safetensors import SafetensorError

from mettle.errors import RecipeError

PATIENCE = 8.0  # seconds in which a server must answer
FILES = ("model.safetensors", "pytorch_model.bin")  # as timm looks for them in a repository of its hub, in this order
FROM_SCRATCH = "leave model.pretrained out to train from scratch"


@dataclass(frozen=True)
class Weights:
    """Where the pretrained weights of a model come from, and where they are kept."""

    tag: str  # as timm names them: the model and how it was trained
    place: str  # what would have to be there, in words: a file, or a folder of the hub's cache
    address: str  # from where they are fetched; empty where that is switched off
    is_here: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # of ``timm.create_model``, to load them from their file


def pretrained_options(library: ModuleType, name: str) -> dict[str, Any]:
    """Further arguments of ``timm.create_model(name, pretrained=True)``, so that weights that are here are not fetched.

    Raises:
        RecipeError: timm has no weights for this model, or they are not here and nobody answers where they come from.
    """
    weights = locate_weights(library, name)
    if not weights.is_here and not (weights.address and is_reachable(weights.address)):
        host = urlparse(weights.address).hostname
        why = f"{host} does not answer" if host else "the hub is switched off (HF_HUB_OFFLINE)"
        raise RecipeError(
            f"model.pretrained: the weights {weights.tag} of timm are not on this machine and {why}: connect to a "
            f"network, copy {weights.place} from a machine that has it, or {FROM_SCRATCH}"
        )
    return dict(weights.options)


def locate_weights(library: ModuleType, name: str) -> Weights:
    """Where timm would take the pretrained weights of a model from, and whether they are on this machine."""
    config = library.get_pretrained_cfg(name)
    if config is None or not (config.hf_hub_id or config.url or config.file):
        raise RecipeError(f"model.pretrained: timm has no pretrained weights for {name!r}; {FROM_SCRATCH}")
    tag = f"{name}.{config.tag}" if config.tag else name
    if config.file:
        return Weights(tag, f"the file {config.file}", "", Path(config.file).is_file())
    if config.hf_hub_id:
        return _locate_on_hub(tag, config)
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(config.url).path).name
    return Weights(tag, f"the file {file}", config.url, file.is_file())


def _locate_on_hub(tag: str, config: Any) -> Weights:
    import huggingface_hub as hub  # timm needs it too

    repository, _, revision = str(config.hf_hub_id).partition("@")
    names = (config.hf_hub_filename,) if config.hf_hub_filename else FILES
    paths = [hub.try_to_load_from_cache(repository, name, revision=revision or None) for name in names]
    found = next((path for path in paths if isinstance(path, str)), None)
    folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    address = "" if hub.constants.HF_HUB_OFFLINE else hub.hf_hub_url(repository, names[0], revision=revision or None)
    options: dict[str, Any] = {}
    if found is not None:
        # A file of the hub is a plain one, also of models whose first weights, at another address, were not.
        options = {"pretrained_cfg_overlay": {"file": found, "custom_load": config.custom_load == "hf"}}
    return Weights(tag, f"the cache folder {folder} (with {names[0]})", address, found is not None, options)


def load_problems() -> tuple[type[Exception], ...]:
    """What may go wrong while weights are fetched or read: a network that fails, a file that is damaged."""
    try:
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        return OSError, SafetensorError
    # Its first base is that of the HTTP library it is built on, whose other errors are no OSError in new versions.
    return OSError, SafetensorError, HfHubHTTPError.__bases__[0]


def is_reachable(address: str) -> bool:
    """Whether somebody answers there within a few seconds, whatever the answer is."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=PATIENCE).close()
        except HTTPError:  # an answer as well: a redirection that needs another method, a file that has moved
            pass
        except URLError as problem:
            if not isinstance(problem.reason, ssl.SSLError):  # certificates are for whoever fetches to judge
                return
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread, because a search for the name of a host keeps to no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()
