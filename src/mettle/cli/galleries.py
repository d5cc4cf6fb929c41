"""Commands of a gallery: enrol, verify, identify, delete, and its upkeep."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import typer

from mettle.cli.shell import group, samples_of

gallery_app = group("gallery", "Enrol people under a trained model and say who is who.")

Where = Annotated[
    str, typer.Argument(metavar="GALLERY", help="A folder, or postgresql://user@host/database?gallery=name.")
]
Who = Annotated[str, typer.Argument(metavar="IDENTITY", help="Name of the person.")]
Pictures = Annotated[list[Path] | None, typer.Argument(metavar="PICTURE", help="Picture files.")]
Vectors = Annotated[Path | None, typer.Option("--embeddings", help="An .npy file of embeddings instead of pictures.")]
Far = Annotated[float | None, typer.Option(help="False-accept rate to answer at; default: 1e-3, or the lowest known.")]
Threshold = Annotated[float | None, typer.Option(help="A threshold by hand instead.")]
Model = Annotated[Path | None, typer.Option(help="The run whose embeddings the gallery holds; needed once.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@gallery_app.command()
def enrol(
    gallery: Where,
    identity: Annotated[str | None, typer.Argument(help="Name of the person; not with --data.")] = None,
    pictures: Pictures = None,
    model: Model = None,
    dim: Annotated[int | None, typer.Option(help="Length of embeddings from elsewhere, for a new gallery.")] = None,
    fusion: Annotated[
        str | None, typer.Option(help="Several templates, one score: best, mean or centroid, for a new gallery.")
    ] = None,
    embeddings: Vectors = None,
    data: Annotated[
        str | None, typer.Option(help="Enrol everybody of a data set by label: folder, .csv, .npz, 'glyphs'.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of --data: only this split.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Enrol everybody of a file of embeddings and labels, as `mettle audit` reads.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="Of --table: only rows with COLUMN=VALUE.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove the person's former templates.")] = False,
    request: Annotated[str | None, typer.Option(help="Name of this request: repeating it changes nothing.")] = None,
) -> None:
    """Enrol a person from pictures or embeddings, or everybody of a data set."""
    from mettle.errors import InputError
    from mettle.match import Gallery

    if [identity, data, table].count(None) != 2:
        raise InputError("give IDENTITY and pictures, or --data, or --table: one of the three")
    if identity is None and request is not None:
        raise InputError("--request names the change of one IDENTITY: not with --data or --table")
    templates = None if identity is None else _given(pictures, embeddings)  # before anything is made on disk
    with Gallery.open(gallery, model=model, dim=dim, fusion=fusion) as opened:
        _say(opened)
        if identity is None:
            receipts = opened.enrol_many(_everybody(opened, data, split, table, where or ()), replace=replace)
            print(f"{len(opened)} people enrolled, {sum(len(r.numbers) for r in receipts)} templates added")
            return
        receipt = opened.enrol(identity, templates, request=request, replace=replace)
        again = " (this request was served before)" if receipt.repeated else ""
        print(f"enrolled {identity!r}: {len(receipt.numbers)} templates, change {receipt.sequence}{again}")


@gallery_app.command()
def verify(
    gallery: Where,
    identity: Who,
    picture: Annotated[Path | None, typer.Argument(metavar="PICTURE", help="A picture file.")] = None,
    embeddings: Vectors = None,
    far: Far = None,
    threshold: Threshold = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Is this that person? Exit status 0 for a match, 1 for none."""
    from mettle.match import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False) as opened:
        found = opened.verify(identity, _given(picture and [picture], embeddings), far=far, threshold=threshold)
    if as_json:
        print(json.dumps(asdict(found) | {"verdict": found.verdict}))
    else:
        print(f"{found.verdict}  score {found.score:.4f}  {_point(found)}")
    raise typer.Exit(0 if found.match else 1)


@gallery_app.command()
def identify(
    gallery: Where,
    pictures: Pictures = None,
    embeddings: Vectors = None,
    k: Annotated[int, typer.Option("-k", help="Candidates per probe.")] = 5,
    far: Far = None,
    threshold: Threshold = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Who is this? The best candidates of every probe; "no match" where nobody reaches the threshold."""
    from mettle.match import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False) as opened:
        answers = opened.identify_many(_given(pictures, embeddings), k=k, far=far, threshold=threshold)
    if as_json:
        print(json.dumps([asdict(found) | {"verdict": found.verdict} for found in answers]))
        return
    names = [str(p) for p in pictures] if pictures else [f"probe {i}" for i in range(len(answers))]
    for name, found in zip(names, answers, strict=True):
        print(f"{name}: {found.verdict}  {_point(found)}")
        for candidate in found.candidates:
            print(f"  {candidate.score:+.4f}  {candidate.identity!r}{'' if candidate.match else '  below'}")


@gallery_app.command()
def delete(
    gallery: Where,
    identity: Who,
    request: Annotated[str | None, typer.Option(help="Name of this request: repeating it changes nothing.")] = None,
) -> None:
    """Remove a person: never found again from now on; `compact` erases the templates from disk."""
    from mettle.match import Gallery

    with Gallery.open(gallery, create=False) as opened:
        receipt = opened.delete(identity, request=request)
    print(f"deleted {identity!r}: {len(receipt.numbers)} templates, change {receipt.sequence}")


@gallery_app.command()
def info(gallery: Where, as_json: Json = False) -> None:
    """What a gallery holds, under which model, and how it searches."""
    from mettle.match import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        _say(opened)
        found = opened.info()
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    print(
        f"{found.where} ({found.kind}): {found.identities} people, {found.templates} templates of {found.dim} numbers"
    )
    print(f"  model {found.model or 'none: embeddings from elsewhere'}; several templates: {found.fusion}")
    for name, value in found.index.items():
        print(f"  index {name}: {value}")
    for rate, entry in found.thresholds.items():
        value = entry.get("threshold")
        print(f"  false-accept rate {rate}: " + ("not measurable" if value is None else f"threshold {value:.4f}"))


@gallery_app.command()
def ids(gallery: Where) -> None:
    """Everybody enrolled, one a line."""
    from mettle.match import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        for name in opened.ids():
            print(name if name.isprintable() else repr(name))


@gallery_app.command()
def check(gallery: Where) -> None:
    """Look for damage in record and index. Exit status 1 where there is any."""
    from mettle.match import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        _say(opened)
        problems = opened.check()
    for problem in problems:
        print(problem)
    print("sound" if not problems else f"{len(problems)} problems")
    raise typer.Exit(1 if problems else 0)


@gallery_app.command()
def compact(gallery: Where) -> None:
    """Erase deleted templates from every file of the gallery."""
    from mettle.match import Gallery

    with Gallery.open(gallery, create=False) as opened:
        opened.compact()
    print("compacted")


@gallery_app.command()
def index(
    gallery: Where,
    kind: Annotated[str, typer.Option(help="auto, exact, or an approximate kind.")] = "auto",
    latency_ms: Annotated[float | None, typer.Option(help="Wanted time per probe.")] = None,
    recall: Annotated[float, typer.Option(help="Least share of true neighbours to find.")] = 0.99,
    memory_mb: Annotated[float | None, typer.Option(help="Most memory for the index.")] = None,
) -> None:
    """Choose and build the index anew; prints what it loses against exact search."""
    from mettle.match import Gallery, Wanted

    wanted = Wanted(latency_ms=latency_ms, recall=recall, memory_mb=memory_mb, kind=kind)
    with Gallery.open(gallery, create=False) as opened:
        measured = opened.reindex(wanted)
    print(measured if measured is not None else "nothing to index")


@gallery_app.command()
def move(
    source: Where,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new folder, or a new place on a server.")],
) -> None:
    """Copy a gallery to another kind of record, comparing counts and checksums; the source stays as it is."""
    from mettle.match import Gallery

    moved = Gallery.move(source, target)
    print(f"moved {moved.identities} people, {moved.templates} templates; checksum {moved.digest[:16]} on both sides")


@gallery_app.command()
def snapshot(
    gallery: Where,
    output: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a consistent copy of a gallery while it is in use."""
    from mettle.match import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        print(opened.snapshot(output))


def _given(pictures: list[Path] | None, embeddings: Path | None) -> Any:
    """Pictures, or the content of an .npy file."""
    from mettle.errors import InputError

    if bool(pictures) == (embeddings is not None):
        raise InputError("give picture files, or --embeddings FILE.npy")
    return pictures if embeddings is None else _array(embeddings)


def _array(path: Path) -> Any:
    import numpy as np

    from mettle.errors import DataError

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as problem:
        raise DataError(f"{path} is not an .npy file of numbers: {problem}") from None


def _everybody(
    opened: Any, data: str | None, split: str | None, table: Path | None, where: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """(identity, templates) of every label."""
    from mettle.match.bulk import people_of_samples, people_of_table

    if table is not None:
        return people_of_table(table, where)
    run = opened.run
    return people_of_samples(run.model(), samples_of(run, data), split)


def _point(found: Any) -> str:
    rate = "false-accept rate unknown" if found.far is None else f"false-accept rate {found.far:g}"
    return f"threshold {found.threshold:.4f} ({rate}; {found.basis})"


def _say(opened: Any) -> None:
    for note in opened.notes:
        print(f"note: {note}")
