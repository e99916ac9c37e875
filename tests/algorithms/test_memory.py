"""The memory of training that the table counts is what torch's allocator hands out on a device, from its own log."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from federation import seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, Net

import lightning_spectral as ls
from lightning_spectral.algorithms import costs
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import Device, Instructions
from lightning_spectral.client.local_loop import LocalSettings, Placement
from lightning_spectral.client.user_optimizer import options_of
from lightning_spectral.protocol.codec import decode, encode
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, WorkUnit

BATCH = 8


def mlp() -> nn.Sequential:
    """Eight wide layers, so that weights matter most."""
    wide = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *wide, nn.Linear(256, 10))


def cnn() -> nn.Sequential:
    """Eight convolutions, so that activations matter most; without padding, since shapes shrink."""
    between = [layer for _ in range(6) for layer in (nn.Conv2d(48, 48, 3), nn.GroupNorm(2, 48), nn.ReLU())]
    first, head = nn.Conv2d(3, 48, 3, padding=1), [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 10)]
    return nn.Sequential(first, nn.ReLU(), *between, *head)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, torch.zeros(BATCH, 64)),
    "cnn": (cnn, torch.zeros(BATCH, 3, 16, 16)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}
ALGORITHMS: dict[str, tuple[Any, float, float]] = {  # with a capacity, and the keep ratio of a client that has it
    "fedavg": (ls.FedAvg(), 1.0, 1.0),
    "scaffold": (ls.Scaffold(), 1.0, 1.0),
    "feddyn": (ls.FedDyn(), 1.0, 1.0),
    "ditto": (ls.Ditto(), 1.0, 1.0),
    "q-fedavg": (ls.QFedAvg(), 1.0, 1.0),
    "spectral": (ls.SpectralSharding(keep_ratio=0.25), 0.25, 0.25),
    "spectral, whole": (ls.SpectralSharding(keep_ratio=1.0), 1.0, 1.0),
    "width": (ls.WidthSharding(keep_ratio=0.5), 0.5, 0.5),
    "lora": (ls.LoRA(rank=4), 4, 1.0),
    "fiarse": (ls.FIARSE(keep_ratio=0.25), 0.25, 0.25),
    "zampling": (ls.Zampling(4), 4, 1.0),
}


def peak_of_a_turn(lit: Any, algorithm: Any, keep_ratio: float, optimizer: Any, example: Tensor) -> int:
    """The most bytes that torch's allocator has handed out at once, while a device works off a download it is sent."""
    half = algorithm.bind(lit, algorithm.new_state(lit, 0))
    kept: dict[str, Tensor] = {}
    unit = WorkUnit(0, coefficient=1.0)
    opened = half.open(Cohort(0, 0, {keep_ratio: (unit,)}, shares={unit.key: 1.0}))
    packed = encode(replace(opened.send(unit)[0], options=(options_of(optimizer),), local_epochs=1))
    examples = TensorDataset(example.repeat(3, *[1] * (example.dim() - 1)), torch.zeros(3 * BATCH, dtype=torch.long))

    def turn() -> None:
        received = replace(decode(*packed, Download), client_state={n: tensor.clone() for n, tensor in kept.items()})
        data = ClientData(BatchSource(examples), torch.arange(3 * BATCH), BATCH, 0, ())
        settings = LocalSettings(Placement(moves_batches=False))
        upload = Device(lit, Instructions(half.client_side), [optimizer], lambda _: data, settings).run(received)
        assert upload.num_steps >= 3, upload.failure
        kept.update(upload.client_state)

    turn()  # as in later ones, the device then has a state, if it keeps any
    return most_at_once(turn)


def most_at_once(act: Callable[[], object]) -> int:
    gc.collect()  # or what earlier turns have left is freed while this one is measured
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        act()
    events = profiler.profiler.kineto_results.events()
    log = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, num_bytes in log:
        now += num_bytes
        most = max(most, now)
    return most


def largest_tensor(module: nn.Module, example: Tensor) -> int:
    """Bytes of the largest weight or output of a layer."""
    sizes = [p.nbytes for p in module.parameters()]
    for layer in module.modules():
        layer.register_forward_hook(lambda _, __, output: sizes.append(output.nbytes))
    module(example)
    return max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "name"),
    [*(("mlp", name) for name in ALGORITHMS), *[("cnn", name) for name in ("fedavg", "spectral", "width", "zampling")]],
)
def test_the_memory_of_training_is_what_the_allocator_hands_out(network: str, name: str) -> None:
    """Besides what single operations allocate and free: a copy of an argument and of the result, in another layout."""
    make, example = NETWORKS[network]
    algorithm, capacity, keep_ratio = ALGORITHMS[name]
    lit = seeded(lambda: LitNet(make()))
    lit.example_input_array = example
    optimizer = OPTIMIZERS["sgd" if name == "scaffold" else "adam"](lit.parameters())
    cost = ls.cost_table(lit, algorithm, [capacity], optimizer=optimizer).at[capacity]
    counted = cost.memory_bytes - (cost.held_bytes if name == "zampling" else 0)  # Q is numpy's
    measured = peak_of_a_turn(lit, algorithm, keep_ratio, optimizer, example)
    print(f"{network}, {name}: {counted} counted, {measured} measured, {measured / counted - 1:+.1%}")
    next_state = cost.held_bytes if name in ("scaffold", "feddyn") else 0  # made when activations are gone
    layers = ls.replace_layers(lit, capacity) if name.startswith("spectral") else nn.Module()
    products = sum(layer.u.nbytes for layer in ls.nn.sharded_layers(layers).values())  # with multipliers of 1: none
    assert counted - products <= measured <= counted + 2 * largest_tensor(lit, example) + next_state


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_state_is_what_the_optimizer_makes_of_trained_parameters(optimizer: str, values: int) -> None:
    module, example = mlp(), torch.zeros(BATCH, 64)
    module[0].requires_grad_(False)
    table = ls.cost_table(module, ls.FedAvg(), [1], example, optimizer=OPTIMIZERS[optimizer](module.parameters()))
    trained = [p for p in module.parameters() if p.requires_grad]
    cost, counters = table.at[1], 4 * len(trained) * (optimizer == "adam")
    assert cost.weight_bytes == sum(p.nbytes for p in module.parameters())
    assert cost.gradient_bytes == sum(p.nbytes for p in trained)
    assert cost.optimizer_bytes == values * cost.gradient_bytes + counters


@pytest.mark.slow
def test_state_made_by_the_constructor_is_of_what_a_client_holds_and_no_activation() -> None:
    """Adagrad makes a value for each parameter at once, also of weights that sub-models lack."""
    example = torch.zeros(BATCH, 64)
    costs = {}
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        module = mlp()
        optimizer = kind(module.parameters(), lr=0.1)
        costs[kind] = ls.cost_table(module, ls.SpectralSharding(), [0.5], example, optimizer=optimizer).at[0.5]
    sgd, adagrad = costs.values()
    counters = adagrad.optimizer_bytes - adagrad.gradient_bytes
    assert counters % 4 == 0
    assert 0 < counters < 100  # one for each parameter
    assert sgd.activation_bytes <= adagrad.activation_bytes <= sgd.activation_bytes + adagrad.gradient_bytes


def test_parameters_that_the_optimizer_does_not_step_have_no_gradient() -> None:
    module = mlp()
    head = torch.optim.SGD(module[-1].parameters(), lr=0.1)
    cost = ls.cost_table(module, ls.FedAvg(), [1], torch.zeros(BATCH, 64), optimizer=head).at[1]
    assert cost.gradient_bytes == sum(p.nbytes for p in module[-1].parameters())


def test_activations_are_what_a_step_holds_at_once() -> None:
    """By hand: the most is alive in the backward pass of the ReLU."""
    net, batch = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 50)), torch.zeros(30, 4)
    cost = ls.cost_table(net, ls.FedAvg(), [1], batch, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)).at[1]
    hidden, output = 4 * 30 * 100, 4 * 30 * 50
    alive = batch.nbytes + 3 * hidden + 2 * output  # of the ReLU its output, and the gradients of both its ends
    first_layer = 4 * (4 * 100 + 100)  # whose gradients are not there yet
    assert cost.activation_bytes == alive - first_layer


def test_sampled_weights_their_gradient_and_its_vector_are_held_at_once() -> None:
    net = nn.Linear(64, 64)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    cost = ls.cost_table(net, ls.Zampling(4), [4], torch.zeros(1, 64), optimizer=sgd).at[4]
    assert cost.activation_bytes >= 3 * 4 * (64 * 64 + 64)


def test_a_loss_among_the_outputs_is_where_the_backward_pass_begins() -> None:
    """Models of transformers return it beside the logits."""

    def with_loss(net: Any, x: Tensor) -> Any:
        logits = net.layer(x)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits}

    module, x = Net(with_loss, layer=nn.Linear(4, 1000)), torch.zeros(10, 4)
    cost = ls.cost_table(module, ls.FedAvg(), [1], x, optimizer=torch.optim.SGD(module.parameters(), lr=0.1)).at[1]
    assert cost.activation_bytes < 4 * 10 * 1000 * 4  # logits and their gradient, but not another gradient of ones


def test_costs_without_an_optimizer_say_nothing_of_memory() -> None:
    table = ls.cost_table(mlp(), ls.FedAvg(), [1], torch.zeros(BATCH, 64))
    assert "memory" not in str(table)
    assert "weight_bytes" not in table.as_dict()["full"]
    assert table.full.memory_bytes == 0


def test_the_parts_that_are_shown_add_up() -> None:
    module = mlp()
    options = {"optimizer": OPTIMIZERS["adam"](module.parameters())}
    table = ls.cost_table(module, ls.Zampling(), [4, 8], torch.zeros(BATCH, 64), **options)
    costs, memory = str(table).split("\n\n")
    assert costs.splitlines()[0].endswith("up")
    assert memory.splitlines()[0].split("  ")[0] == "compression"
    numbers = table.as_dict()["8"]
    parts = ("weight", "gradient", "optimizer", "activation", "held", "downlink", "frozen")
    assert numbers["memory_bytes"] == sum(numbers[f"{part}_bytes"] for part in parts)
    assert table._repr_html_().count("<table>") == 2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [ls.SpectralSharding(), ls.WidthSharding()], ids=["spectral", "width"])
def test_the_answer_fits_and_the_next_larger_does_not(algorithm: Any) -> None:
    """Every keep ratio is tried, and a budget for each client, with units."""
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    example, ratios = torch.zeros(BATCH, 8), [n / 16 for n in range(1, 17)]
    adam = OPTIMIZERS["adam"](module.parameters())
    table = ls.cost_table(module, algorithm, ratios, example, optimizer=adam).at
    needed = [table[ratio].memory_bytes for ratio in ratios]
    assert needed == sorted(needed)
    budgets = [f"{needed[3]} B", f"{needed[9] / 1000} kB", f"{needed[15] / 1024} KiB"]
    assert ls.largest_that_fits(module, algorithm, example, memory=budgets, optimizer=adam) == [0.25, 0.625, 1.0]
    assert ls.largest_that_fits(module, algorithm, example, memory=needed[9] - 1, optimizer=adam) == 0.5625


@pytest.mark.slow
def test_most_budgets_of_many_clients_follow_from_what_was_counted_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are right nevertheless."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)}
    algorithm, example, counted, at = ls.SpectralSharding(), torch.zeros(4096, 64), [], costs._Counted.at
    monkeypatch.setattr(costs._Counted, "at", lambda *args: (counted.append(args[1]), at(*args))[1])
    budgets = range(5_890_000, 6_220_000, 33_000)
    found: Any = ls.largest_that_fits(module, algorithm, example, memory=budgets, **options)
    assert len(counted) <= 4  # of 48; each search on its own counts about three for a budget
    candidates = [part / 48 for part in range(1, 49)]
    following = [candidates[candidates.index(ratio) + 1] for ratio in found]
    table = ls.cost_table(module, algorithm, [*found, *following], example, **options).at
    for ratio, beyond, budget in zip(found, following, budgets, strict=True):
        assert table[ratio].memory_bytes <= budget < table[beyond].memory_bytes


def convolutions() -> nn.Module:
    """Layers with several numbers of terms, which rebuild their weights from different keep ratios on."""
    inner = [nn.Conv2d(16, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3), nn.Conv2d(32, 32, 1)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *inner, nn.Flatten(), nn.Linear(288, 20), nn.Linear(20, 5))


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["adam"], torch.optim.Adagrad], ids=["adam", "adagrad"])
@pytest.mark.parametrize(
    ("algorithm", "most"),
    [
        (ls.SpectralSharding(), 8),
        (ls.SpectralSharding(layers=ls.LayerChoices(term_granularity=4)), 15),
        (ls.SpectralSharding(layers=ls.LayerChoices(convolutions="tucker")), 64),
        (ls.WidthSharding(), 2),
    ],
    ids=["spectral", "granular", "Tucker", "width"],
)
def test_what_follows_for_a_keep_ratio_is_what_would_be_counted(
    algorithm: Any, most: int, make_optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layers decide: with every keep ratio counted, each answer fits, and the next larger one does not."""
    module, example = convolutions(), torch.zeros(64, 3, 12, 12)
    adam, counted, at = make_optimizer(module.parameters()), [], costs._Counted.at
    every = costs._Counted(module, algorithm, example, adam, passes=False)
    ratios = every.algorithm.capacities.all_of(module)
    table = {ratio: every.at([ratio], example, ratios[: 1 + (ratio == ratios[0])])[ratio] for ratio in ratios}
    needed = [table[ratio].memory_bytes for ratio in ratios]
    monkeypatch.setattr(costs._Counted, "at", lambda *args: (counted.append(args[1]), at(*args))[1])
    budgets = [needed[0] + (needed[-1] - needed[0]) * part / 12 for part in range(13)]
    found: Any = ls.largest_that_fits(module, algorithm, example, memory=budgets, optimizer=adam)
    for budget, place in zip(budgets, map(list(ratios).index, found), strict=True):
        assert needed[place] <= budget
        assert place + 1 == len(ratios) or budget < needed[place + 1]
    assert len(counted) <= most


class Branches(nn.Module):
    """Two layers whose outputs are concatenated, and one that the example does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 8, 3, padding=1), nn.Conv2d(12, 16, 1)
        self.joined, self.head, self.unreached = nn.Conv2d(24, 10, 3), nn.Linear(10, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.joined(torch.cat([self.a(x), self.b(x)], 1))
        return cast(Tensor, self.head(x.mean((2, 3))))


def test_sums_of_channels_follow_as_well() -> None:
    """A dimension of 8 + 16 channels is no multiple of the 12 before them, though it is when all are held."""
    module, example, algorithm = Branches(), torch.zeros(4, 3, 8, 8), ls.WidthSharding()
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    ratios = [1 / 16, 1 / 12, 1 / 10, 1 / 8]
    table = ls.cost_table(module, algorithm, ratios, example, **options).at
    budgets = [table[ratio].memory_bytes for ratio in ratios]
    assert ls.largest_that_fits(module, algorithm, example, memory=budgets, **options) == ratios


class Growing(torch.optim.SGD):
    """Needs more in its second step than in the first."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            mean = self.state[parameter].get("mean")
            self.state[parameter]["mean"] = (
                parameter.grad.clone() if mean is None else 0.9 * mean + 0.1 * parameter.grad
            )


def test_the_state_that_any_step_would_make_is_there() -> None:
    """Of parameters that the example does not reach; and of optimizers that need more in later steps."""
    module, x = Branches(), torch.zeros(4, 3, 8, 8)
    adam = ls.cost_table(module, ls.FedAvg(), [1], x, optimizer=torch.optim.Adam(module.parameters())).full
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert adam.optimizer_bytes == 4 * (2 * numbers + len([*module.parameters()]))  # two means, and a number of steps
    plain, growing = (
        ls.cost_table(module, ls.FedAvg(), [1], x, optimizer=kind(module.parameters(), lr=0.1)).full
        for kind in (torch.optim.SGD, Growing)
    )
    assert growing.optimizer_bytes == 4 * numbers
    assert growing.activation_bytes > plain.activation_bytes  # the old mean and parts of the new one, at once


def test_a_search_that_takes_long_says_how_far_it_is(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["sgd"](module.parameters()), "memory": ["10 MB", "9 MB"]}
    monkeypatch.setattr(costs, "SECONDS", -1.0)
    with caplog.at_level("INFO", "lightning.pytorch.costs"):
        ls.largest_that_fits(module, ls.SpectralSharding(), torch.zeros(BATCH, 4), **options)
    assert caplog.messages[0] == "What fits `memory`: 0 of 2 budgets answered."


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("512", r"`memory` must have a unit, B, kB, .*GiB, TiB, such as '512 MB'; got '512'"),
        ("512 XB", "must have a unit"),
        ("-1 GB", r"`memory` must be positive, got '-1 GB'"),
        (-1, r"`memory` must be positive, got -1; a plain number is in bytes"),
        (512, r"No keep ratio fits `memory=512`: the smallest sub-model takes .* KiB\. .*a smaller batch"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(budget: Any, says: str) -> None:
    module = mlp()
    options = {"memory": budget, "optimizer": OPTIMIZERS["sgd"](module.parameters())}
    with pytest.raises(ValueError, match=says):
        ls.largest_that_fits(module, ls.SpectralSharding(), torch.zeros(BATCH, 64), **options)


def test_memory_needs_an_optimizer_of_this_module_and_an_example() -> None:
    module, example, algorithm = mlp(), torch.zeros(BATCH, 64), ls.SpectralSharding()
    with pytest.raises(ValueError, match=r"give `optimizer`, such as torch\.optim\.Adam\(module\.parameters\(\)\)"):
        ls.largest_that_fits(module, algorithm, example, memory="1 GB")
    with pytest.raises(TypeError, match="`optimizer` must be an instance of Optimizer, got the class Adam"):
        ls.largest_that_fits(module, algorithm, example, memory="1 GB", optimizer=torch.optim.Adam)  # type: ignore[arg-type]
    adam = OPTIMIZERS["adam"](mlp().parameters())
    with pytest.raises(ValueError, match="`optimizer` must train the parameters of the module, and parameter 0"):
        ls.largest_that_fits(module, algorithm, example, memory="1 GB", optimizer=adam)
    with pytest.raises(ValueError, match="give `example_input`"):
        ls.largest_that_fits(module, algorithm, memory="1 GB", optimizer=OPTIMIZERS["adam"](module.parameters()))


def test_counting_memory_leaves_the_module_as_it_is() -> None:
    module = seeded(mlp)
    adam = OPTIMIZERS["adam"](module.parameters())
    ls.cost_table(module, ls.SpectralSharding(), [0.5], torch.ones(BATCH, 64), optimizer=adam)
    assert all(p.grad is None for p in module.parameters())
    assert not adam.state
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), seeded(mlp).parameters(), strict=True))
