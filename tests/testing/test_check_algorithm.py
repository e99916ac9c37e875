"""`check_algorithm` over every algorithm, one of a stranger's, and one that breaks each of its rules."""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from torch import Tensor
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms import Promises
from lightning_spectral.algorithms.base import Observed, Setting
from lightning_spectral.algorithms.capacities import Capacities
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide
from lightning_spectral.algorithms.memory.stale_updates import StaleRound
from lightning_spectral.client.device import ClientSide
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.per_client import assign
from lightning_spectral.protocol.records import Upload
from lightning_spectral.sums import MeanChange
from lightning_spectral.testing import check_algorithm
from lightning_spectral.testing.trial import Case, Trial, change_norms

PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))
ALL_LAYERS = ls.LayerChoices(keep_first_and_last_dense=False)
WIDTHS = {0.25: 0.5, 0.5: 0.5}

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
    "SCAFFOLD, bounded controls": ls.Scaffold(control_bound=0.5),
    "Ditto": ls.Ditto(pull=0.5),
    "q-FedAvg": ls.QFedAvg(q=2.0),
    "FedBuff": ls.FedBuff(concurrency=3, max_staleness=1),
    "LoRA with restarts": ls.LoRA(2, merge_every=2),
    "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio=WIDTHS, scaler=True, plan=PLAN),
    "width, first channels": ls.WidthSharding(ls.PrefixChannels(), keep_ratio=WIDTHS, plan=PLAN),
    "width, rolling channels": ls.WidthSharding(ls.RollingChannels(), keep_ratio=WIDTHS, plan=PLAN),
    "width of each step": ls.WidthSharding(keep_ratio=WIDTHS, step_widths=(0.25, 0.5), plan=PLAN),
    "averages of each width": ls.WidthSharding(keep_ratio=WIDTHS, step_widths=(0.25, 0.5), averages_per_width=True),
    **{f"LoRA with {type(own).__name__}": ls.LoRA({1: 0.5, 3: 0.5}, aggregation=own) for own in AGGREGATIONS},
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
    "FedDyn": ls.FedDyn(alpha=0.1),
    "LoRA, padded": RESTING.pop("LoRA with PaddedFactors"),
    "LoRA, truncated": RESTING.pop("LoRA with TruncatedProducts"),
}
# One of each class and of what acts in rounds in a way of its own; the others are slow


@pytest.fixture
def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)]


@pytest.fixture
def module() -> Iterator[LitMLP]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield LitMLP()


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:SpectralSharding shards no layer")  # of a frozen module
@pytest.mark.parametrize("name", RESTING)
def test_every_algorithm_passes(name: str, module: LitMLP, batch: Any) -> None:
    check_algorithm(RESTING[name], LitSmall() if "averages" in name else module, batch)


@pytest.mark.sampled(1)
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


@pytest.mark.slow
def test_running_averages_and_what_is_stored_of_clients_are_checked_too(batch: Any) -> None:
    check_algorithm(ls.FedAvg(), LitSmall(), batch)


# Of a stranger: signs of changes with one number a tensor


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


@pytest.mark.slow
def test_signs_of_changes_pass(module: LitMLP, batch: Any) -> None:
    check_algorithm(variant(side=SignSide, round=SignRound), module, batch)


@pytest.mark.slow
def test_fed_prox_passes_and_holds_clients_back(module: LitMLP, batch: Any) -> None:
    check_algorithm(ls.FedAvg(), module, batch, local_hooks=[ls.ProximalTerm(1.0)])
    cases = [Case(ls.FedAvg(), module, batch, 0.05, hooks) for hooks in ((), (ls.ProximalTerm(10.0),))]
    free, held = (change_norms(Trial(case)) for case in cases)
    assert held[0] == free[0]  # its only step begins where it started
    assert held[1] < free[1]
    assert held[2] < free[2]


# One that breaks each rule


def variant(**parts: Any) -> Any:
    """Federated averaging with another round or device half."""
    return type("Variant", (ls.FedAvg,), parts)()


@dataclass(frozen=True)
class Believes(ls.FedAvg):
    power: float = 1.0


@dataclass(frozen=True)
class RefusesWithoutName(Believes):
    message = "expected a float"

    def __post_init__(self) -> None:
        if not isinstance(self.power, float):
            raise TypeError(self.message)


class BelievesNaN(RefusesWithoutName):
    message = "`power` must be a float."


def says_no_more(self: Any, plan: Setting) -> None:
    if not any(p.requires_grad for p in plan.module.parameters()):
        raise ValueError("bad module")


def scaled(scale: Callable[[Any, Any], Any]) -> type[DenseRound]:
    """A round whose pseudo-gradients are those of federated averaging times something."""

    class Scaled(DenseRound):
        def close(self) -> None:
            super().close()
            for parameter in self.half.server.parameters():
                parameter.grad = scale(self, parameter)

    return Scaled


def forgets(self: Any, parameter: Any) -> Any:
    """Remembers where no checkpoint looks how many rounds there were."""
    self.half.calls = getattr(self.half, "calls", 0) + 1
    return parameter.grad / self.half.calls


def steps_itself(self: Any, parameter: Any) -> Any:
    """Adds what clients changed itself, and leaves nothing for the server's optimizer."""
    parameter.data -= parameter.grad
    return torch.zeros_like(parameter)


class FirstRound(DenseRound):
    """The later an upload arrives, the less it counts."""

    def add(self, receipt: Any, upload: Upload) -> None:
        self.mean.add(upload.tensors, receipt.unit.coefficient / (1 + self.mean.weights.num_terms))


class AloneRound(DenseRound):
    sums = ()


class CountingRound(DenseRound):
    """Knows which clients have reported."""

    def __init__(self, half: Any, cohort: Any) -> None:
        super().__init__(half, cohort)
        self.asked = {unit.key: unit.coefficient for units in cohort.groups.values() for unit in units}
        self.missing = dict(self.asked)

    def add(self, receipt: Any, upload: Upload) -> None:
        super().add(receipt, upload)
        del self.missing[receipt.unit.key]

    def observed(self) -> Observed:
        return Observed({"missing": float(len(self.missing))})


class AskedRound(CountingRound):
    """Divides by the weights of all clients that were asked, whoever has reported."""

    def close(self) -> None:
        super().close()
        for parameter in self.half.server.parameters():
            parameter.grad *= 1 - sum(self.missing.values()) / sum(self.asked.values())


class WaitingRound(CountingRound):
    """Believes that all come back."""

    def close(self) -> None:
        if self.missing:
            raise KeyError(next(iter(self.missing)))
        super().close()


class DividingRound(DenseRound):
    """Divides by the sum of the coefficients whatever they are."""

    def __init__(self, half: Any, cohort: Any) -> None:
        super().__init__(half, replace(cohort, absolute=False))


class ParametersRound(DenseRound):
    """Averages what optimizers step, and forgets running statistics."""

    def close(self) -> None:
        parameters = dict(self.half.server.named_parameters())
        apply_mean_change(self.half.server, [pair for pair in self.mean.finish() if pair[0] in parameters])


def uploads(tensors: Callable[[Any, Any], dict[Any, Any]], **parts: Any) -> Any:
    """Federated averaging whose clients upload something made of what they have after and before training."""

    @dataclass(frozen=True)
    class Uploading(DenseSide):
        def collect(self, client: Any, download: Any) -> Upload:
            return Upload(download.unit, tensors(super().collect(client, download).tensors, download.tensors))

    Uploading.__qualname__ = f"Uploading{next(NUMBERS)}"  # so that it can be pickled
    globals()[Uploading.__qualname__] = Uploading
    return variant(side=Uploading, **parts)


NUMBERS = count()


def moved(after: Any, before: Any) -> bool:
    return any((tensor != before[name]).any() for name, tensor in after.items())


@dataclass(frozen=True)
class WhisperSide(DenseSide):
    """Reads what the server writes behind the back of the download."""

    factor: list[float] = field(default_factory=lambda: [1.0])

    def collect(self, client: Any, download: Any) -> Upload:
        after = super().collect(client, download).tensors
        return Upload(download.unit, {n: torch.lerp(download.tensors[n], after[n], self.factor[0]) for n in after})


class WhisperRound(DenseRound):
    def send(self, unit: Any) -> Any:
        self.half.client_side.factor[0] = 0.5
        return super().send(unit)


@dataclass(frozen=True)
class LambdaSide(DenseSide):
    """Holds a function, which cannot be pickled."""

    do: Any = field(default_factory=lambda: lambda: None)


@dataclass(frozen=True)
class FunctionSide(DenseSide):
    """Holds a function that can be pickled, and that no device would be sent."""

    do: Any = torch.clone


class HashSide(DenseSide):
    """Sends a random half of what has changed, drawn by a hash."""

    def collect(self, client: Any, download: Any) -> Upload:
        after, kept = super().collect(client, download).tensors, {}
        for name, tensor in after.items():
            generator = torch.Generator().manual_seed(hash((name, download.round_idx)) % 2**32)
            mask = torch.rand(tensor.shape, generator=generator) < 0.5
            kept[name] = torch.where(mask, tensor, download.tensors[name])
        return Upload(download.unit, kept)


class DrawsByHash(ls.FedAvg):
    """Can be sent to another process, unlike a `variant`."""

    side = HashSide


class HalfRound(DenseRound):
    def add(self, receipt: Any, upload: Upload) -> None:
        self.mean.add_change(upload.tensors, receipt.unit.coefficient, upload.largest)


class OddRound(DenseRound):
    """Odd clients weigh half, which a device that masks its update does not know."""

    def add(self, receipt: Any, upload: Upload) -> None:
        unit = receipt.unit
        self.mean.add(upload.tensors, unit.coefficient / (1 + unit.client_id % 2), upload.largest)


class SquaringRound(DenseRound):
    def __init__(self, half: Any, cohort: Any) -> None:
        super().__init__(half, cohort)
        self.mean = MeanChange(self.mean.before, cohort.total**2, cohort.absolute)

    def add(self, receipt: Any, upload: Upload) -> None:
        self.mean.add(upload.tensors, receipt.unit.coefficient**2, upload.largest)


class OwnStartRound(DenseRound):
    """Sends clients a mixture of the server's weights and those that they have sent, and adds their changes of it."""

    def send(self, unit: Any) -> Any:
        download, receipt = super().send(unit)
        if unit in self.cohort.store:
            own = self.cohort.store[unit]
            download = replace(download, tensors={n: t.lerp(own[n], 0.1) for n, t in download.tensors.items()})
        return download, receipt

    def add(self, receipt: Any, upload: Upload) -> None:
        sent, after = self.send(receipt.unit)[0].tensors, upload.tensors
        super().add(receipt, replace(upload, tensors={n: self.tensors[n] + (t - sent[n]) for n, t in after.items()}))
        self.cohort.store[receipt.unit] = {n: t.clone() for n, t in after.items()}


class TurnsSide(DenseSide):
    """Counts a client's turns in place, in what its device keeps."""

    def turns(self, download: Any) -> Any:
        return download.client_state.get("turns", torch.ones(()))

    def collect(self, client: Any, download: Any) -> Upload:
        after, share = super().collect(client, download).tensors, 1 / self.turns(download).add_(1)
        return Upload(download.unit, {n: torch.lerp(download.tensors[n], after[n], float(share)) for n in after})

    def keep(self, client: Any, download: Any, upload: Any) -> Any:
        return {"turns": self.turns(download)}


class RelyingSide(DenseSide):
    def keep(self, client: Any, download: Any, upload: Any) -> Any:
        return {"turns": download.client_state["turns"] + 1 if download.round_idx else torch.ones(())}


class FirstOfProcessSide(DenseSide):
    """Halves what has changed unless a client starts where the first one of its process did."""

    def collect(self, client: Any, download: Any) -> Upload:
        STARTS.append({n: t.clone() for n, t in download.tensors.items()})
        after, before = super().collect(client, download).tensors, download.tensors
        shares = {n: 0.5 + 0.5 * (STARTS[0][n] == before[n]) for n in after}
        return Upload(download.unit, {n: torch.lerp(before[n], after[n], shares[n]) for n in after})


class FirstOfProcess(ls.FedAvg):
    side = FirstOfProcessSide


class Against(ls.StaleUpdates):
    class round(StaleRound):
        def expected_update(self, unit: Any) -> Any:
            return {n: -t for n, t in super().expected_update(unit).items()}

    promises = ls.StaleUpdates.promises


class Drawn(Capacities[Any]):
    def of_clients(self, num_clients: int, seed: int) -> Any:
        return assign([random.choice((0.5, 1.0)) for _ in range(num_clients)], num_clients, seed, "capacities")


STARTS: list[Any] = []
NEW_VALUES, ONE_SUM = Promises(new_values=True), Promises(new_values=True, one_sum=True)
NO_NORM = "do not promise `new_values`"
BROKEN: dict[str, tuple[Any, str]] = {
    "is not equal to its copy": (variant(__eq__=object.__eq__, __hash__=object.__hash__), "a copy is not equal to it"),
    "believes anything": (Believes(), "with power=<an object of no use>: it was not refused"),
    "believes NaN": (BelievesNaN(), "with power=nan: it was not refused"),
    "refuses without a name": (RefusesWithoutName(), "does not name the argument: expected a float"),
    "stumbles": (
        variant(check=lambda self, plan: next(p for p in plan.module.parameters() if p.requires_grad)),
        "every parameter is frozen: `check` raised StopIteration",
    ),
    "says no more": (
        variant(check=says_no_more),
        "names neither the module, nor a layer, nor the algorithm: bad module",
    ),
    "forgets": (
        variant(round=scaled(forgets)),
        r"resumed after 1 of 3 rounds: not the uninterrupted run; what lasts .*: 6 of 6 tensors, first 'module.net.0.w",
    ),
    "decays": (
        variant(round=scaled(lambda self, parameter: parameter.grad + 1e-3 * parameter.detach())),
        "after the start: nobody trained, but the server's weights changed: 6 of 6 tensors",
    ),
    "steps itself": (
        variant(round=scaled(steps_itself)),
        "optimizer did not step, but the parameters changed; give them a gradient in `Round.close`: ",
    ),
    "divides by the asked": (
        variant(round=AskedRound),
        r"four of five clients lost .*: the server moved by .*divide by the weights of the clie",
    ),
    "waits for all": (
        variant(round=WaitingRound),
        "four of five clients lost after their downloads: the round failed: KeyError: ",
    ),
    "the first count more": (variant(round=FirstRound), "round 0, clients in reverse: their order made a difference"),
    "adds up nothing": (variant(round=AloneRound), "round 0, process 0 of 2: grouping made a difference"),
    "holds a lambda": (variant(side=LambdaSide), "its half cannot be sent there: .*pickle"),
    "holds a function": (
        variant(side=FunctionSide),
        r"its half cannot be sent there: .*FunctionSide\.do cannot be sent to devices: it is of type builtin",
    ),
    "whispers": (
        variant(side=WhisperSide, round=WhisperRound),
        "with a device elsewhere, round 0: not as in one process",
    ),
    "numbers tensors": (
        uploads(lambda after, before: {**after, 7: torch.zeros(1)}),
        r"a record cannot be sent: .* Expected `str`, got `int` - at `key` in `\$\.tensors`",
    ),
    "sends more once weights have changed": (
        uploads(lambda after, before: {**after, "moved": torch.zeros(5 if moved(after, before) else 1)}),
        r"round 0, client 0: \(.*\) bytes .* without frozen tensors, but `turn_costs` says \(.*\)",
    ),
    "draws by hash": (
        DrawsByHash(),
        "another PYTHONHASHSEED, round 0: not as in this process; draw from `protocol.rng.derived_generator`, and not",
    ),
    "ignores `absolute`": (
        variant(round=DividingRound),
        "of twice the size, 'net.0.weight' changes 1 times as far; use them as they are in every sum if",
    ),
    "squares coefficients": (variant(round=SquaringRound), r"'net\.0\.weight' changes 4 times as far"),
    "counts in each process": (
        variant(round=CountingRound),
        r"one of two processes logs \{'missing': 3\.0\}, the other \{'missing': 2\.0\}; let `observed` read",
    ),
    "mixes in earlier uploads": (
        variant(round=OwnStartRound, promises=Promises(noise_hides=True)),
        "client 0 is sent other tensors than the rest, .*; do not promise `noise_hides`",
    ),
    "counts in place": (variant(side=TurnsSide), "sent the same twice: its uploads differ; leave `download.client_st"),
    "relies on what was kept": (variant(side=RelyingSide), "lost what its device kept, and cannot train: .*'turns'"),
    "remembers the first turn": (FirstOfProcess(), "PYTHONHASHSEED, round 0: not as in this process"),
    "expects the opposite": (Against(beta=0.7), "client 0 moves against its expected update, which must be a change"),
    "draws capacities": (variant(capacities=Drawn(ls.FedAvg())), "gives clients other capacities when asked again"),
    "uploads changes": (  # the example of the documentation, but for what it promises
        uploads(
            lambda after, before: {n: (after[n] - before[n]).bfloat16() for n in after},
            round=HalfRound,
            promises=NEW_VALUES,
        ),
        rf"did not train, and the norm of its update is \d.*{NO_NORM}",
    ),
    "exaggerates": (
        uploads(lambda after, before: {n: torch.lerp(before[n], after[n], 2.0) for n in after}, promises=NEW_VALUES),
        f"client 0 moved by .*, and the norm of its update is .*{NO_NORM}",
    ),
    "weighs otherwise": (
        variant(round=OddRound, promises=ONE_SUM),
        "whose clients mask their updates: not the same run; do not promise `one_sum`: 6 of 6 tensors",
    ),
    "forgets statistics": (
        variant(round=ParametersRound),
        "BatchNorm were from 0.1 to 0.271 at the clients, and the server's became 0; average buffers too",
    ),
}


# A residual: what of its last update a client has not sent yet, because it sends entries of one sign


@dataclass(frozen=True)
class ResidualSide(DenseSide):
    """Error feedback as it should be: what is left of an update stays on the device."""

    def collect(self, client: Any, download: Any) -> Upload:
        return Upload(download.unit, {n: whole.clamp(min=0) for n, whole in self.whole(client, download).items()})

    def whole(self, client: Any, download: Any) -> dict[str, Tensor]:
        after, left = super().collect(client, download).tensors, self.left(download)
        return {n: after[n] - download.tensors[n] + left.get(n, 0) for n in after}

    def left(self, download: Any) -> Any:
        return download.client_state

    def keep(self, client: Any, download: Any, upload: Any) -> Any:
        return {n: whole - upload.tensors[n] for n, whole in self.whole(client, download).items()}


class TravellingSide(ResidualSide):
    """Sends it to the server, which sends it back."""

    keep = ClientSide.keep  # nothing

    def load(self, client: Any, download: Any) -> None:
        super().load(client, replace(download, tensors={n: t for n, t in download.tensors.items() if ":" not in n}))

    def left(self, download: Any) -> Any:
        return {n.removeprefix("left:"): t for n, t in download.tensors.items() if n.startswith("left:")}

    def collect(self, client: Any, download: Any) -> Upload:
        upload = super().collect(client, download)
        left = {f"left:{n}": whole - upload.tensors[n] for n, whole in self.whole(client, download).items()}
        return Upload(upload.unit, {**upload.tensors, **left})


@dataclass(frozen=True)
class RememberingSide(ResidualSide):
    """Remembers it itself."""

    residuals: dict[int, Any] = field(default_factory=dict)
    keep = ClientSide.keep  # nothing

    def left(self, download: Any) -> Any:
        return self.residuals.get(download.unit.client_id, {})

    def collect(self, client: Any, download: Any) -> Upload:
        upload = super().collect(client, download)
        self.residuals[download.unit.client_id] = super().keep(client, download, upload)
        return upload


class RunningSide(RememberingSide):
    """Remembers that of whoever trained last."""

    def left(self, download: Any) -> Any:
        return self.residuals.get(0, {})

    def collect(self, client: Any, download: Any) -> Upload:
        upload = super().collect(client, download)
        self.residuals[0] = self.residuals[download.unit.client_id]
        return upload


class TravellingRound(HalfRound):
    def send(self, unit: Any) -> Any:
        download, receipt = super().send(unit)
        zeros = {f"left:{name}": torch.zeros_like(self.tensors[name]) for name in self.mean.names}
        if unit in self.cohort.store:
            zeros |= self.cohort.store[unit]
        return replace(download, tensors={**download.tensors, **zeros}), receipt

    def add(self, receipt: Any, upload: Upload) -> None:
        super().add(receipt, upload)
        self.cohort.store[receipt.unit] = {n: t for n, t in upload.tensors.items() if n.startswith("left:")}


def test_a_residual_that_stays_on_the_device_passes(module: LitMLP, batch: Any) -> None:
    check_algorithm(variant(side=ResidualSide, round=HalfRound), module, batch, rests=False)


WRONG_RESIDUALS = {
    "travels": (
        variant(side=TravellingSide, round=TravellingRound),
        r"client 0 is sent back left:net\.0\.weight, .* nobody else is; let it stay on the device, with",
    ),
    "in the device half": (
        variant(side=RememberingSide, round=HalfRound),
        "not the uninterrupted run; what lasts belongs in",
    ),
    "of the last client": (
        variant(side=RunningSide, round=HalfRound),
        "not the uninterrupted run; what lasts belongs in",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_a_residual_elsewhere_is_found(name: str, module: LitMLP, batch: Any) -> None:
    algorithm, rule = WRONG_RESIDUALS[name]
    with pytest.raises(AssertionError, match=rule):
        check_algorithm(algorithm, module, batch, rests=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_named(name: str, module: LitMLP, batch: Any) -> None:
    algorithm, rule = BROKEN[name]
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

    check_algorithm(variant(round=NoSums), module, batch)


@pytest.mark.slow
def test_it_needs_no_package_of_the_network(module: LitMLP, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("msgspec", "safetensors", "lightning_spectral.protocol.codec", "lightning_spectral.network.objects"):
        monkeypatch.setitem(sys.modules, name, None)
    check_algorithm(ls.FedAvg(), module, batch)
    with pytest.raises(AssertionError, match=r"its half cannot be sent there: .*pickle"):
        check_algorithm(variant(side=LambdaSide), module, batch)
