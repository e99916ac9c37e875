"""What a run does with the buffers of a module, and with parameters that the user's code updates like buffers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_spectral.arguments import OneOf, as_patterns, check_matches, first_match, matches_any
from lightning_spectral.functional.checks import all_names, has_values, named_by_any
from lightning_spectral.protocol.records import Tensors

Rule = Literal["mean", "min", "max", "server"]
Rules = Mapping[str, Rule]
SIGNS: Mapping[str, int] = {"min": -1, "max": 1}
_ASKED, _VALUES = "as asked", "by its initial values"


@dataclass(frozen=True, eq=False)
class BufferRules:
    """The rules of a module's buffers, as they hold for a whole run; a buffer without one keeps the server's value.

    They also know which parameters and buffers stay with clients.

    Attributes:
        mean: Names of the buffers of which clients send back all or some entries to be averaged.
        limits: Names of the buffers of which all or some entries follow an extreme, each with its signs, int8: -1 for
            entries that follow the smallest value of the clients that report, 1 for the largest, 0 for the mean. They
            are a scalar if all entries follow the same rule, otherwise of the buffer's shape.
        decided: What followed from initial values that were not finite, as plain values or signs, for checkpoints.
        asked: Names of the buffers about which the user, or a filter, has said something.
        stays: Names of the parameters and buffers that stay with clients: sent, but neither sent back nor averaged.
    """

    mean: frozenset[str] = frozenset()
    limits: Tensors = field(default_factory=dict)
    decided: Mapping[str, str | Tensor] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()

    @property
    def decisions(self) -> dict[str, Mapping[str, str | Tensor]]:
        """What a resumed run is told, for `buffer_rules`; empty if nothing followed from initial values."""
        return {"buffers": dict(self.decided)} if self.decided else {}

    @property
    def returned(self) -> frozenset[str]:
        """Names of the buffers that are sent back."""
        return self.mean.union(self.limits)

    def averaged(self, tensors: Tensors, where: Tensors | None = None) -> Tensors:
        """Named tensors without the buffers that are not averaged, and with zeros for single entries that are not.

        Args:
            tensors: Tensors of the server's module, or those that are sent.
            where: For each of which a client holds a part, the places of its entries in the flattened whole one.

        Example:
            >>> module = nn.Module()
            >>> module.register_buffer("low", torch.tensor(torch.inf))
            >>> module.register_buffer("mask", torch.tensor([0.5, -torch.inf]))
            >>> buffer_rules(module).averaged(dict(module.named_buffers()))
            {'mask': tensor([0.5000, 0.0000])}
        """
        kept = {name: tensor for name, tensor in tensors.items() if name in self.mean or name not in self.limits}
        for name in self.limits.keys() & kept.keys():
            signs = self.limits[name]
            if where and name in where:
                signs = signs.reshape(-1)[where[name].to(signs.device)].view(kept[name].shape)
            kept[name] = kept[name].masked_fill(signs != 0, 0.0)
        return kept

    def only(self, names: frozenset[str]) -> BufferRules:
        """These rules for some buffers; all others keep the server's value."""
        limits = {name: signs for name, signs in self.limits.items() if name in names}
        decided = {name: found for name, found in self.decided.items() if name in names}
        return replace(self, mean=self.mean & names, limits=limits, decided=decided)


NO_RULES = BufferRules()


def as_rules(argument: str, rules: object) -> dict[str, Rule]:
    """Check rules, by patterns of the names of buffers, and return them in a plain dictionary.

    Example:
        >>> as_rules("buffers", {"*.low": "min"})
        {'*.low': 'min'}
        >>> as_rules("buffers", {"*.low": "median"})
        Traceback (most recent call last):
        ValueError: `buffers['*.low']` must be 'mean', 'min', 'max' or 'server', got 'median'.
    """
    if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
        raise ValueError(
            f"`{argument}` must map patterns of names to rules, got {rules!r}; write {argument}={{'*.low': 'min'}}."
        )
    one_of = OneOf(get_args(Rule))
    return {pattern: one_of(f"{argument}[{pattern!r}]", rule) for pattern, rule in rules.items()}


def buffer_rules(
    module: nn.Module,
    rules: Rules | None = None,
    decisions: Mapping[str, Any] | None = None,
    stays: Collection[str] = (),
) -> BufferRules:
    """Decide what a run does with each buffer of a module.

    A user's rules come first. Of the other buffers, persistent ones of floating-point numbers are averaged, except for
    entries that are infinite when a fit starts, as running limits are: +inf follows the clients' minimum ever after,
    and -inf their maximum. So an attention mask stays as it is. A buffer that holds NaN keeps the server's value, as do
    all others. Buffers without values count as finite.

    Args:
        module: The server's module.
        rules: The user's rules by patterns of names; the first pattern that matches a name counts.
        decisions: For a resumed run, what includes the `BufferRules.decisions` of the run that it resumes.
        stays: Names of the parameters and buffers that stay with clients.

    Raises:
        ValueError: If a pattern matches no buffer, or a buffer cannot follow its rule.

    Example:
        >>> module = nn.BatchNorm1d(2)
        >>> module.register_buffer("low", torch.tensor([torch.inf, torch.inf]))
        >>> module.register_buffer("mask", torch.tensor([0.5, -torch.inf]))
        >>> found = buffer_rules(module, {"num_batches_tracked": "max"})
        >>> sorted(found.mean), {name: signs.tolist() for name, signs in found.limits.items()}
        (['mask', 'running_mean', 'running_var'], {'num_batches_tracked': 1, 'low': -1, 'mask': [0, 1]})
    """
    names = [name for name, _ in module.named_buffers()]
    known = all_names(module)
    check_matches("buffers", rules or {}, (alias for name in names for alias in known[name]), "buffer")
    rules = {**{name: "server" for name in names if name in stays}, **(rules or {})}
    mean, limits, by_values = set[str](), dict[str, Tensor](), dict[str, str | Tensor]()
    for name, buffer, rule, why in _decide(module, rules, (decisions or {}).get("buffers", {})):
        if why == _VALUES:
            by_values[name] = rule
        signs = torch.tensor(SIGNS.get(rule, 0), dtype=torch.int8) if isinstance(rule, str) else rule
        if bool((signs != 0).any()):
            limits[name] = signs.to(buffer.device)
        if not (isinstance(rule, str) and rule == "server") and bool((signs == 0).any()):
            mean.add(name)
    asked = frozenset(name for name in names if _rule_of(known[name], rules) is not None)
    return BufferRules(frozenset(mean), limits, by_values, asked, frozenset(stays))


def buffer_policies(module: nn.Module, rules: Rules | None = None) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield each buffer's name, its shape and what a federated run that starts now does with it.

    Example:
        >>> [(name, policy) for name, _, policy in buffer_policies(nn.BatchNorm1d(2))][1:]
        [('running_var', 'averaged'), ('num_batches_tracked', "the server's: not a floating-point number")]
    """
    unit = set(unit_vectors(module))
    for name, buffer, rule, why in _decide(module, rules or {}, {}):
        yield name, tuple(buffer.shape), _policy(rule, why, name in unit)


def _decide(
    module: nn.Module, rules: Rules, decided: Mapping[str, str | Tensor]
) -> Iterator[tuple[str, Tensor, str | Tensor, str]]:
    """Yield each buffer's name, itself, its rule, or the signs of its entries, and the reason."""
    persistent, known = module.state_dict(keep_vars=True).keys(), all_names(module)
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise ValueError(
                f"Sparse buffers cannot be sent to clients: `{name}` is {buffer.layout}; register `{name}` as "
                "`.to_dense()` and call `.to_sparse()` where you use it, or keep it in a plain attribute, not a buffer."
            )
        if (asked := _rule_of(known[name], rules)) is not None:
            _check_possible(name, buffer, asked, name in persistent)
            yield name, buffer, asked, _ASKED
        elif not buffer.is_floating_point():
            yield name, buffer, "server", "not a floating-point number"
        elif buffer.itemsize == 1:
            yield name, buffer, "server", "eight bits are too few for a mean"
        elif name not in persistent:
            yield name, buffer, "server", "no checkpoint holds it"
        elif name in decided:
            yield name, buffer, decided[name], _VALUES
        elif _is_finite(buffer):
            yield name, buffer, "mean", ""
        else:
            signs = buffer.isneginf().to(torch.int8) - buffer.isposinf().to(torch.int8)
            rule = next((rule for rule, sign in SIGNS.items() if bool((signs == sign).all())), signs)
            yield name, buffer, "server" if bool(buffer.isnan().any()) else rule, _VALUES


def _rule_of(names: Sequence[str], rules: Rules) -> Rule | None:
    """The rule for a buffer that has several names if layers share it; these must not contradict each other."""
    found = [(name, rule) for name in names if (rule := first_match(name, rules)) is not None]
    for name, rule in found:
        if rule != found[0][1]:
            raise ValueError(
                f"`buffers` gives {found[0][1]!r} to `{found[0][0]}` and {rule!r} to `{name}`, which are one tensor; "
                "give both the same."
            )
    return found[0][1] if found else None


def _check_possible(name: str, buffer: Tensor, rule: Rule, persistent: bool) -> None:
    if rule == "server":
        return
    asked = f"`buffers` gives {rule!r} to `{name}`, which"
    if not persistent:
        raise ValueError(
            f"{asked} is not persistent, so that a resumed run would lose it; register it as persistent, or write "
            "'server'."
        )
    if buffer.is_floating_point() and buffer.itemsize == 1:
        raise ValueError(f"{asked} is of type {buffer.dtype}, which torch does not compare or add; write 'server'.")
    if rule == "mean" and not buffer.is_floating_point():
        raise ValueError(f"{asked} is of type {buffer.dtype} and has no mean; write 'min', 'max' or 'server'.")
    if rule == "mean" and not _is_finite(buffer):
        raise ValueError(f"{asked} holds values that are not finite and has no mean; write 'min', 'max' or 'server'.")
    if buffer.is_complex():
        raise ValueError(f"{asked} holds complex numbers, none of which is the smallest; write 'server'.")


def _is_finite(buffer: Tensor) -> bool:
    return not has_values(buffer) or bool(torch.isfinite(buffer).all())


def _policy(rule: str | Tensor, why: str, is_unit: bool) -> str:
    if isinstance(rule, Tensor):
        extremes = {1: "largest where -inf", -1: "smallest where inf"}
        return ", ".join([*(text for sign, text in extremes.items() if sign in rule), *["else averaged"] * (0 in rule)])
    if rule == "mean":
        return "averaged, then scaled to norm 1" if is_unit else "averaged"
    if rule == "server":
        return f"the server's: {'it holds NaN' if why == _VALUES else why}"
    return {"min": "the clients' smallest", "max": "the clients' largest"}[rule]


def unit_vectors(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that hold the singular vectors of both of torch's spectral norms.

    The mean of unit vectors is shorter than 1, and the estimated norm of the weight would shrink with it.
    """
    for path, part in module.named_modules():
        names = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        if isinstance(part, _SpectralNorm):
            names.append("")
        for name, vector in itertools.product(names, ("_u", "_v")):
            yield f"{path}.{name}{vector}" if path else f"{name}{vector}"


def averaged_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that need no gradient and match a pattern in the module's ``averaged_parameters``.

    They are sent with every download and every upload, and averaged as floating-point buffers are.

    Example:
        >>> module = nn.ModuleDict({"student": nn.Linear(2, 1), "teacher": nn.Linear(2, 1).requires_grad_(False)})
        >>> module.averaged_parameters = ["teacher.*"]
        >>> sorted(averaged_parameters(module))
        ['teacher.bias', 'teacher.weight']
    """
    if not (patterns := getattr(module, "averaged_parameters", ())):
        return frozenset()
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return frozenset(frozen.intersection(named_by_any(module, lambda name: matches_any(name, patterns))))


def check_averaged_parameters(module: nn.Module) -> None:
    """Raise ``ValueError`` if a pattern in `averaged_parameters` matches no parameter, or one that is trained."""
    for pattern in as_patterns("averaged_parameters", getattr(module, "averaged_parameters", ())):
        named = module.named_parameters(remove_duplicate=False)
        found = [parameter.requires_grad for name, parameter in named if matches_any(name, [pattern])]
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
