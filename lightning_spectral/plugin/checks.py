"""Mistakes named before the first round, and settings that a federation cannot honour; errors name the remedy."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_spectral.algorithms.base import Moment, ServerHalf, promises_of
from lightning_spectral.algorithms.filter import check_chain
from lightning_spectral.arguments import first_of
from lightning_spectral.client.local_hooks import LogitsHook, batch_norms
from lightning_spectral.client.local_loop import metrics_of
from lightning_spectral.errors import warn
from lightning_spectral.participation import Sampler, UniformParticipation
from lightning_spectral.plugin.data import FederatedDataModule, ServerData
from lightning_spectral.plugin.processes import ClientParallelStrategy
from lightning_spectral.plugin.user_hooks import is_overridden
from lightning_spectral.protocol.buffer_rules import check_averaged_parameters
from lightning_spectral.protocol.per_client import Assigned

LEAST_OVERLAP = 0.2  # of the shares of labels that two groups of clients hold
LOOKED_AT = 1000  # clients whose labels are counted
# By name, because not all versions of Lightning have all of them.
REFUSED_CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "BaseFinetuning": "which parameters are trained is fixed when a fit begins; freeze some in your module, fit, "
        "unfreeze them and fit again",
        "BatchSizeFinder": "it tries sizes on whole rounds; set FederatedDataModule(batch_size=...)",
        "GradientAccumulationScheduler": "a round adds up its clients' updates already; choose "
        "FederatedDataModule(batch_size=...) for local steps",
        "LearningRateFinder": "it moves the server's learning rate, round by round; set that of clients in "
        "`configure_optimizers`",
        "ModelPruning": "clients train copies of the weights that it replaces; prune after the fit",
        "SpikeDetection": "it reads the loss of each batch, and a batch is a whole round; monitor `fl/loss`: "
        "EarlyStopping('fl/loss', check_finite=True)",
        "StochasticWeightAveraging": "it follows the steps of one optimizer; use WeightAveraging, which averages the "
        "server's weights round by round",
    }
)


def check_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse, by name, callbacks of Lightning that would act differently on a federation, or break it."""
    for callback in callbacks:
        for base in type(callback).__mro__:
            if (why := REFUSED_CALLBACKS.get(base.__name__)) and base.__module__.startswith("lightning.pytorch"):
                raise ValueError(f"{type(callback).__name__} cannot act on a federation: {why}.")


def check_trainer(trainer: pl.Trainer) -> None:
    """Check that a Trainer counts rounds, spreads clients over its processes, and replaces no optimizer."""
    if not isinstance(trainer.max_epochs, int):  # which Lightning asserts without a message
        raise TypeError(
            f"`max_epochs` must be an int, the number of rounds, or -1 for no limit, got {trainer.max_epochs!r}."
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientParallelStrategy):
        raise ValueError(
            f"Clients are spread over processes by Trainer(strategy='client_parallel'), got {trainer.world_size} "
            f"processes of {type(trainer.strategy).__name__}; use that, or devices=1."
        )
    interval: Any = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int | float) and interval != 1:
        raise ValueError(
            f"`val_check_interval={interval}` would validate within a round, which is one batch of the Trainer's; "
            "leave it out, and validate after every n-th round with `check_val_every_n_epoch=n`."
        )
    if "configure_optimizers" in vars(trainer.lightning_module):  # of LightningCLI
        raise ValueError(
            "`optimizer` of LightningCLI would replace the server's optimizer and the clients'; leave it out. Clients "
            "get theirs from `configure_optimizers` of your own module, and the server's is `model.server_optimizer`."
        )


def check_member(owner: Any, data: ServerData, participation: UniformParticipation | Sampler | None) -> None:
    """Check that a model's module, its settings and the clients of its data suit each other, before the first round."""
    module: pl.LightningModule = owner.module
    check_averaged_parameters(module)
    if complex_valued := [name for name, parameter in module.named_parameters() if parameter.is_complex()]:
        raise ValueError(
            f"Complex parameters are not averaged: {', '.join(complex_valued)}; hold real and imaginary parts apart "
            "(torch.view_as_real)."
        )
    if data.has_val and not is_overridden(module, "validation_step"):
        raise ValueError(f"{type(module).__name__} needs `validation_step` for `val`; define it, or leave `val` out.")
    warn_of_labels(module, data)
    remark_on_few_labels(owner, data)
    if isinstance(participation, UniformParticipation):
        participation.check(data.num_clients)
        check_chain(owner.plan(participation=UniformParticipation(participation.size(data.num_clients))))
        if owner.faults.ends_run("no_data"):
            data.check_clients()
    for hook in owner.local_hooks:
        hook.check(module, lambda: data.labels_in_examples)
    where = owner.trainer.strategy.root_device.type if isinstance(data, FederatedDataModule) else type(data).__name__
    if owner.capture and where != "cuda":
        raise ValueError(f"`capture=True` replays kernels of a CUDA device of this process, got {where}; leave it out.")
    clock = owner.conditions.clock
    if is_absolute(participation) and clock is not None and clock.keep_first is not None:
        raise ValueError(
            f"VirtualClock(keep_first={clock.keep_first}) leaves out clients that a sampler drew, and "
            "every step would be too short; leave it out, or give the sampler normalize=True."
        )


def remark_on_few_labels(owner: Any, data: ServerData) -> None:
    """Say what helps where most clients have one or two of many labels, unless a hook acts on logits already."""
    labels = data.stored_labels
    if labels is None or not isinstance(data, FederatedDataModule):
        return
    module, num_classes = owner.module, 1 + int(labels.max())
    heads = [name for name, part in module.named_modules() if getattr(part, "out_features", None) == num_classes]
    if not heads or num_classes < 4 or any(isinstance(hook, LogitsHook) for hook in owner.local_hooks):
        return
    num_clients = min(data.num_clients, LOOKED_AT)
    owners = torch.arange(num_clients).repeat_interleave(data.partition.sizes[:num_clients])
    pairs = torch.unique(torch.stack([owners, labels[data.partition.indices[: len(owners)]]]), dim=1)
    num_labels = pairs[0, pairs[1] >= 0].bincount()
    have_any, have_few = int((num_labels > 0).sum()), int(((num_labels == 1) | (num_labels == 2)).sum())
    if 2 * have_few < have_any:
        return
    rounds = max(1, owner.shared.runtime.trainer.max_epochs or 1)
    hooks = [f"CalibratedLogits({heads[-1]!r}, rounds={rounds})", "GradientClip(1.0)"]
    hooks += [f"FixedBatchNorm({max(1, rounds // 2)})"] * bool(batch_norms(module))
    rank_zero_info(
        f"{have_few} of {have_any} clients have one or two of the {num_classes} labels. If training is unstable, "
        f"try local_hooks=[{', '.join(hooks)}]."
    )


def warn_of_other_labels(half: ServerHalf, data: ServerData, capacities: Assigned[float]) -> None:
    """Warn if the largest clients hold other labels than the smallest, which a sub-model then learns badly.

    What only large clients train learns nothing of the labels of small ones, and pulls the whole model to its own.
    """
    labels, small, large = data.stored_labels, min(capacities.values), max(capacities.values)
    if small == large or labels is None or not isinstance(data, FederatedDataModule):
        return
    owners = torch.arange(data.num_clients).repeat_interleave(data.partition.sizes)
    of_examples, dealt = capacities.indices[owners], labels[data.partition.indices].clamp(min=0)
    shares = []
    for capacity in (small, large):
        counts = dealt[of_examples == capacities.values.index(capacity)].bincount(minlength=int(labels.max()) + 1)
        shares.append(counts / counts.sum().clamp(min=1))
    overlap = float(torch.minimum(*shares).sum())
    if overlap < LEAST_OVERLAP and all(bool(share.any()) for share in shares) and not half.advice(Moment.OTHER_LABELS):
        warn(
            f"Clients that can hold {small:g} of the model have other labels than those that can hold {large:g} (the "
            f"overlap is {overlap:.0%}): what only the latter train pulls the model to their labels, and it may forget "
            "those of the former. Use one keep ratio for all."
        )


def warn_of_labels(module: pl.LightningModule, data: ServerData) -> None:
    """Warn of labels beyond the classes of a module's own metrics or of its ``hparams.num_classes``.

    Modules say nothing else about their labels, and losses refuse wrong ones only once a client has such an example.
    """
    metrics = metrics_of(module)
    counts = [getattr(metric, "num_classes", None) for metric in metrics] + [module.hparams.get("num_classes")]
    num_classes = max((count for count in counts if isinstance(count, int)), default=0)
    if num_classes < 2 or (labels := data.stored_labels) is None:
        return
    ignored = [index for metric in metrics if isinstance(index := getattr(metric, "ignore_index", None), int)]
    is_wrong = ((labels < 0) | (labels >= num_classes)) & ~torch.isin(labels, labels.new_tensor(ignored))
    if wrong := torch.unique(labels[is_wrong]).tolist():
        shown = first_of([str(label) for label in wrong], 3)
        warn(
            f"{int(is_wrong.sum())} of {len(labels)} training examples have labels ({shown}) "
            f"that are not among the {num_classes} classes of {type(module).__name__}, 0 to {num_classes - 1}. Unless "
            "`training_step` renumbers or ignores them, relabel them in the data set, leave these examples out, or "
            "raise the number of classes."
        )


def is_absolute(participation: UniformParticipation | Sampler | None) -> bool:
    """Whether coefficients are weights as they are, which only samplers ask for."""
    return isinstance(participation, Sampler) and not participation.normalize


def warn_of_recompilations(module: pl.LightningModule, num_capacities: int) -> None:
    """Warn if torch would stop compiling a part of a module, which it does silently after so many forms.

    Clients train the module in as many forms as there are capacities; validation of the server is one more.
    """
    parts = dict(module.named_modules())
    compiled = [n for n, part in parts.items() if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None]
    if not compiled:
        return
    config: Any = importlib.import_module("torch._dynamo.config")
    limit = getattr(config, "recompile_limit", None) or config.cache_size_limit
    if num_capacities + 1 > limit:
        warn(
            f"{', '.join(map(repr, compiled[:3]))}: torch compiles a part anew for each of {num_capacities} capacities "
            f"and for validation, but no more than {limit} times; later ones run uncompiled. Raise "
            f"`torch._dynamo.config.recompile_limit` to {num_capacities + 1}, or give clients fewer keep ratios."
        )


def check_sampler(sampler: Sampler, owner: Any) -> None:
    """Check that the figures a sampler is based on are available from a model: from its algorithm, or from its step."""
    asks, kind, promises = type(sampler).__name__, type(owner.algorithm).__name__, promises_of(owner.algorithm)
    of_model = f" of {owner.name!r}" if owner.name else ""
    if "update" in sampler.figure and not promises.new_values:
        raise ValueError(
            f"{asks} needs update norms, and {kind}{of_model} does not promise that clients send back new values of "
            "the tensors that they were sent; use LossVarianceReduced, or say `promises = Promises(new_values=True)` "
            "in the class."
        )
    if sampler.figure == "stale update" and not promises.expected_updates:
        raise ValueError(
            f"{asks} compares updates with earlier ones, which {kind}{of_model} does not keep; use "
            "algorithm=StaleUpdates(), or UpdateVarianceReduced."
        )
    if sampler.figure == "loss" and sampler.measure != "last" and not owner.module.automatic_optimization:
        step = f"{type(owner.module).__name__}.training_step" + (f" ({owner.name!r})" if owner.name else "")
        raise ValueError(
            f"{asks} measures losses with `training_step`, but {step} uses manual optimisation and would train; use "
            'measure="last", or UpdateVarianceReduced.'
        )
