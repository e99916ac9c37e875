"""What federated LoRA trains of a module, and what it refuses; errors name the rule, the value and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.nn.adapters import AdaptedLayer, factors_of, matches
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.exchange import returned_tensors

PLAIN = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


def check_trained(server: nn.Module, patterns: Sequence[str], factors: Collection[str]) -> None:
    """Raise ``ValueError`` if a pattern of `train` matches nothing that can be trained whole, as factors cannot."""
    names = [name for name, p in server.named_parameters() if p.requires_grad and name not in factors]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(
                f"`train`: {pattern!r} matches no trainable parameter of {type(server).__name__}; give patterns of "
                "names of modules or parameters, such as 'head' or '*.bias'."
            )


def check_merges(aggregation: AdapterAggregation, merge_every: int | None) -> None:
    """Raise ``ValueError`` if adapters are to be merged by an aggregation that keeps none between rounds."""
    if merge_every is not None and "base" in aggregation.steps(is_mixed=True):
        raise ValueError(
            f"{type(aggregation).__name__} adds to the base in every round and keeps no adapters between rounds; leave "
            f"`merge_every` out, got {merge_every}."
        )


def check_peft_adapters(
    server: nn.Module,
    layers: Sequence[AdaptedLayer],
    aggregation: AdapterAggregation,
    alpha: float | None,
    merge_every: int | None,
) -> None:
    """Raise ``ValueError`` if the adapters that PEFT has made could not keep their form."""
    if alpha is not None:
        raise ValueError(
            f"`alpha` must be None where PEFT has made the adapters, which it scales itself, got {alpha}; give PEFT's "
            "`LoraConfig` a `lora_alpha`."
        )
    if changes_base(aggregation, merge_every):
        what = f"`merge_every={merge_every}`" if merge_every else type(aggregation).__name__
        raise ValueError(
            f"{what} changes the base, which is no part of an adapter of PEFT; leave it out, or take the module "
            "without PEFT."
        )
    for name in (layer.parts[part] for layer in layers for part in trained_parts(aggregation)):
        if not server.get_parameter(name).requires_grad:
            raise ValueError(
                f"{name} is frozen, and {type(aggregation).__name__} trains it. Load the adapter with "
                "`is_trainable=True`; if A alone is frozen, take FrozenA."
            )


def check_holds(template: Optimizer, server: nn.Module, wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the user's optimizer holds all parameters among the given names."""
    held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
    parameters = dict(server.named_parameters())
    if missing := [name for name in wanted if name in parameters and id(parameters[name]) not in held]:
        raise ValueError(
            "LoRA gives an adapter the options of its weight in your optimizer, which lacks "
            f"{', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}. Give your {type(template).__name__} all parameters of the "
            "module; what is frozen stays frozen."
        )


def check_steps(optimizer: Optimizer, aggregation: AdapterAggregation, is_mixed: bool, merge_every: int | None) -> None:
    """Raise ``ValueError`` for any server optimizer but plain averaging if its steps do not set the new factors."""
    plain = isinstance(optimizer, SGD) and all(
        group[name] == value for group in optimizer.param_groups for name, value in PLAIN.items()
    )
    if merge_every and not plain:
        raise ValueError(
            f"With `merge_every={merge_every}` adapters restart, and the state of a server optimizer such as "
            f"{type(optimizer).__name__} would refer to factors that no longer exist; leave `server_optimizer` or "
            "`merge_every` out."
        )
    if not aggregation.steps(is_mixed) and not plain:
        raise ValueError(
            f"{type(aggregation).__name__} factorises its product anew in each round, and the state of a server "
            f"optimizer such as {type(optimizer).__name__} would refer to factors that no longer exist; leave "
            "`server_optimizer` out, or take PaddedFactors, FrozenA, AlternatingFactors or StackedProducts."
        )


def trained_parts(aggregation: AdapterAggregation) -> tuple[str, ...]:
    """The factors that clients train in some round."""
    return tuple(sorted({part for round_idx in (0, 1) for part in aggregation.trained(round_idx)}))


def changes_base(aggregation: AdapterAggregation, merge_every: int | None) -> bool:
    """Whether a fit changes the base, so that its result is not just an adapter on the weights it started from."""
    return merge_every is not None or "base" in aggregation.steps(is_mixed=True)


def trained_whole(
    server: nn.Module, layers: Sequence[AdaptedLayer], train: Sequence[str], buffers: BufferRules
) -> dict[str, Tensor]:
    """What clients send back beside the factors: parameters by patterns of their names, and buffers with a rule.

    If PEFT has made the layers' factors, all that it has not frozen is trained, too.
    """
    by_peft = any(layer.brings_factors for layer in layers)
    factors, returned = factors_of(layers), returned_tensors(server, buffers=buffers)
    chosen = {name for name, _ in server.named_parameters() if by_peft or matches(name, train)} | buffers.returned
    return {name: tensor for name, tensor in returned.items() if name in chosen - factors}
