"""RemoteClients: the data module of a federation whose clients are on other machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_spectral.algorithms.base import Algorithm, promises_of
from lightning_spectral.algorithms.costs import round_bytes
from lightning_spectral.algorithms.filter import Filter, conflict
from lightning_spectral.arguments import Number, Whole, flag
from lightning_spectral.client.batches import Collate
from lightning_spectral.client.local_loop import LocalTrainer, LossLoop
from lightning_spectral.errors import RecordError, RoundError, check_is, warn
from lightning_spectral.filters import UpdateBound, UsualUpdateNorm
from lightning_spectral.network.executor import RemoteExecutor
from lightning_spectral.network.gate import SMALL, UploadGate, read_metrics
from lightning_spectral.network.line import Asking, Line, Question
from lightning_spectral.network.messages import Holding, Kind, Part, Start, record_parts
from lightning_spectral.network.roster import Roster, with_max_share
from lightning_spectral.participation import Sampler
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.plugin.callbacks import BatchNormEstimation
from lightning_spectral.plugin.data import EvaluationData, FederatedDataModule, MultiModelDataModule, ServerData
from lightning_spectral.plugin.module import FederatedModule, MultiModelModule
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.protocol.client_store import with_state
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import Download, WorkUnit
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.round import Engine

USUAL = UsualUpdateNorm()
PRECISIONS = "32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """How many held-out examples each client has.

    Attributes:
        sizes: Their numbers, int64, shape ``(num_clients,)``.
        max_share: Largest share of the weight that one of several clients has.
        names: Their names.
    """

    sizes: Tensor
    max_share: float
    names: Sequence[str]

    @property
    def num_assigned(self) -> int:
        """Number of held-out examples of all clients."""
        return int(self.sizes.sum())

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of held-out examples of each given client, as far as it counts among them."""
        return with_max_share(self.sizes[torch.tensor(client_ids)], self.max_share).tolist()


class RemoteClients(ServerData):
    """Clients that a network reaches, in place of a `FederatedDataModule`; evaluation data is at the server.

    Args:
        line: The network; or the `Roster` of another model's `RemoteClients`, whose clients train this one too.
        model: The model's name; empty if there is only one.
        val: Validation data, as in `FederatedDataModule`.
        test: Test data, likewise.
        wait_for: Number of clients with which a run begins; ``None`` for those of a round. Needed if all clients train
            in every round, or a share, which is one of those that there are when the round begins.
        patience: Seconds to wait for enough clients, at the start and in every round; for a client that is gone only
            once, until it comes back. A new device has as long to import your module, and at least 120 seconds.
        deadline: Seconds that a client may take for a round, or to evaluate; ``None`` for as long as the network
            allows.
        keep_first: Over-selection: of the ``clients_per_round`` that are asked, wait for this many, and leave out the
            others as surplus, as `VirtualClock` does in a simulation; ``None`` to wait for all.
        max_share: Largest share of the weight of a round that one of its clients has, by the number of examples that it
            says; in (0, 1]. In a small round it may have twice an equal share, up to half.
        update_bound: Bound on each client's update, where the `FederatedModule` has none among its filters and could
            have one; ``None`` for none.
        trust_names: Whether a client may come back as another node, as it does without keys, where the network gives
            nodes new numbers at every start. A name for which `network enrol` has a key stays with that key.
        at_once: Most clients that train at the same time; ``None`` for all of a round. Until a client answers, the
            server holds the sub-model that it was sent, unless all get the same.
        eval_batch_size: Examples per evaluation batch.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        line: Line | Roster,
        *,
        model: str = "",
        val: EvaluationData = None,
        test: EvaluationData = None,
        wait_for: int | None = None,
        patience: float = 60.0,
        deadline: float | None = 600.0,
        keep_first: int | None = None,
        max_share: float = 0.25,
        update_bound: UpdateBound | None = USUAL,
        trust_names: bool = False,
        at_once: int | None = None,
        eval_batch_size: int = 256,
        collate_fn: Collate | None = None,
    ) -> None:
        eval_batch_size = Whole(at_least=1)("eval_batch_size", eval_batch_size)
        super().__init__(val, test, eval_batch_size, collate_fn)
        self.wait_for = Whole(at_least=1, optional=True)("wait_for", wait_for)
        self.at_once = Whole(at_least=1, optional=True)("at_once", at_once)
        self.deadline = Number(above=0, optional=True)("deadline", deadline)
        self.keep_first = Whole(at_least=1, optional=True)("keep_first", keep_first)
        self.max_share = Number(above=0, at_most=1)("max_share", max_share)
        self.update_bound = update_bound
        check_is("update_bound", update_bound, UpdateBound | None)
        patience, trust_names = Number(at_least=0)("patience", patience), flag("trust_names", trust_names)
        self.roster = line if isinstance(line, Roster) else Roster(line, patience, trust_names)
        self.model = model
        self._begun: int | None = None

    def filters_beside(self, filters: Sequence[Filter], algorithm: Algorithm) -> Sequence[Filter]:
        """A bound on updates, unless the user's filters have one, or hide what it reads."""
        bound = self.update_bound
        if bound is None or not promises_of(algorithm).new_values or any(conflict(bound, each) for each in filters):
            return ()
        return [bound]

    @property
    def num_clients(self) -> int:
        """Number of clients that have ever been there."""
        return len(self.roster.names)

    def setup(self, stage: str) -> None:
        """Wait for the clients with which a run begins, or raise."""
        if stage != "fit":
            return
        trainer: Any = self.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BatchNormEstimation):
                raise ValueError(
                    f"{type(callback).__name__} needs clients' examples at the server, and they are on other machines; "
                    "leave it out: the server averages the running statistics that clients upload."
                )
        wanted = self.wait_for or self._usual_size(0)
        if wanted == math.inf:
            raise ValueError("All clients train, or a share: say with how many a run begins, such as `wait_for=3`.")
        wanted, self._begun, patience = math.ceil(wanted), None, self.roster.patience
        if self.keep_first is not None and (self._is_sampled or self.keep_first > self._usual_size(wanted)):
            raise ValueError(
                f"`keep_first={self.keep_first}` needs at least as many `clients_per_round`, and no sampler, whose "
                "weights count on all whom it draws."
            )
        self.roster.admits = dict.fromkeys(self._module.federation.members, lambda name, holding: None)
        if (count := self.roster.wait_for(wanted, "The run begins", everybody=True)) < wanted:
            raise RoundError(
                f"Only {count} of {wanted} clients were there after {patience:g} s; start more devices, see to those "
                "that were rejected, or lower `clients_per_round`, or raise RemoteClients(patience=...)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Who the clients are, for the checkpoint."""
        return self.roster.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give clients the numbers and nodes that they had when the checkpoint was written."""
        self.roster.load_state_dict(state_dict)

    def client_directory(self, capacities: Assigned[float], available: Tensor | None = None) -> ClientDirectory:
        return RemoteDirectory(self, capacities, available)

    def begin_round(self, round_idx: int) -> None:
        """Wait for the clients of a round, and admit those that have joined."""
        if self._begun == round_idx:
            return
        self._begun = round_idx
        self.roster.is_closed = self._is_sampled or not all(
            promises_of(member.algorithm).clients_may_join for member in self._module.federation.members.values()
        )
        usual = self._usual_size(expected := self.roster.num_expected())
        self.roster.wait_for(math.ceil(min(usual, expected)), f"Round {round_idx}")

    def make_executor(self, owner: Any, engine: Engine, local_trainer: LocalTrainer) -> Executor:
        """What sends downloads to devices; ``ValueError`` if the run has settings that they cannot honour."""
        told, trainer = engine.instructions, owner.trainer
        if trainer.world_size > 1:
            raise ValueError("Clients elsewhere are reached from one process: use Trainer(devices=1).")
        if trainer.precision not in PRECISIONS:
            raise ValueError(
                f"Devices train in one of the precisions {', '.join(PRECISIONS)}, got Trainer(precision="
                f"{trainer.precision!r}); choose one of them."
            )
        start = Start(
            *(self.model, told, tuple(owner.local_hooks)),
            measures=local_trainer is LossLoop,
            precision=trainer.precision,
            num_rounds=num_rounds(trainer),
        )
        gate = UploadGate(engine.half.server, told)
        return RemoteExecutor(self.roster, start, gate, self.deadline, self.at_once, self.keep_first)

    @property
    def held_out(self) -> HeldOut:
        """How many examples each client holds out, for `ClientEvaluation`."""
        sizes = torch.tensor([holding.num_held_out for holding in self.roster.holdings(self.model)])
        return HeldOut(sizes, self.max_share, self.roster.names)

    def evaluate_elsewhere(
        self, owner: Any, round_idx: int, client_ids: Sequence[int]
    ) -> dict[int, Mapping[str, float]]:
        """Evaluate a `FederatedModule` on the clients' devices; those that do not answer are named in a warning."""
        roster, client_of, found = self.roster, dict[int, int](), dict[int, Mapping[str, float]]()
        asking, tensors = Asking(roster.line), travelling_tensors(owner.module)
        common = {Part.MODEL: self.model.encode(), Part.PRECISION: owner.trainer.precision.encode()}
        for client_id in client_ids:
            if (node := roster.node_of(client_id)) is not None:
                client_of[node] = client_id
                download = Download(WorkUnit(client_id, self.model), 1.0, tensors, round_idx, seed=owner.seed)
                parts = {**record_parts(with_state(download, owner.client_states)), **common}
                asking.ask(Question(node, Kind.EVALUATE, parts, round_idx, self.deadline, most_bytes=2 * SMALL))
        for question, answer in asking.arrived(wait=True):
            client_id = client_of[question.node]
            try:
                found[client_id] = read_metrics(answer)
            except RecordError as error:
                warn(f"Round {round_idx}: client {roster.names[client_id]!r} is not evaluated: {error}.")
        return found

    def identity(self) -> Sequence[str]:
        return list(self.roster.names)

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed; who is there may change."""
        return {"clients": "elsewhere"}

    @property
    def _module(self) -> Any:
        trainer: Any = self.trainer
        return trainer.lightning_module

    @property
    def _is_sampled(self) -> bool:
        return isinstance(self._module.participation, Sampler)

    def _usual_size(self, num_clients: int) -> float:
        """Number of clients in a round; infinite if all of them train, or a share and there is no number yet."""
        who = self._module.participation
        if self._is_sampled:
            return float(who.active)
        return who.size(num_clients) if num_clients or isinstance(who.clients_per_round, int) else math.inf


class RemoteDirectory(ClientDirectory):
    """What the server knows of clients elsewhere: what they last said about themselves.

    Only ``num_examples`` remains that of the start, because fixed shares are computed from it.

    Args:
        clients: The data module that reaches them.
        capacities: Keep ratios as the algorithm assigns them to the clients of the start.
        available: Whether each client can train this model; ``None`` if all can.

    Raises:
        ValueError: If every client says a keep ratio that the algorithm does not have, or a budget that no sub-model
            fits; single ones are dismissed.
    """

    clients: RemoteClients
    roster: Roster
    _shortened: set[int]

    def __init__(self, clients: RemoteClients, capacities: Assigned[float], available: Tensor | None) -> None:
        vars(self).update(clients=clients, capacities=capacities, available=available, _shortened=set())
        vars(self).update(roster=(roster := clients.roster), begin_round=clients.begin_round)
        wrong: dict[int, ValueError] = {}
        for client_id in range(len(roster.names)):
            try:
                self.capacity_of(client_id)
            except ValueError as error:
                wrong[client_id] = error
        if wrong and len(wrong) == len(roster.names):
            raise wrong[0]
        for client_id, why in wrong.items():
            roster.dismiss(client_id, why)
        roster.admits[clients.model] = self._capacity

    @property
    def sizes(self) -> Tensor:
        """Number of training examples of each client, as far as it counts, int64, shape ``(num_clients,)``."""
        said = torch.tensor([holding.num_examples for holding in self.roster.holdings(self.clients.model)])
        return with_max_share(said, self.clients.max_share)

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of training examples of each given client, as far as it counts among them."""
        said = [self.roster.holding(client_id, self.clients.model).num_examples for client_id in client_ids]
        counted: list[int] = with_max_share(torch.tensor(said, dtype=torch.int64), self.clients.max_share).tolist()
        for client_id, own, size in zip(client_ids, said, counted, strict=True):
            if size < own and client_id not in self._shortened:
                self._shortened.add(client_id)
                rank_zero_warn(
                    f"Client {self.roster.names[client_id]!r} says that it has {own:,} examples, and counts as one "
                    f"with {size:,}: no client has more than a share of {self.clients.max_share:g} of a round's "
                    "weight. To believe it, raise RemoteClients(max_share=...)."
                )
        return counted

    def epoch_of(self, client_id: int) -> int:
        # one that has come back without examples for this model is asked nothing, as if it were not there
        return max(1, self.roster.holding(client_id, self.clients.model).examples_per_epoch)

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client: what it said, or what its budget allows, or else what the algorithm assigned."""
        return self._capacity(self.roster.names[client_id], self.roster.holding(client_id, self.clients.model))

    def _capacity(self, name: str, holding: Holding) -> float:
        said, values = holding.keep_ratio, self.capacities.values
        if (budget := holding.budget_bytes) is not None:
            if fitting := [keep_ratio for keep_ratio, needed in self._needed.items() if needed <= budget]:
                return max(fitting)
            raise ValueError(
                f"Client {name!r} says `budget_bytes={budget:,.0f}`, and the smallest sub-model takes "
                f"{min(self._needed.values()):,} bytes a round; raise its budget, or let the algorithm cut more."
            )
        if said is None and name in self._assigned:
            return float(self._assigned[name])
        if said is None and len(values) == 1:
            return float(values[0])
        if said not in values:
            given = "no keep ratio" if said is None else f"a keep ratio of {said}"
            raise ValueError(
                f"Client {name!r} says {given}, and the algorithm has {', '.join(map(str, values))}; write one of "
                "them on the device, ClientData(keep_ratio=...), or give the algorithm its own."
            )
        return float(said)

    @cached_property
    def _needed(self) -> Mapping[float, int]:
        """Bytes that a client with each keep ratio gets and sends in a round."""
        owner = self.clients._module.federation.members[self.clients.model]
        given = {"filters": owner.filters, "buffers": owner.buffer_rules}
        return round_bytes(owner.module, owner.algorithm, self.capacities.values, **given)

    @cached_property
    def _assigned(self) -> Mapping[str, float]:
        """Keep ratios of the clients of the start, by name; a client keeps its number, and others come later."""
        return {name: self.capacities.of(i) for i, name in enumerate(self.roster.names[: len(self.capacities)])}


def clients_of_models(
    model: FederatedModule | MultiModelModule, line: Line, val: Any, test: Any, options: Mapping[str, Any]
) -> RemoteClients | MultiModelDataModule:
    """The clients of a line, as the data module of one model, or of several, whose evaluation data are by name."""
    if isinstance(model, FederatedModule):
        return RemoteClients(line, val=val, test=test, **options)
    modules, vals, tests = dict[str, RemoteClients](), val or {}, test or {}
    shared: Line | Roster = line
    for name in model.members:
        modules[name] = RemoteClients(shared, model=name, val=vals.get(name), test=tests.get(name), **options)
        shared = modules[name].roster
    return MultiModelDataModule(cast("dict[str, FederatedDataModule]", modules))
