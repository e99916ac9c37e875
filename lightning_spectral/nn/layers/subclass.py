"""Gives a tensor a class of its own, also while its operations are counted or compiled."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

SubclassT = TypeVar("SubclassT", bound=Tensor)
BEFORE_2_6 = torch.__version__ < "2.6"  # a `TorchVersion`, which compares numbers


def as_subclass(tensor: Tensor, subclass: type[SubclassT]) -> SubclassT:
    """The tensor as an instance of a subclass, with its gradients.

    torch before 2.6 can do so neither inside a `TorchDispatchMode`, such as a counter of operations, nor in a compiled
    function. Later versions switch off such modes for this call themselves.

    Example:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> class Named(Tensor):
        ...     pass
        >>> with FlopCounterMode(display=False):
        ...     type(as_subclass(torch.ones(2) + 1, Named)).__name__
        'Named'
    """
    return _outside_of_modes(tensor, subclass) if BEFORE_2_6 else tensor.as_subclass(subclass)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_of_modes(tensor: Tensor, subclass: type[SubclassT]) -> SubclassT:
    with torch._C._DisableTorchDispatch():
        return tensor.as_subclass(subclass)
