"""One loss, one short file; its docstring is the formula."""

from typing import TYPE_CHECKING

from mettle.losses.adacos import AdaCos
from mettle.losses.adaface import AdaFace
from mettle.losses.arcface import ArcFace
from mettle.losses.base import PairwiseLoss as PairwiseLoss
from mettle.losses.base import SoftmaxLoss as SoftmaxLoss
from mettle.losses.base import any_pair as any_pair
from mettle.losses.base import softplus as softplus
from mettle.losses.base import zero_if_empty as zero_if_empty
from mettle.losses.center import Center
from mettle.losses.circle import Circle
from mettle.losses.contrastive import Contrastive
from mettle.losses.cosface import CosFace
from mettle.losses.cross_batch_memory import CrossBatchMemory
from mettle.losses.cross_batch_memory import takes_references as takes_references
from mettle.losses.curricularface import CurricularFace
from mettle.losses.infonce import InfoNCE
from mettle.losses.lifted import LiftedStructure
from mettle.losses.magface import MagFace
from mettle.losses.margin import Margin
from mettle.losses.matryoshka import Matryoshka
from mettle.losses.mcml import MCML as MCML
from mettle.losses.multi_similarity import MultiSimilarity
from mettle.losses.npair import NPair
from mettle.losses.npair import split_anchor_positive as split_anchor_positive
from mettle.losses.peer_names import PEERS, PLANNED
from mettle.losses.proxy_anchor import ProxyAnchor
from mettle.losses.proxy_nca import ProxyNCA
from mettle.losses.self_triplet import SelfTriplet
from mettle.losses.sharded_classes import check_shardable as check_shardable
from mettle.losses.sharded_classes import load_class_shards as load_class_shards
from mettle.losses.sharded_classes import save_class_shards as save_class_shards
from mettle.losses.sharded_classes import shard_classes as shard_classes
from mettle.losses.similarity_classification import SimilarityClassification
from mettle.losses.similarity_ranking import SimilarityRanking
from mettle.losses.similarity_regression import SimilarityRegression
from mettle.losses.smooth_ap import SmoothAP
from mettle.losses.soft_triple import SoftTriple
from mettle.losses.softmax import NormFace, Softmax
from mettle.losses.sphereface import SphereFace
from mettle.losses.subcenter_arcface import SubCenterArcFace
from mettle.losses.supcon import DASupCon, SupCon
from mettle.losses.triplet import Triplet
from mettle.losses.two_towers import CLIP, SigLIP
from mettle.losses.weighted_sum import MinedLoss, WeightedSum
from mettle.losses.weighted_sum import WeightSchedule as WeightSchedule
from mettle.unknown_names import explain_arguments, explain_missing_name

__all__ = [  # noqa: RUF022 - CLIP is a class, no constant
    "AdaCos",
    "AdaFace",
    "ArcFace",
    "CLIP",
    "Center",
    "Circle",
    "Contrastive",
    "CosFace",
    "CrossBatchMemory",
    "CurricularFace",
    "DASupCon",
    "InfoNCE",
    "LiftedStructure",
    "MagFace",
    "Margin",
    "Matryoshka",
    "MinedLoss",
    "MultiSimilarity",
    "NPair",
    "NormFace",
    "ProxyAnchor",
    "ProxyNCA",
    "SelfTriplet",
    "SigLIP",
    "SimilarityClassification",
    "SimilarityRanking",
    "SimilarityRegression",
    "SmoothAP",
    "SoftTriple",
    "Softmax",
    "SphereFace",
    "SubCenterArcFace",
    "SupCon",
    "Triplet",
    "WeightedSum",
]

for _name in __all__:
    if isinstance(globals()[_name], type):  # `DASupCon`, a function, is decorated where it is defined
        explain_arguments(globals()[_name])


if not TYPE_CHECKING:  # a checker of types should go on refusing what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, PEERS, PLANNED)
