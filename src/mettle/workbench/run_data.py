"""What the page shows of a run: its test samples, their embeddings, and every column one can colour or filter by."""

import io
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_bytes
from mettle.data.dataset import Column, Samples
from mettle.errors import DataError, MettleError
from mettle.evaluate.diagnostics.label_errors import LabelErrors, label_errors, sample_difficulty
from mettle.evaluate.groups import quantile_bins
from mettle.evaluate.run.scenarios import Scenario, list_scenarios
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.model import embed
from mettle.report.headline import question_name, sort_rows
from mettle.report.metric_tables import is_shown, metric_cells
from mettle.train import RunFolder, prepare_samples

QUARTILES = 4  # of difficulty, as in the audit
QUARTILE_NAMES = ("easiest quarter", "second quarter", "third quarter", "hardest quarter")


@dataclass(frozen=True, eq=False)
class RunData:
    """The test split of one run, embedded.

    Attributes:
        run: the run.
        key: names the weights and the data: whatever is kept beside the run carries it.
        samples: the test split.
        embeddings: (n, dim) float32.
        label: labels coded among those of the test split only.
        columns: domain and groups, coded likewise.
        difficulty: difficulty of each sample, or NaN for all where there is only one label.
        changed: whether the data are not those that the run was trained on.
    """

    run: RunFolder
    key: str
    samples: Samples
    embeddings: np.ndarray
    label: Column
    columns: Mapping[str, Column]
    difficulty: np.ndarray
    changed: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def unit(self) -> ExactUnitVectors:
        """Unit vectors whose cosines are those of the metrics, bit for bit."""
        return ExactUnitVectors.from_rows(self.embeddings)

    @cached_property
    def quartile(self) -> Column:
        """Quarters of difficulty."""
        if not np.isfinite(self.difficulty).all():
            return Column(np.zeros(len(self), np.int64), ("unknown",))
        found = Column.of(quantile_bins(self.difficulty, QUARTILES))
        return replace(found, names=QUARTILE_NAMES) if len(found.names) == QUARTILES else found

    @cached_property
    def scenario(self) -> Scenario:
        """How samples are paired: the hardest scenario that the data allow, as in the metrics."""
        return list_scenarios(self.samples)[-1]

    @cached_property
    def suspects(self) -> LabelErrors:
        """Samples that another label would fit better, most suspicious first."""
        return label_errors(self.embeddings, self.label.codes)

    def facts(self) -> dict[str, Any]:
        """What the page has to know before it draws anything."""
        return {
            "name": self.run.name,
            "title": self.run.recipe.title(),
            "key": self.key,
            "data": self.samples.fingerprint(),
            "source": self.samples.source_name,
            "samples": len(self),
            "kind": self.samples.inputs.kind,
            "dimension": int(self.embeddings.shape[1]),
            "labels": list(self.label.names),
            "columns": [{"name": name, "names": list(c.names)} for name, c in self.columns.items()],
            "quartiles": list(self.quartile.names),
            "scenario": {"name": self.scenario.name, "title": self.scenario.title},
            "numbers": self._headline_numbers(),
            "warnings": self._warnings(),
        }

    def question(self) -> str:
        """What the run answers; verification where it was not evaluated."""
        try:
            return question_name(self.run.metrics())
        except (MettleError, KeyError):
            return "verification"

    def _headline_numbers(self) -> list[dict[str, Any]]:
        """Headline numbers with their intervals, where the run was evaluated with these weights."""
        try:
            found = self.run.metrics()
        except MettleError:
            return []
        if found.get("weights") != self.run.contract()["weights"] or self.scenario.name not in found["scenarios"]:
            return []
        listed = sort_rows(metric_cells(found["scenarios"][self.scenario.name]), self.question())
        return [
            {key: n[key] for key in ("name", "text", "interval", "meaning")} | {"has_interval": n["low"] is not None}
            for n in listed
            if is_shown(n, "tile")
        ]

    def _warnings(self) -> list[str]:
        found = []
        if self.changed:
            found.append("The data have changed since this run was trained: what is shown is the data as they are now.")
        if not self._headline_numbers():
            found.append("This run has no metrics of these weights; measure it: mettle evaluate RUN")
        return found


def load_run_data(run: RunFolder, cache: Path | None = None) -> RunData:
    """Read the run's data and embed its test split, or take the embeddings that were kept beside the run."""
    samples = prepare_samples(run.recipe_with_data_paths(), cache)
    test = samples.part("test")
    if len(test) < 2:
        raise DataError(
            f"{samples.source_name} has {len(test)} test samples: the workbench shows a test split of two or more"
        )
    key = f"{run.contract()['weights'][:16]}-{test.fingerprint()}"
    label = _recode_names(test.label)

    def make() -> dict[str, np.ndarray]:
        z = embed(run.model(), test)
        alone = len(label.names) < 2
        return {
            "embeddings": z,
            "difficulty": np.full(len(test), np.nan) if alone else sample_difficulty(z, label.codes),
        }

    wanted = {"embeddings": (len(test), run.contract()["dim"]), "difficulty": (len(test),)}
    held = load_or_compute_arrays(run.folder / f"workbench-embeddings-{key}.npz", wanted, make)
    z = held["embeddings"].astype(np.float32)
    if not np.isfinite(z).all():
        raise DataError(
            f"{run.folder} gives embeddings that are not finite: look at its training curve, and train again"
        )
    columns = {name: _recode_names(column) for name, column in test.columns().items()}
    changed = str(run.state.get("data", "")).partition(" ")[0] != samples.fingerprint()
    return RunData(run, key, test, z, label, columns, held["difficulty"], changed)


def _recode_names(column: Column) -> Column:
    """The column with names of these samples only."""
    used, codes = np.unique(column.codes, return_inverse=True)
    return Column(codes.reshape(-1).astype(np.int64), tuple(str(column.names[code]) for code in used))


def load_or_compute_arrays(
    path: Path, wanted: Mapping[str, tuple[int, ...]], make: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of a file if they are all there in these shapes, else new ones, which are then kept.

    A folder that cannot be written to is no error: the arrays are made again the next time.
    """
    held = _read_arrays(path, wanted)
    if held is not None:
        return held
    made = {name: np.asarray(array) for name, array in make().items()}
    buffer = io.BytesIO()
    np.savez(buffer, **made)  # type: ignore[arg-type]
    with suppress(OSError):
        write_bytes(path, buffer.getvalue())
    return made


def _read_arrays(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray] | None:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            found = {name: file[name] for name in wanted}  # every member's checksum is compared while it is read
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    fits = all(found[name].shape == shape and found[name].dtype.kind == "f" for name, shape in wanted.items())
    return found if fits else None
