"""From an input to an embedding: preprocessing, backbone, pool, head; anybody's module or graph; smaller embeddings."""

from mettle.data.quantization import (
    QuantizedEmbeddings,
    cut_embeddings,
    measure_ranges,
    quantize_embeddings,
    quantized_similarity,
)
from mettle.model.embedder import Embedder, EmbedderSpec, EmbeddingModel
from mettle.model.inference import embed, embed_items
from mettle.model.module_embedder import ModuleEmbedder
from mettle.model.neck import BatchNormNeck
from mettle.model.onnx import OnnxEmbedder, encode_onnx, export_onnx
from mettle.model.preprocess import Preprocess
from mettle.model.pretrained import LoadedWeights, StartPlan, plan_start
from mettle.model.siamese import SiameseNet, TripletNet

__all__ = [
    "BatchNormNeck",
    "Embedder",
    "EmbedderSpec",
    "EmbeddingModel",
    "LoadedWeights",
    "ModuleEmbedder",
    "OnnxEmbedder",
    "Preprocess",
    "QuantizedEmbeddings",
    "SiameseNet",
    "StartPlan",
    "TripletNet",
    "cut_embeddings",
    "embed",
    "embed_items",
    "encode_onnx",
    "export_onnx",
    "measure_ranges",
    "plan_start",
    "quantize_embeddings",
    "quantized_similarity",
]
