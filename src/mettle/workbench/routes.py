"""The workbench over HTTP: everything lies under ``/workbench``, and only numbers come from the client.

Runs, samples, labels and columns are named by their position and checked against their range; no path, no name of a
file ever comes from outside. A mistake is answered with ``{"error": …}``.
"""

import io
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
from PIL import Image

from mettle.data.dataset import Samples
from mettle.errors import InputError, MettleError
from mettle.evaluate import roc
from mettle.evaluate.diagnostics.hard_pairs import PairQuery
from mettle.report.training_plots import PANELS, Panel, log_series, validation_panels
from mettle.train import RunFolder
from mettle.train.callbacks import read_log
from mettle.workbench import pair_search as search
from mettle.workbench.lazy_run import LazyRun
from mettle.workbench.run_comparison import compare_runs
from mettle.workbench.run_data import RunData

if TYPE_CHECKING:
    pass


POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
CACHED_POLICY = POLICY | {"Cache-Control": "private, max-age=86400"}  # the address carries the key of weights and data
MEDIA = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
BINARY = "application/octet-stream"
MOST_PER_LABEL_PAIR = 2  # pairs of the same two labels in a list of the hardest, unless a label is asked for

Kind = Literal["positives", "negatives", "labels", "accepts", "rejects"]


class ErrorAnsweringRoute(APIRoute):
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
    quartile: int | None = None
    column: tuple[int, ...] = ()
    value: tuple[int, ...] = ()

    def passes(self, data: RunData) -> np.ndarray:
        """Which samples pass."""
        keep = np.ones(len(data), bool)
        if self.label is not None:
            keep &= data.label.codes == _check_position(self.label, data.label.names, "label")
        if self.text:
            has = np.asarray([self.text.lower() in name.lower() for name in data.label.names])
            keep &= has[data.label.codes]
        if self.quartile is not None:
            keep &= data.quartile.codes == _check_position(self.quartile, data.quartile.names, "band")
        if len(self.column) != len(self.value):
            raise InputError(f"column and value come in pairs: got {len(self.column)} and {len(self.value)}")
        columns = list(data.columns.values())
        for at, value in zip(self.column, self.value, strict=True):
            column = columns[_check_position(at, columns, "column")]
            keep &= column.codes == _check_position(value, column.names, "value")
        return keep


def routes(runs: Sequence[RunFolder], *, cache: Path | None = None) -> APIRouter:
    """The workbench of some runs.

    In a service of ``create_app`` the page also asks the gallery, through the service's API and as the key that signed
    in. In any other application whoever mounts the router decides who may come in.

    Args:
        runs: finished runs, the first is shown first; they are read when somebody looks at them.
        cache: where embedded data are kept.
    """
    if not runs:
        raise InputError("the workbench needs at least one run: give a folder that `mettle train` wrote")
    runs_ = [LazyRun(run, cache) for run in runs]
    router = APIRouter(prefix="/workbench", route_class=ErrorAnsweringRoute, include_in_schema=False)
    _add_page(router)
    _add_run_routes(router, runs_)
    _add_pair_routes(router, runs_)
    return router


def _add_page(router: APIRouter) -> None:
    static = _static_files()

    @router.get("")
    def door() -> Response:  # relative, so that a service below a prefix needs no settings
        return Response(status_code=307, headers=POLICY | {"Location": "workbench/"})

    @router.get("/")
    def page() -> Response:
        return Response(static["index.html"], media_type="text/html", headers=POLICY)

    @router.get("/static/{name}")
    def script(name: str) -> Response:
        if name not in static or name == "index.html":  # names are compared, never joined to a path
            raise HTTPException(404, "no such file")
        return Response(static[name], media_type=MEDIA["." + name.rpartition(".")[2]], headers=POLICY)


def _add_run_routes(router: APIRouter, runs_: list[LazyRun]) -> None:
    @router.get("/api/runs")
    def listed(request: Request) -> Response:
        named = [{"name": b.run.name, "title": b.run.recipe.title()} for b in runs_]
        key = getattr(request.state, "key", None)  # whose it is, where a service mounts the page
        may = None if key is None else {what: key.allows(what) for what in ("identify", "verify")}
        return JSONResponse({"runs": named, "may": may}, headers=POLICY)

    @router.get("/api/runs/{run}")
    def facts(run: int) -> Response:
        return JSONResponse(_find_run(runs_, run).data().facts(), headers=POLICY)

    @router.get("/api/runs/{run}/points")
    def points(run: int, final: bool = True) -> Response:
        return Response(_find_run(runs_, run).points(final=final), media_type=BINARY, headers=POLICY)

    @router.get("/api/runs/{run}/counts")
    def counts(run: int) -> Response:
        return Response(_find_run(runs_, run).counts(), media_type=BINARY, headers=POLICY)

    @router.get("/api/runs/{run}/training")
    def curves(run: int) -> Response:
        return JSONResponse(training_panels(_find_run(runs_, run).run), headers=POLICY)

    @router.get("/api/compare/{first}/{second}")
    def compared(first: int, second: int) -> Response:
        return JSONResponse({"rows": between(first, second)}, headers=POLICY)

    @lru_cache(maxsize=64)  # resampling two runs takes seconds, and they do not change
    def between(first: int, second: int) -> list[dict[str, Any]]:
        return compare_runs(_find_run(runs_, first), _find_run(runs_, second))


def _add_pair_routes(router: APIRouter, runs_: list[LazyRun]) -> None:
    @router.get("/api/runs/{run}/at")
    def at(run: int, threshold: Annotated[float, Query(allow_inf_nan=False)]) -> Response:
        accepts, rejects = roc.error_counts(_find_run(runs_, run).verification().scores, threshold)
        return JSONResponse({"accepts": int(accepts), "rejects": int(rejects)}, headers=POLICY)

    @router.get("/api/runs/{run}/pairs/{kind}")
    def pairs(
        run: int,
        kind: Kind,
        count: Annotated[int, Query(ge=1, le=96)] = 12,
        threshold: Annotated[float, Query(allow_inf_nan=False)] = 0.0,
        label: Annotated[int | None, Query(ge=0)] = None,
        text: Annotated[str, Query(max_length=200)] = "",
        quartile: Annotated[int | None, Query(ge=0)] = None,
        column: Annotated[list[int], Query(max_length=64)] = [],  # noqa: B006
        value: Annotated[list[int], Query(max_length=64)] = [],  # noqa: B006
    ) -> Response:
        wanted = Filter(label, text, quartile, tuple(column), tuple(value))
        return JSONResponse(_pairs(_find_run(runs_, run).data(), kind, wanted, count, threshold), headers=POLICY)

    @router.get("/api/runs/{run}/picture/{sample}")
    def picture(run: int, sample: int) -> Response:
        data = _find_run(runs_, run).data()
        if data.samples.inputs.kind != "image":
            raise HTTPException(404, "these samples are rows of numbers")
        content, media = make_thumbnail(data.samples, _check_position(sample, range(len(data)), "sample"))
        return Response(content, media_type=media, headers=CACHED_POLICY)


def _pairs(data: RunData, kind: Kind, wanted: Filter, count: int, threshold: float) -> dict[str, Any]:
    passes = wanted.passes(data)
    if kind == "labels":
        found, total = search.find_label_suspects(data, passes, count)
        return {"pairs": [vars(s) for s in found], "total": total}
    which = {
        "positives": PairQuery.hardest("genuine"),
        "negatives": PairQuery.hardest("impostor"),
        "accepts": search.query_false_accepts(threshold),
        "rejects": search.query_false_rejects(threshold),
    }[kind]
    capped = kind in ("positives", "negatives") and wanted.label is None
    result = search.find_pairs(data, which, passes, count, MOST_PER_LABEL_PAIR if capped else None)
    return {"pairs": [vars(p) for p in result.pairs], "looked": result.looked}


def _find_run(runs_: list[LazyRun], run: int) -> LazyRun:
    return runs_[_check_position(run, runs_, "run")]


def _check_position(at: int, things: Sequence[Any], what: str) -> int:
    if not 0 <= at < len(things):
        raise HTTPException(404, f"no {what} {at}: there are {len(things)}, counted from 0")
    return at


@lru_cache(maxsize=1)
def _static_files() -> dict[str, bytes]:
    """Every file that may be sent, by name."""
    here = files("mettle.workbench") / "static"
    return {file.name: file.read_bytes() for file in here.iterdir() if Path(file.name).suffix in MEDIA}


SMALL, LARGE = 64, 192  # pictures up to SMALL are sent as they are; larger ones shrink to LARGE


def make_thumbnail(samples: Samples, at: int) -> tuple[bytes, str]:
    """One sample's picture and its media type: small ones exactly, large ones shrunk and compressed."""
    pixels = samples.read(np.asarray([at]))[0]
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    small = max(image.size) <= SMALL
    if not small:
        image.thumbnail((LARGE, LARGE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, **({"format": "PNG"} if small else {"format": "JPEG", "quality": 85}))
    return buffer.getvalue(), "image/png" if small else "image/jpeg"


Log = list[dict[str, Any]]


def training_panels(run: RunFolder) -> list[dict[str, Any]]:
    """Every panel for which the log of a run has something to tell."""
    log = read_log(run.folder / "log.jsonl")
    return [_panel_facts(panel, log) for panel in (*validation_panels([log]), *PANELS) if _has_content(panel, log)]


def _panel_facts(panel: Panel, log: Log) -> dict[str, Any]:
    lines = [{"name": name, "points": log_series(log, key).tolist()} for key, name in panel.lines]
    return {"title": panel.title, "caption": panel.caption, "share": panel.share, "lines": lines}


def _has_content(panel: Panel, log: Log) -> bool:
    """Whether there is a line that moves, and no other panel that says it better."""
    if panel.unless and len(log_series(log, panel.unless)) > 1:
        return False
    found = [log_series(log, key) for key, _ in panel.lines]
    return any(len(line) > 1 and (panel.still is None or (line[:, 1] != panel.still).any()) for line in found)
