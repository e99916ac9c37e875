"""The contract of a filter, as a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_spectral.algorithms import Algorithm, FedAvg
from lightning_spectral.algorithms.filter import Filter, Plan, check_chain
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.exchange import copy_module
from lightning_spectral.protocol.records import Failure, Upload
from lightning_spectral.testing.algorithms import check_choice, check_runs
from lightning_spectral.testing.trial import Case, Trial


def check_filter(
    own: Filter,
    module: nn.Module,
    batch: Any,
    *,
    algorithm: Algorithm | None = None,
    beside: Sequence[Filter] = (),
    lr: float = 0.05,
    rests: bool = True,
) -> None:
    """Check that a filter satisfies the contract of :class:`~lightning_spectral.filters.Filter`.

    Five clients train copies of the module on the batch, one to three steps each, in a few rounds without a Trainer.
    This checks that

    - wrong arguments are refused by name, and a copy equals the choice;
    - uploads have the names, types and shapes that `DeviceEnd.sized` says, and the ledger and the cost of a turn count
      the bytes that are sent;
    - an upload that is left out passes through `DeviceEnd.leave` without tensors;
    - what makes no difference to an algorithm makes none here (`check_algorithm`): a run that is resumed, the order of
      clients, their processes, a device elsewhere, a client that is lost, a round in which nobody trains.

    Args:
        own: The filter; what it does must follow from its arguments, without secrets of the system's generator.
        module: A module with a ``training_step``; it is not changed.
        batch: A batch for it, on the CPU.
        algorithm: The algorithm whose updates it gets; ``None`` for `FedAvg`.
        beside: Other filters that come after it.
        lr: Learning rate of the clients, who use plain SGD.
        rests: Whether the server's weights must stay as they are if nobody trains: false for a filter that adds noise,
            or sends later what it owes.

    Raises:
        AssertionError: If a rule is broken; it names the rule, the case and the values.
        ClientError: If the filter or the module fails; it names the round, the client and the stage.

    Example:
        >>> import torch
        >>> from lightning_spectral.filters import TopK
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).square().mean()
        >>> check_filter(TopK(0.2), Line(5, 4), torch.ones(4, 5), rests=False)
    """
    check_is("filter", own, Filter)
    check_choice(own)
    case = Case(FedAvg() if algorithm is None else algorithm, module, batch, lr, (), (own, *beside))
    check_chain(Plan(copy_module(module), case.algorithm, case.filters))
    _check_turn(case)
    check_runs(case, rests)


def _check_turn(case: Case) -> None:
    trial = Trial(case)
    device, opened = trial.executor.device, trial.engine.open_round(0, trial.units)
    opened.agree(trial.units)
    download = opened.send(trial.units[0])[0]
    for reason, failure in (("error", Failure("local training", "a broken sensor")), ("no_update", None)):
        upload = Upload(download.unit, {}, left_out=reason, failure=failure)  # type: ignore[arg-type]
        where = f"{case}: an upload that is left out ({reason})"
        try:
            left, _ = device.instructions.leave(trial.server, download, upload)
        except Exception as error:
            raise AssertionError(f"{where} does not pass `leave`: {type(error).__name__}: {error}") from error
        assert (left.left_out, len(left.tensors)) == (reason, 0), (
            f"{where} left the device as {left.left_out} with {len(left.tensors)} tensors; return it as it is."
        )
    with device.forms.client(download.capacity) as client:
        device.instructions.load(client, download)
        said = {n: (t.dtype, t.shape) for n, t in device.instructions.sized(client, download).tensors.items()}
    found = {n: (t.dtype, t.shape) for n, t in device.run(download).tensors.items()}
    trial.engine.abandon_round()
    assert found == said, (
        f"{case}: an upload has {found}, and `sized` says {said}; a server over a network would refuse it."
    )
