"""Commands that look after a gallery: what it holds, its thresholds, damage, its index, copies."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.galleries import Far, Json, Threshold, Where, gallery_app, say


@gallery_app.command()
def info(gallery: Where, as_json: Json = False) -> None:
    """What a gallery holds, under which model, and how it searches."""
    from mettle.gallery import Gallery
    from mettle.gallery.thresholds import NOT_CALIBRATED

    with Gallery.open(gallery, read_only=True, create=False) as opened:
        notes, found = opened.notes, opened.info()
    if as_json:
        print(json.dumps(asdict(found) | {"notes": notes}, default=str))
        return
    say(notes)
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
        _threshold(rate, entry)
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
        point = opened.operating() if keep and measurable else None  # otherwise a damaged one may still be there
    if as_json:
        print(json.dumps(found))
        return
    for rate, entry in found.items():
        _threshold(rate, entry)
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
def check(gallery: Where) -> None:
    """Look for damage in record and index. Exit status 1 where there is any."""
    from mettle.errors import GalleryError, GalleryLocked, GalleryUnavailable
    from mettle.gallery import Gallery
    from mettle.gallery.storage.location import exists

    there = exists(gallery)
    try:
        with Gallery.open(gallery, read_only=True, create=False) as opened:
            say(opened.notes)
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
        _audited(gallery, found)
    raise typer.Exit(1 if found.problems else 0)


@gallery_app.command()
def compact(gallery: Where) -> None:
    """Erase deleted templates from every file of the gallery."""
    from mettle.gallery import Gallery

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
    from mettle.gallery import Gallery, Wanted

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


def _audited(where: str, found: Any) -> None:
    say(found.notes)
    if not found.people:
        print(f"{where}: nobody is enrolled, there is nothing to compare")
    else:
        print(f"{where}: {found.people} people, {found.templates} templates; people with one only: {found.single}")
        if found.threshold is None:
            print(f"not calibrated, so only pairs that share a template are told: {found.basis}")
        else:
            rate = "rate unknown" if found.far is None else f"rate {found.far:g} a {found.per}"
            print(f"compared at threshold {found.threshold:.4f} (false-accept {rate}; {found.basis})")
        _alike(found)
        if found.threshold is not None:
            _strays(found)
    for problem in found.problems:
        print(problem)
    print("record and index: sound" if not found.problems else f"record and index: {len(found.problems)} problems")


def _alike(found: Any) -> None:
    whole = found.pairs == found.people * (found.people - 1) // 2
    of = f"{found.pairs}" if whole else f"{found.pairs} that were compared, drawn at random,"
    if found.threshold is None:
        said = f"{found.same_count} pairs of people of {of} share a template"
    else:
        alike = f"{found.alike_count} pairs of people of {of} would be taken for each other"
        said = f"{alike}, {found.same_count} of them by the same template"
    print(f"{said}{_listed(found.alike, found.alike_count)}")
    for pair in found.alike:
        print(f"  {pair.score:+.4f}  {pair.first!r}  {pair.second!r}{'  same template' if pair.same else ''}")


def _strays(found: Any) -> None:
    print(
        f"{found.stray_count} templates do not match the others of their person"
        f"{_listed(found.strays, found.stray_count)}"
    )
    for stray in found.strays:
        taken = stray.other_score is not None and stray.other_score >= found.threshold
        rather = "" if stray.other is None else f"  {stray.other_score:+.4f} with {stray.other!r}"
        print(f"  {stray.score:+.4f}  {stray.identity!r} template {stray.number}{rather}{': a match' if taken else ''}")


def _listed(shown: Any, count: int) -> str:
    return ":" if len(shown) == count > 0 else f"; the first {len(shown)}:" if shown else ""


def _threshold(rate: str, entry: Any) -> None:
    from mettle.gallery.thresholds import CONTRADICTED, doubt, remark

    value, per = entry.get("threshold"), entry.get("per", "comparison")
    if value is None:
        said = CONTRADICTED if entry.get("status") == CONTRADICTED else "not measurable"
    else:
        said = f"threshold {value:.4f}{doubt(float(rate), entry)}{remark(entry)}"
    print(f"  false-accept rate {rate} per {per}: {said}")
