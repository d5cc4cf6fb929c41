"""What makes a pair hard. One object, every loss.

| difficulty | a pair weighs |
|---|---|
| `Threshold` | more, the farther a positive lies below one similarity or a negative above another |
| `AdaptiveThreshold` | the same, with thresholds that follow the data |
| `Importance` | exponentially more, the more similar a negative is |
| `Relative` | more, when a negative is hard here and easy for a biased second encoder |
| `Hardest`, `SemiHard`, `EasyHard`, `MultiSimilarityMining`, `PairMargin` | 1 or 0: mining |
| `Angular`, `TripletMarginMining` | 1 if it belongs to a triplet that is looked for, else 0 |
| `DistanceWeighted`, `DistanceWeightedSampling` | more, the rarer its distance; or as often as it is drawn |
| `Product`, `curriculum` | what others say, multiplied, or fading in |

Your own is one small class: see `mettle.pairs.Difficulty`.
"""

from typing import TYPE_CHECKING

from mettle.difficulty.combine import Product, curriculum
from mettle.difficulty.distance_weighted import DistanceWeighted, DistanceWeightedSampling
from mettle.difficulty.fixed_weights import FixedWeights as FixedWeights
from mettle.difficulty.importance import Importance
from mettle.difficulty.miner import mine_pairs as mine_pairs
from mettle.difficulty.mining import EasyHard, Hardest, MultiSimilarityMining, PairMargin, SemiHard
from mettle.difficulty.relative import Relative
from mettle.difficulty.settings import validate_fields as validate_fields
from mettle.difficulty.settings import validate_integers as validate_integers
from mettle.difficulty.threshold import AdaptiveThreshold, Threshold
from mettle.difficulty.triplet_mining import Angular, TripletMarginMining
from mettle.unknown_names import explain_missing_name

__all__ = [
    "AdaptiveThreshold",
    "Angular",
    "DistanceWeighted",
    "DistanceWeightedSampling",
    "EasyHard",
    "Hardest",
    "Importance",
    "MultiSimilarityMining",
    "PairMargin",
    "Product",
    "Relative",
    "SemiHard",
    "Threshold",
    "TripletMarginMining",
    "curriculum",
]

PEERS = {  # what other libraries call a miner
    "AngularMiner": "Angular",
    "BatchEasyHardMiner": "EasyHard",
    "BatchHardMiner": "Hardest",
    "DistanceWeightedMiner": "DistanceWeightedSampling",
    "MultiSimilarityMiner": "MultiSimilarityMining",
    "PairMarginMiner": "PairMargin",
    "TripletMarginMiner": "TripletMarginMining",
}

if not TYPE_CHECKING:  # a type checker should still say what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, PEERS)
