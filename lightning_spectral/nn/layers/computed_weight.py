"""A weight computed from singular terms, which can be read, with gradients, but not written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_spectral.nn.layers.leading_channels import as_subclass

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
            _check_before(func, args)
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


def computed_weight(compute: Callable[[], Tensor], weight_name: str, layer_name: str) -> Tensor:
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
            return _named(compute(), weight_name, layer_name)
    return _named(compute(), weight_name, layer_name)


def refuse_write(weight_name: str, layer_name: str) -> NoReturn:
    """Raise the error for a change that would be lost."""
    raise RuntimeError(
        f"`{weight_name}` cannot be written on a client: the layer holds singular terms there, from which this weight "
        "is computed anew each time, so the new value would be lost. Keep the layer dense: "
        f"`LayerChoices(exclude=[{layer_name!r}])`."
    )


def _check_before(func: Callable[..., Any], args: Any) -> None:
    """Refuse what does not count as a write: ``weight.data = ...``, a new ``grad``, or a gradient that is elsewhere."""
    weight = args[0] if args else None
    if not isinstance(weight, ComputedWeight):
        return
    if getattr(func, "__name__", "") in ("__set__", "requires_grad_"):
        refuse_write(weight.weight_name, weight.layer_name)
    if func == _READ_GRAD and not weight.retains_grad:
        raise AttributeError(  # so that `hasattr` works, which torch's compiler uses
            f"`{weight.weight_name}` has no `grad` on a client: the layer holds singular terms there, which have the "
            f"gradients. Keep the layer dense: `LayerChoices(exclude=[{weight.layer_name!r}])`."
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
                return _named(result, weight.weight_name, weight.layer_name)
    if type(result) in (list, tuple):
        return type(result)(_protected(part, weights) for part in result)
    return result


def _named(tensor: Tensor, weight_name: str, layer_name: str) -> ComputedWeight:
    weight = as_subclass(tensor, ComputedWeight)
    weight.weight_name, weight.layer_name = weight_name, layer_name
    return weight
