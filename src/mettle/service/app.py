"""One service: a gallery behind a door, with routes, and whatever else is mounted."""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.errors import InputError, MissingExtra
from mettle.service.keys import Keys
from mettle.service.limits import Limits
from mettle.service.trail import Trail

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from mettle.gallery.gallery import Gallery
    from mettle.train.run_folder import RunFolder

LOCAL = ("localhost", "127.0.0.1", "[::1]")
ABOUT = (
    "Verify, identify, enrol and delete. Every answer carries the score, the threshold, the false-accept rate that it "
    "stands for (per comparison, or per person where the gallery is calibrated), and the verdict; without a threshold "
    'that was measured or given it is "not calibrated", never a match. Keys go into the Authorization header.'
)


def create_app(
    gallery: "Gallery",
    *,
    runs: "Sequence[RunFolder]" = (),
    keys: Keys | Path | str | None = None,
    limits: Limits | None = None,
    trail: Trail | Path | str | None = None,
    routers: "Sequence[APIRouter]" = (),
    hosts: Sequence[str] = (),
    far: float | None = None,
    threshold: float | None = None,
) -> "FastAPI":
    """Build the service.

    Args:
        gallery: Who is enrolled. It stays the caller's to close.
        runs: Runs whose names the service tells.
        keys: The file of keys; None serves the users of this machine, and nobody else.
        limits: How much a client may ask for.
        trail: Where the audit trail is written; None keeps none.
        routers: More routes; those below /workbench can be reached, with the scope of that name.
        hosts: Names that the service goes by, besides those of this machine.
        far: False-accept rate to answer at; the gallery's default otherwise.
        threshold: Threshold to answer at, whatever rate that is.
    """
    try:
        from fastapi import FastAPI
        from python_multipart import MultipartParser  # noqa: F401  (pictures come as multipart)
    except ImportError:
        raise MissingExtra("the service needs FastAPI: pip install fastapi uvicorn python-multipart") from None
    from mettle.service import api, shell
    from mettle.service.door import Door
    from mettle.service.origin import host_name
    from mettle.service.point import Point
    from mettle.service.state import stand

    limits = limits or Limits()
    if "*" in hosts:
        raise InputError("hosts must be names that this service goes by, such as match.example.org: '*' is any name")
    gallery.operating(far=far, threshold=threshold)  # a point that it does not have is said now
    state = stand(
        gallery,
        limits,
        Point(gallery, far, threshold),
        runs=runs,
        keys=Keys(keys) if isinstance(keys, Path | str) else keys,
        trail=Trail(trail) if isinstance(trail, Path | str) else trail,
        hosts=(host_name(name) for name in (*LOCAL, *hosts)),
    )

    @asynccontextmanager
    async def lifespan(_: Any):
        yield
        await asyncio.to_thread(state.pool.close)
        if state.trail is not None and state.trail is not trail:
            state.trail.close()

    app = FastAPI(
        title="mettle",
        description=ABOUT,
        version="1",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(api.routes(state))
    app.include_router(shell.routes(state, app, workbench=bool(routers)))
    for router in routers:
        app.include_router(router, include_in_schema=False)
    shell.refuse_alike(app)
    app.add_middleware(Door, state=state)
    app.state.mettle = state
    return app
