"""Checks of what a user gives to the two apps, before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_spectral.errors import check_is
from lightning_spectral.network.device.client_data import ClientData


def check_makes_modules(modules: Mapping[str, Callable[[], Any]]) -> None:
    """Raise unless each entry makes a module when it is called without arguments.

    Example:
        >>> check_makes_modules({"": nn.Linear})
        Traceback (most recent call last):
        ValueError: `module` is called without arguments, and Linear needs in_features, out_features; write a function \
that gives them, e.g. client_app(lambda: Linear(...), client).
    """
    for name, make in modules.items():
        which = f"module[{name!r}]" if name else "module"
        if isinstance(make, nn.Module) or not callable(make):
            kind = type(make).__name__
            raise TypeError(f"`{which}` must be a class or function that makes the module, got a {kind}; leave out ().")
        if needed := _needed(make):
            called = getattr(make, "__name__", "it")
            raise ValueError(
                f"`{which}` is called without arguments, and {called} needs {', '.join(needed)}; write a function that "
                f"gives them, e.g. client_app(lambda: {called}(...), client)."
            )


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def data_by_model(client: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> dict[str, ClientData]:
    """What a user's ``client(config)`` returns, by the model's name.

    Raises:
        TypeError: If it is no `ClientData`.
        ValueError: If the configuration lacks an entry that it reads.
    """
    try:
        found = client(config)
    except KeyError as error:
        entries = ", ".join(sorted(config)) or "nothing"
        raise ValueError(
            f"`client(config)` reads config[{error}], and the configuration of run and node holds {entries}; "
            "give it with `flower-supernode --node-config`."
        ) from error
    data = dict(found) if isinstance(found, Mapping) else {"": found}
    for name, one in data.items():
        check_is(f"client(config)[{name!r}]" if name else "client(config)", one, ClientData)
    return data
