"""Several templates of one person, one score.

| rule | score of a probe p with templates t_1 … t_m |
|---|---|
| ``best`` | max_i p·t_i |
| ``mean`` | (1/m) Σ_i p·t_i = p · mean(t) |
| ``centroid`` | cos(p, mean(t)) |

Each rule is a maximum of p with a few rows: all templates, their mean, or their normalised mean. So an index that
holds these rows finds the best people under every rule.
"""

import numpy as np

from mettle.errors import InputError, nearest

RULES = ("best", "mean", "centroid")


def check_rule(name: str) -> str:
    """A known rule, or an error that says which there are."""
    if not isinstance(name, str) or name not in RULES:
        raise InputError(f"no fusion rule {name!r:.80}{nearest(str(name)[:80], RULES)}")
    return name


def rows(rule: str, templates: np.ndarray) -> np.ndarray:
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


def score(rule: str, probe: np.ndarray, templates: np.ndarray) -> float:
    """Fused score of one probe, computed in double precision."""
    found = rows(rule, templates).astype(np.float64) @ probe.astype(np.float64)
    return float(np.clip(found.max(), -1.0, 1.0))
