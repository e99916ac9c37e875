"""Checks that the user's optimizer is plain SGD, so that a change is the learning rate times a sum of gradients."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Optimizer

UNLIKE = ("momentum", "dampening", "nesterov", "maximize")  # options that make a step something else


def check_plain_sgd(template: Optimizer, server: nn.Module) -> None:
    """Check that one optimizer steps all trainable parameters, by the learning rate times the gradient.

    Args:
        template: One of the user's optimizers.
        server: The server's module.

    Raises:
        ValueError: If it is not SGD, has momentum or several learning rates, or leaves out a trainable parameter.
    """
    if type(template) is not SGD:
        raise ValueError(
            f"SCAFFOLD needs plain SGD, got {type(template).__name__}; use torch.optim.SGD without momentum, and an "
            "adaptive optimizer at the server, e.g. FedAdam."
        )
    for name, value in ((name, group[name]) for group in template.param_groups for name in UNLIKE):
        if value:
            raise ValueError(
                f"SCAFFOLD needs plain SGD, got {name}={value!r}; leave it out. A server may have momentum: FedAvgM."
            )
    check_one_rate({float(group["lr"]) for group in template.param_groups})
    held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
    if missing := [name for name, p in server.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ValueError(
            f"SCAFFOLD needs one optimizer for all trainable parameters, and yours does not step {', '.join(missing)}; "
            "give it all of them, or freeze the others with `requires_grad_(False)`."
        )


def check_one_rate(rates: set[float]) -> None:
    """Raise ``ValueError`` if there are several learning rates."""
    if len(rates) > 1:
        raise ValueError(
            f"SCAFFOLD needs one learning rate for all parameters, got {', '.join(map(str, sorted(rates)))}; give all "
            "parameter groups the same, in every round."
        )
