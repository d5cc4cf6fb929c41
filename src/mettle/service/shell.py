"""The routes around the API: health, metrics, the reference page, sign-in."""

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from mettle.service import pages, schemas
from mettle.service.api import errors
from mettle.service.health import Health
from mettle.service.refusal import Refusal, unknown_path
from mettle.service.sessions import COOKIE, SECONDS
from mettle.service.state import State


def routes(state: State, app: FastAPI, *, workbench: bool) -> APIRouter:
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
        answer = JSONResponse({"seconds": SECONDS})
        key = request.scope["state"]["key"]
        if state.keys is not None:
            secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https:")
            answer.set_cookie(
                COOKIE, state.sessions.open(key.id), SECONDS, path="/", secure=secure, httponly=True, samesite="strict"
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
