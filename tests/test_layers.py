"""A room imports only rooms to its left, `pairs`, `errors`, `rng`, `atomic_files` and `unknown_names`."""

import ast
from functools import cache
from pathlib import Path

import mettle

ROOT = Path(mettle.__file__).parent
FLOW = [
    "data",
    "model",
    "difficulty",
    "losses",
    "metric",
    "train",
    "evaluate",
    "gallery",
    "mining",
    "report",
    "notes",
    "api",
    "tuning",
    "start",
    "workbench",
    "service",
]
ANYWHERE = {"pairs", "errors", "rng", "atomic_files", "unknown_names"}
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms of mettle that a file imports, at any depth of the code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("mettle.") and ".__" not in name}
    return found


def allowed(name: str) -> set[str]:
    if name in ("errors", "rng", "atomic_files"):
        return set()
    if name == "unknown_names":
        return {"errors"}
    if name == "pairs":
        return {"pairs", "errors"}
    if name in ("cli", "__init__", "__main__"):
        return set(FLOW) | ANYWHERE | {"cli"}
    return set(FLOW[: FLOW.index(name) + 1]) | ANYWHERE


def test_there_is_something_to_check():
    assert len(FILES) > 30
    assert {room(path) for path in FILES} >= {
        "data",
        "model",
        "pairs",
        "losses",
        "train",
        "evaluate",
        "report",
    }


def test_a_room_imports_only_rooms_to_its_left():
    wrong = {str(path.relative_to(ROOT)): imported(path) - allowed(room(path)) for path in FILES}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}, "imports from the right"


def test_the_page_of_the_engine_names_every_file_of_its_rooms():
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(page.split("## The three rooms")[1].split("\n## ")[0].split())
    files = {path.name for path in FILES if room(path) in ("pairs", "losses", "difficulty")}
    assert len(files) > 60
    assert files <= named, sorted(files - named)


def test_a_wrong_import_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from mettle import report\n    import mettle.train.trainer\n")
    assert imported(file) == {"report", "train"}


def test_no_environment_variable_is_read_outside_the_command_line():
    texts = {path: path.read_text(encoding="utf-8") for path in FILES if room(path) != "cli"}
    assert [path for path, text in texts.items() if "os.environ" in text or "getenv" in text] == []
    loads = [line for text in texts.values() for line in text.splitlines() if "torch.load(" in line]
    assert all("weights_only=True" in line for line in loads), "pickles are never loaded"
    assert [room(path) for path, text in texts.items() if "torch.load(" in text] == ["model"], "weights of others"


ENGINE = {"pairs", "losses", "difficulty"}


@cache
def exported_names(module: str) -> set[str]:
    """What a package of the engine exports: its ``__all__`` and what its ``__init__`` imports by name."""
    path = ROOT.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            found |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom) and path.is_dir():
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and path.is_dir():
            found.add(node.name)
    return found


def unexported_imports(path: Path) -> list[str]:
    """Names that a file takes from a room of the engine which does not export them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("mettle."):
            continue
        if node.module.split(".")[1] in ENGINE:
            known = exported_names(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    return found


def test_other_rooms_take_what_the_engine_exports_and_nothing_else():
    found = {str(path.relative_to(ROOT)): unexported_imports(path) for path in FILES if room(path) not in ENGINE}
    assert {name: taken for name, taken in found.items() if taken} == {}


def test_an_unexported_name_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("from mettle.pairs.problem import PairProblem\nfrom mettle.pairs import Tile\n")
    assert unexported_imports(file) == ["mettle.pairs.problem.PairProblem"]
