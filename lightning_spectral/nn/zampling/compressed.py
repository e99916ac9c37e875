"""The weights of a module that Zampling replaces, and the influence matrix that generates them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_spectral.arguments import (
    Number,
    OneOf,
    Rule,
    Whole,
    as_patterns,
    check_fields,
    check_matches,
    flag,
    matches_any,
)
from lightning_spectral.errors import check_is
from lightning_spectral.functional.zampling import InfluenceMatrix, LayerRows, Values
from lightning_spectral.nn.plan.layer_types import BY_NAME, is_affine, qualified_name
from lightning_spectral.nn.torch_hooks import has_gradient_hook, weight_hooks
from lightning_spectral.protocol.rng import derived_generator, derived_seed

Init = Literal["he", "paper"]


def _one_factor(argument: str, value: Any) -> Any:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        raise TypeError(
            f"`{argument}` is one number for all clients, got {value!r}: bits of different matrices cannot be averaged."
        )
    return Number(at_least=1, hint="it is the number of weights for each probability")(argument, value)


# The rules for the settings that `Zampling` shares with `Compression`, by the names that users know.
COMPRESSION: Mapping[str, Rule] = MappingProxyType(
    {
        "compression": _one_factor,
        "degree": Whole(at_least=1, optional=True),
        "init": OneOf(get_args(Init)),
        "sampled": flag,
        "values": OneOf(get_args(Values)),
        "memory": Whole(at_least=0),
        "gain": Number(above=0),
    }
)
DOWNLINK_BITS = Whole(at_least=1, at_most=16, optional=True)


@dataclass(frozen=True)
class CompressedWeight:
    """One parameter that becomes some rows of Qz."""

    name: str  # the first one if it is tied
    shape: tuple[int, ...]
    fan_in: int  # inputs to each output of its layer; 2 for embeddings, whose initial variance is then 1

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Compression:
    """What determines Q except the module and the seed, as in `zample`; ``factor`` is its ``compression``."""

    factor: float
    degree: int | None = 10
    init: Init = "he"
    sampled: bool = True
    values: Values = "normal"
    exclude: Sequence[str] = ()
    memory: int = 2**30
    gain: float = 1.0

    def __post_init__(self) -> None:
        rules = dict(COMPRESSION)
        factor = rules.pop("compression")
        check_fields(
            self,
            factor=lambda _, value: factor("compression", value),
            exclude=as_patterns,
            **rules,
        )
        if self.degree is None and self.factor != 1.0:
            raise ValueError(
                f"With `degree=None` each weight has a probability of its own, so `compression` must be 1, got "
                f"{self.factor!r}; give a degree, such as 10, to compress."
            )

    def variance(self, fan_in: int) -> float:
        """Variance of the entries of Q in the rows of a layer.

        With a gain of 1 the forward pass has weights of variance 2 / fan_in, because d entries are multiplied by values
        of mean square 1/2 (bits) or 1/3 (uniform probabilities). The paper prints the latter for both (Lemma 2.1).

        Example:
            >>> Compression(32, degree=10).variance(fan_in=100), Compression(32, init="paper").variance(100)
            (0.004, 0.006)
        """
        mean_square_inverse = 2 if self.sampled and self.init == "he" else 3
        return self.gain**2 * 2 * mean_square_inverse / ((self.degree or 1) * fan_in)

    def num_probs(self, weights: Sequence[CompressedWeight]) -> int:
        return math.ceil(sum(weight.num_values for weight in weights) / self.factor)

    def first_probs(self, weights: Sequence[CompressedWeight], seed: int) -> Tensor:
        """The probabilities that training starts from, uniform in [0, 1], shape ``(n,)``, float32."""
        generator = derived_generator(seed, "probabilities")
        return torch.rand(self.num_probs(weights), dtype=torch.float32, generator=generator)

    def matrix(self, weights: Sequence[CompressedWeight], seed: int) -> InfluenceMatrix:
        """Q, whose rows depend on the seed, the weight's name and n only."""
        layers = tuple(
            LayerRows(derived_seed(seed, "influence", w.name), w.num_values, math.sqrt(self.variance(w.fan_in)))
            for w in weights
        )
        return InfluenceMatrix(layers, self.num_probs(weights), self.degree, self.values, self.memory)

    def weights_of(self, module: nn.Module) -> tuple[CompressedWeight, ...]:
        """The parameters that are compressed: weights and biases of affine layers, and embeddings.

        Parameters that are frozen or have a gradient hook are left as they are. Parameters of normalisation layers, of
        parametrised layers and of modules unknown to this package are sent whole: a scale that should be near 1 cannot
        be a random number around 0.
        """
        check_is("module", module, nn.Module)
        named = dict(module.named_parameters(remove_duplicate=False))
        check_matches("exclude", self.exclude, named, "parameter")
        found = {weight.name: weight for weight in self._weights(module)}
        if not found:
            raise ValueError(
                f"{type(module).__name__} has no trainable weight of an affine layer to compress; unfreeze some."
            )
        return tuple(found.values())

    def _weights(self, module: nn.Module) -> Iterator[CompressedWeight]:
        first_name = {id(p): name for name, p in module.named_parameters()}
        named = module.named_parameters(remove_duplicate=False)
        dense = {id(p) for name, p in named if matches_any(name, self.exclude)} | _of_special_embeddings(module)
        dense |= {id(p) for p in module.parameters() if has_gradient_hook(p)}
        for path, owner in module.named_modules():
            if not (is_affine(owner) and not weight_hooks(owner)) and not isinstance(owner, nn.Embedding):
                continue
            fan_in: int | None = None
            for own_name, parameter in owner.named_parameters(recurse=False):
                name = f"{path}.{own_name}" if path else own_name
                if not parameter.requires_grad or id(parameter) in dense:
                    continue
                if parameter.ndim >= 2:
                    fan_in = _fan_in(owner, parameter)
                elif not (parameter.ndim == 1 and fan_in is not None and "bias" in own_name):
                    continue
                if not parameter.is_floating_point():
                    raise ValueError(
                        f"{name!r} is of type {parameter.dtype}; only floating-point weights can be compressed. "
                        "Keep it dense with `exclude=`."
                    )
                if getattr(getattr(type(owner), own_name, None), "fset", parameter) is None:
                    raise ValueError(
                        f"{name!r} is read through a property of {type(owner).__name__} without a setter, so it "
                        "cannot be replaced; keep it dense with `exclude=`."
                    )
                yield CompressedWeight(first_name[id(parameter)], tuple(parameter.shape), fan_in)


def _of_special_embeddings(module: nn.Module) -> set[int]:
    """Tables that always stay dense: padding rows must stay zero, and sparse gradients do not form a vector."""
    special = (m for m in module.modules() if isinstance(m, nn.Embedding) and (m.padding_idx is not None or m.sparse))
    return {id(embedding.weight) for embedding in special}


def _fan_in(owner: nn.Module, weight: nn.Parameter) -> int:
    if isinstance(owner, nn.Embedding):
        return 2
    if qualified_name(owner) in BY_NAME:  # stored transposed
        return weight.shape[0]
    if isinstance(owner, _ConvNd) and owner.transposed:
        # An input reaches k outputs, s apart: an output has k / s inputs of each channel, on average.
        taps = math.prod(max(1.0, k / s) for k, s in zip(owner.kernel_size, owner.stride, strict=True))
        return math.ceil(weight.shape[0] / owner.groups * taps)
    return math.prod(weight.shape[1:])


@dataclass(frozen=True)
class Compressions(Sequence[float]):
    """The compressions that differ in their number of probabilities n, from the fewest to one for each of m weights.

    Example:
        >>> list(Compressions(num_weights=6, fewest=4))
        [1.5, 1.2, 1.0]
    """

    num_weights: int
    fewest: int

    def __len__(self) -> int:
        return max(0, self.num_weights - self.fewest + 1)

    def __getitem__(self, index: Any) -> Any:
        """The smallest factor for which m / factor, rounded up, is n."""
        num_probs = range(self.fewest, self.num_weights + 1)[index]
        factor = self.num_weights / num_probs
        while math.ceil(self.num_weights / factor) > num_probs:  # rounded down
            factor = math.nextafter(factor, math.inf)
        return factor
