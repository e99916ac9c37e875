"""Checks of the arguments of a `FederatedModule`, whose errors name the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import check_is
from lightning_spectral.plugin.host import is_host
from lightning_spectral.sharding import ShardingStrategy


def check_module(module: Any) -> None:
    """Raise ``TypeError`` unless ``module`` is a LightningModule of the package ``lightning``, not yet federated."""
    if isinstance(module, pl.LightningModule):
        if is_host(module):
            raise TypeError(
                f"`module` must be your own LightningModule, got a {type(module).__name__}, which is federated "
                "already; train it as it is, or wrap its `.module` anew."
            )
        return
    if isinstance(getattr(module, "_orig_mod", None), pl.LightningModule):
        raise TypeError(
            "`module` is a compiled LightningModule, and clients need its hooks; compile what does the work inside it: "
            "self.net = torch.compile(net)."
        )
    if isinstance(module, type):
        raise TypeError(
            f"`module` must be a LightningModule, got the class {module.__name__}; write {module.__name__}(...)."
        )
    remedy = "wrap it in one, with `training_step` and `configure_optimizers`"
    if any(base.__module__.startswith("pytorch_lightning") for base in type(module).__mro__):
        remedy = (
            "it derives from `pytorch_lightning`, whose classes are other types than those of `lightning.pytorch`; "
            "change the import to `import lightning.pytorch as pl`"
        )
    raise TypeError(f"`module` must be a lightning.pytorch.LightningModule, got {type(module).__name__}: {remedy}.")


def check_settings(server_optimizer: Any, local_hooks: Any) -> None:
    """Check the arguments of a `FederatedModule` that are not numbers and can be checked on their own."""
    _check_server_optimizer(server_optimizer)
    if isinstance(local_hooks, LocalHook):
        raise TypeError(f"`local_hooks` must be a list, got one hook; write local_hooks=[{local_hooks!r}].")
    check_is("local_hooks", local_hooks, Sequence)
    for hook in local_hooks:
        if isinstance(hook, pl.Callback):
            name = type(hook).__name__
            raise TypeError(
                f"`local_hooks` act on devices, and {name} is a callback; write Trainer(callbacks=[{name}(...)])."
            )
        check_is("local_hooks", hook, LocalHook)


def _check_server_optimizer(server_optimizer: Any) -> None:
    if isinstance(server_optimizer, type) and not issubclass(server_optimizer, Optimizer):
        name = server_optimizer.__name__
        got = f"the class {name}; write {name}(...)"
    elif isinstance(server_optimizer, Optimizer):
        name = type(server_optimizer).__name__
        got = f"{name} of some parameters; write lambda parameters: torch.optim.{name}(parameters, lr=...)"
    elif server_optimizer is None or callable(server_optimizer):
        return
    else:
        got = (
            f"{server_optimizer!r}; leave it out for plain averaging, or write FedAvgM(lr=1.0, momentum=0.9), or "
            "lambda parameters: torch.optim.SGD(parameters, lr=1.0)"
        )
    raise TypeError(f"`server_optimizer` must be a function from parameters to an optimizer, got {got}.")


def check_algorithm(algorithm: Any) -> None:
    """Raise ``TypeError`` unless the argument is an algorithm; a strategy is only a part of one."""
    is_class = isinstance(algorithm, type) and issubclass(algorithm, ShardingStrategy)
    if is_class or isinstance(algorithm, ShardingStrategy):
        strategy = f"{algorithm.__name__}(...)" if is_class else repr(algorithm)
        raise TypeError(
            f"`algorithm` must be an instance of Algorithm, got the strategy {strategy}; write "
            f"SpectralSharding(strategy={strategy})."
        )
    check_is("algorithm", algorithm, Algorithm)


def check_suits(algorithm: Algorithm, module: pl.LightningModule) -> None:
    """Raise ``ValueError`` if an algorithm cannot train a module, with a hint if its layers are not there yet."""
    try:
        algorithm.check(module)
    except ValueError as error:
        if next(module.parameters(), None) is not None:
            raise
        name = type(module).__name__
        raise ValueError(
            f"{name} has no parameters yet, and {type(algorithm).__name__} needs to see them when {name} is wrapped; "
            "make its layers in `__init__`, rather than in `setup`."
        ) from error
