"""Evaluations beside the user's own: of each client's held-out examples, and of sampled networks of Zampling."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import promises_of
from lightning_spectral.arguments import Whole
from lightning_spectral.client.kept_state import trying
from lightning_spectral.client.local_loop import Recorder, call_with_accepted, isolate_metrics
from lightning_spectral.errors import ClientError, warn
from lightning_spectral.functional.figures import decile_means, gini_coefficient, jain_index, wilson_intervals
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.logs import log_values
from lightning_spectral.plugin.processes import ClientParallelStrategy, processes_of
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, as_host, as_in_a_step, is_overridden, redirect
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng
from lightning_spectral.server.processes import deal
from lightning_spectral.server.round import client_error
from lightning_spectral.tables import Block, Tabular

SUFFIX = "/dataloader_idx_"  # which Lightning appends to names where there are several dataloaders
OWN = "own/"  # before the names of what a client's own model is worth
_LOG = inspect.signature(pl.LightningModule.log)
_MEANS = ("mean", "avg", torch.mean)


class ValidatedBeside(Recorder):
    """Runs ``validation_step`` of the user's module beside its validation, and keeps what it logs to itself.

    It does so within blocks of `entered`, in which ``tensors`` take the place of the module's weights of these names,
    and after which the module is as it was. Values are averaged over examples and named as by Lightning; those that are
    logged only for single batches, or are not reduced to their mean, are ignored.
    """

    def __init__(self, module: pl.LightningModule, tensors: Mapping[str, Tensor], trainer: pl.Trainer) -> None:
        super().__init__(module)
        self.module: Any = module
        self._tensors, self._trainer = tensors, trainer
        self._states: list[dict[str, Any]] = []  # of the metrics, between blocks
        self._dataloader_idx: int | None = None
        self._ended: dict[str, float] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, the module has the weights, and its metrics are those of this validation."""
        with trying(self.module):
            own = named_state(self.module)
            for name, tensor in self._tensors.items():
                own[name].data = tensor
            redirect(self.module, {"log": self.log})
            isolate_metrics(self.metrics)
            if not self._states:
                self.start()
            for metric, state in zip(self.metrics, self._states, strict=True):
                vars(metric).update(state)
            yield
            self._states = [vars(metric).copy() for metric in self.metrics]

    @contextmanager
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, and one of `entered`, some of the module's tensors have other values."""
        held = [(own, own.data, tensors[name]) for name, own in named_state(self.module).items() if name in tensors]
        for own, data, other in held:
            own.data = other.to(data).clone()  # a step may change it
        try:
            yield
        finally:
            for own, data, _ in held:
                own.data = data

    def start(self) -> None:
        """Forget what was logged so far, and reset the module's metrics: other data follows."""
        for metric in self.metrics:
            vars(metric).update({name: [] for name, default in metric._defaults.items() if isinstance(default, list)})
        self.start_client()
        self._states = [vars(metric).copy() for metric in self.metrics]
        self._dataloader_idx, self._ended = None, {}

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
        """Validate on one batch, which is on its device and left unchanged; a single dataloader has no index."""
        if dataloader_idx != self._dataloader_idx:  # metrics that are logged for several dataloaders keep accumulating
            suffix = f"{SUFFIX}{self._dataloader_idx}"
            self._ended = {name: value for name, value in self.logged().items() if name.endswith(suffix)} | self._ended
            self._dataloader_idx = dataloader_idx
        self.batch = copy.deepcopy(batch)  # steps may change it, or take entries out of it
        parameters = inspect.signature(self.module.validation_step).parameters.values()
        has_index = dataloader_idx is not None or sum(p.default is p.empty for p in parameters) > 2
        indices = (batch_idx, dataloader_idx or 0) if has_index else (batch_idx,)
        with self._trainer.precision_plugin.val_step_context():
            call_with_accepted(self.module.validation_step, self.batch, *indices)
        self.batch = None

    def logged(self) -> dict[str, float]:
        return {**{name: entry.value for name, entry in self.finish_client().items()}, **self._ended}

    def log(self, *args: Any, **options: Any) -> None:
        """Record a value, with the arguments of ``LightningModule.log``."""
        call = _LOG.bind(self.module, *args, **options)
        call.apply_defaults()
        name, value, batch_size = (call.arguments[key] for key in ("name", "value", "batch_size"))
        is_metric = isinstance(value, Metric)
        if call.arguments["on_epoch"] is False or not (is_metric or call.arguments["reduce_fx"] in _MEANS):
            return
        if call.arguments["add_dataloader_idx"] and self._dataloader_idx is not None:
            name = f"{name}{SUFFIX}{self._dataloader_idx}"
        if batch_size is None and not is_metric:
            batch_size = extract_batch_size(self.batch)
        super().log(name, value, batch_size=batch_size)


@dataclass(frozen=True)
class ClientRow:
    """One client's part of an evaluation.

    Attributes:
        client_id: The client, from 0.
        num_examples: Number of its held-out examples.
        metrics: The values that ``validation_step`` logged on them, by name.
        name: The client's name; empty if clients have only numbers.
    """

    client_id: int
    num_examples: int
    metrics: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class ClientTable(Tabular):
    """The server's model after a round, evaluated on the held-out examples of some clients.

    Attributes:
        round_idx: The round, from 0.
        rows: One for each client, by its id.
        model: The model's name; empty if there is only one.

    Example:
        >>> table = ClientTable(9, (ClientRow(0, 30, {"acc": 1.0}), ClientRow(4, 10, {"acc": 0.5})))
        >>> print(table)
        client  examples  acc
        0       30        1 (0.89-1.00)
        4       10        0.5 (0.24-0.76)
        <BLANKLINE>
        Deciles may be of as few examples as 10.
        >>> table.figures()["acc/mean"], table.figures()["acc/weighted_mean"]
        (0.75, 0.875)
    """

    round_idx: int
    rows: tuple[ClientRow, ...]
    model: str = ""

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, in the order in which they were logged."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def column(self, metric: str) -> dict[int, float]:
        """One metric of the clients that have it, by their ids."""
        return {row.client_id: row.metrics[metric] for row in self.rows if metric in row.metrics}

    def figures(self) -> dict[str, float]:
        """The spread of each metric over the clients, as ``<metric>/<figure>``.

        - ``mean``, ``weighted_mean``: clients have equal weights; weights are their numbers of held-out examples.
        - ``median``, ``trimmed_mean``: the latter without the tenth of the clients with the lowest and highest values.
        - ``std``: unweighted standard deviation over the clients. Its square is the variance of q-FFL.
        - ``lowest_decile``, ``highest_decile``: `decile_means`.
        - ``jain``, ``gini``: `jain_index`, `gini_coefficient`; missing if a value is negative.
        - ``not_finite``: number of clients whose value is NaN or infinite, and in no other figure unless all are;
          missing if there are none.
        """
        found: dict[str, float] = {}
        for name in self.metrics:
            whole = self.column(name)
            column = {client: value for client, value in whole.items() if math.isfinite(value)} or whole
            if not_finite := sum(not math.isfinite(value) for value in whole.values()):
                found[f"{name}/not_finite"] = float(not_finite)
            values = torch.tensor(list(column.values()), dtype=torch.float64)
            sizes = torch.tensor([row.num_examples for row in self.rows if row.client_id in column]).double()
            lowest, highest = decile_means(values)
            trimmed = min(math.ceil(len(values) / 10), (len(values) - 1) // 2)
            figures = {
                "mean": float(values.mean()),
                "weighted_mean": float(values @ sizes / sizes.sum()),
                "median": float(values.quantile(0.5)),
                "trimmed_mean": float(values.sort().values[trimmed : len(values) - trimmed].mean()),
                "std": float(values.std(correction=0)),
                "lowest_decile": lowest,
                "highest_decile": highest,
            }
            if not (values < 0).any():
                figures |= {"jain": jain_index(values), "gini": gini_coefficient(values)}
            found.update({f"{name}/{figure}": value for figure, value in figures.items()})
        return found

    def intervals(self, metric: str) -> dict[int, tuple[float, float]]:
        """Wilson's 95 % interval for each client; none if a value cannot be a share of its examples, as an accuracy."""
        rows = [row for row in self.rows if metric in row.metrics]
        values = torch.tensor([row.metrics[metric] for row in rows], dtype=torch.float64)
        sizes = torch.tensor([row.num_examples for row in rows])
        if not ((sizes > 0) & (values >= 0) & (values <= 1) & (((k := values * sizes) - k.round()).abs() < 1e-3)).all():
            return {}
        spans = zip(rows, wilson_intervals(values, sizes).tolist(), strict=True)
        return {row.client_id: (low, high) for row, (low, high) in spans}

    def _blocks(self) -> list[Block]:
        shares = (name for name in self.metrics if "acc" in name.lower())
        spans = {n: {c: f" ({a:.2f}-{b:.2f})" for c, (a, b) in self.intervals(n).items()} for n in shares}
        named = any(row.name for row in self.rows)
        lines = [["client", *["name"] * named, "examples", *self.metrics]]
        for row in self.rows:
            own = {n: f"{value:.4g}{spans.get(n, {}).get(row.client_id, '')}" for n, value in row.metrics.items()}
            cells = (own.get(name, "") for name in self.metrics)
            lines.append([str(row.client_id), *[row.name] * named, str(row.num_examples), *cells])
        fewest = sum(sorted(row.num_examples for row in self.rows)[: math.ceil(len(self.rows) / 10)])
        return [lines, *[f"Deciles may be of as few examples as {fewest}."] * (0 < fewest < 30)]


class ClientEvaluation(RoundCallback):
    """Evaluates the server's model on each client's held-out examples, and logs how evenly it serves the clients.

    The examples are those held out by ``FederatedDataModule(..., client_val_fraction=0.1)``, on which no client trains.
    For one client after another, it runs your ``validation_step``, and no other hook except those that move batches, in
    eval mode on a copy of your module with its metrics reset. For each metric M that the step logs, and that Lightning
    averages over examples or computes, it logs ``fl/clients/M/mean`` and the other `ClientTable.figures`. Clients' own
    models, such as those with personal parameters, are evaluated too, and M is then ``own/M``. The run and the global
    random generators are not affected. Several processes share the clients.

    Args:
        every_n_rounds: Evaluate after rounds 0, n, 2n, ... and after the last.
        clients: ``"all"``, ``"participants"`` (those in the round's average), or a number to draw anew each time.

    Attributes:
        tables: The last `ClientTable` of each model, by name, ``""`` for a single one; part of the checkpoint.

    Example:
        >>> evaluation = ClientEvaluation(every_n_rounds=10, clients=100)  # Trainer(callbacks=[evaluation])
    """

    reads_clients = True

    def __init__(self, every_n_rounds: int = 1, clients: Literal["all", "participants"] | int = "all") -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        if not (isinstance(clients, str) and clients in ("all", "participants")):
            clients = Whole(at_least=1, hint='it is "all", "participants" or a number of clients')("clients", clients)
        self.clients = clients
        self.tables: dict[str, ClientTable] = {}

    @property
    def table(self) -> ClientTable | None:
        """The last table of the only model; ``None`` before there is one."""
        return self.tables.get("")

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "predict":
            return
        host = as_host(pl_module, "ClientEvaluation needs federated clients")
        if not (evaluated := [name for name in host.members if host.data_of(name).held_out.num_assigned]):
            raise ValueError(
                "ClientEvaluation finds no held-out examples; give the data a share to hold out: "
                "FederatedDataModule(..., client_val_fraction=0.1)."
            )
        for module in (host.members[name].module for name in evaluated):
            if not is_overridden(module, "validation_step"):
                raise ValueError(f"ClientEvaluation needs `{type(module).__name__}.validation_step`; define it.")

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: RoundSummary) -> None:
        round_idx = summary.round_idx
        if round_idx % self.every_n_rounds and round_idx + 1 != num_rounds(trainer):
            return
        if figures := self._evaluate(trainer, pl_module, round_idx, {client.client_id for client in summary.averaged}):
            log_values(trainer, round_idx, {"fl/round": float(round_idx), **figures})

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Evaluate in `Trainer.validate` and `Trainer.test`, too; there all clients count as participants."""
        if trainer.state.fn != "fit":
            for member in pl_module.members.values():
                figures = self._evaluate(trainer, member, trainer.current_epoch)
                pl_module.log_dict(figures, add_dataloader_idx=False, batch_size=1)

    on_test_epoch_end = on_validation_epoch_end

    def _evaluate(
        self, trainer: pl.Trainer, member: Any, round_idx: int, participants: Collection[int] | None = None
    ) -> dict[str, float]:
        """Make the table of one model; return its figures as they are logged, none if there is nobody to evaluate."""
        client_ids = member.data.held_out.sizes.nonzero().flatten().tolist()
        if self.clients == "participants" and participants is not None:
            client_ids = [client_id for client_id in client_ids if client_id in participants]
        elif isinstance(self.clients, int):
            generator = derived_generator(member.seed, "client evaluation", round_idx)
            drawn = torch.randperm(len(client_ids), generator=generator)[: self.clients]
            client_ids = sorted(client_ids[i] for i in drawn.tolist())
        if not client_ids:
            return {}
        table = ClientTable(round_idx, evaluate_clients(trainer, member, round_idx, client_ids), member.name)
        self.tables[member.name] = table
        if not table.metrics and trainer.is_global_zero:
            _warn_of_silence(member.module, "ClientEvaluation has nothing to report")
        prefix = f"{member.name}/" if member.name else ""
        return {f"{prefix}fl/clients/{name}": value for name, value in table.figures().items()}

    def client_columns(self, summary: RoundSummary) -> Mapping[str, Mapping[int, float]]:
        if (table := self.tables.get(summary.model)) is None or table.round_idx != summary.round_idx:
            return {}
        sizes = {row.client_id: float(row.num_examples) for row in table.rows}
        return {"held_out_examples": sizes, **{name: table.column(name) for name in table.metrics}}

    def state_dict(self) -> dict[str, Any]:
        return {"tables": [asdict(table) for table in self.tables.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tables = ({**one, "rows": tuple(ClientRow(**row) for row in one["rows"])} for one in state_dict["tables"])
        self.tables = {table["model"]: ClientTable(**table) for table in tables}


def evaluate_clients(trainer: pl.Trainer, model: Any, round_idx: int, client_ids: list[int]) -> tuple[ClientRow, ...]:
    """Evaluate the server's model on the held-out examples of some clients, in their order; processes share them.

    Where some clients have models of their own, the server's is that of the others: they would begin with it.
    """
    sizes, names, processes = model.data.held_out.sizes_of(client_ids), model.data.held_out.names, processes_of(trainer)
    module, beside = model.module, ValidatedBeside(model.module, {}, trainer)

    def metrics_of(client_id: int) -> dict[str, float]:
        seed = derived_seed(model.seed, "client evaluation", round_idx, client_id)
        beside.start()
        try:
            with isolated_rng(seed, [trainer.strategy.root_device]):  # a step may draw random numbers
                for batch_idx, batch in enumerate(model.data.client_val_batches(client_id)):
                    beside.step(as_in_a_step(batch, module, trainer), batch_idx)
        except Exception as error:
            raise client_error(round_idx, WorkUnit(client_id, model.name), "evaluation", error) from error
        return beside.logged()

    def evaluate() -> dict[int, dict[str, float]]:
        mine = {}
        with beside.entered():
            module.eval()
            adopt_batch_hooks(module, model.data)
            for client_id in (client_ids[i] for i in deal(sizes, processes.size)[processes.rank]):
                mine[client_id] = metrics_of(client_id)
                if own := model.own_model(client_id):
                    with beside.with_tensors(own):
                        mine[client_id] |= {f"{OWN}{name}": value for name, value in metrics_of(client_id).items()}
        return mine

    if (found := model.data.evaluate_elsewhere(model, round_idx, client_ids)) is None:
        stage, trainer.validating = trainer.state.stage, True  # as it is in a validation within a fit
        try:
            with torch.no_grad():
                gathered = processes.gather_results(evaluate, ClientError)
            found = {client_id: metrics for part in gathered for client_id, metrics in part.items()}
        finally:
            trainer.state.stage = stage
    if any(name.startswith(OWN) for metrics in found.values() for name in metrics):
        own = {c: {f"{OWN}{n}": x for n, x in metrics.items() if not n.startswith(OWN)} for c, metrics in found.items()}
        found = {client_id: {**own[client_id], **metrics} for client_id, metrics in found.items()}
    rows = zip(client_ids, sizes, strict=True)
    return tuple(ClientRow(c, size, found[c], *names[c : c + 1]) for c, size in rows if c in found)


def _warn_of_silence(module: pl.LightningModule, consequence: str) -> None:
    warn(
        f"`{type(module).__name__}.validation_step` logs no mean and no metric with `self.log`, so {consequence}; "
        "log there, and not in `on_validation_epoch_end`.",
        3,
    )


class SampledNetworks(pl.Callback):
    """Logs how well sampled networks Qz do whenever Lightning validates the expected network Qp.

    For every metric M that ``validation_step`` logs, and that Lightning averages over examples or computes:

    - ``M/sampled_mean``, ``M/sampled_std``: mean and sample standard deviation over the sampled networks.
    - ``M/sampled_max``, ``M/sampled_min``: largest and smallest value among the sampled networks.
    - ``M/sampling_gap``: M of the expected network minus the mean over the sampled ones.

    With several dataloaders, which need Lightning 2.5.3, names end in the dataloader's index, as in Lightning's own
    names. A single network has no standard deviation. Each network is a copy of your module with its metrics and
    buffers, and ``num_samples`` of them are in memory during validation. They run ``validation_step``, and no other
    hook, on the batches that Lightning validates on. Bits are drawn from the run's seed, the round and the number of
    the network; the run and the global random generators are not affected.

    It also acts in every ``Trainer.validate``. With ``strategy="client_parallel"``, each process validates all networks
    on all of the data, as it does the server's module.

    Args:
        num_samples: Number of networks, at least 1.
        every_n_validations: Act in validations 0, n, 2n, ... of a run; the sanity check does not count.

    Raises:
        TypeError: At set-up, if the algorithm is not `Zampling`.
        ValueError: At set-up, if several processes share the data for validation.

    Example:
        >>> callback = SampledNetworks(num_samples=20)  # Trainer(callbacks=[callback])
    """

    def __init__(self, num_samples: int = 10, every_n_validations: int = 1) -> None:
        self.num_samples: int = Whole(at_least=1)("num_samples", num_samples)
        self.every_n_validations: int = Whole(at_least=1)("every_n_validations", every_n_validations)
        self._num_validations, self._is_due = 0, False
        self._networks: list[ValidatedBeside] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage not in ("fit", "validate"):
            return
        algorithm = getattr(pl_module, "algorithm", None)
        if not isinstance(algorithm, Algorithm) or not promises_of(algorithm).draws_networks:
            trained_by = type(algorithm if isinstance(algorithm, Algorithm) else pl_module).__name__
            raise TypeError(
                f"SampledNetworks needs the probabilities of bits, which {trained_by} does not train; leave the "
                "callback out, or train with algorithm=Zampling(...)."
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, ClientParallelStrategy):
            raise ValueError(
                f"{type(trainer.strategy).__name__} shares the data for validation out to {trainer.world_size} "
                "processes, and SampledNetworks needs all of it in each; use strategy='client_parallel', or devices=1."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._networks, self._is_due = [], not trainer.sanity_checking
        if trainer.state.fn == "fit" and self._is_due:
            self._is_due = self._num_validations % self.every_n_validations == 0
            self._num_validations += 1

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int | None = None
    ) -> None:
        if not self._is_due:
            return
        if not self._networks:  # only now, after the user's hooks have prepared the module for validation
            for k in range(self.num_samples):
                generator = derived_generator(pl_module.seed, "sampled networks", trainer.current_epoch, k)
                weights = pl_module.state.network(generator)
                self._networks.append(ValidatedBeside(pl_module.module, weights, trainer))
        ids = trainer.current_epoch, dataloader_idx or 0, batch_idx
        seed = derived_seed(pl_module.seed, "validation of sampled networks", *ids)
        for network in self._networks:
            # a step may draw: the same for all networks
            with isolated_rng(seed, [trainer.strategy.root_device]), network.entered():
                network.step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        networks, self._networks = self._networks, []
        if not networks:
            return
        logged = []
        for network in networks:
            with network.entered():
                logged.append(network.logged())
        figures = sampling_figures(logged, {name: float(value) for name, value in trainer.callback_metrics.items()})
        if not figures and trainer.is_global_zero:
            _warn_of_silence(pl_module.module, "SampledNetworks has nothing to compare")
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        pl_module.log_dict(values, on_step=False, on_epoch=True, add_dataloader_idx=False, batch_size=1)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._networks = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_validations = state_dict["num_validations"]


def sampling_figures(logged: Sequence[Mapping[str, float]], expected: Mapping[str, float]) -> dict[str, float]:
    """The figures of each metric, by the names under which they are logged."""
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in logged for name in metrics):
        values = torch.tensor([metrics[name] for metrics in logged if name in metrics], dtype=torch.float64)
        mean = float(values.mean())
        own = {"sampled_mean": mean, "sampled_max": float(values.max()), "sampled_min": float(values.min())}
        if len(values) > 1:
            own["sampled_std"] = float(values.std())
        if name in expected:
            own["sampling_gap"] = expected[name] - mean
        metric, suffix, dataloader = name.partition(SUFFIX)
        figures.update({f"{metric}/{figure}{suffix}{dataloader}": value for figure, value in own.items()})
    return figures
