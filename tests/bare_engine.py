"""An engine without Lightning, whose rounds a test plays itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Known
from lightning_spectral.algorithms.filter import Fit, Plan, instructions
from lightning_spectral.filters.own import chain
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine


def bare_engine(
    algorithm: ls.Algorithm,
    server: nn.Module,
    clients: ClientDirectory,
    make_executor: Callable[[Engine], Executor],
    filters: Sequence[ls.Filter] = (),
    active: float = math.nan,
    processes: Processes | None = None,
    **options: Any,
) -> Engine:
    """An engine of an algorithm without state, and of filters; further options are those of `Engine`."""
    half, processes = (
        algorithm.bind(server, known=Known(Plan(server, algorithm, filters).rules())),
        processes or Processes(),
    )
    told, store = instructions(half, filters), ClientStore()
    ends = chain(filters, Fit(half, processes, lambda: clients.sizes, active=active), store, told.keeps_state)
    return Engine(
        algorithm, half, told, ends, clients, make_executor, seed=0, processes=processes, store=store, **options
    )
