"""Rounds of an algorithm without Lightning: the server, its state and its store, and clients that are functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Round
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import returned_tensors
from lightning_spectral.protocol.records import Download, Upload, WorkUnit

Tensors = Mapping[str, Tensor]
Train = Callable[[Download], Upload]


@dataclass
class DirectRounds:
    """A federation of one algorithm.

    Attributes:
        algorithm: The algorithm.
        server: The server's module, which steps by plain SGD with learning rate 1.
        shares: Each client's share of all examples.
        absolute: Whether coefficients are those of an unbiased sampler.
        states: What the device of each client keeps.
        options: Those of parameter groups that clients are told to train with.
    """

    algorithm: ls.Algorithm
    server: nn.Module
    shares: Mapping[int, float]
    absolute: bool = True
    round_idx: int = 0
    store: ClientStore = field(default_factory=ClientStore)
    states: dict[int, Tensors] = field(default_factory=dict)
    options: Any = ()

    def __post_init__(self) -> None:
        self.state: Any = self.algorithm.new_state(self.server, 0)
        self.half = self.algorithm.bind(self.server, self.state)

    def copy(self) -> DirectRounds:
        return copy.deepcopy(self)

    def open(self, coefficients: Mapping[int, float]) -> tuple[Round, list[WorkUnit]]:
        """Open a round for clients with some coefficients."""
        units = [WorkUnit(client, coefficient=c) for client, c in sorted(coefficients.items())]
        shares = {(client, ""): share for client, share in self.shares.items()}
        known: dict[str, Any] = {
            "store": self.store,
            "absolute": self.absolute,
            "shares": shares,
            "options": self.options,
        }
        return self.half.open(Cohort(0, self.round_idx, {1.0: tuple(units)}, **known)), units

    def gradients(self, coefficients: Mapping[int, float], train: Train, left_out: tuple[int, ...] = ()) -> Tensors:
        """Play a round up to its pseudo-gradients."""
        opened, units = self.open(coefficients)
        for unit in units:
            download, receipt = opened.send(unit)
            if (client := unit.client_id) not in left_out:
                own = self.states.get(client, {})
                download = replace(download, round_idx=self.round_idx, client_state=own, options=self.options)
                upload = train(download)
                opened.add(receipt, upload)
                self.states[client] = upload.client_state
        opened.close()
        self.store.commit()
        self.round_idx += 1
        return {name: p.grad.clone() for name, p in self.server.named_parameters() if p.grad is not None}

    def play(self, coefficients: Mapping[int, float], train: Train, left_out: tuple[int, ...] = ()) -> None:
        gradients = self.gradients(coefficients, train, left_out)
        with torch.no_grad():
            for name, gradient in gradients.items():
                self.server.get_parameter(name).sub_(gradient)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in returned_tensors(self.server).items()}


def assert_close(ours: Tensors, theirs: Tensors, tolerance: float = 1e-13) -> None:
    """Compare names, and values up to a tolerance relative to the largest value (or to 1, if that is larger)."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max())), name
