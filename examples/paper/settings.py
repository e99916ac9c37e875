"""The settings that define a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from setups import SETUPS, KeepRatio, Whole, setup_of, with_digest


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Runs with equal settings are the same run, whichever tables they are in.

    Attributes:
        data: Name of the data set.
        model: Name of the model.
        lr: The clients' learning rate in the first round.
        total_local_epochs: Rounds times local epochs, which the papers keep constant.
        split: How examples are dealt to clients: ``dirichlet``, ``iid``, ``natural`` or ``pachinko``.
        alpha: Concentration of ``dirichlet``, or of ``pachinko`` over superclasses.
        num_clients: Number of clients; not used by ``natural``.
        clients_per_round: Number of clients that take part in a round.
        local_epochs: Passes over a client's data in a round.
        batch_size: Number of examples in a local step.
        weight_decay: Weight decay of the parameters that are not sharded; also added to the Frobenius decay.
        num_train: Number of examples that are dealt, drawn with the seed; ``None`` for all.
        num_test: Number of test examples, taken from the start; ``None`` for all.
        evaluate_every: Number of rounds between two evaluations.
        length: Factor by which the number of rounds is multiplied.
        setup: Name of the setup, one of `SETUPS`; or ``class_path`` and ``init_args`` of a strategy.
        keep_ratio: Share of the terms, or a mapping from it to the share of clients; ``None`` for the whole model.
        output_ratio: Share of the outputs of each sharded layer that a client computes; ``None`` for all of them.
        design: Name of the design; ``None`` for the strategy's own.
        measure: A costly additional measurement: ``alignment``, ``ranks``, ``holders`` or ``training loss``.
        seed: Seed of the choice of examples, their split, the weights and all draws.
    """

    data: str
    model: str
    lr: float
    total_local_epochs: int
    split: str = "dirichlet"
    alpha: float = 1.0
    num_clients: int = 100
    clients_per_round: int = 10
    local_epochs: int = 2
    batch_size: int = 32
    weight_decay: float = 0.0
    num_train: int | None = None
    num_test: int | None = None
    evaluate_every: int = 10
    length: float = 1.0
    setup: str | Mapping[str, Any] = "No sharding"
    keep_ratio: KeepRatio | None = None
    output_ratio: float | None = None
    design: str | None = None
    measure: str | None = None
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        """The number of rounds, rounded so that the last one is evaluated."""
        every = self.evaluate_every
        return every * max(1, round(self.length * self.total_local_epochs / self.local_epochs / every))

    @property
    def key(self) -> str:
        """A readable name for files, with a hash of all settings that differ from their defaults."""
        defaults = {field.name: field.default for field in fields(self)}  # a new setting does not rename old runs
        chosen = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:10]
        kept = self.keep_ratio if not isinstance(self.keep_ratio, Mapping) else "mixed"
        setup = self.setup if isinstance(self.setup, str) else self.setup["class_path"]
        words = (self.data, self.model, setup, *([] if kept is None else [kept]), f"seed {self.seed}")
        readable = ("".join(c if c.isalnum() or c in ".-" else "-" for c in str(word)) for word in words)
        return "_".join([*readable, digest])


def settings_of(values: Mapping[str, Any], where: str) -> Settings:
    """Return settings from YAML; the whole model gets no keep ratio or design, so that tables share its runs.

    Raises:
        ValueError: If a name is unknown, or a class cannot be made.
    """
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{where}: there are no settings {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    setup = values["setup"]
    if isinstance(setup, str) and setup not in SETUPS:
        raise ValueError(
            f"{where}: there is no setup {setup!r}; give the row a `class_path`, or name one of {', '.join(SETUPS)}."
        )
    try:
        setup = setup if isinstance(setup, str) else with_digest(setup)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    whole = {"keep_ratio": None, "design": None} if isinstance(setup_of(setup), Whole) else {}
    return Settings(**{**values, "setup": setup, **whole})
