"""Checks of the arguments of a `MultiModelModule`, whose errors name the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import check_is
from lightning_spectral.plugin.module import FederatedModule

PROCESSORS = Whole(at_least=1, hint="leave out clients that train nothing")


def check_models(models: Any) -> None:
    """Check the models of a federation: their types, names and participation, and that they share no weights."""
    check_is("models", models, Mapping)
    taken = {*vars(nn.ModuleDict()), *dir(nn.ModuleDict), "fl"}
    if not models:
        raise ValueError("`models` is empty; give a FederatedModule for each model, by name.")
    for name, model in models.items():
        check_is(f"models[{name!r}]", model, FederatedModule)
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"A model's name must be an identifier, as it begins those of its metrics, got {name!r}.")
        if name in taken:
            raise ValueError(f"A model cannot be named {name!r}, which has another meaning; give it another name.")
        if model.participation is not None:
            raise ValueError(
                f"MultiModelModule decides who trains which model, but {name!r} has {model.participation} of its own; "
                "leave out its `clients_per_round` and `participation`."
            )
    _check_nothing_is_shared(models)


def _check_nothing_is_shared(models: Mapping[str, FederatedModule]) -> None:
    owner: dict[int, str] = {}
    for name, model in models.items():
        for tensor in {*model.module.parameters(), *model.module.buffers()}:
            other = owner.setdefault(id(tensor), name)
            if other != name:
                raise ValueError(
                    f"The models {other!r} and {name!r} share weights, so each would train the other's; give each "
                    "its own: copy.deepcopy(layer)."
                )


def plain_unavailable(
    unavailable: Mapping[int, Sequence[str]], models: Mapping[str, Any]
) -> dict[int, tuple[str, ...]]:
    """Check which models clients cannot train, by client, and return them."""
    check_is("unavailable", unavailable, Mapping)
    client_id = Whole(at_least=0, hint="its keys are clients' ids")
    plain: dict[int, tuple[str, ...]] = {}
    for client, names in unavailable.items():
        client = client_id("unavailable", client)
        if isinstance(names, str) or not isinstance(names, Iterable):
            remedy = f"; write {{{client}: [{names!r}]}}" if isinstance(names, str) else ""
            raise TypeError(f"`unavailable` lists models of a client, got {names!r}{remedy}.")
        plain[client] = names = tuple(names)
        if unknown := [name for name in names if name not in models]:
            raise ValueError(f"`unavailable` names {unknown} for client {client}; the models are {sorted(models)}.")
    return plain
