"""Proxy-NCA: neighbourhood components analysis with one proxy per class in place of the neighbours."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors


class ProxyNCA(ClassVectors):
    r"""Proxy-NCA (Movshovitz-Attias et al. 2017) and ProxyNCA++ (Teh et al. 2020).

    Formula, d_j = ‖ẑ − ŵ_j‖² between features and proxies of length 1, s = ``scale``:
        include_own      L_i = −log( e^{−s d_y} / Σ_j e^{−s d_j} )       a probability, as in ProxyNCA++
        not include_own  L_i = −log( e^{−s d_y} / Σ_{j≠y} e^{−s d_j} )   as first published; it has no lower bound
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        a plain loss against proxies is wanted. ProxyNCA++ is s = 9 (a temperature of 1/9, the default here), the
        probability, batches of several samples of a class, and proxies that learn faster than the network
        (``train.loss_rate``). The first paper has s = 1.
    Relations:
        d = 2 − 2 cos θ, so with ``include_own`` it is `NormFace` with a scale of 2 s.
    """

    self_contained = True

    def __init__(self, num_classes: int, dim: int, scale: float = 9.0, include_own: bool = True, **options):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(
            include_own or not self.label_smoothing,
            "label_smoothing needs the own class among all classes: set include_own = True, or leave one of both out",
        )
        self.scale, self.include_own = scale, include_own

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, include_own={self.include_own}"

    def sample_loss(self, others: Tensor, logit: Tensor) -> Tensor:
        """Against all classes, or against the others alone; 0 where there is no other."""
        if self.include_own:
            return super().sample_loss(others, logit)
        alone = others == torch.finfo(others.dtype).min
        return (others.masked_fill(alone, 0) - logit).masked_fill(alone, 0)

    def _logit_scale(self) -> float:
        """Of cosines: −s d = 2 s cos θ − 2 s, and the constant cancels."""
        return 2 * float(self.scale)
