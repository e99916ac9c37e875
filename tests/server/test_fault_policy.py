"""Clients with a fault end the run or are left out without a trace, as are those with updates that are too large."""

import math
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.partition import Partition
from lightning_spectral.protocol.records import EXPLANATIONS, ClientOutcome, ExclusionReason, WorkUnit
from lightning_spectral.simulation import Conditions
from lightning_spectral.sums.exact_mean import LARGEST

FitWith = Callable[..., Fitted]
FAST = ls.simulation.DeviceProfile(downlink=1e6, uplink=1e6, macs_per_second=1e9)
SLOW = ls.simulation.DeviceProfile(downlink=1.0, uplink=1.0, macs_per_second=1.0)
REASONS: tuple[ExclusionReason, ...] = tuple(one for one in get_args(ExclusionReason) if one != "spent")  # by a filter
POLICIES = tuple(reason for reason in REASONS if reason != "surplus")  # which is not a fault and has no policy
ALGORITHMS = [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})]
BAD, NUM_CLIENTS = 2, 6  # the client with the fault
EXPECTED = {"dropped_out", "late", "no_data", "surplus"}  # counted, but no reason to warn


class LitFragile(pl.LightningModule):
    """Fails in the way its batches dictate; before it raises an error, it corrupts everything it can reach."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.register_buffer("step_count", torch.zeros((), dtype=torch.long))
        self.metric = torchmetrics.MeanMetric(nan_strategy="ignore")
        self.scale = 1.0

    def training_step(self, batch: Any) -> Any:
        (x,) = batch
        if bool(torch.isinf(x).any()):
            self.mess_up(x)
            raise RuntimeError("the sensor is broken")
        if bool((x == -1.0).any()):
            return None
        self.step_count += 1
        loss = self.net(x).square().mean() * self.scale
        self.metric(loss)
        self.log("seen", self.metric)
        self.log("plain", loss)
        return loss

    def mess_up(self, x: torch.Tensor) -> None:
        self.scale = 7.0
        self.metric(torch.tensor(1e6))
        self.log("plain", torch.tensor(1e6))
        self.net(torch.full_like(x, 3.0)).sum().backward()  # gradients, and running statistics
        with torch.no_grad():
            for tensor in [*self.parameters(), self.step_count]:
                tensor.fill_(9)
        self.net[0].register_forward_hook(lambda module, args, output: output + 1)
        self.requires_grad_(False)
        self.eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class ByClient(ls.partition.Partitioner):
    """Four examples for each client, none for those in ``without``."""

    def __init__(self, without: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.num_clients, self.without = NUM_CLIENTS, without

    def split(self, num_examples: int, labels: Any, generator: Any) -> Partition:
        everyone = range(NUM_CLIENTS)
        return Partition.from_lists([[] if c in self.without else list(range(4 * c, 4 * c + 4)) for c in everyone])


def federation(reason: ExclusionReason | None, bad: set[int]) -> tuple[ls.FederatedDataModule, dict[str, Any]]:
    """Data and conditions under which exactly the clients of ``bad`` are left out for ``reason``."""
    x = torch.linspace(0.5, 2.0, 4 * NUM_CLIENTS)[:, None].repeat(1, 2)
    value = {"error": math.inf, "not_finite": math.nan, "no_update": -1.0}.get(reason or "")
    if value is not None:
        for client_id in bad:
            x[4 * client_id : 4 * client_id + 4] = value
    data = ls.FederatedDataModule(TensorDataset(x), ByClient(bad if reason == "no_data" else set()), batch_size=2)
    profiles = [SLOW if c in bad else FAST for c in range(NUM_CLIENTS)]
    options: dict[str, Any] = {
        "dropped_out": lambda: {"dropout": ls.ClientDropout([float(c in bad) for c in range(NUM_CLIENTS)])},
        "late": lambda: {"clock": ls.VirtualClock(profiles, deadline=10.0)},
        "surplus": lambda: {"clock": ls.VirtualClock(profiles, keep_first=NUM_CLIENTS - len(bad))},
    }
    return data, options.get(reason or "", dict)()


@pytest.fixture
def fit_with(fit: Fit) -> FitWith:
    """Fits of two rounds with all clients, in which exactly the clients of ``bad`` are left out for ``reason``."""

    def fit_with(reason: ExclusionReason | None, bad: set[int], module: Any = None, **options: Any) -> Fitted:
        data, conditions = federation(reason, bad)
        settings: dict[str, Any] = {"clients_per_round": NUM_CLIENTS, "max_epochs": 2, **conditions, **options}
        settings.setdefault(
            "buffers", {"step_count": "server"} if isinstance(module or LitFragile(), LitFragile) else {}
        )
        return fit(module or LitFragile(), data, **settings)

    return fit_with


DROPPED: dict[str, Fitted] = {}  # of each algorithm, for all reasons


def leave_out(reason: ExclusionReason, max_share: float = 0.5) -> ls.Faults:
    return ls.Faults() if reason == "surplus" else ls.Faults(**{f"on_{reason}": ls.LeaveOut(max_share)})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["FedAvg", "spectral", "mixed"])
@pytest.mark.parametrize("reason", REASONS)
def test_a_client_that_is_left_out_leaves_no_trace_but_its_count(
    reason: ExclusionReason, algorithm: Any, fit_with: FitWith
) -> None:
    """The oracle is a client that does not train: it drops out. All reasons lead to the same weights, bit for bit."""
    dropped = DROPPED.get(repr(algorithm)) or fit_with("dropped_out", {BAD}, algorithm=algorithm)
    DROPPED[repr(algorithm)] = dropped
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ls.SpectralWarning)
        fitted = fit_with(reason, {BAD}, algorithm=algorithm, faults=leave_out(reason))
    # terms of mixed keep ratios shrink by the planned shares of examples, of which a client without any has none
    has_its_share = reason != "no_data" or algorithm is not ALGORITHMS[-1]
    assert same_state(fitted.state, dropped.state) == has_its_share
    for row, other in zip(fitted.rows, dropped.rows, strict=True):
        assert row[f"fl/left_out_{reason}"] == row["fl/clients_left_out"] == 1.0
        assert row["fl/clients"] == NUM_CLIENTS - 1
        same = ("fl/loss", "fl/examples", "fl/lr", "seen", "plain") if has_its_share else ("fl/examples", "fl/lr")
        assert [row[name] for name in same] == [other[name] for name in same]
    assert {(row.client_id, row.left_out) for row in fitted.ledger.rows if row.left_out} == {(BAD, reason)}
    told = [f"Round {r}: client {BAD} is left out of the average: {EXPLANATIONS[reason]}" for r in (0, 1)]
    assert len(said) == (0 if reason in EXPECTED else 2)
    assert all(str(warning.message).startswith(text) for warning, text in zip(said, told, strict=False))


@pytest.mark.parametrize("reason", POLICIES)
def test_raise_ends_the_run_and_names_the_client(reason: ExclusionReason, fit_with: FitWith) -> None:
    kind: Any = ValueError if reason == "no_data" else ls.ClientError
    with pytest.raises(kind, match=rf"(Round 0, )?client\w* {BAD}.*"):
        fit_with(reason, {BAD}, faults=ls.Faults(**{f"on_{reason}": ls.server.Raise()}))


@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("reason", POLICIES)
def test_more_than_the_allowed_share_ends_the_run_and_changes_nothing(
    reason: ExclusionReason, fit_with: FitWith
) -> None:
    module = LitFragile()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    bad = {1, 2, 4}
    named = rf"3 of 6 clients are left out \(clients 1, 2 and 4: {EXPLANATIONS[reason]}\), .* that `Faults.on_{reason}`"
    with pytest.raises(ls.errors.RoundError, match=named):
        fit_with(reason, bad, module, max_epochs=1, faults=leave_out(reason, 0.49))
    assert same_state(module.state_dict(), before)
    (row,) = fit_with(reason, bad, module, max_epochs=1, faults=leave_out(reason, 0.5)).rows
    assert (row["fl/clients"], row["fl/clients_left_out"]) == (3.0, 3.0)  # exactly the allowed share
    assert not same_state(module.state_dict(), before)


@pytest.mark.parametrize(
    ("client_ids", "named"), [([3], "client 3"), ([5, 3], "clients 3 and 5"), ([5, 11, 3], "clients 3, 5 and 11")]
)
def test_the_error_lists_the_clients_and_what_happened(client_ids: list[int], named: str) -> None:
    outcomes = [ClientOutcome(4, WorkUnit(c), 1.0, 10, 0, math.nan, 0, 0, left_out="late") for c in client_ids]
    with pytest.raises(ls.errors.RoundError) as caught:
        ls.Faults(on_late=ls.LeaveOut(0.5)).check_round(4, outcomes)
    n = len(client_ids)
    assert str(caught.value) == (
        f"Round 4: {n} of {n} clients are left out ({named}: missed the deadline), more than the share of 0.5 that "
        "`Faults.on_late` allows; the server's weights are unchanged. Raise the `deadline` of `VirtualClock` or "
        "`RemoteClients`, or lower the keep ratio."
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5, spectral_start=None)], ids=["FedAvg", "spectral"]
)
@pytest.mark.parametrize("reason", POLICIES)
@pytest.mark.filterwarnings("ignore:Round .. client . is left out:lightning_spectral.SpectralWarning")
def test_a_round_without_survivors_changes_nothing_and_warns(
    reason: ExclusionReason, algorithm: Any, fit_with: FitWith
) -> None:
    module = LitFragile()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    everyone = set(range(NUM_CLIENTS))
    momentum = partial(torch.optim.Adam, lr=0.1, weight_decay=0.1)
    options = {"algorithm": algorithm, "server_optimizer": momentum, "faults": leave_out(reason, 1.0)}
    with pytest.warns(
        ls.SpectralWarning, match=rf"Round \d: no client is left to average \(6 {reason}\); the server's"
    ):
        fitted = fit_with(reason, everyone, module, callbacks=[ls.plugin.callbacks.UpdateAlignment(1)], **options)
    assert same_state(fitted.state, before)
    assert fitted.trainer.global_step == 2  # rounds are still counted
    assert [(row["fl/clients"], row["fl/clients_left_out"], row["fl/examples"]) for row in fitted.rows] == [
        (0.0, 6.0, 0.0)
    ] * 2
    assert not any(row.keys() & {"fl/loss", "seen", "plain"} for row in fitted.rows)
    assert not fitted.model.lasting.state_dict()["server optimizer"]["state"]


@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
def test_monitors_of_the_loss_wait_for_a_round_with_survivors(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    def once_away(lit: Any, batch: Any) -> None:
        if lit.current_epoch == 1:
            raise RuntimeError("nobody is there")

    def on_plateau(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "fl/loss"}

    lit = seeded(variant(lit_mlp, before_step=once_away, configure_optimizers=on_plateau))
    stop = EarlyStopping("fl/loss", patience=2, check_on_train_epoch_end=True)
    faults = ls.Faults(on_error=ls.LeaveOut(1.0))
    fitted = fit(lit, data, clients_per_round=12, max_epochs=4, callbacks=[stop], faults=faults)
    assert fitted.trainer.global_step == 4
    assert ["fl/loss" in row for row in fitted.rows] == [True, False, True, True]
    losses = fitted.history.column("fl/loss")
    assert losses == sorted(losses, reverse=True)
    assert fitted.history.column("fl/lr") == [0.1] * 4  # the loss falls: no plateau
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    fitted.history.plot("fl/loss", tmp_path / "loss.png")


def test_what_a_failing_client_left_behind_does_not_reach_the_next_round(fit_with: FitWith) -> None:
    """Five of six clients fail in every round; the oracle is a federation in which those five have no data."""
    with pytest.warns(ls.SpectralWarning, match="RuntimeError: the sensor is broken"):
        failing = fit_with("error", {1, 2, 3, 4, 5}, max_epochs=3, faults=leave_out("error", 1.0))
    absent = fit_with("no_data", {1, 2, 3, 4, 5}, max_epochs=3, faults=leave_out("no_data", 1.0))
    assert same_state(failing.state, absent.state)


def test_only_bytes_that_travelled_are_counted(fit_with: FitWith) -> None:
    whole = fit_with(None, set()).ledger.rows[0]
    for reason in REASONS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ls.SpectralWarning)
            rows = fit_with(reason, {BAD}, max_epochs=1, faults=leave_out(reason)).ledger.rows
        (row,) = [row for row in rows if row.client_id == BAD]
        assert row.downlink_bytes == (0 if reason == "no_data" else whole.downlink_bytes)
        assert row.uplink_bytes == (whole.uplink_bytes if reason == "not_finite" else 0)


def test_the_servers_own_failures_are_never_left_out(fit_with: FitWith) -> None:
    class CannotLoad(DenseSide):
        def load(self, client: Any, download: Any) -> None:
            raise RuntimeError("cannot load")

    class Broken(ls.FedAvg):
        side = CannotLoad

    with pytest.raises(ls.ClientError, match=r"Round 0, client ., loading: RuntimeError: cannot load"):
        fit_with(None, set(), algorithm=Broken(), faults=ls.Faults(on_error=ls.LeaveOut(1.0)))


def test_no_local_epochs_is_no_fault(fit_with: FitWith) -> None:
    assert [row["fl/clients"] for row in fit_with(None, set(), local_epochs=0).rows] == [6.0, 6.0]


def test_metrics_name_the_reasons_that_this_run_allows() -> None:
    faults = ls.Faults(on_error=ls.LeaveOut(), on_late=ls.server.Raise())
    clock = ls.VirtualClock(FAST, deadline=1.0, keep_first=1)
    assert ls.Faults().exclusion_reasons(Conditions()) == ("not_finite", "no_update")
    assert faults.exclusion_reasons(Conditions(ls.ClientDropout(0.1), clock)) == (
        *("error", "not_finite", "no_update"),
        *("dropped_out", "surplus"),
    )


def test_other_tolerance_may_resume_a_run_and_other_conditions_may_not() -> None:
    def configuration(**settings: Any) -> Any:
        return ls.FederatedModule(LitFragile(), clients_per_round=1, **settings).configuration()

    assert configuration() == configuration(faults=ls.Faults(on_error=ls.LeaveOut()))
    assert configuration() != configuration(dropout=ls.ClientDropout(0.1))
    clock = ls.VirtualClock(FAST, macs=lambda keep_ratio: 1.0)
    assert configuration() != configuration(clock=clock)
    assert " at 0x" not in str(configuration(clock=clock))


FAR, PER_CLIENT = 3, 4
LORA = {"layers": ["net.*"], "rank": 2, "alpha": 2.0, "train": ["net.5.bias"]}
PRODUCTS = [
    ls.SpectralSharding(ls.Collective(), keep_ratio=0.5, aggregation=ls.algorithms.MatrixMeans()),
    ls.LoRA(**LORA, aggregation=ls.StackedProducts()),
]


class LitFar(LitMLP):
    """Ends up far away at a client whose labels are all 2."""

    def __init__(self, far: float = 1e8) -> None:
        super().__init__(dropout=0.0)
        self.far = far

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if bool((batch[1] == 2).all()):
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(self.far)


@pytest.fixture
def few() -> ls.FederatedDataModule:
    x = torch.randn(NUM_CLIENTS * PER_CLIENT, 6, generator=torch.Generator().manual_seed(0))
    clients = torch.arange(NUM_CLIENTS).repeat_interleave(PER_CLIENT)
    labels = torch.where(clients == FAR, 2, torch.arange(len(x)) % 2)
    return ls.FederatedDataModule(TensorDataset(x, labels), ls.NaturalPartitioner(clients.tolist()), batch_size=2)


LitFarInSmallSteps = variant(LitFar, configure_optimizers=plain_sgd(1e-3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "lit", "far", "largest"),
    [
        *((algorithm, LitFar, 1e8, r"[36]e\+16") for algorithm in PRODUCTS),
        (ls.Scaffold(), LitFarInSmallSteps, 1e10, r"5e\+12"),  # divided by two steps and the learning rate
        (ls.StaleUpdates(), LitFarInSmallSteps, 6e11, r"1e\+12"),  # the difference of two of them
        (ls.StaleUpdates(num_terms=1), LitFarInSmallSteps, 6e11, r"1e\+12"),
    ],
    ids=repr,
)
def test_a_client_whose_product_control_or_stale_update_is_too_large_is_left_out_without_a_trace(
    algorithm: Any, lit: Any, far: float, largest: str, few: Any, fit: Fit
) -> None:
    """The oracle is a client that drops out: the others' average is the same, also of what is trained whole."""
    drops = ls.ClientDropout([float(client == FAR) for client in range(NUM_CLIENTS)])
    options = {"algorithm": algorithm, "clients_per_round": NUM_CLIENTS, "max_epochs": 3}
    dropped = fit(seeded(lit, far), few, dropout=drops, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ls.SpectralWarning)
        fitted = fit(seeded(lit, far), few, **options)
    told = rf"Round [012]: client {FAR} is left out .* \(its contribution to the sums holds values up to {largest}\)"
    assert len(said) == 3
    assert all(re.match(told, str(warning.message)) for warning in said)
    assert same_state(fitted.tensors, dropped.tensors)
    assert [row["fl/left_out_not_finite"] for row in fitted.rows] == [1.0] * 3
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS - 1


@pytest.mark.parametrize("algorithm", PRODUCTS, ids=repr)
def test_a_round_ends_where_faults_end_it(algorithm: Any, few: Any, fit: Fit) -> None:
    faults = ls.Faults(on_not_finite=ls.server.Raise())
    with pytest.raises(ls.ClientError, match=rf"Round 0, client {FAR}: .* \(its contribution to the sums holds"):
        fit(seeded(LitFar), few, algorithm=algorithm, clients_per_round=NUM_CLIENTS, faults=faults)


@pytest.mark.parametrize(
    "algorithm",
    [
        ls.SpectralSharding(keep_ratio=0.5, aggregation=ls.algorithms.TermMeans()),
        ls.LoRA(**LORA, aggregation=ls.TruncatedProducts()),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Round 0. the clients' mean update:lightning_spectral.SpectralWarning")
def test_aggregations_that_sum_factors_average_the_same_client(algorithm: Any, few: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitFar), few, algorithm=algorithm, clients_per_round=NUM_CLIENTS)
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS


@pytest.mark.filterwarnings("ignore:Round 0. the clients' mean update:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_products_are_multiplied_out_where_the_bound_is_not_sure(factor: float, few: Any, fit: Fit) -> None:
    """Twice the bound exceeds the limit in both cases, the product itself only in the second."""
    far = (factor * LARGEST / 12) ** 0.5  # twelve inputs or outputs, all terms: products are sums of twelve
    algorithm = ls.SpectralSharding.published(ls.TopN(), keep_ratio=1.0, aggregation=ls.algorithms.MatrixMeans())
    options = {"algorithm": algorithm, "clients_per_round": NUM_CLIENTS}
    told = pytest.warns(ls.SpectralWarning, match="its contribution to the sums") if factor > 1 else nullcontext()
    with told:
        fitted = fit(seeded(LitFar, far), few, **options)
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS - (factor > 1)
