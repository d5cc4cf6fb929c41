"""Networks, data and losses of somebody else, as a user meets them: a script, a recipe with import paths, `adopt`."""

import asyncio
import io
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import mettle
from command_line import mettle as run_command
from command_line import refused
from free_port import free_port
from test_docs import REPOSITORY, blocks

NETS = """
from torch import nn


def make(width=32):
    body = nn.Sequential(nn.Conv2d(3, width, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(body, nn.Linear(width, 8))
"""
RECIPE = """
[data]
source = "tiles"
[batch]
classes = 6
samples = 4
[model]
backbone = "shop_nets:make"
width = 16
[loss]
kind = "SupCon"
[train]
steps = 4
device = "cpu"
"""


def as_png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_example_of_the_page_is_served_where_its_code_is_not(tmp_path):
    """One process trains with a network, a Dataset and a foreign loss; another one, elsewhere, answers over HTTP."""
    kind, _, script = blocks(REPOSITORY / "docs" / "train.md")[0]
    assert kind == "python" and len(script.splitlines()) <= 15
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    made.mkdir()
    elsewhere.mkdir()
    probe = "import numpy; numpy.save('probe.npy', tiles.images[44].permute(1, 2, 0).numpy())"
    (made / "shop.py").write_text(f"{script}{probe}\n")
    done = subprocess.run([sys.executable, "shop.py"], cwd=made, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "divided by identity" in done.stdout and done.stdout.splitlines()[-1] == "tile 5"
    contract = mettle.open_run(made / "runs" / "tiles").contract()
    assert contract["input"]["kind"] == "image" and "graph.onnx" in contract["files"]
    (made / "tiles.mettle").rename(elsewhere / "tiles.mettle")  # the gallery alone: no script, no run
    port = free_port()
    command = [sys.executable, "-m", "mettle", "serve", "--gallery", "tiles.mettle", "--threshold", "0.5"]
    server = subprocess.Popen(
        [*command, "--port", str(port)], cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_until_healthy(client, server)
            sent = {"image": ("probe.png", as_png(np.load(made / "probe.npy")), "image/png")}
            found = client.post("/v1/identify", files=sent)
            assert found.status_code == 200, found.text
            assert found.json()["match"] == "tile 5"
    finally:
        server.kill()
        server.stdout.close()
        server.wait()


def wait_until_healthy(client: httpx.Client, server: subprocess.Popen) -> None:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            assert server.poll() is None, server.stdout.read()
        time.sleep(0.2)
    raise AssertionError("the service did not begin to answer")


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with a module of a user, a recipe that names it, and images; it is where commands are typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop_nets", raising=False)
    (tmp_path / "shop_nets.py").write_text(NETS)
    (tmp_path / "shop.toml").write_text(RECIPE)
    rng = np.random.default_rng(0)
    for label in range(20):
        (tmp_path / "tiles" / f"tile-{label:02d}").mkdir(parents=True)
        pattern = rng.integers(0, 256, (12, 12, 3))
        for number in range(4):
            noisy = np.clip(pattern + rng.normal(0, 20, pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(tmp_path / "tiles" / f"tile-{label:02d}" / f"{number}.png")
    return tmp_path


def poison(shop) -> None:
    """From now on whoever imports the module is told."""
    sys.modules.pop("shop_nets", None)
    (shop / "shop_nets.py").write_text("raise SystemExit('the module of a run folder was imported')\n")
    for compiled in shop.glob("__pycache__/shop_nets*"):
        compiled.unlink()


def ask_service(monkeypatch, run: str, gallery: str, image) -> dict:
    """What `mettle serve` answers to one image, in this process."""
    asked = {}

    def answer(service, host, port, listening):
        async def ask():
            transport = httpx.ASGITransport(service, client=("127.0.0.1", 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                sent = {"image": (image.name, image.read_bytes(), "image/png")}
                asked["found"] = await client.post("/v1/identify", files=sent)

        asyncio.run(ask())

    monkeypatch.setattr("mettle.service.serve", answer)
    run_command("serve", run, "--gallery", gallery, "--threshold", 0.5)
    assert asked["found"].status_code == 200, asked["found"].text
    return asked["found"].json()


def test_a_recipe_with_an_import_path_is_trained_where_it_is_allowed_and_never_imported_later(shop, monkeypatch):
    said = refused("train", "shop.toml", "--name", "shop")
    assert "shop_nets" in said and "--allow-import shop_nets" in said
    assert "shop_nets" not in sys.modules and not (shop / "runs" / "shop").exists()
    assert "--allow-import" in refused("train", "shop.toml", "--name", "shop", "--allow-import", "shop")
    trained = run_command("train", "shop.toml", "--name", "shop", "--allow-import", "shop_nets")
    assert "EER" in trained and (shop / "runs" / "shop" / "report.html").is_file()
    (shop / "runs" / "shop").rename(shop / "from-elsewhere")
    poison(shop)
    assert "EER" in run_command("evaluate", "from-elsewhere")
    run_command("embed", "from-elsewhere", "tiles", "-o", "vectors.npz")
    run_command("gallery", "enrol", "shop.mettle", "--model", "from-elsewhere", "--data", "tiles")
    answer = ask_service(monkeypatch, "from-elsewhere", "shop.mettle", shop / "tiles" / "tile-03" / "1.png")
    assert answer["candidates"][0]["identity"] == "tile-03"
    assert "--allow-import" in refused("train", "shop.toml", "--name", "again")
    vectors = mettle.open_run("from-elsewhere").embed([shop / "tiles" / "tile-03" / "1.png"])
    with np.load("vectors.npz") as file:
        row = [str(path).endswith("tile-03/1.png") for path in file["path"]].index(True)
        np.testing.assert_allclose(vectors[0], file["embeddings"][row], atol=1e-5)


def test_a_network_with_its_weights_is_adopted_and_measured(shop):
    torch.manual_seed(5)
    exec(NETS, space := {})
    network = space["make"]()
    save_file(network.state_dict(), "theirs.safetensors")
    said = refused("adopt", "shop_nets:make", "theirs")
    assert "--size" in said and "--shape" in said
    run_command("adopt", "shop_nets:make", "theirs", "--weights", "theirs.safetensors", "--size", 12)
    poison(shop)
    image = np.array(Image.open(shop / "tiles" / "tile-00" / "0.png"))
    with torch.inference_mode():
        expected = network.eval()(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255)
    found = mettle.open_run("theirs").embed([shop / "tiles" / "tile-00" / "0.png"])
    cosine = torch.nn.functional.cosine_similarity(expected, torch.from_numpy(found))
    assert float(cosine) == pytest.approx(1, abs=1e-5)
    assert "EER" in run_command("evaluate", "theirs", "--data", "tiles")
    assert "there already" in refused("adopt", "torch.nn:Flatten", "theirs", "--size", 12)
    assert "(4, 3, 12, 12)" in refused("adopt", "torch.nn:Identity", "feature-maps", "--size", 12)
    assert not (shop / "feature-maps").exists()
