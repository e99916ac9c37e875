"""The interface of a sharded layer: how it is made from a dense one, and what stands for its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_spectral.arguments import Whole, flag
from lightning_spectral.nn.layers.blocks import WeightBlock, assemble, by_parameter, join, row_blocks
from lightning_spectral.nn.layers.computed_weight import computed_weight, refuse_write
from lightning_spectral.nn.layers.terms import SingularTerms

if TYPE_CHECKING:  # a mix-in for modules
    _Base = nn.Module
else:
    _Base = object

LayerT = TypeVar("LayerT", bound="ShardedLayer")
NumTerms = int | Sequence[int]
SIZE = Whole(at_least=1)


class ShardedLayer(_Base):
    """A module that stands for a dense layer and holds singular terms instead of its weights.

    Parameters that are not factorised, such as biases, keep the names that they have in the dense layer. The terms of
    each block of a weight are in a `SingularTerms`, which is the layer itself or one of its children.

    Attributes:
        dense_name: Name of the layer in the module that it belongs to, for messages; set when layers are swapped.
        dense_weights: Names of the weights that it holds as singular terms, as attributes of the dense layer.
        cuts_outputs: Whether it can hold only the leading rows of its left vectors (`keep_outputs`).
        channel_dim: Dimension of the channels in an input, if the layer skips channels that are known to be zero.
    """

    cuts_outputs: ClassVar[bool] = False
    channel_dim: ClassVar[int | None] = None
    dense_name: str = ""
    dense_weights: frozenset[str] = frozenset()

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        """The matrices that are factorised; together they cover every weight they touch, in order of rows.

        ``ValueError`` if the outputs cannot be divided by ``num_parts``, the number of linear layers packed into one.
        """
        raise NotImplementedError

    @classmethod
    def like(cls: type[LayerT], dense: Any, num_terms: NumTerms) -> LayerT:
        """An empty layer of the shape of ``dense``, with so many terms of each block; a number if there is only one."""
        raise NotImplementedError

    @classmethod
    def from_dense(cls: type[LayerT], dense: Any, num_terms: NumTerms) -> LayerT:
        """The layer that holds the largest singular terms of ``dense``, and its other parameters."""
        layer = cls.like(dense, num_terms)
        own = dict(layer.named_parameters())
        with torch.no_grad():
            for name, parameter in dense.named_parameters():
                if name in own:
                    own[name].copy_(parameter)
        for block in cls.blocks_of(dense, len(counts(num_terms))):
            layer.terms(block).load_matrix(block.matrix(dense.get_parameter(block.parameter).detach()))
        return layer

    def terms(self, block: WeightBlock) -> SingularTerms:
        holder = self.get_submodule(block.name)
        assert isinstance(holder, SingularTerms)
        return holder

    def held_terms(self) -> list[SingularTerms]:
        return [module for module in self.modules() if isinstance(module, SingularTerms)]

    def keep_outputs(self, num_outputs: int, with_bias: bool = True) -> None:
        """Hold only the leading output channels, and the same part of the bias; the others are zero."""
        raise NotImplementedError(f"{type(self).__name__} has all of its outputs.")

    def computed(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """A dense weight for modules that read it; differentiable, and writing to it is an error."""
        return computed_weight(compute, join(self.dense_name, name), self.dense_name or type(self).__name__)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a new value for a weight that is held as singular terms; it would not be used."""
        if name in self.dense_weights:
            refuse_write(join(self.dense_name, name), self.dense_name)
        super().__setattr__(name, value)

    def effective_weights(self, dense: Any) -> dict[str, Tensor]:
        """The dense weights that the layer stands for, by their names in ``dense``; differentiable."""
        weights = {}
        for name, blocks in by_parameter(self.blocks_of(dense, len(self.held_terms()))):
            matrices = [self.terms(block).matrix() for block in blocks]
            weights[name] = assemble(blocks, matrices, dense.get_parameter(name))
        return weights


def counts(num_terms: NumTerms) -> tuple[int, ...]:
    """Numbers of terms, one for each block."""
    return (num_terms,) if isinstance(num_terms, int) else tuple(num_terms)


class SpectralShardedLayer(ShardedLayer, SingularTerms):
    """A layer with one weight of shape ``(c_out, c_in, ...)``, factorised whole, which holds the terms itself.

    Its ``bias`` has the shape ``(c_out,)``, or is ``None``.
    """

    cuts_outputs = True
    bias: nn.Parameter | None
    weight_shape: tuple[int, ...]

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        num_terms: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        rows, columns = weight_shape[0], int(torch.Size(weight_shape[1:]).numel())
        super().__init__((rows, columns), num_terms, device, dtype)
        self.weight_shape = weight_shape
        self.register_parameter("bias", nn.Parameter(torch.zeros_like(self.u[:, 0])) if flag("bias", bias) else None)

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return row_blocks("weight", dense.weight, [""])

    def keep_outputs(self, num_outputs: int, with_bias: bool = True) -> None:
        self.keep_rows(num_outputs)
        if with_bias and self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach()[:num_outputs].clone())

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, for modules that read it; differentiable, shape ``weight_shape``."""
        return self.computed("weight", lambda: self.matrix().view(self.weight_shape))
