"""Pages that show mettle beside other libraries, executed whole with the real packages: `make test-integrations`."""

import json
from pathlib import Path

import numpy as np
import pytest

import mettle
from mettle.model.backbones import import_torchvision
from test_docs import REPOSITORY, blocks

PAGES = [REPOSITORY / "docs" / name for name in ("integrations.md", "train.md")]
pytestmark = pytest.mark.filterwarnings("default")  # those of other libraries are theirs


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_all_python_blocks_run(page, tmp_path, monkeypatch):
    """Also those that `make test` leaves out; what each library trained has become a run that embeds."""
    import_torchvision()  # before other libraries do, beside a CPU build of torch
    monkeypatch.chdir(tmp_path)
    found = [code for kind, _, code in blocks(page) if kind == "python"]
    assert any("norun" in flags for kind, flags, _ in blocks(page) if kind == "python")
    space: dict = {"__name__": "__main__"}
    for code in found:
        exec(compile(code, str(page), "exec"), space)
    runs = [path.parent for path in Path("runs").glob("*/contract.json")]
    wanted = (
        {"plain", "pml", "lightning", "accelerate", "from-trainer"}
        if page.stem == "integrations"
        else {"albumentations"}
    )
    assert wanted <= {run.name for run in runs}
    for run in runs:
        opened = mettle.open_run(run)
        shape = json.loads((run / "contract.json").read_text())["input"]["shape"]
        assert np.isfinite(opened.embed(np.zeros((2, *shape), np.float32))).all()
