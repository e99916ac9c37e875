"""Zampling in a module: the scores that take the place of its weights, in a federation or with any trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
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
from lightning_spectral.functional.zampling import Clip, InfluenceMatrix, LayerRows, Link, Values, draw_bits
from lightning_spectral.nn.layers.terms import join
from lightning_spectral.nn.plan.layer_types import BY_NAME, has_gradient_hook, is_affine, qualified_name
from lightning_spectral.nn.torch_modules import keeping_type, weight_hooks
from lightning_spectral.protocol.rng import derived_generator, derived_seed

Init = Literal["he", "paper"]


def _one_factor(argument: str, value: Any) -> Any:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        raise TypeError(
            f"`{argument}` is one number for all clients, got {value!r}: bits of different matrices cannot be averaged."
        )
    return Number(at_least=1, hint="it is the number of weights for each probability")(argument, value)


# The rules for the settings that `Zampling` shares with `Compression`, by the names that users know.
COMPRESSION: Mapping[str, Rule] = {
    "compression": _one_factor,
    "degree": Whole(at_least=1, optional=True),
    "init": OneOf(get_args(Init)),
    "sampled": flag,
    "values": OneOf(get_args(Values)),
    "memory": Whole(at_least=0),
    "gain": Number(above=0),
}
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
        check_fields(self, factor=lambda _, value: factor("compression", value), exclude=as_patterns, **rules)
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
        first_name = {id(p): name for name, p in module.named_parameters()}
        dense = {id(p) for name, p in named.items() if matches_any(name, self.exclude) or has_gradient_hook(p)}
        for part in module.modules():  # padding rows must stay zero, and sparse gradients do not form a vector
            if isinstance(part, nn.Embedding) and (part.padding_idx is not None or part.sparse):
                dense.add(id(part.weight))
        found: dict[str, CompressedWeight] = {}
        for path, owner in module.named_modules():
            if not (is_affine(owner) and not weight_hooks(owner)) and not isinstance(owner, nn.Embedding):
                continue
            fan_in: int | None = None
            for own_name, parameter in owner.named_parameters(recurse=False):
                name = join(path, own_name)
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
                first = first_name[id(parameter)]
                found[first] = CompressedWeight(first, tuple(parameter.shape), fan_in)
        if not found:
            raise ValueError(
                f"{type(module).__name__} has no trainable weight of an affine layer to compress; unfreeze some."
            )
        return tuple(found.values())


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


NAME = "_zampling"  # of this module within the one whose weights it computes


class SampledWeights(nn.Module):
    """Replaces some parameters of a module by values that it computes from scores.

    The parameters are removed from the module, of which this one becomes ``_zampling``. Plain tensors of the same names
    take their place, so that layers compute with them as before and gradients reach the scores, the one parameter,
    shape ``(n,)``. `draw` replaces them by a new sample.
    """

    scores: nn.Parameter

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[CompressedWeight],
        matrix: InfluenceMatrix,
        link: Link,
        sampled: bool = True,
    ) -> None:
        super().__init__()
        if hasattr(module, NAME):
            raise ValueError(f"{type(module).__name__} already has an attribute {NAME!r}: it was compressed before.")
        first = module.get_parameter(weights[0].name)
        self.shapes = tuple(weight.shape for weight in weights)
        self.matrix, self.link, self.sampled = matrix, link, sampled
        index_of = {id(module.get_parameter(weight.name)): i for i, weight in enumerate(weights)}
        self._sites = tuple(  # wherever the parameters are used: owner, name, and which of the weights it is
            (owner, name, index_of[id(parameter)])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if id(parameter) in index_of
        )
        for owner, name, _ in self._sites:
            value = owner._parameters.pop(name)
            assert value is not None
            setattr(owner, name, value.detach().new_zeros(()).expand(value.shape))  # until the first draw
        self.dtype = first.dtype  # of the weights; scores have at least 32 bits, so that bits are drawn without bias
        self.scores = nn.Parameter(
            torch.zeros(matrix.num_columns, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        )
        module.add_module(NAME, self)

    @property
    def probs(self) -> Tensor:
        """Probabilities of the scores, detached, shape ``(n,)``."""
        return self.link.probs(self.scores.detach())

    @torch.no_grad()
    def set_probs(self, probs: Tensor) -> None:
        self.scores.copy_(self.link.scores(probs.to(self.scores)))

    def forward(self, inputs: Any) -> Any:
        """Return the inputs: modules that call all of their children, such as `nn.Sequential`, also call this one."""
        return inputs

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Give the module the weights of a new sample, drawn on the CPU, through which gradients reach the scores."""
        z = draw_bits(self.probs, generator) if self.sampled else self.probs
        self.put(self.combine(z))

    def combine(self, z: Tensor) -> tuple[Tensor, ...]:
        """Weights Qz, through which gradients reach the scores."""
        weights: tuple[Tensor, ...] = _Expand.apply(self.scores, z.to(self.scores.dtype), self)  # type: ignore[no-untyped-call]
        return weights

    def rest(self) -> None:
        """Detach the last sample, which frees the graph that leads from it to the scores."""
        for owner, name, _ in self._sites:
            setattr(owner, name, getattr(owner, name).detach())

    def put(self, weights: Sequence[Tensor]) -> None:
        for owner, name, i in self._sites:
            setattr(owner, name, weights[i])

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Split all entries of the weights, shape ``(m,)``, into one tensor for each weight, of the weights' type."""
        return split_weights(flat.to(self.dtype), self.shapes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SampledWeights:
        self.dtype = fn(torch.zeros(0, dtype=self.dtype, device=self.scores.device)).dtype
        super()._apply(keeping_type(fn, at_least=torch.float32), recurse)  # type: ignore[no-untyped-call]
        return self


def split_weights(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Cut one long vector into tensors of the given shapes, which share its memory."""
    ends = accumulate((torch.Size(shape).numel() for shape in shapes), initial=0)
    return tuple(flat[a:b].view(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True))


class _Expand(torch.autograd.Function):
    """Forward w = Qz, and backward Q^T grad_w, from bits to scores as the link defines."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, z: Tensor, weights: SampledWeights) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(scores)
        with torch.autocast(scores.device.type, enabled=False):
            return weights.split(weights.matrix.expand(z))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (scores,) = ctx.saved_tensors
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(scores.dtype)
        with torch.autocast(scores.device.type, enabled=False):
            of_bits = ctx.weights.matrix.pull_back(flat)
        return ctx.weights.link.gradient(scores, of_bits), None, None


class LocalWeights(SampledWeights):
    """Weights that renew themselves before they are used.

    Attributes:
        num_draws: Buffer with the number of samples that backward passes have used; the seed and k determine draw k.
        matrix_id: Buffer with a hash of Q; scores are meaningless with another Q, and are then not loaded.
    """

    num_draws: Tensor
    matrix_id: Tensor

    def __init__(
        self, module: nn.Module, weights: Sequence[CompressedWeight], compression: Compression, link: Link, seed: int
    ) -> None:
        matrix = compression.matrix(weights, seed)
        names = {owner: tuple(owner._parameters) for owner in module.modules()}
        super().__init__(module, weights, matrix, link, compression.sampled)
        self.set_probs(compression.first_probs(weights, seed))
        described = repr((matrix.layers, matrix.num_columns, matrix.degree, matrix.values))
        device = self.scores.device
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("matrix_id", torch.tensor(derived_seed(seed, "matrix", described), device=device))
        self.seed = seed
        self._names = {owner: names[owner] for owner, *_ in self._sites}  # in order, including the dense ones
        self._draw = 0  # index of the sample in use
        self._made: tuple[Any, ...] | None = None  # what the weights were made for; None if new ones are needed
        self._held = False
        owners = set(self._names)
        users = [part for part in module.modules() if not owners.isdisjoint(part.modules())]
        self._handles = [user.register_forward_pre_hook(self.renew) for user in users]

    def renew(self, *_: Any) -> None:
        """Make new weights if the old ones were used up, or were made for other scores or another mode."""
        graph = torch.is_grad_enabled() and self.scores.requires_grad
        wanted = (self.training, graph, self.scores._version)
        made_for, *made = self._made or (None,)
        if self._held or (made_for is self.scores and tuple(made) == wanted):
            return
        # A checkpointed segment is computed again during the backward pass, with its original sample.
        if torch._C._current_graph_task_id() == -1:
            self._draw = int(self.num_draws)
        self._made = (self.scores, *wanted)
        drawn = self.sampled and self.training
        # what is saved for the backward pass stays out of a checkpointed segment in which the weights are made
        kept = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.inference_mode(False), torch.set_grad_enabled(graph), kept:
            z = draw_bits(self.probs, derived_generator(self.seed, "local bits", self._draw)) if drawn else self.probs
            parts = self.combine(z)
        if graph:
            assert parts[0].grad_fn is not None
            parts[0].grad_fn.register_hook(self._count if drawn else self._give_up)
        self.put(parts)

    def hold(self, z: Tensor) -> None:
        """Use the weights Qz until `release`."""
        self._held = True
        self.put(self._expanded(z))

    def release(self) -> None:
        self._held, self._made = False, None

    def restore(self, generator: torch.Generator | None) -> None:
        """Give the module parameters with the values Qp, or Qz of one sample, which do not depend on the scores."""
        for handle in self._handles:
            handle.remove()
        z = self.probs if generator is None else draw_bits(self.probs, generator)
        parameters = [nn.Parameter(part.clone()) for part in self._expanded(z)]
        self.put(parameters)
        for owner, names in self._names.items():
            found = dict(owner._parameters)
            owner._parameters.clear()
            owner._parameters.update((name, found[name]) for name in names)

    @torch.no_grad()
    def _expanded(self, z: Tensor) -> tuple[Tensor, ...]:
        return self.split(self.matrix.expand(z.to(self.scores.dtype)))

    def _count(self, *_: Any) -> None:
        self.num_draws.fill_(self._draw + 1)
        self._give_up()

    def _give_up(self, *_: Any) -> None:
        self._made = None
        self.rest()

    def _apply(self, fn: Any, recurse: bool = True) -> LocalWeights:
        self._made = None  # the weights already made would keep their device and type
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}matrix_id")
        if saved is not None and int(saved) != int(self.matrix_id):
            *_, errors = others
            errors.append("The scores belong to another matrix Q: `zample` the module with the arguments of that run.")
        else:
            super()._load_from_state_dict(state_dict, prefix, *others)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the graph of the weights, which cannot be copied; the module and its copy each make new weights.

        The hooks are copied before the weights, so this happens early enough.
        """
        self._give_up()
        return {**self.__dict__, "_held": False}


Module = TypeVar("Module", bound=nn.Module)


def zample(
    module: Module,
    compression: float = 32,
    degree: int | None = 10,
    *,
    init: Init = "he",
    sampled: bool = True,
    link: Link | None = None,
    values: Values = "normal",
    seed: int = 0,
    exclude: Sequence[str] = (),
    memory: int = 2**30,
    gain: float = 1.0,
) -> Module:
    """Train scores in place of a module's weights, with any trainer: ``module.parameters()`` then holds the scores.

    It behaves like dropout. In training mode, each forward and backward pass uses one new sample Qz in all layers; in
    evaluation mode, the expected network Qp is used. Draws are determined by ``seed`` and a counter in the
    ``state_dict``, so a resumed run repeats an uninterrupted one.

    Args:
        module: Changed in place and returned: the weights and biases of its affine layers, and its embeddings, become
            combinations of scores. Their previous values are not used.
        compression: Number of weights for each probability, m / n, at least 1.
        degree: Number d of probabilities that each weight depends on; ``None`` gives each weight a probability of its
            own, with a diagonal Q.
        init: ``"he"`` for weights with He's variance in the forward pass, ``"paper"`` for the printed 6 / (d fan_in).
        sampled: Whether training uses bits; ``False`` for probabilities, the paper's ContinuousModel.
        link: Maps scores to probabilities; ``None`` for `Clip()`.
        values: Distribution of the entries of Q, ``"normal"`` or ``"sign"``.
        seed: Seed of Q, of the first probabilities and of every draw.
        exclude: Shell-style patterns of parameter names that stay dense.
        memory: Bytes of Q that may be kept.
        gain: Factor on the standard deviation of the entries of Q.

    Note:
        Weight decay pulls scores to 0; AdamW applies some by default. A sample is used until a backward pass has
        reached the scores. So it stays the same while the scores are frozen, and the losses of several forward passes
        have to be added before one backward pass. Weights are renewed when ``module``, or a part of it that contains
        some of them, is called; code that reads a weight before any such call sees the previous ones.

    Reference:
        Villani, Natale & Mallmann-Trenn, Trading-off accuracy and communication cost in federated learning, section
        1.3.

    Example:
        >>> net = zample(nn.Sequential(nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 2)), compression=4)
        >>> [(name, tuple(parameter.shape)) for name, parameter in net.named_parameters()]
        [('_zampling.scores', (83,))]
    """
    link = Clip() if link is None else link
    check_is("link", link, Link)
    if hasattr(module, NAME):
        raise ValueError(f"{type(module).__name__} holds scores already; restore its weights with `unzample` first.")
    choices = Compression(compression, degree, init, sampled, values, exclude, memory, gain)
    LocalWeights(module, choices.weights_of(module), choices, link, Whole()("seed", seed))
    return module


def unzample(module: Module, generator: torch.Generator | None = None) -> Module:
    """Undo `zample`: plain parameters take the place of scores, under their original names.

    With a ``generator``, which draws bits z, they are the weights Qz of one sampled network; otherwise Qp, the expected
    network.

    Example:
        >>> net = unzample(zample(nn.Linear(30, 10), compression=4))
        >>> list(net.state_dict())
        ['weight', 'bias']
    """
    local_weights(module).restore(generator)
    delattr(module, NAME)
    return module


def sampled_networks(module: Module, num_samples: int, generator: torch.Generator) -> Iterator[Module]:
    """Iterate over sampled networks: ``module`` itself, in evaluation mode, with one sample Qz after another.

    When the loop ends, even early, the mode is restored and the weights are again those of `zample`.

    Example:
        >>> net = zample(nn.Linear(30, 1), compression=2)
        >>> outputs = [net(torch.ones(30)) for net in sampled_networks(net, 3, torch.Generator().manual_seed(0))]
        >>> len(set(outputs))
        3
    """
    weights = local_weights(module)
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        for _ in range(num_samples):
            weights.hold(draw_bits(weights.probs, generator))
            yield module
    finally:
        weights.release()
        for part, flag in training.items():
            part.training = flag


def local_weights(module: nn.Module) -> LocalWeights:
    """The part of a module changed by `zample` that computes its weights."""
    found = getattr(module, NAME, None)
    if not isinstance(found, LocalWeights):
        raise ValueError(f"{type(module).__name__} holds no scores; `zample` it first.")
    return found
