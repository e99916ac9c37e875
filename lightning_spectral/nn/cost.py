"""What a model costs a client: one forward pass that is counted, tensors that are alive, and tables of costs."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_spectral.arguments import Number
from lightning_spectral.errors import from_extra
from lightning_spectral.nn.layers.terms import SingularTerms
from lightning_spectral.nn.trace import Example, example_of, run_example
from lightning_spectral.tables import Block, Tabular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")  # counted only with an optimizer


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


@dataclass(frozen=True)
class CostsBesides:
    """What an algorithm costs a client that cannot be counted on the client's model.

    Attributes:
        cost: What a turn costs besides.
        sent_again: Names of the frozen tensors that change, and so are sent, in every round.
        rounds_are_alike: Whether the same client costs the same in every round; otherwise two rounds are counted.
    """

    cost: Cost = Cost()
    sent_again: Collection[str] = ()
    rounds_are_alike: bool = False


def required_example(module: nn.Module, example_input: Example) -> Example:
    """The given example, or otherwise the module's own; ``ValueError`` if there is none."""
    example = example_of(module) if example_input is None else example_input
    if example is None:
        raise ValueError(
            "The cost of a module is counted in a forward pass: give `example_input`, a batch like those that clients "
            "train on, or set the module's `example_input_array`."
        )
    return example


BYTES = Number(above=0, finite=False, hint="a plain number is in bytes; with a unit, write '512 MB' or '0.5 GiB'")
UNITS: Mapping[str, int] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}


def show_count(number: float) -> str:
    """A number with a decimal unit: 11_173_962 is ``'11.2 M'``."""
    return _with_unit(number, 1000, ("", " k", " M", " G", " T", " P"))


def show_bytes(number: float) -> str:
    """A number of bytes with a binary unit: 5 * 2**20 is ``'5.00 MiB'``."""
    return _with_unit(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def as_bytes(argument: str, value: Any) -> Any:
    """A positive number of bytes, given as such or with a unit, of powers of 1000 (MB) or of 1024 (MiB).

    Units may be written in lower case.

    Example:
        >>> as_bytes("memory", "512 MB"), as_bytes("memory", "0.5GiB"), as_bytes("memory", 1024)
        (512000000, 536870912, 1024)
        >>> as_bytes("memory", "512")
        Traceback (most recent call last):
        ValueError: `memory` must have a unit, B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '512 MB'; got '512'.
    """
    if not isinstance(value, str):
        return BYTES(argument, value)
    found = re.fullmatch(r"\s*(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]+)\s*", value, re.IGNORECASE)
    unit = None if found is None else {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(f"`{argument}` must have a unit, {', '.join(UNITS)}, such as '512 MB'; got {value!r}.")
    if (number := float(found[1])) <= 0:
        raise ValueError(f"`{argument}` must be positive, got {value!r}.")
    return int(number * unit)


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{units[power]}"


Column: TypeAlias = tuple[str, Callable[[float], str]]  # its title, and how its numbers are shown
COLUMNS: Mapping[str, Column] = {
    "parameters": ("parameters", show_count),
    "macs": ("MACs", show_count),
    "step_macs": ("MACs per step", show_count),
    "kept_values": ("kept values", show_count),
    "kept_bytes": ("kept bytes", show_bytes),
    "held_bytes": ("held besides", show_bytes),
    "downlink_bytes": ("down", show_bytes),
    "uplink_bytes": ("up", show_bytes),
    "frozen_bytes": ("down once", show_bytes),
}
# In a table of its own, if a step of an optimizer was counted; all but the first add up to the first.
MEMORY_COLUMNS: Mapping[str, Column] = {
    "memory_bytes": ("memory", show_bytes),
    "weight_bytes": ("weights", show_bytes),
    "gradient_bytes": ("gradients", show_bytes),
    "optimizer_bytes": ("optimizer", show_bytes),
    "activation_bytes": ("activations", show_bytes),
    "download_bytes": ("download", show_bytes),
    "held_bytes": ("held besides", show_bytes),
}
RARE = ("step_macs", "held_bytes", "frozen_bytes")  # columns that are shown only where something is in them
# Titles, and line styles that remain distinguishable where lines overlap.
LINES: Mapping[str, tuple[str, str]] = {
    "kept_bytes": ("kept bytes", "-s"),
    "parameters": ("parameters", "-o"),
    "macs": ("MACs", "--x"),
    "round_bytes": ("down and up", ":+"),
}


@dataclass(frozen=True)
class CostTable(Tabular):
    """The cost of an algorithm to a client, for the whole model and at each capacity; ``print`` shows it as a table.

    Where an optimizer was given, a second table shows the memory of training and its parts.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps capacities to costs, in the order given.
        capacity: What clients differ by: a keep ratio, a rank, a compression.
    """

    full: Cost
    at: Mapping[float, Cost]
    capacity: str = "keep ratio"

    def _blocks(self) -> list[Block]:
        """The cells of the costs and, if a step was counted, of the memory of training, with their titles."""
        costs = (self.full, *self.at.values())
        tables: list[Block] = []
        for columns in [COLUMNS, MEMORY_COLUMNS] if self.full.memory_bytes else [COLUMNS]:
            hidden = {name for name in RARE if not any(getattr(cost, name) for cost in costs)}
            shown = {name: column for name, column in columns.items() if name not in hidden}
            rows: list[Sequence[str]] = [(self.capacity, *(title for title, _ in shown.values()))]
            rows.append(("full", *(show(getattr(self.full, name)) for name, (_, show) in shown.items())))
            for capacity, cost in self.at.items():
                cells = []
                for name, (_, show) in shown.items():
                    share, cell = self.share(name, cost), show(getattr(cost, name))
                    percent = f"{share:.0%}" if share >= 0.01 or share == 0.0 else f"{100 * share:.1g}%"
                    cells.append(f"{cell} ({percent})" if getattr(self.full, name) else cell)
                rows.append((f"{capacity:g}", *cells))
            tables.append(rows)
        return tables

    def share(self, name: str, cost: Cost) -> float:
        """One field of a cost as a share of the whole model's."""
        return float(getattr(cost, name) / max(1, getattr(self.full, name)))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Map ``"full"`` and the capacities to the fields of their costs."""
        rows = {}
        for name, cost in {"full": self.full, **{f"{capacity:g}": cost for capacity, cost in self.at.items()}}.items():
            if self.full.memory_bytes:
                rows[name] = {**asdict(cost), "memory_bytes": cost.memory_bytes}
            else:
                rows[name] = {field: number for field, number in asdict(cost).items() if field not in MEMORY}
        return rows

    def log(self, logger: Any) -> None:
        """Log every number as a metric such as ``cost/0.2/macs``; a `WandbLogger` gets the table too."""
        rows = self.as_dict()
        logger.log_metrics({f"cost/{row}/{name}": n for row, costs in rows.items() for name, n in costs.items()})
        if hasattr(logger, "log_table"):  # of Lightning's own loggers, only wandb's
            data = [[row, *costs.values()] for row, costs in rows.items()]
            logger.log_table("cost", columns=[self.capacity, *rows["full"]], data=data)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot each cost as a share of the whole model's; needs matplotlib (the ``examples`` extra).

        Args:
            path: The file to write; ``None`` for none.
        """
        with from_extra("examples"):
            from lightning_spectral.report.printed import legend_above, printed

        with printed(path, 6.0, 3.5) as figure:
            axes = figure.add_subplot(xlabel=self.capacity, ylabel="share of the whole model's")
            axes.axhline(1.0, color="grey", linewidth=0.8)
            capacities = sorted(self.at)
            for name, (title, look) in LINES.items():
                axes.plot(capacities, [self.share(name, self.at[each]) for each in capacities], look, label=title)
            axes.set_ylim(bottom=0.0)
            legend_above(figure, len(LINES))
        return figure


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
    leaves = (leaf if isinstance(leaf, PackedSequence) else (leaf,) for leaf in tree_leaves(example_input))
    others = storages([*module.parameters(), *module.buffers(), *chain.from_iterable(leaves)])
    # with the bytes of a value; held, so that their memory is not used again during the pass
    saved: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        for address, storage in storages([tensor]).items():
            if address not in others:
                saved.setdefault(address, (storage, tensor.itemsize))
        return tensor

    counter = FlopCounterMode(display=False, custom_mapping=dict(_UNKNOWN_TO_TORCH))
    counter.mod_tracker = _WholePass()  # type: ignore[assignment]
    entered: list[int] = []  # operations before each recurrent layer, whose kernels torch's counter only partly knows
    unknown = 0

    def macs() -> int:
        return int(counter.get_total_flops()) // 2 + unknown

    def leave(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal unknown
        given = args[0] if args else kwargs["input"]
        num_positions = (given.data if isinstance(given, PackedSequence) else given).shape[:-1].numel()
        unknown += entered.pop() + recurrent_macs(layer, num_positions) - macs()

    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                stack.enter_context(layer.register_forward_pre_hook(lambda *_: entered.append(macs())))
                stack.enter_context(layer.register_forward_hook(leave, with_kwargs=True))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(counter)
        run_example(module, example_input)
    kept = [(storage.nbytes(), itemsize) for storage, itemsize in saved.values()]
    kept_values, kept_bytes = sum(size // itemsize for size, itemsize in kept), sum(size for size, _ in kept)
    return Cost(macs=macs(), kept_values=kept_values, kept_bytes=kept_bytes)


class _WholePass(nullcontext[None]):
    """In place of torch's tracker, which counts by module and fails within custom autograd functions (Reformer)."""

    parents = frozenset({"Global"})


def recurrent_macs(layer: nn.RNNBase, num_positions: int) -> int:
    """Multiplications of a recurrent layer: each weight once at every position; terms are multiplied out first."""
    terms = [module for module in layer.modules() if isinstance(module, SingularTerms)]
    sizes = [module.u.shape[0] * module.v.shape[1] for module in terms]
    dense = sum(weight.numel() for weight in layer._flat_weights if weight is not None and weight.dim() == 2)
    rebuilt = sum(module.num_terms * size for module, size in zip(terms, sizes, strict=True))
    return int(num_positions * (dense + sum(sizes)) + rebuilt)


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of all dense tensors in a tree, by its identity."""
    leaves = [tree] if isinstance(tree, Tensor) else tree_leaves(tree)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


_UNKNOWN_TO_TORCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: int(
        2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    )
}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that operations make inside the block, for as long as something holds them.

    Tensors that share memory count once. What an operation allocates and frees itself is not seen, nor is what existed
    before. Works on any device.

    Attributes:
        events: The size of each tensor when it was made, bytes of an entry first, and when it was freed, minus those.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.ones(4)
        ...     y = x[:2] + 1  # the view is no memory of its own
        ...     del x
        >>> live.events
        [(4, 4), (4, 2), (-4, 4)]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, ...]] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # with the place of its event

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and hasattr(args[0], "fake_device"):  # asked thousands of times
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        # data in Python are no operation, and an optimizer mostly changes what there is
        if func is torch.ops.aten.lift_fresh.default or (args and result is args[0]):
            return result
        made = {key: storage for key, storage in storages(result).items() if key not in self._alive}
        given = storages((args, kwargs)) if made else {}
        leaves = tree_leaves(result) if made else []
        sizes = {key: (leaf.itemsize, *leaf.shape) for leaf in leaves for key in storages(leaf)}
        for key, storage in made.items():
            if key not in given:
                size = sizes[key] if math.prod(sizes[key]) == storage.nbytes() else (1, storage.nbytes())
                # torch keeps the object for as long as the memory
                freed = partial(self._free, key, (-size[0], *size[1:]))
                self._alive[key] = weakref.ref(storage, freed), len(self.events)
                self.events.append(size)
        return result

    def starting_with(self, tree: Any) -> list[tuple[int, ...]]:
        """The events, as if those of the tensors in a tree, which are alive, had come first."""
        places = {self._alive[key][1]: None for key in storages(tree) if key in self._alive}
        others = [event for place, event in enumerate(self.events) if place not in places]
        return [*map(self.events.__getitem__, places), *others]

    def _free(self, key: int, event: tuple[int, ...], _: object) -> None:
        del self._alive[key]
        self.events.append(event)
