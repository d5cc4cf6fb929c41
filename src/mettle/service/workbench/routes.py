"""The workbench over HTTP: everything lies under ``/workbench``, and only numbers come from the client.

Runs, samples, labels and columns are named by their position and checked against their range; no path, no name of a
file ever comes from outside. A mistake is answered with ``{"error": …}``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from mettle.errors import InputError, MettleError
from mettle.evaluate import roc
from mettle.service.limits import Limits
from mettle.service.workbench import search
from mettle.service.workbench.bench import Bench
from mettle.service.workbench.live import live
from mettle.service.workbench.scene import Scene
from mettle.service.workbench.thumbnails import thumbnail
from mettle.service.workbench.training import training
from mettle.service.workbench.versus import versus
from mettle.train import RunFolder

if TYPE_CHECKING:
    from mettle.match.gallery import Gallery

POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LASTING = POLICY | {"Cache-Control": "private, max-age=86400"}  # the address carries the key of weights and data
MEDIA = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
BINARY = "application/octet-stream"
EACH = 2  # pairs of the same two labels in a list of the hardest, unless a label is asked for

Kind = Literal["positives", "negatives", "labels", "accepts", "rejects"]


class Answering(APIRoute):
    """A route that answers a user's mistake with its one line and status 422."""

    def get_route_handler(self) -> Callable:
        """The usual handler, with our errors told apart from faults."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except MettleError as error:
                return JSONResponse({"error": str(error)}, 422, POLICY)

        return answer


@dataclass(frozen=True)
class Filter:
    """What samples must be; None: anything. Columns and values are positions, one value for each column named."""

    label: int | None = None
    text: str = ""
    band: int | None = None
    column: tuple[int, ...] = ()
    value: tuple[int, ...] = ()

    def passes(self, scene: Scene) -> np.ndarray:
        """Which samples pass."""
        keep = np.ones(len(scene), bool)
        if self.label is not None:
            keep &= scene.label.codes == _within(self.label, scene.label.names, "label")
        if self.text:
            has = np.asarray([self.text.lower() in name.lower() for name in scene.label.names])
            keep &= has[scene.label.codes]
        if self.band is not None:
            keep &= scene.band.codes == _within(self.band, scene.band.names, "band")
        if len(self.column) != len(self.value):
            raise InputError(f"column and value come in pairs: got {len(self.column)} and {len(self.value)}")
        columns = list(scene.columns.values())
        for at, value in zip(self.column, self.value, strict=True):
            column = columns[_within(at, columns, "column")]
            keep &= column.codes == _within(value, column.names, "value")
        return keep


def routes(
    runs: Sequence[RunFolder],
    gallery: "Gallery | None" = None,
    *,
    cache: Path | None = None,
    far: float | None = None,
    threshold: float | None = None,
    limits: Limits | None = None,
) -> APIRouter:
    """The workbench of some runs, and of a gallery to try pictures on.

    Args:
        runs: finished runs, the first is shown first; they are read when somebody looks at them.
        gallery: adds ``POST /workbench/api/identify`` and ``verify``. In a service of ``create_app`` they answer as its
            API does, by its keys, limits and trail; elsewhere whoever mounts the router decides who may ask.
        cache: where embedded data are kept.
        far: false-accept rate at which the gallery answers; that of the service, or the gallery's default otherwise.
        threshold: threshold at which it answers, whatever rate that is.
        limits: how much may be asked; those of the service where there is one.
    """
    if not runs:
        raise InputError("the workbench needs at least one run: give a folder that `mettle train` wrote")
    benches = [Bench(run, cache) for run in runs]
    router = APIRouter(prefix="/workbench", route_class=Answering, include_in_schema=False)
    _page(router)
    _facts(router, benches, gallery is not None)
    _looks(router, benches)
    if gallery is not None:
        router.include_router(live(gallery, POLICY, far, threshold, limits))
    return router


def _page(router: APIRouter) -> None:
    static = _static()

    @router.get("")
    def door() -> Response:  # relative, so that a service below a prefix needs no settings
        return Response(status_code=307, headers=POLICY | {"Location": "workbench/"})

    @router.get("/")
    def page() -> Response:
        return Response(static["page.html"], media_type="text/html", headers=POLICY)

    @router.get("/static/{name}")
    def script(name: str) -> Response:
        if name not in static or name == "page.html":  # names are compared, never joined to a path
            raise HTTPException(404, "no such file")
        return Response(static[name], media_type=MEDIA["." + name.rpartition(".")[2]], headers=POLICY)


def _facts(router: APIRouter, benches: list[Bench], live: bool) -> None:
    @router.get("/api/runs")
    def listed(request: Request) -> Response:
        named = [{"name": b.run.name, "title": b.run.recipe.title()} for b in benches]
        key = getattr(request.state, "key", None)  # whose it is, where a service mounts the page
        may = {what: live and (key is None or key.allows(what)) for what in ("identify", "verify")}
        return JSONResponse({"runs": named, "live": live, "may": may}, headers=POLICY)

    @router.get("/api/runs/{run}")
    def facts(run: int) -> Response:
        return JSONResponse(_bench(benches, run).scene().facts(), headers=POLICY)

    @router.get("/api/runs/{run}/points")
    def points(run: int, final: bool = True) -> Response:
        return Response(_bench(benches, run).points(final=final), media_type=BINARY, headers=POLICY)

    @router.get("/api/runs/{run}/counts")
    def counts(run: int) -> Response:
        return Response(_bench(benches, run).counts(), media_type=BINARY, headers=POLICY)

    @router.get("/api/runs/{run}/training")
    def curves(run: int) -> Response:
        return JSONResponse(training(_bench(benches, run).run), headers=POLICY)

    @router.get("/api/compare/{first}/{second}")
    def compared(first: int, second: int) -> Response:
        return JSONResponse({"rows": between(first, second)}, headers=POLICY)

    @lru_cache(maxsize=64)  # resampling two runs takes seconds, and they do not change
    def between(first: int, second: int) -> list[dict[str, Any]]:
        return versus(_bench(benches, first), _bench(benches, second))


def _looks(router: APIRouter, benches: list[Bench]) -> None:
    @router.get("/api/runs/{run}/at")
    def at(run: int, threshold: Annotated[float, Query(allow_inf_nan=False)]) -> Response:
        accepts, rejects = roc.counts(_bench(benches, run).verification().scores, threshold)
        return JSONResponse({"accepts": int(accepts), "rejects": int(rejects)}, headers=POLICY)

    @router.get("/api/runs/{run}/pairs/{kind}")
    def pairs(
        run: int,
        kind: Kind,
        count: Annotated[int, Query(ge=1, le=96)] = 12,
        threshold: Annotated[float, Query(allow_inf_nan=False)] = 0.0,
        label: Annotated[int | None, Query(ge=0)] = None,
        text: Annotated[str, Query(max_length=200)] = "",
        band: Annotated[int | None, Query(ge=0)] = None,
        column: Annotated[list[int], Query(max_length=64)] = [],  # noqa: B006
        value: Annotated[list[int], Query(max_length=64)] = [],  # noqa: B006
    ) -> Response:
        wanted = Filter(label, text, band, tuple(column), tuple(value))
        return JSONResponse(_pairs(_bench(benches, run).scene(), kind, wanted, count, threshold), headers=POLICY)

    @router.get("/api/runs/{run}/picture/{sample}")
    def picture(run: int, sample: int) -> Response:
        scene = _bench(benches, run).scene()
        if scene.samples.inputs.kind != "image":
            raise HTTPException(404, "these samples are rows of numbers")
        content, media = thumbnail(scene.samples, _within(sample, range(len(scene)), "sample"))
        return Response(content, media_type=media, headers=LASTING)


def _pairs(scene: Scene, kind: Kind, wanted: Filter, count: int, threshold: float) -> dict[str, Any]:
    passes = wanted.passes(scene)
    if kind == "labels":
        found, total = search.suspects(scene, passes, count)
        return {"pairs": [vars(s) for s in found], "total": total}
    which = {
        "positives": search.hardest_positives(),
        "negatives": search.hardest_negatives(),
        "accepts": search.false_accepts(threshold),
        "rejects": search.false_rejects(threshold),
    }[kind]
    capped = kind in ("positives", "negatives") and wanted.label is None
    result = search.search(scene, which, passes, count, EACH if capped else None)
    return {"pairs": [vars(p) for p in result.pairs], "looked": result.looked}


def _bench(benches: list[Bench], run: int) -> Bench:
    return benches[_within(run, benches, "run")]


def _within(at: int, things: Sequence[Any], what: str) -> int:
    if not 0 <= at < len(things):
        raise HTTPException(404, f"no {what} {at}: there are {len(things)}, counted from 0")
    return at


@lru_cache(maxsize=1)
def _static() -> dict[str, bytes]:
    """Every file that may be sent, by name."""
    here = files("mettle.service.workbench")
    found = {file.name: file.read_bytes() for file in (here / "static").iterdir() if Path(file.name).suffix in MEDIA}
    return found | {"page.html": (here / "page.html").read_bytes()}
