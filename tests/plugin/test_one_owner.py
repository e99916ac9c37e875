"""Every piece of a module's state has one owner: what clients start from, what is put back, and who sees what."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import HARDLY_MOVED, Fit, check_resumes, said_during, same_state, seeded
from observed_runs import acting
from torch import nn
from torchmetrics import MeanMetric
from toy_models import LitNet, cross_entropy, variant

import lightning_spectral as ls

MIXED = ls.SpectralSharding(ls.Unbiased(), keep_ratio=[0.3, 0.6] * 3)
ALGORITHMS = {
    "FedAvg": ls.FedAvg(),
    "SpectralSharding": MIXED,
    "LoRA": ls.LoRA(rank=[2, 3] * 3),
    "WidthSharding": ls.WidthSharding(keep_ratio=[0.25, 0.5] * 3),
    "Zampling": ls.Zampling(2),
    "FIARSE": ls.FIARSE(keep_ratio=[0.25, 0.5] * 3),
}
DENSE_AND_MIXED = pytest.mark.parametrize("algorithm", [ls.FedAvg(), MIXED], ids=["dense", "mixed"])
EVERY_ALGORITHM = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
# Clients change what the server drops, of which the package warns: a test of its own reads the warning
DROPPED = pytest.mark.filterwarnings("ignore::lightning_spectral.errors.SpectralWarning")


class Lit(LitNet):
    """Three layers, of which spectral sharding takes the second."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self) -> None:
        layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
        super().__init__(nn.Sequential(*layers), momentum=0.9)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self, batch))


@pytest.fixture
def data(toy: Any) -> ls.FederatedDataModule:
    """Six clients of three batches each; every other client holds more."""
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=6), val=toy, batch_size=8)


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, clients_per_round=6, max_epochs=2)


def watched(look: Callable[[Any], Any], act: Callable[[Any], Any] = bool, base: Any = Lit, **attributes: Any) -> Any:
    """A module that acts in every step, whose loss is multiplied by a float that this gives, and what is seen first."""
    seen: list[Any] = []

    class Watched(base):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append(look(self))
            factor = act(self)
            return super().training_step(batch, batch_idx) * (factor if isinstance(factor, float) else 1.0)

    module = seeded(Watched)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module, seen


def each_turn(act: Callable[[Any, int, int], Any]) -> ls.RoundCallback:
    """A callback that is told of the server's module, the round and the client before a client trains."""
    return acting(on_client_start=lambda _, model, turn: act(model.module, turn.round_idx, turn.unit.client_id))


# What the server's hooks and callbacks change


@pytest.mark.sampled(2)
@DENSE_AND_MIXED
@pytest.mark.parametrize(
    "moment",
    [
        *("on_train_epoch_start", "on_round_start", "on_client_start", "on_client_end", "on_cohort_end"),
        *("on_round_end", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"),
    ],
)
def test_what_a_callback_sets_reaches_the_next_client_of_every_keep_ratio(
    moment: str, algorithm: Any, data: Any, fit: Fit
) -> None:
    def advance(trainer: Any, model: Any, *args: Any) -> None:
        model.module.stage += 1

    module, seen = watched(lambda module: module.stage, stage=0)
    there: list[int] = []
    callbacks = [acting(**{moment: advance}), each_turn(lambda module, *_: there.append(module.stage))]
    fit(module, data, algorithm=algorithm, max_epochs=3, callbacks=callbacks)
    assert seen == there
    assert len(set(seen)) >= 3


class Levelled(Lit):
    """Its loss weighs more after each validation; the level is part of its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.level)

    def on_validation_epoch_end(self) -> None:
        self.level += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["level"] = self.level

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.level = checkpoint["level"]


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_a_resumed_run_has_the_levels_of_the_uninterrupted_one(
    algorithm: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    check_resumes(fit, Levelled, data, tmp_path, algorithm=algorithm, clients_per_round=3)


@pytest.mark.sampled(1)
@DROPPED
@DENSE_AND_MIXED
def test_when_a_client_that_is_left_out_fails_makes_no_difference(algorithm: Any, data: Any, fit: Fit) -> None:
    class Failing(Levelled):
        fails_at = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append(self.level)
            if now[-1] in (1, 2) and batch_idx == self.fails_at:
                raise FloatingPointError("too warm")
            self.level += 10
            return super().training_step(batch, batch_idx)

    def run(fails_at: int) -> Any:
        seen.clear()
        Failing.fails_at = fails_at
        note = each_turn(lambda module, round_idx, client_id: now.append(client_id))
        faults = ls.Faults(on_error=ls.LeaveOut(1.0))
        with pytest.warns(ls.SpectralWarning, match=r"training failed \(FloatingPointError: too warm\)"):
            fitted = fit(seeded(Failing), data, algorithm=algorithm, faults=faults, callbacks=[note])
        assert seen == [0] * 6 + [1] * 6
        assert fitted.module.level == 2
        assert fitted.history.column("fl/left_out_error") == [2.0, 2.0]
        return fitted

    seen: list[int] = []
    now: list[int] = []
    early, late = run(0), run(2)
    assert same_state(early.model.state_dict(), late.model.state_dict())


# Generators of the module's own

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {  # of all kinds in `test_kept_state`
    "random.Random": (random.Random, lambda own: own.random()),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda own: float(torch.rand((), generator=own)),
    ),
}
EVERY_GENERATOR = pytest.mark.parametrize("kind", GENERATORS)


class Noisy(Lit):
    """Its losses are weighted at random, by two generators of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.draw = GENERATORS[kind]
        self.one, self.two = make(5), make(5)
        self.draw_two = partial(self.draw, self.two)

    def weights(self) -> tuple[float, float]:
        return self.draw(self.one), self.draw_two()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * sum(self.weights())


@pytest.mark.sampled(1)
@EVERY_GENERATOR
def test_a_run_with_generators_of_its_own_resumes(kind: str, data: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, partial(Noisy, kind), data, tmp_path, algorithm=MIXED, clients_per_round=3)


@pytest.mark.sampled(1)
@EVERY_GENERATOR
def test_draws_depend_on_the_round_the_client_and_the_name_alone(kind: str, data: Any, fit: Fit) -> None:
    def weights(self: Noisy) -> tuple[float, float]:
        drawn[-1][1].extend(both := Noisy.weights(self))
        return both

    def drawn_with(clients_per_round: int, seed: int = 0) -> dict[tuple[int, int], list[float]]:
        drawn.clear()
        note = each_turn(lambda module, *ids: drawn.append((ids, [])))
        options: dict[str, Any] = {"algorithm": MIXED, "clients_per_round": clients_per_round, "seed": seed}
        fit(seeded(variant(Noisy, weights=weights), kind), data, callbacks=[note], **options)
        return dict(drawn)

    drawn: list[tuple[tuple[int, int], list[float]]] = []
    whole, part, other_seed = drawn_with(6), drawn_with(2), drawn_with(6, seed=1)
    assert len(part) == 4
    assert all(whole[ids] == values for ids, values in part.items())
    all_values = [value for run in (whole, other_seed) for values in run.values() for value in values]
    assert len(set(all_values)) == len(all_values) == 2 * 12 * 6  # two weights in each of three steps


@EVERY_GENERATOR
def test_the_server_goes_on_drawing_where_it_was(kind: str, data: Any, fit: Fit) -> None:
    drawn: list[float] = []
    validating = variant(Noisy, on_validation_epoch_end=lambda self: drawn.extend(self.weights()))
    fit(module := seeded(validating, kind), data, algorithm=MIXED)
    make, draw = GENERATORS[kind]
    fresh = make(5)
    first, second, third = draw(fresh), draw(fresh), draw(fresh)
    assert drawn == [first, first, second, second]
    assert module.weights() == (third, third)


# What a module keeps on itself


@dataclass
class Tally:
    total: int = 0
    parts: list[int] = field(default_factory=list)

    def add(self) -> None:
        self.total += 1
        self.parts.append(self.total)


# What is kept, and how a client or the server changes it in place; `test_kept_state` has all kinds
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (list, lambda kept: kept.append(len(kept))),
    "dataclass": (Tally, Tally.add),
    "tensor": (lambda: torch.zeros(2), lambda kept: kept.add_(1)),
    "nested": (lambda: {"a": [Counter(), Tally()]}, lambda kept: (kept["a"][0].update("b"), kept["a"][1].add())),
}


@pytest.mark.sampled(2)
@DROPPED
@pytest.mark.parametrize("kind", KEPT)
def test_each_client_starts_with_what_the_server_keeps_now(kind: str, data: Any, fit: Fit) -> None:
    make, change = KEPT[kind]
    module, seen = watched(lambda module: repr(module.kept), lambda module: change(module.kept), kept=make())
    by_the_server = acting(on_round_end=lambda trainer, model, summary: change(model.module.kept))
    kept = module.kept
    fit(module, data, algorithm=MIXED, callbacks=[by_the_server])
    reference = make()
    expected = [repr(reference)]
    for _ in range(2):
        change(reference)
        expected.append(repr(reference))
    assert seen == [expected[0]] * 6 + [expected[1]] * 6
    assert module.kept is kept
    assert repr(kept) == expected[2]


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_metrics_gradients_and_optimizer_state_start_empty_and_are_dropped(algorithm: Any, data: Any, fit: Fit) -> None:
    class Measuring(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append(look(self, self.optimizers()))
            self.mean.update(batch[0])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            self.made.append(super().configure_optimizers())
            return self.made[-1]

    def look(module: Any, optimizer: Any) -> tuple[int, int, int]:
        with_gradient = sum(parameter.grad is not None for parameter in module.parameters())
        return module.mean.update_count, with_gradient, len(optimizer.state)

    made: list[Any] = []
    Measuring.made = made  # type: ignore[attr-defined]
    seen: list[tuple[int, int, int]] = []
    between: list[tuple[int, int, int]] = []
    note = acting(on_client_end=lambda trainer, model, turn: between.append(look(model.module, made[-1])))
    module = fit(seeded(Measuring), data, algorithm=algorithm, callbacks=[note]).module
    assert seen == between == [(0, 0, 0)] * 12
    assert look(module, made[-1]) == (0, 0, 0)


# What is said of it


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_one_warning_names_what_clients_change_and_the_server_drops(algorithm: Any, data: Any, fit: Fit) -> None:
    def count(module: Any) -> None:
        module.steps += 1
        module.lengths.append(1)

    module, _ = watched(bool, count, steps=0, lengths=[], constant=3)
    said = said_during(lambda: fit(module, data, algorithm=algorithm, max_epochs=3))
    (warning,) = [text for text in said if "steps" in text]
    assert "lengths" in warning
    assert "constant" not in warning
    assert "buffer" in warning or "self.log" in warning
    assert said == [warning]


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_nothing_is_said_where_clients_change_nothing_that_is_dropped(algorithm: Any, data: Any, fit: Fit) -> None:
    class Quiet(Noisy):
        def __init__(self) -> None:
            super().__init__("random.Random")
            self.mean, self.constants = MeanMetric(), {"a": [1]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean.update(batch[0])
            self.log("mean", self.mean)
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            self.constants["a"].append(2)  # by the server

    assert said_during(lambda: fit(seeded(Quiet), data, algorithm=algorithm)) == []


# Clients that fail


def photograph(module: nn.Module) -> dict[str, Any]:
    """Classes, attributes and hooks of all parts of a module, and its tensors with their memory and bytes."""
    parts = {}
    for name, part in module.named_modules():
        public = {key: copy.copy(value) for key, value in vars(part).items() if not key.startswith("_")}
        hooks = {key: dict(value) for key, value in vars(part).items() if key.endswith("_hooks")}
        parts[name] = id(part), type(part), sorted(vars(part)), public, hooks
    tensors = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        place = id(tensor), tensor.data_ptr()
        tensors[name] = place, tensor.requires_grad, tensor.grad is None, tensor.detach().numpy().tobytes()
    return {"parts": parts, "tensors": tensors}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("error", [FloatingPointError("here"), KeyboardInterrupt()], ids=["error", "interrupt"])
@EVERY_ALGORITHM
def test_a_client_that_fails_leaves_the_servers_module_as_it_was(
    algorithm: Any, error: BaseException, data: Any, fit: Fit
) -> None:
    """In the second step of the eighth turn, which is the second of the second round."""

    def on_after_backward(self: Any) -> None:
        calls.append(len(turns))
        if calls.count(8) == 2:
            raise error

    def note(module: Any, *ids: int) -> None:
        turns.append(ids)
        photographs.append(photograph(module))

    calls: list[int] = []
    turns: list[tuple[int, ...]] = []
    photographs: list[dict[str, Any]] = []
    module = seeded(variant(Lit, on_after_backward=on_after_backward))
    expected = (SystemExit, KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else ls.ClientError
    with pytest.raises(expected) as raised:
        fit(module, data, algorithm=algorithm, local_epochs=2, callbacks=[each_turn(note)])
    if isinstance(error, FloatingPointError):
        address = f"Round 1, client {turns[-1][1]}, local training: FloatingPointError: here"
        assert str(raised.value).startswith(address)
    assert turns[-1][0] == 1
    assert photograph(module) == photographs[-1]
    assert type(module.net[2]) is nn.Linear


@pytest.mark.sampled(2)
@EVERY_ALGORITHM
@pytest.mark.filterwarnings(HARDLY_MOVED)
def test_a_callback_that_fails_between_clients_leaves_the_servers_module_as_it_was(
    algorithm: Any, data: Any, fit: Fit
) -> None:
    def fail(trainer: Any, model: Any, turn: Any) -> None:
        if len(photographs) == 8:
            raise KeyError("mine")

    photographs: list[dict[str, Any]] = []
    note = each_turn(lambda module, *_: photographs.append(photograph(module)))
    with pytest.raises((KeyError, ls.ClientError), match="mine"):
        fit(module := seeded(Lit), data, algorithm=algorithm, callbacks=[note, acting(on_client_end=fail)])
    assert photograph(module) == photographs[-1]


# Who sees what

LOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_round_start", "on_train_batch_start"),
    *("on_client_start", "on_client_end", "on_cohort_end", "on_round_end", "on_train_batch_end"),
    *("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)
BEFORE_THE_STEP = ("on_train_epoch_start", "on_round_start", "on_client_start", "on_client_end", "on_cohort_end")


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@EVERY_ALGORITHM
def test_callbacks_see_the_servers_layers_and_weights(algorithm: Any, data: Any, fit: Fit) -> None:
    def looking(name: str) -> Callable[..., None]:
        def look(trainer: Any, model: Any, *args: Any) -> None:
            found = model.module
            assert found is module
            assert [type(layer) for layer in found.net] == kinds
            assert [(name, id(p)) for name, p in found.named_parameters()] == parameters
            assert {name: tuple(value.shape) for name, value in found.state_dict().items()} == shapes
            values = nn.utils.parameters_to_vector(found.parameters()).detach().numpy().tobytes()
            seen.append((name, trainer.current_epoch, values))

        return look

    module = seeded(Lit)
    kinds = [type(layer) for layer in module.net]
    parameters = [(name, id(p)) for name, p in module.named_parameters()]
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    seen: list[tuple[str, int, bytes]] = []
    fit(module, data, algorithm=algorithm, callbacks=[acting(**{name: looking(name) for name in LOOKS})])
    assert {name for name, *_ in seen} == set(LOOKS)
    for round_idx in range(2):
        before = {values for name, at, values in seen if at == round_idx and name in BEFORE_THE_STEP}
        (after,) = {values for name, at, values in seen if at == round_idx and name == "on_round_end"}
        assert len(before) == 1
        assert after not in before


def test_a_gradient_hook_registered_in_mid_fit_acts_on_the_next_clients(data: Any, fit: Fit) -> None:
    def register(trainer: Any, model: Any, *args: Any) -> None:
        model.module.net[0].weight.register_hook(torch.zeros_like)
        kept.append(model.module.net[0].weight.detach().clone())

    kept: list[torch.Tensor] = []
    module = fit(seeded(Lit), data, algorithm=ls.FedAvg(), callbacks=[acting(on_train_epoch_end=register)]).module
    assert not torch.equal(kept[0], seeded(Lit).net[0].weight)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], module.net[0].weight)


# Whose objects these are


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@EVERY_ALGORITHM
def test_a_fit_keeps_the_module_its_parameters_and_their_memory(algorithm: Any, data: Any, fit: Fit) -> None:
    module = seeded(Lit)
    module.register_buffer("offset", torch.zeros(3))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    places = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}
    assert fit(module, data, algorithm=algorithm).model.module is module
    now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in now.items()} == places


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_clients_train_the_very_module_with_the_very_optimizer(algorithm: Any, data: Any, fit: Fit) -> None:
    class Watched(Lit):
        def configure_optimizers(self) -> Any:
            made.append(super().configure_optimizers())
            return made[-1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self is module
            assert self.net[0].weight is first
            assert self.optimizers(use_pl_optimizer=False) is made[0]
            memory.add(first.data_ptr())
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            stepped.append(optimizer)

    made: list[Any] = []
    stepped: list[Any] = []
    memory: set[int] = set()
    module = seeded(Watched)
    first = module.net[0].weight
    own = first.data_ptr()
    fit(module, data, algorithm=algorithm)
    assert len(made) == 1
    assert stepped == made * 36  # two rounds of six clients with three steps each
    assert own not in memory  # that of the server stays out of clients' steps
    assert first.data_ptr() == own


@pytest.mark.sampled(1)
@DENSE_AND_MIXED
def test_a_second_fit_of_the_same_module_goes_on_from_the_first(algorithm: Any, data: Any, fit: Fit) -> None:
    """As one of a fresh module with the same weights does."""
    once = fit(seeded(Lit), data, algorithm=algorithm, max_epochs=1).module
    fresh = seeded(Lit)
    fresh.load_state_dict(once.state_dict())
    again, other = (fit(module, data, algorithm=algorithm, max_epochs=1).state for module in (once, fresh))
    assert same_state(again, other)


def test_what_is_too_large_to_be_put_back_is_named_as_such(data: Any, fit: Fit) -> None:
    class Replaying(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.memory = np.zeros(2**19 + 1)  # more than 4 MiB

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.memory[batch_idx] += 1.0
            return super().training_step(batch, batch_idx)

    with pytest.warns(ls.SpectralWarning, match=r"clients change `memory \(not put back: too large\)`"):
        fit(seeded(Replaying), data, algorithm=ls.FedAvg(), max_epochs=1)
