"""Bodies of requests: JSON with embeddings, or multipart with pictures, within limits and only in memory."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from mettle.data.reader_pool import ReaderLimitExceeded
from mettle.errors import DataError
from mettle.service.errors import ApiError
from mettle.service.rate_limits import Limits

_PICTURE_FIELDS = ("image", "images", "picture")
M = TypeVar("M", bound=BaseModel)
_ACCEPTED = (("JPEG", 0, b"\xff\xd8\xff"), ("PNG", 0, b"\x89PNG\r\n\x1a\n"), ("WebP", 8, b"WEBP"))
_RECOGNIZED = (  # that people have and send
    ("HEIC or AVIF", 4, b"ftyp"),
    ("GIF", 0, b"GIF8"),
    ("BMP", 0, b"BM"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
    ("PDF", 0, b"%PDF"),
)


@dataclass(frozen=True)
class Form:
    """A multipart body: short texts by name, and pictures still encoded."""

    texts: Mapping[str, str]
    pictures: tuple[bytes, ...]


def body_kind(headers: Headers) -> str:
    """Which of the two kinds a body is, "json" or "form"; anything else is refused."""
    said = headers.get("content-type", "").partition(";")[0].strip().lower()
    if said == "application/json":
        return "json"
    if said == "multipart/form-data":
        return "form"
    raise ApiError(415, "media-type", "send application/json with embeddings, or multipart/form-data with pictures")


def read_json(model: type[M], body: bytes) -> M:
    """A JSON body of this shape. What came is not repeated in the refusal, and only the first mistake is looked for.

    It is parsed on the event loop: the limit of its size, and that nothing is collected about all that is wrong, keep
    this short.
    """
    try:
        table = from_json(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "bad-json", "the body is not JSON") from None
    if not isinstance(table, dict):
        raise ApiError(422, "bad-fields", f"the body is not an object; fields are {_join_names(model.model_fields)}")
    if any(name in table for name in _PICTURE_FIELDS):
        how = "pictures are sent as multipart/form-data, in files named image"
        raise ApiError(422, "bad-fields", f"{how}; JSON takes embeddings, as does a gallery without a model")
    if any(name not in model.model_fields for name in table):
        raise ApiError(422, "bad-fields", f"a field is unknown; fields are {_join_names(model.model_fields)}")
    return _validate(model, table)


def read_texts(model: type[M], form: "Form") -> M:
    """The texts of a form as this shape."""
    return _validate(model, dict(form.texts))


def _validate(model: type[M], table: dict[str, Any]) -> M:
    try:
        return model.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    known = model.model_fields
    place = next((str(part) for part in first["loc"][:1] if part in known), None)
    why = "a field is unknown" if place is None else f"{place}: {first['type'].replace('_', ' ')}"
    raise ApiError(422, "bad-fields", f"{why}; fields are {_join_names(known)}")


async def _sort_parts(items: Iterable[tuple[str, Any]], known: set[str]) -> tuple[dict[str, str], list[bytes]]:
    """Texts by name and pictures in order."""
    found: dict[str, str] = {}
    files: list[bytes] = []
    for name, value in items:
        if isinstance(value, UploadFile) and name == "image":
            files.append(await value.read())
        elif isinstance(value, str) and name in known and name not in found:
            found[name] = value
        else:
            raise ApiError(
                422, "bad-fields", f"pictures are files named image; fields, once each: {_join_names(known)}"
            )
    return found, files


async def read_form(headers: Headers, body: bytes, limits: Limits, *, texts: Iterable[str], pictures: int) -> Form:
    """A multipart body of at most these texts and so many parts named ``image``."""

    async def stream() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), 1 << 16):
            await asyncio.sleep(0)  # other requests have their turn: the parser itself waits for nothing
            yield body[start : start + (1 << 16)]

    parser = MultiPartParser(
        headers, stream(), max_files=limits.parts, max_fields=limits.parts, max_part_size=limits.field
    )
    parser.spool_max_size = limits.body + 1  # pictures of people stay in memory: nothing goes to a temporary file
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        if "Too many" in error.message or "exceeded" in error.message:
            raise ApiError(413, "too-many-parts", "the body has too many parts or too long a field") from None
        raise ApiError(400, "bad-form", "the body is not multipart/form-data as its header says") from None
    except (ValueError, LookupError, AttributeError):
        raise ApiError(400, "bad-form", "the body is not multipart/form-data as its header says") from None
    try:
        found, files = await _sort_parts(parsed.multi_items(), set(texts))
    finally:
        await parsed.close()
    if not 1 <= len(files) <= pictures:
        raise ApiError(422, "bad-fields", f"send 1 to {pictures} pictures as files named image")
    return Form(found, tuple(files))


def check_image_format(picture: bytes) -> None:
    """Refuse what does not begin like one of the kinds of picture that are taken."""
    if not _match_signature(picture, _ACCEPTED):
        taken = ", ".join(kind for kind, _, _ in _ACCEPTED)
        found = _match_signature(picture, _RECOGNIZED) or "none of them"
        raise ApiError(415, "image-format", f"pictures are {taken}, and this is {found}: save it as one of them")


def to_picture_error(error: DataError, limits: Limits) -> ApiError:
    """What a client may know about a picture that cannot be decoded."""
    said = str(error)
    if isinstance(error, ReaderLimitExceeded):
        most = f"{limits.read_seconds:g} s and {limits.read_megabytes} MB"
        why = f"decoding a picture takes more time or memory than it may ({most}): make it smaller, or save it anew"
        return ApiError(413, "too-costly", why)
    if "more than the limit" in said:
        most = f"a picture has at most {limits.pixels} pixels, and this has more: make it smaller"
        return ApiError(413, "too-many-pixels", most)
    # What is wrong with the client's own bytes is theirs to know; what Pillow says of it, in brackets, is not.
    why = said.removeprefix("cannot decode a picture: ").partition(" (")[0]
    return ApiError(422, "bad-image", f"a picture cannot be read: {why[:80]}; save it anew, or send another")


def _match_signature(content: bytes, kinds: Iterable[tuple[str, int, bytes]]) -> str:
    """Which of these kinds begins so; empty: none."""
    return next((kind for kind, at, start in kinds if content[at : at + len(start)] == start), "")


def check_embedding(numbers: Iterable[float], dim: int) -> np.ndarray:
    """An embedding of this gallery's dimension, with a direction."""
    array = np.asarray(list(numbers), dtype=np.float64)
    if array.shape != (dim,) or not np.isfinite(array).all() or not np.abs(array).max() > 1e-30:
        raise ApiError(422, "bad-embedding", f"an embedding is {dim} numbers, not all zero")
    return (array / np.abs(array).max()).astype(np.float32)


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
