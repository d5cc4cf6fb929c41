"""What a bare machine needs: training without faiss, typer, scikit-learn, matplotlib; losses with torch and NumPy."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

BLOCK = """
import sys

for name in {names!r}:
    sys.modules[name] = None  # as if it were not installed
"""
HEAVY = ("faiss", "typer", "click", "sklearn", "matplotlib")


def run_without(names, code, *arguments):
    script = BLOCK.format(names=tuple(names)) + textwrap.dedent(code)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_runs_from_python_without_heavy_packages(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (48, 12, 12), np.uint8)
    np.savez(tmp_path / "p.npz", images=images, label=np.repeat(np.arange(8), 6), split=np.repeat([0, 2], 24))
    code = """
    import mettle.train as room

    for name in room.__all__:
        getattr(room, name)
    keys = ["train.steps=2", "batch.classes=4", "batch.samples=2", "model.width=4", "model.depth=2", "train.device=cpu"]
    result = room.train(room.load("supcon", keys, data={"source": sys.argv[1]}), sys.argv[2], tensorboard=False)
    print(result.finished, room.open_run_folder(sys.argv[2]).model().dim)
    """
    assert run_without(HEAVY, code, tmp_path / "p.npz", tmp_path / "run").split() == ["True", "128"]


def test_a_network_of_ones_own_is_fitted_without_heavy_packages(tmp_path):
    code = """
    import torch, mettle
    from mettle.losses import SupCon

    torch.manual_seed(0)
    data = [(torch.randn(4) + k // 6, k // 6) for k in range(60)]
    run = mettle.fit(torch.nn.Linear(4, 3), data, SupCon(), folder=sys.argv[1], steps=2, batch=(3, 2), quiet=True)
    print(run.finished, run.embed(torch.randn(2, 4)).shape[1])
    """
    heavy = (*HEAVY, "jinja2", "onnx", "onnxscript", "onnxruntime")  # without which the run has no graph, and says so
    assert run_without(heavy, code, tmp_path / "run").split() == ["True", "3"]


def test_losses_need_torch_and_numpy_alone():
    ours = ("pydantic", "safetensors", "scipy", "tomli_w", "rich", "jinja2", "PIL", *HEAVY)
    code = """
    import torch
    from mettle.losses import SupCon, ArcFace
    from mettle.difficulty import Threshold

    z, y = torch.randn(12, 4, requires_grad=True), torch.arange(12) // 3
    (SupCon(difficulty=Threshold())(z, y) + ArcFace(4, 4)(z, y)).backward()
    print(bool(z.grad.isfinite().all()))
    """
    assert run_without(ours, code).strip() == "True"


@pytest.mark.parametrize("name", ["faiss", "sklearn", "matplotlib"])
def test_the_block_blocks(name):
    code = f"""
    try:
        import {name}
    except ModuleNotFoundError:
        print("blocked")
    """
    assert run_without(HEAVY, code).strip() == "blocked"


def test_a_gallery_names_the_extra_that_it_needs(tmp_path):
    code = """
    from mettle import errors

    try:
        from mettle import Gallery
        Gallery.open(sys.argv[1], dim=4).identify([[1.0, 0.0, 0.0, 0.0]])
    except errors.MissingExtra as error:
        print(error)
    """
    said = run_without(["faiss"], code, tmp_path / "g")
    assert said.count("\n") == 1 and "pip install 'mettle-ml[gallery]'" in said


def test_the_report_needs_no_extra():
    """Measuring a run and writing its page take what a plain install brings."""
    run_without(
        ["faiss", "fastapi", "uvicorn", "psycopg", "pyarrow"], "import mettle.cli, mettle.evaluate, mettle.report"
    )
