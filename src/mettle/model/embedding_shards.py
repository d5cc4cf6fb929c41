"""Embeddings of a whole table by several processes: each embeds a part and writes it as a file of its own.

The rows are dealt in the batches that one process would embed, in their order, so every embedding comes out of the same
products; rank 0 alone makes the folder and writes its manifest. The folder appears when all parts are in it: where a
process fails, or is killed, nothing is left of it.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from mettle.atomic_files import write_folder
from mettle.data.dataset import Samples
from mettle.data.embedding_shards import MANIFEST, Shard, manifest_text, shard_name
from mettle.data.quantization import cut_embeddings
from mettle.errors import InputError
from mettle.model.embedder import EmbeddingModel
from mettle.model.inference import (
    BATCH,
    check_dim,
    check_output_path,
    choose_encoder,
    describe_rows,
    embed,
)
from mettle.model.weights import hash_state_dict
from mettle.pairs.distributed import RankGroup


def write_embedding_shards(
    model: EmbeddingModel,
    samples: Samples,
    path: Path,
    *,
    weights: str | None = None,
    dim: int | None = None,
    ranks: RankGroup | None = None,
) -> str:
    """Embed samples into a folder of Parquet files, one for each rank; every rank makes this call.

    Args:
        model: What embeds: the same on every rank.
        samples: What is embedded, all of it: each rank takes its part.
        path: The folder to make, which all ranks see; its name ends in ``.parquet``.
        weights: The hash of the model's weights, as its contract has it; worked out where it is not given.
        dim: How many of the first numbers of each embedding are kept; by default all.
        ranks: Who takes part; by default the ranks of `torch.distributed`.

    Raises:
        InputError: There is something at ``path`` already, its name has another ending, or ranks have other rows.
        MettleError: A rank failed, on all of them.
    """
    ranks = RankGroup.current() if ranks is None else ranks
    path, known = Path(path), weights or hash_state_dict(model)

    def prepare() -> dict[str, np.ndarray]:
        check_dim(dim, model)
        check_shards_path(path)
        said = f"{known} {dim} {len(samples)} {samples.ids.sum()}"
        return {"facts": np.frombuffer(said.encode(), np.uint8)}

    facts = ranks.compute(prepare)
    other = next((k for k, one in enumerate(facts) if one["facts"].tobytes() != facts[0]["facts"].tobytes()), None)
    if other is not None:
        raise InputError(f"ranks 0 and {other} have other samples or another model: give every rank the same")
    written: list[Shard] = []

    def fill(folder: Path | None) -> None:
        """Every rank writes its part into the folder that rank 0 has made; rank 0 then the manifest."""
        place = ranks.compute(lambda: {} if folder is None else {"name": np.asarray([str(folder)])})[0]["name"][0]
        parts = ranks.compute(lambda: _write_part(model, samples, Path(str(place)), known, dim, ranks))
        written.extend(Shard(str(p["name"][0]), int(p["rows"][0]), str(p["sha256"][0])) for p in parts)
        ranks.compute(lambda: {} if folder is None else _write_manifest(folder, written))

    if ranks.is_first:
        _make_folder(path, fill, ranks)
    else:
        fill(None)
        ranks.compute(dict)  # until rank 0 has given the folder its name
    width = model.dim if dim is None else dim
    return f"{path}: {sum(s.rows for s in written)} embeddings of dimension {width} in {len(written)} files"


def embed_across_ranks(
    model: EmbeddingModel, samples: Samples, ranks: RankGroup, *, features: bool = False
) -> np.ndarray:
    """`embed` by several processes: (n, dim) on every rank, of which each has embedded a part."""
    if ranks.size == 1:
        return embed(model, samples, features=features)
    own = samples.take(np.arange(len(samples))[_own_rows(len(samples), ranks)])
    parts = ranks.compute(lambda: {"embeddings": embed(model, own, features=features)})
    return np.concatenate([part["embeddings"] for part in parts if len(part["embeddings"])])


def _own_rows(n: int, ranks: RankGroup) -> slice:
    """This rank's part of n rows, in whole batches, so that each is embedded beside the same others."""
    batches = -(-n // BATCH)
    begin, end = (min(batches * rank // ranks.size * BATCH, n) for rank in (ranks.rank, ranks.rank + 1))
    return slice(begin, end)


def check_shards_path(path: Path) -> None:
    """Refuse a folder that cannot be made, before the work that would fill it."""
    if path.suffix.lower() not in (".parquet", ".pq"):
        raise InputError(
            f"cannot write {path}: several processes write a folder of Parquet files; let it end in .parquet"
        )
    if path.exists():
        raise InputError(f"cannot write {path}: it is there already; remove it, or choose another name")
    check_output_path(path)
    choose_encoder(path)


def _write_part(
    model: EmbeddingModel, samples: Samples, folder: Path, weights: str, dim: int | None, ranks: RankGroup
) -> dict[str, np.ndarray]:
    """Embed this rank's batches into its file; what the manifest says of it."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder} on this machine: all ranks must write into one shared folder")
    own = _own_rows(len(samples), ranks)
    part, name = samples.take(np.arange(len(samples))[own]), shard_name(ranks.rank, ranks.size)
    z = embed(model, part)
    # Of all rows, then cut: which columns there are, and of what type, must not depend on the part.
    columns = describe_rows(samples, weights)
    columns = {key: a if key in ("model", "label_names") else a[own] for key, a in columns.items()}
    arrays = {"embeddings": z if dim is None else cut_embeddings(z, dim), **columns}
    content = choose_encoder(folder / name)(arrays)
    (folder / name).write_bytes(content)
    shard = Shard.of(name, len(part), content)
    return {key: np.asarray([value]) for key, value in asdict(shard).items()}


def _write_manifest(folder: Path, written: list[Shard]) -> dict[str, np.ndarray]:
    missing = [shard.name for shard in written if not (folder / shard.name).is_file()]
    if missing:
        raise InputError(f"{folder} does not hold {missing[0]}: all ranks must write into one shared folder")
    (folder / MANIFEST).write_text(manifest_text(written))
    return {}


def _make_folder(path: Path, fill: Callable[[Path], None], ranks: RankGroup) -> None:
    """Rank 0's side: what goes wrong while all ranks fill the folder all of them hear; before and after, here."""
    steps: list[str] = []

    def fill_and_note(folder: Path) -> None:
        steps.append("begun")
        fill(folder)
        steps.append("filled")

    try:
        write_folder(path, fill_and_note)
    except Exception as error:
        if steps != ["begun"]:  # the others wait for what will not come
            ranks.compute(partial(_raise, error))
        raise
    ranks.compute(dict)


def _raise(error: Exception) -> dict[str, np.ndarray]:
    raise error
