"""Labels that number class vectors, checked before they index anything."""

from collections.abc import Callable

import torch
from torch import Tensor

from mettle.losses.base import need


def in_range(labels: Tensor, known: int) -> tuple[Callable[[], None], Tensor]:
    """What judges the labels, to be called before a result is used, and the labels as int64, safe until then.

    On a processor they are judged at once. A GPU asked for a number stands still while it is read. So the range is
    asked for first, work is started on labels moved into it, and the answer is judged when there is work for longer
    than the reading takes.
    """
    labels = labels.long()  # torch reads an index of another type as a mask, or not at all

    def judge() -> None:
        if told is not None:
            told.synchronize()
        low, high = ends.tolist()
        wrong = low if low < 0 else high
        need(0 <= wrong < known, f"label {wrong} is out of range: {known} classes are numbered 0 to {known - 1}")

    told = None
    if not labels.is_cuda:
        ends = torch.stack(torch.aminmax(labels))
        judge()
        return (lambda: None), labels
    with torch.cuda.device_of(labels):
        if torch.cuda.is_current_stream_capturing():  # a graph cannot ask anything
            return (lambda: None), labels
        ends, told = torch.stack(torch.aminmax(labels)).to("cpu", non_blocking=True), torch.cuda.Event()
        told.record()
    return judge, labels.clamp(0, known - 1)
