"""Helpful errors for names that do not exist: of a module's attributes, and of keyword arguments.

People come with the names of other libraries in their fingers. A room says once what those are called here
(``peers``), and a name that nobody knows is answered with the nearest one. Nothing of this runs while names are right.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib.util import find_spec
from typing import Any, TypeVar

from mettle.errors import MettleError, UnknownArgument, UnknownImport, UnknownName, nearest

F = TypeVar("F", bound=Callable[..., Any])

PEER_ARGUMENTS = {  # what other libraries and papers call an argument: the first of ours that the callee has is named
    "alpha_margin": ("margin",),
    "attributes": ("attribute",),
    "base_temp": ("base_temperature",),
    "camera": ("domains",),
    "cameras": ("domains",),
    "centers_per_class": ("vectors_per_class",),
    "classes": ("num_classes",),
    "delta": ("margin",),
    "device": ("domains",),
    "embedding_dim": ("dim",),
    "embedding_size": ("dim",),
    "distance": ("measure", "metric"),
    "embs": ("embeddings",),
    "feat_dim": ("dim",),
    "features": ("embeddings",),
    "fpr": ("far",),
    "groups": ("attribute",),
    "hard_mining": ("mining",),
    "in_features": ("dim",),
    "la": ("scale",),
    "learn_beta": ("boundary",),
    "logit_scale": ("temperature",),
    "m": ("margin",),
    "miner": ("mining",),
    "n_classes": ("num_classes",),
    "n_clusters": ("clusters",),
    "nb_classes": ("num_classes",),
    "num_negatives": ("negatives",),
    "out_features": ("num_classes",),
    "query_ids": ("ids",),
    "range_max": ("depth",),
    "range_min": ("skip",),
    "ref_emb": ("gallery",),
    "reducer": ("reduction",),
    "reference": ("gallery",),
    "s": ("scale",),
    "sample_ids": ("ids",),
    "scores_target": ("target",),
    "sampling_strategy": ("sampling",),
    "softmax_scale": ("scale",),
    "sub_centers": ("vectors_per_class",),
    "subjects": ("labels",),
    "t": ("temperature",),
    "targets": ("labels", "target"),
    "tau": ("temperature",),
    "tau_plus": ("prior",),
    "temp": ("temperature",),
    "type_of_triplets": ("mining",),
    "x": ("embeddings",),
    "y": ("labels",),
    "y_score": ("scores",),
    "y_true": ("target", "labels"),
}


def explain_missing_name(
    module: str, name: str, known: Iterable[str], peers: Mapping[str, str], planned: Iterable[str] = ()
) -> Exception:
    """The error for a name that a module does not have, to be raised by its ``__getattr__``.

    It is an `AttributeError`, so that ``hasattr`` answers. In ``from module import name`` Python would drop its text,
    so there it is an `ImportError` that keeps it.

    Args:
        module: The module's name.
        name: What was asked for.
        known: The names that it exports.
        peers: What the names of other libraries are here; capitals, underscores and a final "loss" do not matter.
        planned: Names of other libraries that nothing here stands for.
    """
    if name.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module} has no {name}{_hint(name, list(known), peers, planned)}"
    caller = sys._getframe(2) if hasattr(sys, "_getframe") else None
    importing = caller is not None and caller.f_code.co_name == "_handle_fromlist"
    if importing and find_spec(f"{module}.{name}") is None:  # a submodule is imported next if this is no ImportError
        return UnknownImport(text)
    return UnknownName(text)


def _hint(name: str, known: list[str], peers: Mapping[str, str], planned: Iterable[str]) -> str:
    wanted = _bare(name)
    ours = {_bare(k): k for k in known} | {_bare(theirs): our for theirs, our in peers.items()}
    if wanted in ours:
        return f": it is {'called ' if ours[wanted].isidentifier() else ''}{ours[wanted]} here"
    if wanted in map(_bare, planned):
        return f": {name} is not here yet"
    alike = [k for k in known if k[0].isupper() == name[0].isupper()]  # a class is no answer to a function's name
    return nearest(name, alike or known)


def _bare(name: str) -> str:
    """A name without what libraries differ in."""
    return name.lower().replace("_", "").removesuffix("loss")


def explain_arguments(made: F) -> F:
    """A function, or a class for its ``__init__``, that answers an unknown keyword with the nearest argument.

    The error is an `UnknownArgument`, which is a `TypeError`. Signatures stay what they are; a right call costs one
    more frame.
    """
    if isinstance(made, type):
        made.__init__ = _explain_arguments(made.__init__)
        return made  # pyright: ignore[reportReturnType]
    return _explain_arguments(made)


def _explain_arguments(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            problem = None if isinstance(error, MettleError) else _unknown_argument(function, args, kwargs)
            if problem is None:
                raise
        raise problem  # out of the handler: the first error says nothing that this one does not

    return call


def _unknown_argument(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> UnknownArgument | None:
    """What is wrong with the keywords of a call, or None where they are not what is wrong."""
    own = type(args[0]) if function.__name__ == "__init__" and args else None
    chain = [function] if own is None else [vars(base)["__init__"] for base in own.__mro__ if "__init__" in vars(base)]
    accepted = _accepted_arguments(chain)
    unknown = None if accepted is None else next((name for name in kwargs if name not in accepted), None)
    if accepted is None or unknown is None:
        return None
    ours = next((name for name in PEER_ARGUMENTS.get(unknown.lower(), ()) if name in accepted), None)
    hint = nearest(unknown, accepted) if ours is None else f": it is called {ours} here"
    return UnknownArgument(f"{function.__name__ if own is None else own.__name__} has no argument {unknown!r}{hint}")


def _accepted_arguments(functions: Iterable[Any]) -> list[str] | None:
    """Names that these take as keywords, each passing on what it does not know; None where the last one takes any."""
    found: list[str] = []
    for function in functions:
        kinds = inspect.signature(function).parameters.values()
        found += [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in kinds):
            return found
    return None
