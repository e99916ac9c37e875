"""Checks that gradients reach every sharded layer, and no weight of the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn


class GradientWatch:
    """Records which parameters receive a gradient, until the block that it opens ends.

    Args:
        parameters: The parameters to watch, by the name of the layer that each belongs to.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.reached = dict.fromkeys(parameters, False)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._record, name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    def _record(self, name: str, parameter: Tensor) -> None:
        self.reached[name] = True

    def __enter__(self) -> GradientWatch:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def check(self, server: nn.Module) -> None:
        """Check what the hooks recorded.

        Args:
            server: The server's module, whose parameters must not receive gradients from clients.

        Raises:
            ValueError: If a watched parameter got no gradient, or one of ``server`` did.
        """
        if missed := [name for name, reached in self.reached.items() if not reached]:
            raise ValueError(
                "Layers that would be sharded do not take part in the forward pass of `training_step`: "
                f"{', '.join(missed)}. Keep them dense with `exclude=`, or remove them from the module."
            )
        if leaked := [name for name, parameter in server.named_parameters() if parameter.grad is not None]:
            raise ValueError(
                f"A client's `training_step` reaches the server's own weights ({', '.join(leaked)}): the module keeps "
                "them in a closure or a lambda, which copies do not follow; use `self...` in the step instead."
            )
