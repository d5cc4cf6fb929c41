"""Recipes as files: those that come with mettle, what one takes over from another, and their titles, without torch."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from mettle.errors import RecipeError, nearest

WRAPPERS = {"hardness-aware": "HardnessAware", "jtt": "JTT"}  # methods that are named around their loss
ADOPTED = "adopted:elsewhere"  # in the place of the loss of a model that was trained elsewhere
LARGEST = 1 << 20  # bytes of a recipe
DEEPEST = 8  # recipes that extend one another


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with mettle, by name."""
    folder = files("mettle.train") / "recipes"
    return {p.name.removesuffix(".toml"): Path(str(p)) for p in sorted(folder.iterdir(), key=str) if ".toml" in p.name}


def builtin_titles() -> dict[str, str]:
    """What each of them trains on what, by name."""
    return {name: recipe_title(read_recipe_file(path)) for name, path in builtin_recipes().items()}


def find_recipe(source: str | Path, beside: Path | None = None) -> Path:
    """A recipe that comes with mettle by its name, or a file by its path, which may be relative to a folder."""
    known = builtin_recipes()
    path = known.get(str(source)) or (beside or Path()) / Path(source).expanduser()
    if not path.is_file():
        hint = nearest(str(source), known)
        raise RecipeError(f"no recipe {str(source)!r}: neither a shipped one nor a file{hint}")
    return path


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The content of a recipe, unchecked, with what it takes over from the recipe that it ``extends``."""
    return merge_tables(*[content for content, _ in reversed(read_recipe_chain(path))])


def read_recipe_chain(path: Path) -> list[tuple[dict[str, Any], Path]]:
    """A recipe, the one that it ``extends``, the one that that extends, ...: what each says itself, and its file."""
    chain: list[tuple[dict[str, Any], Path]] = []
    while True:
        content = _read_toml(path)
        parent = content.pop("extends", None)
        chain.append((content, path))
        if parent is None:
            return chain
        if not isinstance(parent, str):
            raise RecipeError(f"recipe key extends: the name or the path of a recipe is wanted, got {parent!r}")
        if len(chain) == DEEPEST:
            raise RecipeError(f"{chain[0][1]} extends {DEEPEST} recipes one after the other, or itself")
        path = find_recipe(parent, path.parent)


def merge_tables(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables put into one, later ones over earlier ones, key by key; one of another ``kind`` takes the place whole."""
    merged: dict[str, Any] = {}
    for table in tables:
        if "kind" in merged and table.get("kind", merged["kind"]) != merged["kind"]:
            merged = {}
        for key, value in table.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge_tables(merged[key], value) if both else value
    return merged


def _read_toml(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST:
        raise RecipeError(f"{path} has {path.stat().st_size} bytes: a recipe is a page, at most {LARGEST}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None


def recipe_title(content: Mapping[str, Any]) -> str:
    """One line about the tables of a recipe: what is trained on what."""
    data, method = content.get("data", {}), content.get("train", {}).get("method")
    if content.get("loss", {}).get("kind") == ADOPTED:
        return f"{str(content.get('model', {}).get('backbone', '')).rpartition(':')[2]}, trained elsewhere"
    name = format_call(content.get("loss", {}))
    name = f"{WRAPPERS[method]}({name})" if method in WRAPPERS else name
    weights = content.get("biased", {}).get("weights", "pairs")
    name += "" if weights == "pairs" else f" with {weights} weights"
    batch = content.get("batch", {})
    if batch.get("queue"):
        kind = "momentum queue" if batch.get("queue_encoder") == "momentum" else "queue"
        name += f" with a {kind} of {batch['queue']} embeddings"
    tuples = "".join(f", {kind} {data[kind]}" for kind in ("pairs", "triplets") if data.get(kind))
    return f"{name} on {str(data.get('source', 'glyphs')).removeprefix('python:')}{tuples}"


def format_call(table: Mapping[str, Any]) -> str:
    """A table of a recipe as the call that it stands for: ``SupCon(temperature=0.1)``."""
    kind = str(table.get("kind", "")).rpartition(":")[2]  # of an import path the name alone
    return f"{kind}({', '.join(f'{key}={_format_value(value)}' for key, value in table.items() if key != 'kind')})"


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return format_call(value) if isinstance(value, Mapping) else repr(value)
