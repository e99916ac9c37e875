"""The rows of the papers' tables: the algorithm that each name stands for."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import lightning_spectral as ls

KeepRatio = float | Mapping[float, float]
CLIP = 10.0  # the 2024 paper's tau
SHORTCUTS = ("*.shortcut.*",)  # left dense by PriSM; we shard them too unless outputs are cut
UNBIASED_PRISM = ls.PriSM(compensation="wallenius", marginals="manly")  # with the approximation used in the paper


class Setup(Protocol):
    """One row of a table."""

    def algorithm(self, keep_ratio: KeepRatio | None, design: str | None, output_ratio: float | None) -> ls.Algorithm:
        """Return the algorithm at a keep ratio.

        Args:
            keep_ratio: Share of the terms or channels, or a mapping from it to the share of clients; ``None`` only
                for the whole model.
            design: Name of a design; ``None`` for the strategy's own.
            output_ratio: Share of the outputs that a client computes; ``None`` for all of them.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """The whole model on every client."""

    def algorithm(self, keep_ratio: KeepRatio | None, design: str | None, output_ratio: float | None) -> ls.Algorithm:
        return ls.FedAvg()


@dataclass(frozen=True)
class Width:
    """HeteroFL: the first channels of every layer; called OrigDrop in PriSM's paper."""

    def algorithm(self, keep_ratio: KeepRatio | None, design: str | None, output_ratio: float | None) -> ls.Algorithm:
        assert keep_ratio is not None, "a row of a grid lacks its keep ratio"
        return ls.WidthSharding(ls.PrefixChannels(), keep_ratio, scaler=True)


@dataclass(frozen=True)
class Spectral:
    """Sharding of singular terms.

    Attributes:
        strategy: The strategy that sets the inclusion probability of each term.
        clip_tau: Bound on effective learning rates.
        published: Whether to use the paper's recipe, without a spectral start or a bound on steps of the weight.
        uncut: Patterns of the layers that are whole where outputs are cut; each must match a layer of the model.
    """

    strategy: ls.sharding.ShardingStrategy
    clip_tau: float = math.inf
    published: bool = True
    uncut: Sequence[str] = SHORTCUTS

    def algorithm(self, keep_ratio: KeepRatio | None, design: str | None, output_ratio: float | None) -> ls.Algorithm:
        assert keep_ratio is not None, "a row of a grid lacks its keep ratio"
        make = ls.SpectralSharding.published if self.published else ls.SpectralSharding
        cut: dict[str, Any] = {"output_ratio": output_ratio, "exclude": self.uncut} if output_ratio else {}
        chosen = DESIGNS[design]() if design else None
        means = ls.algorithms.TermMeans()  # the paper's
        return make(self.strategy, keep_ratio, design=chosen, clip_tau=self.clip_tau, aggregation=means, **cut)


DESIGNS = {"Brewer": ls.Brewer, "MinimumSupport": ls.MinimumSupport, "ConditionalPoisson": ls.ConditionalPoisson}
SETUPS: Mapping[str, Setup] = {
    "No sharding": Whole(),
    "HeteroFL": Width(),
    "Top-n": Spectral(ls.TopN()),
    "Top-n + Scaled": Spectral(ls.sharding.Scaled(ls.TopN())),
    "PriSM": Spectral(ls.PriSM()),
    "PriSM, exponent 4": Spectral(ls.PriSM(exponent=4)),  # for clients of every keep ratio, as in PriSM's own runs
    "PriSM, exponent 2.5": Spectral(ls.PriSM(exponent=2.5), uncut=()),  # PriSM's for FEMNIST; its net has no shortcuts
    "PriSM + Scaled": Spectral(ls.sharding.Scaled(ls.PriSM())),
    "PriSM + Wallenius": Spectral(UNBIASED_PRISM),
    "PriSM + Wallenius + ClipLR": Spectral(UNBIASED_PRISM, CLIP),
    "Unbiased": Spectral(ls.Unbiased(), CLIP),
    "Unbiased without ClipLR": Spectral(ls.Unbiased()),
    "Collective": Spectral(ls.Collective(), CLIP),
    "Schatten, p = 4": Spectral(ls.sharding.Schatten(4), CLIP),
    "Spectral start": Spectral(ls.Collective(), CLIP, published=False),
}


def setup_of(name: str | Mapping[str, Any]) -> Setup:
    """Return the setup with a name, or that of a strategy given by its class, which is trained as Collective is."""
    return SETUPS[name] if isinstance(name, str) else Spectral(own_strategy(name), CLIP)


def own_strategy(given: Mapping[str, Any]) -> ls.sharding.ShardingStrategy:
    """Make a strategy from its ``class_path`` and ``init_args``.

    Raises:
        ValueError: If that is impossible, or makes something else.
    """
    module, _, name = given["class_path"].rpartition(".")
    try:
        made = getattr(import_module(module), name)(**(given.get("init_args") or {}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"`class_path: {given['class_path']}` cannot be made: {error}") from error
    if not isinstance(made, ls.sharding.ShardingStrategy):
        raise ValueError(f"`class_path` must name an `ls.sharding.ShardingStrategy`, got {given['class_path']}.")
    return made


def with_digest(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add a hash of the file of a class, so that a run of an edited class is another run."""
    file = inspect.getfile(type(own_strategy(given)))
    return {**given, "digest": hashlib.sha256(Path(file).read_bytes()).hexdigest()[:10]}
