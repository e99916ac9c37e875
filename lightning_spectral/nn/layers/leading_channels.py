"""A tensor whose trailing channels are zero, and which uses no memory for them until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

Narrow = Callable[..., Tensor | None]
SubclassT = TypeVar("SubclassT", bound=Tensor)
BEFORE_2_6 = torch.__version__ < "2.6"  # a `TorchVersion`, which compares numbers


class LeadingChannels(Tensor):
    """The leading channels of a larger tensor, whose other channels are zero.

    A function that acts on each channel separately and leaves zeros zero returns another `LeadingChannels`.
    Normalisation by channel or by groups of channels has fewer channels: absent channels enter no statistics, get no
    shift and stay zero. Every other function sees the whole tensor, including zeros.
    """

    num_channels: int  # of the whole tensor
    channel_dim: int  # counted from the end: -1 after a linear layer

    @property
    def held(self) -> Tensor:
        """The leading channels, a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return as_subclass(self, Tensor)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        args = args or ((kwargs.pop("input"),) if "input" in kwargs else ())
        x = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(x, cls):
                if func in _OF_SHAPE:  # asked of a tensor of the whole shape that takes the memory of one value
                    shape = list(x.held.shape)
                    shape[x.channel_dim] = x.num_channels
                    return func(x.held.new_empty(()).expand(shape), *args[1:], **kwargs)
                if func in _OF_HELD:
                    return func(x.held, *args[1:], **kwargs)
                if func in _NARROW and (result := _NARROW[func](x, *args[1:], **kwargs)) is not None:
                    return leading_channels(result, x.num_channels, x.channel_dim)
                name = getattr(func, "__name__", "")  # a write would go to a whole tensor that is about to be made
                if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                    raise RuntimeError(
                        f"`{name}` writes into the output of a layer that a client holds in part, by `output_ratio`: "
                        "its other channels are zero and take no memory. Compute a new tensor, or name the layer in "
                        "`exclude`."
                    )
            return func(*_whole(args), **{name: _whole(value) for name, value in kwargs.items()})


def leading_channels(held: Tensor, num_channels: int, channel_dim: int) -> Tensor:
    """A tensor with ``num_channels`` channels along the negative ``channel_dim``, all zero except the given ones.

    Example:
        >>> x = leading_channels(torch.tensor([[1.0, -2.0]]), num_channels=4, channel_dim=-1)
        >>> x.shape, torch.relu(x).held
        (torch.Size([1, 4]), tensor([[1., 0.]]))
        >>> x + 1
        tensor([[ 2., -1.,  1.,  1.]])
    """
    if held.shape[channel_dim] == num_channels:
        return held
    wrapped = as_subclass(held, LeadingChannels)
    wrapped.num_channels, wrapped.channel_dim = num_channels, channel_dim
    return wrapped


def as_subclass(tensor: Tensor, subclass: type[SubclassT]) -> SubclassT:
    """The tensor as an instance of a subclass, with its gradients.

    torch before 2.6 can do so neither inside a `TorchDispatchMode`, such as a counter of operations, nor in a compiled
    function. Later versions switch off such modes for this call themselves. None of them makes other subclasses of a
    fake tensor.
    """
    if isinstance(tensor, FakeTensor) and subclass is not Tensor:
        alias: Any = tensor.view_as(tensor)
        alias.__class__ = _fake(subclass)
        return cast("SubclassT", alias)
    return _outside_of_modes(tensor, subclass) if BEFORE_2_6 else tensor.as_subclass(subclass)


@cache
def _fake(subclass: type[Tensor]) -> type[Tensor]:
    return type(subclass.__name__, (subclass, FakeTensor), {})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_of_modes(tensor: Tensor, subclass: type[SubclassT]) -> SubclassT:
    with torch._C._DisableTorchDispatch():
        return tensor.as_subclass(subclass)


def _whole(value: Any) -> Any:
    if isinstance(value, LeadingChannels):
        missing = value.num_channels - value.held.shape[value.channel_dim]
        return F.pad(value.held, [0, 0] * (-value.channel_dim - 1) + [0, missing])
    return type(value)(map(_whole, value)) if type(value) in (list, tuple) else value


def _by_channel(func: Callable[..., Tensor], num_dims: int | None = None) -> Narrow:
    """A function of each value on its own, or over the last dimensions."""

    def narrow(x: LeadingChannels, *args: Any, **kwargs: Any) -> Tensor | None:
        if num_dims is None and any(isinstance(value, Tensor) for value in [*args, *kwargs.values()]):
            return None
        if num_dims is not None and (x.channel_dim != -num_dims - 1 or kwargs.get("return_indices")):
            return None
        return func(x.held, *args, **kwargs)

    return narrow


def _sum(x: LeadingChannels, other: Any) -> Tensor | None:
    if not isinstance(other, LeadingChannels) or other.channel_dim != x.channel_dim:
        return None
    return x.held + other.held if x.held.shape == other.held.shape and x.shape == other.shape else None


def _batch_norm(
    x: LeadingChannels,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *options: Any,
    **named_options: Any,
) -> Tensor | None:
    """Running statistics are updated in place; those of absent channels do not change."""
    if x.held.dim() + x.channel_dim != 1:  # channels are not second
        return None
    given, num_held = (running_mean, running_var, weight, bias), x.held.shape[1]
    mean, var, weight, bias = (None if tensor is None else tensor[:num_held] for tensor in given)
    return F.batch_norm(x.held, mean, var, weight, bias, *options, **named_options)


def _group_norm(
    x: LeadingChannels, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    """Normalise whole groups, then the part of the next group that is held."""
    if x.held.dim() + x.channel_dim != 1:  # channels are not second
        return None
    num_held, size = x.held.shape[1], x.num_channels // num_groups
    whole = num_held - num_held % size
    parts = [(slice(0, whole), whole // size), (slice(whole, num_held), 1)]
    normed = []
    for part, groups in parts:
        if part.stop > part.start:
            scale, shift = (None if tensor is None else tensor[part] for tensor in (weight, bias))
            normed.append(F.group_norm(x.held[:, part], groups, scale, shift, eps))
    return torch.cat(normed, dim=1) if len(normed) > 1 else normed[0]


_OF_SHAPE = frozenset(
    {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}  # type: ignore[attr-defined]
)
_OF_HELD = frozenset(
    vars(torch._C.TensorBase)[name].__get__
    for name in ("requires_grad", "dtype", "device", "layout", "is_cuda", "grad_fn", "is_leaf")
) | {Tensor.is_floating_point, Tensor.is_complex}
_ELEMENTWISE = (
    *(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu, F.relu6, F.gelu, F.silu, F.mish, F.leaky_relu, F.elu),
    *(torch.tanh, Tensor.tanh, F.hardswish, F.dropout),
)
_POOLS = (
    *((F.max_pool1d, 1), (F.max_pool2d, 2), (F.max_pool3d, 3)),
    *((F.avg_pool1d, 1), (F.avg_pool2d, 2), (F.avg_pool3d, 3)),
    *((F.adaptive_avg_pool1d, 1), (F.adaptive_avg_pool2d, 2), (F.adaptive_avg_pool3d, 3)),
)
_NARROW: Mapping[Any, Narrow] = {
    **{func: _by_channel(func) for func in _ELEMENTWISE},
    **{func: _by_channel(func, num_dims) for func, num_dims in _POOLS},
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__iadd__), _sum),
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
}
