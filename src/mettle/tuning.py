"""A search for the values of recipe keys: ``mettle tune``.

    [tune]
    metric = "eer"
    trials = 20
    method = "halving"
    [tune.ranges]
    "train.rate" = { low = 1e-4, high = 1e-2, log = true }
    "loss.temperature" = { low = 0.02, high = 0.5, log = true }

A trial is a training run with values from the ranges, judged on the validation identities or, with ``folds``, on each
fold of the training identities. The search never holds a sample of the test identities.

Values of trial k of a random search are a function of the seed and k alone; those of the tree-structured Parzen
estimator (``tpe``) also of what the trials before it found. So a search that was killed goes on as if it had not been,
from ``trials.jsonl`` and from the checkpoint of the trial that was under way.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mettle.atomic_files import write_folder, write_text
from mettle.data.dataset import Samples
from mettle.data.splits import identity_folds
from mettle.data.tuples import Tuples
from mettle.errors import DataError, MettleError, MissingExtra, RecipeError, RunError
from mettle.evaluate import ValidationScore
from mettle.evaluate.inputs import NotMeasurable
from mettle.report.search_page import describe_trial, write_search_page
from mettle.rng import hash_bits
from mettle.train.callbacks import Callback, Direction, Validation, read_log
from mettle.train.datamodule import fill_settings, keep_parts, prepare_training_data, split_tuples
from mettle.train.factory import import_object, is_import_path
from mettle.train.from_recipe import GivenObjects, build_method_and_loader, train
from mettle.train.recipe import SAME_CLASS, Range, Recipe, as_recipe, is_applicable, load_stored_recipe
from mettle.train.run_folder import explain_write_errors, open_run_folder
from mettle.train.search import (
    FoldResult,
    Trial,
    append_trial,
    best_trial,
    describe_edges,
    open_record,
    read_trials,
)
from mettle.train.selection import Score
from mettle.train.starting_weights import follow_starting_weights

__all__ = ["TuneResult", "tune"]

RECIPE, BEST, PAGE = "tune.toml", "best.toml", "tune.html"
FIXED = ("data", "evaluate", "tune", "seed", "auto")  # what decides what trials are compared on
REDUCTION = 3  # of successive halving: one trial in so many goes on from a rung
VALIDATIONS = REDUCTION**2  # of a trial of successive halving: rungs are at 1, 3 and 9 of them
FAILURES = 5  # trials that fail one after the other before one has succeeded end a search
STREAM = 23


@dataclass(frozen=True)
class TuneResult:
    """What a search came to.

    Attributes:
        folder: with ``tune.toml``, ``trials.jsonl``, ``best.toml`` and ``tune.html``.
        trials: in their order.
        best: the finished trial with the best value; None where none is finished.
        recipe: the recipe with the values of the best trial, as in ``best.toml``.
        warnings: a line for each best value at the end of its range.
        finished: whether all trials are there; else ``resume=True`` goes on.
        interrupted: whether a signal ended this call.
    """

    folder: Path
    trials: tuple[Trial, ...]
    best: Trial | None
    recipe: Recipe | None
    warnings: tuple[str, ...]
    finished: bool
    interrupted: bool = False

    @property
    def page(self) -> Path:
        """The page of the search."""
        return self.folder / PAGE


def tune(
    recipe: Recipe | Path | str,
    folder: Path | str,
    *,
    samples: Samples | None = None,
    score: Score | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    resume: bool = False,
    cache: Path | None = None,
    allow_import: Sequence[str] = (),
    on_note: Callable[[str], None] = lambda note: None,
) -> TuneResult:
    """Search the ranges of a recipe, or continue the search in ``folder``.

    Args:
        recipe: with a table ``[tune]``; a shipped one by its name or a file by its path will do.
        folder: of the search, which must not exist unless it is to go on.
        samples: to train and validate on, with a split; by default those that the recipe names.
        score: what measures a model, `mettle.evaluate.ValidationScore` by default.
        trials: in all, those of earlier calls included; by default what the recipe says.
        seconds: after which this call begins no other trial; by default what the recipe says.
        resume: whether to continue the search in ``folder``, if there is one.
        cache: where embedded data are kept.
        allow_import: packages that networks and losses which the recipe names by an import path may come from.
        on_note: called with a line after each trial, and with notes about the data.
    """
    optuna = _import_optuna()
    recipe, folder, score = as_recipe(recipe), Path(folder), score or ValidationScore()
    limits = {"tune.trials": trials, "tune.seconds": seconds}
    recipe = recipe.with_values({key: value for key, value in limits.items() if value is not None})
    exists = folder.exists()
    if exists:
        _check_same_search(folder, recipe, resume)
    plan = _make_plan(recipe, folder, samples, score, cache, allow_import, on_note)
    if not exists:
        plan.check_measurable(optuna)
        with explain_write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_folder(folder, lambda place: write_text(place / RECIPE, recipe.to_toml()))
    with open_record(folder) as record:
        if exists:
            write_text(folder / RECIPE, recipe.to_toml())  # another number of trials, or another budget
        found, interrupted = _search(optuna, plan, record)
    return _finish(plan, found, interrupted)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What every trial of a search shares."""

    recipe: Recipe
    folder: Path
    parts: tuple[tuple[Samples, Tuples | None], ...]  # one, or one for each fold
    fingerprint: str
    score: "_WithMetric"
    allow_import: tuple[str, ...]
    on_note: Callable[[str], None]

    @property
    def direction(self) -> Direction:
        return self.score.direction(self.recipe.tune.metric)

    def trial_recipe(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a trial, and of ``best.toml``: without ranges."""
        auto = [key for key in self.recipe.auto if key not in values]
        return self.recipe.with_values({**values, "auto": auto, "tune": {}})

    def validated_recipe(self, values: Mapping[str, Any]) -> Recipe:
        """The same, with as many validations as the search needs and the recipe does not ask for itself."""
        recipe, (samples, tuples) = self.trial_recipe(values), self.parts[0]
        if recipe.train.select is not None or recipe.train.validate_every is not None:
            return recipe
        steps = fill_settings(recipe, samples, tuples)[0].train.steps
        every = max(1, steps // VALIDATIONS) if self.recipe.tune.method == "halving" else 10**9  # the last step always
        return recipe.with_values({"train.validate_every": every})

    def check_measurable(self, optuna: Any) -> None:
        """Refuse a metric that the samples do not allow, before anything is written."""
        values = _suggest_values(_ask(optuna, _make_study(optuna, self), self, 1), self.recipe.tune.ranges)
        samples, tuples = self.parts[0]
        try:
            recipe, _ = fill_settings(self.trial_recipe(values), samples, tuples)
            method, _ = build_method_and_loader(recipe, samples, tuples, allow_import=self.allow_import)
            Validation(lambda model: self.score(model, samples.part("val"), ())).measure_untrained(method)
        except NotMeasurable:
            raise
        except MettleError:  # what is wrong with these values is told of their trial
            pass


@dataclass(frozen=True)
class _WithMetric:
    """A score that measures the metric of the search along with what is asked for."""

    score: Score
    metric: str

    def __call__(self, model: Any, samples: Samples, names: tuple[str, ...]) -> Mapping[str, float]:
        return self.score(model, samples, (*names, *(() if self.metric in names else (self.metric,))))

    def direction(self, name: str) -> Direction:
        return self.score.direction(name)


def _make_plan(
    recipe: Recipe,
    folder: Path,
    samples: Samples | None,
    score: Score,
    cache: Path | None,
    allow_import: Sequence[str],
    on_note: Callable[[str], None],
) -> _Plan:
    """Check what is to be searched, and prepare the samples, of which none is of a test identity."""
    _check_ranges(recipe)
    _check_imports(recipe, allow_import)
    score.direction(recipe.tune.metric)  # an unknown name is an error
    tuples: Tuples | None = None
    if samples is None:
        recipe = follow_starting_weights(recipe)[0]
        samples, tuples, _ = prepare_training_data(recipe, cache, parts=("train", "val"))
    else:
        samples = keep_parts(samples, ("train", "val"))
    parts: list[tuple[Samples, Tuples | None]] = [(samples, tuples)]
    if recipe.tune.folds:
        given = recipe.data.pairs or recipe.data.triplets
        if given not in (None, SAME_CLASS):
            raise RecipeError(f"tune.folds divides identities, and {given} has rows of several: set tune.folds = 0")
        seed = recipe.seed if recipe.data.split_seed is None else recipe.data.split_seed
        folds = identity_folds(samples, recipe.tune.folds, seed)
        parts = [(fold, split_tuples(recipe, None, fold)[0]) for fold in folds]
    elif len(samples.part("val")) == 0:
        raise DataError(
            "there are no validation identities to choose on: set tune.folds to 2 or more for folds of the training "
            "identities, or data.val above 0, or mark rows of the table as val in its split column"
        )
    told: set[str] = set()

    def note_once(note: str) -> None:
        if note not in told:
            told.add(note)
            on_note(note)

    wrapped = _WithMetric(score, recipe.tune.metric)
    return _Plan(recipe, folder, tuple(parts), samples.fingerprint(), wrapped, tuple(allow_import), note_once)


def _check_ranges(recipe: Recipe) -> None:
    """Refuse keys that may not be searched, and ranges of values that the recipe does not take."""
    if not recipe.tune.ranges:
        raise RecipeError(
            "there is nothing to search: write ranges into the recipe, such as [tune.ranges] "
            '"train.rate" = { low = 1e-4, high = 1e-2, log = true }'
        )
    for key, values in recipe.tune.ranges.items():
        if key.partition(".")[0] in FIXED:
            raise RecipeError(f"tune.ranges: {key} decides what trials are compared on, so it cannot be searched")
        for value in values.examples():
            try:
                kinds = {name: one.choices[0] for name, one in recipe.tune.ranges.items() if one.choices}
                kinds = {name: kind for name, kind in kinds.items() if name.endswith(".kind") and name != key}
                if is_applicable(key, kinds):
                    recipe.with_values({**kinds, key: value, "tune": {}})
            except RecipeError as error:
                is_fraction = type(value) is float and values.choices is None and "integer" in str(error)
                hint = "; for whole numbers give low, high and step as whole numbers" if is_fraction else ""
                raise RecipeError(f"tune.ranges: {key} = {value!r} is not possible: {error}{hint}") from None
    is_validated = recipe.train.select is not None or recipe.train.validate_every is not None
    if recipe.tune.method == "halving" and recipe.train.epochs is not None and not is_validated:
        raise RecipeError(
            "tune.method = 'halving' compares trials while they train: with train.epochs, say how often by "
            "train.validate_every, or set train.select to validate every epoch"
        )


def _check_imports(recipe: Recipe, allow_import: Sequence[str]) -> None:
    """Refuse code that is not allowed before the first trial, not in it."""
    for key, own in (("model.backbone", recipe.model.get("backbone")), ("loss.kind", recipe.loss.get("kind"))):
        choices = recipe.tune.ranges[key].choices if key in recipe.tune.ranges else None
        for name in choices or [own]:
            if is_import_path(name):
                import_object(str(name), allow_import, key)


def _check_same_search(folder: Path, recipe: Recipe, resume: bool) -> None:
    """Refuse a folder that is in the way, or the search of another recipe."""
    if not resume:
        raise RunError(f"{folder} is there already: continue it with --resume, or choose another --name")
    if not (folder / RECIPE).is_file():
        raise RunError(f"{folder} is no search of mettle tune (no {RECIPE} in it): choose another --name")
    old = load_stored_recipe(folder / RECIPE)
    free = {"data.source": "", "tune.trials": 1, "tune.seconds": None}  # data may have moved
    if old.with_values(free).model_dump() != recipe.with_values(free).model_dump():
        raise RunError(
            f"{folder} was started with another recipe: resume it without naming a recipe, and it keeps its own, or "
            "choose another --name"
        )


def _search(optuna: Any, plan: _Plan, record: BinaryIO) -> tuple[list[Trial], bool]:
    """Run the trials that are missing; returns all of them, and whether a signal came."""
    began, settings = time.monotonic(), plan.recipe.tune
    found, study = read_trials(plan.folder), _make_study(optuna, plan)
    if any(trial.data != plan.fingerprint for trial in found):
        raise RunError(f"the data of {plan.folder} have changed since the search began: search under another --name")
    for trial in found:
        _replay(optuna, study, plan, trial)
    _remove_trial_folders(plan.folder, found)
    failed = 0
    while len(found) < settings.trials:
        number = len(found) + 1
        live = _ask(optuna, study, plan, number)
        trial = _run_trial(plan, live, number)
        if trial is None:
            return found, True
        append_trial(record, trial)
        found.append(trial)
        _tell(optuna, study, live, trial)
        _remove_trial_folders(plan.folder, found)
        best = best_trial(found, plan.direction)
        if best is not None:
            write_text(plan.folder / BEST, plan.trial_recipe(best.values).to_toml())
        plan.on_note(f"trial {number} of {settings.trials}: {describe_trial(trial, settings.metric)}")
        failed = failed + 1 if trial.state == "failed" else 0
        if failed >= FAILURES and best is None:
            raise RunError(f"{failed} trials failed one after the other, the last one with: {trial.reason}")
        if settings.seconds is not None and time.monotonic() - began >= settings.seconds:
            break
    return found, False


def _finish(plan: _Plan, found: list[Trial], interrupted: bool) -> TuneResult:
    """Write the best recipe and the page."""
    best, settings = best_trial(found, plan.direction), plan.recipe.tune
    edges = [] if best is None else describe_edges(settings.ranges, best.values)
    recipe = None if best is None else plan.trial_recipe(best.values)
    if recipe is not None:
        write_text(plan.folder / BEST, recipe.to_toml())
    write_search_page(plan.recipe, found, plan.folder / PAGE, direction=plan.direction)
    is_done = len(found) >= settings.trials
    return TuneResult(plan.folder, tuple(found), best, recipe, tuple(edges), is_done, interrupted)


def _run_trial(plan: _Plan, live: Any, number: int) -> Trial | None:
    """Train on every part with the values of a trial; None where a signal asked to stop."""
    began, settings = time.monotonic(), plan.recipe.tune
    values = _suggest_values(live, settings.ranges)
    facts: dict[str, Any] = {"values": values, "seed": plan.recipe.seed, "data": plan.fingerprint}
    folds: list[FoldResult] = []
    state, reason = "finished", ""
    watch = _PruningWatch(live, settings.metric) if settings.method == "halving" else None
    for k, (samples, tuples) in enumerate(plan.parts):
        place = _trial_folder(plan.folder, number) / f"fold-{k}"
        _remove_unusable_run(place)
        try:
            outcome = train(
                plan.validated_recipe(values),
                place,
                resume=True,
                score=plan.score,
                callbacks=() if watch is None else (watch.follow(place),),
                tensorboard=False,
                on_note=plan.on_note,
                allow_import=plan.allow_import,
                given=GivenObjects(samples=samples, tuples=tuples),
            )
        except _PrunedTrial:
            state = "pruned"
        except NotMeasurable:  # the samples do not allow the metric, whatever the values are
            raise
        except MettleError as error:
            state, reason = "failed", " ".join(str(error).split())
        else:
            if not outcome.finished:
                return None
            chosen = None if outcome.selection is None else outcome.selection["step"]
            folds.append(_read_fold(place, settings.metric, chosen, is_complete=True))
            if folds[-1].metric is None:
                state, reason = "failed", f"{settings.metric} is not finite at step {folds[-1].step}"
        if state != "finished":
            folds = folds if folds and len(folds) == k + 1 else [*folds, _read_fold(place, settings.metric, None)]
            break
    metric = statistics.fmean(fold.metric or 0.0 for fold in folds) if state == "finished" else None
    seconds = round(time.monotonic() - began, 3)
    return Trial(number, state, metric=metric, folds=tuple(folds), seconds=seconds, reason=reason, **facts)  # type: ignore[arg-type]


def _read_fold(place: Path, metric: str, chosen: int | None, is_complete: bool = False) -> FoldResult:
    """What the log of a run says of the metric; ``chosen`` is the step whose weights are kept, by default the last."""
    key = f"val_{metric}"
    steps = [(line["step"], line[key]) for line in read_log(place / "log.jsonl") if key in line]
    if not is_complete or not steps:
        return FoldResult(None, None, tuple(steps))
    step = steps[-1][0] if chosen is None else chosen
    return FoldResult(dict(steps)[step], step, tuple(steps))


class _PrunedTrial(Exception):
    """Ends the training of a trial that is worse than others at the same point."""


class _PruningWatch(Callback):
    """Reports every validation of a trial and ends it where successive halving says so.

    Rungs are counted in validations over all folds, so trials are compared at the same point of the same fold.
    """

    def __init__(self, live: Any, metric: str):
        self.live, self.metric, self.count = live, metric, 0
        self.place, self.seen = Path(), 0  # of the fold under way: its folder, and the last step that was reported

    def follow(self, place: Path) -> "_PruningWatch":
        """The same watch, over the run of another fold."""
        self.place, self.seen = place, 0
        return self

    def on_start(self, state: Any) -> None:
        """Report what was measured before the run was resumed."""
        for step, value in _read_fold(self.place, self.metric, None).steps:
            if self.seen < step <= state.step:
                self._report(step, value)

    def on_step(self, state: Any) -> None:
        """Report a validation."""
        if state.is_validated:
            self._report(state.step, state.validation.values[self.metric])

    def _report(self, step: int, value: float | None) -> None:
        self.seen, self.count = step, self.count + 1
        if _is_pruned(self.live, self.count, value):
            raise _PrunedTrial


def _is_pruned(live: Any, count: int, value: float | None) -> bool:
    """Report the validation of this number, and ask whether the trial goes on."""
    live.report(math.nan if value is None else value, count)
    return live.should_prune()


def _make_study(optuna: Any, plan: _Plan) -> Any:
    pruner = optuna.pruners.NopPruner()
    if plan.recipe.tune.method == "halving":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    direction = "minimize" if plan.direction == "min" else "maximize"
    with _quiet(optuna):
        return optuna.create_study(direction=direction, pruner=pruner)


def _ask(optuna: Any, study: Any, plan: _Plan, number: int) -> Any:
    """The next trial, with a sampler of its own: what it draws follows from the seed and the number of the trial."""
    seed = int(hash_bits(plan.recipe.seed, number, STREAM)[0] >> 32)
    samplers = optuna.samplers
    is_tpe = plan.recipe.tune.method == "tpe"
    study.sampler = samplers.TPESampler(seed=seed) if is_tpe else samplers.RandomSampler(seed=seed)
    return study.ask()


def _replay(optuna: Any, study: Any, plan: _Plan, trial: Trial) -> None:
    """Tell a study of a trial that was run earlier, as it was told then."""
    settings = plan.recipe.tune
    study.enqueue_trial({key: _encode(settings.ranges[key], value) for key, value in trial.values.items()})
    live = _ask(optuna, study, plan, trial.number)
    if _suggest_values(live, settings.ranges) != trial.values:
        raise RunError(f"trial {trial.number} of {plan.folder} does not fit the ranges of its recipe")
    if settings.method == "halving":
        steps = [(step, value) for fold in trial.folds for step, value in fold.steps if step > 0]
        for count, (_, value) in enumerate(steps, 1):
            _is_pruned(live, count, value)
    _tell(optuna, study, live, trial)


def _tell(optuna: Any, study: Any, live: Any, trial: Trial) -> None:
    state = optuna.trial.TrialState
    states = {"finished": state.COMPLETE, "pruned": state.PRUNED, "failed": state.FAIL}
    study.tell(live, trial.metric, state=states[trial.state])


def _suggest_values(live: Any, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """A value for each key that applies; kinds come first, because they decide which other keys do."""
    values: dict[str, Any] = {}
    for key in sorted(ranges, key=lambda key: (not key.endswith("kind"), key.count("."))):
        if is_applicable(key, values):
            values[key] = _suggest(live, key, ranges[key])
    return {key: values[key] for key in ranges if key in values}


def _suggest(live: Any, key: str, values: Range) -> Any:
    if values.choices is not None:
        texts = [_encode(values, choice) for choice in values.choices]
        return values.choices[texts.index(live.suggest_categorical(key, texts))]
    if values.is_whole:
        return live.suggest_int(key, values.low, values.high, step=values.step, log=values.log)
    return live.suggest_float(key, values.low, values.high, step=values.step, log=values.log)


def _encode(values: Range, value: Any) -> Any:
    """A value as Optuna knows it: choices, which may be tables, as text."""
    return value if values.choices is None else json.dumps(value, sort_keys=True)


def _trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:05d}"


def _remove_trial_folders(folder: Path, done: Sequence[Trial]) -> None:
    """Remove the runs of trials that are in the record."""
    for trial in done:
        shutil.rmtree(_trial_folder(folder, trial.number), ignore_errors=True)
    with suppress(OSError):  # not there, or the run of a trial under way is in it
        (folder / "trials").rmdir()


def _remove_unusable_run(place: Path) -> None:
    """Remove what is no run that can go on."""
    if place.exists():
        try:
            open_run_folder(place)
        except MettleError:
            shutil.rmtree(place)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtra("mettle tune needs Optuna, which is not installed: pip install 'mettle-ml[tune]'") from None
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Optuna tells of every trial by itself otherwise."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
