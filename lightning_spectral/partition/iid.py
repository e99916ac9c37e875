"""Independent, identically distributed clients of equal size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.partition.base import Partitioner, equal_shares
from lightning_spectral.partition.partition import Partition

__all__ = ["IIDPartitioner"]


@dataclass(frozen=True)
class IIDPartitioner(Partitioner):
    """Equal shares of a random permutation: sizes differ by at most one and every example is used.

    Labels are ignored. The clients that get an extra example are drawn at random.

    Args:
        num_clients: Number of clients, at least 1.

    Example:
        >>> partition = IIDPartitioner(num_clients=4)(10, None, torch.Generator().manual_seed(0))
        >>> sorted(partition.sizes.tolist())
        [2, 2, 3, 3]
    """

    num_clients: int

    def __post_init__(self) -> None:
        check_fields(self, num_clients=Whole(at_least=1))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        """Deal a random permutation of the examples; ``labels`` is ignored."""
        order, sizes = equal_shares(num_examples, self.num_clients, generator)
        client_of_example = torch.empty(num_examples, dtype=torch.int64)
        client_of_example[torch.randperm(num_examples, generator=generator)] = order.repeat_interleave(sizes)
        return Partition.from_assignment(client_of_example, self.num_clients)
