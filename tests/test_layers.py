"""A room imports only rooms to its left, `pairs`, `errors`, `durable` and `unknown_names`."""

import ast
from pathlib import Path

import pytest

import mettle

ROOT = Path(mettle.__file__).parent
FLOW = ["data", "model", "difficulty", "losses", "metric", "train", "evaluate", "match", "report", "service"]
ANYWHERE = {"pairs", "errors", "durable", "unknown_names"}
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
    if name in ("errors", "durable"):
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_to_its_left(path):
    wrong = imported(path) - allowed(room(path))
    assert not wrong, f"{path.relative_to(ROOT)} imports from its right: {sorted(wrong)}"


def test_a_wrong_import_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from mettle import report\n    import mettle.train.loop\n")
    assert imported(file) == {"report", "train"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_environment_variable_is_read_outside_the_command_line(path):
    if room(path) == "cli":
        return
    text = path.read_text(encoding="utf-8")
    assert "os.environ" not in text and "getenv" not in text
    assert "torch.load(" not in text, "pickles are never loaded"
