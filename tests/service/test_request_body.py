"""A picture that is not taken: what is wrong with it and what to do is told, and no more."""

import hashlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from fastapi import APIRouter, HTTPException
from PIL import Image
from safetensors.numpy import load_file, save_file

from mettle.gallery import Gallery
from mettle.service import Limits
from mettle.train import open_run_folder
from mettle.workbench import routes
from tests.http_service import error, picture
from tests.processes import run_mettle, start_mettle

NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)


def saved(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(NOISE).save(buffer, kind)
    return buffer.getvalue()


def deep() -> bytes:
    """Sixteen bits a channel."""
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


UNTAKEN = {
    "gif": (saved("GIF"), 415, "image-format", "pictures are JPEG, PNG, WebP, and this is GIF: save it as one of them"),
    "tiff": (saved("TIFF"), 415, "image-format", "and this is TIFF"),
    "bmp": (saved("BMP"), 415, "image-format", "and this is BMP"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(50), 415, "image-format", "and this is HEIC or AVIF"),
    "pdf": (b"%PDF-1.7" + bytes(50), 415, "image-format", "and this is PDF"),
    "text": (b"/etc/passwd", 415, "image-format", "and this is none of them"),
    "empty": (b"", 415, "image-format", "and this is none of them"),
    "half a jpeg": (saved("JPEG")[:300], 422, "bad-image", "cannot be read: damaged or truncated JPEG; save it anew"),
    "half a png": (saved("PNG")[:300], 422, "bad-image", "cannot be read: damaged or truncated PNG; save it anew"),
    "half a webp": (saved("WebP")[:24], 422, "bad-image", "cannot be read: truncated header; save it anew, or send"),
    "too many pixels": (
        saved("PNG"),
        413,
        "too-many-pixels",
        "at most 1000 pixels, and this has more: make it smaller",
    ),
}


def begun(service, run, gallery, limits=None, more=()):
    return service(limits, gallery=gallery, runs=[run], routers=[routes([run]), *more])


def sent(client, content: bytes):
    return client.post("/v1/identify", files={"image": ("x.png", content, "image/png")})


def told(answer, folder) -> tuple[int, str, str]:
    code = error(answer)
    assert str(folder) not in answer.text and "0x" not in answer.text and "site-packages" not in answer.text
    return answer.status_code, code, answer.json()["error"]["message"]


@pytest.fixture
def people(trained, tmp_path):
    with Gallery.open(tmp_path / "faces", model=trained[0]) as gallery:
        gallery.enrol("anna", trained[1][0, 0])
        yield gallery


@pytest.mark.parametrize("name", UNTAKEN)
def test_what_is_wrong_with_a_picture_and_what_to_do_is_told(service, key, people, trained, tmp_path, name):
    content, status, code, words = UNTAKEN[name]
    limits = Limits(pixels=1000) if name == "too many pixels" else Limits()
    client = begun(service, trained[0], people, limits)(key("workbench", "identify"))
    answer = sent(client, content)
    found = told(answer, tmp_path)
    assert found[:2] == (status, code) and words in found[2], found
    answer = sent(client, deep())
    assert answer.status_code == 200, "a sound one of an unusual kind is taken"


def remade(run, folder, change):
    """A copy of a run whose weights were changed, with a contract that says so."""
    shutil.copytree(run.folder, folder)
    kept = load_file(folder / "model.safetensors")
    weights = {name: change(array) if array.dtype.kind == "f" else array for name, array in kept.items()}
    save_file(weights, folder / "model.safetensors")
    contract = json.loads((folder / "contract.json").read_text())
    contract["weights"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / "contract.json").write_text(json.dumps(contract))
    return open_run_folder(folder)


@pytest.mark.parametrize("value", [0, np.nan], ids=["zero", "nan"])
def test_a_model_that_finds_nothing_is_told_and_nobody_is_accepted(service, key, trained, tmp_path, value):
    run = remade(trained[0], tmp_path / "run", lambda array: np.full_like(array, value))
    with Gallery.open(tmp_path / "other", model=run) as gallery:
        gallery.enrol("anna", np.eye(8)[0])
        client = begun(service, run, gallery)(key("workbench", "identify"))
        answer = sent(client, picture(trained[1][0, 0]))
        assert told(answer, tmp_path) == (
            422,
            "bad-image",
            "the model finds nothing in a picture (its embedding is zero, NaN or infinite): send another",
        )


def test_a_model_that_is_gone_is_for_the_operator(service, key, trained, tmp_path):
    run = remade(trained[0], tmp_path / "run", lambda array: array)
    with Gallery.open(tmp_path / "other", model=run) as gallery:
        gallery.enrol("anna", np.eye(8)[0])
        client = begun(service, run, gallery)(key("workbench", "identify"))
        (run.folder / "model.safetensors").unlink()
        answer = sent(client, picture(trained[1][0, 0]))
        status, code, message = told(answer, tmp_path)
        assert (status, code) == (503, "model") and "operator" in message and int(answer.headers["retry-after"])


def test_a_gallery_without_a_model_says_what_it_takes(service, key, trained, tmp_path):
    with Gallery.open(tmp_path / "rows", dim=8) as gallery:
        client = begun(service, trained[0], gallery)(key("workbench", "identify"))
        answer = sent(client, saved("PNG"))
    status, code, message = told(answer, tmp_path)
    assert (status, code) == (422, "no-model") and "send embeddings to /v1" in message


def test_what_a_route_says_reaches_its_client_in_one_line(service, key, people, trained, tmp_path):
    more = APIRouter(prefix="/workbench/more")

    @more.get("/{status}")
    def fail(status: int):
        raise HTTPException(status, "one\n line " + "x" * 500 if status == 418 else None)

    client = begun(service, trained[0], people, more=[more])(key("workbench", "identify"))
    for path, status, code, words in (
        ("api/runs/7", 404, "not-found", "no run 7: there are 1, counted from 0"),
        ("more/404", 404, "not-found", "no such resource; GET /docs lists what there is"),
        ("nowhere", 404, "not-found", "no such resource; GET /docs lists what there is"),
        ("more/409", 409, "refused", "the request cannot be served"),
        ("more/418", 418, "refused", "one line xxx"),
        ("more/500", 503, "unavailable", "the service cannot do this now"),
        ("api/runs/x", 422, "bad-fields", "run does not fit: int parsing"),
        ("api/runs/0/pairs/positives?count=0", 422, "bad-fields", "count does not fit: greater than equal"),
    ):
        found = told(client.get(f"/workbench/{path}"), tmp_path)
        assert found[:2] == (status, code) and found[2].startswith(words), found


def test_the_command_that_lets_other_machines_in_is_named_and_works(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = ("--gallery", "g.mettle", "--create", "--host", "0.0.0.0", "--port", 0)
    serve = ("serve", trained[0].folder, *where, "--threshold", 0.5)
    refused = run_mettle(*serve)
    assert refused.returncode == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1
    command, option = re.findall(r"`([^`]+)`", refused.stderr)
    made = run_mettle(*command.replace("NAME", "desk").split()[1:])
    assert made.returncode == 0 and made.stdout.startswith("mettle_")
    server = start_mettle(*serve, *option.split())
    try:
        assert re.search(r"0 people; http://0\.0\.0\.0:\d+/workbench\n", server.stdout.readline())
    finally:
        server.kill()
        server.communicate()
    none = run_mettle(*serve, "--keys", "none.json")
    assert none.returncode == 2 and "`mettle keys create none.json NAME --scope identify`" in none.stderr
