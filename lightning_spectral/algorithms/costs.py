"""What clients of any algorithm cost at each capacity, and the largest capacity for a budget.

An algorithm is bound to the module, which is restored. A round is opened, and what a client is sent, holds and sends
back is counted, as is one forward pass, and one step if there is an optimizer. Only sizes matter, so all of this
happens on fake tensors, unless the module's code needs values.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import cache, partial
from itertools import accumulate, pairwise, starmap, zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_spectral.algorithms.base import Algorithm, Known, ServerHalf
from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.algorithms.filter import Filter, Plan, check_chain, instructions
from lightning_spectral.arguments import Number, each
from lightning_spectral.client.device import Instructions, StepActions
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.kept_state import HOOKS, KeptState, hooks_of, package_of, trying
from lightning_spectral.client.user_optimizer import (
    LocalOptimizer,
    check_optimizer,
    foreign_parameters,
    options_of,
    untrained_parameters,
)
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.nn.cost import (
    Cost,
    CostTable,
    LiveBytes,
    as_bytes,
    count_pass,
    required_example,
    show_bytes,
    storages,
)
from lightning_spectral.nn.layers.terms import rebuilding_is_cheaper, sharded_layers
from lightning_spectral.nn.trace import Example, as_input, example_of, run_example
from lightning_spectral.protocol.buffer_rules import Rules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, WorkUnit, num_bytes

_log = logging.getLogger("lightning.pytorch.costs")  # as that of rounds: what it says is seen without being asked for
SECONDS = 10.0  # between lines that say how far a search is
CAPACITY = Number(above=0)
BUDGET = Number(at_least=0, finite=False)
T = TypeVar("T")
Budget: TypeAlias = float | Sequence[float]
MemoryBudget: TypeAlias = float | str | Sequence[float | str]
# The figure of a cost that each budget bounds. All of them grow with the capacity; memory does not always.
NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "budget_bytes": "round_bytes",
        "budget_downlink_bytes": "downlink_bytes",
        "budget_uplink_bytes": "uplink_bytes",
        "budget_macs": "macs",
        "budget_params": "parameters",
        "memory": "memory_bytes",
    }
)
OF_A_PASS = ("budget_macs", "memory")  # needs that are counted in a pass of the example


def cost_table(
    module: nn.Module,
    algorithm: Algorithm,
    capacities: Sequence[float],
    example_input: Example = None,
    *,
    optimizer: Optimizer | None = None,
    filters: Sequence[Filter] = (),
    buffers: Rules | None = None,
) -> CostTable:
    """The cost of each capacity of any algorithm to a client, before any training.

    Two rounds are opened on the module, which is restored. What the server sends, what the client holds and what it
    sends back are counted, as is one forward pass of the client's model. If the rounds differ, the larger cost counts.

    Activations and multiplications are those of ``example_input``, so give a batch like those that clients train on,
    and a module whose layers are in the mode in which they train. Kept values are those that autograd saves. What a
    kernel saves differs between devices, so count on the device used for training.

    On the CPU, no memory of the module's size is needed, unless its code depends on values. A module on the meta device
    counts as on the CPU.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options; its own capacities make no difference.
        capacities: Keep ratios in ``(0, 1]``, or what else the algorithm's clients differ by: ranks of `LoRA`,
            compressions of `Zampling`. Where every client trains the whole model, only 1.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for the module's ``example_input_array``.
        optimizer: The optimizer with which clients train, over the module's parameters. With it, the memory of a local
            step is counted too: one step is taken, and the optimizer's state is what it makes.
        filters: As for the federation; what they pack is counted packed.
        buffers: Likewise, what becomes of buffers.

    Raises:
        TypeError: If ``algorithm`` is not an algorithm.
        ValueError: If there is no example, the algorithm refuses a capacity or the module, clients cannot have such an
            optimizer, or the module is on the meta device and its code needs values.

    Note:
        Multiplications of normalisations, activations and other elementwise operations are not counted, as in
        `torch.utils.flop_counter`. Backward takes about twice as many as forward. Sub-models that draw a width for each
        step cost at most this much. With ``LoRA(merge_every=k)``, the adapted weights are sent again in one of k
        rounds.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> table = cost_table(mlp, SpectralSharding(), [0.1, 0.5], torch.zeros(32, 64))
        >>> print(table)
        keep ratio  parameters     MACs           kept values    kept bytes       down            up
        full        85.0 k         2.70 M         16.4 k         64.0 KiB         332 KiB         332 KiB
        0.1         32.8 k (39%)   1.03 M (38%)   23.9 k (146%)  93.2 KiB (146%)  128 KiB (39%)   128 KiB (39%)
        0.5         85.0 k (100%)  2.70 M (100%)  53.2 k (325%)  208 KiB (325%)   333 KiB (100%)  332 KiB (100%)
        >>> table.at[0.1].parameters
        32778
        >>> adam = torch.optim.Adam(mlp.parameters())
        >>> cost_table(mlp, SpectralSharding(), [0.1], torch.zeros(32, 64), optimizer=adam).at[0.1].memory_bytes
        796416
    """
    check_is("module", module, nn.Module)
    check_is("algorithm", algorithm, Algorithm)
    capacities = each("capacities", capacities, CAPACITY)
    example = required_example(module, example_input)
    counted = _Counted(module, algorithm, example, optimizer, filters, buffers)
    costs = counted.at(capacities, example)  # first, because it says what is wrong with the algorithm
    whole = _Counted(module, FedAvg(), example, optimizer, (), buffers)
    return CostTable(whole.at([1.0], example)[1.0], costs, counted.capacity)


def largest_that_fits(
    module: nn.Module,
    algorithm: Algorithm,
    example_input: Example = None,
    *,
    budget_bytes: Budget | None = None,
    budget_downlink_bytes: Budget | None = None,
    budget_uplink_bytes: Budget | None = None,
    budget_macs: Budget | None = None,
    budget_params: Budget | None = None,
    memory: MemoryBudget | None = None,
    optimizer: Optimizer | None = None,
    filters: Sequence[Filter] = (),
    buffers: Rules | None = None,
) -> float | list[float]:
    """The largest capacity of an algorithm whose cost fits a budget: a keep ratio, a rank, or the least compression.

    Give exactly one budget: a number, or a sequence with one number for each client. The algorithm takes the result,
    also a list, in place of its own keep ratio, rank or compression.

    Args:
        module: Any module; it is not changed.
        algorithm: As in `cost_table`.
        example_input: As in `cost_table`; needed for ``budget_macs`` and ``memory``, and where the algorithm plans with
            it.
        budget_bytes: Bytes that may be sent in a round, down and up together, without frozen parameters, which are sent
            only once.
        budget_downlink_bytes: Bytes that may be sent down.
        budget_uplink_bytes: Bytes that may be sent up.
        budget_macs: Multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that a client's model may have.
        memory: Bytes that a client may need while it trains on batches like ``example_input``: a number, or a string
            such as ``"512 MB"`` or ``"0.5 GiB"``.
        optimizer: As in `cost_table`; needed for ``memory``.
        filters: As in `cost_table`.
        buffers: As in `cost_table`.

    Raises:
        TypeError: If ``algorithm`` is not an algorithm, or several budgets are given where all clients share one
            capacity.
        ValueError: If not exactly one budget is given, nothing fits, or `cost_table` would raise it.

    Note:
        Memory need not grow with the capacity: where a layer rebuilds its weight, it keeps fewer activations. The
        answer for ``memory`` fits, and the next larger capacity does not; one much larger may.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import LoRA, SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))  # 178 parameters outside 16 x 16
        >>> largest_that_fits(mlp, SpectralSharding(), torch.zeros(1, 8), budget_params=[300, 400, 1000])
        [0.1875, 0.375, 1.0]
        >>> largest_that_fits(mlp, LoRA(train=["2"]), budget_bytes=[1_000, 1_800])  # a term has 24 + 32 values
        [1, 3]
    """
    check_is("module", module, nn.Module)
    check_is("algorithm", algorithm, Algorithm)
    budgets_given = (budget_bytes, budget_downlink_bytes, budget_uplink_bytes, budget_macs, budget_params, memory)
    given = {name: budget for name, budget in zip(NEEDS, budgets_given, strict=True) if budget is not None}
    if len(given) != 1:
        raise ValueError(f"Give exactly one of {', '.join(NEEDS)}; got {', '.join(given) or 'none'}.")
    ((name, budget),) = given.items()
    budget = budget.tolist() if isinstance(budget, Tensor | np.ndarray) else budget
    one = isinstance(budget, str) or not isinstance(budget, Sequence)
    as_given = cast("Sequence[Any]", [budget] if one else budget)
    budgets = [(as_bytes if name == "memory" else BUDGET)(name, entry) for entry in as_given]
    if name == "memory" and optimizer is None:
        raise ValueError(
            "`memory` depends on the optimizer of clients: give `optimizer`, such as "
            "torch.optim.Adam(module.parameters()), or what your `configure_optimizers()` returns."
        )
    example = required_example(module, example_input) if name in OF_A_PASS else example_input
    stepping = optimizer if name == "memory" else None
    counted = _Counted(module, algorithm, example, stepping, filters, buffers, passes=name != "memory")
    candidates = counted.algorithm.capacities.all_of(module)
    ends = counted.algorithm.capacities.choices([candidates[0], candidates[-1]])
    if not one and len({id(choice) for choice, _ in ends.values()}) > 1:
        raise TypeError(
            f"`{name}` must be one number, since all clients share one {counted.capacity}; give the smallest."
        )

    known: dict[int, int] = {}  # what is needed at an index, shared by all budgets
    steps: dict[int, Step] = {}
    counts = counted.algorithm.capacities.counts(module) if name == "memory" else None
    found, said = dict[int, float](), time.perf_counter()

    def needed(index: int) -> int:
        nonlocal said
        if counts is not None and (follows := between(steps, index, counts)) is not None:
            return follows
        if time.perf_counter() - said > SECONDS:
            said = time.perf_counter()
            _log.info("What fits `%s`: %d of %d budgets answered.", name, len(found), len(budgets))
        # clients of several capacities may be sent more than clients of one: multipliers, for example
        beside = [] if one else candidates[:2] if index == 0 else candidates[:1]
        passed = example if name in OF_A_PASS else None
        cost = counted.at([candidates[index]], passed, beside)[candidates[index]]
        if counts is not None:
            steps[index] = Step(cost, *counted.step)
        return int(getattr(cost, NEEDS[name]))

    def at_end(index: int) -> int:
        if index not in known:
            known[index] = needed(index)
        return known[index]

    def largest(budget: float, as_given: float | str) -> float:
        if at_end(len(candidates) - 1) <= budget:
            return candidates[-1]
        if (least := at_end(0)) > budget:
            shown = repr(as_given) if isinstance(as_given, str) else f"{as_given:,}"
            takes = show_bytes(least) if name == "memory" else f"{least:,}"
            smaller = "take a smaller batch, " if name == "memory" else ""
            less = "let the algorithm cut more layers" if len(candidates) > 1 else "take an algorithm that cuts layers"
            raise ValueError(
                f"No {counted.capacity} fits `{name}={shown}`: the smallest sub-model takes {takes}. Raise the budget, "
                f"{smaller}or {less}."
            )
        return candidates[last_within(budget, needed, known)]

    # the smallest and the largest budget first, then halfway between, so that most needs follow from others
    order = sorted(range(len(budgets)), key=budgets.__getitem__)
    for place in halving(len(budgets)):
        found[order[place]] = largest(budgets[order[place]], as_given[order[place]])
    return found[0] if one else [found[place] for place in range(len(budgets))]


def halving(number: int) -> list[int]:
    """The numbers below ``number``: the ends first, then always the middle of those that are there."""
    found, gaps = list(dict.fromkeys([0, number - 1]))[:number], [(0, number - 1)]
    for low, high in gaps:  # which grows
        if high - low > 1:
            found.append(middle := (low + high) // 2)
            gaps += [(low, middle), (middle, high)]
    return found


def last_within(budget: float, needed: Callable[[int], int], known: dict[int, int]) -> int:
    """An index whose need is within a budget, where that of the next one is not.

    The search begins between the nearest indices whose needs are ``known``, of which one is within the budget and a
    larger one is not, and adds those that it asks for. Needs grow about evenly in between, so every other guess assumes
    that they do, and the next one tries how far off it is.

    Example:
        >>> known = {0: 0, 10**6: 8 * 10**6}
        >>> last_within(7.5e6, lambda index: 8 * index, known), len(known)
        (937500, 4)
        >>> last_within(7.6e6, lambda index: 8 * index, known), len(known)  # begins where the first one ended
        (950000, 6)
    """
    fits, beyond = [pair for pair in pairwise(sorted(known)) if known[pair[0]] <= budget < known[pair[1]]][-1]
    guess, attempt = fits, 0
    while beyond - fits > 1:
        if attempt % 2:
            reach = min(4 ** (attempt // 2), (beyond - fits) // 2)
            guess = fits + reach if guess == fits else beyond - reach
        else:
            guess = fits + int((beyond - fits) * (budget - known[fits]) / (known[beyond] - known[fits]))
        guess = min(max(guess, fits + 1), beyond - 1)
        known[guess] = needed(guess)
        fits, beyond = (guess, beyond) if known[guess] <= budget else (fits, guess)
        attempt += 1
    return fits


class Step:
    """A local step whose memory was counted.

    ``events`` are the sizes of what the client holds, and of what the step makes and frees, as in `LiveBytes`;
    ``choices`` are what its layers asked `rebuilding_is_cheaper`.
    """

    def __init__(self, cost: Cost, events: Iterable[Sequence[int]], choices: Sequence[Sequence[int]]) -> None:
        self.sizes = torch.tensor([*zip_longest(*events, fillvalue=1)])
        self.choices = torch.tensor(choices, dtype=torch.int64).view(-1, 4)
        self.besides = cost.memory_bytes - most_alive(self.sizes.prod(0).tolist())
        self.decisions = [*starmap(rebuilding_is_cheaper, choices)]
        self.kind = self.sizes.shape, self.besides, *self.sizes[0].sign().tolist(), *self.decisions


def most_alive(changes: Iterable[int]) -> int:
    """The most bytes that are alive at once: of each tensor where it is made, and minus them where it is freed."""
    return max(accumulate(changes))


def between(steps: Mapping[int, Step], index: int, counts: Callable[[int], Sequence[int]]) -> int | None:
    """The memory that a step needs, if it follows from two other steps; otherwise ``None``.

    It does from two in which the same happens, in the same order, if the layers would choose likewise; beyond the two
    only where layers choose. ``counts`` tells all that dimensions may be multiples of at an index.
    """
    lowest = {steps[place].kind: place for place in sorted(steps, reverse=True)}
    highest = {steps[place].kind: place for place in sorted(steps)}
    for low, high in ((low, highest[kind]) for kind, low in lowest.items() if low < highest[kind]):
        first, last = steps[low], steps[high]
        if not (low <= index <= high or first.decisions):
            continue
        of_each = {*zip(*map(counts, (low, high, index)), strict=True)}
        at = torch.tensor([*of_each], dtype=torch.int64).view(-1, 3).T
        choices, sizes = dimensions(first.choices, last.choices, at), dimensions(first.sizes, last.sizes, at)
        if choices and sizes and [*starmap(rebuilding_is_cheaper, choices[0].tolist())] == first.decisions:
            least, most = (most_alive(dims.prod(0).tolist()) for dims in sizes)
            if least == most:
                return first.besides + least
    return None


def dimensions(first: Tensor, last: Tensor, counts: Tensor) -> tuple[Tensor, Tensor] | None:
    """The least and the largest that dimensions can be at some counts, from what they are at two others.

    All that depend on capacity are multiples of some count. One that is the same at both stays so, one that is a
    multiple of a count at both grows with it; perhaps of several. ``None`` if one is neither, or if that cannot be
    told. Rows of ``counts`` are those of ``first``, those of ``last``, and those that are asked for.

    Example:
        >>> dimensions(torch.tensor([7, 2, 12]), torch.tensor([7, 4, 24]), torch.tensor([[2, 6], [4, 12], [3, 10]]))
        (tensor([ 7,  3, 18]), tensor([ 7,  3, 20]))
    """
    before, after, now = counts.unbind()
    grew, least, most = first != last, first.clone(), last.clone()
    multiple = first[grew].unsqueeze(1) // before
    may = (multiple * before == first[grew].unsqueeze(1)) & (multiple * after == last[grew].unsqueeze(1))
    if not may.any(1).all() or ((before == after) & (before != now)).any():
        return None
    least[grew] = (multiple * now).where(may, torch.iinfo(now.dtype).max).amin(1)
    most[grew] = (multiple * now).where(may, 0).amax(1)
    return least, most


def round_bytes(
    module: nn.Module,
    algorithm: Algorithm,
    keep_ratios: Sequence[float],
    *,
    filters: Sequence[Filter] = (),
    buffers: Rules | None = None,
) -> dict[float, int]:
    """Bytes that a client of each of an algorithm's own keep ratios gets and sends in a round, without frozen ones.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options.
        keep_ratios: Some of its keep ratios.
        filters: As in `cost_table`.
        buffers: As in `cost_table`.

    Example:
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> round_bytes(mlp, SpectralSharding(keep_ratio={0.25: 0.5, 1.0: 0.5}), [0.25, 1.0])
        {0.25: 2592, 1.0: 5712}
    """
    counted = _Counted(module, algorithm, None, None, filters, buffers)
    return {r: cost.round_bytes for r, cost in counted.of_federation(counted.algorithm, keep_ratios, None).items()}


aten = torch.ops.aten
RNN_KERNELS = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
VIEWS = (
    *(aten.view.default, aten.detach.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.slice.Tensor, aten.select.int, aten.as_strided.default, aten.expand.default, aten.unsqueeze.default),
)


@cache
def makes_one(func: Any) -> bool:
    """Whether an operation makes one new tensor, whose size follows from the sizes and numbers that it is given."""
    arguments, results = func._schema.arguments, func._schema.returns
    depends_on_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    kept = any(part.alias_info is not None for part in (*arguments, *results))
    return [str(result.type) for result in results] == ["Tensor"] and not kept and not depends_on_values


@cache
def changes_values(func: Any) -> bool:
    """Whether an operation only changes the values of its first argument, as steps of optimizers do."""
    first = func._schema.arguments[0].alias_info
    return torch.Tag.pointwise in func.tags and first is not None and first.is_write


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors that have sizes, but neither values nor memory, and take the place of a module's.

    Within a ``with`` block on it, all operations make such tensors, and those on some are also made outside of one. An
    error is raised by what depends on values, and by code that has kept one of the module's own tensors where it cannot
    be found, such as a closure. Tensors on the meta device count as tensors on the CPU.

    A step is thousands of small operations, and torch takes a fraction of a millisecond for each. So those that are
    asked for most are answered here: views, changed values, and results for sizes that were there before.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the module's tensors, which are held
        self._made: dict[Any, Any] = {}  # maps operations and what they were given to what describes the result

    @contextmanager
    def in_place_of(self, module: nn.Module, *others: Any) -> Iterator[None]:
        """Replace the tensors of a module, and of others such as optimizers, within the block."""
        kept, log = KeptState(module, *others), logging.getLogger(FakeTensorMode.__module__)
        was_disabled = log.disabled
        try:
            log.disabled = True  # it would print what it also raises
            kept.exchange(self._exchanged)
            yield
        finally:
            log.disabled = was_disabled
            kept.restore()

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same size, type and device, without values; but a single number, such as a counter, stays."""
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            number = tensor.item()
            with self:
                return torch.tensor(number, dtype=tensor.dtype)
        if not tensor.is_meta:
            return self.from_tensor(tensor)
        with self:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake.requires_grad_(tensor.requires_grad)

    def _exchanged(self, part: Any) -> Any:
        if not isinstance(part, Tensor) or isinstance(part, FakeTensor):
            return part
        if id(part) not in self._of:
            fake = self.like(part)
            for when in HOOKS:
                if hooks := hooks_of(part, when):
                    setattr(fake, when, OrderedDict(hooks))
            self._of[id(part)] = part, fake
        return self._of[id(part)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [*args, *(kwargs or {}).values()]
        if any(id(leaf) in self._of for part in parts for leaf in (part if isinstance(part, list) else (part,))):
            raise RuntimeError("A tensor of the module is used that is kept where no other can take its place.")
        given = [part for part in parts if isinstance(part, Tensor)]
        if len(given) == 1 and type(given[0]) is Tensor and given[0].dim() == 0 and not given[0].is_meta:
            return func(*args, **(kwargs or {}))  # a number, such as that of an optimizer's steps
        if func in RNN_KERNELS:  # only they know the size of their workspace
            args, kwargs = tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs or {}))
            return tree_map_only(Tensor, self.from_tensor, func(*args, **kwargs))
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if args and isinstance(args[0], FakeTensor) and args[0].constant is None:
            if func in VIEWS:
                with in_kernel_invocation_manager(self):
                    view = func(*args, **(kwargs or {}))
                return FakeTensor(self, view, args[0].fake_device)
            if changes_values(func):
                return args[0]
            if makes_one(func) and (asked := _described((func, *parts, *(kwargs or {})))) is not None:
                if asked in self._made:
                    (shape, stride, dtype), device = self._made[asked]
                    return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
                made: Any = super().__torch_dispatch__(func, types, args, kwargs)
                if not storages(made).keys() & storages(parts).keys():  # some that say they make one return a view
                    self._made[asked] = _described(made), made.fake_device
                return made
        return super().__torch_dispatch__(func, types, args, kwargs)


def _described(part: Any) -> Any:
    """What the size of a result depends on in an argument; ``None`` if its values may matter."""
    if isinstance(part, Tensor):
        return None if getattr(part, "constant", None) is not None else (part.shape, part.stride(), part.dtype)
    if isinstance(part, (list, tuple)):
        inner = [_described(entry) for entry in part]
        return None if None in inner else tuple(inner)
    return type(part), part  # the type, because True equals 1


class _Counted:
    """An algorithm on a module, which is restored: what its clients cost, and the capacities that differ."""

    def __init__(
        self,
        module: nn.Module,
        algorithm: Algorithm,
        example: Example,
        optimizer: Optimizer | None = None,
        filters: Sequence[Filter] = (),
        buffers: Rules | None = None,
        passes: bool = True,
    ) -> None:
        self.filters, self.buffers, self.passes = filters, buffers or {}, passes
        self.step: list[Any] = []  # events and choices of the last step
        if optimizer is not None:
            check_is("optimizer", optimizer, Optimizer)
            if foreign := foreign_parameters(optimizer, module):
                raise ValueError(
                    f"`optimizer` must train the parameters of the module, and {foreign[0][0]} is not among them; make "
                    f"it with torch.optim.{type(optimizer).__name__}(module.parameters())."
                )
            check_optimizer(optimizer)
        self.module, self.optimizer, self.capacity = module, optimizer, algorithm.capacities.name
        devices = {parameter.device.type for parameter in module.parameters()}
        self.has_values = "meta" not in devices
        # Only other devices show what their kernels save, and transformers masks attention differently on fake tensors.
        packages = {package_of(part) for part in module.modules()} if self.has_values else {}
        self.fakes = FakeTensors() if devices <= {"cpu", "meta"} and "transformers" not in packages else None

        def planned(fakes: FakeTensors | None) -> Algorithm:
            with self._in_place(fakes):
                if example is not None and example_of(module) is None:
                    module.example_input_array = example
                return algorithm.capacities.planned(module)

        self.algorithm = self._counted(planned)
        self._bound: tuple[Algorithm, ServerHalf] | None = None  # the last

    def at(self, capacities: Sequence[float], example: Example, beside: Sequence[float] = ()) -> dict[float, Cost]:
        """The costs of some capacities; those of one federation are counted in the same rounds, ``beside`` others."""
        choices = self.algorithm.capacities.choices(list(dict.fromkeys([*beside, *capacities])))
        found: dict[float, Cost] = {}
        for choice in {id(choice): choice for choice, _ in choices.values()}.values():
            keep_ratios = {capacity: ratio for capacity, (its, ratio) in choices.items() if its is choice}
            asked = {capacity: keep_ratios[capacity] for capacity in capacities if capacity in keep_ratios}
            if asked:
                costs = self.of_federation(choice, list(asked.values()), example, list(keep_ratios.values()))
                found |= {capacity: costs[keep_ratio] for capacity, keep_ratio in asked.items()}
        return {capacity: found[capacity] for capacity in capacities}

    def of_federation(
        self, choice: Algorithm, keep_ratios: Sequence[float], example: Example, beside: Sequence[float] = ()
    ) -> dict[float, Cost]:
        """The larger costs of two rounds in a row; clients of the keep ratios ``beside`` take part."""
        return self._counted(partial(self._of_rounds, choice, keep_ratios, example, beside))

    def _counted(self, count: Callable[[FakeTensors | None], T]) -> T:
        """What is counted on fake tensors, or on the module's own if it, or the algorithm, depends on values."""
        if self.fakes is not None:
            try:
                return count(self.fakes)
            except Exception as error:  # of any type, from code that looks at values
                if not self.has_values:
                    if isinstance(error, ValueError):
                        raise
                    raise ValueError(
                        f"{type(self.module).__name__} is on the meta device, and what it costs depends on values that "
                        f"it does not have there ({type(error).__name__}: {error}). Build it on the CPU."
                    ) from error
                self.fakes = self._bound = None
        return count(None)

    def _in_place(self, fakes: FakeTensors | None) -> AbstractContextManager[None]:
        """Put back what happens to the module, whose tensors are perhaps fake ones."""
        return trying(self.module) if fakes is None else fakes.in_place_of(self.module, self.optimizer)

    def _of_rounds(
        self,
        choice: Algorithm,
        keep_ratios: Sequence[float],
        example: Example,
        beside: Sequence[float],
        fakes: FakeTensors | None,
    ) -> dict[float, Cost]:
        half = self._half(choice, fakes)
        with self._in_place(fakes):
            if fakes is not None:  # first, because an example on the meta device has nothing to move
                example = tree_map_only(Tensor, fakes.like, example)
            example = as_input(self.module, example)
            given: dict[str, Any] = {"beside": beside, "moving": half.costs_besides.sent_again, "fakes": fakes}
            given["filters"] = self.filters
            stepping: dict[str, Any] = {"optimizer": self.optimizer, "passes": self.passes, "step": self.step}
            first = second = turn_costs(half, keep_ratios, example, **stepping, **given)
            if not half.costs_besides.rounds_are_alike:
                second = turn_costs(half, keep_ratios, round_idx=1, **given)
        # number by number, the larger one
        return {ratio: Cost(*map(max, astuple(cost), astuple(second[ratio]))) for ratio, cost in first.items()}

    def _half(self, choice: Algorithm, fakes: FakeTensors | None) -> ServerHalf:
        """A choice bound to the module; with values, if there are any, which decide on layers and buffers."""
        if self._bound is not None and self._bound[0] is choice:
            return self._bound[1]
        module = self.module
        with self._in_place(fakes):
            with warnings.catch_warnings():  # what would make a poor run has a cost like any other
                warnings.simplefilter("ignore", SpectralWarning)
                check_chain(plan := Plan(module, choice, self.filters, buffers=self.buffers))
                choice.check(plan)
            with fakes or nullcontext():
                state, parameter = choice.new_state(module, 0), next(module.parameters(), None)
            if state is not None and parameter is not None and fakes is None:
                state.to(parameter.device)  # where a Trainer would move it
        with self._in_place(None if self.has_values else fakes):
            untrained = () if self.optimizer is None else untrained_parameters([self.optimizer], module)
            self._bound = choice, choice.bind(module, state, Known(plan.rules(), untrained))
        return self._bound[1]


def turn_costs(
    half: ServerHalf,
    keep_ratios: Sequence[float],
    example: Example = None,
    *,
    beside: Sequence[float] = (),
    round_idx: int = 0,
    moving: Collection[str] = (),
    optimizer: Optimizer | None = None,
    fakes: FakeTensors | None = None,
    filters: Sequence[Filter] = (),
    passes: bool = True,
    step: list[Any] | None = None,
) -> dict[float, Cost]:
    """Open a round with one client of each keep ratio; count what it is sent, holds and sends back, and one pass.

    Clients of the keep ratios ``beside`` take part without being counted. Without an example, or ``passes``, no pass is
    counted; with an optimizer, so is the memory of a local step, and what `Step` is told of the last one becomes the
    entries of ``step``. Frozen tensors that change between rounds, and so are sent in each, are named in ``moving``.
    Where ``fakes`` are in place of the module's tensors, all that a client makes is fake, too.
    """
    units = {
        r: WorkUnit(client_id, coefficient=1.0) for client_id, r in enumerate(dict.fromkeys([*beside, *keep_ratios]))
    }
    shares = {unit.key: 1.0 / len(units) for unit in units.values()}
    opened = half.open(Cohort(0, round_idx, {r: (unit,) for r, unit in units.items()}, shares=shares))
    told, once = instructions(half, filters), half.frozen_tensors().keys() - set(moving)
    side = told.side
    names = {id(parameter): name for name, parameter in half.server.named_parameters()}
    optimizers = () if optimizer is None else (optimizer,)
    costs = {}
    for keep_ratio in dict.fromkeys(keep_ratios):
        unit = units[keep_ratio]
        download = replace(opened.send(unit)[0], round_idx=round_idx)  # tells the device what it trains
        frozen = num_bytes({name: tensor for name, tensor in download.tensors.items() if name in once})
        # forms of its own, so that there is one sub-model at a time
        with fakes or nullcontext(), Forms(half.server, side.take_form, optimizers).client(download.capacity) as client:
            told.load(client, download)
            cost = half.costs_besides.cost
            if example is not None and passes:
                if draw := _widest_step(told, client, download).before_forward:
                    draw()  # weights that are drawn for a step have a gradient only in it
                cost += count_pass(client, example)
            cost += Cost(
                parameters=sum(parameter.numel() for parameter in client.parameters()),
                downlink_bytes=download.num_bytes - frozen,
                uplink_bytes=told.sized(client, download).num_bytes,
                frozen_bytes=frozen,
            )
            if optimizer is not None:  # last, because it changes the client
                options = options_of(optimizer)
                LocalOptimizer(optimizer, names, client, side.stand_ins(client)).start_client(options)
                memory, *happened = _step_memory(told, client, download, optimizer, example)
                cost += memory
                if step is not None:
                    step[:] = happened
        costs[keep_ratio] = cost
    return costs


def _widest_step(told: Instructions, client: nn.Module, download: Download) -> StepActions:
    """What an algorithm does in a local step, in the largest one where it draws a width for each."""
    actions = told.phases(client, download)[-1]
    for layer in sharded_layers(client).values():
        layer.multiplies = True  # as in rounds whose multipliers are not 1
    return StepActions() if actions.after_forward is not None else actions


def _step_memory(
    told: Instructions, client: nn.Module, download: Download, optimizer: Optimizer, example: Example
) -> tuple[Cost, list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Take a local step in the order of the local loop, and count what is alive; return what `Step` is told.

    The gradients of the step before are alive until the backward pass begins, and the optimizer's state, which the step
    makes, counts as there before it. The loss is the output, if that has a single number; otherwise all outputs get a
    gradient, as from a loss.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    def state() -> list[Tensor]:
        return _tensors(optimizer.state.get(parameter) for parameter in trained)

    made_before = state()  # by those that make it with the optimizer, such as Adagrad
    choices: list[tuple[int, ...]] = []

    def noted(*numbers: int) -> bool:
        choices.append(numbers)
        return rebuilding_is_cheaper(*numbers)

    for layer in sharded_layers(client).values():
        layer.rebuilds = noted
    is_known = type(optimizer).__module__.startswith("torch.")  # a later step of others may take more than the first
    with LiveBytes() as live:
        actions = _widest_step(told, client, download)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        if not is_known:
            optimizer.step()
        if actions.before_forward is not None:
            actions.before_forward()
        output = run_example(client, example)
        optimizer.zero_grad()
        ends = [tensor for tensor in _tensors([output]) if tensor.requires_grad]
        if not ends:
            raise ValueError(
                "The memory of a step is counted in a backward pass, and nothing that "
                f"{type(client).__name__} returns for the example needs a gradient; let its `forward` return what the "
                "loss is computed from."
            )
        losses = [tensor for tensor in ends if tensor.dim() == 0] or ends
        torch.autograd.backward(losses, [torch.ones_like(tensor) for tensor in losses])
        if actions.before_step is not None:
            actions.before_step(optimizer)
        optimizer.step()
    of_step, unreached = state(), [parameter.grad is None for parameter in trained]
    if any(unreached):  # by this step, but perhaps by others
        for parameter, is_new in zip(trained, unreached, strict=True):
            parameter.grad = torch.zeros_like(parameter) if is_new else None
        optimizer.step()
    before = {id(tensor) for tensor in of_step}
    held = [*client.parameters(), *client.buffers()]
    gradients, made, batch = _bytes_of(trained), _bytes_of(state()), _bytes_of(_tensors([example]))
    later = (tensor for tensor in state() if tensor.dim() and id(tensor) not in before)
    events = [*_sizes(later), *live.starting_with(of_step if is_known else ())]
    cost = Cost(
        weight_bytes=_bytes_of(held),
        gradient_bytes=gradients,
        optimizer_bytes=made,
        activation_bytes=most_alive(map(math.prod, events)) + batch - gradients - (made - _bytes_of(made_before)),
    )
    return cost, [*_sizes([*download.tensors.values(), *held, *made_before]), *events], choices


def _sizes(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return [(tensor.itemsize, *tensor.shape) for tensor in tensors]


def _tensors(trees: Iterable[Any]) -> list[Tensor]:
    return [leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
