"""Try a picture on the gallery: who is it, or is it who it claims to be?

The picture is the body of the request, as it is; its bytes are counted while they arrive. The answers are those of the
API, from the same functions: within a service the same rates, quota, rounding and trail hold, whichever way one asks.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from mettle.errors import MettleError
from mettle.service import handlers as matching
from mettle.service.app import ServiceContext, build_context
from mettle.service.auth import ANYBODY, Key
from mettle.service.errors import ApiError, to_api_error
from mettle.service.handlers import ConfiguredThreshold
from mettle.service.rate_limits import Limits, charge_identify_quota, limit_attempts

if TYPE_CHECKING:
    from mettle.gallery.gallery import Gallery

Ask = Callable[[ServiceContext, Key, bytes], Awaitable[BaseModel]]


def live(
    gallery: "Gallery",
    headers: dict[str, str],
    far: float | None = None,
    threshold: float | None = None,
    limits: Limits | None = None,
) -> APIRouter:
    """Routes that answer from a gallery: as part of the service that mounts them, or by themselves."""
    router = APIRouter()
    alone = build_context(gallery, limits or Limits(), ConfiguredThreshold(gallery, far, threshold))

    def around(request: Request) -> tuple[ServiceContext, Key]:
        """What is shared with the rest of the service, and who asks."""
        service = _service(request)
        if service is None:
            return alone, ANYBODY
        other = gallery is not service.gallery or far is not None or threshold is not None
        threshold_ = alone.threshold if other else service.threshold
        return replace(service, gallery=gallery, pictures=alone.pictures, threshold=threshold_), request.state.key

    async def answer(request: Request, ask: Ask) -> Response:
        state, key = around(request)
        try:
            found = await ask(state, key, await _picture(request, state.limits.body))
        except (MettleError, ApiError) as error:
            if _service(request) is not None:  # its door refuses, counts and writes down
                raise
            refusal = error if isinstance(error, ApiError) else to_api_error(error)
            return JSONResponse({"error": refusal.message}, refusal.status, headers)
        return JSONResponse(found.model_dump(), headers=headers)

    @router.post("/api/identify")
    async def identify(request: Request, k: Annotated[int, Query(ge=1)] = 5) -> Response:
        async def ask(state: ServiceContext, key: Key, content: bytes) -> BaseModel:
            charge_identify_quota(state, key)
            route = "/workbench/api/identify"
            return await state.pool.run(lambda: matching.identify(state, key, _probe(state, content), k, route=route))

        return await answer(request, ask)

    @router.post("/api/verify")
    async def verify(request: Request, identity: Annotated[str, Query(min_length=1, max_length=1000)]) -> Response:
        async def ask(state: ServiceContext, key: Key, content: bytes) -> BaseModel:
            limit_attempts(request, state, key, "verify", identity)
            route = "/workbench/api/verify"
            found = await state.pool.run(
                lambda: matching.verify(state, key, identity, _probe(state, content), route=route)
            )
            if found.score is None and key.allows("identify"):  # it may see every score, and there is none of nobody
                raise ApiError(404, "unknown-identity", "nobody of that name is enrolled")
            return found

        return await answer(request, ask)

    return router


def _service(request: Request) -> ServiceContext | None:
    """The service through whose door the request came."""
    found = getattr(request.state, "mettle", None)
    return found if isinstance(found, ServiceContext) else None


def _probe(state: ServiceContext, content: bytes) -> np.ndarray:
    return matching.embed_images(state, [content])[0]


async def _picture(request: Request, most: int) -> bytes:
    """The body, unless it is no picture by its type or too large; a form of another site cannot send such a type."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("image/") and kind != "application/octet-stream":
        raise ApiError(
            415, "media-type", "this is no picture by its content type: send a picture as the body, with its own"
        )
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise ApiError(413, "too-large", f"a body has at most {most} bytes: send a smaller picture")
    return bytes(content)
