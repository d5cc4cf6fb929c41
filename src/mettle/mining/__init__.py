"""Hard examples over a whole set: `mine` finds hard positives and hard negatives, and says what it left out and why."""

from mettle.mining.neighbors import SearchFacts
from mettle.mining.tables import check_table_path, write_pairs, write_triplets
from mettle.mining.triplets import Account, Guards, Mined, MinedPairs, mine

__all__ = [
    "Account",
    "Guards",
    "Mined",
    "MinedPairs",
    "SearchFacts",
    "check_table_path",
    "mine",
    "write_pairs",
    "write_triplets",
]
