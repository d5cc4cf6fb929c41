"""`mettle doctor` on this machine, and with packages taken away or broken: real folders, real imports."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import mettle
from mettle.cli.doctor import PARTS, check_folder, check_loss
from tests.command_line import mettle as run_command

ROOT = Path(mettle.__file__).parents[2]
BROKEN = "raise RuntimeError('built for another\\n  machine')\n"


def doctor(*words: str, status: int, python: tuple[str, ...] = (), **environment: str) -> str:
    """What the command prints in a process of its own."""
    command = [sys.executable, *python, "-m", "mettle", "doctor", *words]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"} | environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def findings(*words: str, status: int, **options) -> dict[str, dict]:
    found = json.loads(doctor("--json", *words, status=status, **options))
    assert found["works"] == (status == 0)
    assert all(set(one) == {"section", "name", "state", "said", "facts"} for one in found["findings"])
    assert all("\n" not in one["said"] for one in found["findings"])
    assert any(one["state"] == "broken" for one in found["findings"]) == (status == 1)
    return {one["name"]: one for one in found["findings"]}


def shadow(folder: Path, **packages: str) -> str:
    """A folder for PYTHONPATH whose packages come before the installed ones."""
    for name, code in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    return str(folder)


def test_as_it_is_everything_works(tmp_path, monkeypatch):
    monkeypatch.setenv("METTLE_CACHE", str(tmp_path / "not" / "yet"))
    text = run_command("doctor")
    lines = text.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == ["machine", "needed", "optional", "self-check", "everything that is installed works"]
    for part in PARTS:
        if part.extra in ("lora", "milvus"):  # which are not in `all`
            assert re.search(rf"^  (missing|ok) +{part.name} ", text, re.MULTILINE)
            continue
        assert re.search(rf"^  ok +{part.name} +{re.escape(metadata.version(part.name))}: ", text, re.MULTILINE)
    assert f"{tmp_path / 'not' / 'yet'} can be written" in text and list(tmp_path.iterdir()) == []
    assert f"Python {sys.version.split()[0]}" in text
    assert re.search(r"tiled engine +agrees with the dense engine", text)
    assert re.search(r"gallery +one of 4 people: match: person 2; a stranger: no match", text)


def test_packages_that_break_or_say_nothing_are_told_apart(tmp_path):
    path = shadow(
        tmp_path,
        onnx=f"print('noise'); import sys, warnings; print('noise', file=sys.stderr); warnings.warn('noise')\n{BROKEN}",
        uvicorn="raise SystemExit(7)\n",
        fastapi="import a_package_that_it_needs\n",
        pyarrow="raise ModuleNotFoundError('none', name='pyarrow')\n",
    )
    found = findings(status=1, PYTHONPATH=path)
    broken = [name for name, one in found.items() if one["state"] == "broken"]
    assert broken == ["onnx", "onnxscript", "fastapi", "uvicorn"]  # the second needs the first
    assert "RuntimeError: built for another machine; try pip install --force-reinstall onnx" in found["onnx"]["said"]
    assert found["onnx"]["facts"]["version"] == metadata.version("onnx")
    assert "SystemExit: 7" in found["uvicorn"]["said"]
    assert "No module named 'a_package_that_it_needs'" in found["fastapi"]["said"]
    assert found["pyarrow"]["state"] == "missing" and "pip install pyarrow" in found["pyarrow"]["said"]
    assert found["gallery"]["state"] == found["SupCon, tiled engine"]["state"] == "ok"
    assert {"processors", "threads"} == set(found["processors"]["facts"])
    assert found["cache"]["facts"]["free"] > 0


def test_what_is_not_installed_comes_with_the_command_that_brings_it(tmp_path):
    """An installation that really lacks them: links to all of this one's packages but some."""
    gone = ("psycopg", "triton", "torchvision", "tensorboard")
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(gone) and not (tmp_path / entry.name).exists():
                (tmp_path / entry.name).symlink_to(entry)
    if not (tmp_path / "mettle").exists():  # installed as a link to its source
        (tmp_path / "mettle").symlink_to(Path(mettle.__file__).parent)
    text = doctor(status=1, python=("-S",), PYTHONPATH=str(tmp_path))
    for name, asked in (("psycopg", "'psycopg[binary]'"), ("triton", "triton"), ("tensorboard", "tensorboard")):
        assert re.search(rf"^  missing +{name} +.*; not installed: pip install {re.escape(asked)}$", text, re.M)
    assert re.search(r"^  missing  torchvision .*vision", text, re.M)
    assert re.search(r"^  broken   timm .*No module named 'torchvision'", text, re.M)  # there, but not by itself
    assert text.endswith("\nbroken: timm\n")


def test_without_torch_there_is_still_a_report(tmp_path):
    path = shadow(tmp_path, torch="raise OSError('libcudart.so.12: cannot open shared object file')\n")
    (tmp_path / "file").touch()
    found = findings(status=1, PYTHONPATH=path, METTLE_CACHE=str(tmp_path / "file" / "cache"))
    for name in ("torch", "SupCon, tiled engine"):
        assert found[name]["state"] == "broken" and "libcudart" in found[name]["said"]
    assert found["GPU"]["state"] == "note" and found["processors"]["facts"]["threads"] is None
    assert found["numpy"]["state"] == found["fastapi"]["state"] == "ok"
    cache = found["cache"]
    assert (
        cache["state"] == "note" and not cache["facts"]["writable"] and "cannot be written (Not a dir" in cache["said"]
    )


def test_every_package_that_the_project_names_is_looked_at():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {key: names for key, names in project["optional-dependencies"].items() if key not in ("all", "dev")}
    wanted = {(re.match(r"[\w-]+", one).group(), key) for key, names in extras.items() for one in names}
    wanted |= {(re.match(r"[\w-]+", one).group(), "") for one in project["dependencies"]}
    assert {(part.name, part.extra) for part in PARTS} == wanted


@pytest.mark.parametrize(
    ("engine", "tolerance", "state", "said"),
    [
        ("tiled", 1e-5, "ok", "agrees"),
        ("tiled", 0.0, "broken", "does NOT agree"),
        ("tiled", float("nan"), "broken", "does NOT agree"),
        ("tilde", 1e-5, "broken", "InputError: no engine 'tilde'"),
    ],
)
def test_a_check_can_fail(engine, tolerance, state, said):
    found = check_loss("x", engine, "cpu", tolerance)
    assert (found.section, found.state) == ("self-check", state) and said in found.said


def test_the_gpus_are_those_that_torch_sees():
    from mettle.cli.doctor import describe_machine

    names = [one.name for one in describe_machine() if one.name.startswith("GPU")]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert names == ([f"GPU {k}" for k in range(count)] or ["GPU"])


def test_a_folder_that_is_gone_is_told(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    found = check_folder("this folder", Path())
    assert found.state == "note" and "No such file" in found.said
