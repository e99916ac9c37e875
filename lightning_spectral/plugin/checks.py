"""Checks before the first round, whose errors name the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.arguments import OneOf, Whole
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.participation import Sampler, UniformParticipation
from lightning_spectral.participation.uniform import CLIENTS_PER_ROUND
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.data import FederatedDataModule, check_no_client_is_empty
from lightning_spectral.plugin.host import is_host
from lightning_spectral.plugin.trainer_checks import check_rounds
from lightning_spectral.plugin.user_hooks import is_overridden
from lightning_spectral.protocol.copying import check_copyable
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.processes import Processes
from lightning_spectral.sharding import ShardingStrategy
from lightning_spectral.simulation import Conditions

DataT = TypeVar("DataT", bound=pl.LightningDataModule)

# By stage, which is an enumeration of Lightning's: the Trainer's method, and the module's
EVALUATIONS = {"validate": ("validate", "validation_step"), "test": ("test", "test_step")}


def check_module(module: Any) -> None:
    """Raise ``TypeError`` unless ``module`` is a LightningModule of the ``lightning`` package, not federated yet."""
    if isinstance(module, pl.LightningModule):
        if is_host(module):
            raise TypeError(
                f"`module` must be your own LightningModule, got a {type(module).__name__}, which is federated "
                "already; train it as it is, or wrap its `.module` anew."
            )
        return
    if isinstance(getattr(module, "_orig_mod", None), pl.LightningModule):
        raise TypeError(
            "`module` is a compiled LightningModule, and clients train copies with other layers; compile what does the "
            "work inside it: self.net = torch.compile(net)."
        )
    kind = type(module)
    other_package = any(base.__module__.startswith("pytorch_lightning") for base in kind.__mro__)
    remedy = (
        "it derives from `pytorch_lightning`, whose classes are other types than those of `lightning.pytorch`; "
        "change the import to `import lightning.pytorch as pl`"
        if other_package
        else "wrap it in one, with `training_step` and `configure_optimizers`"
    )
    raise TypeError(f"`module` must be a lightning.pytorch.LightningModule, got {kind.__name__}: {remedy}.")


def check_settings(client_engine: Any, server_optimizer: Any, local_hooks: Any) -> None:
    """Check the arguments of a `FederatedModule` that are no numbers, and need nothing else to be checked.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If the engine is unknown.
    """
    OneOf(("loop", "trainer"))("client_engine", client_engine)
    _check_server_optimizer(server_optimizer)
    if isinstance(local_hooks, LocalHook):
        raise TypeError(f"`local_hooks` must be a list, got one hook; write local_hooks=[{local_hooks!r}].")
    check_is("local_hooks", local_hooks, Sequence)
    for hook in local_hooks:
        check_is("local_hooks", hook, LocalHook)


def plain_numbers(local_epochs: Any, clients_per_round: Any, seed: Any) -> tuple[int, int | None, int]:
    """The numbers among the arguments, checked.

    Raises:
        TypeError: If one is no whole number.
        ValueError: If one is out of range.
    """
    return (
        Whole(at_least=0)("local_epochs", local_epochs),
        replace(CLIENTS_PER_ROUND, optional=True)("clients_per_round", clients_per_round),
        Whole()("seed", seed),
    )


def _check_server_optimizer(server_optimizer: Any) -> None:
    """A class of torch's is a function from parameters to an optimizer; one of ours makes such functions."""
    if isinstance(server_optimizer, type) and not issubclass(server_optimizer, Optimizer):
        name = server_optimizer.__name__
        raise TypeError(
            "`server_optimizer` must be a function from parameters to an optimizer, got the class "
            f"{name}; write {name}(...)."
        )
    if isinstance(server_optimizer, Optimizer):
        name = type(server_optimizer).__name__
        raise TypeError(
            f"`server_optimizer` must be a function from parameters to an optimizer, got {name} of some parameters; "
            f"write lambda parameters: torch.optim.{name}(parameters, lr=...)."
        )
    if server_optimizer is not None and not callable(server_optimizer):
        raise TypeError(
            f"`server_optimizer` must be a function from parameters to an optimizer, got {server_optimizer!r}; "
            "leave it out for plain averaging, or write FedAvgM(lr=1.0, momentum=0.9), or "
            "lambda parameters: torch.optim.SGD(parameters, lr=1.0)."
        )


def check_algorithm(algorithm: Any) -> None:
    """Raise ``TypeError`` unless it is an algorithm; a strategy is only a part of one."""
    is_class = isinstance(algorithm, type) and issubclass(algorithm, ShardingStrategy)
    if is_class or isinstance(algorithm, ShardingStrategy):
        strategy = f"{algorithm.__name__}(...)" if is_class else repr(algorithm)
        raise TypeError(
            f"`algorithm` must be an instance of Algorithm, got the strategy {strategy}; write "
            f"SpectralSharding(strategy={strategy})."
        )
    check_is("algorithm", algorithm, Algorithm)


def warn_of_compiled_in_place(module: pl.LightningModule) -> None:
    """Warn about parts that were compiled by ``part.compile()``, which copies lose."""
    lost = [name or "itself" for name, part in module.named_modules() if getattr(part, "_compiled_call_impl", None)]
    if lost:
        warnings.warn(
            f"{type(module).__name__}: clients train copies, which lose `compile()` in place "
            f"({', '.join(lost)}) and run uncompiled; write self.net = torch.compile(net) instead.",
            SpectralWarning,
            stacklevel=3,
        )


def check_stage(stage: str, module: pl.LightningModule) -> None:
    """Raise ``ValueError`` if the user's module cannot do what the Trainer is asked to do."""
    if stage not in EVALUATIONS:
        return
    asked, step = EVALUATIONS[stage]
    if not is_overridden(module, step):
        raise ValueError(f"`Trainer.{asked}` needs `{type(module).__name__}.{step}`, which is not there; define it.")


def check_clipping(trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` if the Trainer is asked to clip gradients: it would clip only the server's."""
    if trainer.state.fn == "fit" and trainer.gradient_clip_val:
        raise ValueError(
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` would not reach the gradients of clients; give "
            f"FederatedModule(..., local_hooks=[GradientClip({trainer.gradient_clip_val})]) instead, which clips by "
            "norm in every local step."
        )


def check_datamodule(trainer: pl.Trainer, kind: type[DataT]) -> DataT:
    """A Trainer's data module.

    Raises:
        TypeError: If the data does not come from one of the right kind.
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(datamodule, kind):
        return datamodule
    calls = {
        "FederatedDataModule": ("FederatedModule", "FederatedDataModule(train, partitioner)"),
        "MultiModelDataModule": ("MultiModelModule", "MultiModelDataModule({name: FederatedDataModule(...), ...})"),
    }
    owner, call = calls[kind.__name__]
    raise TypeError(f"{owner} needs clients: call trainer.fit(model, {call}), got {_named(datamodule)}.")


def _named(datamodule: pl.LightningDataModule | None) -> str:
    return "dataloaders, or nothing" if datamodule is None else type(datamodule).__name__


def check_own_optimizers(federation: pl.LightningModule) -> None:
    """Raise ``ValueError`` if LightningCLI has put an optimizer in place of the server's and the clients'."""
    if "configure_optimizers" in vars(federation):
        raise ValueError(
            "`optimizer` of LightningCLI would replace the server's optimizer and the clients'; leave it out. Clients "
            "get theirs from `configure_optimizers` of your own module, and the server's is `model.server_optimizer`."
        )


def check_trainer(trainer: pl.Trainer) -> None:
    """Check what a Trainer is asked to do in a fit.

    Raises:
        TypeError: If the number of rounds is no ``int``.
        ValueError: If a callback cannot be honoured, or there are several processes of another strategy than
            ``"client_parallel"``.
    """
    check_rounds(trainer)
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientParallelStrategy):
        raise ValueError(
            f"Clients are spread over processes by Trainer(strategy='client_parallel'), got {trainer.world_size} "
            f"processes of {type(trainer.strategy).__name__}; use that, or devices=1."
        )


def check_member(
    module: pl.LightningModule,
    data: FederatedDataModule,
    participation: UniformParticipation | Sampler | None,
    faults: Faults,
) -> None:
    """Check that a module can be trained on the clients of its data.

    Raises:
        ValueError: If it has lazy layers, cannot be copied, or has complex parameters, or validation data without a
            ``validation_step``, or if a client has no examples and `Faults` says `Raise`; a sampler never draws such a
            client.
    """
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ValueError(f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first.")
    check_copyable(module)
    complex_valued = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
    if complex_valued:
        raise ValueError(
            f"Complex parameters are not averaged: {', '.join(complex_valued)}; hold real and imaginary parts apart "
            "(torch.view_as_real)."
        )
    if data.has_val and not is_overridden(module, "validation_step"):
        raise ValueError(f"There is validation data, but {type(module).__name__} has no `validation_step`.")
    if isinstance(participation, UniformParticipation):
        participation.check(data.num_clients)
        if faults.ends_run("no_data"):
            check_no_client_is_empty(data.partition)


def check_sampler(sampler: Sampler, algorithms: Mapping[str, Algorithm[Any]]) -> None:
    """Check that what a sampler goes by is there.

    Args:
        sampler: The sampler.
        algorithms: Those of the models, by name.

    Raises:
        ValueError: If it goes by norms of updates, and an algorithm's uploads are no updates of tensors; or by what is
            new in them, and an algorithm expects nothing.
    """
    for name, algorithm in algorithms.items():
        of_model = f" of {name!r}" if name else ""
        if "update" in sampler.figure and not algorithm.updates_have_norms:
            raise ValueError(
                f"{type(sampler).__name__} goes by norms of updates, and {type(algorithm).__name__}{of_model} uploads "
                "none; use LossVarianceReduced."
            )
        expects = type(algorithm).expected_update is not Algorithm.expected_update
        if sampler.figure == "stale update" and not expects:
            raise ValueError(
                f"{type(sampler).__name__} goes by how far updates are from the last ones, which "
                f"{type(algorithm).__name__}{of_model} does not keep; use algorithm=StaleUpdates(), or "
                "UpdateVarianceReduced."
            )


def check_measurable(sampler: Sampler, modules: Mapping[str, pl.LightningModule]) -> None:
    """Raise ``ValueError`` if a sampler measures losses by a ``training_step`` that trains."""
    if sampler.figure != "loss" or getattr(sampler, "measure", "last") == "last":
        return
    for name, module in modules.items():
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(sampler).__name__} measures losses with `training_step`, and that of "
                f"{type(module).__name__}{f' ({name!r})' if name else ''} trains, by manual optimisation; use "
                'measure="last", or UpdateVarianceReduced.'
            )


def check_limit(limit: int | float, trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` if a cohort that a sampler draws is to be cut: its coefficients are those of all drawn.

    Args:
        limit: Lightning's ``limit_train_batches``.
        trainer: The Trainer; with ``fast_dev_run`` the result does not matter.
    """
    if not trainer.fast_dev_run and limit != 0 and not (isinstance(limit, float) and limit == 1.0):  # type: ignore[attr-defined]
        raise ValueError(
            f"limit_train_batches={limit} would leave out clients that a sampler drew, and bias the average; lower "
            "its `active` instead."
        )


def check_over_selection(conditions: Conditions, *, absolute: bool) -> None:
    """Raise ``ValueError`` if those who come late are left out of a sum whose coefficients are those of all drawn."""
    if absolute and conditions.clock is not None and conditions.clock.keep_first is not None:
        raise ValueError(
            f"VirtualClock(keep_first={conditions.clock.keep_first}) leaves out clients that a sampler drew, and every "
            "step would be too short; leave it out, or give the sampler normalize=True."
        )


def check_same_everywhere(processes: Processes, configuration: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, in every process, unless all of them have the same configuration."""
    gathered = processes.gather(dict(configuration))
    different = [
        f"{name}: {value!r} in process 0, {other[name]!r} in process {rank}"
        for rank, other in enumerate(gathered)
        for name, value in gathered[0].items()
        if other[name] != value
    ]
    if different:
        raise ValueError(
            "The processes are set up for different runs; give them the same arguments, data and seeds:\n  - "
            + "\n  - ".join(different)
        )
