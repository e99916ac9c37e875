"""What the table of costs says is what rounds send, what a client holds and what torch counts; and how it reads."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from federation import HARDLY_MOVED, Fit, same_state, seeded
from lightning.pytorch.loggers import CSVLogger
from one_client import client_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from toy_models import LitFrozenParts, LitMLP, LitNet, Net, plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral import cost_table, largest_that_fits
from lightning_spectral.algorithms import costs
from lightning_spectral.algorithms.costs import NEEDS, last_within
from lightning_spectral.functional import spectra
from lightning_spectral.models import CharTransformer
from lightning_spectral.nn.cost import show_bytes, show_count
from lightning_spectral.nn.zampling import Compression, Compressions

EXAMPLE = torch.zeros(5, 6)
ADAPTED: dict[str, Any] = {"layers": ["net.0", "net.2"], "train": ["net.5"]}
FROZEN_BUFFERS = {"offset": "server", "net.1.*": "server"}


class LitMany(LitNet):
    """Batch statistics, a mask, a frozen layer, a tied one and a scale of its own."""

    def __init__(self) -> None:
        layers = (
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.Linear(12, 12),
            nn.ReLU(),
            nn.Linear(12, 12),
            nn.Linear(12, 12),
        )
        super().__init__(nn.Sequential(*layers), example=torch.zeros(2, 6))
        self.net[4].requires_grad_(False)
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.net(x)).relu())) * self.scale[:, 0] + self.offset


# With SGD as SCAFFOLD needs it, and an example to find channels with.
LitPlain = variant(LitMLP, example_input_array=EXAMPLE, configure_optimizers=plain_sgd())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 16), nn.Linear(16, 3))


def middle() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 6), nn.Linear(6, 3))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def spectral(**options: Any) -> ls.SpectralSharding:
    return ls.SpectralSharding(layers=ls.LayerChoices(**options))


SPECTRAL = [
    spectral(),
    spectral(term_granularity=4),
    spectral(ratio_factors={"net.2": 3.0}),
    spectral(exclude=["net.2"]),
    spectral(split={"net.5": 3}),
    spectral(output_ratio=0.3),
]
SUB_MODELS = [
    ls.WidthSharding(ls.RollingChannels()),
    ls.WidthSharding(exclude=["net.0"]),
    ls.FIARSE(),
    ls.FIARSE(exclude=["net.0.*"]),
]
COMPRESSED = [
    ls.Zampling(),
    ls.Zampling(downlink_bits=5, coordinated=True),
    ls.Zampling(exclude=["head.*", "*.bias"]),
    ls.Zampling(degree=3),
]
FEW, MANY = [0.2, 0.55], [0.1, 0.3, 0.75, 1.0]
CASES: list[tuple[Any, Any, list[float], dict[str, Any]]] = [  # the last are the rules of buffers
    *((LitPlain, algorithm, [1.0], {}) for algorithm in (ls.FedAvg(), ls.Scaffold(), ls.StaleUpdates())),
    *((LitMany, algorithm, FEW, {}) for algorithm in SPECTRAL),
    *((LitFrozenParts, algorithm, MANY, {}) for algorithm in SUB_MODELS),
    *((LitMLP, ls.LoRA(aggregation=how, **ADAPTED), ranks, {}) for how in AGGREGATIONS for ranks in ([2, 4], [3])),
    *((LitMany, algorithm, [3.7], {}) for algorithm in COMPRESSED),
    *((LitMany, ls.Zampling(), [factor], {}) for factor in (1, 20)),
    (LitMany, spectral(), FEW, FROZEN_BUFFERS),
    (LitFrozenParts, ls.WidthSharding(ls.RollingChannels()), MANY, {"*.running_var": "server"}),
    (LitFrozenParts, ls.FIARSE(exclude=["net.0.*"]), MANY, {"*.running_*": "server"}),
    (LitMany, ls.Zampling(), [3.7], FROZEN_BUFFERS),
    (LitMany, ls.Zampling.supermask(), [1], {}),
]


def with_clients(algorithm: Any, capacities: list[float]) -> Any:
    """The same choice, with as many clients of each capacity."""
    if type(algorithm) in (ls.FedAvg, ls.Scaffold, ls.StaleUpdates):
        return algorithm
    equal = {capacity: 1 / len(capacities) for capacity in capacities}
    if isinstance(algorithm, ls.Zampling):
        return replace(algorithm, compression=capacities[0])
    return replace(algorithm, **{"rank" if isinstance(algorithm, ls.LoRA) else "keep_ratio": equal})


def capacity_free(algorithm: Any) -> Any:
    """The same choice for the table, which takes capacities of its own: Zampling's must suit its degree."""
    return replace(algorithm, compression=1) if isinstance(algorithm, ls.Zampling) else algorithm


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.filterwarnings("ignore:Round 0. the running averages:lightning_spectral.SpectralWarning")  # meant to stay
@pytest.mark.parametrize(("make", "algorithm", "capacities", "buffers"), CASES, ids=lambda value: repr(value)[:70])
def test_bytes_are_those_of_rounds(
    make: Any, algorithm: Any, capacities: Any, buffers: Any, toy: Any, fit: Fit
) -> None:
    """Down the same in every round, and what is frozen once; up the most of two rounds: factors may take turns."""
    table = cost_table(make(), capacity_free(algorithm), capacities, EXAMPLE, buffers=buffers)
    trained, data = with_clients(algorithm, capacities), ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4))
    rows = fit(make(), data, algorithm=trained, buffers=buffers, clients_per_round=4, max_epochs=2).ledger.rows
    for keep_ratio, capacity in zip(sorted({row.keep_ratio for row in rows}), sorted(capacities), strict=True):
        cost, own = table.at[capacity], [row for row in rows if row.keep_ratio == keep_ratio]
        down = {(row.round_idx, row.downlink_bytes) for row in own}
        assert down == {(0, cost.downlink_bytes + cost.frozen_bytes), (1, cost.downlink_bytes)}
        assert max(row.uplink_bytes for row in own) == cost.uplink_bytes


def test_sub_models_and_the_whole_model_follow_the_rules_of_buffers() -> None:
    plan = ls.nn.plan_layers(LitMany())
    default, resting = (
        cost_table(LitMany(), ls.SpectralSharding(layers=plan), [0.2], buffers=rules)
        for rules in ({}, {"offset": "server"})
    )
    assert resting.at[0.2].uplink_bytes == default.at[0.2].uplink_bytes - 3 * 4
    assert resting.full.uplink_bytes == default.full.uplink_bytes - 3 * 4


ONE_OF_EACH = {type(case[1]): case for case in CASES}.values()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "algorithm", "capacities", "buffers"), ONE_OF_EACH, ids=lambda value: repr(value)[:70]
)
def test_counting_changes_nothing_and_the_whole_model_costs_the_same(
    make: Any, algorithm: Any, capacities: Any, buffers: Any
) -> None:
    module, state = seeded(make), torch.get_rng_state()
    table = cost_table(module, capacity_free(algorithm), capacities, EXAMPLE, buffers=buffers)
    assert same_state(module.state_dict(), seeded(make).state_dict())
    assert torch.equal(state, torch.get_rng_state())
    assert table.full == cost_table(module, ls.FedAvg(), [1], EXAMPLE, buffers=buffers).full


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "algorithm", "capacities"),
    [
        *((LitMany, algorithm, [0.1, 0.5, 1.0]) for algorithm in (spectral(), spectral(output_ratio=0.3))),
        *((LitFrozenParts, algorithm, [0.1, 0.75, 1.0]) for algorithm in SUB_MODELS),
        (LitMLP, ls.LoRA(**ADAPTED), [2, 4]),
        *((LitMany, algorithm, [4]) for algorithm in COMPRESSED),
    ],
    ids=lambda value: repr(value)[:70],
)
def test_parameters_and_work_are_those_of_a_clients_model(make: Any, algorithm: Any, capacities: Any) -> None:
    table, server = cost_table(make(), capacity_free(algorithm), capacities, EXAMPLE), make()
    algorithm = with_clients(algorithm, capacities)
    half = algorithm.bind(server, algorithm.new_state(server, 0))
    for capacity, cost in table.at.items():
        share = {ls.LoRA: capacity / max(capacities), ls.Zampling: 1.0}.get(type(algorithm), capacity)
        client = client_of(half.client_side, server, share)
        if isinstance(algorithm, ls.Zampling):
            client._zampling.draw(torch.Generator().manual_seed(0))
            matrix = client._zampling.matrix
            assert cost.step_macs == 2 * matrix.entries()[1].numel()
            assert cost.held_bytes == matrix._kept.data.nbytes + matrix._kept.indices.nbytes
        assert cost.parameters == sum(p.numel() for p in client.parameters())
        with FlopCounterMode(display=False) as counter:
            client(EXAMPLE)
        assert 2 * cost.macs == counter.get_total_flops()


class TestByHand:
    def test_width_saves_all_and_large_weights_save_traffic_alone(self) -> None:
        """For an MLP of widths 6, 12, 12, 3."""
        width, largest = (
            cost_table(LitMLP(dropout=0.0), algorithm, [0.25], EXAMPLE)
            for algorithm in (ls.WidthSharding(), ls.FIARSE())
        )
        cut, n = width.at[0.25], 3
        assert cut.parameters == (6 + 1) * n + (n + 1) * n + (n + 1) * 3
        assert (cut.macs, cut.kept_values) == (5 * (6 * n + n * n + n * 3), 5 * 2 * n)
        whole, chosen, num_weights = largest.full, largest.at[0.25], 6 * 12 + 12 * 12 + 12 * 3
        assert (chosen.parameters, chosen.macs, chosen.kept_bytes) == (whole.parameters, whole.macs, whole.kept_bytes)
        assert chosen.uplink_bytes == 4 * (num_weights // 4 + 12 + 12 + 3)
        assert chosen.downlink_bytes == chosen.uplink_bytes + (72 + 7) // 8 + 144 // 8 + (36 + 7) // 8

    def test_adapters_add_two_products(self) -> None:
        cost = cost_table(LitMLP(), ls.LoRA(**ADAPTED), [2, 4], EXAMPLE).at[2]
        assert cost.macs == 5 * (6 * 12 + 12 * 12 + 12 * 3) + 5 * 2 * (6 + 12 + 12 + 12)

    @pytest.mark.parametrize("sizes", [(6, 48), (48, 6)])
    def test_of_factors_that_take_turns_the_larger_one_counts(self, sizes: tuple[int, int]) -> None:
        example, alternating = torch.zeros(1, sizes[0]), ls.AlternatingFactors()
        table = cost_table(nn.Sequential(nn.Linear(*sizes)), ls.LoRA(aggregation=alternating), [2], example)
        assert table.at[2].uplink_bytes == 4 * 2 * 48

    def test_folding_costs_downloads_alone(self) -> None:
        sampled, folded = (
            cost_table(LitMLP(), ls.LoRA(aggregation=aggregation, **ADAPTED), [2, 4], EXAMPLE).at
            for aggregation in (ls.SampledTerms(), ls.algorithms.FoldedTerms())
        )
        for rank, cost in folded.items():
            more = 4 * (4 - rank) * (6 + 12 + 12 + 12) - rank * 4 * 2  # without multipliers
            kept = {"kept_bytes": cost.kept_bytes, "kept_values": cost.kept_values}
            assert cost == replace(sampled[rank], downlink_bytes=sampled[rank].downlink_bytes + more, **kept)
            assert cost.kept_bytes <= sampled[rank].kept_bytes

    def test_activations_are_kept_where_every_weight_is_drawn(self) -> None:
        """Nothing but the drawn weights needs a gradient: the first output and the weight behind it are kept."""
        net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
        cost = cost_table(net, ls.Zampling(degree=2), [2], torch.zeros(5, 8)).at[2]
        assert cost.kept_values == 5 * 16 + (8 * 16 + 16 * 3)  # weights are views of one vector


class TestShown:
    @pytest.mark.parametrize(
        ("number", "shown"),
        [
            *((0, "0"), (999, "999"), (1000, "1.00 k"), (12_345, "12.3 k"), (999_949, "1000 k")),
            *((11_173_962, "11.2 M"), (4e18, "4000 P")),
        ],
    )
    def test_counts_have_three_digits_and_a_unit(self, number: float, shown: str) -> None:
        assert show_count(number) == shown

    def test_bytes_have_binary_units(self) -> None:
        shown = [show_bytes(number) for number in (1023, 1024, 5 * 2**20, 300 * 2**30)]
        assert shown == ["1023 B", "1.00 KiB", "5.00 MiB", "300 GiB"]

    def test_the_table_reads_as_rows_of_keep_ratios_with_shares_of_the_whole_model(self) -> None:
        header, full, half, quarter = str(cost_table(mlp(), ls.SpectralSharding(), [0.5, 0.25], EXAMPLE)).splitlines()
        assert header.split("  ")[0] == "keep ratio"
        assert full.startswith("full ")
        assert half.startswith("0.5 ")
        outside = 6 * 24 + 24 + 20 + 16 + 16 * 3 + 3
        inside = 5 * (24 + 20) + 4 * (20 + 16)  # a quarter of the terms of two layers
        assert f"{outside + inside} ({(outside + inside) / (outside + 24 * 20 + 20 * 16):.0%})" in quarter

    @pytest.mark.parametrize(
        ("algorithm", "head"), [(ls.LoRA(**ADAPTED), "rank"), (ls.WidthSharding(), "keep ratio")], ids=["LoRA", "width"]
    )
    def test_frozen_tensors_have_a_column(self, algorithm: Any, head: str) -> None:
        module = LitPlain()
        module.net[0].requires_grad_(head == "rank")
        module.net[5].bias.requires_grad_(False)
        header, full, last = str(cost_table(module, algorithm, [1], EXAMPLE)).splitlines()
        assert header.startswith(f"{head} ")
        assert header.endswith("down once")
        assert full.startswith("full ")
        assert last.startswith("1 ")

    def test_compressions_share_the_table_a_dictionary_and_any_logger(self, tmp_path: Any) -> None:
        table = cost_table(LitMany(), ls.Zampling(), [2, 30], EXAMPLE)
        header, _, _, last = str(table).splitlines()
        assert header.split("  ")[0] == "compression"
        assert f" {table.at[30].uplink_bytes} B ({table.at[30].uplink_bytes / table.full.uplink_bytes:.0%})" in last
        assert list(table.as_dict()) == ["full", "2", "30"]
        assert table.as_dict()["30"]["macs"] == table.at[30].macs
        table.log(logger := CSVLogger(tmp_path))
        assert logger.experiment.metrics[0]["cost/30/step_macs"] == table.at[30].step_macs

    def test_a_share_below_one_percent_is_not_shown_as_none(self) -> None:
        assert "3 B (0.007%)" in str(cost_table(nn.Linear(100, 100), ls.Zampling(), [500], torch.zeros(1, 100)))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
    def test_wandb_takes_the_table_too(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")
        from offline_wandb import offline_logger

        logger = offline_logger(tmp_path, monkeypatch)
        (table := cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE)).log(logger)
        summary = dict(logger.experiment.summary)
        wandb.finish()
        assert summary["cost"]["nrows"] == 2
        assert summary["cost/0.5/parameters"] == table.at[0.5].parameters

    def test_the_picture_has_one_line_for_each_cost(self) -> None:
        pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
        table = cost_table(mlp(), ls.SpectralSharding(), [0.5, 0.25], EXAMPLE)
        (axes,) = table.plot().axes
        lines = {line.get_label(): line for line in axes.lines}
        assert [*lines["parameters"].get_xdata()] == [0.25, 0.5]
        assert lines["MACs"].get_ydata()[1] == table.at[0.5].macs / table.full.macs


@pytest.mark.parametrize(
    ("module", "algorithm", "capacity", "message"),
    [
        (mlp(), ls.SpectralSharding(exclude=["nothing"]), 0.5, "pattern 'nothing' matches no layer"),
        (mlp(), ls.SpectralSharding(), 1.5, r"must be in \(0, 1\]"),
        (small(), ls.FIARSE(), 1.5, r"`capacities` must be in \(0, 1\], got 1\.5"),
        (LitMLP(), ls.FedAvg(), 0.5, r"`capacities` must be \[1\] with FedAvg.*; got \[0\.5\]"),
        (LitMLP(), ls.LoRA(**ADAPTED), 8, r"`rank` must be at most 6 for the layer 'net.0'.* got 8"),
        (LitMany(), ls.Zampling(), 0.5, r"`capacities` must be at least 1 and finite, got 0\.5"),
        (LitMany(), ls.Zampling(), 100, "`degree` must be between 1 and the number of columns, 7, got 10"),
        (nn.BatchNorm1d(3), ls.Zampling(), 8, "has no trainable weight"),
    ],
)
def test_what_an_algorithm_refuses_has_no_cost(module: Any, algorithm: Any, capacity: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_table(module, algorithm, [capacity], EXAMPLE)


def test_what_is_counted_in_a_pass_needs_an_example() -> None:
    with pytest.raises(ValueError, match="give `example_input`"):
        cost_table(mlp(), ls.SpectralSharding(), [0.5])
    with pytest.raises(ValueError, match="give `example_input`"):
        largest_that_fits(LitMLP(), ls.LoRA(), budget_macs=1e9)
    with pytest.raises(ValueError, match="set its `example_input_array`"):
        largest_that_fits(small(), ls.WidthSharding(), budget_bytes=100)
    assert largest_that_fits(small(), ls.FIARSE(), budget_bytes=1e6) == 1.0


BUDGETS = sorted(NEEDS.keys() - {"memory"})
BETWEEN_TERMS = sorted({i / n for n in (9, 6, 5) for i in range(1, n + 1)})  # five of these are


class TestBudgets:
    """Every capacity of a small module is tried, with budgets just below, at and above what each takes."""

    @pytest.fixture(autouse=True)
    def _counted_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count once, whatever budget it is for, what clients of the same capacities need: a test has one module."""
        at, found = costs._Counted.at, {}

        def known(self: Any, capacities: Any, example: Any, beside: Any = ()) -> Any:
            key = type(self.algorithm), tuple(capacities), tuple(beside), example is None
            return found[key] if key in found else found.setdefault(key, at(self, capacities, example, beside))

        monkeypatch.setattr(costs._Counted, "at", known)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        ("make", "algorithm", "ratios"),
        [
            pytest.param(middle, spectral(), BETWEEN_TERMS, marks=pytest.mark.slow),
            pytest.param(middle, spectral(term_granularity=4), [i / 9 for i in range(1, 10)], marks=pytest.mark.slow),
            (small, ls.WidthSharding(), [1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1.0]),
            (small, ls.FIARSE(), [n / 30 for n in range(1, 31)]),
            (LitMLP, ls.LoRA(**ADAPTED), range(1, 7)),  # 6 is the smallest side
            (LitMLP, ls.LoRA(aggregation=ls.FrozenA(), **ADAPTED), range(1, 7)),
        ],
        ids=["spectral", "granular", "width", "FIARSE", "LoRA", "LoRA, frozen A"],
    )
    def test_the_answer_fits_and_no_larger_capacity_does(self, make: Any, algorithm: Any, ratios: Any) -> None:
        example = torch.zeros(5, 3 if make is small else 6)
        table = cost_table(make(), algorithm, [*ratios], example)
        for budgeted in BUDGETS:
            needed = {ratio: getattr(cost, NEEDS[budgeted]) for ratio, cost in table.at.items()}
            budgets = sorted({need + change for need in needed.values() for change in (-1, 0, 1)})[1:]
            expected = [max(ratio for ratio in ratios if needed[ratio] <= budget) for budget in budgets]
            assert largest_that_fits(make(), algorithm, example, **{budgeted: budgets}) == expected
            less = budgets[0] - 1
            with pytest.raises(ValueError, match=rf"No .* fits `{budgeted}={less:,}`: .* {budgets[0]:,}\. Raise"):
                largest_that_fits(make(), algorithm, example, **{budgeted: [less]})

    @pytest.mark.slow
    def test_one_rank_for_all_clients_costs_less_than_several(self) -> None:
        """Without clients of other ranks, no multipliers travel, and the answer counts none."""
        algorithm = ls.LoRA(**ADAPTED)
        for budgeted, rank in itertools.product(BUDGETS, (2, 5)):
            need = getattr(cost_table(LitMLP(), algorithm, [rank], EXAMPLE).at[rank], NEEDS[budgeted])
            assert largest_that_fits(LitMLP(), algorithm, EXAMPLE, **{budgeted: need}) == rank
            assert largest_that_fits(LitMLP(), algorithm, EXAMPLE, **{budgeted: need - 1}) == rank - 1

    @pytest.mark.slow
    @pytest.mark.parametrize("downlink_bits", [None, 3])
    def test_the_answer_fits_and_no_smaller_compression_does(self, downlink_bits: int | None) -> None:
        module, degree = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), 2
        weights = Compression(1, degree).weights_of(module)
        num_weights = sum(weight.num_values for weight in weights)
        algorithm = ls.Zampling(degree=degree, downlink_bits=downlink_bits)
        factors = dict(zip(range(degree, num_weights + 1), Compressions(num_weights, degree), strict=True))
        table = cost_table(module, algorithm, list(factors.values()), torch.zeros(2, 3))
        assert [cost.parameters - 4 for cost in table.at.values()] == list(factors)
        for budgeted in set(BUDGETS) - {"budget_macs"}:  # MACs are always the same
            needed = {n: getattr(table.at[factor], NEEDS[budgeted]) for n, factor in factors.items()}
            for budget in sorted({value + change for value in needed.values() for change in (-1, 0)})[1:]:
                found: Any = largest_that_fits(module, algorithm, torch.zeros(2, 3), **{budgeted: budget})
                assert Compression(found, degree).num_probs(weights) == max(n for n in needed if needed[n] <= budget)

    def test_a_compression_gives_the_number_of_probabilities_that_it_is_made_for(self) -> None:
        for num_weights in (7, 267_082, 11_173_962):
            for num_probs in {min(num_weights, n) for n in (1, 3, 7, 1001, 33_333, 266_610)}:
                assert math.ceil(num_weights / Compressions(num_weights, 1)[num_probs - 1]) == num_probs
                below = math.nextafter(Compressions(num_weights, 1)[num_probs - 1], 0.0)
                assert below < 1.0 or math.ceil(num_weights / below) > num_probs

    def test_one_budget_gives_one_ratio_and_several_a_list_that_an_algorithm_takes(self) -> None:
        assert largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=10**9) == 1.0
        per_client = largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=(700, 900))
        # 255 + 44 * 6 + 36 * 5 = 699 and 255 + 44 * 8 + 36 * 7 = 859; one more term of the first layer takes 44 more
        assert ls.SpectralSharding(keep_ratio=per_client).keep_ratio == per_client == [6 / 20, 8 / 20]
        as_array: Any = torch.tensor([700, 900])
        assert largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=as_array) == per_client

    def test_if_nothing_fits_the_smallest_cost_is_named(self) -> None:
        module = nn.Sequential(nn.Linear(6, 28), nn.BatchNorm1d(28, affine=False))
        smallest = 2 + 4 * 2 * 28  # ten bits, and two vectors of statistics
        with pytest.raises(ValueError, match=rf"No compression fits `budget_uplink_bytes=20`: .* takes {smallest}"):
            largest_that_fits(module, ls.Zampling(), budget_uplink_bytes=20)
        assert largest_that_fits(module, ls.Zampling(), budget_uplink_bytes=smallest) == (6 * 28 + 28) / 16

    def test_a_budget_for_each_client_is_refused_where_all_share_one_capacity(self) -> None:
        with pytest.raises(TypeError, match="`budget_bytes` must be one number, since all clients share one compressi"):
            largest_that_fits(nn.Linear(6, 6), ls.Zampling(), budget_bytes=[100, 200])

    @pytest.mark.parametrize("budgets", [{}, {"budget_macs": 1, "budget_params": 2}])
    def test_exactly_one_budget_is_given(self, budgets: Any) -> None:
        with pytest.raises(ValueError, match=r"exactly one of budget_bytes, .*budget_macs, budget_params"):
            largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, **budgets)


def recurrent() -> Net:
    """An LSTM, whose kernel alone knows the size of its workspace."""
    layers: dict[str, nn.Module] = {"embedding": nn.Embedding(9, 12), "lstm": nn.LSTM(12, 16, 2)}
    return Net(lambda net, x: net.head(net.lstm(net.embedding(x))[0]), **layers, head=nn.Linear(16, 9))


NETWORKS: dict[str, tuple[Any, Tensor]] = {
    "mlp": (mlp, EXAMPLE),
    "cnn": (LitMany, EXAMPLE),
    "gpt": (lambda: CharTransformer(9, 8, 16, 2, num_layers=1), torch.zeros(3, 8, dtype=torch.long)),
    "lstm": (recurrent, torch.zeros(5, 3, dtype=torch.long)),
}
EVERY_KIND: dict[str, tuple[Any, list[float]]] = {
    "fedavg": (ls.FedAvg(), [1]),
    "scaffold": (ls.Scaffold(), [1]),
    "feddyn": (ls.FedDyn(), [1]),
    "ditto": (ls.Ditto(), [1]),
    "q-fedavg": (ls.QFedAvg(), [1]),
    "stale": (ls.StaleUpdates(), [1]),
    **{type(s).__name__: (ls.SpectralSharding(s), [0.2, 1]) for s in (ls.TopN(), ls.PriSM(), ls.Unbiased())},
    "collective": (ls.SpectralSharding(aggregation=ls.algorithms.MatrixMeans()), [0.2, 1]),
    "outputs": (spectral(output_ratio=0.5), [0.2, 1]),
    "heterofl": (ls.WidthSharding(ls.RandomChannels(), scaler=True), [0.3, 1]),
    "fjord": (ls.WidthSharding(keep_ratio=1.0, step_widths=[0.5, 1.0]), [0.5, 1]),
    "fiarse": (ls.FIARSE(), [0.2, 1]),
    "zampling": (ls.Zampling(1), [4, 9]),
    "rounded": (ls.Zampling(1, downlink_bits=5, coordinated=True), [4]),
    "fedpm": (ls.Zampling.fed_pm(), [1]),
    "lora": (ls.LoRA(), [1, 2]),
    "folded": (ls.LoRA(aggregation=ls.algorithms.FoldedTerms()), [1, 2]),
}


def choice_of(name: str) -> tuple[Any, list[float]]:
    """An algorithm of `EVERY_KIND`, if this version of torch counts it without values."""
    if name == "outputs" and torch.__version__ < (2, 5):
        pytest.skip("fake tensors of torch 2.4 refuse its own decomposition of `addmm`, so values are used")
    return EVERY_KIND[name]


LARGER = [
    *((network, name) for network in ("cnn", "gpt", "lstm") for name in ("Unbiased", "fjord", "zampling")),
    *((network, "folded") for network in ("cnn", "gpt")),
]


class TestWithoutValues:
    """Counted on fake tensors, an algorithm costs what it costs on the module's own."""

    @pytest.mark.parametrize(
        "operation",
        [
            lambda x: x.to(torch.uint8) >> torch.arange(2, dtype=torch.uint8).view(2, 1, 1),
            lambda x: x.long() + 1,
            lambda x: x.long() + 1.0,
            lambda x: (x.bool() * 1, x.bool() * True)[1],
            lambda x: x.sum(1, keepdim=True),
            lambda x: x.T @ x,
            lambda x: torch.where(x > 0, x, 0.0),
            lambda x: x[:, 1:].T,
            lambda x: x.T.reshape(-1),
            lambda x: torch.ops.aten._unsafe_view(x, [-1]),
            lambda x: x.expand(2, *x.shape)[1],
            lambda x: torch.cat([x, x]),
            lambda x: x.add_(1),
            lambda x: x.sqrt_().unsqueeze(0),
            lambda x: x.clone(memory_format=torch.preserve_format),
            lambda x: torch.zeros_like(x, dtype=torch.float64),
            lambda x: x.new_empty(5),
        ],
    )
    def test_an_operation_gives_sizes_and_memory_of_the_real_one(self, operation: Any) -> None:
        """The first time torch answers; the second time it may be looked up, or changed in place."""
        fakes = costs.FakeTensors()
        for size in [(3, 4), (3, 4), (4, 3)]:
            given = [torch.rand(size), fakes.from_tensor(torch.rand(size))]
            real, fake = (
                (made.shape, made.stride(), made.dtype, made.untyped_storage()._cdata == x.untyped_storage()._cdata)
                for x in given
                for made in [operation(x)]
            )
            assert fake == real

    @pytest.fixture
    def with_values(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Count on the module's own tensors, as where fake ones will not do."""

        def counted(*args: Any, **options: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(costs, "FakeTensors", lambda: None)
                return cost_table(*args, **options)

        return counted

    @pytest.fixture
    def no_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing may be counted on the module's own tensors."""
        count = costs._Counted._of_rounds

        def on_fakes(*given: Any) -> Any:
            assert given[-1] is not None, "counted with values"
            return count(*given)

        monkeypatch.setattr(costs._Counted, "_of_rounds", on_fakes)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(("network", "name"), [*(("mlp", name) for name in EVERY_KIND), *LARGER])
    def test_sizes_cost_what_values_cost(self, network: str, name: str, with_values: Any, request: Any) -> None:
        """The weights are large, so that spectral sharding bounds the learning rates of their terms."""
        (make, example), (algorithm, capacities) = NETWORKS[network], choice_of(name)

        def counted(count: Any, device: str) -> Any:
            with torch.device(device):
                module = seeded(make)
            module.example_input_array = example
            for weight in module.parameters():
                weight.data.mul_(30)
            adam = torch.optim.Adam([p for p in module.parameters() if p.requires_grad])
            return count(module, algorithm, capacities, example, optimizer=adam)

        expected = counted(with_values, "cpu")
        request.getfixturevalue("no_values")
        assert counted(cost_table, "meta" if network == "mlp" else "cpu") == expected

    @pytest.mark.sampled(1)
    @pytest.mark.usefixtures("no_values")
    @pytest.mark.parametrize("name", ["scaffold", "Unbiased", "outputs", "fiarse", "zampling", "rounded", "folded"])
    def test_a_model_of_billions_of_parameters_has_a_table(self, name: str) -> None:
        """Three weights of 10 GiB each: not one of them fits the tests' memory."""
        algorithm, capacities = choice_of(name)
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(3)))
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        table = cost_table(module, algorithm, capacities, torch.zeros(2, 50_000), optimizer=sgd)
        assert table.full.parameters == 3 * (50_000**2 + 50_000)
        assert table.full.gradient_bytes == 4 * table.full.parameters

    @pytest.mark.parametrize("forward", ["branch", "closure"])
    def test_a_module_that_looks_at_values_is_counted_with_them(self, forward: str, with_values: Any) -> None:
        def make() -> nn.Module:
            class Looks(nn.Sequential):
                def forward(self, x: Tensor) -> Tensor:
                    if forward == "branch":
                        return self[1](self[0](x)) if x.sum() == 0 else x
                    return self[1](x @ weight.T)

            module = Looks(nn.Linear(6, 8), nn.Linear(8, 3))
            weight = module[0].weight
            return module

        module = make()
        assert cost_table(module, ls.FIARSE(), [0.5], EXAMPLE) == with_values(module, ls.FIARSE(), [0.5], EXAMPLE)
        with torch.device("meta"):
            module = make()
        with pytest.raises(ValueError, match=r"Looks is on the meta device, and what it costs depends on values"):
            cost_table(module, ls.FIARSE(), [0.5], EXAMPLE)

    def test_an_example_may_be_on_the_meta_device_as_well(self) -> None:
        with torch.device("meta"):
            module, example = mlp(), torch.zeros(EXAMPLE.shape)
        expected = cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE)
        assert cost_table(module, ls.SpectralSharding(), [0.5], example) == expected

    def test_what_is_refused_is_refused_on_the_meta_device_as_well(self) -> None:
        with torch.device("meta"):
            module = mlp()
        with pytest.raises(ValueError, match="`rank` must be at most 6 for the layer '0'"):
            cost_table(module, ls.LoRA(), [7], EXAMPLE)

    def test_values_still_decide_which_layers_are_sharded_and_which_buffers_travel(self, with_values: Any) -> None:
        module = seeded(LitMany)
        nn.init.zeros_(module.net[2].weight)  # stays whole, for want of rank
        module.register_buffer("low", torch.full((5,), torch.inf))
        table = cost_table(module, ls.SpectralSharding(), [0.2], EXAMPLE)
        assert table == with_values(module, ls.SpectralSharding(), [0.2], EXAMPLE)
        assert (
            table.at[0.2].parameters > cost_table(LitMany(), ls.SpectralSharding(), [0.2], EXAMPLE).at[0.2].parameters
        )

    @pytest.mark.slow
    @pytest.mark.usefixtures("no_values")
    def test_an_answer_for_memory_factorises_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(weight: Tensor) -> None:
            raise AssertionError("factorised")

        monkeypatch.setattr(spectra, "factorize", refuse)
        module = mlp()
        options = {"memory": "10 kB", "optimizer": torch.optim.Adam(module.parameters())}
        assert 0 < largest_that_fits(module, ls.SpectralSharding(), EXAMPLE, **options) < 1

    @pytest.mark.slow
    def test_a_table_of_a_large_model_makes_no_copy_of_it(self) -> None:
        """In a process of its own, whose peak grows by less than the module's size; one sub-model has as much."""
        done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        grown, size = map(int, done.stdout.split())
        assert grown < size


LARGE = """
import resource, torch, lightning_spectral as ls

torch.set_num_threads(1)
net, example = torch.nn.Sequential(*(torch.nn.Linear(3000, 3000) for _ in range(4))), torch.zeros(2, 3000)
ls.cost_table(torch.nn.Linear(2, 2), ls.FedAvg(), [1], torch.zeros(1, 2))  # imports what it needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cases = [(ls.Zampling(), [2]), (ls.SpectralSharding(), [1.0]), (ls.FIARSE(), [0.5]), (ls.Scaffold(), [1])]
for algorithm, capacities in cases:
    ls.cost_table(net, algorithm, capacities, example)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(1024 * (after - before), sum(p.nbytes for p in net.parameters()))
"""


@pytest.mark.parametrize("num", [2, 3, 10, 1000])
@pytest.mark.parametrize(
    "need",
    [lambda i: 8 * i, lambda i: i * i, lambda i: i // 8, lambda i: 2**i, lambda i: 7 * i + i * i % 13],
    ids=["even", "square", "steps", "powers", "neither"],
)
def test_an_index_within_a_budget_is_followed_by_one_beyond(need: Any, num: int) -> None:
    """Whatever the needs are; where they grow evenly, a handful are asked for."""
    for index in range(0, num - 1, max(1, num // 50)):
        budget, known = need(index), {0: need(0), num: need(num)}
        if not need(0) <= budget < need(num):
            continue
        found = last_within(budget, need, known)
        assert need(found) <= budget < need(found + 1)
        assert len(known) <= 2 + 4 * math.log2(num)
        if [need(1), need(2)] == [8, 16]:
            assert found == index
            assert len(known) <= 4
        asked = len(known)
        assert last_within(budget, need, known) == found
        assert len(known) == asked, "what is known is not counted again"
