"""Several templates of one person, one score.

| rule | score of a probe p with templates t_1 … t_m |
|---|---|
| ``best`` | max_i p·t_i |
| ``mean`` | (1/m) Σ_i p·t_i = p · mean(t) |
| ``centroid`` | cos(p, mean(t)) |

Each rule is a maximum of p with a few rows: all templates, their mean, or their normalised mean. So an index that
holds these rows finds the best people under every rule.

Everybody enrolled, in memory and as of one moment: where people are tried on each other, it begins here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mettle.errors import InputError, nearest

if TYPE_CHECKING:
    from mettle.gallery.storage.base import Storage


FUSION_RULES = ("best", "mean", "centroid")


def check_rule(name: str) -> str:
    """A known rule, or an error that says which there are."""
    if not isinstance(name, str) or name not in FUSION_RULES:
        raise InputError(f"no fusion rule {name!r:.80}{nearest(str(name)[:80], FUSION_RULES)}")
    return name


def fused_rows(rule: str, templates: np.ndarray) -> np.ndarray:
    """(r, dim) rows of one person: the score of a probe is its highest product with any of them."""
    if rule == "best":
        return templates
    mean = templates.astype(np.float64).mean(0, keepdims=True)
    if rule == "centroid":
        length = np.linalg.norm(mean)
        if length < 1e-6:  # templates that cancel out point nowhere: no probe is near
            return np.zeros_like(templates[:1])
        mean /= length
    return mean.astype(np.float32)


def fused_score(rule: str, probe: np.ndarray, templates: np.ndarray) -> float:
    """Fused score of one probe, computed in double precision."""
    found = fused_rows(rule, templates).astype(np.float64) @ probe.astype(np.float64)
    return min(1.0, max(-1.0, float(found.max())))


SCORE_BLOCK = 1 << 22  # scores with single rows held at one time


@dataclass(frozen=True, eq=False)
class TemplateMatrix:
    """All templates, those of a person together."""

    names: np.ndarray  # (people,) text
    owner: np.ndarray  # (n,) whose they are, as 0, 0, 1, 2, 2
    numbers: np.ndarray  # (n,) int64, of the storage
    vectors: np.ndarray  # (n, dim) float32, unit length

    @property
    def starts(self) -> np.ndarray:
        """(people,) where the templates of each person begin."""
        return np.flatnonzero(np.diff(self.owner, prepend=-1))

    @property
    def counts(self) -> np.ndarray:
        """(people,) how many templates each has."""
        return np.bincount(self.owner, minlength=len(self.names))

    def fuse_rows(self, rule: str) -> np.ndarray:
        """What a probe is compared with under a fusion rule: all templates of `best`, otherwise one row a person."""
        if rule == "best" or not len(self.names):
            return self.vectors
        return np.concatenate([fused_rows(rule, theirs) for theirs in np.split(self.vectors, self.starts[1:])])

    def score_blocks(self, at: np.ndarray, rule: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some templates, block by block, and their (p, people) scores with everybody under a fusion rule."""
        rows, starts = self.fuse_rows(rule), self.starts
        step = max(1, SCORE_BLOCK // len(rows))
        for start in range(0, len(at), step):
            here = at[start : start + step]
            scores = self.vectors[here] @ rows.T
            yield here, np.maximum.reduceat(scores, starts, axis=1) if rule == "best" else scores

    def shuffle_identities(self, seed: int = 0) -> "TemplateMatrix":
        """The same people in an order that says nothing about them."""
        order = np.random.default_rng(seed).permutation(len(self.names))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return _group_templates(self.names[order], place[self.owner], self.numbers, self.vectors)


def read_everybody(storage: "Storage") -> TemplateMatrix:
    """Read them from the storage, in the order of their names."""
    vectors, numbers, names = [np.empty((0, storage.binding.dim), np.float32)], [np.empty(0, np.int64)], []
    for part in storage.scan():
        vectors.append(part.vectors)
        numbers.append(part.numbers)
        names.extend(part.identities)
    # As objects: as text, every name would take as much room as the longest.
    known, owner = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    return _group_templates(known, owner.astype(np.int64), np.concatenate(numbers), np.concatenate(vectors))


def _group_templates(names: np.ndarray, owner: np.ndarray, numbers: np.ndarray, vectors: np.ndarray) -> TemplateMatrix:
    order = np.argsort(owner, kind="stable")
    return TemplateMatrix(names, owner[order], numbers[order], vectors[order])
