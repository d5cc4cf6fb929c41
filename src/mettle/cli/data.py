"""Commands around data files: audit, data check, data import."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import (
    ReadMegabytes,
    ReadSeconds,
    add_command_group,
    app,
    cache_folder,
    command_line,
    print_scenario,
    read_within_limits,
)

data_app = add_command_group("data", "Look at data before training on them; turn public sets into tables.")
PROTOCOLS = {
    "open-set": "train and test share none of them (open-set)",
    "closed-set": "train has all that test has (closed-set)",
    "mixed": "train has some of those that test has (mixed)",
    "none": "no split into train and test, so training holds out whole labels",
}


@app.command()
def audit(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="NPZ, Parquet, CSV, or NPY with a second NPY file of labels.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for audit.html and .json, or a page NAME.html; default: FILE-audit.",
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column of labels; default: label, labels, y, identity.")] = None,
    domain: Annotated[
        str | None, typer.Option(help="Column of domains; default: domain, camera, device, session; '' for none.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Column to slice by. Repeatable; default: all with few values.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Column of picture paths; default: path, image, file, ...; '' for none.")
    ] = None,
    embeddings: Annotated[
        str | None, typer.Option(help="Array, column of lists, or prefix of the numbered columns of the vectors.")
    ] = None,
    far: Annotated[
        list[float] | None, typer.Option(help="False-accept rate. Repeatable; default: 0.1 0.01 0.001.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Keep only rows with COLUMN=VALUE, as in split=test. Repeatable.")
    ] = None,
    read_seconds: ReadSeconds = 5.0,
    read_megabytes: ReadMegabytes = 1024,
) -> None:
    """Audit embeddings of any model: one page and one JSON with everything that can be said about them."""
    from mettle.cli.torchrun import join_ranks_quietly
    from mettle.errors import InputError
    from mettle.evaluate import audit as run_audit
    from mettle.evaluate import read_embeddings
    from mettle.evaluate.audit import FARS
    from mettle.report.audit_page import audit_page_path, write_audit
    from mettle.report.caveats import rank_audit_caveats

    if len(files) > 2:
        raise InputError(f"audit reads one file, or a .npy file and one of labels: got {len(files)}")
    chosen = {"label": label, "domain": domain, "groups": group, "image": image, "embeddings": embeddings}
    output = output or files[0].parent / f"{files[0].name.partition('.')[0]}-audit"
    audit_page_path(output)  # a name that will not do is said before the work
    with join_ranks_quietly() as ranks, read_within_limits(read_seconds, read_megabytes):
        table = read_embeddings(*files, where=where or (), **chosen)  # type: ignore[arg-type]
        print(f"{files[0]}: {len(table)} embeddings of dimension {table.values.shape[1]}", flush=True)
        found = run_audit(table, fars=far or FARS, across_ranks=ranks.size > 1)
        page = write_audit(found, output, command_line()) if ranks.is_first else None
    if page is None:
        return
    for name, way in found.summary()["scenarios"].items():
        print_scenario(name, way["verification"], way["retrieval"])
    if found.label_errors is not None:
        print(f"labels: {found.label_errors.noise}")
    for text in rank_audit_caveats(found):
        print(f"note: {text}")
    print(f"audit: {page}")


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="Folder, .csv, .tsv, .parquet, .npz, or 'glyphs'.")],
    policy: Annotated[
        str, typer.Option(help="Unreadable files: 'fail', 'skip' and list, or 'trust' and list all.")
    ] = "trust",
    label: Annotated[str | None, typer.Option(help="Name of the label column.")] = None,
    domain: Annotated[str | None, typer.Option(help="Name of the domain column.")] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Name of the column of picture files; default: path, image, ...; '' for none."),
    ] = None,
    missing: Annotated[
        str | None, typer.Option(help="Missing numbers of a table: 'fail' or 'mean', as data.missing in a recipe.")
    ] = None,
    near: Annotated[str, typer.Option(help="Pictures that look alike across splits: 'warning' or 'error'.")] = (
        "warning"
    ),
    read_seconds: ReadSeconds = 5.0,
    read_megabytes: ReadMegabytes = 1024,
) -> None:
    """Validate data: counts, problems with row numbers, leakage, duplicates. Exit status 1 when there are errors."""
    from mettle.data import check, read

    columns: dict[str, Any] = {"label": label, "domain": domain, "image": image}
    with read_within_limits(read_seconds, read_megabytes):
        samples = read(path, policy="trust", cache=cache_folder(), missing=missing, **columns)
        found = check(samples, policy=policy, near=near)  # type: ignore[arg-type]
    print(f"{path}: {found.samples} samples, {len(found.labels)} labels; {PROTOCOLS[found.protocol]}")
    for title, counts in (("split", found.splits), ("domain", found.domains)):
        if counts:
            print(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    sizes = sorted(found.labels.values())
    print(f"  samples per label: {sizes[0]} to {sizes[-1]}, median {sizes[len(sizes) // 2]}")
    for note in found.notes:
        print(f"  note: {note}")
    for problem in found.problems:
        print(f"  {problem}")
    print(f"  {found.count('error')} errors, {found.count('warning')} warnings")
    if found.errors:
        raise typer.Exit(1)


@data_app.command("import")
def data_import(
    name: Annotated[
        str,
        typer.Argument(
            help="cub200, cars196, sop, cifar10, cifar100, celeba, waterbirds, tongji or market1501.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="What the archive of the set unpacks to.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The table to write: .csv, of CIFAR .npz with the pictures in it.")
    ],
    val: Annotated[
        float, typer.Option(help="Share of the training identities that becomes the validation split.")
    ] = 0.0,
) -> None:
    """Turn a public set in its official layout into a table for `mettle train --data`, with splits and groups."""
    from collections import Counter

    from mettle.data.sources import import_public_set

    found = import_public_set(name, folder, output, val=val)
    columns = found.columns
    print(f"{output}: {len(found)} pictures, {len(set(columns['label']))} labels")
    for title in ("split", "role", "domain"):
        if title in columns:
            counts = Counter(value or "neither" for value in columns[title])
            print(f"  {title}: " + ", ".join(f"{value} {counts[value]}" for value in sorted(counts)))
    others = [column for column in columns if column not in ("path", "label", "split", "role", "domain")]
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        print(f"  further columns: {', '.join(others[:8])}{more}")
    for note in found.notes:
        print(f"  note: {note}")
