"""Hard examples over a whole set: `mine` finds hard positives and hard negatives, and says what it left out and why."""

from mettle.mining.neighbors import SearchFacts
from mettle.mining.tables import check_table_path, write_pairs, write_triplets
from mettle.mining.triplets import Account, Guards, MinedPairs, MinedTriplets, check_options, mine

__all__ = [
    "Account",
    "Guards",
    "MinedPairs",
    "MinedTriplets",
    "SearchFacts",
    "check_options",
    "check_table_path",
    "mine",
    "write_pairs",
    "write_triplets",
]
