"""The kernels with rows of one rank and columns of all, on the device: together they come to the whole batch."""

import pytest
import torch

from mettle.difficulty import Importance, Relative, Threshold
from mettle.losses import Circle, InfoNCE, SupCon
from mettle.pairs.kernels import KernelInputs, available, lower_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the kernels' logic is tested in tests/pairs"),
    pytest.mark.skipif(not available(), reason="triton is not installed"),
]
LOSSES = {
    "supcon": SupCon(0.1),
    "supcon cold": SupCon(0.01),
    "da-supcon live": SupCon(0.1, difficulty=Threshold(negative=0.1, detach=False)),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
    "relative": InfoNCE(0.5, 0.1, Relative()),
    "circle": Circle(),
}


@pytest.mark.parametrize("d", [64, 128, 512])
@pytest.mark.parametrize(("precision", "within"), [("bf16x3", 2e-4), ("fp16", 6e-3)])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_come_to_the_whole_batch(name, precision, within, d):
    from mettle.pairs.kernels.function import evaluate_spec
    from mettle.pairs.kernels.rank_rows import RankRowsCall

    loss = LOSSES[name]
    generator = torch.Generator("cuda").manual_seed(d)
    z = torch.randn(2100, d, generator=generator, device="cuda")
    y = torch.arange(2100, device="cuda")[torch.randperm(2100, generator=generator, device="cuda")] // 4
    biased = torch.randn(2100, 64, generator=generator, device="cuda")
    spec = lower_loss(loss, loss.difficulty, KernelInputs(z, y, biased=(biased, biased)))
    leaf = z.clone().requires_grad_()
    wanted = evaluate_spec(spec, leaf, y, biased=(biased, biased), precision=precision)
    g = torch.rand(len(z), generator=generator, device="cuda")
    (gradient,) = torch.autograd.grad((wanted.values * g).sum(), leaf)
    calls, values, states = [], [], []
    for part in (slice(0, 500), slice(500, 501), slice(501, 2100)):
        both = (biased[part].contiguous(), biased) if spec.has_second_encoder else None
        number = torch.arange(part.start, part.stop, dtype=torch.int32, device="cuda")
        call = RankRowsCall(spec, y[part].contiguous(), y, both, precision, None, number)
        values.append(call.forward(z[part].contiguous(), z)[0])
        states.append(call.gradient_state(g[part]))
        calls.append((call, part))
    found = torch.cat([call.gradient(torch.cat(states), z[part], False)[0] for call, part in calls])
    torch.testing.assert_close(torch.cat(values), wanted.values, rtol=within, atol=within)
    assert float((found.double() - gradient.double()).norm() / gradient.double().norm()) < within
