"""Who is trained on and who is tested on: disjoint identities, disjoint domains, as pure functions of a seed."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from mettle.data.dataset import SPLITS, Samples
from mettle.data.image_decoding import quote_name
from mettle.errors import DataError, InputError
from mettle.rng import permutation


def identity_disjoint_split(samples: Samples, *, val: float = 0.1, test: float = 0.3, seed: int = 0) -> Samples:
    """Split by identity: no label of the test split is ever trained on.

    Args:
        samples: any table; an existing split is replaced.
        val: share of the identities for validation.
        test: share of the identities for testing.
        seed: which identities; the same for the same set of labels.
    """
    _check_shares(val, test)
    if test == 0:
        raise InputError("test must be above 0: a share of the identities to hold out, such as 0.3")
    present = np.unique(samples.labels)
    n_test, n_val = round(test * len(present)), round(val * len(present))
    if n_test < 2 or len(present) - n_test - n_val < 2:
        names = ", ".join([*(quote_name(samples.label.names[code]) for code in present[:4]), "..."][: len(present)])
        raise DataError(
            f"{len(present)} identities ({names}) are too few to hold out {test:.0%} for testing: two are needed "
            "on each side. Add identities, or give the table a split column, or the folder one folder per label below "
            "train, val and test"
        )
    order = present[permutation(len(present), seed, 0, stream=11)]
    part = np.zeros(len(samples.label.names) or int(present.max()) + 1, np.int8)
    part[order[:n_test]], part[order[n_test : n_test + n_val]] = 2, 1
    return replace(samples, split=part[samples.labels])


def identity_folds(samples: Samples, folds: int, seed: int = 0) -> list[Samples]:
    """The training split, so many times: each time the identities of another fold are its validation split.

    Nothing of the validation and test splits is in it.

    Args:
        samples: with a split.
        folds: at least 2.
        seed: which identities are in which fold; the same for the same set of labels.
    """
    part = samples.part("train")
    present = np.unique(part.labels)
    if folds < 2:
        raise InputError(f"folds must be at least 2, got {folds}")
    if len(present) < 2 * folds:
        raise DataError(
            f"{len(present)} training identities are too few for {folds} folds: two are needed in each. Ask for fewer "
            "folds"
        )
    fold = np.zeros(int(present.max()) + 1, np.int64)
    fold[present[permutation(len(present), seed, 0, stream=19)]] = np.arange(len(present)) % folds
    return [replace(part, split=(fold[part.labels] == k).astype(np.int8)) for k in range(folds)]


def hold_out_identities(samples: Samples, split: str, share: float, seed: int = 0) -> tuple[Samples, int]:
    """Move a share of the training identities to another split; returns how many, too.

    Args:
        samples: with a training split.
        split: ``val`` or ``test``.
        share: of the identities of the training split.
        seed: which identities; the same for the same set of labels.
    """
    _check_shares(share, 0.0)
    train = samples.split == SPLITS.index("train")
    present = np.unique(samples.labels[train])
    count = round(share * len(present))
    if share and (count < 2 or len(present) - count < 2):
        raise DataError(
            f"{len(present)} training identities are too few to keep {share:.0%} of them apart as {split}: two are "
            f"needed on each side. Give {split}= data of its own"
        )
    chosen = present[permutation(len(present), seed, 0, stream=19)[:count]]
    moved = train & np.isin(samples.labels, chosen)
    return replace(samples, split=np.where(moved, SPLITS.index(split), samples.split).astype(np.int8)), count


def sample_split(samples: Samples, *, val: float = 0.1, test: float = 0.3, seed: int = 0) -> Samples:
    """Split by sample, for closed-set tasks: the same labels on both sides.

    Args:
        samples: any table; an existing split is replaced.
        val: share of the samples for validation.
        test: share of the samples for testing.
        seed: which samples.
    """
    _check_shares(val, test)
    n_test, n_val = round(test * len(samples)), round(val * len(samples))
    if len(samples) <= n_test + n_val:
        raise DataError(f"{len(samples)} samples are too few: shares of {val:g} and {test:g} leave none to train on")
    order = permutation(len(samples), seed, 0, stream=13)
    split = np.zeros(len(samples), np.int8)
    split[order[:n_test]], split[order[n_test : n_test + n_val]] = 2, 1
    return replace(samples, split=split)


def _check_shares(val: float, test: float) -> None:
    """Refuse what are no shares, NaN included, and shares that leave nothing to train on."""
    numbers = all(isinstance(share, Real) and not isinstance(share, bool) for share in (val, test))
    if not (numbers and val >= 0 and test >= 0 and val + test < 1):
        raise InputError(f"val and test must be shares from 0 up with val + test < 1, got {val!r} and {test!r}")


def hold_out_domains(samples: Samples, domains: Sequence[str]) -> Samples:
    """Keep some domains out of training, and let their test samples be the probes.

    Training and validation samples of these domains are dropped. In the test split they become queries, and the test
    samples of the other domains the gallery.
    """
    if samples.domain is None:
        raise DataError(f"{samples.source_name or 'these samples'} have no domain column to hold out")
    unknown = [name for name in domains if name not in samples.domain.names]
    if unknown:
        raise DataError(f"no domain {unknown[0]!r}; there are {', '.join(samples.domain.names)}")
    codes = [samples.domain.names.index(name) for name in domains]
    held = np.isin(samples.domain.codes, codes)
    test = samples.split == SPLITS.index("test")
    kept = samples.where(test | ~held)
    held, test = held[test | ~held], test[test | ~held]
    return replace(kept, role=np.where(~test, 0, np.where(held, 1, 2)).astype(np.int8))
