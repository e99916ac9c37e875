"""Choices of layers and the plan made from them: what they refuse, which layers are sharded, and why others are not."""

import logging
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, seeded
from spectral_rounds import cohort, unit
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from toy_models import Detour, LitSmall, Net, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.nn import plan_layers, plan_of, sharded_layers
from lightning_spectral.nn.cost import count_pass
from lightning_spectral.protocol.cohort import Workers

CHOICES = ls.LayerChoices(exclude=["1"], split={"2": 2}, keep_first_and_last_dense=False, term_granularity=4)
EXAMPLE = torch.zeros(5, 6)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 12), nn.Linear(12, 3)
    )


def test_a_granularity_that_gives_everybody_everything_is_refused() -> None:
    message = r"`term_granularity=8` rounds up to all terms of every sharded layer, .* N = 8: every client would hold"
    for granularity in (8, 1000):
        with pytest.raises((TypeError, ValueError), match=message.replace("=8`", f"={granularity}`")):
            plan_of(net()[:3], ls.LayerChoices(term_granularity=granularity))
    plan_of(net()[:3], ls.LayerChoices(term_granularity=7))


def test_layers_of_which_every_client_would_hold_all_terms_are_named() -> None:
    sharding = ls.SpectralSharding(layers=ls.LayerChoices(term_granularity=8))
    with pytest.warns(
        ls.SpectralWarning, match=r"`term_granularity=8` rounds up to all terms of 1 \(N = 8\), 2 \(N = 8"
    ):
        sharding.check(Plan(net(), sharding))  # and not 4, which has 12


class TestRatioFactors:
    """Layers 1 and 2 have 8 terms, layer 4 has 12."""

    @pytest.mark.parametrize(
        ("factors", "expected"),
        [
            ({}, {"1": 2, "2": 2, "4": 3}),
            ({"1": 2.5}, {"1": 5, "2": 2, "4": 3}),
            ({"[14]": 0.5}, {"1": 1, "2": 2, "4": 2}),
            ({"4": 10.0}, {"1": 2, "2": 2, "4": 12}),  # all terms, and no more
            ({"2": 2.0, "*": 3.0}, {"1": 6, "2": 4, "4": 9}),  # the first pattern counts
        ],
        ids=str,
    )
    def test_a_layer_holds_its_own_share_on_devices_in_rounds_and_after_a_start(
        self, factors: Any, expected: Any
    ) -> None:
        choices, server = ls.LayerChoices(ratio_factors=factors), net()
        held = sharded_layers(ls.replace_layers(server, 0.25, layers=choices))
        assert {name: layer.num_terms for name, layer in held.items()} == expected
        half = ls.SpectralSharding(keep_ratio=0.25, layers=choices).bind(server)
        half.initialize(Workers())
        download, _ = half.open(cohort([0.25, 0.25])).send(unit(0))
        assert {name: download.tensors[f"{name}.u"].shape[1] for name in expected} == expected
        for name, n in expected.items():
            s = torch.linalg.svdvals(server.get_submodule(name).weight.detach().double())
            if n < len(s):
                assert s[n] < 0.2 * s[n - 1]  # the start has made the terms beyond these small

    def test_the_plan_says_so_and_a_pattern_that_matches_nothing_is_a_mistake(self) -> None:
        assert "2.5 times the keep ratio" in str(plan_of(net(), ls.LayerChoices(ratio_factors={"1": 2.5})))
        with pytest.raises(ValueError, match="'attn' matches no layer"):
            plan_of(net(), ls.LayerChoices(ratio_factors={"attn": 2.0}))

    @pytest.mark.slow
    def test_a_budget_finds_the_largest_ratio(self) -> None:
        """The oracle tries every ratio of a grid that holds all steps of 8, 12 and 3 times 8 terms."""
        algorithm = ls.SpectralSharding(layers=ls.LayerChoices(ratio_factors={"1": 3.0}))
        grid = [i / 24 for i in range(1, 25)]
        costs = {r: c.parameters for r, c in ls.cost_table(net(), algorithm, grid, EXAMPLE).at.items()}
        budgets = sorted(set(costs.values()))
        found = ls.largest_that_fits(net(), algorithm, EXAMPLE, budget_params=budgets)
        assert found == [max(r for r in grid if costs[r] <= budget) for budget in budgets]


def test_equal_choices_are_equal_however_they_are_written() -> None:
    patterns = ["1"]
    choices = ls.LayerChoices(exclude=patterns)
    patterns.append("2")
    assert choices == ls.LayerChoices(exclude=("1",))
    assert repr(choices) == repr(ls.LayerChoices(exclude=("1",)))
    assert pickle.loads(pickle.dumps(CHOICES)) == CHOICES


def numbers_of_terms(module: nn.Module) -> dict[str, int]:
    return {name: terms.num_terms for name, terms in sharded_layers(module).items()}


def client(algorithm: ls.Algorithm, keep_ratio: float) -> nn.Module:
    module = net()
    algorithm.bind(module).client_side.take_form(module, keep_ratio)
    return module


EVERY_FUNCTION: dict[str, Callable[[Any], Any]] = {
    "validate": lambda layers: ls.validate(net(), EXAMPLE, layers),
    "cost_table": lambda layers: ls.cost_table(net(), ls.SpectralSharding(layers=layers), [0.1, 0.6], EXAMPLE),
    "largest_that_fits": lambda layers: ls.largest_that_fits(
        net(), ls.SpectralSharding(layers=layers), EXAMPLE, budget_params=600
    ),
    "replace_layers": lambda layers: numbers_of_terms(ls.replace_layers(net(), 0.3, EXAMPLE, layers)),
    "SpectralSharding": lambda layers: numbers_of_terms(client(ls.SpectralSharding(layers=layers), 0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_FUNCTION)
def test_choices_and_the_plan_made_from_them_give_the_same(name: str) -> None:
    result = EVERY_FUNCTION[name]
    assert result(CHOICES) == result(plan_layers(net(), EXAMPLE, CHOICES))
    assert result(CHOICES) != result(ls.LayerChoices())


@pytest.mark.parametrize("name", EVERY_FUNCTION)
def test_a_plan_of_another_module_and_anything_else_is_refused_with_what_to_write(name: str) -> None:
    wider = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 9), nn.Linear(9, 3))
    neither = r"`layers` must be a LayerChoices or the ModulePlan .* write LayerChoices"
    for wrong, message in (
        (plan_layers(wider), r"another module: 1\.weight is \(8, 8\) as a matrix.* with `validate`"),
        (plan_layers(nn.Sequential(*net(), *net())), r"another module: this one has no weights .* with `validate`"),
        *((wrong, neither) for wrong in (["1"], None, ls.LayerChoices)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            EVERY_FUNCTION[name](wrong)


def test_a_plan_with_problems_is_printed_but_not_used() -> None:
    plan = ls.validate(net(), layers=ls.LayerChoices(exclude=["nothing"]))
    assert "PROBLEM: `exclude` pattern 'nothing'" in str(plan)
    with pytest.raises((TypeError, ValueError), match="`exclude` pattern 'nothing' matches no layer"):
        plan_of(net(), plan)


class TestSpectralSharding:
    def test_exclude_is_short_for_choices(self) -> None:
        short, long = ls.SpectralSharding(exclude=["1"]), ls.SpectralSharding(layers=ls.LayerChoices(exclude=("1",)))
        assert short == long
        assert repr(short) == repr(long)
        assert list(short.plan(net()).sharded) == ["2", "4"]
        assert replace(short, keep_ratio=0.4).layers == short.layers

    def test_exclude_beside_layers_is_refused(self) -> None:
        message = (
            r"`exclude=\('4',\)` is short for `layers=LayerChoices\(exclude=\('4',\)\)`, but `layers` is given too"
        )
        for layers in (CHOICES, plan_layers(net())):
            with pytest.raises((TypeError, ValueError), match=message):
                ls.SpectralSharding(exclude=["4"], layers=layers)

    def test_its_repr_shows_every_choice(self) -> None:
        names = ("exclude", "split", "keep_first_and_last_dense", "term_granularity")
        assert all(f"{name}={getattr(CHOICES, name)!r}" in repr(ls.SpectralSharding(layers=CHOICES)) for name in names)
        finer = ls.SpectralSharding(layers=plan_layers(net(), choices=ls.LayerChoices(term_granularity=2)))
        assert repr(finer) != repr(ls.SpectralSharding(layers=plan_layers(net())))


Batch = namedtuple("Batch", "x y")


def of_batches() -> Net:
    net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3))
    return Net(lambda net, batch: net.net(batch.x), net=net)


@pytest.mark.parametrize(
    "show",
    [
        ls.validate,
        lambda net, x: ls.cost_table(net, ls.SpectralSharding(), [0.5], x),
        lambda net, x: ls.largest_that_fits(net, ls.SpectralSharding(), x, budget_macs=1e6),
    ],
)
def test_a_module_without_forward_is_named(show: Callable[..., Any]) -> None:
    lit = variant(pl.LightningModule, lambda lit: setattr(lit, "net", of_batches().net))()
    with pytest.raises(ValueError, match=r"Lit has no `forward`.*such as `module\.net`"):
        show(lit, torch.zeros(1, 6))


def test_a_part_without_forward_keeps_its_own_error() -> None:
    with pytest.raises(NotImplementedError, match="ModuleList"):
        ls.validate(nn.Sequential(nn.ModuleList()), torch.zeros(1))


def test_a_named_tuple_is_one_input() -> None:
    batch = Batch(torch.zeros(5, 6), torch.zeros(5))
    assert ls.validate(of_batches(), batch).layers[0].in_forward
    assert ls.cost_table(of_batches(), ls.SpectralSharding(), [0.5], batch).full.macs == 5 * (6 * 12 + 12 * 12 + 12 * 3)


def test_packed_sequences_are_one_input() -> None:
    packed = pack_sequence([torch.zeros(4, 6), torch.zeros(2, 6)])
    net = Net(lambda net, sequences: net.head(net.lstm(sequences)[0].data), lstm=nn.LSTM(6, 8), head=nn.Linear(8, 3))
    assert all(layer.in_forward for layer in ls.validate(net, packed).layers)
    counted = count_pass(net, packed)
    assert counted.macs == 6 * (4 * 8 * (6 + 8) + 8 * 3)  # six positions, four gates
    kept = count_pass(nn.Sequential(nn.Linear(6, 8)), packed.data)
    assert counted.kept_values > kept.kept_values == 0  # inputs are not counted


X = torch.zeros(2, 3)


def test_validate_notes_that_a_run_would_make_another_plan() -> None:
    module = Detour()
    plan = ls.validate(module, X)
    run = ls.SpectralSharding().plan(module)
    assert list(plan.sharded) == ["mid.0"]
    assert list(run.sharded) == ["mid.0", "unused"]
    (note,) = [line for line in str(plan).splitlines() if line.startswith("NOTE")]
    assert "has no `example_input_array`, so a run traces no pass and would shard unused." in note
    assert "SpectralSharding(layers=plan)" in note
    assert ls.SpectralSharding(layers=plan).plan(module) is plan


def test_nothing_is_noted_where_a_run_makes_the_same_plan() -> None:
    module = Detour()
    plans = [ls.validate(module), ls.validate(module, X, layers=ls.LayerChoices(exclude=["head", "stem", "unused"]))]
    plans.append(ls.validate(module, layers=plans[1]))
    module.example_input_array = X  # type: ignore[assignment]
    plans += [ls.validate(module), ls.validate(module, torch.ones(2, 3))]
    assert "NOTE" not in "".join(map(str, plans))


def test_costs_are_those_of_the_plan_of_a_run() -> None:
    """Which knows no example but the module's own."""

    def parameters(**options: Any) -> int:
        return ls.cost_table(Detour(), ls.SpectralSharding(**options), [0.25], X).at[0.25].parameters

    assert parameters() == parameters(layers=ls.nn.plan_layers(Detour()))
    assert parameters() < parameters(layers=ls.validate(Detour(), X))  # in which the unused layer is dense


class TestInAFit:
    @pytest.fixture
    def planned(self, data: Any, fit: Fit, caplog: pytest.LogCaptureFixture) -> Any:
        caplog.set_level(logging.INFO)

        def planned(lit: pl.LightningModule, **options: Any) -> list[str]:
            caplog.clear()
            fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5, **options))
            return [line.getMessage() for line in caplog.records if "no forward pass was traced" in line.getMessage()]

        return planned

    @pytest.mark.parametrize("start", [None, ls.SpectralStart()])
    def test_the_log_says_what_a_plan_without_an_example_assumes(self, start: Any, lit: Any, planned: Any) -> None:
        assert planned(lit, spectral_start=start) == [
            "LitMLP has no `example_input_array`, so no forward pass was traced: the plan assumes that all layers run, "
            "in the order in which they are registered. Its first and last layers stay dense: net.0, net.5."
        ]

    def test_nothing_is_said_of_a_plan_with_an_example(self, lit: Any, planned: Any) -> None:
        assert planned(LitSmall()) == []
        assert planned(lit, layers=ls.validate(lit, torch.zeros(1, 6))) == []


ZERO, ONE = "zero: it has no singular terms", "constant: its rank of 1 would never grow"


def reason_of(layer: nn.Module, **choices: Any) -> str:
    """Why a layer between a first and a last one is held as it is."""
    module = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6))
    return {p.name: p.reason for p in plan_layers(module, choices=ls.LayerChoices(**choices)).layers}["1"]


def filled(make: Callable[[], nn.Module], value: float) -> nn.Module:
    layer = seeded(make)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


AFFINE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(15, 130),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "grouped": lambda: nn.Conv1d(6, 8, 3, groups=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(5, 4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", AFFINE)
def test_a_constant_weight_is_whole_and_a_random_one_is_sharded(name: str, dtype: torch.dtype) -> None:
    make = AFFINE[name]
    whose = "its weight" if name in ("linear", "conv") else "a part of its weight"
    assert reason_of(filled(make, 0.0).to(dtype)) == f"{whose} is {ZERO}"
    assert reason_of(filled(make, 0.07).to(dtype)) == f"{whose} is {ONE}"
    assert reason_of(seeded(make).to(dtype)) == "affine"


def test_other_weights_of_low_rank_are_sharded() -> None:
    """A truncated weight, for instance, is of low rank on purpose."""
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.outer(torch.arange(6.0), torch.ones(6)))
    assert reason_of(layer) == "affine"
    ls.algorithms.spectral_start(
        module := seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])), 0.1, tail=0.0
    )
    assert int(torch.linalg.matrix_rank(module[1].weight)) == 1
    assert list(plan_layers(module).sharded) == ["1"]


def test_one_part_of_a_packed_weight_without_terms_keeps_the_layer_whole() -> None:
    attention, packed = nn.MultiheadAttention(8, 2), nn.Linear(6, 18)
    with torch.no_grad():
        attention.in_proj_weight[8:16] = 0.0
        packed.weight[:6] = 0.0
    assert reason_of(attention) == f"a part of its weight is {ZERO}"
    assert reason_of(packed, split={"1": 3}) == f"a part of its weight is {ZERO}"
    assert reason_of(packed) == "affine"  # whole, it has terms


def test_matrices_that_can_only_have_one_term_are_sharded_with_the_others() -> None:
    assert reason_of(seeded(lambda: nn.LSTM(1, 4))) == "affine"


def test_weights_that_are_not_finite_are_left_to_the_checks_of_broken_weights() -> None:
    for broken in (float("nan"), float("inf")):
        assert reason_of(filled(lambda: nn.Linear(6, 6), broken)) == "affine"


def test_validate_names_them_and_costs_count_them_whole() -> None:
    module = seeded(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
    sharded = ls.cost_table(module, ls.SpectralSharding(), [0.25], torch.zeros(1, 16)).at[0.25].parameters
    nn.init.zeros_(module[1].weight)
    plan = ls.validate(module)
    assert f"dense    its weight is {ZERO}" in str(plan)
    assert plan.problems == ()
    whole = ls.cost_table(module, ls.SpectralSharding(), [0.25], torch.zeros(1, 16)).at[0.25].parameters
    assert whole - sharded == 16 * 16 - 4 * (16 + 16)
