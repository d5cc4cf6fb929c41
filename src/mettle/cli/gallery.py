"""Commands of galleries: enrol, verify, identify, delete; what they hold, thresholds, damage, copies."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import typer

from mettle.cli.options import Domain, Image, Label, add_command_group, load_samples

gallery_app = add_command_group("gallery", "Enrol people under a trained model and say who is who.")

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
MILVUS = "METTLE_MILVUS"  # in the environment
Milvus = Annotated[
    str | None,
    typer.Option(
        envvar=MILVUS,
        help="Address of a Milvus server that searches, http://user:password@host:19530. Default: search here.",
    ),
]
# For what needs no search: the environment must not stop it where that server is down, or has nothing of the gallery.
NamedMilvus = Annotated[
    str | None,
    typer.Option(
        "--milvus", help=f"Address of a Milvus server whose collection is meant, too; not taken from {MILVUS}."
    ),
]
ErasedMilvus = Annotated[
    str | None,
    typer.Option(
        "--milvus",
        help=f"Address of a Milvus server to erase from, too. Default: {MILVUS}, except with a fusion rule.",
    ),
]


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
    from mettle.gallery import Gallery
    from mettle.gallery.binding import offered_binding
    from mettle.gallery.enrolment import canonical_name
    from mettle.gallery.inputs import TemplateInputs
    from mettle.gallery.storage.location import gallery_exists

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
    templates = None if identity is None else _read_templates(pictures, embeddings)
    run, new = _open_run(model), not gallery_exists(gallery)
    rows = None if table is None else _table_rows(table, where or ())
    if new and run is None and dim is None:
        dim = _embedding_length(templates, rows)
    named: set[str] = set()

    def everybody(bound: Any, embeds: Any) -> Iterator[tuple[str, Any]]:
        for name, theirs in _iterate_people(bound, embeds, data, columns, split, table, rows):
            named.add(name)
            yield name, theirs

    ready: Any = None
    if new and (offered := offered_binding(run, dim, fusion, None)) is not None:
        # All of it is looked at before a new gallery is made: a mistake leaves nothing behind.
        embedding = TemplateInputs(offered.dim, run)
        given = [(identity, templates)] if identity is not None else everybody(offered, lambda: embedding.run)
        ready = [(canonical_name(name, lambda _: False), embedding.to_vectors(theirs)) for name, theirs in given]
    with Gallery.open(gallery, model=run, dim=dim, fusion=fusion) as opened:
        print_notes(before := opened.notes)
        if identity is None:
            people = everybody(opened.binding, lambda: opened.run) if ready is None else ready
            receipts = opened.enrol_many(people, replace=replace)
            added, skipped = sum(len(r.numbers) for r in receipts), sum(r.skipped for r in receipts)
            print(
                f"{len(named)} people enrolled, {added} templates added{_describe_skipped(skipped)}; "
                f"{len(opened)} people are enrolled in all"
            )
            if _lacks_threshold(opened):
                # Data may be those that the model was trained on, who are further apart than strangers: not by itself.
                print(
                    f"not calibrated: {opened.decision_threshold().basis}"
                    if table is None
                    else _calibrate_enrolled(opened)
                )
            print_notes([note for note in opened.notes if note not in before])  # a former calibration may be stale now
            return
        receipt = opened.enrol(identity, templates if ready is None else ready[0][1], request=request, replace=replace)
        print(
            f"enrolled {identity!r}: {len(receipt.numbers)} templates{_describe_skipped(receipt.skipped)}, "
            f"change {receipt.sequence}{_describe_replay(receipt)}"
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
    from mettle.gallery import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False) as opened:
        found = opened.verify(
            identity, _read_templates(picture and [picture], embeddings), far=far, threshold=threshold
        )
    if as_json:
        print(json.dumps(asdict(found) | {"verdict": found.verdict}))
    else:
        point = _describe_threshold(found, "accepted as this person", found.false_accepts)
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
    milvus: Milvus = None,
    as_json: Json = False,
) -> None:
    """Who is this? The best candidates of every probe; "no match" where nobody reaches the threshold.

    Without a threshold, measured or given, every verdict is "not calibrated".
    """
    from mettle.gallery import Gallery

    with Gallery.open(gallery, model=model, read_only=True, create=False, milvus=milvus) as opened:
        answers = opened.identify_many(_read_templates(pictures, embeddings), k=k, far=far, threshold=threshold)
    if as_json:
        print(json.dumps([asdict(found) | {"verdict": found.verdict} for found in answers]))
        return
    names = [str(p) for p in pictures] if pictures else [f"probe {i}" for i in range(len(answers))]
    for name, found in zip(names, answers, strict=True):
        print(f"{name}: {found.verdict}  {_describe_threshold(found, 'given a name', found.false_matches)}")
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
    from mettle.gallery import Gallery

    with Gallery.open(gallery, create=False) as opened:
        receipt = opened.delete(identity, request=request)
    print(
        f"deleted {identity!r}: {len(receipt.numbers)} templates, change {receipt.sequence}{_describe_replay(receipt)}"
    )


def _open_run(model: Path | None) -> Any:
    if model is None:
        return None
    from mettle.train import open_run_folder

    return open_run_folder(model)


def _table_rows(table: Path, where: Sequence[str]) -> list[tuple[str, Any]]:
    from mettle.gallery.enrolment import people_of_table

    return list(people_of_table(table, where))


def _embedding_length(templates: Any, rows: list[tuple[str, Any]] | None) -> int | None:
    """How long the embeddings are that were given; None where pictures or data were."""
    given = templates if rows is None else rows[0][1]
    return int(given.shape[-1]) if hasattr(given, "shape") and given.ndim in (1, 2) else None


def _lacks_threshold(opened: Any) -> bool:
    from mettle.errors import GalleryError

    try:
        return opened.decision_threshold().threshold is None
    except GalleryError:  # there is a calibration, but it is damaged: the notes say what to do
        return False


def _calibrate_enrolled(opened: Any) -> str:
    """Measure thresholds on whoever is enrolled, where they are enough; says on how many, or what is missing."""
    from mettle.evaluate.calibration import pairs_needed
    from mettle.gallery.calibration import count_pairs, lowest_rate, people_needed
    from mettle.gallery.thresholds import false_accept_bound

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
    point = opened.decision_threshold()
    if point.threshold is None:
        return (
            f"not calibrated: among {people} people too many share a template, so that no threshold keeps them apart; "
            f"{without}: see `mettle gallery audit`"
        )
    pairs = table[repr(point.far)]["impostors"]
    known = ", ".join(f"{float(rate):g}" for rate, entry in table.items() if entry["threshold"] is not None)
    named = false_accept_bound(point, opened.binding.fusion, people, opened.info().templates)
    return (
        f"calibrated on {people} people, {pairs} impostor pairs of people (enough for false-accept rates per person "
        f"from {lowest_rate(pairs):.2g}), for {known}; without --far answers are given at {point.far:g}, threshold "
        f"{point.threshold:.4f}, and at most {named:g} of strangers are given a name"
    )


def _read_templates(pictures: list[Path] | None, embeddings: Path | None) -> Any:
    """Pictures, or embeddings from a file."""
    from mettle.errors import InputError

    if bool(pictures) == (embeddings is not None):
        raise InputError("give picture files, or --embeddings FILE.npy")
    arrays = [path for path in pictures or [] if path.suffix.lower() in (".npy", ".npz")]
    if arrays:
        raise InputError(f"{arrays[0]} is a file of embeddings, not a picture: give it as --embeddings {arrays[0]}")
    return pictures if embeddings is None else _load_array(embeddings)


def _load_array(path: Path) -> Any:
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


def _iterate_people(
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
    from mettle.gallery.enrolment import check_model_of_table, people_of_samples

    if table is not None and rows is not None:
        check_model_of_table(table, bound.model)
        return iter(rows)
    run = embeds()
    if run is None:
        raise InputError("--data must be embedded by a model: give --model RUN, or a --table of embeddings")
    return people_of_samples(run.model(), load_samples(run, data, **columns), split)


def _describe_skipped(count: int) -> str:
    return f", {count} skipped that were there already" if count else ""


def _describe_replay(receipt: Any) -> str:
    return " (this request was served before)" if receipt.repeated else ""


def _describe_threshold(found: Any, whom: str, most: float | None) -> str:
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


def print_notes(notes: Sequence[str]) -> None:
    """What was found odd on opening."""
    for note in notes:
        print(f"note: {note}")


@gallery_app.command()
def info(gallery: Where, milvus: NamedMilvus = None, as_json: Json = False) -> None:
    """What a gallery holds, under which model, and how it searches."""
    from mettle.gallery import Gallery
    from mettle.gallery.thresholds import NOT_CALIBRATED

    with Gallery.open(gallery, read_only=True, create=False, milvus=milvus) as opened:
        notes, found = opened.notes, opened.info()
    if as_json:
        print(json.dumps(asdict(found) | {"notes": notes}, default=str))
        return
    print_notes(notes)
    print(
        f"{found.where} ({found.kind}): {found.identities} people, {found.templates} templates of {found.dim} numbers"
    )
    print(f"  model {found.model or 'none: embeddings from elsewhere'}; several templates: {found.fusion}")
    for name, value in found.index.items():
        print(f"  index {name}: {value}")
    if (kept := found.calibration) is not None:
        rates = ", ".join(f"{rate:g}" for rate in kept["rates"])
        print(
            f"  calibrated for {rates} per person on {kept['people']} people "
            f"with {kept['templates']} templates, after change {kept['sequence']}; since then {kept['came']} templates "
            f"came and {kept['gone']} went{': stale' if kept['stale'] else ''}"
        )
    for rate, entry in found.thresholds.items():
        _print_threshold(rate, entry)
    if not notes and not any(entry.get("threshold") is not None for entry in found.thresholds.values()):
        print(f"  not calibrated: {NOT_CALIBRATED}")


@gallery_app.command()
def calibrate(
    gallery: Where,
    far: Annotated[
        list[float] | None, typer.Option(help="False-accept rate per person. Repeatable; default: 0.1 0.01 0.001.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Keep the thresholds in the gallery: its answers go by them.")] = True,
    forget: Annotated[bool, typer.Option("--forget", help="Forget them: answer by the model's again.")] = False,
    as_json: Json = False,
) -> None:
    """Thresholds whose false-accept rate is per person, measured by trying everybody enrolled on the others."""
    from mettle.errors import InputError
    from mettle.gallery import Gallery

    if forget and (far or not keep):
        raise InputError("--forget measures nothing: give it alone, without --far and --no-keep")
    with Gallery.open(gallery, read_only=not keep, create=False) as opened:
        if forget:
            had = opened.forget_calibration()
            print("forgotten" if had else "nothing was kept: there is nothing to forget")
            return
        found = opened.calibrate(far or (0.1, 0.01, 0.001), keep=keep)
        measurable = any(entry["threshold"] is not None for entry in found.values())
        point = (
            opened.decision_threshold() if keep and measurable else None
        )  # otherwise a damaged one may still be there
    if as_json:
        print(json.dumps(found))
        return
    for rate, entry in found.items():
        _print_threshold(rate, entry)
    if not keep:
        end = "not kept: answer at one of these by --threshold"
    elif point is None:
        pairs = next(iter(found.values()))["impostors"]
        end = f"nothing could be measured, so nothing was kept: {_describe_missing_pairs(pairs)}"
    else:
        end = f"kept: answers at these rates go by it, and without --far at {point.far:g} per {point.per}"
    print(f"measured on {next(iter(found.values()))['measured_on']}; {end}")


@gallery_app.command()
def ids(gallery: Where) -> None:
    """Everybody enrolled, one a line."""
    from mettle.gallery import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        for name in opened.ids():
            print(name if name.isprintable() else repr(name))


@gallery_app.command()
def check(gallery: Where, milvus: NamedMilvus = None) -> None:
    """Look for damage in storage and index. Exit status 1 where there is any."""
    from mettle.errors import GalleryError, GalleryLocked, GalleryUnavailable
    from mettle.gallery import Gallery
    from mettle.gallery.storage.location import gallery_exists

    there = gallery_exists(gallery)
    try:
        with Gallery.open(gallery, read_only=True, create=False, milvus=milvus) as opened:
            print_notes(opened.notes)
            problems = opened.check()
    except (GalleryLocked, GalleryUnavailable):
        raise
    except GalleryError as error:  # so damaged that it cannot be opened
        if not there:
            raise
        problems = [str(error)]
    for problem in problems:
        print(problem)
    print("sound" if not problems else f"{len(problems)} problems")
    raise typer.Exit(1 if problems else 0)


@gallery_app.command()
def scrub(
    gallery: Where,
    pause: Annotated[float, typer.Option(help="Seconds to wait after every few hundred people.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Read everything that answers rest on again, while the gallery is in use. Exit status 1 where there is damage."""
    from mettle.gallery import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        print_notes(opened.notes if not as_json else [])
        found = opened.scrub(pause=pause)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        for problem in found.problems:
            print(problem)
        print(found)
    raise typer.Exit(1 if found.problems else 0)


@gallery_app.command()
def audit(
    gallery: Where,
    far: Far = None,
    threshold: Threshold = None,
    count: Annotated[int, typer.Option(help="Length of each list.")] = 20,
    as_json: Json = False,
) -> None:
    """Who would be taken for whom, which templates may be under a wrong name. Exit status 1 where there is damage."""
    from mettle.gallery import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        found = opened.audit(far=far, threshold=threshold, count=count)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print_audit(gallery, found)
    raise typer.Exit(1 if found.problems else 0)


@gallery_app.command()
def compact(gallery: Where, milvus: ErasedMilvus = None) -> None:
    """Erase deleted templates from every file of the gallery."""
    from mettle.gallery import Gallery

    with Gallery.open(gallery, create=False, milvus=milvus or _usual_milvus(gallery)) as opened:
        opened.compact()
    print("compacted")


def _usual_milvus(gallery: str) -> str | None:
    """The environment's Milvus server, where it can hold templates of this gallery: of a fused one it never does."""
    from mettle.gallery.storage.location import gallery_exists, open_storage

    if not (address := os.environ.get(MILVUS)) or not gallery_exists(gallery):
        return None
    storage = open_storage(gallery, True)
    try:
        return address if storage.binding.fusion == "best" else None
    finally:
        storage.close()


@gallery_app.command()
def index(
    gallery: Where,
    kind: Annotated[str, typer.Option(help="auto, exact, or an approximate kind.")] = "auto",
    latency_ms: Annotated[float | None, typer.Option(help="Wanted time per probe.")] = None,
    recall: Annotated[float, typer.Option(help="Least share of true neighbours to find.")] = 0.99,
    memory_mb: Annotated[float | None, typer.Option(help="Most memory for the index.")] = None,
    milvus: Milvus = None,
) -> None:
    """Choose and build the index anew; prints what it loses against exact search."""
    from mettle.gallery import Gallery, IndexSpec

    wanted = IndexSpec(latency_ms=latency_ms, recall=recall, memory_mb=memory_mb, kind=kind)
    with Gallery.open(gallery, create=False, milvus=milvus) as opened:
        measured = opened.reindex(wanted)
    print(measured if measured is not None else "nothing to index")


@gallery_app.command()
def move(
    source: Where,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new folder, or a new place on a server.")],
) -> None:
    """Copy a gallery to another kind of storage, comparing counts and checksums; the source stays as it is."""
    from mettle.gallery import Gallery

    moved = Gallery.move(source, target)
    print(f"moved {moved.identities} people, {moved.templates} templates; checksum {moved.digest[:16]} on both sides")


@gallery_app.command()
def snapshot(
    gallery: Where,
    output: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a consistent copy of a gallery while it is in use."""
    from mettle.gallery import Gallery

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        print(opened.snapshot(output))


def _describe_missing_pairs(pairs: int) -> str:
    """What a calibration that measured nothing would have needed."""
    from mettle.gallery.calibration import lowest_rate

    return (
        f"{pairs} impostor pairs of people are enough for rates from {lowest_rate(pairs):.2g}, unless people share "
        "templates; enrol more people, or ask for a higher --far"
    )


def _print_audit(where: str, found: Any) -> None:
    print_notes(found.notes)
    if not found.people:
        print(f"{where}: nobody is enrolled, there is nothing to compare")
    else:
        print(f"{where}: {found.people} people, {found.templates} templates; people with one only: {found.single}")
        if found.threshold is None:
            print(f"not calibrated, so only pairs that share a template are told: {found.basis}")
        else:
            rate = "rate unknown" if found.far is None else f"rate {found.far:g} a {found.per}"
            print(f"compared at threshold {found.threshold:.4f} (false-accept {rate}; {found.basis})")
        _print_confusable(found)
        if found.threshold is not None:
            _print_misfiled(found)
    for problem in found.problems:
        print(problem)
    print("storage and index: sound" if not found.problems else f"storage and index: {len(found.problems)} problems")


def _print_confusable(found: Any) -> None:
    whole = found.pairs == found.people * (found.people - 1) // 2
    of = f"{found.pairs}" if whole else f"{found.pairs} that were compared, drawn at random,"
    if found.threshold is None:
        said = f"{found.same_count} pairs of people of {of} share a template"
    else:
        alike = f"{found.alike_count} pairs of people of {of} would be taken for each other"
        said = f"{alike}, {found.same_count} of them by the same template"
    print(f"{said}{_list_heading(found.alike, found.alike_count)}")
    for pair in found.alike:
        print(f"  {pair.score:+.4f}  {pair.first!r}  {pair.second!r}{'  same template' if pair.same else ''}")


def _print_misfiled(found: Any) -> None:
    print(
        f"{found.stray_count} templates do not match the others of their person"
        f"{_list_heading(found.strays, found.stray_count)}"
    )
    for stray in found.strays:
        taken = stray.other_score is not None and stray.other_score >= found.threshold
        rather = "" if stray.other is None else f"  {stray.other_score:+.4f} with {stray.other!r}"
        print(f"  {stray.score:+.4f}  {stray.identity!r} template {stray.number}{rather}{': a match' if taken else ''}")


def _list_heading(shown: Any, count: int) -> str:
    return ":" if len(shown) == count > 0 else f"; the first {len(shown)}:" if shown else ""


def _print_threshold(rate: str, entry: Any) -> None:
    from mettle.gallery.thresholds import CONTRADICTED, threshold_note, weak_evidence_note

    value, per = entry.get("threshold"), entry.get("per", "comparison")
    if value is None:
        said = CONTRADICTED if entry.get("status") == CONTRADICTED else "not measurable"
    else:
        said = f"threshold {value:.4f}{weak_evidence_note(float(rate), entry)}{threshold_note(entry)}"
    print(f"  false-accept rate {rate} per {per}: {said}")
