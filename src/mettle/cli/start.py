"""The command that takes a folder of photographs to a first report: start."""

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import app, cache_folder, print_scenario
from mettle.cli.run import RUNS, check_run_name, collect_notes, free_name, train_run
from mettle.errors import InputError, MettleError

DEFAULT = {"cpu": "torchvision/mobilenet_v2", "cuda": "torchvision/resnet50"}  # where no weights are named


@app.command()
def start(
    folder: Annotated[str, typer.Argument(help="Images: a folder with one folder per label, or a table of paths.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Pretrained weights: a file, timm/NAME, torchvision/NAME, an ONNX graph, another run."),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="The network that a file of weights is of, where its name does not say it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder; default: start.")] = None,
    runs: Annotated[Path, typer.Option(help="Where run folders go.")] = RUNS,
    minutes: Annotated[float, typer.Option(help="What all of it may take, about.")] = 10.0,
    recipe: Annotated[Path | None, typer.Option(help="Where to write the recipe; default: RUNS/NAME.toml.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the recipe and stop before training.")] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a small network from nothing, without pretrained weights.")
    ] = False,
    label: Annotated[str | None, typer.Option(help="Column of labels, of a table.")] = None,
    domain: Annotated[str | None, typer.Option(help="Column of domains, of a table.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of image files, of a table.")] = None,
) -> None:
    """Look at photographs, write a recipe, measure the pretrained network as it is, fine-tune it, report."""
    began = time.monotonic()
    check_run_name(name)
    if not 0 < minutes < float("inf"):
        raise InputError(f"--minutes must be above 0, got {minutes:g}")
    if from_scratch and (weights or backbone):
        raise InputError("--from-scratch begins without pretrained weights: leave out --weights and --backbone")
    if backbone is not None and weights is None:
        raise InputError("--backbone says which network the file of --weights is of: give that, or --weights timm/NAME")
    name = name or free_name(runs, "start", resume=False)
    place, file = runs / name, recipe or runs / f"{name}.toml"
    for path in (place, file):
        if path.exists():
            raise InputError(f"{path} is there already: choose another --name{' or --recipe' if path == file else ''}")

    from mettle.start import (
        choose_recipe,
        describe_machine,
        describe_recipe,
        describe_weights,
        look_at_data,
        suggest_next,
        write_recipe,
    )
    from mettle.train import load, open_run_folder
    from mettle.train.auto_settings import resolve_device
    from mettle.train.callbacks.logs import read_log

    columns = {"label": label, "domain": domain, "image": image}
    model: dict[str, Any] = {}
    if not from_scratch:
        kind = "cuda" if resolve_device("auto").startswith("cuda") else "cpu"
        model = describe_weights(weights or DEFAULT[kind], backbone)
    print(f"looking at {folder} ...", flush=True)
    account = look_at_data(folder, cache_folder(), **columns)
    for line in (*account.lines(), f"machine: {describe_machine()}"):
        print(f"  {line}", flush=True)
    planned = describe_recipe(folder, model, account, **columns)
    try:
        planned, samples, network, before = _prepare(planned, from_scratch)
    except MettleError as problem:
        if weights is not None or from_scratch:
            raise
        raise InputError(
            "give pretrained weights with --weights FILE (.safetensors, .pth, .onnx, or a run), or train from nothing "
            f"with --from-scratch: none were given, and those of {model['backbone']} cannot be had ({problem})"
        ) from None
    plan = choose_recipe(planned, network, samples, max(0.1, minutes - (time.monotonic() - began) / 60))
    write_recipe(plan, account, file)
    print(f"recipe: {file}; {plan.steps:,} steps, {plan.minutes:.1f} minutes of training expected", flush=True)
    again = ["mettle", "train", str(file), *([] if runs == RUNS else ["--runs", str(runs)]), "--name", name]
    if dry_run:
        print(f"next: {shlex.join(again)}")
        return
    said: list[str] = []
    trained = load(file, on_note=collect_notes(said))
    train_run(trained, place, False, True, ["mettle", "train", *again[3:], "--resume"], said, ())
    run = open_run_folder(place)
    after = _headline(run.metrics()["scenarios"])
    print("what to try next:")
    for k, text in enumerate(suggest_next(plan, account, before, after, read_log(place / "log.jsonl"), file), 1):
        print(f"  {k}. {text}")


def _prepare(recipe: Any, from_scratch: bool) -> tuple[Any, Any, Any, Mapping[str, float] | None]:
    """The recipe with what follows from its weights, the data, the network without a head, and what it is worth."""
    from mettle.evaluate.run.scenarios import evaluate_scenarios, summarize_scenarios
    from mettle.model import embed
    from mettle.start import build_frozen_backbone
    from mettle.train import prepare_samples
    from mettle.train.starting_weights import follow_starting_weights

    recipe, _, notes = follow_starting_weights(recipe)
    for note in notes:
        print(f"  {note}", flush=True)
    samples = prepare_samples(recipe, cache_folder())
    if from_scratch:
        return recipe, samples, None, None
    network, test = build_frozen_backbone(recipe, samples), samples.part("test")
    print(f"measuring the pretrained network as it is, on {len(test):,} test images ...", flush=True)
    found = summarize_scenarios(
        evaluate_scenarios(embed(network, test), test, recipe.evaluate.ks), recipe.evaluate.fars
    )
    for name, scenario in found.items():
        print_scenario(name, scenario["verification"], scenario["retrieval"])
    return recipe, samples, network, _headline(found)


def _headline(scenarios: Mapping[str, Any]) -> dict[str, float]:
    """EER and Recall@1 of the hardest scenario there is, NaN where one is not measurable."""
    last = list(scenarios.values())[-1]
    values = {"eer": last["verification"]["eer"], "recall@1": last["retrieval"]["metrics"]["recall@1"]}
    return {key: math.nan if found["value"] is None else found["value"] for key, found in values.items()}
