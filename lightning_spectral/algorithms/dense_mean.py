"""Running means and sums over whole tensors, for any algorithm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_spectral.protocol.averaged_parameters import averaged_parameters
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.sums import MeanChange


def dense_mean(server: nn.Module, before: Mapping[str, Tensor], cohort: Cohort) -> MeanChange:
    """The running mean of the changes of some of the server's tensors.

    Buffers hold averages of data, such as BatchNorm's variances. Their weights are always divided by their sum: an
    unbiased sampler's weights may sum to 2 in a round, and a variance that moved twice as far could become negative.
    The same holds for parameters that the user's code updates, such as those of a teacher.
    """
    averages = averaged_parameters(server).union(name for name, _ in server.named_buffers())
    return MeanChange(before, cohort.total, cohort.absolute, always_divided=averages & before.keys())


def sum_of(like: Mapping[str, Tensor], cohort: Cohort) -> MeanChange:
    """A running sum, or mean, of float64 tensors that are given for each client, not of changes of the server's.

    Only names, shapes and device of ``like`` count. The weights are the cohort's coefficients.
    """
    zeros = {name: tensor.new_zeros((), dtype=torch.float64).expand(tensor.shape) for name, tensor in like.items()}
    return MeanChange(zeros, cohort.total, cohort.absolute)
