"""Modules whose steps, hooks and optimizers do more than most: clients train as plain Lightning does."""

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, ScalesAlone, same_state, seeded
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning_versions import AUTOCAST_CACHES
from observed_runs import acting
from programs import (
    HERE,
    PROGRAMS,
    Accumulating,
    AdversarialPair,
    ClosesFirst,
    CompiledInPlace,
    FeaturesKept,
    HoldsOpen,
    Lit,
    LooksTwice,
    Manual,
    PenaltyKept,
    ReadsSchedule,
    ScriptedPart,
    SearchesLines,
    StepByGlobal,
    StepsTwice,
    WithLookahead,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_spectral as ls
from lightning_spectral.protocol.records import Download, WorkUnit

UNCLIPPED = {"clip_tau": float("inf")}  # the clip is not exact for every optimizer, of which the package warns
HALF = ls.SpectralSharding(keep_ratio=0.5, **UNCLIPPED)
SPECTRAL = {"half": HALF, "mixed": ls.SpectralSharding(ls.Unbiased(), keep_ratio=[0.4, 0.8, 1.0], **UNCLIPPED)}

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of one program
# Clients of some programs change what the server drops, of which the package warns
DROPPED = pytest.mark.filterwarnings("ignore::lightning_spectral.errors.SpectralWarning")
SAME = StepByGlobal, CompiledInPlace, ReadsSchedule  # as without what is added


def parameter(program: type[Lit], *more: Any) -> Any:
    marks = DROPPED if program in (PenaltyKept, FeaturesKept) else ()  # attributes of these
    return pytest.param(program, *more, id="-".join((program.__name__, *more)), marks=marks)


EVERY_PROGRAM = pytest.mark.parametrize("program", [parameter(one) for one in PROGRAMS])


@pytest.fixture(autouse=True)
def _what_programs_use(tmp_path: Path) -> Iterator[None]:
    with (tmp_path / "lines").open("w") as HERE["opened"], closing(socket.socket()) as HERE["socket"]:
        yield
    HERE.clear()
    torch._dynamo.reset()


# One client is plain Lightning


class Replayed(IterableDataset[Any]):
    """The batches of a client, epoch by epoch."""

    def __init__(self, epochs: Iterable[list[Any]]) -> None:
        self.epochs = iter(epochs)

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.epochs))


HOOKS = ["training_step", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"]
HOOKS += ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"]
HOOKS += ["optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"]
PRECISIONS: dict[str, Callable[[], list[Any]]] = {
    "full": list,
    "scaled": lambda: [ScalesAlone()],
    "bf16": lambda: [MixedPrecision("bf16-mixed", "cpu")],
}
LEFT_OUT = {("scaled", one) for one in (LooksTwice, SearchesLines, ClosesFirst)}  # Lightning scales one closure's loss
LEFT_OUT.add(("bf16", ScriptedPart))  # which torch compiles after some steps: with other roundings
if AUTOCAST_CACHES:  # this Lightning's autocast keeps weights of before a step, which clients' does not
    LEFT_OUT |= {("bf16", one) for one in (StepsTwice, AdversarialPair)}
CASES = [parameter(one, name) for one in PROGRAMS for name in PRECISIONS if (name, one) not in LEFT_OUT]


def watched(program: Any) -> tuple[Any, list[Any], list[Tensor]]:
    """A module of this kind, its hooks as they are called, and its weights after each epoch."""
    calls: list[Any] = []
    weights: list[Tensor] = []

    def spy(name: str) -> Any:
        inherited = getattr(program, name)

        def hook(self: Any, *args: Any, **options: Any) -> Any:
            calls.append((name, *[one for one in args if isinstance(one, int)][-1:]))  # `epoch` is the round
            if name == "on_train_epoch_end":
                weights.append(nn.utils.parameters_to_vector(self.parameters()).detach().clone())
            return inherited(self, *args, **options)

        return hook

    own = {name: spy(name) for name in HOOKS if "on_" in name or name in vars(program)}
    return seeded(type(program.__name__, (program,), own)), calls, weights


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`", "ignore:You have overridden `on_")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize(("program", "precision"), CASES)
def test_one_client_trains_as_in_plain_lightning(program: Any, precision: str, toy: Any, fit: Fit, quiet: Any) -> None:
    """Its hooks are called in the same order, with the same numbers, and its weights have the same bits."""
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=40)
    trainer: dict[str, Any] = {"plugins": PRECISIONS[precision]()}
    client, calls, weights = watched(program)
    fit(client, data, algorithm=ls.FedAvg(), clients_per_round=1, local_epochs=3, trainer=trainer)

    alone, expected_calls, expected_weights = watched(program)
    start = nn.utils.parameters_to_vector(alone.parameters()).detach()
    own = data.client_data(Download(WorkUnit(0), 1.0, {}))
    epochs = Replayed([batch for batch, _ in own.epoch(epoch)] for epoch in range(3))
    plain = pl.Trainer(max_epochs=3, log_every_n_steps=1, **trainer, **quiet)
    plain.fit(alone, DataLoader(epochs, batch_size=None, num_workers=0))
    assert calls == expected_calls
    assert len(weights) == 3
    atol = 1e-6 if program is ScriptedPart else 0.0
    torch.testing.assert_close(weights, expected_weights, rtol=0.0, atol=atol)
    assert float((weights[-1] - start).abs().min()) > 0.0


@pytest.mark.sampled(4)
@EVERY_PROGRAM
def test_what_the_program_adds_makes_a_difference(program: Any, toy: Any, fit: Fit) -> None:
    """Otherwise it would prove little that it trains as in plain Lightning."""
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=40)
    run = partial(fit, data=data, algorithm=ls.FedAvg(), clients_per_round=1)
    with_it, without = (run(seeded(kind)).module.net.state_dict() for kind in (program, program.__base__))
    if program in SAME:
        torch.testing.assert_close(with_it, without, rtol=0, atol=1e-6)
    else:
        assert not same_state(with_it, without)


# Several clients


@pytest.fixture
def data(toy: Any) -> ls.FederatedDataModule:
    """Three clients of three batches each."""
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=3), batch_size=16)


@pytest.fixture
def fit_three(fit: Fit) -> Fit:
    return partial(fit, clients_per_round=3, max_epochs=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), SPECTRAL["mixed"]], ids=["dense", "mixed"])
@pytest.mark.parametrize(
    "program", [parameter(one) for one in PROGRAMS if one is not SearchesLines]
)  # which is refused
def test_it_trains_and_twice_gives_the_same_bits(algorithm: Any, program: Any, data: Any, fit_three: Fit) -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        starts: list[dict[str, Tensor]] = []
        note = acting(on_round_start=lambda trainer, model, opened: starts.append(clones(model.module.state_dict())))
        fitted = fit_three(seeded(program), data, algorithm=algorithm, callbacks=[note])
        assert len(fitted.rows) == 2
        return starts[0], fitted.state

    (start, one), (_, two) = run(), run()
    assert same_state(one, two)
    for name, value in one.items():
        assert bool(torch.isfinite(value).all()), name
        assert not torch.equal(value, start[name]), name


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.sampled(3)
@EVERY_PROGRAM
def test_no_client_notices_another(program: Any, toy: Any, fit: Fit) -> None:
    """What two of four clients send is the same where the others do not take part."""

    def sent(clients_per_round: int) -> dict[int, dict[str, Tensor]]:
        uploads: dict[int, dict[str, Tensor]] = {}

        def note(trainer: Any, model: Any, turn: Any) -> None:
            uploads[turn.unit.client_id] = clones(turn.upload.tensors)

        callbacks = [acting(on_client_end=note)]
        fit(seeded(program), data, algorithm=ls.FedAvg(), clients_per_round=clients_per_round, callbacks=callbacks)
        return uploads

    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4), batch_size=10)
    every, two = sent(4), sent(2)
    assert len(two) == 2
    assert all(same_state(upload, every[client_id]) for client_id, upload in two.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), *SPECTRAL.values()], ids=["dense", *SPECTRAL])
def test_a_part_compiled_in_place_runs_compiled_on_clients(algorithm: Any, data: Any, fit_three: Fit) -> None:
    module = fit_three(seeded(CompiledInPlace), data, algorithm=algorithm).module
    assert HERE["compiled"] >= 1
    assert module.net._compiled_call_impl is not None


def test_what_optimizers_keep_on_themselves_and_of_their_own_starts_anew(data: Any, fit_three: Fit) -> None:
    class Watched(WithLookahead):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                outer = HERE["optimizer"]
                seen.append((outer.num_steps, len(outer.state), len(outer.inner.state)))

    seen: list[tuple[int, int, int]] = []
    fit_three(seeded(Watched), data, algorithm=HALF)
    assert seen == [(0, 0, 0)] * 6


def test_gradients_that_one_client_leaves_are_not_the_next_ones(data: Any, fit_three: Fit) -> None:
    class Watched(Accumulating):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append(sum(parameter.grad is not None for parameter in self.parameters()))

    seen: list[int] = []
    module = fit_three(seeded(Watched), data, algorithm=HALF).module
    assert seen == [0] * 6
    assert not any(parameter.grad is not None for parameter in module.parameters())


def test_objects_that_cannot_be_copied_are_the_same_on_clients(data: Any, fit_three: Fit) -> None:
    class Watched(HoldsOpen):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.add(held(self))

    def held(module: Any) -> tuple[int, ...]:
        return tuple(map(id, (module.lock, module.halves, module.file, module.socket)))

    seen: set[tuple[int, ...]] = set()
    module = seeded(Watched)
    fit_three(module, data, algorithm=HALF)
    assert seen == {held(module)}


def test_a_lock_that_a_client_holds_when_it_fails_is_released(data: Any, fit_three: Fit) -> None:
    class Failing(HoldsOpen):
        def forward(self, x: Tensor) -> Tensor:
            raise FloatingPointError("within the lock")

    module = seeded(Failing)
    with pytest.raises(
        ls.ClientError, match=r"Round 0, client \d, local training: FloatingPointError: within the lock"
    ):
        fit_three(module, data, algorithm=HALF)
    assert not module.lock.locked()


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_a_client_that_fails_while_an_optimizer_is_toggled_leaves_nothing_frozen(algorithm, data, fit_three):
    class Failing(AdversarialPair):
        def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
            calls.append(loss.item())
            if len(calls) == 2:
                raise FloatingPointError("while toggled")
            super().manual_backward(loss, *args, **options)

    calls: list[float] = []
    module = seeded(Failing)
    faults = ls.Faults(on_error=ls.LeaveOut(1.0))
    with pytest.warns(ls.SpectralWarning, match="while toggled"):
        fit_three(module, data, algorithm=algorithm, faults=faults)
    assert len(calls) == 2 + 5 * 6  # the others take both steps in each of three batches
    assert all(parameter.requires_grad for parameter in module.parameters())


# The Trainer of the run


def seen_on_clients(
    look: Callable[[Any], Any], data: Any, fit: Fit, base: type[Lit] = Lit, **options: Any
) -> tuple[list[Any], Fitted]:
    """What a function of the module finds in each first step, and the fit."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                found.append(look(self))

    found: list[Any] = []
    return found, fit(seeded(Watched), data, **options)


TRAINED_BY = pytest.mark.parametrize("base", [Lit, Manual], ids=["automatic", "manual"])


@TRAINED_BY
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_a_step_finds_loggers_and_metrics_of_the_run(algorithm, base, data, fit_three, tmp_path):
    def look(module: Any) -> Any:
        trainer = module.trainer
        counters = trainer.max_epochs, module.current_epoch, module.global_step
        return trainer.datamodule.of, trainer.logger, module.logger, counters, dict(trainer.callback_metrics)

    logger = CSVLogger(tmp_path)
    found, fitted = seen_on_clients(
        look,
        data,
        fit_three,
        base,
        algorithm=algorithm,
        local_epochs=2,
        trainer={"logger": logger, "log_every_n_steps": 1},
    )
    steps = [(2, turn // 2, 3 * turn) for turn in range(4)]  # of two epochs of three batches, in two rounds
    assert [counters for *_, counters, _ in found] == [*steps[:2] * 3, *steps[2:] * 3]
    for datamodule, *loggers, _, _ in found:
        assert datamodule is data
        assert loggers == [logger, logger]
    assert [bool(metrics) for *_, metrics in found] == [False] * 6 + [True] * 6
    assert repr(found[-1][-1]["fl/loss"].item()) == repr(fitted.history.column("fl/loss")[0])


@TRAINED_BY
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_a_step_that_asks_the_trainer_to_stop_ends_the_run_after_its_round(algorithm, base, data, fit_three):
    def stop(module: Any) -> None:
        if module.trainer.current_epoch == 1:
            module.trainer.should_stop = True

    found, fitted = seen_on_clients(stop, data, fit_three, base, algorithm=algorithm, max_epochs=5)
    assert len(found) == 6  # all clients of the round take their turns
    assert fitted.trainer.current_epoch == fitted.trainer.global_step == 2
    assert fitted.history.column("fl/clients") == [3.0, 3.0]
