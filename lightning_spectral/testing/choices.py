"""What a user sees of a choice before anything runs: it is compared and printed, and refuses what it cannot use."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.protocol.exchange import copy_module


def check_choice(algorithm: Any) -> None:
    """Check that a choice equals its copies, and that wrong values of its fields are refused by their names."""
    assert copy.deepcopy(algorithm) == algorithm, (
        f"{algorithm!r}: a copy is not equal to it, so a resumed run could not tell that it is the same; make it a "
        "frozen dataclass."
    )
    for field in dataclasses.fields(algorithm):
        if field.init:
            _check_argument(algorithm, field.name, _WrongValue())
            if type(getattr(algorithm, field.name)) is float:
                _check_argument(algorithm, field.name, math.nan)


class _WrongValue:
    def __repr__(self) -> str:
        return "<an object of no use>"


def _check_argument(algorithm: Any, name: str, value: Any) -> None:
    where = f"{algorithm!r} with {name}={value!r}"
    refusal = _refusal(lambda: dataclasses.replace(algorithm, **{name: value}))
    assert refusal is not None, (
        f"{where}: it was not refused; call `lightning_spectral.arguments.check_fields` in `__post_init__`."
    )
    assert isinstance(refusal, TypeError | ValueError), f"{where}: raised {refusal!r}, not a TypeError or ValueError."
    assert name in str(refusal), f"{where}: the message does not name the argument: {refusal}"


def check_frozen_module(algorithm: Algorithm, module: nn.Module) -> None:
    """Check that a module with nothing to train is either accepted, or refused with a ``ValueError`` that names it."""
    frozen: nn.Module = copy_module(module).requires_grad_(False)
    where = f"{algorithm!r} with a module in which every parameter is frozen"
    refusal = _refusal(lambda: algorithm.check(frozen))
    if refusal is None:
        return
    assert isinstance(refusal, ValueError), f"{where}: `check` raised {refusal!r}, not a ValueError."
    names = {type(frozen).__name__, type(algorithm).__name__, *dict(frozen.named_modules())} - {""}
    assert any(name in str(refusal) for name in names), (
        f"{where}: the message names neither the module, nor a layer, nor the algorithm: {refusal}"
    )


def _refusal(do: Callable[[], object]) -> Exception | None:
    try:
        do()
    except Exception as error:
        return error
    return None
