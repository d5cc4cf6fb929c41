"""Forward passes of a rank's own rows: batch norm over ranks, and random numbers that ranks do not share."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import distributed as dist

from mettle.train.ranks.batch_norm import SynchronizedBatchNorm


@contextmanager
def forward_on_rank(device: torch.device, *, sync_batchnorm: bool = True) -> Iterator[None]:
    """For the forward pass of a network on this rank's rows; every rank has to make the same one.

    Args:
        device: of the network.
        sync_batchnorm: whether batch norms take the statistics of all ranks' rows.
    """
    with ExitStack() as stack:
        stack.enter_context(draw_per_rank(device))
        if sync_batchnorm:
            stack.enter_context(SynchronizedBatchNorm())
        yield


@contextmanager
def draw_per_rank(device: torch.device) -> Iterator[None]:
    """Inside, the generators of torch draw other numbers on every rank (dropout); afterwards they are alike again.

    They must be alike at the beginning. Where nothing is drawn they stay as they are.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    seeds = [_hash_state(generator) for generator in generators]
    before = [generator.get_state() for generator in generators]
    for generator, seed in zip(generators, seeds, strict=True):
        generator.manual_seed((seed + 1 + dist.get_rank()) % 2**63)
    began = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, seed, state, start in zip(generators, seeds, before, began, strict=True):
            if torch.equal(generator.get_state(), start):
                generator.set_state(state)
            else:
                generator.manual_seed(seed)


def _hash_state(generator: torch.Generator) -> int:
    content = generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
