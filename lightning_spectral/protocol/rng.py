"""Derived random generators: every draw belongs to a (seed, purpose, ids) and to nothing else."""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["derived_generator", "derived_seed", "isolated_rng"]


def derived_seed(seed: int, purpose: str, *ids: int | str) -> int:
    """Seed of one draw, the same on every platform and in every process.

    Args:
        seed: Seed of the run, any integer.
        purpose: What is drawn, e.g. ``"participation"``.
        *ids: Whose draw it is, e.g. round, client and layer name, in a fixed order. ``3`` and ``"3"`` differ.

    Returns:
        An integer in ``[0, 2**63)``, from BLAKE2b of the arguments.

    Raises:
        TypeError: If an id is neither an integer nor a string.

    Example:
        >>> derived_seed(0, "terms", 7, "layer1.conv")
        2704491631824330820
        >>> derived_seed(0, "terms", 1, 23) == derived_seed(0, "terms", 12, 3)
        False
    """
    encoded = b"".join(_encode(part) for part in (seed, purpose, *ids))
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") >> 1


def derived_generator(seed: int, purpose: str, *ids: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one draw, seeded by :func:`derived_seed`.

    Args:
        seed: Seed of the run.
        purpose: What is drawn.
        *ids: Whose draw it is.
        device: Where the generator lives. CPU and CUDA generators of one seed draw different numbers, so draw
            on the CPU whatever must not depend on the machine.

    Returns:
        The generator; calling again gives an independent copy that draws the same numbers.

    Note:
        torch's CPU engine reads only the low 32 bits of a seed. Of n generators some pair therefore shares
        its stream with probability about ``n**2 / 2**33``: harmless for two unrelated draws, but do not cut
        one sample into a generator per element.

    Example:
        >>> first, again = (derived_generator(0, "participation", 3) for _ in range(2))
        >>> torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=again))
        True
    """
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose, *ids))


@contextmanager
def isolated_rng(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Seed the global generators for a block and restore them afterwards, also when the block raises.

    For code that is not ours: a user's dropout and augmentations draw from the global generators of Python,
    numpy (legacy) and torch (CPU and the given CUDA devices).

    Args:
        seed: Seed of the block, any integer.
        devices: Devices whose global generator the block may use. CPU is always included; of the others only
            CUDA devices are isolated.

    Yields:
        Nothing.

    Example:
        >>> with isolated_rng(7):
        ...     inside = torch.rand(2)
        >>> with isolated_rng(7):
        ...     print(torch.equal(torch.rand(2), inside))
        True
    """
    generators = [torch.default_generator, *_cuda_generators(devices)]
    saved = random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators]
    try:
        random.seed(derived_seed(seed, "python"))
        np.random.seed(derived_seed(seed, "numpy") % 2**32)  # the legacy API takes 32 bits
        for generator in generators:  # one seed for all: what a client draws must not depend on its GPU's index
            # not torch.manual_seed: that reseeds every accelerator of the process, also those not saved here
            generator.manual_seed(derived_seed(seed, "torch"))
        yield
    finally:
        python_state, numpy_state, torch_states = saved
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(generators, torch_states, strict=True):
            generator.set_state(state)


def _encode(part: int | str) -> bytes:
    """Type, length, content: no two different tuples share an encoding."""
    kind, text = ("s", part) if isinstance(part, str) else ("i", str(operator.index(part)))
    content = text.encode()
    return f"{kind}{len(content)}:".encode() + content


def _cuda_generators(devices: Sequence[torch.device]) -> list[torch.Generator]:
    """Global generators of the distinct CUDA devices in ``devices``."""
    indices = {device.index for device in map(torch.device, devices) if device.type == "cuda"}
    if not indices:
        return []  # do not wake CUDA up
    torch.cuda.init()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_device()
    return [torch.cuda.default_generators[i] for i in sorted({current if i is None else i for i in indices})]
