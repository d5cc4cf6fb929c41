"""The command line: typed functions that parse, make one call and print.

Heavy imports happen inside the commands, so that ``mettle --help`` answers at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.errors import MettleError

app = typer.Typer(
    help="Difficulty-aware metric learning: train embeddings, judge them honestly, see what is still hard.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at data before training on them.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: table.key=value. Repeatable.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, as `mettle train` writes it.")]


def main() -> None:
    """Run the command line; an error that a user can cause is one line and exit status 2."""
    try:
        app()
    except MettleError as error:
        print(f"mettle: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("mettle: interrupted", file=sys.stderr)
        sys.exit(130)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe (see `mettle recipes`) or a TOML file.")
    ] = "da-supcon",
    data: Annotated[str | None, typer.Option(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder; default: the recipe's.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the named run if it is there.")] = False,
    report: Annotated[bool, typer.Option(help="Evaluate and write report.html afterwards.")] = True,
    overrides: Set = None,
) -> None:
    """Train a recipe, evaluate it on what it never saw, and write a report."""
    from mettle.train import load
    from mettle.train.session import train as run_training

    tables = {} if data is None else {"data": {"source": data}}
    plan = load(recipe, overrides or (), **tables)
    folder = runs / (name or _free_name(runs, Path(recipe).stem, resume))
    print(f"{plan.title()}\nrun folder: {folder}", flush=True)
    with _progress(plan.train.steps, plan.train.log_every) as show:
        outcome = run_training(plan, folder, resume=resume, cache=_cache(), progress=show)
    for note in outcome.notes:
        print(f"note: {note}")
    if not outcome.finished:
        print(f"stopped on request; continue with: mettle train {recipe} --name {folder.name} --resume")
        raise typer.Exit(1)
    if report:
        _evaluate_and_report(outcome.run, outcome.samples, outcome.model)


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[str | None, typer.Option(help="Other data to evaluate on; default: the run's own.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write metrics of other data here.")] = None,
) -> None:
    """Measure a run: EER, AUC, TAR at false-accept rates, Recall@K, MAP@R, with intervals over identities."""
    import json

    from mettle.durable import write_text
    from mettle.evaluate.run import evaluate_run
    from mettle.train import open_run

    opened = open_run(run)
    samples = _samples(opened, data)
    own = data is None
    found = evaluate_run(opened, samples, own_data=own, write=own)
    if output is not None:
        write_text(output, json.dumps(found.metrics, indent=1))
    _print_metrics(found.metrics)
    print(f"metrics: {opened.folder / 'metrics.json' if own else output or 'printed only; use -o FILE to keep them'}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the page.")] = None,
) -> None:
    """Write the report of a run, or compare several runs on one page."""
    from mettle.report import write_comparison
    from mettle.train import open_run

    opened = [open_run(run) for run in runs]
    if len(opened) > 1:
        print(f"comparison: {write_comparison(opened, output or Path('comparison.html'))}")
        return
    _evaluate_and_report(opened[0], _samples(opened[0], None), None, output)


@app.command()
def audit(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="NPZ, Parquet, CSV, or NPY with a second NPY file of labels.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for audit.html and audit.json; default: FILE-audit.")
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
) -> None:
    """Audit embeddings of any model: one page and one JSON with everything that can be said about them."""
    from mettle.errors import InputError
    from mettle.evaluate.audit import FARS
    from mettle.evaluate.audit import audit as run_audit
    from mettle.evaluate.table import read_embeddings
    from mettle.report.audit import write_audit

    if len(files) > 2:
        raise InputError(f"audit reads one file, or a .npy file and one of labels: got {len(files)}")
    chosen = {"label": label, "domain": domain, "groups": group, "image": image, "embeddings": embeddings}
    table = read_embeddings(*files, where=where or (), **chosen)  # type: ignore[arg-type]
    print(f"{files[0]}: {len(table)} embeddings of dimension {table.values.shape[1]}", flush=True)
    found = run_audit(table, fars=far or FARS)
    page = write_audit(found, output or files[0].parent / f"{files[0].name.partition('.')[0]}-audit", _typed())
    for name, way in found.summary()["scenarios"].items():
        _print_scenario(name, way["verification"], way["retrieval"])
    for text in found.warnings:
        print(f"note: {text}")
    print(f"audit: {page}")


@app.command()
def embed(
    run: RunFolder,
    data: Annotated[str, typer.Argument(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="NPZ file to write.")],
) -> None:
    """Embed a data set with a trained run: an NPZ with embeddings, ids, labels and all other columns."""
    from mettle.model.store import write_embeddings
    from mettle.train import open_run

    opened = open_run(run)
    print(write_embeddings(opened.model(), _samples(opened, data), output))


@app.command()
def export(
    run: RunFolder,
    onnx: Annotated[Path, typer.Option(help="ONNX file to write.")],
) -> None:
    """Export the trained model to ONNX, with a free batch size, and check it against torch."""
    from mettle.model.export import export_onnx
    from mettle.train import open_run

    difference = export_onnx(open_run(run).model(), onnx)
    print(f"{onnx}: largest difference from torch {difference:.1e}")


@app.command()
def recipes() -> None:
    """List the recipes that come with mettle."""
    from mettle.train import load, shipped

    known = shipped()
    width = max(map(len, known))
    for name in known:
        print(f"{name:<{width}}  {load(name).title()}")


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="Folder, .csv, .parquet, .npz, or 'glyphs'.")],
    policy: Annotated[
        str, typer.Option(help="Unreadable files: 'fail', 'skip' and list, or 'trust' and list all.")
    ] = "trust",
    label: Annotated[str | None, typer.Option(help="Name of the label column.")] = None,
    domain: Annotated[str | None, typer.Option(help="Name of the domain column.")] = None,
) -> None:
    """Validate data: counts, problems with row numbers, leakage, duplicates. Exit status 1 when there are errors."""
    from mettle.data import check, read

    samples = read(path, policy="trust", cache=_cache(), label=label, domain=domain)
    found = check(samples, policy=policy)  # type: ignore[arg-type]
    print(f"{path}: {found.samples} samples, {len(found.labels)} labels, {found.protocol}")
    for title, counts in (("split", found.splits), ("domain", found.domains)):
        if counts:
            print(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    sizes = sorted(found.labels.values())
    print(f"  samples per label: {sizes[0]} to {sizes[-1]}, median {sizes[len(sizes) // 2]}")
    for problem in found.problems:
        print(f"  {problem}")
    print(f"  {len(found.errors)} errors, {len(found.problems) - len(found.errors)} warnings")
    if found.errors:
        raise typer.Exit(1)


def _evaluate_and_report(run: Any, samples: Any, model: Any, output: Path | None = None) -> None:
    from mettle.evaluate.run import evaluate_run
    from mettle.report import write_report

    found = evaluate_run(run, samples, model=model)
    _print_metrics(found.metrics)
    page = write_report(run, found, output)
    print(f"report: {page}")


def _print_metrics(metrics: dict[str, Any]) -> None:
    """The headline numbers, a line per scenario."""
    facts = metrics["data"]
    print(f"{facts['protocol']}; {facts['test_samples']} test samples of {facts['test_identities']} identities")
    for name, scenario in metrics["scenarios"].items():
        _print_scenario(name, scenario["verification"], scenario["retrieval"])
        for other, values in metrics.get("baselines", {}).items():
            print(f"  {'':<13} EER {_share(values[name]['eer'])} with {other}")


def _print_scenario(name: str, v: dict[str, Any], r: dict[str, Any] | None) -> None:
    band = v["eer"]["interval"]
    extent = f" [{band['low']:.2%}, {band['high']:.2%}]" if band else ""
    tars = ", ".join(f"{p['tar']:.1%} at FAR {p['far']:g}" for p in v["tar"] if p["tar"] is not None)
    near = r["metrics"] if r else {}
    shown = f"  Recall@1 {near['recall@1']['value']:.1%}" if "recall@1" in near else ""
    shown += f"  MAP@R {near['map_at_r']['value']:.1%}" if "map_at_r" in near else ""
    eer, auc = _share(v["eer"]["value"]), v["auc"]["value"]
    print(f"  {name:<13} EER {eer}{extent}  AUC {auc:.4f}  TAR {tars or 'not measurable'}{shown}")


def _share(value: float | None) -> str:
    return "not measurable" if value is None else f"{value:.2%}"


def _typed() -> list[str]:
    """The command line as it was given."""
    return ["mettle", *sys.argv[1:]]


def _samples(run: Any, data: str | None) -> Any:
    """The run's own data, or other data brought to the shape that the run's model takes."""
    from mettle.train import prepare

    recipe = run.recipe
    if data is not None:
        shape = run.contract()["input"]["shape"]
        own = {"source": data, "unseen": [], "pairs": None, "triplets": None}
        if len(shape) == 3:
            own |= {"size": shape[1], "channels": shape[0]}
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=own)})
    return prepare(recipe, _cache())


def _free_name(runs: Path, stem: str, resume: bool) -> str:
    """The recipe's name, numbered when it is taken (unless the taken one is to be continued)."""
    if resume or not (runs / stem).exists():
        return stem
    return next(f"{stem}-{k}" for k in range(2, 10**6) if not (runs / f"{stem}-{k}").exists())


def _cache() -> Path:
    """Where embedded data are kept between runs."""
    return Path(
        os.environ.get("METTLE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mettle"
    ).expanduser()


def _progress(steps: int, every: int) -> Any:
    """A bar on a terminal, a plain line now and then elsewhere."""
    from contextlib import contextmanager

    def text(line: dict[str, Any]) -> str:
        parts = [f"loss {line['loss']:.3f}"]
        if "hard_negatives" in line:
            parts.append(f"hard + {line['hard_positives']:.0%} - {line['hard_negatives']:.1%}")
        return "  ".join(parts)

    @contextmanager
    def bar():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns) as shown:
            task = shown.add_task("", total=steps)
            last: dict[str, Any] = {}

            def update(step: int, line: dict[str, Any]) -> None:
                last.update(line)
                shown.update(task, completed=step, description=text(last))

            yield update

    @contextmanager
    def lines():
        def update(step: int, line: dict[str, Any]) -> None:
            if "seconds_per_step" in line and (step % (5 * every) == 0 or step == steps):
                left = (steps - step) * line["seconds_per_step"]
                busy = line["share_in_model_and_loss"]
                print(
                    f"step {step}/{steps}  {text(line)}  {left:.0f} s left  {busy:.1%} in model and loss",
                    flush=True,
                )

        yield update

    return bar() if sys.stdout.isatty() else lines()


if __name__ == "__main__":
    main()
