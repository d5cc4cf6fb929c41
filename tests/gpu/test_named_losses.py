"""The losses that people name on a GPU: value and gradient are those of float64 on the processor."""

import pytest
import torch

from mettle.difficulty import Threshold
from mettle.losses import (
    AdaFace,
    Circle,
    CurricularFace,
    MagFace,
    Margin,
    MultiSimilarity,
    ProxyAnchor,
    ProxyNCA,
    SmoothAP,
    SoftTriple,
    SubCenterArcFace,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]
N, C, D = 300, 60, 32
LOSSES = {
    "multi-similarity": lambda: MultiSimilarity(),
    "multi-similarity, threshold": lambda: MultiSimilarity(difficulty=Threshold()),
    "circle": lambda: Circle(),
    "margin": lambda: Margin(),
    "smooth-ap": lambda: SmoothAP(),
    "proxy-anchor": lambda: ProxyAnchor(C, D),
    "proxy-nca": lambda: ProxyNCA(C, D),
    "soft-triple": lambda: SoftTriple(C, D),
    "subcenter-arcface": lambda: SubCenterArcFace(C, D),
    "curricularface": lambda: CurricularFace(C, D),
    "adaface": lambda: AdaFace(C, D),
    "magface": lambda: MagFace(C, D),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_the_gpu_equals_float64(name):
    torch.manual_seed(0)
    loss = LOSSES[name]()
    exact = LOSSES[name]().double()
    exact.load_state_dict(loss.state_dict())
    z, y = 3 * torch.randn(N, D), torch.arange(N) % C
    found, wanted = z.cuda().requires_grad_(), z.double().requires_grad_()
    value, reference = loss.cuda()(found, y.cuda()), exact(wanted, y)
    value.backward()
    reference.backward()
    assert float(value) == pytest.approx(float(reference), rel=1e-4)
    largest = float(wanted.grad.abs().max())
    torch.testing.assert_close(found.grad.cpu().double(), wanted.grad, rtol=1e-3, atol=1e-4 * largest)
