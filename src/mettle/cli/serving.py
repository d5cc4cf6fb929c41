"""Commands of the HTTP service: serve, and its keys."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from mettle.cli.shell import app, cache, group

keys_app = group("keys", "Keys of the HTTP service: who may ask it what.")

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of keys; readable by its owner alone.")]


@app.command()
def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="A run folder, or several for the workbench.")],
    gallery: Annotated[
        str | None, typer.Option(help="Gallery of the first run; default: gallery.mettle in its folder.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    keys: Annotated[Path | None, typer.Option(help="File of keys, see `mettle keys`; none: this machine only.")] = None,
    trail: Annotated[Path | None, typer.Option(help="File of the audit trail.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Name that the service goes by. Repeatable.")] = None,
    far: Annotated[float | None, typer.Option(help="False-accept rate to answer at.")] = None,
    workbench: Annotated[bool, typer.Option(help="Serve the workbench page at /workbench.")] = True,
) -> None:
    """Serve a run: match over HTTP, and look at it in a browser."""
    from mettle.match import Gallery
    from mettle.service import create_app
    from mettle.service import serve as listen
    from mettle.service.workbench import routes
    from mettle.train import open_run

    opened = [open_run(run) for run in runs]
    with Gallery.open(gallery or opened[0].folder / "gallery.mettle", model=opened[0]) as people:
        page = [routes(opened, people, cache=cache())] if workbench else []
        service = create_app(people, runs=opened, keys=keys, trail=trail, routers=page, hosts=name or (), far=far)
        where = f"http://{host}:{port}"
        print(f"{people.where}: {len(people)} people; {where}{'/workbench' if workbench else '/docs'}", flush=True)
        listen(service, host, port)


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
def listing(file: KeyFile) -> None:
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
