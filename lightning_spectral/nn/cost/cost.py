"""What a model costs a client, with one forward pass counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_spectral.nn.layers.recurrent import sequence_values
from lightning_spectral.nn.layers.terms import SingularTerms
from lightning_spectral.nn.plan.trace import Example, as_input, example_of, run_example
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.exchange import returned_tensors, travelling_tensors
from lightning_spectral.protocol.kept_state import trying
from lightning_spectral.protocol.records import num_bytes

MEMORY = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")  # counted only with an optimizer
Storages = dict[int, torch.UntypedStorage]


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
        weight_bytes: Bytes of the parameters and buffers of its model; this and the following are 0 if no step of an
            optimizer was counted.
        gradient_bytes: Bytes of a gradient of every trained parameter.
        optimizer_bytes: Bytes of the optimizer's state after its first step.
        activation_bytes: The most bytes that a local step holds at once besides all of these: the batch, activations,
            their gradients, temporary values of the algorithm and of the optimizer.
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
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0

    @property
    def download_bytes(self) -> int:
        """Bytes of everything that a client is sent, which it keeps until it answers."""
        return self.downlink_bytes + self.frozen_bytes

    @property
    def memory_bytes(self) -> int:
        """The most bytes that a client needs while it trains; 0 if no step was counted."""
        if not self.weight_bytes:
            return 0
        step = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        return step + self.download_bytes + self.held_bytes

    @property
    def round_bytes(self) -> int:
        """Bytes sent in a round, down and up, without those sent only once."""
        return self.downlink_bytes + self.uplink_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def with_memory(self, other: Cost) -> Cost:
        """This cost with another's figures of a local step."""
        return replace(self, **{name: getattr(other, name) for name in MEMORY})

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
    return Cost(parameters) + count_pass(module, example)


def whole_cost(module: nn.Module, example: Example, buffers: BufferRules | None = None) -> Cost:
    """The cost of a module as it is, trained and sent whole; one pass is counted."""
    frozen = num_bytes({name: p for name, p in module.named_parameters() if not p.requires_grad})
    with trying(module):
        held = held_cost(module, example)
    return held + Cost(
        downlink_bytes=num_bytes(travelling_tensors(module)) - frozen,
        uplink_bytes=num_bytes(returned_tensors(module, (), buffers)),
        frozen_bytes=frozen,
    )


def count_pass(module: nn.Module, example_input: Example) -> Cost:
    """Run one forward pass of a module with gradients, in the modes that its layers are in, and count.

    Memory that several saved tensors share counts once, and in full even if only a view of it was saved. Values of any
    type count: a flag of a dropout mask is one, and so is each byte of the workspace that a fused LSTM saves. Pass a
    copy if a forward pass changes the module's buffers.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> counted = count_pass(net, torch.zeros(10, 8))
        >>> counted.macs, counted.kept_values
        (1920, 160)
    """
    example_input = as_input(module, example_input)
    kept = _Kept([*module.parameters(), *module.buffers(), *_inputs(example_input)])
    counter = FlopCounterMode(display=False, custom_mapping=dict(_UNKNOWN_TO_TORCH))
    counter.mod_tracker = _WholePass()  # type: ignore[assignment]
    record = _Record(counter)
    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                stack.enter_context(layer.register_forward_pre_hook(record.enter))
                stack.enter_context(layer.register_forward_hook(record.leave, with_kwargs=True))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor))
        stack.enter_context(record.counter)
        run_example(module, example_input)
    return Cost(macs=record.macs, kept_values=kept.num_values, kept_bytes=kept.num_bytes)


def _inputs(example_input: Example) -> Iterator[Any]:
    """The tensors of an example, including those of packed sequences, which torch treats as leaves."""
    for leaf in tree_leaves(example_input):
        yield from leaf if isinstance(leaf, PackedSequence) else (leaf,)


class _WholePass:
    """In place of torch's tracker, which counts by module and fails within custom autograd functions (Reformer)."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Kept:
    """The distinct storages of saved tensors; holding them keeps their memory from being reused during the pass."""

    def __init__(self, others: Iterable[Any]) -> None:
        self._others = _storages(others)
        self._saved: Storages = {}
        self.num_values = self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        for address, storage in _storages([tensor]).items():
            if address not in self._others and address not in self._saved:
                self._saved[address] = storage
                self.num_bytes += storage.nbytes()
                self.num_values += storage.nbytes() // tensor.element_size()
        return tensor


class _Record:
    """Multiplications so far, with hooks around recurrent layers, whose kernels torch's counter only partly knows."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self._entered: list[int] = []
        self._unknown = 0

    @property
    def macs(self) -> int:
        return int(self.counter.get_total_flops()) // 2 + self._unknown

    def enter(self, *_: Any) -> None:
        self._entered.append(self.macs)

    def leave(self, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        num_positions = sequence_values(*args, **kwargs).shape[:-1].numel()
        self._unknown += self._entered.pop() + recurrent_macs(layer, num_positions) - self.macs


def recurrent_macs(layer: nn.RNNBase, num_positions: int) -> int:
    """Multiplications of a recurrent layer: each weight is used once at every position; terms are multiplied out first.

    Example:
        >>> recurrent_macs(nn.LSTM(4, 6), num_positions=15)  # 4 gates of 6 rows, 4 + 6 columns
        3600
    """
    terms = [module for module in layer.modules() if isinstance(module, SingularTerms)]
    sizes = [module.u.shape[0] * module.v.shape[1] for module in terms]
    dense = sum(weight.numel() for weight in layer._flat_weights if weight is not None and weight.dim() == 2)
    rebuilt = sum(module.num_terms * size for module, size in zip(terms, sizes, strict=True))
    return int(num_positions * (dense + sum(sizes)) + rebuilt)


def _storages(tensors: Iterable[Any]) -> Storages:
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor))
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


_UNKNOWN_TO_TORCH = MappingProxyType({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops})
