"""Local Zampling, without federation: any trainer can train the scores of a module as it would train its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import check_is
from lightning_spectral.functional.zampling.influence import Values
from lightning_spectral.functional.zampling.links import Clip, Link
from lightning_spectral.nn.zampling.compressed import Compression, Init
from lightning_spectral.nn.zampling.local_weights import LocalWeights
from lightning_spectral.nn.zampling.sampled_weights import NAME

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
    include: Sequence[str] = (),
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
        include: Patterns of additional parameters, with two or more dimensions, to compress.
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
    choices = Compression(compression, degree, init, sampled, values, exclude, include, memory, gain)
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
            weights.hold(weights.draw_bits(generator))
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
