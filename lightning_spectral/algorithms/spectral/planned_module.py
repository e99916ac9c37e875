"""The server's module as its plan divides it: matrices that are factorised, and tensors that travel whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import assemble, by_parameter
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.protocol.buffer_rules import NO_RULES, BufferRules
from lightning_spectral.protocol.cohort import SharesWork
from lightning_spectral.protocol.exchange import apply_mean_change, returned_tensors, travelling_tensors

NamedMatrix = tuple[str, Tensor]


class PlannedModule:
    """A module, the plan of how clients hold every layer of it, and the rules of its buffers."""

    def __init__(self, module: nn.Module, plan: ModulePlan, buffers: BufferRules = NO_RULES) -> None:
        self.module = module
        self.plan = plan
        self.buffers = buffers
        self._held_entries = plan.cut_biases(module)  # of biases whose outputs clients do not compute in full

    def matrices(self) -> dict[str, Tensor]:
        """The sharded matrices by the names of the plan's blocks and in their order, detached."""
        blocks, module = self.plan.blocks, self.module
        return {name: block.matrix(module.get_parameter(block.parameter).detach()) for name, block in blocks.items()}

    def of_each_matrix(
        self, compute: Callable[[str, Tensor], tuple[Tensor, ...]], workers: SharesWork
    ) -> dict[str, tuple[Tensor, ...]]:
        """What follows from each sharded matrix, computed in one of the processes; errors name the layer."""

        def named(piece: NamedMatrix) -> tuple[Tensor, ...]:
            name, matrix = piece
            with naming_layer(name):
                return compute(name, matrix)

        pieces = list(self.matrices().items())
        return dict(zip(self.plan.blocks, workers.share_out(pieces, named, decomposition_cost), strict=True))

    def assembled(self, matrix_of: Callable[[str], Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every sharded weight, with a tensor of its shape made of ``matrix_of`` each of its blocks' names."""
        for name, blocks in by_parameter(list(self.plan.blocks.values())):
            weight = self.module.get_parameter(name)
            yield weight, assemble(blocks, [matrix_of(block.name).to(weight.dtype) for block in blocks], weight)

    def travelling(self) -> dict[str, Tensor]:
        """The tensors that are sent whole, or cut to the entries that clients hold; views."""
        return leading_entries(travelling_tensors(self.module, self.plan.sharded_weights), self._held_entries)

    def returned(self) -> dict[str, Tensor]:
        """Those of them that clients send back."""
        tensors = returned_tensors(self.module, self.plan.sharded_weights, self.buffers)
        return leading_entries(tensors, self._held_entries)

    def averaged(self) -> dict[str, Tensor]:
        """Those of them that are averaged."""
        return dict(self.buffers.averaged(self.returned()))

    def apply_mean_change(self, changes: Iterable[tuple[str, Tensor]]) -> None:
        """Set the pseudo-gradients and buffers of these tensors; entries that no client holds do not change."""
        held, module = self._held_entries, self.module
        apply_mean_change(
            module,
            (
                (name, with_absent_rows(change, len(module.get_parameter(name))) if name in held else change)
                for name, change in changes
            ),
        )


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Name the layer in errors about its weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Layer {name!r} cannot be factorised: {error}") from error


def decomposition_cost(named_matrix: NamedMatrix) -> float:
    """Number of multiplications of a singular value decomposition, up to a constant factor."""
    rows, columns = named_matrix[1].shape
    return float(rows * columns * min(rows, columns))


def leading_entries(tensors: Mapping[str, Tensor], held: Mapping[str, int]) -> dict[str, Tensor]:
    """Named tensors, some of them cut to their leading ``held[name]`` entries; views."""
    return {name: tensor[: held[name]] if name in held else tensor for name, tensor in tensors.items()}


def with_absent_rows(change: Tensor, num_rows: int) -> Tensor:
    """A change of leading rows, followed by zeros."""
    if len(change) == num_rows:
        return change
    whole = change.new_zeros(num_rows, *change.shape[1:])
    whole[: len(change)] = change
    return whole
