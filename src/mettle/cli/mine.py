"""The command that mines hard examples: ``mettle mine``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mettle.cli.options import app, check_output_folder, command_line, load_samples
from mettle.errors import DataError, InputError

PARTS = ("train", "val", "test", "all")


@app.command("mine")
def mine_command(
    source: Annotated[Path, typer.Argument(metavar="FILE|RUN", help="A file of embeddings, or a run folder.")],
    data: Annotated[
        str | None, typer.Argument(help="With a run: other data than its own. With .npy: the file of the labels.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Table to write: .csv or .parquet.")] = Path(
        "triplets.csv"
    ),
    pairs: Annotated[bool, typer.Option("--pairs", help="Write pairs with a target of 1 or 0, not triplets.")] = False,
    page: Annotated[bool, typer.Option(help="Write a page with the account and the hardest pairs beside it.")] = True,
    negatives: Annotated[int, typer.Option(help="Negatives for each pair of an anchor and a positive.")] = 1,
    positives: Annotated[str, typer.Option(help="Of each anchor: hardest, random or all.")] = "hardest",
    skip: Annotated[int, typer.Option(help="Nearest rows of other labels to pass over.")] = 0,
    depth: Annotated[
        int | None, typer.Option(help="Nearest rows of other labels to look at; default: skip + 10 x negatives.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="A negative is less similar than the positive by so much.")
    ] = None,
    relative_margin: Annotated[
        float | None, typer.Option(help="The same as a share of the positive's similarity.")
    ] = None,
    max_score: Annotated[float | None, typer.Option(help="A negative is at most so similar.")] = None,
    min_score: Annotated[float | None, typer.Option(help="A negative is at least so similar.")] = None,
    second: Annotated[
        Path | None, typer.Option(help="Another model's file or run: drops negatives that are too similar for it.")
    ] = None,
    second_margin: Annotated[float, typer.Option(help="The margin under that model.")] = 0.0,
    across: Annotated[
        str | None, typer.Option(help="Column, as camera: positives from another value, negatives from the same.")
    ] = None,
    sampling: Annotated[str, typer.Option(help="Of what is left: top takes the most similar, random draws.")] = "top",
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    search: Annotated[str, typer.Option(help="auto, exact or approximate.")] = "auto",
    split: Annotated[
        str | None, typer.Option(help="Rows to mine: train, val, test or all; default: train where there are such.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(help="What the table calls samples: id or path; default: id where there is one.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column of labels; default: label, labels, y, identity.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of picture paths; '' for none.")] = None,
    embeddings: Annotated[
        str | None, typer.Option(help="Array, column of lists, or prefix of the numbered columns of the vectors.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Keep only rows of a file with COLUMN=VALUE. Repeatable.")
    ] = None,
) -> None:
    """Mine hard positives and negatives over a whole set: a table that `mettle train` takes, and what was left out."""
    from mettle.mining import Guards, check_options, check_table_path, mine, write_pairs, write_triplets
    from mettle.report.mining_page import write_mining_page

    check_table_path(output)
    check_output_folder(output)
    if names not in (None, "id", "path"):
        raise InputError(f"--names takes id or path, got {names!r}")
    _check_split(split)
    options: dict[str, Any] = {"positives": positives, "negatives": negatives, "skip": skip}
    options |= {"sampling": sampling, "seed": seed, "search": search}
    check_options(**options)
    guards = Guards(margin, relative_margin, max_score, min_score, second_margin)
    columns = {"label": label, "image": image}
    if source.is_dir():
        if embeddings is not None or where:
            raise InputError("--embeddings and --where go with a file of embeddings: a run embeds its data itself")
        found = _embed_run(source, data, second, across, names, columns)
    else:
        found = _read_file(
            source, data, second, across, names, {"embeddings": embeddings, "where": where or (), **columns}
        )
    at, part = found.rows_of(split)
    print(f"{source}: {len(at):,} {part}embeddings of dimension {found.values.shape[1]}", flush=True)
    options |= {"depth": depth, "guards": guards}
    options["across"] = None if found.across is None else found.across[at]
    options["second"] = None if found.second is None else found.second[at]
    mined = mine(found.values[at], found.label[at], ids=found.ids[at], **options)
    write = write_pairs if pairs else write_triplets
    rows = write(mined, output, found.names[at], found.label[at])
    for line in (*mined.account.lines(), str(mined.search)):
        print(line)
    notes = _notes(mined, found.names[at])
    for note in notes:
        print(f"note: {note}")
    print(f"table: {output}, {rows:,} {'pairs' if pairs else 'triplets'}")
    if page:
        about = f"{len(at):,} {part}embeddings of dimension {found.values.shape[1]}. Similarity is the cosine."
        made = write_mining_page(
            mined,
            output.with_suffix(".html"),
            lambda row: found.describe(int(at[row])),
            name=source.name,
            about=about,
            notes=notes,
            command=command_line(),
        )
        print(f"page: {made}")


@dataclass(frozen=True, eq=False)
class _MiningSet:
    """What is mined: embeddings, and for each row its label, id, name, split, domain and what a page shows of it."""

    values: Any
    label: Any
    ids: Any
    names: Any
    split: Any  # codes of SPLITS, or None
    across: Any
    second: Any
    describe: Callable[[int], Mapping[str, Any]]

    def rows_of(self, split: str | None) -> tuple[Any, str]:
        """The rows of one split, and what to call them."""
        import numpy as np

        from mettle.data.dataset import SPLITS

        has = self.split is not None and (self.split == SPLITS.index("train")).any()
        split = split or ("train" if has else "all")
        if split == "all":
            return np.arange(len(self.values)), ""
        at = np.flatnonzero(self.split == SPLITS.index(split)) if self.split is not None else np.empty(0, int)
        if not len(at):
            raise InputError(f"--split {split}: no row is marked as {split}; leave it out to mine all rows")
        return at, f"{split} "


def _check_split(split: str | None) -> None:
    if split not in (None, *PARTS):
        raise InputError(f"--split takes train, val, test or all, got {split!r}")


def _read_file(
    path: Path, labels: str | None, second: Path | None, across: str | None, names: str | None, options: dict[str, Any]
) -> _MiningSet:
    """The rows of a file of embeddings."""
    import numpy as np

    from mettle.data.sources.text_table import is_integer_text
    from mettle.evaluate import read_embeddings
    from mettle.report.audit_page import describe_row

    try:
        table = read_embeddings(path, labels, domain="" if across is None else across, groups=[], **options)
    except DataError as problem:  # it names the column by the role that it has there
        raise DataError(str(problem).replace("domain:", "--across:", 1).replace("--domain", "--across")) from None
    if across is not None and table.domain is None:
        raise InputError(f"--across {across}: all rows have one value of it, so no positive has another; leave it out")
    has_ids = table.columns["id"] is not None
    has_whole_ids = has_ids and all(is_integer_text(str(name)) for name in table.names)
    if names == "path" and table.images is None:
        raise InputError(f"--names path: {path} has no column of picture paths; name it with --image")
    if names == "id" or (names is None and (has_whole_ids or table.images is None)):
        if options["where"] and not has_ids:
            raise InputError(
                f"--where leaves out rows, and {path} has no column of ids to call the others by: add one, or mine all"
            )
        called = table.names
    else:
        called = table.images
    return _MiningSet(
        table.values,
        table.label.values().astype(str),
        table.ids,
        np.asarray(called),
        table.split,
        None if table.domain is None else table.domain.codes,
        None if second is None else _second_file(second, labels, table, options),
        lambda at: describe_row(table, at),
    )


def _second_file(path: Path, labels: str | None, table: Any, options: dict[str, Any]) -> Any:
    """Embeddings of the same rows by another model."""
    from mettle.evaluate import read_embeddings

    if path.is_dir():
        raise InputError(f"--second {path} is a run: embed the data with it first (mettle embed), or mine a run")
    labels = labels if path.suffix.lower() == ".npy" else None
    other = read_embeddings(path, labels, domain="", groups=[], **options)
    if len(other) != len(table):
        raise InputError(
            f"--second {path} must hold the same rows: it has {len(other)}, and {table.origin} {len(table)}"
        )
    if (other.label.values() != table.label.values()).any():
        raise InputError(f"--second {path} must hold the same rows in the same order: its labels differ")
    return other.values


def _embed_run(
    folder: Path, data: str | None, second: Path | None, across: str | None, names: str | None, columns: dict[str, Any]
) -> _MiningSet:
    """The rows of data that a run embeds."""
    import numpy as np

    from mettle.model.inference import embed
    from mettle.report.pair_cards import describe_sample
    from mettle.train import open_run_folder

    if second is not None and not second.is_dir():
        raise InputError(f"--second {second} must be a run folder too, where a run is mined")
    run = open_run_folder(folder)
    samples = load_samples(run, data, **columns)
    if names == "path" and samples.files is None:
        raise InputError("--names path: these samples come from no files; leave it out to call them by their ids")
    domain = None if across is None else samples.column(across).codes
    print(f"embedding {len(samples):,} samples ...", flush=True)
    other = None
    if second is not None:
        opened = open_run_folder(second)
        again = load_samples(opened, data, **columns)
        if again.ids.tolist() != samples.ids.tolist() or (again.label.values() != samples.label.values()).any():
            raise InputError(f"--second {second} reads other samples than {folder}: name the data, as in mine RUN DATA")
        other = embed(opened.model(), again)
    return _MiningSet(
        embed(run.model(), samples),
        samples.label.values().astype(str),
        samples.ids,
        np.asarray(samples.files) if names == "path" else samples.ids,
        samples.split,
        domain,
        other,
        lambda at: describe_sample(samples, at),
    )


def _notes(mined: Any, names: Any) -> list[str]:
    """What to know before the examples are used."""
    notes = []
    if len(mined.copies):
        first, second = (names[row] for row in mined.copies[0])
        copied = len(set(mined.copies.ravel().tolist()))
        coarse = copied > mined.account.rows / 2
        reason = (
            "the embeddings are too coarse to tell labels apart" if coarse else "one of the labels is probably wrong"
        )
        notes.append(
            f"{copied:,} samples equal one of another label number for number, the first are {first} and {second}: "
            f"{reason}"
        )
    served = mined.account.rows - mined.account.without_positive
    if mined.account.without_negative > served / 2:
        notes.append(
            f"{mined.account.without_negative:,} of {served:,} anchors are left without a negative: a smaller margin "
            "or a larger --depth leaves more"
        )
    return notes
