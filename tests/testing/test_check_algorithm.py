"""`check_algorithm` over every algorithm, two of a stranger's, and one that breaks each of its rules."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide
from lightning_spectral.protocol import Upload
from lightning_spectral.testing import check_algorithm
from lightning_spectral.testing.trial import Case, Trial, change_norms

PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))
ALL_LAYERS = ls.LayerChoices(keep_first_and_last_dense=False)
WIDTHS = {0.25: 0.5, 0.5: 0.5}
AGGREGATIONS = [
    getattr(ls.algorithms, name)
    for name in ls.algorithms.__all__
    if inspect.isclass(getattr(ls.algorithms, name))
    and issubclass(getattr(ls.algorithms, name), ls.algorithms.AdapterAggregation)
    and not inspect.isabstract(getattr(ls.algorithms, name))
]

# Algorithms whose weights rest if nobody trains, and those that average what they draw, cut or truncate, or drop what
# nobody can hold.
RESTING = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=2.0, layers=ALL_LAYERS),
    "outputs cut": ls.SpectralSharding(
        keep_ratio=0.5, layers=ls.LayerChoices(output_ratio=0.4), aggregation=ls.algorithms.TermMeans()
    ),
    "matrix means of all terms": ls.SpectralSharding(keep_ratio=1.0, aggregation=ls.algorithms.MatrixMeans()),
    "FIARSE": ls.FIARSE({0.25: 0.5, 1.0: 0.5}),
    "stale updates": ls.StaleUpdates(beta=0.7, num_terms=1),
    "stale updates of unseen clients": ls.StaleUpdates(beta=0.7, unseen="mean", num_terms=1),
    "MIFA": ls.StaleUpdates.mifa(),
    "SCAFFOLD": ls.Scaffold(),
    "LoRA with restarts": ls.LoRA(2, merge_every=2),
    "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio=WIDTHS, scaler=True, plan=PLAN),
    "width, first channels": ls.WidthSharding(ls.PrefixChannels(), keep_ratio=WIDTHS, plan=PLAN),
    "width, rolling channels": ls.WidthSharding(ls.RollingChannels(), keep_ratio=WIDTHS, plan=PLAN),
    "width of each step": ls.WidthSharding(keep_ratio=WIDTHS, step_widths=(0.25, 0.5), plan=PLAN),
    "averages of each width": ls.WidthSharding(keep_ratio=WIDTHS, step_widths=(0.25, 0.5), averages_per_width=True),
    **{f"LoRA with {kind.__name__}": ls.LoRA({1: 0.5, 3: 0.5}, aggregation=kind()) for kind in AGGREGATIONS},
}
DRAWING = {
    "spectral, within reach": ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(output_ratio=0.4)),
    "matrix means": ls.SpectralSharding(keep_ratio=0.5, aggregation=ls.algorithms.MatrixMeans()),
    "Zampling": ls.Zampling(4, degree=3),
    "Zampling, coordinated": ls.Zampling(4, degree=3, coordinated=True),
    "Zampling, quantised": ls.Zampling(4, degree=3, downlink_bits=4, smoothing=0.5),
    "Zampling, continuous": ls.Zampling(4, degree=3, sampled=False),
    "supermask": ls.Zampling.supermask(),
    "FedPM": ls.Zampling.fed_pm(),
    "LoRA, padded": RESTING.pop("LoRA with PaddedFactors"),
    "LoRA, truncated": RESTING.pop("LoRA with TruncatedProducts"),
}


@pytest.fixture
def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)]


@pytest.fixture
def module() -> Iterator[LitMLP]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield LitMLP()


@pytest.mark.filterwarnings("ignore:SpectralSharding shards no layer")  # of a frozen module
@pytest.mark.parametrize("name", RESTING)
def test_every_algorithm_passes(name: str, module: LitMLP, batch: Any) -> None:
    check_algorithm(RESTING[name], LitSmall() if "averages" in name else module, batch)


@pytest.mark.filterwarnings("ignore:SpectralSharding shards no layer")
@pytest.mark.parametrize("name", DRAWING)
def test_what_averages_draws_passes_but_for_resting(name: str, module: LitMLP, batch: Any) -> None:
    check_algorithm(DRAWING[name], module, batch, rests=False)
    with pytest.raises(AssertionError, match="nobody trained, but the server's weights changed: "):
        check_algorithm(DRAWING[name], module, batch)


def test_no_algorithm_of_the_package_is_left_out() -> None:
    public = [getattr(ls.algorithms, name) for name in ls.algorithms.__all__]
    algorithms = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, ls.Algorithm)}
    assert algorithms - {ls.Algorithm} == {type(algorithm) for algorithm in (RESTING | DRAWING).values()}


def test_running_averages_and_what_is_stored_of_clients_are_checked_too(batch: Any) -> None:
    check_algorithm(ls.FedAvg(), LitSmall(), batch)


# Of a stranger: signs of changes with one number a tensor, and FedProx


class SignSide(DenseSide):
    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        changes = {name: after[name] - download.tensors[name] for name in after}
        signs = {name: change.sign().to(torch.int8) for name, change in changes.items()}
        return Upload(download.unit, signs | {f"{name}:size": c.abs().mean() for name, c in changes.items()})


class SignRound(DenseRound):
    def add(self, receipt: Any, upload: Upload) -> None:
        sent = upload.tensors
        changes = {name: sent[name] * sent[f"{name}:size"] for name in self.mean.names}
        self.mean.add_change(changes, receipt.unit.coefficient)


class SignUplink(ls.FedAvg):
    side, round = SignSide, SignRound
    updates_have_norms = False


@dataclass(frozen=True)
class Proximal(ls.client.LocalHook):
    """FedProx: every step pulls the weights back to where the client started (Li et al. 2020)."""

    mu: float = 1.0

    def start_client(self, module: Any, optimizer: Any) -> Any:
        start = [(p, p.detach().clone()) for p in module.parameters()]

        def before_step() -> None:
            for parameter, before in start:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - before, alpha=self.mu)

        return before_step


def test_signs_of_changes_pass(module: LitMLP, batch: Any) -> None:
    check_algorithm(SignUplink(), module, batch)


def test_fed_prox_passes_and_holds_clients_back(module: LitMLP, batch: Any) -> None:
    check_algorithm(ls.FedAvg(), module, batch, local_hooks=[Proximal()])
    free, held = (
        change_norms(Trial(Case(ls.FedAvg(), module, batch, 0.05, hooks))) for hooks in ((), (Proximal(mu=10.0),))
    )
    assert held[0] == free[0]  # its only step begins where it started
    assert held[1] < free[1]
    assert held[2] < free[2]


# One that breaks each rule


class NotComparable(ls.FedAvg):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Believes(ls.FedAvg):
    power: float = 1.0


@dataclass(frozen=True)
class RefusesWithoutName(ls.FedAvg):
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.power, float):
            raise TypeError("expected a float")


class Stumbles(ls.FedAvg):
    def check(self, server: Any) -> None:
        next(name for name, p in server.named_parameters() if p.requires_grad)


class SaysNoMore(ls.FedAvg):
    def check(self, server: Any) -> None:
        if not any(p.requires_grad for p in server.parameters()):
            raise ValueError("bad module")


class Counting(DenseRound):
    """Remembers where no checkpoint looks how many rounds there were."""

    def close(self) -> None:
        self.half.num_rounds = getattr(self.half, "num_rounds", 0) + 1  # type: ignore[attr-defined]
        super().close()
        for parameter in self.half.server.parameters():
            parameter.grad /= self.half.num_rounds  # type: ignore[attr-defined,operator]


class Forgets(ls.FedAvg):
    round = Counting


class DecayRound(DenseRound):
    def close(self) -> None:
        super().close()
        for parameter in self.half.server.parameters():
            parameter.grad += 1e-3 * parameter.detach()


class Decays(ls.FedAvg):
    round = DecayRound


class FirstRound(DenseRound):
    """The later an upload arrives, the less it counts."""

    def add(self, receipt: Any, upload: Upload) -> None:
        self.mean.add(upload.tensors, receipt.unit.coefficient / (1 + self.mean.weights.num_terms))


class FirstComes(ls.FedAvg):
    round = FirstRound


class AloneRound(DenseRound):
    sums = ()


class AddsUpNothing(ls.FedAvg):
    round = AloneRound


@dataclass(frozen=True)
class LambdaSide(DenseSide):
    do: Any = field(default_factory=lambda: lambda: None)


class Unpicklable(ls.FedAvg):
    side = LambdaSide


@dataclass(frozen=True)
class WhisperSide(DenseSide):
    """Reads what the server writes behind the back of the download."""

    factor: list[float] = field(default_factory=lambda: [1.0])

    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        return Upload(download.unit, {n: torch.lerp(download.tensors[n], after[n], self.factor[0]) for n in after})


class WhisperRound(DenseRound):
    def send(self, unit: Any) -> Any:
        self.half.device_half.factor[0] = 0.5
        return super().send(unit)


class Whispers(ls.FedAvg):
    side, round = WhisperSide, WhisperRound


class NumberedSide(DenseSide):
    def collect(self, client: Any, download: Any) -> Upload:
        tensors: Any = {**super().collect(client, download).tensors, 7: torch.zeros(1)}
        return Upload(download.unit, tensors)


class NumbersTensors(ls.FedAvg):
    side = NumberedSide


class MoreSide(DenseSide):
    """Sends more once weights have changed."""

    def collect(self, client: Any, download: Any) -> Upload:
        upload = super().collect(client, download)
        moved = any((tensor != download.tensors[name]).any() for name, tensor in upload.tensors.items())
        return Upload(download.unit, dict(upload.tensors) | {"moved": torch.zeros(5 if moved else 1)})


class SendsMore(ls.FedAvg):
    side = MoreSide


class HalfSide(DenseSide):
    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        return Upload(download.unit, {n: (after[n] - download.tensors[n]).bfloat16() for n in after})


class HalfRound(DenseRound):
    def add(self, receipt: Any, upload: Upload) -> None:
        self.mean.add_change(upload.tensors, receipt.unit.coefficient, upload.largest)


class HalfUplink(ls.FedAvg):
    """The example of the documentation, but for what it says of norms."""

    side, round = HalfSide, HalfRound
    updates_have_norms = True


class TwiceSide(DenseSide):
    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        return Upload(download.unit, {n: torch.lerp(download.tensors[n], after[n], 2.0) for n in after})


class Exaggerates(ls.FedAvg):
    side = TwiceSide


@dataclass(frozen=True)
class BelievesAnyNumber(ls.FedAvg):
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.power, float):
            raise TypeError(f"`power` must be a float, got {self.power!r}.")


class SteppingRound(DenseRound):
    """Adds what clients changed itself, and leaves nothing for the server's optimizer."""

    def close(self) -> None:
        super().close()
        for parameter in self.half.server.parameters():
            parameter.data -= parameter.grad
            parameter.grad.zero_()


class StepsItself(ls.FedAvg):
    round = SteppingRound


class AskedRound(DenseRound):
    """Divides by the weights of all clients that were asked, whoever has reported."""

    def close(self) -> None:
        super().close()
        asked = sum(unit.coefficient for units in self.cohort.groups.values() for unit in units)
        for parameter in self.half.server.parameters():
            parameter.grad *= self.reported / asked

    def __init__(self, half: Any, cohort: Any) -> None:
        super().__init__(half, cohort)
        self.cohort, self.reported = cohort, 0.0

    def add(self, receipt: Any, upload: Upload) -> None:
        super().add(receipt, upload)
        self.reported += receipt.unit.coefficient


class DividesByTheAsked(ls.FedAvg):
    round = AskedRound


class WaitingRound(DenseRound):
    """Believes that all come back."""

    def __init__(self, half: Any, cohort: Any) -> None:
        super().__init__(half, cohort)
        self.missing = {unit.key for units in cohort.groups.values() for unit in units}

    def add(self, receipt: Any, upload: Upload) -> None:
        super().add(receipt, upload)
        self.missing.remove(receipt.unit.key)

    def close(self) -> None:
        if self.missing:
            raise KeyError(self.missing.pop())
        super().close()


class WaitsForAll(ls.FedAvg):
    round = WaitingRound


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        (NotComparable(), "a copy is not equal to it"),
        (Believes(), "with power=<an object of no use>: it was not refused"),
        (RefusesWithoutName(), "does not name the argument: expected a float"),
        (Stumbles(), "every parameter is frozen: `check` raised StopIteration"),
        (SaysNoMore(), "names neither the module, nor a layer, nor the algorithm: bad module"),
        (Forgets(), r"resumed after 1 of 3 rounds: not the uninterrupted run: 6 of 6 tensors, first 'module.net.0.w"),
        (Decays(), "after the start: nobody trained, but the server's weights changed: 6 of 6 tensors"),
        (BelievesAnyNumber(), "with power=nan: it was not refused"),
        (StepsItself(), "optimizer did not step, but the parameters changed; give them a gradient in `Round.close`: "),
        (DividesByTheAsked(), r"four of five clients lost .*: the server moved by .*divide by the weights of the clie"),
        (WaitsForAll(), "four of five clients lost after their downloads: the round failed: KeyError: "),
        (FirstComes(), "round 0, clients in reverse: their order made a difference"),
        (AddsUpNothing(), "round 0, process 0 of 2: grouping made a difference"),
        (Unpicklable(), "its half cannot be sent there: "),
        (Whispers(), "with a device elsewhere, round 0: not as in one process"),
        (NumbersTensors(), r"a record cannot be sent: .* Expected `str`, got `int` - at `key` in `\$\.tensors`"),
        (SendsMore(), r"round 0, client 0: \(.*\) bytes .* without frozen tensors, but `turn_costs` says \(.*\)"),
        (HalfUplink(), r"did not train, and the norm of its update is \d.*set `updates_have_norms` to False"),
        (Exaggerates(), r"client 0 moved by .*, and the norm of its update is .*set `updates_have_norms` to False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ls.Algorithm) else "",
)
def test_each_broken_rule_is_named(algorithm: Any, rule: str, module: LitMLP, batch: Any) -> None:
    with pytest.raises(AssertionError, match=rule):
        check_algorithm(algorithm, module, batch)


def test_a_ledger_that_counts_otherwise_is_found(module: LitMLP, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spectral.server.round.downloads_sent", lambda download, upload: [])
    with pytest.raises(AssertionError, match="bytes travelled down and up, but the ledger counts"):
        check_algorithm(ls.FedAvg(), module, batch)


def test_a_check_in_which_nothing_trains_is_no_check(module: LitMLP, batch: Any) -> None:
    with pytest.raises(AssertionError, match="after 3 rounds nothing has changed, so nothing was checked"):
        check_algorithm(ls.FedAvg(), module, batch, lr=0.0)
    with pytest.raises(ls.ClientError, match="Round 0, client 0: no step taken"):
        check_algorithm(ls.FedAvg(), LitSmall(), [tensor[:1] for tensor in batch])


def test_an_algorithm_for_one_process_need_not_share_its_sums(module: LitMLP, batch: Any) -> None:
    class NoSums(DenseRound):
        sums = ls.algorithms.base.Round.sums

    class OneProcess(ls.FedAvg):
        round = NoSums

    check_algorithm(OneProcess(), module, batch)
