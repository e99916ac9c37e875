"""A federation's weights as its users know them: under their own names, without what the federation adds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys


class UserView(pl.LightningModule):
    """Shows Lightning and its callbacks the parameters, buffers and `state_dict` of the users' modules alone.

    An algorithm's state is no weight of the model: callbacks that save, average, freeze or count weights leave it
    alone. It moves with the module, and the federation saves it in an entry of its own.
    """

    @property
    def views(self) -> Mapping[str, pl.LightningModule]:
        """The users' modules, by what precedes the names of their weights."""
        raise NotImplementedError

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        options = recurse, remove_duplicate
        return chain.from_iterable(m.named_parameters(_joined(prefix, own), *options) for own, m in self.views.items())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        options = recurse, remove_duplicate
        return chain.from_iterable(m.named_buffers(_joined(prefix, own), *options) for own, m in self.views.items())

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """What the users' own ``state_dict`` return."""
        if (only := self.views.get("")) is not None:
            return only.state_dict(*args, **options)
        prefix, found = options.pop("prefix", ""), options.pop("destination", OrderedDict())
        for own, module in self.views.items():
            found.update({f"{prefix}{own}.{name}": value for name, value in module.state_dict(**options).items()})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights with the users' own ``load_state_dict``; of several, each has its own ``strict_loading``."""
        options = {"assign": True} if assign else {}  # users who override this rarely know it
        if (only := self.views.get("")) is not None:
            return only.load_state_dict(state_dict, strict, **options)
        unexpected = [name for name in state_dict if not name.startswith(tuple(f"{own}." for own in self.views))]
        if strict and unexpected:
            raise RuntimeError(f"The weights {', '.join(unexpected)} belong to none of {', '.join(self.views)}.")
        missing: list[str] = []
        for own, module in self.views.items():
            part = {name.removeprefix(f"{own}."): value for name, value in _below(state_dict, f"{own}.")}
            found = module.load_state_dict(part, strict and module.strict_loading, **options)
            missing += [f"{own}.{name}" for name in found.missing_keys]
            unexpected += [f"{own}.{name}" for name in found.unexpected_keys]
        return _IncompatibleKeys(missing, unexpected)

    @property
    def strict_loading(self) -> bool:
        """Whether all weights must be found, which the only module decides."""
        only = self.views.get("")
        return super().strict_loading if only is None else only.strict_loading

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        for module in self.views.values():
            module.strict_loading = strict_loading


def _joined(prefix: str, own: str) -> str:
    return ".".join(filter(None, (prefix, own)))


def _below(state_dict: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in state_dict.items() if name.startswith(prefix)]
