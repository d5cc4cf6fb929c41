"""Try a picture on the gallery: who is it, or is it who it claims to be?

The picture is the body of the request, as it is; its bytes are counted while they arrive.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from mettle.errors import MettleError, UnknownIdentity
from mettle.match.answer import Identified, Verified
from mettle.service.limits import Limits
from mettle.service.point import Point, nobody
from mettle.service.refusal import Refusal, translated
from mettle.service.uploads import pixels

if TYPE_CHECKING:
    from mettle.match.gallery import Gallery


def live(
    gallery: "Gallery",
    headers: dict[str, str],
    far: float | None = None,
    threshold: float | None = None,
    limits: Limits | None = None,
) -> APIRouter:
    """Routes that answer from a gallery, at the operating point and within the limits that the service has."""
    router, limits, point = APIRouter(), limits or Limits(), Point(gallery, far, threshold)
    hands = asyncio.Semaphore(limits.workers)  # a decoded picture is large: few at once

    async def answer(ask: Callable[[], dict[str, Any]]) -> Response:
        try:
            async with hands:
                return JSONResponse(await run_in_threadpool(ask), headers=headers)
        except (MettleError, Refusal) as error:  # who tries pictures need not see what the gallery says about itself
            refusal = error if isinstance(error, Refusal) else translated(error)
            return JSONResponse({"error": refusal.message}, refusal.status, headers)

    @router.post("/api/identify")
    async def identify(request: Request, k: Annotated[int, Query(ge=1, le=100)] = 5) -> Response:
        content = await _picture(request, limits.body)

        def ask() -> dict[str, Any]:
            return identified(point.ask(gallery.identify, pixels(content, limits), k=k))

        return await answer(ask)

    @router.post("/api/verify")
    async def verify(request: Request, identity: Annotated[str, Query(min_length=1, max_length=1000)]) -> Response:
        content, key = await _picture(request, limits.body), getattr(request.state, "key", None)
        shy = key is not None and not key.allows("identify")  # as in the API: it learns from no miss

        def ask() -> dict[str, Any]:
            at = point.now()  # asked for always: a name that is nobody's takes no longer
            try:
                return verified(point.ask(gallery.verify, identity, pixels(content, limits)), shy)
            except UnknownIdentity:
                if not shy:
                    raise
                return verified(nobody(identity, at), shy)

        return await answer(ask)

    return router


def identified(found: Identified) -> dict[str, Any]:
    """An answer as plain values."""
    return {
        "verdict": found.verdict,
        "match": found.match,
        "threshold": found.threshold,
        "far": found.far,
        "per": found.per,
        "strangers": found.false_matches,
        "candidates": [vars(c) for c in found.candidates],
    }


def verified(found: Verified, shy: bool = False) -> dict[str, Any]:
    """An answer as plain values; ``shy``: of a miss only that it is one."""
    told = {"score": found.score, "templates": found.templates, "strangers": found.false_accepts}
    if shy and not found.match:
        told = dict.fromkeys(told)
    point = {"threshold": found.threshold, "far": found.far, "per": found.per}
    return {"verdict": found.verdict, "identity": found.identity, "match": found.match, **point, **told}


async def _picture(request: Request, most: int) -> bytes:
    """The body, unless it is no picture by its type or too large; a form of another site cannot send such a type."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("image/") and kind != "application/octet-stream":
        raise HTTPException(415, "send a picture as the body of the request, with its own content type")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise HTTPException(413, f"the picture is larger than {most >> 20} MiB")
    return bytes(content)
