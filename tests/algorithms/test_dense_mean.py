"""Coefficients of an unbiased sampler move parameters as they are; buffers are always averaged."""

import torch
from torch import nn

from lightning_spectral.algorithms.fed_avg import dense_mean
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import averaged_tensors
from lightning_spectral.protocol.records import WorkUnit


def finished(absolute: bool) -> dict[str, torch.Tensor]:
    """Two clients with coefficients 1.5 and 0.5, whose sum is 2: one moves everything by 1, the other by 3."""
    server = nn.BatchNorm1d(2)
    units = (WorkUnit(0, coefficient=1.5), WorkUnit(1, coefficient=0.5))
    before = averaged_tensors(server)
    mean = dense_mean(server, before, Cohort(0, 0, {1.0: units}, absolute=absolute))
    for unit, step in zip(units, (1.0, 3.0), strict=True):
        mean.add({name: tensor + step for name, tensor in before.items()}, unit.coefficient)
    return dict(mean.finish())


def test_absolute_coefficients_move_parameters_but_not_buffers_further_than_clients_went():
    changes = finished(absolute=True)

    assert changes["weight"].tolist() == [3.0, 3.0]  # 1.5 * 1 + 0.5 * 3
    assert changes["running_var"].tolist() == [1.5, 1.5]  # half of that


def test_shares_average_both():
    assert {tuple(change.tolist()) for change in finished(absolute=False).values()} == {(1.5, 1.5)}
