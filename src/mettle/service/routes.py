"""The routes of the service and who may call each of them: read the body within limits, work in a thread, answer."""

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
from mettle.service.app import ServiceContext
from mettle.service.auth import COOKIE, SESSION_SECONDS, Key
from mettle.service.errors import ApiError, unknown_path_error
from mettle.service.rate_limits import charge_identify_quota, limit_attempts
from mettle.service.request_body import body_kind, check_embedding, read_form, read_json, read_texts
from mettle.service.worker_pool import ReadinessProbe

ANY = "any"  # any key will do
PUBLIC = ""  # none is needed
SIGN_IN = "/workbench/session"
MOUNTED = "/workbench/{page}"  # what other routers answer, all under one policy
_READING = ("GET", "HEAD")


@dataclass(frozen=True)
class RoutePolicy:
    """A route and the scope that each of its methods wants."""

    route: str
    scopes: Mapping[str, str]  # method -> scope
    cookie: bool = False  # a browser session may come here

    @property
    def whole(self) -> bool:
        """Whether it shows the whole gallery: then it wants the scope ``workbench`` too, and no key of a tenant."""
        return self.route.startswith("/workbench/")


class RouteTable:
    """The routes of the service, each with who may call it: the gate lets nobody to any other."""

    def __init__(self):
        self.router = APIRouter()
        self.policies: dict[str, RoutePolicy] = {}

    def add(self, method: str, path: str, scope: str, *, cookie: bool = False, **options: Any) -> Callable:
        """Decorate the function that answers, and say who may call it."""
        self.allow(path, {method: scope}, cookie=cookie)
        return self.router.api_route(path, methods=[method], **options)

    def allow(self, path: str, scopes: Mapping[str, str], *, cookie: bool = False) -> None:
        """Say who may call a route that is answered elsewhere."""
        known = self.policies.get(path)
        self.policies[path] = RoutePolicy(path, {**(known.scopes if known else {}), **scopes}, cookie)

    def find_policy(self, path: str) -> RoutePolicy | None:
        """The policy of the route that a path leads to; None where there is no such route."""
        if path in self.policies and "{" not in path:
            return self.policies[path]
        if path == "/workbench":
            return self.policies[MOUNTED]
        starts = {route.partition("{")[0]: route for route in self.policies if "{" in route}
        return next((self.policies[route] for start, route in starts.items() if path.startswith(start)), None)


def build_routes(context: ServiceContext, app: FastAPI, *, workbench: bool) -> RouteTable:
    """Everything that the service answers."""
    table = RouteTable()
    _add_api_routes(table, context)
    _add_page_routes(table, context, app, workbench=workbench)
    return table


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


def _add_api_routes(table: RouteTable, context: ServiceContext) -> None:
    dim = context.gallery.binding.dim

    def post(
        name: str,
        answer: type[BaseModel],
        question: Shape,
        form: Shape,
        *also: int,
        cookie: bool = False,
        **options: Any,
    ):
        extra = {"requestBody": _request_body(context, question, form if context.pictures else None)}
        options |= {"openapi_extra": extra, "responses": error_responses(*_BODY, *also), "response_model": answer}
        return table.add("POST", f"/v1/{name}", name, cookie=cookie, **options)

    @post("verify", schemas.VerifyAnswer, schemas.VerifyQuestion, schemas.VerifyForm, cookie=True)
    async def verify(request: Request):
        """Is this probe who it claims to be? Give an identity and one picture or one embedding."""
        asked, probe = await _read_question(
            request, context, schemas.VerifyQuestion, schemas.VerifyForm, 1, _read_embedding(dim)
        )
        key = _caller_key(request)
        limit_attempts(request, context, key, "verify", asked.identity)
        return await context.pool.run(lambda: matching.verify(context, key, asked.identity, probe()[0]))

    @post("identify", schemas.IdentifyAnswer, schemas.IdentifyQuestion, schemas.IdentifyForm, cookie=True)
    async def identify(request: Request):
        """Who is this? The best candidates, and "no match" where none reaches the threshold."""
        asked, probe = await _read_question(
            request, context, schemas.IdentifyQuestion, schemas.IdentifyForm, 1, _read_embedding(dim)
        )
        key = _caller_key(request)
        charge_identify_quota(context, key)
        return await context.pool.run(lambda: matching.identify(context, key, probe()[0], asked.k))

    @post("enrol", schemas.ChangeAnswer, schemas.Enrolment, schemas.EnrolForm, 409)
    async def enrol(request: Request):
        """Add templates to an identity, or replace its former ones. Acknowledged means on disk."""
        most = context.limits.templates
        read = _read_embeddings(dim, most)
        asked, templates = await _read_question(request, context, schemas.Enrolment, schemas.EnrolForm, most, read)
        key = _caller_key(request)
        limit_attempts(request, context, key, "enrol", asked.identity)
        return await context.pool.run(
            lambda: matching.enrol(context, key, asked.identity, templates(), asked.request, asked.replace)
        )

    @post("delete", schemas.ChangeAnswer, schemas.Deletion, None, 404)
    async def delete(request: Request):
        """Forget an identity: no answer names it from now on."""
        if body_kind(request.headers) != "json":
            raise ApiError(415, "media-type", "send application/json")
        asked = read_json(schemas.Deletion, await request.body())
        return await _delete(request, context, asked.identity, asked.request)

    @table.add(
        "DELETE",
        "/v1/identities/{identity}",
        "delete",
        response_model=schemas.ChangeAnswer,
        responses=error_responses(401, 403, 404, 421, 422, 429, 503),
    )
    async def delete_identity(request: Request, identity: str):
        """Forget the identity that stands, percent-encoded, in the path."""
        raw = request.scope.get("raw_path", b"").partition(b"?")[0].partition(b"/v1/identities/")[2]
        try:
            name = unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            raise ApiError(422, "bad-fields", "identity: not UTF-8") from None
        if not 1 <= len(name) <= schemas.IDENTITY:
            raise ApiError(422, "bad-fields", f"identity: 1 to {schemas.IDENTITY} characters")
        return await _delete(request, context, name, None)

    @post("embed", schemas.EmbedAnswer, None, schemas.EmbedForm, include_in_schema=context.pictures)
    async def embed(request: Request):
        """Embeddings of pictures: whoever has them can compare people elsewhere, so few keys may ask."""
        if body_kind(request.headers) != "form":
            raise ApiError(415, "media-type", "send multipart/form-data with pictures")
        form = await read_form(
            request.headers, await request.body(), context.limits, texts=(), pictures=context.limits.templates
        )
        key = _caller_key(request)
        return await context.pool.run(lambda: matching.embed(context, key, form.pictures))

    @table.add(
        "GET",
        "/v1/info",
        ANY,
        cookie=True,
        response_model=schemas.InfoAnswer,
        responses=error_responses(401, 403, 421, 429, 503),
    )
    async def info(request: Request):
        """What this service takes, at which threshold it answers, and what the key may do."""
        key = _caller_key(request)
        return await context.pool.run(lambda: matching.info(context, key))


async def _read_question(
    request: Request,
    context: ServiceContext,
    question: type[BaseModel],
    form: type[BaseModel],
    pictures: int,
    vectors: Callable[[Any], np.ndarray],
) -> tuple[Any, Callable[[], np.ndarray]]:
    """The fields, and a function that makes the (n, dim) embeddings: from pictures that is work for a thread."""
    body = await request.body()
    if body_kind(request.headers) == "json":
        asked = read_json(question, body)
        given = vectors(asked)
        return asked, lambda: given
    parts = await read_form(request.headers, body, context.limits, texts=form.model_fields, pictures=pictures)
    return read_texts(form, parts), partial(matching.embed_images, context, parts.pictures)


def _read_embedding(dim: int) -> Callable[[Any], np.ndarray]:
    return lambda asked: check_embedding(asked.embedding, dim)[None]


def _read_embeddings(dim: int, most: int) -> Callable[[Any], np.ndarray]:
    def read(asked: Any) -> np.ndarray:
        if len(asked.embeddings) > most:
            raise ApiError(422, "bad-fields", f"embeddings: at most {most} in one enrolment")
        return np.stack([check_embedding(numbers, dim) for numbers in asked.embeddings])

    return read


async def _delete(request: Request, context: ServiceContext, identity: str, name: str | None) -> schemas.ChangeAnswer:
    key = _caller_key(request)
    limit_attempts(request, context, key, "delete", identity)
    return await context.pool.run(lambda: matching.delete(context, key, identity, name))


def _caller_key(request: Request) -> Key:
    return request.scope["state"]["key"]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals that a route documents."""
    return {status: {"model": schemas.ErrorAnswer, "description": ERRORS[status]} for status in statuses}


def _request_body(
    context: ServiceContext, question: type[BaseModel] | None, form: type[BaseModel] | None
) -> dict[str, Any]:
    """What a route takes, for OpenAPI, with this gallery's dimension and limits in it."""
    content: dict[str, Any] = {}
    shape: dict[str, Any]
    if question is not None:
        shape, dim = question.model_json_schema(), context.gallery.binding.dim
        exact = {"minItems": dim, "maxItems": dim}
        if "embedding" in shape["properties"]:
            shape["properties"]["embedding"] |= exact
        if "embeddings" in shape["properties"]:
            shape["properties"]["embeddings"] |= {"maxItems": context.limits.templates}
            shape["properties"]["embeddings"]["items"] |= exact
        content["application/json"] = {"schema": shape}
    if form is not None:
        shape = {**form.model_json_schema(), "additionalProperties": False}
        picture = {"type": "string", "format": "binary", "description": "A JPEG, PNG or WebP file; repeatable."}
        shape["properties"] = {**shape.get("properties", {}), "image": picture}
        shape["required"] = [*shape.get("required", []), "image"]
        content["multipart/form-data"] = {"schema": shape}
    return {"required": True, "content": content}


def _add_page_routes(table: RouteTable, context: ServiceContext, app: FastAPI, *, workbench: bool) -> None:
    """Health, metrics, the reference page, sign-in, and what is mounted below /workbench."""
    health = ReadinessProbe(context)
    table.allow(MOUNTED, dict.fromkeys((*_READING, "POST"), "workbench"), cookie=True)
    unready = error_responses(421) | {
        503: {"model": schemas.HealthAnswer, "description": "The gallery does not answer."}
    }
    _register_gauges(context)

    @table.add("GET", "/health", PUBLIC, response_model=schemas.HealthAnswer, responses=unready)
    async def read_health() -> Response:
        """Live: the process answers. Ready: so do the gallery, the audit log and whatever decodes pictures."""
        ready = await health.ready()
        return JSONResponse({"live": True, "ready": ready}, status_code=200 if ready else 503)

    @table.add("GET", "/metrics", "metrics", response_class=PlainTextResponse, responses=error_responses(401, 403, 421))
    async def read_metrics() -> Response:
        """Counters in the text format of Prometheus, for keys with the scope and for this machine."""
        text = await asyncio.to_thread(context.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @table.add("GET", "/openapi.json", PUBLIC, include_in_schema=False)
    async def read_schema() -> Response:
        return JSONResponse(_openapi_schema(app))

    @table.add("GET", "/docs", PUBLIC, include_in_schema=False)
    async def read_reference() -> Response:
        return HTMLResponse(pages.reference_page(_openapi_schema(app)))

    @table.add("GET", "/sign-in.js", PUBLIC, include_in_schema=False)
    async def read_script() -> Response:
        return Response(pages.SIGN_IN_SCRIPT, media_type="text/javascript")

    @table.add("GET", "/", PUBLIC, include_in_schema=False)
    async def start() -> Response:
        return RedirectResponse("/workbench/" if workbench else "/docs", status_code=303)

    @table.add("POST", SIGN_IN, "workbench", cookie=True, include_in_schema=False)
    async def sign_in(request: Request) -> Response:
        answer = JSONResponse({"seconds": SESSION_SECONDS})
        key = request.scope["state"]["key"]
        if context.keys is not None:
            secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
            answer.set_cookie(
                COOKIE,
                context.sessions.open(key.id),
                SESSION_SECONDS,
                path="/",
                secure=secure,
                httponly=True,
                samesite="strict",
            )
        return answer

    @table.add("DELETE", SIGN_IN, "workbench", cookie=True, include_in_schema=False)
    async def sign_out(request: Request) -> Response:
        context.sessions.drop(request.cookies.get(COOKIE, ""))
        answer = JSONResponse({"seconds": 0})
        answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return answer


def install_error_handlers(app: FastAPI) -> None:
    """Whatever a router refuses by itself leaves in the shape that every refusal has."""

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> Response:
        said = _one_line(error)
        if error.status_code == 404:
            raise ApiError(404, "not-found", said) if said else unknown_path_error()
        if 400 <= error.status_code < 500:
            raise ApiError(error.status_code, "refused", said or "the request cannot be served")
        raise ApiError(503, "unavailable", "the service cannot do this now", retry_after=60)

    @app.exception_handler(RequestValidationError)
    async def misfit(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        policy, *name = first["loc"]
        if policy in ("query", "path") and name:  # names that a route gave to its own parameters
            raise ApiError(422, "bad-fields", f"{name[0]} does not fit: {first['type'].replace('_', ' ')}")
        raise ApiError(422, "bad-fields", "a field does not fit")


def _one_line(error: HTTPException) -> str:
    """What a route says to its client, in one line; empty where only the framework speaks, which names the status."""
    told = " ".join(error.detail.split()) if isinstance(error.detail, str) else ""
    return "" if told in {status.phrase for status in HTTPStatus} else told[:190]


def _register_gauges(context: ServiceContext) -> None:
    def identities() -> float:
        try:
            return float(len(context.gallery))
        except Exception:  # a gallery that is away has no size now; the other numbers are still wanted
            return float("nan")

    context.metrics.add_gauge("mettle_identities", "Identities that are enrolled.", identities)
    context.metrics.add_gauge(
        "mettle_pending", "Requests in threads or waiting for one.", lambda: float(context.pool.pending)
    )


def _openapi_schema(app: FastAPI) -> dict[str, Any]:
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
