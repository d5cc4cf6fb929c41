"""What all parts of one service share; `build_context` puts it together around a gallery."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.data.reader_pool import ReaderLimits, ReaderPool
from mettle.errors import InputError, MissingExtra
from mettle.service.audit_log import AuditLog
from mettle.service.auth import Keys, Sessions
from mettle.service.handlers import ConfiguredThreshold
from mettle.service.rate_limits import Limits, RateLimiter
from mettle.service.worker_pool import WorkerPool

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from mettle.gallery.gallery import Gallery
    from mettle.service.metrics import ServiceMetrics
    from mettle.train.run_folder import RunFolder


def _create_metrics() -> "ServiceMetrics":
    from mettle.service.metrics import ServiceMetrics  # its library comes with the extra ``app``

    return ServiceMetrics()


@dataclass(frozen=True)
class ServiceContext:
    """One service."""

    gallery: "Gallery"
    runs: "Sequence[RunFolder]"
    keys: Keys | None  # None: whoever uses this machine may do everything, and nobody else anything
    limits: Limits
    audit_log: AuditLog | None
    hosts: frozenset[str]
    threshold: ConfiguredThreshold  # where answers are given
    pictures: bool  # whether the gallery's model takes pictures
    pool: WorkerPool
    readers: ReaderPool  # the processes that decode pictures
    per_key: RateLimiter
    per_target: RateLimiter
    identify_daily: RateLimiter
    refusals: RateLimiter
    metrics: "ServiceMetrics" = field(default_factory=_create_metrics)
    sessions: Sessions = field(default_factory=Sessions)


def build_context(
    gallery: "Gallery",
    limits: Limits,
    threshold: ConfiguredThreshold,
    *,
    runs: "Sequence[RunFolder]" = (),
    keys: Keys | None = None,
    audit_log: AuditLog | None = None,
    hosts: Iterable[str] = (),
) -> ServiceContext:
    """A service at its start: nobody has asked for anything yet."""
    return ServiceContext(
        gallery=gallery,
        runs=tuple(runs),
        keys=keys,
        limits=limits,
        audit_log=audit_log,
        hosts=frozenset(hosts),
        threshold=threshold,
        pictures=_takes_pictures(gallery),
        pool=WorkerPool(limits.workers, limits.queue, limits.work_seconds),
        readers=ReaderPool(
            limits.workers, ReaderLimits(limits.read_seconds, limits.read_megabytes, pixels=limits.pixels)
        ),
        per_key=RateLimiter(limits.per_key),
        per_target=RateLimiter(limits.per_target),
        identify_daily=RateLimiter(limits.identify_daily),
        refusals=RateLimiter(limits.refusals, most=1),
    )


def _takes_pictures(gallery: "Gallery") -> bool:
    try:
        return gallery.run.contract()["input"]["kind"] == "image"
    except InputError:  # embeddings from elsewhere
        return False


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
    audit_log: AuditLog | Path | str | None = None,
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
        audit_log: Where the audit audit_log is written; None keeps none.
        routers: More routes; those below /workbench can be reached, with the scope of that name.
        hosts: Names that the service goes by, besides those of this machine.
        far: False-accept rate to answer at; the gallery's default otherwise.
        threshold: Threshold to answer at, whatever rate that is.
    """
    try:
        import prometheus_client  # noqa: F401
        from fastapi import FastAPI
        from python_multipart import MultipartParser  # noqa: F401  (pictures come as multipart)
    except ImportError:
        raise MissingExtra("the service needs FastAPI: pip install 'mettle-ml[app]'") from None
    from mettle.service.handlers import ConfiguredThreshold
    from mettle.service.middleware import GateMiddleware, host_name
    from mettle.service.routes import build_routes, install_error_handlers

    limits = limits or Limits()
    if "*" in hosts:
        raise InputError("hosts must be names that this service goes by, such as match.example.org: '*' is any name")
    gallery.decision_threshold(far=far, threshold=threshold)  # a point that it does not have is said now
    context = build_context(
        gallery,
        limits,
        ConfiguredThreshold(gallery, far, threshold),
        runs=runs,
        keys=Keys(keys) if isinstance(keys, Path | str) else keys,
        audit_log=AuditLog(audit_log) if isinstance(audit_log, Path | str) else audit_log,
        hosts=(host_name(name) for name in (*LOCAL, *hosts)),
    )

    @asynccontextmanager
    async def lifespan(_: Any):
        if context.pictures:
            await asyncio.to_thread(context.readers.start)
        yield
        context.readers.close()  # first, so that no thread waits for a picture
        await asyncio.to_thread(context.pool.close)
        if context.audit_log is not None and context.audit_log is not audit_log:
            context.audit_log.close()

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
    table = build_routes(context, app, workbench=bool(routers))
    app.include_router(table.router)
    for router in routers:
        app.include_router(router, include_in_schema=False)
    install_error_handlers(app)
    app.add_middleware(GateMiddleware, context=context, routes=table)
    app.state.mettle, app.state.policies = context, table.policies
    return app
