"""One loss, one short file; its docstring is the formula."""

from mettle.losses.contrastive import Contrastive
from mettle.losses.infonce import InfoNCE
from mettle.losses.lifted import LiftedStructure
from mettle.losses.npair import NPair
from mettle.losses.self_triplet import SelfTriplet
from mettle.losses.supcon import DASupCon, SupCon
from mettle.losses.triplet import Triplet

__all__ = [
    "Contrastive",
    "DASupCon",
    "InfoNCE",
    "LiftedStructure",
    "NPair",
    "SelfTriplet",
    "SupCon",
    "Triplet",
]
