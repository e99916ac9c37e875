"""The running mean of tensors that travel whole, for any algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_spectral.protocol.averaged_parameters import averaged_parameters
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.sums import MeanChange


def dense_mean(server: nn.Module, before: Mapping[str, Tensor], cohort: Cohort) -> MeanChange:
    """The running mean of the changes of some of the server's tensors.

    Buffers hold averages of data, such as BatchNorm's variances. Their weights are always divided by their sum: an
    unbiased sampler's weights may sum to 2 in a round, and a variance that moved twice as far could become negative.
    The same holds for parameters that the user's code updates, such as those of a teacher.

    Args:
        server: The server's module.
        before: Some of its parameters and buffers, by name.
        cohort: The clients that take part.
    """
    averages = averaged_parameters(server).union(name for name, _ in server.named_buffers())
    return MeanChange(before, cohort.total, cohort.absolute, always_divided=averages & before.keys())
