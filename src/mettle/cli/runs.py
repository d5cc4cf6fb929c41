"""Commands around a run: train, evaluate, report, embed, export, recipes."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.shell import RunFolder, Set, app, cache, print_scenario, samples_of, share


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
        outcome = run_training(plan, folder, resume=resume, cache=cache(), progress=show)
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
    samples = samples_of(opened, data)
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
    _evaluate_and_report(opened[0], samples_of(opened[0], None), None, output)


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
    print(write_embeddings(opened.model(), samples_of(opened, data), output))


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


def _evaluate_and_report(run: Any, samples: Any, model: Any, output: Path | None = None) -> None:
    from mettle.evaluate.run import evaluate_run
    from mettle.report import write_report

    found = evaluate_run(run, samples, model=model)
    _print_metrics(found.metrics)
    page = write_report(run, found, output)
    print(f"report: {page}")


def _print_metrics(metrics: dict[str, Any]) -> None:
    """The headline numbers, a line per scenario."""
    from mettle.evaluate.closed import lines

    facts = metrics["data"]
    print(f"{facts['protocol']}; {facts['test_samples']} test samples of {facts['test_identities']} identities")
    for name, scenario in metrics["scenarios"].items():
        print_scenario(name, scenario["verification"], scenario["retrieval"])
        for other, values in metrics.get("baselines", {}).items():
            print(f"  {'':<13} EER {share(values[name]['eer'])} with {other}")
    for line in lines(metrics.get("probe")):
        print(f"  {line}")


def _free_name(runs: Path, stem: str, resume: bool) -> str:
    """The recipe's name, numbered when it is taken (unless the taken one is to be continued)."""
    if resume or not (runs / stem).exists():
        return stem
    return next(f"{stem}-{k}" for k in range(2, 10**6) if not (runs / f"{stem}-{k}").exists())


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
