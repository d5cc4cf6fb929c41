"""Batch norm over ranks, against one process that normalizes all rows."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from mettle.train.ranks.batch_norm import SynchronizedBatchNorm
from tests.processes import Forked

SIZES = {"image": (7, 3, 4, 5), "row": (7, 3), "plain": (7, 3, 6)}


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    found = {"image": nn.BatchNorm2d(3), "row": nn.BatchNorm1d(3), "plain": nn.BatchNorm1d(3, affine=False)}
    for layer in found.values():
        for p in layer.parameters():
            nn.init.normal_(p)
    return found


def normalize(rows: slice) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in layers().items():
        layer.double()
        whole, target = torch.randn(2, *SIZES[name], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = (whole[rows] * 3 + 2).requires_grad_()
        if name == "image":
            x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        (y * target[rows]).sum().backward()
        found |= {f"{name} y": y.detach(), f"{name} gradient": x.grad}
        found |= {f"{name} {key}": p.grad for key, p in layer.named_parameters()}
        found |= {f"{name} {key}": value.double() for key, value in layer.named_buffers()}
        found[f"{name} evaluated"] = layer.eval()(x).detach()
    return {key: value.contiguous() for key, value in found.items() if value is not None}


def work(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    with SynchronizedBatchNorm():
        found = normalize(slice(0, 2) if rank == 0 else slice(2, 7))
    save_file(found, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_ranks_normalize_as_one_process_that_has_all_rows(tmp_path):
    for one in [Forked(work, rank, tmp_path) for rank in range(2)]:
        said = one.communicate(timeout=200)
        assert one.returncode == 0, said
    alone, parts = normalize(slice(None)), [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for key, wanted in alone.items():
        if key.endswith(("y", "gradient", "evaluated")):
            got = torch.cat([part[key] for part in parts])
        elif key.endswith(("weight", "bias")):  # each rank has its part of these sums
            got = parts[0][key] + parts[1][key]
        else:
            got = parts[1][key]
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=lambda said, key=key: f"{key}: {said}")
