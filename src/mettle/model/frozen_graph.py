"""`FrozenGraph`: an ONNX graph as a backbone that is not trained."""

from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError


class FrozenGraph(nn.Module):
    """Features of an ONNX graph, without gradient; the graph is part of the state, so that a run holds all it needs.

    Args:
        width: how many features the graph gives. Before a graph is set they are NaN.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.graph: nn.Module | None = None

    def set_graph(self, content: bytes) -> None:
        """Use the graph that is the content of an ONNX file."""
        from mettle.model.onnx import OnnxEmbedder  # which builds on embedders, as these do on backbones

        graph = OnnxEmbedder(content)
        if graph.dim != self.width:
            raise InputError(f"the graph gives {graph.dim} features, model.width says {self.width}: leave width out")
        self.graph = graph

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) inputs to (b, width) features."""
        if self.graph is None:
            return torch.full((len(x), self.width), torch.nan, device=x.device)
        with torch.no_grad():
            return self.graph(x.float())

    def get_extra_state(self) -> Tensor:
        """The content of the graph as bytes."""
        content: Any = b"" if self.graph is None else self.graph.content
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """The inverse of :meth:`get_extra_state`."""
        if len(state):
            self.set_graph(state.cpu().numpy().tobytes())
