"""Parameters that the user's code updates instead of an optimizer: those of a teacher, a target network, an average."""

from __future__ import annotations

from torch import nn

from lightning_spectral.arguments import as_patterns, matches_any


def averaged_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that need no gradient and match a pattern in the module's ``averaged_parameters``.

    They travel with every download and every upload, and are averaged as floating-point buffers are.

    Example:
        >>> module = nn.ModuleDict({"student": nn.Linear(2, 1), "teacher": nn.Linear(2, 1).requires_grad_(False)})
        >>> module.averaged_parameters = ["teacher.*"]
        >>> sorted(averaged_parameters(module))
        ['teacher.bias', 'teacher.weight']
    """
    if not (patterns := getattr(module, "averaged_parameters", ())):
        return frozenset()
    frozen = (name for name, parameter in module.named_parameters() if not parameter.requires_grad)
    return frozenset(name for name in frozen if matches_any(name, patterns))


def check_averaged_parameters(module: nn.Module) -> None:
    """Check the patterns in a module's ``averaged_parameters``.

    Raises:
        ValueError: If one matches no parameter, or one that needs a gradient.
    """
    for pattern in as_patterns("averaged_parameters", getattr(module, "averaged_parameters", ())):
        found = [p.requires_grad for name, p in module.named_parameters() if matches_any(name, [pattern])]
        if not found:
            raise ValueError(
                f"`averaged_parameters`: {pattern!r} matches no parameter of {type(module).__name__}; give patterns of "
                "names such as 'teacher.*'."
            )
        if any(found):
            raise ValueError(
                f"`averaged_parameters`: {pattern!r} matches parameters that need a gradient, which are averaged "
                "anyway; call `requires_grad_(False)` on a module that your own code updates."
            )
