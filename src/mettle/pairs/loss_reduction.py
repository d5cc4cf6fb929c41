"""From one value per anchor to what a loss returns: a mean, a sum, or the values themselves."""

from typing import Literal

import torch
from torch import Tensor

LossReduction = Literal["mean", "pairs", "nonzero", "sum", "none"]
"""What a loss makes of its values per anchor, over the anchors for which it is defined.

``mean``: their mean, weighted where the loss has a weight for its anchors; ``pairs``: their mean, weighted by how many
positive pairs an anchor has, which takes the place of that weight; ``nonzero``: the mean of those that are not 0, and 0
where all are; ``sum``: their sum; ``none``: (n,) the values, 0 where the loss is not defined.
"""


def count_of_anchors(
    values: Tensor,
    defined: Tensor,
    anchor_weight: Tensor | None,
    positives: Tensor | None,
    reduction: LossReduction,
) -> Tensor:
    """(n,) how often each anchor counts in a reduction to one number; 0 where the loss is not defined."""
    here = defined.to(values.dtype)
    if reduction == "sum":
        return here
    if reduction == "pairs":
        assert positives is not None
        return here * positives.detach().to(values.dtype)
    weight = here if anchor_weight is None else anchor_weight * here
    return weight * (values.detach() != 0).to(weight.dtype) if reduction == "nonzero" else weight


def divide_total(
    total: Tensor, weight: Tensor, is_empty: Tensor, reduction: LossReduction, *, zero_if_empty: bool
) -> Tensor:
    """The one number, from the weighted sum of the values and the sum of the weights.

    Where the loss is defined for no anchor it is NaN, unless that shall be 0; where none counts it is 0.
    """
    found = total if reduction == "sum" else total / torch.where(weight == 0, 1, weight)
    return found if zero_if_empty else torch.where(is_empty, torch.nan, found)
