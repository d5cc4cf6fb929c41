"""Commands around a run: train, evaluate, report, embed, export, recipes."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import (
    AllowImport,
    Domain,
    Image,
    Label,
    ReadMegabytes,
    ReadSeconds,
    RunPath,
    Set,
    allow_packages,
    app,
    cache_folder,
    check_output_folder,
    format_rate,
    is_writable,
    load_samples,
    print_scenario,
    read_within_limits,
)
from mettle.errors import InputError

DEFAULT = "da-supcon"
RUNS = Path("runs")


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A shipped recipe (see `mettle recipes`) or a TOML file. Default: da-supcon; with --resume, the run's."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder; default: the recipe's.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders go.")] = RUNS,
    label: Annotated[str | None, typer.Option(help="Column of labels; short for --set data.label=.")] = None,
    domain: Annotated[str | None, typer.Option(help="Column of domains; short for --set data.domain=.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of image files; short for --set data.image=.")] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="A run to start from: its network, with its weights and its head.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the named run if it is there.")] = False,
    report: Annotated[bool, typer.Option(help="Evaluate and write report.html afterwards.")] = True,
    allow_import: AllowImport = None,
    seeds: Annotated[
        int | None, typer.Option(min=2, help="Train so many seeds, counted up from the recipe's, and tell their mean.")
    ] = None,
    overrides: Set = None,
) -> None:
    """Train a recipe, evaluate it on what it never saw, and write a report."""
    from mettle.cli.torchrun import join_ranks_quietly
    from mettle.train.from_recipe import RESUME

    check_run_name(name)
    columns = {"source": data, "label": label, "domain": domain, "image": image}
    given = {key: value for key, value in columns.items() if value is not None}
    with join_ranks_quietly(RESUME, takes_gpu=False) as ranks:
        folder = runs / ranks.broadcast(name or free_name(runs, Path(recipe or DEFAULT).stem, resume))
        again = ["mettle", "train", *([] if runs == RUNS else ["--runs", str(runs)]), "--name", folder.name, "--resume"]
        again += [] if report else ["--no-report"]
        allowed = allow_packages(allow_import)
        again += [word for package in allowed for word in ("--allow-import", package)]
        overrides = [*_model_overrides(start), *(overrides or [])]
        if seeds is not None or (resume and (folder / "seeds.json").is_file()):
            if not report:
                raise InputError("--seeds tells the mean of what is measured: leave out --no-report")
            if ranks.size > 1:
                raise InputError("--seeds trains one run after the other in one process: start it without torchrun")
            _train_seeds(recipe, folder, resume, overrides, given, seeds, again, allowed)
            return
        said: list[str] = []
        plan = _load_recipe(recipe, folder, resume, overrides, given, collect_notes(said))
        ranks.wait()  # the folder was looked at, and may be made
        train_run(plan, folder, resume, report, again, said, allowed)


def _train_seeds(
    recipe: str | None,
    folder: Path,
    resume: bool,
    overrides: list[str],
    data: dict[str, str],
    count: int | None,
    again: list[str],
    allowed: tuple[str, ...],
) -> None:
    """Train one recipe with several seeds, on one split, each in a run folder of its own, and tell the mean."""
    import json

    from mettle.atomic_files import write_text
    from mettle.errors import RunError
    from mettle.report.seeds import describe_seeds, write_seeds
    from mettle.train import open_run_folder

    listed = folder / "seeds.json"
    if folder.exists() and not (resume and listed.is_file()):
        what = "is no folder of several seeds" if resume else "is there already: continue it with --resume"
        raise RunError(f"{folder} {what}, or choose another --name")
    known = json.loads(listed.read_text())["seeds"] if listed.is_file() else []
    said: list[str] = []
    first = folder / f"seed-{known[0]}" if known else folder
    plan = _load_recipe(recipe, first, resume, overrides, data, collect_notes(said))
    seeds = known or [plan.seed + k for k in range(count or 0)]
    if count not in (None, len(seeds)):
        raise RunError(f"{folder} has {len(seeds)} seeds, not {count}: resume it without --seeds")
    split = plan.seed if plan.data.split_seed is None else plan.data.split_seed
    folder.mkdir(parents=True, exist_ok=True)
    if not known:
        write_text(listed, json.dumps({"format": 1, "seeds": seeds}))
    for seed in seeds:
        place = folder / f"seed-{seed}"
        if (place / "report.html").is_file():
            print(f"seed {seed}: done already, {place}", flush=True)
            continue
        print(f"seed {seed}:", flush=True)
        own = plan.with_values({"seed": seed, "data.split_seed": split})
        train_run(own, place, resume and place.exists(), True, again, said, allowed)
    for line in describe_seeds(write_seeds([open_run_folder(folder / f"seed-{seed}") for seed in seeds], folder)):
        print(line)
    print(f"seeds: {folder / 'seeds.html'}")


def _model_overrides(start: Path | None) -> list[str]:
    """The overrides that make the network of a recipe that of a run."""
    import json

    from mettle.train import model_of_run

    model = {} if start is None else model_of_run(start)
    return [f"model.{key}={json.dumps(value)}" for key, value in model.items()]


def collect_notes(said: list[str]) -> Callable[[str], None]:
    """Prints notes and remembers them."""

    def say(note: str) -> None:
        said.append(note)
        print(f"note: {note}", flush=True)

    return say


def train_run(
    plan: Any, folder: Path, resume: bool, report: bool, again: list[str], said: list[str], allowed: tuple[str, ...]
) -> None:
    """Train one run; ``again`` is the command that continues it."""
    from mettle.evaluate import ValidationScore
    from mettle.evaluate.run.pair_tables import write_pair_metrics
    from mettle.pairs.distributed import RankGroup
    from mettle.train.callbacks import Progress
    from mettle.train.from_recipe import build_model
    from mettle.train.from_recipe import train as run_training

    resumed, say = resume and folder.exists(), collect_notes(said)

    def print_folder(run: Any) -> None:
        print(f"run folder: {run.folder}", flush=True)
        if resumed:
            print(_describe_origin(run.folder), flush=True)

    print(plan.title(), flush=True)
    options: dict[str, Any] = {
        "callbacks": [Progress(plan.train.log_every)],
        "on_note": say,
        "on_start": print_folder,
    }
    options["allow_import"] = allowed
    outcome = run_training(plan, folder, resume=resume, cache=cache_folder(), score=ValidationScore(), **options)
    measured = write_pair_metrics(outcome) if RankGroup.current().is_first else ()
    for note in (*outcome.notes, *measured):
        if note not in said:
            say(note)
    if not outcome.finished:
        print(f"stopped on request; continue with: {shlex.join(again)}")
        raise typer.Exit(1)
    if report and RankGroup.current().is_first:
        untrained = None
        if plan.foreign_model is not None:  # only here it may be built again: its code was allowed for this command
            untrained = build_model(outcome.run.recipe, outcome.samples, allow_import=options["allow_import"])
        _evaluate_and_report(outcome.run, outcome.samples, outcome.model, said=said, untrained=untrained)


@app.command()
def adopt(
    network: Annotated[str, typer.Argument(help="Import path of the network or its factory: shop.nets:make.")],
    folder: Annotated[Path, typer.Argument(help="The run folder to make.")],
    weights: Annotated[Path | None, typer.Option(help="File of its weights: .safetensors, or .pth of tensors.")] = None,
    size: Annotated[str | None, typer.Option(help="Images it takes: 224, or 128x64 (height x width).")] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of one input that is no image: 80x100.")] = None,
    channels: Annotated[int, typer.Option(help="Channels of the images: 3 or 1.")] = 3,
    mean: Annotated[str | None, typer.Option(help="Mean of each channel in [0, 1]: 0.485,0.456,0.406.")] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of each channel.")] = None,
    resize: Annotated[str, typer.Option(help="How images get their size: crop, pad or stretch.")] = "crop",
    crop: Annotated[float | None, typer.Option(help="Share of the sides that a center crop keeps.")] = None,
    interpolation: Annotated[str, typer.Option(help="bilinear, bicubic, ...")] = "bilinear",
) -> None:
    """Make a run of a network that was trained elsewhere, so that it can be measured, exported and served."""
    from mettle.api import adopt as make_run
    from mettle.model.weights import load_any_weights
    from mettle.train.factory import call_factory, import_object

    allowed = allow_packages([network.partition(":")[0]])  # naming it on the command line allows it
    if (size is None) == (shape is None):
        raise InputError("say what the network takes: --size for images, or --shape for other inputs")
    module = call_factory(import_object(network, allowed, "the network"), {}, network, {})
    if weights is not None:
        load_any_weights(module, weights)
    if shape is not None:
        import torch

        example = torch.rand(4, *_read_numbers(shape, "x", int, "--shape"))
        run = make_run(module, folder, example=example)
    else:
        way: dict[str, Any] = {"size": _read_numbers(str(size), "x", int, "--size"), "channels": channels}
        way |= {"resize": resize, "crop": crop, "interpolation": interpolation}
        for key, text in (("mean", mean), ("std", std)):
            way[key] = None if text is None else _read_numbers(text, ",", float, f"--{key}")
        way["size"] = way["size"][0] if len(way["size"]) == 1 else tuple(way["size"])
        run = make_run(module, folder, preprocess=_make_preprocess(way))
    for note in run.notes:
        print(f"note: {note}")
    print(f"run folder: {run.folder}")
    print(f"next: mettle evaluate {shlex.quote(str(run.folder))} --data DATA measures it and sets its thresholds")


def _make_preprocess(way: dict[str, Any]) -> Any:
    from mettle.model import Preprocess

    return Preprocess(**way)


def _read_numbers(text: str, sign: str, kind: type, option: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(sign)]
    except ValueError:
        raise InputError(f"{option} takes numbers with {sign!r} between them, got {text!r}") from None


@app.command()
def evaluate(
    run: RunPath,
    data: Annotated[str | None, typer.Option(help="Other data to evaluate on; default: the run's own.")] = None,
    label: Label = None,
    domain: Domain = None,
    image: Image = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the metrics here as well.")] = None,
) -> None:
    """Measure a run: EER, AUC, TAR at false-accept rates, Recall@K, MAP@R, with intervals over identities."""
    import json

    from mettle.atomic_files import write_text
    from mettle.cli.torchrun import join_ranks_quietly
    from mettle.evaluate.run import evaluate_run
    from mettle.train import open_run_folder

    with join_ranks_quietly() as ranks:
        opened = open_run_folder(run)
        place = check_output_folder(output)
        samples = load_samples(opened, data, label=label, domain=domain, image=image)
        # Its own, at another place; an adopted model takes any as its own.
        own = data is None or opened.is_adopted or opened.matches_data(samples.fingerprint())
        kept = own and _keeps(opened, output)
        _print_measuring(samples)
        found = evaluate_run(opened, samples, own_data=own, write=kept, across_ranks=ranks.size > 1)
    if not ranks.is_first:
        return
    _print_metrics(found.metrics)
    if kept:
        print(f"metrics: {opened.folder / 'metrics.json'}")
    if place is not None:
        write_text(place, json.dumps(found.metrics, indent=1))
        print(f"metrics: {place}")
    if not kept and place is None:
        print("metrics: printed only; use -o FILE to keep them")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the page.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Other data to report on, with -o; or the run's own, where they are now.")
    ] = None,
    label: Label = None,
    domain: Domain = None,
    image: Image = None,
) -> None:
    """Write the report of a run, or compare several runs on one page."""
    from mettle.report import write_comparison
    from mettle.train import open_run_folder

    opened = [open_run_folder(run) for run in runs]
    check_output_folder(output)
    if len(opened) > 1:
        if [data, label, domain, image].count(None) < 4:
            which = "--data, --label, --domain and --image go with the report of one run"
            raise InputError(f"{which}: a comparison is of what was measured already")
        print(f"comparison: {write_comparison(opened, output or Path('comparison.html'))}")
        return
    kept = _keeps(opened[0], output)
    samples = load_samples(opened[0], data, label=label, domain=domain, image=image)
    own = data is None or opened[0].matches_data(samples.fingerprint())
    if not own and output is None:
        raise InputError(f"{data} are not the data that {runs[0]} was trained on: a page of them needs -o FILE")
    _evaluate_and_report(opened[0], samples, None, output, kept and own, own)


@app.command()
def embed(
    run: Annotated[
        Path,
        typer.Argument(help="A run folder; or, without training, timm/NAME, torchvision/NAME or a file of weights."),
    ],
    data: Annotated[str, typer.Argument(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="File to write: .npz, .parquet or .csv; under torchrun a folder NAME.parquet."
        ),
    ],
    label: Label = None,
    domain: Domain = None,
    image: Image = None,
    dim: Annotated[
        int | None, typer.Option(help="Keep the first DIM numbers of each embedding, for runs of a Matryoshka loss.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(help="How numbers are kept: float32, float16, int8 or binary (signs), the last three in .npz."),
    ] = "float32",
    backbone: Annotated[
        str | None, typer.Option(help="The network that a file of weights is of, where its name does not say it.")
    ] = None,
    read_seconds: ReadSeconds = 5.0,
    read_megabytes: ReadMegabytes = 1024,
) -> None:
    """Embed a data set with a trained run or a pretrained network: embeddings, ids, labels and all other columns."""
    from mettle.cli.torchrun import join_ranks_quietly
    from mettle.model.inference import choose_encoder
    from mettle.start import is_backbone
    from mettle.train import open_run_folder

    check_output_folder(output)
    choose_encoder(output, precision)  # type: ignore[arg-type]  # an ending that is not written is refused before the data are read
    if not run.is_dir() and is_backbone(str(run)):
        with join_ranks_quietly() as ranks, read_within_limits(read_seconds, read_megabytes):
            columns = {"source": data, "label": label, "domain": domain, "image": image}
            print(_embed_with_backbone(str(run), backbone, columns, output, dim, precision, ranks))
        return
    if backbone is not None:
        raise InputError(f"--backbone says which network a file of weights is of, {run} is none: leave it out")
    with join_ranks_quietly() as ranks, read_within_limits(read_seconds, read_megabytes):
        opened = open_run_folder(run)
        samples = load_samples(opened, data, label=label, domain=domain, image=image, labeled=False)
        weights = opened.contract()["weights"]
        print(_write_embeddings(opened.model(), samples, output, dim, precision, ranks, weights))


def _write_embeddings(
    model: Any, samples: Any, output: Path, dim: int | None, precision: Any, ranks: Any, weights: str | None = None
) -> str:
    """Embed into one file, or as one of several processes into a folder with a file of each."""
    from mettle.model.embedding_shards import write_embedding_shards
    from mettle.model.inference import write_embeddings

    if ranks.size == 1:
        return write_embeddings(model, samples, output, dim=dim, precision=precision, weights=weights)
    return write_embedding_shards(model, samples, output, dim=dim, weights=weights, ranks=ranks)


def _embed_with_backbone(
    weights: str,
    backbone: str | None,
    columns: dict[str, str | None],
    output: Path,
    dim: int | None,
    precision: str,
    ranks: Any,
) -> str:
    """Embed images with a pretrained network as it is, prepared as its weights want them."""
    from mettle.start import build_frozen_backbone, describe_weights
    from mettle.train import prepare_samples
    from mettle.train.recipe import parse_recipe
    from mettle.train.starting_weights import follow_starting_weights

    recipe, _, notes = follow_starting_weights(
        parse_recipe({"data": columns, "model": {"head": "linear", **describe_weights(weights, backbone)}})
    )
    for note in notes:
        print(f"note: {note}", flush=True)
    samples = prepare_samples(recipe, cache_folder(), split=False, labeled=False)
    model = build_frozen_backbone(recipe, samples)
    return _write_embeddings(model, samples, output, dim, precision, ranks)


@app.command()
def export(
    run: RunPath,
    onnx: Annotated[Path, typer.Option(help="ONNX file to write.")],
) -> None:
    """Export the trained model to ONNX, with a free batch size, and check it against torch."""
    from mettle.model.onnx import export_onnx
    from mettle.train import open_run_folder

    check_output_folder(onnx)
    difference = export_onnx(open_run_folder(run).model(), onnx)
    print(f"{onnx}: largest difference from torch {difference:.1e}")


@app.command()
def recipes() -> None:
    """List the recipes that come with mettle."""
    from mettle.train.recipe_files import builtin_titles

    titles = builtin_titles()
    width = max(map(len, titles))
    for name, title in titles.items():
        print(f"{name:<{width}}  {title}")


def check_run_name(name: str | None) -> None:
    """A run is a folder in the folder of runs: a name that leads elsewhere is refused."""
    if name is None:
        return
    if name.strip() in ("", ".", "..") or any(mark in name for mark in "/\\\0") or Path(name).name != name:
        raise InputError(f"--name takes a plain name of a folder, got {name!r}: say where run folders go with --runs")


def _load_recipe(
    recipe: str | None,
    folder: Path,
    resume: bool,
    overrides: list[str],
    data: dict[str, str],
    say: Callable[[str], None],
) -> Any:
    """The recipe to train: the named one, or that of the run to continue; ``data`` are keys of its table [data]."""
    from mettle.errors import RunError
    from mettle.train import load, open_run_folder

    source: str | Path = recipe or DEFAULT
    resumed = resume and recipe is None
    if resumed:
        if not folder.exists():
            raise RunError(
                f"there is no run {folder} to continue: name its place with --runs and --name, or a recipe to start it"
            )
        source = open_run_folder(folder).folder / "recipe.toml"
    return load(source, overrides, on_note=say, **({"data": data} if data else {}))


def _describe_origin(folder: Path) -> str:
    """Where a run is taken up again."""
    from mettle.train.checkpoint import list_checkpoints

    found = list_checkpoints(folder / "checkpoints") or list_checkpoints(folder / "first" / "checkpoints")
    if not found:
        return "continuing: no checkpoint yet, so from the first step"
    return f"continuing: newest checkpoint {found[-1].relative_to(folder)}"


def _keeps(run: Any, output: Path | None) -> bool:
    """Whether what is measured goes into the run's folder: not where nothing can be written, if it goes elsewhere."""
    from mettle.errors import RunError

    if is_writable(run.folder):
        return True
    if output is None:
        raise RunError(f"cannot write into {run.folder}: name another place for the result with -o FILE")
    print(f"note: {run.folder} cannot be written: its own metrics, thresholds and card stay as they are")
    return False


def _evaluate_and_report(
    run: Any,
    samples: Any,
    model: Any,
    output: Path | None = None,
    kept: bool = True,
    own: bool = True,
    said: Sequence[str] = (),
    untrained: Any = None,
) -> None:
    """Measure and write the page; ``kept`` says whether the run's own files are brought up to date."""
    from mettle.evaluate.run import evaluate_run
    from mettle.report import write_report

    _print_measuring(samples)
    found = evaluate_run(run, samples, model=model, own_data=own, write=kept, untrained=untrained)
    _print_metrics(found.metrics, said)
    if own and not kept:  # a run that knows no data of its own gets no card: see write_report
        run = replace(run, state={key: value for key, value in run.state.items() if key != "data"})
    print(f"report: {write_report(run, found, output)}")


def _print_measuring(samples: Any) -> None:
    """A sign of life before some seconds, or some tens of them, in which nothing is printed."""
    tested = len(samples.part("test")) or len(samples)
    print(f"measuring on {tested:,} test samples ...", flush=True)


def _print_metrics(metrics: dict[str, Any], said: Sequence[str] = ()) -> None:
    """The headline numbers, a line per scenario, and what to know before trusting them."""
    from mettle.evaluate.run.probes import describe_probes
    from mettle.report.caveats import list_caveats, training_verdict
    from mettle.report.headline import headline_lines

    facts, verdict = metrics["data"], training_verdict(metrics)
    print(f"{facts['protocol']}; {facts['test_samples']} test samples of {facts['test_identities']} identities")
    if verdict:  # before all numbers: it decides what they are worth
        typer.secho(f"WARNING: {' '.join(verdict.split())}", fg="red", bold=True)  # in color on a terminal only
    for line in headline_lines(metrics):
        print(f"  {line}")
    for name, scenario in metrics["scenarios"].items():
        print_scenario(name, scenario["verification"], scenario["retrieval"])
        for other, values in metrics.get("baselines", {}).items():
            near = f"  Recall@1 {values[name]['recall@1']:.1%}" if "recall@1" in values[name] else ""
            print(f"  {'':<13} EER {format_rate(values[name]['eer'])}{near} with {other}")
    for line in describe_probes(metrics.get("probe")):
        print(f"  {line}")
    for text in list_caveats(metrics):
        if text != verdict and not any(note.startswith(text) for note in said):
            print(f"warning: {' '.join(text.split())}")  # no-break spaces are for pages


def free_name(runs: Path, stem: str, resume: bool) -> str:
    """The recipe's name, numbered when it is taken (unless the taken one is to be continued)."""
    if resume or not (runs / stem).exists():
        return stem
    return next(f"{stem}-{k}" for k in range(2, 10**6) if not (runs / f"{stem}-{k}").exists())
