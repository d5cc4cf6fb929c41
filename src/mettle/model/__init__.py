"""From an input to an embedding: backbone, pool, head."""

from mettle.model.embed import embed
from mettle.model.embedder import Embedder, EmbedderSpec

__all__ = ["Embedder", "EmbedderSpec", "embed"]
