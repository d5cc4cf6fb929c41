"""Checked embeddings, wherever they are, with what is known about each row."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class Rows:
    """Checked embeddings with what is known about each row.

    Attributes:
        given: (n, d) float64 if float64 came, float32 otherwise; a tensor if it came on an accelerator.
        labels: (n,) int64, who or what each row is; codes where the labels came as text.
        ids: (n,) int64 sample ids, or None when none were given.
        domains: (n,) how each row was captured (integers or text), or None.
        names: the text that each code of ``labels`` stands for, ascending, or None where labels came as integers.
    """

    given: np.ndarray | torch.Tensor
    labels: np.ndarray
    ids: np.ndarray | None = None
    domains: np.ndarray | None = None
    names: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def given_labels(self) -> np.ndarray:
        """(n,) the labels as they came: integers or text."""
        return self.labels if self.names is None else self.names[self.labels]

    @cached_property
    def values(self) -> np.ndarray:
        """The embeddings in main memory, copied there when first needed."""
        return self.given if isinstance(self.given, np.ndarray) else self.given.cpu().numpy()

    @property
    def double(self) -> bool:
        """Whether the embeddings are float64."""
        return self.given.dtype in (np.float64, torch.float64)

    @property
    def dim(self) -> int:
        """Components of an embedding."""
        return self.given.shape[1]

    def take(self, mask: np.ndarray) -> "Rows":
        """Some of the rows, wherever they are."""

        def cut(a: np.ndarray | None) -> np.ndarray | None:
            return None if a is None else a[mask]

        at = mask if isinstance(self.given, np.ndarray) else torch.from_numpy(mask).to(self.given.device)
        return Rows(self.given[at], self.labels[mask], cut(self.ids), cut(self.domains), self.names)


@dataclass(frozen=True, eq=False)
class Source:
    """What a verification was computed from, so that groups and comparisons can pair the same rows again."""

    probe: Rows
    gallery: Rows | None
    arguments: Mapping[str, Any]
