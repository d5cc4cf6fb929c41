"""Linear and kNN probes of frozen features, as `mettle.evaluate.probe` defines them, on the device.

The linear probe minimises C·Σ cross-entropy + ½‖W‖² on unit vectors (the intercept is free), as scikit-learn's logistic
regression does there; C is chosen on validation. kNN: the 20 nearest vote with e^{s/0.07}.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from mettle.evaluate.probe import Accuracy

STRENGTHS = (0.1, 1.0, 10.0, 100.0)


def logistic(x: Tensor, y: Tensor, strength: float, start: Tensor | None = None, iterations: int = 100) -> Tensor:
    """(f + 1, classes) weights, the last row the intercept, by L-BFGS."""
    classes = int(y.max()) + 1
    w = torch.zeros(x.shape[1] + 1, classes, device=x.device) if start is None else start.clone()
    w.requires_grad_()
    scale = 1 / (strength * len(x))
    solver = torch.optim.LBFGS(
        [w], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = cross_entropy(x @ w[:-1] + w[-1], y) + scale / 2 * w[:-1].square().sum()
        value.backward()
        return value

    solver.step(loss)  # type: ignore[arg-type]
    return w.detach()


def linear(parts: dict[str, Tensor], labels: dict[str, np.ndarray]) -> tuple[Accuracy, float]:
    """A probe fitted on ``train``, its strength chosen on ``val``, read once on ``test``; and that strength."""
    names, codes = np.unique(labels["train"], return_inverse=True)
    z = {name: normalize(x, dim=1) for name, x in parts.items()}
    y = torch.from_numpy(codes.astype(np.int64)).to(z["train"].device)
    best, w = (-1.0, 0.0, y), None

    def said(w: Tensor, part: str) -> np.ndarray:
        return names[(z[part] @ w[:-1] + w[-1]).argmax(1).cpu().numpy()]

    for strength in STRENGTHS:  # ascending, each starting where the last one ended
        w = logistic(z["train"], y, strength, w)
        right = float((said(w, "val") == labels["val"]).mean())
        if right > best[0]:
            best = (right, strength, w)
    correct = (said(best[2], "test") == labels["test"]).astype(float)
    return Accuracy(correct, labels["test"]), best[1]


@torch.inference_mode()
def knn(parts: dict[str, Tensor], labels: dict[str, np.ndarray], k: int = 20, temperature: float = 0.07) -> Accuracy:
    """Weighted votes of the nearest training samples."""
    names, codes = np.unique(labels["train"], return_inverse=True)
    first, second = (normalize(parts[name], dim=1) for name in ("train", "test"))
    code = torch.from_numpy(codes.astype(np.int64)).to(first.device)
    said = []
    for part in second.split(2048):
        s, at = (part @ first.T).topk(min(k, len(first)), dim=1)
        votes = torch.zeros(len(part), len(names), device=s.device)
        votes.scatter_add_(1, code[at], ((s - s[:, :1]) / temperature).exp())
        said.append(votes.argmax(1).cpu().numpy())
    return Accuracy((names[np.concatenate(said)] == labels["test"]).astype(float), labels["test"])
