"""Commands of a gallery: enrol, verify, identify, delete."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import typer

from mettle.cli.shell import Domain, Image, Label, group, samples_of

gallery_app = group("gallery", "Enrol people under a trained model and say who is who.")

# Rates per person that a table is calibrated for by itself, as far as its people are enough. One in ten is not among
# them: nobody means it without saying so.
RATES = (0.01, 0.001, 1e-4, 1e-5, 1e-6)

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
    dim: Annotated[
        int | None, typer.Option(help="Length of embeddings from elsewhere, for a new gallery; default: as they are.")
    ] = None,
    fusion: Annotated[
        str | None, typer.Option(help="Several templates, one score: best, mean or centroid, for a new gallery.")
    ] = None,
    embeddings: Vectors = None,
    data: Annotated[
        str | None, typer.Option(help="Enrol everybody of a data set by label: folder, .csv, .npz, 'glyphs'.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of --data: only this split.")] = None,
    label: Label = None,
    domain: Domain = None,
    image: Image = None,
    table: Annotated[
        Path | None, typer.Option(help="Enrol everybody of a file of embeddings and labels, as `mettle audit` reads.")
    ] = None,
    where: Annotated[list[str] | None, typer.Option(help="Of --table: only rows with COLUMN=VALUE.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Remove the person's former templates.")] = False,
    request: Annotated[str | None, typer.Option(help="Name of this request: repeating it changes nothing.")] = None,
) -> None:
    """Enrol a person from pictures or embeddings, or everybody of a data set.

    Where no threshold is known yet, a --table with enough labels is also what thresholds are measured on.
    """
    from mettle.errors import InputError
    from mettle.match import Gallery
    from mettle.match.embedding import Embedding, offered_binding
    from mettle.match.naming import settled
    from mettle.match.place import exists

    if [identity, data, table].count(None) != 2:
        raise InputError("give IDENTITY and pictures, or --data, or --table: one of the three")
    if identity is None and request is not None:
        raise InputError("--request names the change of one IDENTITY: not with --data or --table")
    columns = {"label": label, "domain": domain, "image": image}
    if data is None and any(name is not None for name in columns.values()):
        raise InputError("--label, --domain and --image name columns of --data: not with IDENTITY or --table")
    if data is None and split is not None:
        rather = f"; of a table, rows are chosen by --where split={split}" if table is not None else ""
        raise InputError(f"--split chooses from --data: not with IDENTITY or --table{rather}")
    if table is None and where:
        rather = "; of data, a split is chosen by --split" if data is not None else ""
        raise InputError(f"--where chooses rows of --table: not with IDENTITY or --data{rather}")
    if identity is None and (pictures or embeddings is not None):
        raise InputError("pictures and --embeddings are of one IDENTITY: not with --data or --table")
    templates = None if identity is None else _given(pictures, embeddings)
    run, new = _run(model), not exists(gallery)
    rows = None if table is None else _rows(table, where or ())
    if new and run is None and dim is None:
        dim = _length(templates, rows)
    named: set[str] = set()

    def everybody(bound: Any, embeds: Any) -> Iterator[tuple[str, Any]]:
        for name, theirs in _everybody(bound, embeds, data, columns, split, table, rows):
            named.add(name)
            yield name, theirs

    ready: Any = None
    if new and (offered := offered_binding(run, dim, fusion, None)) is not None:
        # All of it is looked at before a new gallery is made: a mistake leaves nothing behind.
        embedding = Embedding(offered.dim, run)
        given = [(identity, templates)] if identity is not None else everybody(offered, lambda: embedding.run)
        ready = [(settled(name, lambda _: False), embedding.vectors(theirs)) for name, theirs in given]
    with Gallery.open(gallery, model=run, dim=dim, fusion=fusion) as opened:
        say(before := opened.notes)
        if identity is None:
            people = everybody(opened.binding, lambda: opened.run) if ready is None else ready
            receipts = opened.enrol_many(people, replace=replace)
            added, skipped = sum(len(r.numbers) for r in receipts), sum(r.skipped for r in receipts)
            print(
                f"{len(named)} people enrolled, {added} templates added{_skipped(skipped)}; "
                f"{len(opened)} people are enrolled in all"
            )
            if _lacks_threshold(opened):
                # Data may be those that the model was trained on, who are further apart than strangers: not by itself.
                print(f"not calibrated: {opened.operating().basis}" if table is None else _calibrate_enrolled(opened))
            say([note for note in opened.notes if note not in before])  # a former calibration may be stale now
            return
        receipt = opened.enrol(identity, templates if ready is None else ready[0][1], request=request, replace=replace)
        print(
            f"enrolled {identity!r}: {len(receipt.numbers)} templates{_skipped(receipt.skipped)}, "
            f"change {receipt.sequence}{_again(receipt)}"
        )


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
    """Is this that person? Exit status 0 for a match, 1 for none, 3 for a gallery without a threshold."""
    from mettle.match import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False) as opened:
        found = opened.verify(identity, _given(picture and [picture], embeddings), far=far, threshold=threshold)
    if as_json:
        print(json.dumps(asdict(found) | {"verdict": found.verdict}))
    else:
        point = _point(found, "accepted as this person", found.false_accepts)
        print(f"{found.verdict}  score {found.score:.4f}  {point}")
    raise typer.Exit(3 if found.threshold is None else 0 if found.match else 1)


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
    """Who is this? The best candidates of every probe; "no match" where nobody reaches the threshold.

    Without a threshold, measured or given, every verdict is "not calibrated".
    """
    from mettle.match import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False) as opened:
        answers = opened.identify_many(_given(pictures, embeddings), k=k, far=far, threshold=threshold)
    if as_json:
        print(json.dumps([asdict(found) | {"verdict": found.verdict} for found in answers]))
        return
    names = [str(p) for p in pictures] if pictures else [f"probe {i}" for i in range(len(answers))]
    for name, found in zip(names, answers, strict=True):
        print(f"{name}: {found.verdict}  {_point(found, 'given a name', found.false_matches)}")
        for candidate in found.candidates:
            below = "" if candidate.match or found.threshold is None else "  below"
            print(f"  {candidate.score:+.4f}  {candidate.identity!r}{below}")


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
    print(f"deleted {identity!r}: {len(receipt.numbers)} templates, change {receipt.sequence}{_again(receipt)}")


def _run(model: Path | None) -> Any:
    if model is None:
        return None
    from mettle.train import open_run_folder

    return open_run_folder(model)


def _rows(table: Path, where: Sequence[str]) -> list[tuple[str, Any]]:
    from mettle.match.bulk import people_of_table

    return list(people_of_table(table, where))


def _length(templates: Any, rows: list[tuple[str, Any]] | None) -> int | None:
    """How long the embeddings are that were given; None where pictures or data were."""
    given = templates if rows is None else rows[0][1]
    return int(given.shape[-1]) if hasattr(given, "shape") and given.ndim in (1, 2) else None


def _lacks_threshold(opened: Any) -> bool:
    from mettle.errors import GalleryError

    try:
        return opened.operating().threshold is None
    except GalleryError:  # there is a calibration, but it is damaged: the notes say what to do
        return False


def _calibrate_enrolled(opened: Any) -> str:
    """Measure thresholds on whoever is enrolled, where they are enough; says on how many, or what is missing."""
    from mettle.match.calibration import count_pairs, lowest_rate, pairs_needed, people_needed
    from mettle.match.operating import most

    people, highest = len(opened), max(RATES)
    without = "until then answers have candidates and scores, and no match"
    remedy = "`mettle gallery calibrate` with more people or a higher --far, or --threshold with the question"
    rates = [rate for rate in RATES if people >= people_needed(rate)]
    if not rates:
        return (
            f"not calibrated: {people} people make {count_pairs(people)} impostor pairs, and a false-accept rate of "
            f"{highest:g} takes {pairs_needed(highest)} ({people_needed(highest)} people); {without}: {remedy}"
        )
    table = opened.calibrate(rates)
    point = opened.operating()
    if point.threshold is None:
        return (
            f"not calibrated: among {people} people too many share a template, so that no threshold keeps them apart; "
            f"{without}: see `mettle gallery audit`"
        )
    pairs = table[repr(point.far)]["impostors"]
    known = ", ".join(f"{float(rate):g}" for rate, entry in table.items() if entry["threshold"] is not None)
    named = most(point, opened.binding.fusion, people, opened.info().templates)
    return (
        f"calibrated on {people} people, {pairs} impostor pairs of people (enough for false-accept rates per person "
        f"from {lowest_rate(pairs):.2g}), for {known}; without --far answers are given at {point.far:g}, threshold "
        f"{point.threshold:.4f}, and at most {named:g} of strangers are given a name"
    )


def _given(pictures: list[Path] | None, embeddings: Path | None) -> Any:
    """Pictures, or embeddings from a file."""
    from mettle.errors import InputError

    if bool(pictures) == (embeddings is not None):
        raise InputError("give picture files, or --embeddings FILE.npy")
    arrays = [path for path in pictures or [] if path.suffix.lower() in (".npy", ".npz")]
    if arrays:
        raise InputError(f"{arrays[0]} is a file of embeddings, not a picture: give it as --embeddings {arrays[0]}")
    return pictures if embeddings is None else _array(embeddings)


def _array(path: Path) -> Any:
    import numpy as np

    from mettle.errors import DataError

    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:  # several arrays, as `mettle embed` writes them
            if "embeddings" in found:
                return found["embeddings"]
            from mettle.data.quantization import from_arrays  # imports torch, which other files do not need

            decoded = from_arrays({name: found[name] for name in found.files})
            if decoded is not None:
                return decoded
        raise DataError(f"{path} has no array called embeddings: give one, or an .npy file of numbers")
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}") from None
    except (ValueError, EOFError, BadZipFile) as problem:
        raise DataError(f"{path} is not an .npy file of numbers: {problem}") from None


def _everybody(
    bound: Any,
    embeds: Any,
    data: str | None,
    columns: dict[str, str | None],
    split: str | None,
    table: Path | None,
    rows: list[tuple[str, Any]] | None,
) -> Iterator[tuple[str, Any]]:
    """(identity, templates) of every label; ``embeds`` gives the run whose model embeds the data."""
    from mettle.errors import InputError
    from mettle.match.bulk import check_model_of_table, people_of_samples

    if table is not None and rows is not None:
        check_model_of_table(table, bound.model)
        return iter(rows)
    run = embeds()
    if run is None:
        raise InputError("--data must be embedded by a model: give --model RUN, or a --table of embeddings")
    return people_of_samples(run.model(), samples_of(run, data, **columns), split)


def _skipped(count: int) -> str:
    return f", {count} skipped that were there already" if count else ""


def _again(receipt: Any) -> str:
    return " (this request was served before)" if receipt.repeated else ""


def _point(found: Any, whom: str, most: float | None) -> str:
    if found.threshold is None:
        return found.basis
    if found.far is None:
        return f"threshold {found.threshold:.4f} (false-accept rate unknown; {found.basis})"
    known = "an unknown share" if most is None else f"at most {most:g}"
    counts = "" if found.per is None else f" a {found.per}"
    return (
        f"threshold {found.threshold:.4f} (false-accept rate {found.far:g}{counts}, {known} of strangers "
        f"{whom}; {found.basis})"
    )


def say(notes: Sequence[str]) -> None:
    """What was found odd on opening."""
    for note in notes:
        print(f"note: {note}")
