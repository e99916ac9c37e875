"""A small federation without a Trainer, in which the claims of `check_algorithm` are tried."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_spectral.client.device import ClientSide, Device
from lightning_spectral.client.local_loop import LocalSettings, Placement
from lightning_spectral.client.local_optimizer import options_of
from lightning_spectral.protocol.cohort import ClientStore, Workers
from lightning_spectral.protocol.exchange import copy_module
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.records import Download, RoundSummary, Upload, WorkUnit
from lightning_spectral.server.cohorts import ClientDirectory
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import Faults, Raise, update_norm
from lightning_spectral.server.round import Engine
from lightning_spectral.testing.trial_clients import SEED, Case, Losing, OverTheCodec

SIZES = (3, 7, 2, 5, 4)  # numbers of examples, and so the weights of clients


class Trial:
    """Rounds of five clients, who step by plain SGD, as does the server.

    Args:
        case: What is tried.
        saved: What `save` of another trial returned, to go on from there; ``None`` to begin.
        local_epochs: As for the federation; 0 trains nobody.
        over_codec: Whether devices share nothing with the server.
        server_lr: Learning rate of the server.
        lost: Clients of which nothing comes back.
    """

    def __init__(
        self,
        case: Case,
        saved: Mapping[str, Any] | None = None,
        *,
        local_epochs: int = 1,
        over_codec: bool = False,
        server_lr: float = 1.0,
        lost: Collection[int] = (),
    ) -> None:
        self.case, self.round_idx = case, 0
        self.server: nn.Module = copy_module(case.module).to(case.device)
        self.state = case.algorithm.new_state(self.server, SEED)
        if self.state is not None:
            self.state.to(case.device)
        self.store, base = ClientStore(), FrozenBase()
        self.store.to(case.device)
        if saved is not None:
            base = self._load(saved)
        self.half = case.algorithm.bind(self.server, self.state, decisions=saved and saved["decisions"])
        if saved is None:
            self.half.initialize(Workers())
            self.half.settle()
        self.template = SGD([p for p in self.server.parameters() if p.requires_grad], lr=case.lr)
        own = [] if self.state is None else [p for p in self.state.parameters() if p.requires_grad]
        self.optimizer = SGD([*self.template.param_groups[0]["params"], *own], lr=server_lr)
        self.engine = Engine(
            case.algorithm,
            self.half,
            ClientDirectory(torch.tensor(SIZES), case.algorithm.keep_ratios(len(SIZES), SEED)),
            lambda _: self.executor,
            seed=SEED,
            local_epochs=local_epochs,
            options=lambda: (options_of(self.template),),
            figure="update",
            store=self.store,
            frozen_base=base,
            faults=Faults(on_not_finite=Raise(), on_no_update=Raise()),
        )
        self.executor: Executor = (
            OverTheCodec(self.device(elsewhere=True)) if over_codec else Losing(self.device(), lost)
        )

    def device(self, elsewhere: bool = False) -> Device:
        """A device that trains its clients; one elsewhere shares nothing with the server."""
        half, module, optimizer = self.half.device_half, self.server, self.template
        if elsewhere:
            half, (module, optimizer) = pickle.loads(pickle.dumps(half)), copy.deepcopy((module, optimizer))
        return Device(
            module,
            half,
            [optimizer],
            self.case.data,
            LocalSettings(Placement(self.case.device, moves_batches=False), self.case.local_hooks, hasattr),
        )

    @property
    def units(self) -> list[WorkUnit]:
        """All clients, by id."""
        return [WorkUnit(client_id, coefficient=size) for client_id, size in enumerate(SIZES)]

    def play(self, units: Sequence[WorkUnit] | None = None) -> RoundSummary:
        """Play a round, in which clients train in the given order."""
        self.open()
        self.share(self.units if units is None else units)
        return self.close()

    def open(self, units: Sequence[WorkUnit] | None = None) -> None:
        """Open a round, for all clients by default."""
        self.engine.open_round(self.round_idx, self.units if units is None else units)

    def can_share(self) -> bool:
        """Whether several processes can train a round's clients."""
        try:
            return self.engine.open_round(self.round_idx, self.units).opened.sums is not None
        except NotImplementedError:
            return False
        finally:
            self.engine.abandon_round()

    def capacity(self, client_id: int) -> float:
        """Keep ratio of a client."""
        return self.engine.clients.capacity_of(client_id)

    @property
    def travelled(self) -> Mapping[int, tuple[int, int]]:
        """For each client, by id, how many bytes of tensors arrived at the device in the last round, and came back."""
        assert isinstance(self.executor, OverTheCodec), "only there they are counted"
        return self.executor.bytes

    def share(self, units: Sequence[WorkUnit]) -> None:
        """Let some of the clients train."""
        self.engine.round.play(units)

    def close(self) -> RoundSummary:
        """Close the round, and step the server."""
        summary = self.engine.close_round()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.settle()
        self.round_idx += 1
        return summary

    def weights(self) -> dict[str, Tensor]:
        """Copies of the server's parameters and buffers."""
        return {f"module.{name}": tensor for name, tensor in tensors_of(self.server).items()}

    def everything(self) -> dict[str, Tensor]:
        """Copies of all that lasts from round to round: the server's tensors, the state's, and each client's."""
        stored = {
            f"client {key[0]}: {name}": tensor
            for key, tensors in self.store.state_dict().items()
            for name, tensor in tensors.items()
        }
        return {**self.weights(), **{f"state.{name}": t for name, t in tensors_of(self.state).items()}, **stored}

    def save(self) -> dict[str, Any]:
        """What a checkpoint between two rounds holds."""
        return copy.deepcopy(
            {
                "server": self.server.state_dict(),
                "state": None if self.state is None else self.state.state_dict(),
                "store": self.store.state_dict(),
                "frozen_base": self.engine.frozen_base.state_dict(),
                "decisions": dict(self.half.decisions),
                "round_idx": self.round_idx,
            }
        )

    def _load(self, saved: Mapping[str, Any]) -> FrozenBase:
        saved = copy.deepcopy(dict(saved))
        self.server.load_state_dict(saved["server"])
        if self.state is not None:
            self.state.load_state_dict(saved["state"])
        self.store.load_state_dict(saved["store"])
        self.round_idx = saved["round_idx"]
        return FrozenBase.from_state_dict(saved["frozen_base"])


def change_norms(trial: Trial) -> dict[int, float]:
    """How far each client's sub-model moves in the trial's next round, by client id.

    Clients that send back anything but tensors of their sub-model, whole, are left out.
    """
    opened = trial.engine.open_round(trial.round_idx, trial.units)
    device, norms = trial.device(), {}
    for unit in trial.units:
        download, receipt = opened.send(unit)
        before, _ = _trained(device, replace(download, local_epochs=0))
        after, upload = _trained(device, download)
        both_ways = upload.tensors.keys() & download.tensors.keys()
        if all(name in after and after[name].shape == upload.tensors[name].shape for name in both_ways):
            where, rules = opened.opened.positions(receipt), trial.half.buffers
            sent, returned = ({name: tensors[name] for name in both_ways} for tensors in (before, after))
            norms[unit.client_id] = update_norm(rules.averaged(sent, where), rules.averaged(returned, where))
    trial.engine.abandon_round()
    return norms


def _trained(device: Device, download: Download) -> tuple[dict[str, Tensor], Upload]:
    """The tensors of a client when it has trained, and what it sends back."""
    observing: Any = _Observing(device.side)
    device.side = observing
    try:
        upload = device.run(download)
    finally:
        device.side = observing.side
    return observing.seen, upload


class _Observing:
    """A device half that lets the tensors of a client be seen, which the server never sees."""

    def __init__(self, side: ClientSide) -> None:
        self.side = side
        self.seen: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side, name)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        self.seen = tensors_of(client)
        return self.side.collect(client, download)


def tensors_of(module: nn.Module | None) -> dict[str, Tensor]:
    """Copies of a module's parameters and buffers, by name."""
    if module is None:
        return {}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
