"""Commands of the HTTP service: serve, its keys and its audit log."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.gallery import Milvus, print_notes
from mettle.cli.options import ReadMegabytes, ReadSeconds, add_command_group, app, cache_folder

keys_app = add_command_group("keys", "Keys of the HTTP service: who may ask it what.")
audit_log_app = add_command_group(
    "audit-log", "The audit log of the HTTP service: is it whole, and what does it say of a person?"
)

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of keys; readable by its owner alone.")]
AuditLogFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of the audit log; its .key lies beside it.")]


@app.command()
def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="A run folder, or several for the workbench; none: --gallery alone."),
    ] = None,
    gallery: Annotated[
        str | None, typer.Option(help="Gallery to answer from; default: gallery.mettle in the folder of the first run.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the gallery where --gallery names a new one.")] = False,
    milvus: Milvus = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    keys: Annotated[Path | None, typer.Option(help="File of keys, see `mettle keys`; none: this machine only.")] = None,
    audit_log: Annotated[Path | None, typer.Option(help="File of the audit log.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Name that the service goes by. Repeatable.")] = None,
    far: Annotated[float | None, typer.Option(help="False-accept rate to answer at.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Threshold to answer at instead.")] = None,
    megapixels: Annotated[float | None, typer.Option(help="Largest picture taken; default: 64.")] = None,
    megabytes: Annotated[float | None, typer.Option(help="Largest request taken; default: 16.")] = None,
    read_seconds: ReadSeconds = 5.0,
    read_megabytes: ReadMegabytes = 1024,
    workbench: Annotated[bool, typer.Option(help="Serve the workbench page of the runs at /workbench.")] = True,
) -> None:
    """Serve a run or a gallery: match over HTTP, and look at the run in a browser."""
    from mettle.errors import InputError
    from mettle.gallery import Gallery
    from mettle.service import create_app
    from mettle.service import serve as listen
    from mettle.service.auth import Keys
    from mettle.service.server import check_address

    if not runs and gallery is None:
        raise InputError("give a run folder, or --gallery GALLERY, or both: there is nothing to serve")
    if not runs and create:
        raise InputError("--create makes a gallery of a run: give the run, or make one with `mettle gallery enrol`")
    check_address(host, port, keys=keys is not None)  # before anything is made on disk
    limits, known = (
        _build_limits(megapixels, megabytes, read_seconds, read_megabytes),
        None if keys is None else Keys(keys),
    )
    opened = _open_runs(runs or ())
    first = opened[0] if opened else None
    place = opened[0].folder / "gallery.mettle" if gallery is None else gallery
    with Gallery.open(place, model=first, create=create or gallery is None, milvus=milvus) as people:
        point = {"far": far, "threshold": threshold, "limits": limits}
        page = _workbench_router(opened) if workbench and opened else []
        service = create_app(
            people,
            runs=opened,
            keys=known,
            audit_log=audit_log,
            routers=page,
            hosts=name or (),
            **point,
        )
        print_notes(people.notes)
        answering = people.decision_threshold(far=far, threshold=threshold)
        if answering.threshold is None:
            print_notes([f"not calibrated, so no answer will be a match: {answering.basis}"])
        begin, page_at = f"{people.where}: {len(people)} people; ", "/workbench" if page else "/docs"
        listen(service, host, port, listening=lambda where: print(begin + where + page_at, flush=True))


def _open_runs(folders: Sequence[Path]) -> list[Any]:
    if not folders:
        return []
    from mettle.train import open_run_folder

    return [open_run_folder(folder) for folder in folders]


def _workbench_router(runs: list[Any]) -> list[Any]:
    from mettle.workbench import routes

    return [routes(runs, cache=cache_folder())]


def _build_limits(megapixels: float | None, megabytes: float | None, read_seconds: float, read_megabytes: int) -> Any:
    from mettle.errors import InputError
    from mettle.service import Limits

    for size, option in ((megapixels, "--megapixels"), (megabytes, "--megabytes")):
        if size is not None and not 0 < size < 1e6:
            raise InputError(f"{option} must be a number above 0, got {size!r}")
    usual = Limits()
    return replace(
        usual,
        pixels=usual.pixels if megapixels is None else max(1, int(megapixels * 1e6)),
        body=usual.body if megabytes is None else max(1, int(megabytes * (1 << 20))),
        read_seconds=read_seconds,
        read_megabytes=read_megabytes,
    )


@audit_log_app.command("check")
def check_audit_log(file: AuditLogFile) -> None:
    """Look for lines that were changed, added, moved or taken out. Exit status 1 where there are any."""
    from mettle.service import verify_audit_log

    found = verify_audit_log(file)
    for problem in found.problems:
        print(problem)
    torn = f"; {found.torn} bytes at the end are unfinished, from a crash" if found.torn else ""
    print(f"{found.lines} lines, {'sound' if found.sound else f'{len(found.problems)} problems'}{torn}")
    raise typer.Exit(0 if found.sound else 1)


@audit_log_app.command("uses")
def print_uses(file: AuditLogFile, identity: Annotated[str, typer.Argument(help="Name of the person.")]) -> None:
    """Every line about one person, as JSON: what they may ask to see."""
    from mettle.service import entries_about

    for line in entries_about(file, identity):
        print(json.dumps(line))


@keys_app.command("create")
def create(
    file: KeyFile,
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    scope: Annotated[list[str], typer.Option(help="verify, identify, enrol, delete, embed, metrics, workbench.")],
    tenant: Annotated[str | None, typer.Option(help="Restrict the key to the people of one tenant.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires.")] = None,
) -> None:
    """Make a key and print it: it cannot be seen again."""
    from mettle.service import create_key

    print(create_key(file, name, scope, tenant=tenant, days=days))


@keys_app.command("list")
def list_command(file: KeyFile) -> None:
    """Names, scopes and ends of all keys; never the keys themselves."""
    from mettle.service import list_keys

    for key in list_keys(file):
        end = "" if key.expires is None else f"  until {datetime.fromtimestamp(key.expires, UTC):%Y-%m-%d}"
        whose = "" if key.tenant is None else f"  tenant {key.tenant}"
        print(f"{key.name}  {', '.join(key.scopes)}{whose}{end}")


@keys_app.command("revoke")
def revoke(file: KeyFile, name: Annotated[str, typer.Argument(help="Whose key it is.")]) -> None:
    """Take a key out: running services refuse it from their next request on."""
    from mettle.service import revoke_key

    print(f"revoked {revoke_key(file, name).name}")
