"""The recipes that come with mettle, and the title of a recipe: told from its tables, without loading torch."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

WRAPPERS = {"hardness-aware": "HardnessAware", "jtt": "JTT"}  # methods that are named around their loss


def shipped() -> dict[str, Path]:
    """The recipes that come with mettle, by name."""
    folder = files("mettle.train") / "recipes"
    return {p.name.removesuffix(".toml"): Path(str(p)) for p in sorted(folder.iterdir(), key=str) if ".toml" in p.name}


def shipped_titles() -> dict[str, str]:
    """What each of them trains on what, by name."""
    return {name: recipe_title(tomllib.loads(path.read_text(encoding="utf-8"))) for name, path in shipped().items()}


def recipe_title(content: Mapping[str, Any]) -> str:
    """One line about the tables of a recipe: what is trained on what."""
    data, method = content.get("data", {}), content.get("train", {}).get("method")
    name = describe_call(content.get("loss", {}))
    name = f"{WRAPPERS[method]}({name})" if method in WRAPPERS else name
    weights = content.get("biased", {}).get("weights", "pairs")
    name += "" if weights == "pairs" else f" with {weights} weights"
    tuples = "".join(f", {kind} {data[kind]}" for kind in ("pairs", "triplets") if data.get(kind))
    return f"{name} on {data.get('source', 'glyphs')}{tuples}"


def describe_call(table: Mapping[str, Any]) -> str:
    """A table of a recipe as the call that it stands for: ``SupCon(temperature=0.1)``."""
    inner = {key: describe_call(value) if isinstance(value, Mapping) else repr(value) for key, value in table.items()}
    return f"{table.get('kind', '')}({', '.join(f'{key}={value}' for key, value in inner.items() if key != 'kind')})"
