"""Every place of the service, who may go there, and how; what is not listed here does not exist."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from mettle.service import handlers as matching
from mettle.service import html_pages as pages
from mettle.service import schemas
from mettle.service.app import State
from mettle.service.auth import COOKIE, SESSION_SECONDS, Key
from mettle.service.errors import Refusal, unknown_path
from mettle.service.rate_limits import one_identification, try_at
from mettle.service.request_body import kind, read_form, read_json, read_texts, vector
from mettle.service.worker_pool import Health

ANY = "any"  # any key will do
PUBLIC = ""  # none is needed
SIGN_IN = "/workbench/session"


@dataclass(frozen=True)
class Place:
    """A route and the scope that each of its methods wants."""

    route: str
    scopes: Mapping[str, str]  # method -> scope
    cookie: bool = False  # a browser session may come here

    @property
    def whole(self) -> bool:
        """Whether it shows the whole gallery: then it wants the scope ``workbench`` too, and no key of a tenant."""
        return self.route.startswith("/workbench/")


_VERBS = ("GET", "HEAD", "POST")
PLACES = {
    place.route: place
    for place in (
        Place("/", {"GET": PUBLIC}),
        Place("/health", {"GET": PUBLIC}),
        Place("/docs", {"GET": PUBLIC}),
        Place("/openapi.json", {"GET": PUBLIC}),
        Place("/sign-in.js", {"GET": PUBLIC}),
        Place("/metrics", {"GET": "metrics"}),
        Place("/v1/info", {"GET": ANY}, cookie=True),
        Place("/v1/verify", {"POST": "verify"}, cookie=True),
        Place("/v1/identify", {"POST": "identify"}, cookie=True),
        Place("/v1/enrol", {"POST": "enrol"}),
        Place("/v1/delete", {"POST": "delete"}),
        Place("/v1/identities/{identity}", {"DELETE": "delete"}),
        Place("/v1/embed", {"POST": "embed"}),
        Place(SIGN_IN, {"POST": "workbench", "DELETE": "workbench"}, cookie=True),
        Place("/workbench/api/identify", {"POST": "identify"}, cookie=True),
        Place("/workbench/api/verify", {"POST": "verify"}, cookie=True),
        Place("/workbench/{page}", dict.fromkeys(_VERBS, "workbench"), cookie=True),
    )
}
_BELOW = {"/v1/identities/": "/v1/identities/{identity}", "/workbench/": "/workbench/{page}"}


def locate(path: str) -> Place | None:
    """The place that a path leads to."""
    if path in PLACES and "{" not in path:
        return PLACES[path]
    if path == "/workbench":
        return PLACES["/workbench/{page}"]
    return next((PLACES[route] for start, route in _BELOW.items() if path.startswith(start)), None)


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


def shell_routes(state: State, app: FastAPI, *, workbench: bool) -> APIRouter:
    """Everything but /v1."""
    router, health = APIRouter(), Health(state.point)
    unready = errors(421) | {503: {"model": schemas.HealthAnswer, "description": "The gallery does not answer."}}
    _gauges(state)

    @router.get("/health", response_model=schemas.HealthAnswer, responses=unready)
    async def read_health() -> Response:
        """Live: the process answers. Ready: the gallery does."""
        ready = await health.ready()
        return JSONResponse({"live": True, "ready": ready}, status_code=200 if ready else 503)

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors(401, 403, 421))
    async def read_metrics() -> Response:
        """Counters in the text format of Prometheus, for keys with the scope and for this machine."""
        text = await asyncio.to_thread(state.counters.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/openapi.json", include_in_schema=False)
    async def read_schema() -> Response:
        return JSONResponse(_schema(app))

    @router.get("/docs", include_in_schema=False)
    async def read_reference() -> Response:
        return HTMLResponse(pages.reference(_schema(app)))

    @router.get("/sign-in.js", include_in_schema=False)
    async def read_script() -> Response:
        return Response(pages.SIGN_IN_SCRIPT, media_type="text/javascript")

    @router.get("/", include_in_schema=False)
    async def start() -> Response:
        return RedirectResponse("/workbench/" if workbench else "/docs", status_code=303)

    @router.post("/workbench/session", include_in_schema=False)
    async def sign_in(request: Request) -> Response:
        answer = JSONResponse({"seconds": SESSION_SECONDS})
        key = request.scope["state"]["key"]
        if state.keys is not None:
            secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
            answer.set_cookie(
                COOKIE,
                state.sessions.open(key.id),
                SESSION_SECONDS,
                path="/",
                secure=secure,
                httponly=True,
                samesite="strict",
            )
        return answer

    @router.delete("/workbench/session", include_in_schema=False)
    async def sign_out(request: Request) -> Response:
        state.sessions.drop(request.cookies.get(COOKIE, ""))
        answer = JSONResponse({"seconds": 0})
        answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return answer

    return router


def refuse_alike(app: FastAPI) -> None:
    """Whatever a router refuses by itself leaves in the shape that every refusal has."""

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> Response:
        said = _said(error)
        if error.status_code == 404:
            raise Refusal(404, "not-found", said) if said else unknown_path()
        if 400 <= error.status_code < 500:
            raise Refusal(error.status_code, "refused", said or "the request cannot be served")
        raise Refusal(503, "unavailable", "the service cannot do this now", retry_after=60)

    @app.exception_handler(RequestValidationError)
    async def misfit(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place, *name = first["loc"]
        if place in ("query", "path") and name:  # names that a route gave to its own parameters
            raise Refusal(422, "bad-fields", f"{name[0]} does not fit: {first['type'].replace('_', ' ')}")
        raise Refusal(422, "bad-fields", "a field does not fit")


def _said(error: HTTPException) -> str:
    """What a route says to its client, in one line; empty where only the framework speaks, which names the status."""
    told = " ".join(error.detail.split()) if isinstance(error.detail, str) else ""
    return "" if told in {status.phrase for status in HTTPStatus} else told[:190]


def _gauges(state: State) -> None:
    def identities() -> float:
        try:
            return float(len(state.gallery))
        except Exception:  # a gallery that is away has no size now; the other numbers are still wanted
            return float("nan")

    state.counters.gauge("mettle_identities", "Identities that are enrolled.", identities)
    state.counters.gauge("mettle_pending", "Requests in threads or waiting for one.", lambda: float(state.pool.pending))


def _schema(app: FastAPI) -> dict[str, Any]:
    """OpenAPI, with the key in it."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer", "description": "A key of this service."}
        for path, methods in schema["paths"].items():
            for route in methods.values():
                route["security"] = [] if path == "/health" else [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
