"""``Trainer(strategy="client_parallel")``: the names of the strategy, known to Lightning as soon as it is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_spectral.plugin import ClientParallelStrategy

STRATEGIES = "lightning.pytorch.strategies"
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register_strategies() -> None:
    """Register the names with Lightning now, or when it is imported: this package does not import it before it must."""
    if STRATEGIES in sys.modules:
        _register(sys.modules[STRATEGIES])
    else:
        sys.meta_path.insert(0, _AwaitsLightning())


class _AwaitsLightning(MetaPathFinder):
    """Finds Lightning's strategies as Python does, registers the names once they are imported, and withdraws."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != STRATEGIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(strategies: ModuleType) -> None:
    for suffix, start_method in START_METHODS.items():
        strategies.StrategyRegistry.register(
            f"client_parallel{suffix}",
            _client_parallel,
            description=f"Clients of a round spread over processes, started by '{start_method}'",
            start_method=start_method,
        )


def _client_parallel(**options: Any) -> ClientParallelStrategy:
    from lightning_spectral.plugin import ClientParallelStrategy

    return ClientParallelStrategy(**options)
