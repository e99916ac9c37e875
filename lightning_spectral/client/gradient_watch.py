"""Records which sharded layers a client's gradients reach, and checks that they reach no weight of the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

WATCHED_ROUNDS = 10  # a single client may not use every layer, e.g. an expert or one that is dropped at random


class GradientWatch:
    """Records which parameters receive a gradient, until its ``with`` block ends.

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

    @property
    def unreached(self) -> tuple[str, ...]:
        """Names of the layers without a gradient."""
        return tuple(name for name, reached in self.reached.items() if not reached)


def check_untouched(server: nn.Module) -> None:
    """Check that no client's gradient reached the server's module.

    Raises:
        ValueError: If one of its parameters has a gradient.
    """
    if leaked := [name for name, parameter in server.named_parameters() if parameter.grad is not None]:
        raise ValueError(
            f"A client's `training_step` reaches the server's own weights ({', '.join(leaked)}) by a variable outside "
            "of the module or a list of its parameters, which copies of the module do not follow; use `self...` in "
            "the step instead."
        )
