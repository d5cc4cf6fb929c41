"""The routes below /v1: read the body within limits, do the work in a thread, answer."""

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from mettle.service import matching, schemas
from mettle.service.keys import Key
from mettle.service.refusal import Refusal
from mettle.service.state import State
from mettle.service.turns import one_identification, try_at
from mettle.service.uploads import kind, read_form, read_json, read_texts, vector

Shape = type[BaseModel] | None
ERRORS = {
    400: "The body is not what its header says.",
    401: "No valid key.",
    403: "The key does not have the scope, or the request comes from another site.",
    404: "Nobody of that name is enrolled.",
    408: "The body arrived too slowly.",
    409: "Quarantined: a template matches too many other identities.",
    413: "The body, a picture or the number of parts is too large.",
    415: "Not JSON or multipart, or a picture that is not JPEG, PNG or WebP.",
    421: "The service does not go by that name.",
    422: "A field, an embedding or a picture does not fit.",
    429: "Too often; Retry-After says when to come back.",
    503: "The gallery does not answer, or too many requests wait. Nothing was accepted.",
}
_BODY = (400, 401, 403, 408, 413, 415, 421, 422, 429, 503)


def routes(state: State) -> APIRouter:
    """All routes of the API."""
    router = APIRouter(prefix="/v1")
    dim = state.gallery.binding.dim

    def post(path: str, answer: type[BaseModel], question: Shape, form: Shape, *also: int, **more: Any):
        extra = {"requestBody": _request_body(state, question, form if state.pictures else None)}
        return router.post(path, response_model=answer, openapi_extra=extra, responses=errors(*_BODY, *also), **more)

    @post("/verify", schemas.VerifyAnswer, schemas.VerifyQuestion, schemas.VerifyForm)
    async def verify(request: Request):
        """Is this probe who it claims to be? Give an identity and one picture or one embedding."""
        asked, probe = await _read(request, state, schemas.VerifyQuestion, schemas.VerifyForm, 1, _embedding(dim))
        key = _key(request)
        try_at(request, state, key, "verify", asked.identity)
        return await state.pool.run(lambda: matching.verify(state, key, asked.identity, probe()[0]))

    @post("/identify", schemas.IdentifyAnswer, schemas.IdentifyQuestion, schemas.IdentifyForm)
    async def identify(request: Request):
        """Who is this? The best candidates, and "no match" where none reaches the threshold."""
        asked, probe = await _read(request, state, schemas.IdentifyQuestion, schemas.IdentifyForm, 1, _embedding(dim))
        key = _key(request)
        one_identification(state, key)
        return await state.pool.run(lambda: matching.identify(state, key, probe()[0], asked.k))

    @post("/enrol", schemas.ChangeAnswer, schemas.Enrolment, schemas.EnrolForm, 409)
    async def enrol(request: Request):
        """Add templates to an identity, or replace its former ones. Acknowledged means on disk."""
        most = state.limits.templates
        read = _embeddings(dim, most)
        asked, templates = await _read(request, state, schemas.Enrolment, schemas.EnrolForm, most, read)
        key = _key(request)
        try_at(request, state, key, "enrol", asked.identity)
        return await state.pool.run(
            lambda: matching.enrol(state, key, asked.identity, templates(), asked.request, asked.replace)
        )

    @post("/delete", schemas.ChangeAnswer, schemas.Deletion, None, 404)
    async def delete(request: Request):
        """Forget an identity: no answer names it from now on."""
        if kind(request.headers) != "json":
            raise Refusal(415, "media-type", "send application/json")
        asked = read_json(schemas.Deletion, await request.body())
        return await _delete(request, state, asked.identity, asked.request)

    @router.delete(
        "/identities/{identity}",
        response_model=schemas.ChangeAnswer,
        responses=errors(401, 403, 404, 421, 422, 429, 503),
    )
    async def delete_identity(request: Request, identity: str):
        """Forget the identity that stands, percent-encoded, in the path."""
        raw = request.scope.get("raw_path", b"").partition(b"?")[0].partition(b"/v1/identities/")[2]
        try:
            name = unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            raise Refusal(422, "bad-fields", "identity: not UTF-8") from None
        if not 1 <= len(name) <= schemas.IDENTITY:
            raise Refusal(422, "bad-fields", f"identity: 1 to {schemas.IDENTITY} characters")
        return await _delete(request, state, name, None)

    @post("/embed", schemas.EmbedAnswer, None, schemas.EmbedForm, include_in_schema=state.pictures)
    async def embed(request: Request):
        """Embeddings of pictures: whoever has them can compare people elsewhere, so few keys may ask."""
        if kind(request.headers) != "form":
            raise Refusal(415, "media-type", "send multipart/form-data with pictures")
        form = await read_form(
            request.headers, await request.body(), state.limits, texts=(), pictures=state.limits.templates
        )
        key = _key(request)
        return await state.pool.run(lambda: matching.embed(state, key, form.pictures))

    @router.get("/info", response_model=schemas.InfoAnswer, responses=errors(401, 403, 421, 429, 503))
    async def info(request: Request):
        """What this service takes, at which threshold it answers, and what the key may do."""
        key = _key(request)
        return await state.pool.run(lambda: matching.info(state, key))

    return router


async def _read(
    request: Request,
    state: State,
    question: type[BaseModel],
    form: type[BaseModel],
    pictures: int,
    vectors: Callable[[Any], np.ndarray],
) -> tuple[Any, Callable[[], np.ndarray]]:
    """The fields, and a function that makes the (n, dim) embeddings: from pictures that is work for a thread."""
    body = await request.body()
    if kind(request.headers) == "json":
        asked = read_json(question, body)
        given = vectors(asked)
        return asked, lambda: given
    parts = await read_form(request.headers, body, state.limits, texts=form.model_fields, pictures=pictures)
    return read_texts(form, parts), partial(matching.embedded, state, parts.pictures)


def _embedding(dim: int) -> Callable[[Any], np.ndarray]:
    return lambda asked: vector(asked.embedding, dim)[None]


def _embeddings(dim: int, most: int) -> Callable[[Any], np.ndarray]:
    def read(asked: Any) -> np.ndarray:
        if len(asked.embeddings) > most:
            raise Refusal(422, "bad-fields", f"embeddings: at most {most} in one enrolment")
        return np.stack([vector(numbers, dim) for numbers in asked.embeddings])

    return read


async def _delete(request: Request, state: State, identity: str, name: str | None) -> schemas.ChangeAnswer:
    key = _key(request)
    try_at(request, state, key, "delete", identity)
    return await state.pool.run(lambda: matching.delete(state, key, identity, name))


def _key(request: Request) -> Key:
    return request.scope["state"]["key"]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals that a route documents."""
    return {status: {"model": schemas.ErrorAnswer, "description": ERRORS[status]} for status in statuses}


def _request_body(state: State, question: type[BaseModel] | None, form: type[BaseModel] | None) -> dict[str, Any]:
    """What a route takes, for OpenAPI, with this gallery's dimension and limits in it."""
    content: dict[str, Any] = {}
    shape: dict[str, Any]
    if question is not None:
        shape, dim = question.model_json_schema(), state.gallery.binding.dim
        exact = {"minItems": dim, "maxItems": dim}
        if "embedding" in shape["properties"]:
            shape["properties"]["embedding"] |= exact
        if "embeddings" in shape["properties"]:
            shape["properties"]["embeddings"] |= {"maxItems": state.limits.templates}
            shape["properties"]["embeddings"]["items"] |= exact
        content["application/json"] = {"schema": shape}
    if form is not None:
        shape = {**form.model_json_schema(), "additionalProperties": False}
        picture = {"type": "string", "format": "binary", "description": "A JPEG, PNG or WebP file; repeatable."}
        shape["properties"] = {**shape.get("properties", {}), "image": picture}
        shape["required"] = [*shape.get("required", []), "image"]
        content["multipart/form-data"] = {"schema": shape}
    return {"required": True, "content": content}
