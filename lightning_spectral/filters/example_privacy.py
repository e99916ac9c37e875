"""Differential privacy of examples: how much each moves a local step, the noise that hides it, and the epsilon."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_spectral.algorithms import Ditto
from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Plan, ServerEnd, Unusable
from lightning_spectral.arguments import first_of
from lightning_spectral.client.captured_loop import CapturedLoop
from lightning_spectral.client.device import DeviceEnd
from lightning_spectral.client.kept_state import changed_attributes
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import (
    LocalLoop,
    LocalResult,
    LocalSettings,
    LocalTask,
    LocalTrainer,
    has_own_way,
    loss_of,
)
from lightning_spectral.errors import warn
from lightning_spectral.filters.privacy import ClientPrivacy, check_budget, epsilon_of, joined
from lightning_spectral.functional.privacy import Rounds, calibrated, draws, grid_of, shortened, warn_of_delta
from lightning_spectral.nn.layers.terms import sharded_layers
from lightning_spectral.participation import Sampler
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import ClientOutcome, Download, WorkUnit
from lightning_spectral.protocol.rng import SecretNormals
from lightning_spectral.sums.exact_mean import Peers

FIGURE = "example_epsilon"
GOES_NOT = "ExamplePrivacy does not go with"
TRAINED = (None, "error", "not_finite", "no_update")  # why clients that trained may be left out


@dataclass(frozen=True, kw_only=True)
class ExamplePrivacy(Filter):
    r"""Differential privacy of examples: nobody else can tell whether a client's data has any one example in it.

    It hides a patient of a hospital from the server, from other hospitals, and from whoever sees the model. Clients
    take the steps of DP-SGD: each of n examples is drawn with probability :math:`q = \min(1, B / n)`, independently,
    where B is the ``batch_size``, and goes through ``training_step`` alone. Its gradient :math:`g_i`, over all
    parameters that are trained, is shortened, and a step is

    .. math::
        \frac{1}{q n} \Big( \sum_i g_i \min(1, C / \|g_i\|_2) + \mathcal{N}(0, (z C)^2 I) \Big) ,

    also if no example is drawn. So it holds for any module, loss and form of the client, and takes a pass per example.
    After each round, `fl/example_epsilon` is the largest epsilon of a client, of all its turns so far.

    Args:
        clip: Bound C on the norm of an example's gradient, in units of loss per weight.
        delta: The probability that the guarantee fails, well below one over a client's number of examples.
        noise_multiplier: Standard deviation z of the noise, in units of ``clip``, at least 0.05.
        target_epsilon: The budget of each client, which takes no part once another turn would exceed it.
        num_epochs: Instead of ``noise_multiplier``: the passes over its data, ``local_epochs`` in each turn, in which a
            client spends ``target_epsilon``. Clients with fewer examples then have more noise.
        noise_seed: For tests, a seed that decides noise and draws, so that there is no privacy. ``None`` for secrets of
            the system's generator.

    Note:
        Neighbours are data sets with and without one example, which then contributes nothing; how many examples a
        client has is not secret. `docs/privacy.md` says what else is not hidden.

    Reference:
        Abadi et al. (2016), "Deep learning with differential privacy", Algorithm 1.

    Example:
        >>> privacy = ExamplePrivacy(clip=1.0, target_epsilon=8.0, num_epochs=10, delta=1e-4)
        >>> round(privacy.multiplier(num_examples=300, batch_size=30), 2)
        0.86
    """

    needs: ClassVar[Sequence[str]] = ("values_alone",)

    clip: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    num_epochs: int | None = None
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        check_budget(self, "num_epochs")

    def multiplier(self, num_examples: int, batch_size: int) -> float:
        """Standard deviation of a client's noise, in units of ``clip``."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None, "checked with `num_epochs`"
        rate, steps = draws(num_examples, batch_size)
        return calibrated(rate, self.target_epsilon, (self.num_epochs or 1) * steps, self.delta)

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if examples could mix, or something reads them beside the steps."""
        module, kind, who = plan.module, type(plan.module).__name__, plan.participation
        mixing = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
        own = [f"`{name}`" for name in ("backward", "optimizer_step") if has_own_way(module, name)]
        hooks, given = plan.local_hooks, (LocalHook.while_training, LocalHook.untrained_rows)  # what has data
        reading = [type(h).__name__ for h in hooks if (type(h).while_training, type(h).untrained_rows) != given]
        beside = [each for each in plan.filters if isinstance(each, ClientPrivacy)]
        callback = plan.callback_that("reads_clients")
        refused = {
            f"BatchNorm ({first_of(mixing, 3)}), in which examples mix; use GroupNorm": mixing,
            f"manual optimisation in {kind}; return the loss": not getattr(module, "automatic_optimization", True),
            f"{' and '.join(own)} of {kind}, which may use gradients before they have noise; leave it out": own,
            f"{first_of(reading, 3)}, which sees a client's data and adds no noise; leave it out": reading,
            f"{type(who).__name__}, which measures clients; use Uniform": isinstance(who, Sampler) and who.figure,
            f"{callback}, which reads clients' data without noise; leave it out": callback,
            "Ditto, which trains in phases; use Personal": isinstance(plan.algorithm, Ditto),
            "ClientPrivacy, which hides who takes part, while epsilons of clients tell; give one": beside,
        }
        for what, is_there in refused.items():
            if is_there:
                raise ValueError(f"{GOES_NOT} {what}.")

    def device(self, half: ServerHalf) -> "ExampleEnd":
        return ExampleEnd(self)

    def server(self, fit: Fit) -> "EpsilonEnd":
        fit.refuse_averages("ExamplePrivacy")
        if fit.batch_sizes is None:
            raise ValueError(f"{GOES_NOT} clients elsewhere: each asks for it itself, ClientData(example_privacy=...).")
        warn_of_delta(self.delta, int(fit.sizes().max()), "examples of a client")
        return EpsilonEnd(self, fit, fit.batch_sizes)


@dataclass(frozen=True)
class ExampleEnd(DeviceEnd):
    """Has clients trained in steps that hide their examples; ``spend`` is told how many, before the first."""

    says_nothing: ClassVar[bool] = True

    choice: ExamplePrivacy
    spend: Callable[[int], object] = field(default=int, compare=False)

    def trainer(self, trainer: LocalTrainer, settings: LocalSettings) -> LocalTrainer:
        if settings.placement.scaler is not None:
            raise ValueError(f"{GOES_NOT} precision '16-mixed', which scales by the gradients; use 'bf16-mixed' or 32.")
        if trainer is CapturedLoop:
            raise ValueError(f"{GOES_NOT} `capture=True`, as its passes are those of one example; leave it out.")
        return partial(ExampleLoop, self.choice, self.spend)


class ExampleLoop(LocalLoop):
    """Runs a user's ``training_step`` on one example after another, and steps on the noisy sum of their gradients.

    To hooks of batches, a batch is the list of its examples, each of which is a batch of one.
    """

    def __init__(self, choice: ExamplePrivacy, spend: Callable[[int], object], *known: Any) -> None:
        super().__init__(*known)
        self.choice, self.spend, self._is_compared, self._num_flat = choice, spend, False, 0
        if not self._eager:
            kind = type(self.optimizers[0].optimizer).__name__
            raise ValueError(f"{GOES_NOT} {kind}, which evaluates the loss itself; use SGD or Adam.")

    def __call__(self, task: LocalTask) -> LocalResult:
        if task.epochs and (task.epochs.start or task.steps != task.download.steps_in(task.data.num_batches)):
            raise ValueError(f"{GOES_NOT} training in phases, as in Ditto and with `epochs` of Personal; leave it out.")
        seed, data = self.choice.noise_seed, task.data
        key = secrets.token_bytes(32) if seed is None else repr((seed, *task.download.ids)).encode()
        self._numbers, (self._rate, _) = SecretNormals(key), draws(len(data.indices), data.batch_size)
        self._std = self.choice.multiplier(len(data.indices), data.batch_size) * self.choice.clip
        attributes = tuple if self._is_compared else changed_attributes(self.module)
        # what depends on no example: drawn multipliers, and what noisy steps train
        known = {id(layer.omega) for layer in sharded_layers(self.module).values()} | set(map(id, self._trained()))
        rest = {name: tensor for name, tensor in named_state(self.module).items() if id(tensor) not in known}
        before = {name: tensor.detach().clone() for name, tensor in rest.items()}
        self.spend(task.download.steps_in(data.num_batches) if task.steps is None else task.steps)
        try:
            result = super().__call__(task)
        finally:
            moved = [name for name, tensor in rest.items() if not torch.equal(tensor, before[name])]
            for name in moved:  # or a later download could ask for what is left of an example
                rest[name].detach().copy_(before[name])
        if names := [*attributes(), *moved]:
            raise ValueError(f"{GOES_NOT} {first_of(names, 3)}, by which an example acts on the next; leave it out.")
        if self._num_flat > 0:
            warn(
                f"The gradients of all {self._num_flat} examples that a client drew are zero, so it learned from noise "
                "alone. Perhaps the loss compares the examples of a batch, which are one here: use another loss then."
            )
            self._num_flat = -1
        num_steps = task.recorder.num_steps  # a step on no example is one too
        self._is_compared = num_steps > 0
        return replace(result, num_steps=num_steps)

    def _trained(self) -> list[Tensor]:
        groups = self.optimizers[0].optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _epoch(self, task: LocalTask, local_epoch: int) -> Iterator[tuple[Any, int]]:
        data = task.data
        uniform = (self._numbers.uniform(len(data.indices)) for _ in range(data.num_batches))
        drawn = [data.indices[numbers < self._rate] for numbers in uniform]
        examples = data.source.batches(torch.split(torch.cat(drawn), 1), data.seed, (*data.ids, local_epoch))
        return ((list(islice(examples, len(one))), len(one)) for one in drawn)

    def _moved(self, batch: Any) -> Any:
        return [super(ExampleLoop, self)._moved(example) for example in batch]

    def _step(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        optimizer, losses = self.optimizers[0].optimizer, []
        trained = self._trained()
        size, grid = sum(p.numel() for p in trained), grid_of(self._std)
        total = torch.zeros(size, dtype=torch.float64, device=self.placement.device)
        self._zero_grad(optimizer, batch_idx)
        for example in batch:
            if (loss := loss_of(self._forward(task, example, batch_idx))) is None:
                continue
            for parameter in trained:
                parameter.grad = None
            self._scaled_backward(loss)
            parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
            steps = shortened(torch.cat([part.double().flatten() for part in parts]), self.choice.clip, grid)
            if steps is not None:  # a gradient that is not finite counts as none
                total += steps
                if self._num_flat >= 0:  # no example has had one yet
                    self._num_flat = -1 if steps.any() else self._num_flat + 1
            losses.append(loss.detach())
        total += self._numbers(size).mul_(self._std / grid).round_().to(total)
        total *= grid / (self._rate * len(task.data.indices))
        for parameter, part in zip(trained, torch.split(total, [p.numel() for p in trained]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)
        self.optimizers[0].step()
        return {}, torch.stack(losses).mean() if losses else None


class EpsilonEnd(ServerEnd):
    """Counts the epsilon of each client, over all its turns, and leaves out those that have spent their budget."""

    def __init__(self, choice: ExamplePrivacy, fit: Fit, batch_sizes: Assigned[int]) -> None:
        self._choice, self._fit = choice, fit
        self._known: Callable[[int], tuple[int, int]] = lambda c: (int(fit.sizes()[c]), batch_sizes.of(c))
        self._turns: dict[int, list[Rounds]] = {}  # of each client, in stretches with the same noise and draws
        self._largest = 0.0  # epsilon of any of them
        self._steps: dict[int, int] = {}  # of a turn
        self._told: set[int] = set()

    def remarks(self) -> Sequence[str]:
        known = "" if self._choice.noise_seed is None else " They follow from `noise_seed`, so they hide nothing."
        return [
            "privacy of examples: clients draw them at random and add noise in every local step, so training takes a "
            "pass per example. Left out, because it has no noise: losses, what clients log, and their seconds." + known
        ]

    def _after_turn(self, client_id: int) -> list[Rounds]:
        """A client's turns if it takes one more."""
        (rate, steps), multiplier = draws(*self._known(client_id)), self._choice.multiplier(*self._known(client_id))
        return joined(self._turns.get(client_id, ()), (rate, multiplier, self._steps.get(client_id, steps)))

    def _epsilon_after(self, client_id: int) -> float:
        return epsilon_of(self._after_turn(client_id), self._choice.delta)

    def _has_spent(self, client_id: int) -> bool:
        return (target := self._choice.target_epsilon) is not None and self._epsilon_after(client_id) > target

    def send(self, download: Download) -> Download:
        client_id = download.unit.client_id
        self._steps[client_id] = download.steps_in(draws(*self._known(client_id))[1])
        if self._has_spent(client_id):
            raise Unusable("spent")
        return download

    def figures(self, unit: WorkUnit) -> Mapping[str, float]:
        return {FIGURE: self._epsilon_after(unit.client_id)}

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        for of_others in processes.gather(self._steps):
            self._steps |= of_others
        return ()

    def note(self, outcomes: Sequence[ClientOutcome]) -> None:
        for client_id in (outcome.client_id for outcome in outcomes if outcome.left_out in TRAINED):
            self._largest = max(self._largest, self._epsilon_after(client_id))
            self._turns[client_id] = self._after_turn(client_id)
        spent = {outcome.client_id for outcome in outcomes if outcome.left_out == "spent"} - self._told
        self._told |= spent
        if spent and self._fit.processes.rank == 0:
            warn(
                f"Round {outcomes[0].round_idx}: clients {first_of(sorted(map(str, spent)), 9)} have spent their "
                f"`target_epsilon={self._choice.target_epsilon:g}`, and take no part any more."
            )

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        return {FIGURE: self._largest}

    def is_spent(self, num_rounds: int) -> bool:
        return all(map(self._has_spent, self._fit.sizes().nonzero().squeeze(1).tolist()))

    def state_dict(self) -> dict[str, Any]:
        return {"turns": dict(self._turns), "steps": dict(self._steps), "largest": self._largest} if self._turns else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._turns = {client: [*map(tuple, turns)] for client, turns in state_dict["turns"].items()}
        self._steps, self._largest = dict(state_dict["steps"]), state_dict["largest"]
