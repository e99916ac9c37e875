"""Derived random generators: every draw depends on a seed, a purpose and ids alone; and numbers that are secret."""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


def derived_seed(seed: int, purpose: str, *ids: int | str) -> int:
    """Derive the seed of one draw, which is the same on every platform and in every process.

    Args:
        seed: Seed of the run, any integer.
        purpose: What is drawn, e.g. ``"participation"``.
        *ids: Identify the draw, e.g. round, client and layer name, in a fixed order. ``3`` and ``"3"`` differ.

    Returns:
        An integer in ``[0, 2**63)``, from BLAKE2b of the arguments.

    Example:
        >>> derived_seed(0, "terms", 7, "layer1.conv")
        2704491631824330820
        >>> derived_seed(0, "terms", 1, 23) == derived_seed(0, "terms", 12, 3)
        False
    """
    encoded = "".join(map(_encode, (seed, purpose, *ids)))
    return int.from_bytes(hashlib.blake2b(encoded.encode(), digest_size=8).digest(), "big") >> 1


def derived_generator(seed: int, purpose: str, *ids: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Create a generator for one draw, seeded by :func:`derived_seed`.

    Args:
        seed: Seed of the run.
        purpose: What is drawn.
        *ids: Identify the draw.
        device: Device of the generator. CPU and CUDA generators with the same seed draw different numbers, so use the
            CPU for draws that must not depend on the machine.

    Returns:
        The generator; calling again gives an independent copy that draws the same numbers.

    Note:
        torch's CPU engine reads only the low 32 bits of a seed. Among n generators, two therefore share their
        stream with probability about ``n**2 / 2**33``: harmless for two unrelated draws, but do not draw one
        sample with a generator per element.

    Example:
        >>> first, again = (derived_generator(0, "participation", 3) for _ in range(2))
        >>> torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=again))
        True
    """
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose, *ids))


class GlobalGenerators:
    """The global generators of a process: Python's, numpy's legacy one, and torch's on the CPU and on CUDA devices.

    They serve code outside this package, such as a user's dropout and augmentations. Saving and restoring takes longer
    than seeding, so a round saves them once and seeds them for every client.

    Args:
        devices: Devices whose global generators to include. The CPU's is always included; of the others, only CUDA's.

    Example:
        >>> generators = GlobalGenerators()
        >>> generators.save()
        >>> generators.seed(7)
        >>> inside = torch.rand(2)
        >>> generators.seed(7)
        >>> torch.equal(torch.rand(2), inside)
        True
        >>> generators.restore()
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._of_torch = [torch.default_generator]
        if indices := {device.index for device in map(torch.device, devices) if device.type == "cuda"}:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # not without such a device
            current = torch.cuda.current_device()
            of_cuda = sorted({current if index is None else index for index in indices})
            self._of_torch += [torch.cuda.default_generators[index] for index in of_cuda]
        self._saved: tuple[Any, Any, list[torch.Tensor]] | None = None

    def save(self) -> None:
        """Save the state of every generator."""
        of_torch = [generator.get_state() for generator in self._of_torch]
        self._saved = random.getstate(), np.random.get_state(), of_torch

    def seed(self, seed: int) -> None:
        """Seed all generators from one integer."""
        random.seed(derived_seed(seed, "python"))
        np.random.seed(derived_seed(seed, "numpy") % 2**32)  # the legacy API takes 32 bits
        of_torch = derived_seed(seed, "torch")
        for generator in self._of_torch:  # one seed for all: what a client draws must not depend on its GPU's index
            # not torch.manual_seed: that reseeds every accelerator of the process, even those not saved here
            generator.manual_seed(of_torch)

    def restore(self) -> None:
        """Restore the saved states, if there are any; a second call changes nothing."""
        if self._saved is None:
            return
        python_state, numpy_state, torch_states = self._saved
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(self._of_torch, torch_states, strict=True):
            generator.set_state(state)
        self._saved = None


@contextmanager
def isolated_rng(seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Seed the global generators for a block and restore them afterwards, even if the block raises.

    Args:
        seed: Seed of the block, any integer.
        devices: As for `GlobalGenerators`.

    Example:
        >>> with isolated_rng(7):
        ...     inside = torch.rand(2)
        >>> with isolated_rng(7):
        ...     print(torch.equal(torch.rand(2), inside))
        True
    """
    generators = GlobalGenerators(devices)
    generators.save()
    try:
        generators.seed(seed)
        yield
    finally:
        generators.restore()


def _encode(part: int | str) -> str:
    """Type, length in bytes, content: no two different tuples share an encoding."""
    kind, text = ("s", part) if isinstance(part, str) else ("i", str(operator.index(part)))
    return f"{kind}{len(text.encode())}:{text}"


@dataclass(eq=False)
class SecretNormals:
    """Numbers from a standard normal distribution that only the holder of a key can know.

    torch's and NumPy's generators can be predicted from some of their numbers, and torch's on the CPU has 2^32 seeds.
    Here uniform numbers are the bytes of SHAKE256, which become normal by the method of Box and Muller.

    Args:
        key: The key, of 32 bytes to be secret.

    Example:
        >>> SecretNormals(b"no secret")(3)
        tensor([-1.7143,  0.7563,  0.5244], dtype=torch.float64)
    """

    key: bytes = field(repr=False)
    _calls: int = field(default=0, init=False)

    def uniform(self, size: int) -> Tensor:
        """The next numbers as they are before they become normal: uniform in (0, 1), shape ``(size,)``, float64."""
        call = self._calls.to_bytes(8, "big")
        self._calls += 1
        words = np.frombuffer(hashlib.shake_256(call + self.key).digest(8 * size), dtype="<u8")
        return torch.from_numpy(((words >> 11) + 0.5) * 2.0**-53)

    def __call__(self, size: int) -> Tensor:
        """The next numbers, shape ``(size,)``, float64, on the CPU."""
        pairs = (size + 1) // 2
        radius, angle = self.uniform(2 * pairs).numpy().reshape(2, pairs)
        radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
        return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])
