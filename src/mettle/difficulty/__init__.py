"""What makes a pair hard. One object, every loss.

| difficulty | a pair weighs |
|---|---|
| `Threshold` | more, the farther a positive lies below one similarity or a negative above another |
| `AdaptiveThreshold` | the same, with thresholds that follow the data |
| `Importance` | exponentially more, the more similar a negative is |
| `Relative` | more, when a negative is hard here and easy for a biased second encoder |
| `Hardest`, `SemiHard`, `MultiSimilarityMining` | 1 or 0: mining |
| `Product`, `curriculum` | what others say, multiplied, or fading in |

Your own is one small class: see `mettle.pairs.Difficulty`.
"""

from mettle.difficulty.combine import Product, curriculum
from mettle.difficulty.fixed_weights import FixedWeights as FixedWeights
from mettle.difficulty.importance import Importance
from mettle.difficulty.mining import Hardest, MultiSimilarityMining, SemiHard
from mettle.difficulty.relative import Relative
from mettle.difficulty.settings import validate_fields as validate_fields
from mettle.difficulty.settings import validate_integers as validate_integers
from mettle.difficulty.threshold import AdaptiveThreshold, Threshold

__all__ = [
    "AdaptiveThreshold",
    "Hardest",
    "Importance",
    "MultiSimilarityMining",
    "Product",
    "Relative",
    "SemiHard",
    "Threshold",
    "curriculum",
]
