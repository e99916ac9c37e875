"""Local Zampling, without federation: any trainer can train the scores of a module as it would train its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import check_is
from lightning_spectral.functional.zampling import Clip, Link, Values, draw_bits
from lightning_spectral.nn.zampling import NAME, CompressedWeight, Compression, Init, SampledWeights
from lightning_spectral.protocol.rng import derived_generator, derived_seed


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
