"""Who a model was trained on: ``trained.safetensors`` of a run, so that "never trained on" can be checked later.

The names of the training identities and domains, as hashes: equal names have equal hashes on every machine, the file is
eight bytes a name, and nobody's name stands in it.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mettle.data.samples import Column, Samples
from mettle.durable import write_bytes
from mettle.errors import RunError
from mettle.train.run_folder import Run

FILE = "trained.safetensors"


@dataclass(frozen=True, eq=False)
class Trained:
    """Hashes of the names that occurred in training, sorted; no domains where the data have none."""

    identities: np.ndarray
    domains: np.ndarray | None = None


def of(samples: Samples) -> Trained:
    """Those of the training split."""
    part = samples.part("train")
    return Trained(_present(part.label), None if part.domain is None else _present(part.domain))


def known(names: Iterable[str], among: np.ndarray) -> np.ndarray:
    """For each name, whether its hash is among these."""
    return np.isin(np.asarray([hashed(name) for name in names], np.int64), among)


def hashed(name: str) -> int:
    """64 bits of SHA-256, signed; the two ways to write an accent give the same."""
    content = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def keep(run: Run, samples: Samples) -> None:
    """Write who a run is trained on, unless that is there already."""
    path = run.folder / FILE
    if not path.is_file():
        found = of(samples)
        arrays = {"identities": found.identities}
        write_bytes(path, save(arrays | ({} if found.domains is None else {"domains": found.domains})))


def kept(run: Run) -> Trained | None:
    """Who a run was trained on; None for runs of versions that did not keep it."""
    path = run.folder / FILE
    if not path.is_file():
        return None
    try:
        arrays = load_file(path)
        found = Trained(arrays["identities"], arrays.get("domains"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{path} is damaged ({type(problem).__name__}): remove it, and train again to have it") from None
    for one in (found.identities, found.domains):
        if one is not None and (one.dtype != np.int64 or one.ndim != 1):
            raise RunError(f"{path} is damaged (no list of 64-bit hashes): remove it, and train again to have it")
    return found


def _present(column: Column) -> np.ndarray:
    return np.unique(np.asarray([hashed(column.names[code]) for code in np.unique(column.codes)], np.int64))
