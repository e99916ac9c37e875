"""What a model keeps from round to round besides its weights: one object, saved and loaded as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Lasts(Protocol):
    """Something with a state that lasts: a module, a filter's end at the server, a sampler's cohorts."""

    def state_dict(self) -> Any:
        """The state as of the last finished round; empty if there is none."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore what `state_dict` returned."""


@dataclass(eq=False)
class Lasting:
    """The parts whose state lasts, by name.

    Parts come and go: a fit makes its own, which go on from the state of those of the same name, of the fit before or
    of a checkpoint. States of parts that are not there wait for them, and are saved with the others.

    Attributes:
        parts: The parts that are there.

    Example:
        >>> import torch
        >>> lasting, line = Lasting(), torch.nn.Linear(1, 1).requires_grad_(False)
        >>> lasting.load_state_dict({"algorithm": {"weight": torch.ones(1, 1), "bias": torch.ones(1)}})
        >>> lasting.attach("algorithm", line)
        >>> float(line.bias), sorted(lasting.state_dict())
        (1.0, ['algorithm'])
    """

    parts: dict[str, Lasts] = field(default_factory=dict, init=False)
    _waiting: dict[str, Any] = field(default_factory=dict, init=False)

    def attach(self, name: str, part: Lasts) -> None:
        """Add a part, which goes on from the state that is known under its name."""
        if self.parts.get(name) is not part:
            self.detach([name])
        self.parts[name] = part
        if name in self._waiting:
            part.load_state_dict(self._waiting.pop(name))

    def detach(self, names: Collection[str]) -> None:
        """Remove some parts; their state waits for others of their names."""
        for name in [name for name in names if name in self.parts]:
            if state := self.parts.pop(name).state_dict():
                self._waiting[name] = state

    def drop(self, names: Collection[str]) -> list[str]:
        """Forget parts and their states; return the names of those that had one."""
        self.detach(names)
        return [name for name in names if self._waiting.pop(name, None) is not None]

    def state_dict(self) -> dict[str, Any]:
        """All states that are not empty, by the names of the parts."""
        own = {name: state for name, part in self.parts.items() if (state := part.state_dict())}
        return {**self._waiting, **own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore all states; a part without one keeps its own."""
        self._waiting = dict(state_dict)
        for name, part in self.parts.items():
            self.attach(name, part)


@dataclass(eq=False)
class Kept:
    """Plain values that last as they are.

    Example:
        >>> kept = Kept()
        >>> kept.values = {"missing_rank": {"net.0": 3}}
        >>> kept.state_dict()
        {'missing_rank': {'net.0': 3}}
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.values = dict(state_dict)
