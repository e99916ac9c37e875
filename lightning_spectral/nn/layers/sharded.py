"""Sharded layers: how one is made from a dense layer, and what stands for the weights that it computes from terms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightning_spectral.arguments import Whole, flag
from lightning_spectral.nn.layers.leading_channels import as_subclass
from lightning_spectral.nn.layers.terms import SingularTerms, WeightBlock, assemble, by_parameter, join, row_blocks

if TYPE_CHECKING:  # a mix-in for modules
    _Base = nn.Module
else:
    _Base = object

LayerT = TypeVar("LayerT", bound="ShardedLayer")
NumTerms = int | Sequence[int]
SIZE = Whole(at_least=1)
_READ_GRAD = vars(torch._C.TensorBase)["grad"].__get__
_READ_BASE = vars(torch._C.TensorBase)["_base"].__get__  # a view of it would have a base again, and so on


class ComputedWeight(Tensor):
    """The effective dense weight of a sharded layer, which refuses changes that would be lost.

    It is a new tensor each time it is read, so a value written to it would never reach the layer. Results computed from
    it are plain tensors; views of it, and its ``data``, refuse writes too.
    """

    weight_name: str
    layer_name: str

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        weights = list(_weights_in([*args, *kwargs.values()]))
        with torch._C.DisableTorchFunctionSubclass():
            if args and isinstance(weight := args[0], ComputedWeight):  # what does not count as a write
                if getattr(func, "__name__", "") in ("__set__", "requires_grad_"):
                    refuse_write(weight.weight_name, weight.layer_name)
                if func == _READ_GRAD and not weight.retains_grad:
                    raise AttributeError(  # so that `hasattr` works, which torch's compiler uses
                        f"`{weight.weight_name}` has no `grad` on a client: the layer holds singular terms there, "
                        "which have the gradients. Keep the layer dense: "
                        f"`LayerChoices(exclude=[{weight.layer_name!r}])`."
                    )
            versions = [weight._version for weight in weights]
            result = func(*args, **kwargs)
            for weight, version in zip(weights, versions, strict=True):
                if weight._version != version:
                    refuse_write(weight.weight_name, weight.layer_name)
            return result if func == _READ_BASE else _protected(result, weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor: a copy of a weight may be changed."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def computed_weight(compute: Callable[[], Tensor], weight_name: str, layer_name: str) -> ComputedWeight:
    """The result of ``compute`` as a `ComputedWeight`.

    Example:
        >>> weight = computed_weight(lambda: torch.ones(2), "net.2.weight", "net.2")
        >>> weight.sum()
        tensor(2.)
        >>> weight.data.clamp_(-0.1, 0.1)
        Traceback (most recent call last):
        RuntimeError: `net.2.weight` cannot be written on a client: ...
    """
    if torch.is_inference_mode_enabled():  # inference tensors do not count writes to them
        with torch.inference_mode(False), torch.no_grad():
            return computed_weight(compute, weight_name, layer_name)
    weight = as_subclass(compute(), ComputedWeight)
    weight.weight_name, weight.layer_name = weight_name, layer_name
    return weight


def refuse_write(weight_name: str, layer_name: str) -> NoReturn:
    """Raise the error for a change that would be lost."""
    raise RuntimeError(
        f"`{weight_name}` cannot be written on a client: the layer holds singular terms there, from which this weight "
        "is computed anew each time, so the new value would be lost. Keep the layer dense: "
        f"`LayerChoices(exclude=[{layer_name!r}])`."
    )


def _weights_in(values: Iterable[Any]) -> Iterator[ComputedWeight]:
    for value in values:
        if isinstance(value, ComputedWeight):
            yield value
        elif isinstance(value, list | tuple):
            yield from _weights_in(value)


def _protected(result: Any, weights: list[ComputedWeight]) -> Any:
    """The result of a call, in which tensors that share memory with a weight refuse writes as the weight does."""
    if type(result) is Tensor:
        memory = result.untyped_storage()._cdata
        for weight in weights:
            if weight.untyped_storage()._cdata == memory:
                return computed_weight(lambda: result, weight.weight_name, weight.layer_name)
    if type(result) in (list, tuple):
        return type(result)(_protected(part, weights) for part in result)
    return result


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
        """An empty layer of the shape of ``dense``, with so many terms of each block; a number if there is only one.

        By default it is made by ``cls(dense, num_terms)``, with a tuple of numbers.
        """
        return cls(dense, counts(num_terms))

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

    @classmethod
    def empty_terms(cls, dense: Any, num_terms: NumTerms) -> nn.ModuleDict:
        """Terms of zero for each block of ``dense``, as the children ``blocks`` of a layer that has several."""
        blocks, terms = cls.blocks_of(dense, len(counts(num_terms))), nn.ModuleDict()
        for block, n in zip(blocks, counts(num_terms), strict=True):
            weight = dense.get_parameter(block.parameter)
            terms[block.name.removeprefix("blocks.")] = SingularTerms(block.shape, n, weight.device, weight.dtype)
        return terms

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
        self.u = nn.Parameter(self.u.detach()[:num_outputs].clone())
        if with_bias and self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach()[:num_outputs].clone())

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, for modules that read it; differentiable, shape ``weight_shape``."""
        return self.computed("weight", lambda: self.matrix().view(self.weight_shape))
