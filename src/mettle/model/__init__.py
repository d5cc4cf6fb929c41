"""From an input to an embedding: backbone, pool, head; and two-network models around any encoder."""

from mettle.model.embedder import Embedder, EmbedderSpec
from mettle.model.inference import embed
from mettle.model.siamese import SiameseNet, TripletNet

__all__ = ["Embedder", "EmbedderSpec", "SiameseNet", "TripletNet", "embed"]
