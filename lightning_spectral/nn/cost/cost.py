"""What a model costs a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from lightning_spectral.nn.cost.counted_pass import count_pass
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.exchange import averaged_tensors, copy_module, travelling_tensors
from lightning_spectral.protocol.records import num_bytes


@dataclass(frozen=True)
class Cost:
    """The cost of a model, or of a part of one, to a client.

    Attributes:
        parameters: Number of values in its parameters, counting tied ones once, without frozen multipliers.
        macs: Multiply-accumulate operations of one forward pass.
        kept_values: Values that one forward pass keeps for backward, beyond parameters, buffers and inputs.
        kept_bytes: The same in bytes.
        step_macs: Multiply-accumulate operations of a local step that do not depend on the batch.
        held_bytes: Bytes that a client holds in memory besides the model.
        downlink_bytes: Bytes sent to the client in a round.
        uplink_bytes: Bytes it sends back.
        frozen_bytes: Bytes of frozen parameters, which are sent to it once.
    """

    parameters: int = 0
    macs: int = 0
    kept_values: int = 0
    kept_bytes: int = 0
    step_macs: int = 0
    held_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def round_bytes(self) -> int:
        """Bytes sent in a round, down and up, without those sent only once."""
        return self.downlink_bytes + self.uplink_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def or_more(self, other: Cost) -> Cost:
        """The larger of two costs, number by number."""
        return Cost(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def required_example(module: nn.Module, example_input: Example) -> Example:
    """The given example, or otherwise the module's own; ``ValueError`` if there is none."""
    example = example_of(module) if example_input is None else example_input
    if example is None:
        raise ValueError(
            "The cost of a module is counted in a forward pass: give `example_input`, a batch like those that clients "
            "train on, or set the module's `example_input_array`."
        )
    return example


def held_cost(module: nn.Module, example: Example) -> Cost:
    """Parameters, and one forward pass that runs the module as it is; ``None`` counts no pass."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if example is None:
        return Cost(parameters)
    counted = count_pass(module, example)
    return Cost(parameters, counted.macs, counted.kept_values, counted.kept_bytes)


def whole_cost(module: nn.Module, example: Example, keep_buffers: Sequence[str] = ()) -> Cost:
    """The cost of a module as it is, trained and sent whole; one pass of a copy is counted."""
    frozen = num_bytes({name: p for name, p in module.named_parameters() if not p.requires_grad})
    return held_cost(copy_module(module), example) + Cost(
        downlink_bytes=num_bytes(travelling_tensors(module)) - frozen,
        uplink_bytes=num_bytes(averaged_tensors(module, (), keep_buffers)),
        frozen_bytes=frozen,
    )
