"""A client's own Trainer: the same as the plain loop where that is enough, and all of Lightning where it is not."""

import copy
import itertools
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import Alone
from lightning_spectral.protocol.records import Download
from lightning_spectral.protocol.work_unit import WorkUnit

MIXED = ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=1.2, frobenius_decay=0.01)
UNCLIPPED = replace(MIXED, clip_tau=float("inf"))  # Adam undoes the clip
DENSE = ls.FedAvg()


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, in which each client has its own Trainer."""
    return partial(fit, algorithm=MIXED, max_epochs=2, client_engine="trainer")


def with_both_engines(fit: Fit, module: pl.LightningModule, data: Any, **options: Any) -> list[Fitted]:
    """The same federation twice, from the same weights: clients train in the loop, then in Trainers."""
    return [fit(copy.deepcopy(module), data, client_engine=engine, **options) for engine in ("loop", "trainer")]


def assert_same_run(one: Fitted, two: Fitted) -> None:
    for name, value in one.state.items():
        assert torch.equal(value, two.state[name]), name
    assert one.rows == two.rows


class Unindexed(Dataset[Any]):
    """Data that does not lie in tensors as far as the loader can see."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class TestOrdinaryModules:
    @pytest.mark.parametrize("local_epochs", [1, 2])
    @pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
    def test_both_engines_end_with_the_same_bits(
        self, algorithm: Any, local_epochs: int, lit: Any, data: Any, fit: Fit
    ) -> None:
        lit.net.insert(1, nn.BatchNorm1d(12))
        algorithm.initialize(lit, Alone())  # here, so that only training changes them in the fit
        start = copy.deepcopy(lit)
        one, two = with_both_engines(fit, lit, data, algorithm=algorithm, local_epochs=local_epochs)
        assert_same_run(one, two)
        assert not torch.equal(start.net[3].weight, two.module.net[3].weight)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
    def test_in_every_precision(self, precision: Any, lit: Any, data: Any, fit: Fit) -> None:
        assert_same_run(*with_both_engines(fit, lit, data, trainer={"precision": precision}))

    def test_with_scaled_gradients(self, lit: Any, data: Any, fit: Fit) -> None:
        """A large scale overflows at first: steps are skipped, and no client starts from the scale of another."""
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**20, growth_interval=1))
        assert_same_run(*with_both_engines(fit, lit, data, trainer={"plugins": [plugin]}, local_epochs=2))
        assert plugin.scaler is not None
        assert plugin.scaler.get_scale() == 2.0**20

    def test_with_clients_that_fail_and_are_left_out(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if batch[0][0, 0] > 1.0:
                    raise FloatingPointError("too warm")
                return super().training_step(batch, batch_idx)

        faults = ls.Faults(on_error=ls.LeaveOut(1.0))
        with pytest.warns(ls.SpectralWarning, match=r"average: training failed \(FloatingPointError: too warm\)"):
            one, two = with_both_engines(fit, Lit(), data, faults=faults, max_epochs=3)
        assert_same_run(one, two)
        assert 0 < sum(two.history.column("fl/left_out_error")) < 12

    @pytest.mark.parametrize("hook", [ls.ProximalTerm(5.0), ls.GradientClip(0.1)], ids=["proximal", "clip"])
    def test_with_local_hooks(self, hook: Any, lit: Any, data: Any, fit: Fit) -> None:
        start = copy.deepcopy(lit)
        one, two = with_both_engines(fit, lit, data, local_hooks=[hook])
        assert_same_run(one, two)
        without = fit(start, data)
        assert not torch.equal(without.module.net[0].weight, two.module.net[0].weight)

    def test_with_weight_decay_apart_from_gradients(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

        with pytest.warns(ls.SpectralWarning, match="weight_decay"):
            assert_same_run(*with_both_engines(fit, Lit(), data, algorithm=UNCLIPPED))

    def test_with_data_from_a_loader(self, lit: Any, data: Any, toy: Any, fit: Fit) -> None:
        unindexed = ls.FederatedDataModule(
            Unindexed(toy), data.partitioner, val=toy, batch_size=4, labels=toy.tensors[1]
        )
        assert_same_run(*with_both_engines(fit, lit, unindexed))

    def test_with_steps_that_are_skipped_and_epochs_that_end_early(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
                return -1 if batch_idx == 2 else None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                return None if batch_idx == 1 else {"loss": loss, "more": 1}

        data.val = None
        with pytest.warns(UserWarning, match="`training_step` returned `None`"):
            assert_same_run(*with_both_engines(fit, Lit(), data, local_epochs=2))

    @pytest.mark.filterwarnings("ignore:You have overridden `on_")  # the Trainer of the rounds, as of any module
    def test_hooks_run_in_the_same_order(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        calls: list[str] = []

        def spy(name: str) -> Any:
            def hook(self: Any, *args: Any) -> Any:
                assert self is not server
                calls.append(name)
                return args[0] if name.endswith("transfer") else None

            return hook

        names = [
            *("on_train_epoch_start", "on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start"),
            *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
            *("on_train_batch_end", "on_train_epoch_end"),
        ]
        data.val, data.batch_size = None, 100
        server = type("LitSpied", (lit_mlp,), {name: spy(name) for name in names})()
        fit(server, data, max_epochs=1, algorithm=DENSE, clients_per_round=2, local_epochs=2)
        assert calls == 4 * names

    def test_a_client_that_trains_nothing(self, lit: Any, data: Any, fit: Fit) -> None:
        before = copy.deepcopy(lit.state_dict())
        unchanged = replace(MIXED, spectral_start=None)
        fitted = fit(lit, data, algorithm=unchanged, max_epochs=1, local_epochs=0)
        assert same_state(fitted.state, before)
        assert str(fitted.history.column("fl/loss")) == "[nan]"


class LitHalves(pl.LightningModule):
    """One loss, two optimizers that each step one half of the network: together they are one optimizer over all."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            front, back = self.optimizers()
            front.zero_grad()
            back.zero_grad()
            self.manual_backward(loss)
            front.step()  # while the other half has gradients too: hooks of one must leave the other's alone
            back.step()
        return loss

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.3, "momentum": 0.9}
        if self.automatic_optimization:
            optimizer = torch.optim.SGD(self.parameters(), **options)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]
        halves = (torch.optim.SGD(half.parameters(), **options) for half in (self.net[:4], self.net[4:]))
        return [{"optimizer": half, "lr_scheduler": StepLR(half, 1, 0.5)} for half in halves]


class LitGAN(pl.LightningModule):
    """Two networks with opposite aims, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.make = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
            self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.make(x[:, :2])
        one, zero = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        bce = nn.functional.binary_cross_entropy_with_logits
        return bce(self.judge(made), one), bce(self.judge(x), one) + bce(self.judge(made.detach()), zero)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makers, judges = self.optimizers()
        for number, optimizer in enumerate((makers, judges)):
            self.toggle_optimizer(optimizer)
            loss = self.losses(batch[0])[number]
            self.log(["maker_loss", "judge_loss"][number], loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.make.parameters(), lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.1)


class TestManualOptimisation:
    @pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
    def test_two_optimizers_of_one_loss_are_one_optimizer(self, algorithm: Any, data: Any, fit: Fit) -> None:
        data.val = None
        settings: dict[str, Any] = {"algorithm": algorithm, "local_epochs": 2, "max_epochs": 3}
        plain = fit(LitHalves(manual=False), data, client_engine="loop", **settings)
        manual = fit(LitHalves(manual=True), data, **settings)
        assert_same_run(plain, manual)
        assert manual.history.column("fl/lr") == [0.3, 0.15, 0.075]

    def test_local_hooks_act_on_what_each_optimizer_steps(self, data: Any, fit: Fit) -> None:
        """The pull of a proximal term is the sum of those of its parts, so one optimizer shows what two must do."""
        data.val = None
        plain = fit(LitHalves(manual=False), data, client_engine="loop", local_hooks=[ls.ProximalTerm(2.0)])
        manual = fit(LitHalves(manual=True), data, local_hooks=[ls.ProximalTerm(2.0)])
        assert_same_run(plain, manual)
        without = fit(LitHalves(manual=True), data)
        assert not torch.equal(manual.module.net[6].weight, without.module.net[6].weight)

    def test_a_gan_of_one_client_is_a_loop_written_out(self, data: Any, toy: Any, fit: Fit) -> None:
        federation = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=30)
        module, twin = LitGAN(), LitGAN()
        history = fit(module, federation, algorithm=DENSE, clients_per_round=1, max_epochs=1, local_epochs=2).history
        own = federation.client_data(Download(WorkUnit(0), 1.0, {}))
        makers, judges = twin.configure_optimizers()
        last = []
        for batch, _ in itertools.chain(own.epoch(0), own.epoch(1)):
            for number, optimizer in enumerate((makers, judges)):
                twin.zero_grad()
                loss = twin.losses(batch[0])[number]
                loss.backward()
                optimizer.step()
                last.append(float(loss.detach()))
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)  # w - (w - w') rounds at the size of w
        assert history.column("judge_loss") == [pytest.approx(sum(last[1::2]) / 8, rel=1e-6)]
        assert str(history.column("fl/loss")) == "[nan]"  # its step returns none

    def test_a_gan_of_sub_models_trains_both_networks(self, data: Any, fit: Fit) -> None:
        data.val = None
        module = LitGAN()
        UNCLIPPED.initialize(module, Alone())
        start = copy.deepcopy(module)
        history = fit(module, data, max_epochs=3, algorithm=UNCLIPPED).history
        for name, value in module.named_parameters():
            assert not torch.equal(value, start.get_parameter(name)), name
        assert len(history.column("maker_loss")) == 3
        assert history.column("fl/clients") == [4.0] * 3

    def test_steps_are_those_of_all_optimizers(self, data: Any, fit: Fit) -> None:
        steps: list[int] = []

        class Note(ls.RoundCallback):
            def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
                steps.append(turn.upload.num_steps)

        data.val = None
        fit(LitGAN(), data, algorithm=DENSE, clients_per_round=3, max_epochs=1, callbacks=[Note()])
        assert steps == [6, 6, 6]  # three batches, two optimizers

    def test_resumed_run_equals_the_uninterrupted_one(self, data: Any, fit: Fit, tmp_path: Path) -> None:
        data.val = None
        settings: dict[str, Any] = {"algorithm": UNCLIPPED, "clients_per_round": 3}
        whole = fit(LitGAN(), data, max_epochs=3, **settings)
        first = fit(LitGAN(), data, max_epochs=1, **settings)
        first.trainer.save_checkpoint(tmp_path / "first.ckpt")
        resumed = fit(LitGAN(), data, max_epochs=3, ckpt_path=tmp_path / "first.ckpt", **settings)
        assert same_state(resumed.state, whole.state)
        assert not same_state(first.state, whole.state)

    def test_an_extra_round_beside_the_run_trains_the_same_way(self, data: Any, fit: Fit) -> None:
        class Listen(pl.Callback):
            def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
                cosines.append(float(trainer.callback_metrics["fl/fedavg_alignment"]))

        cosines: list[float] = []
        data.val = None
        watchers = [ls.UpdateAlignment(every_n_rounds=1), Listen()]
        fit(LitGAN(), data, algorithm=DENSE, clients_per_round=3, callbacks=watchers)
        assert cosines == [pytest.approx(1.0, abs=1e-6)] * 2  # what it compares with is what the run does

    def test_schedulers_can_be_read_and_are_stepped_by_the_server(self, data: Any, fit: Fit) -> None:
        class Lit(LitHalves):
            def on_train_epoch_end(self) -> None:
                for scheduler in self.lr_schedulers():
                    scheduler.step()
                    rates.append(scheduler.get_last_lr()[0])

        rates: list[float] = []
        data.val = None
        history = fit(Lit(manual=True), data, clients_per_round=2).history
        assert rates == [0.3] * 4 + [0.15] * 4
        assert history.column("fl/lr") == [0.3, 0.15]

    def test_the_loop_refuses_by_name_and_says_what_to_do(self) -> None:
        with pytest.raises(ValueError, match=r'manual optimisation.*or pass client_engine="trainer"'):
            ls.FederatedModule(LitGAN(), clients_per_round=2)

    def test_several_optimizers_need_manual_optimisation(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.net[:2], self.net[2:])]

        for engine in ("loop", "trainer"):
            with pytest.raises(ValueError, match=r'got 2 \(SGD, SGD\); several need manual.*client_engine="trainer"'):
                fit(Lit(), data, client_engine=engine)


class TestHooks:
    def test_refused_hooks_run_and_clipping_is_what_it_is_in_the_loop(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class InLoop(lit_mlp):  # type: ignore[misc]
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                # in the order in which the Trainer adds their norms up
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

        class InTrainer(lit_mlp):  # type: ignore[misc]
            def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
                self.clip_gradients(optimizer, 0.05, "norm")

            def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
                calls.append("optimizer_step")
                super().optimizer_step(epoch, batch_idx, optimizer, closure)

            def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
                calls.append("optimizer_zero_grad")
                optimizer.zero_grad()

            def backward(self, loss: Tensor) -> None:
                calls.append("backward")
                loss.backward()

        calls: list[str] = []
        torch.manual_seed(0)
        one = InLoop()
        two = InTrainer()
        two.load_state_dict(one.state_dict())
        assert_same_run(fit(one, data, client_engine="loop"), fit(two, data, client_engine="trainer"))
        assert calls[:3] == ["optimizer_step", "optimizer_zero_grad", "backward"]
        with pytest.raises(ValueError, match=r'`optimizer_step`: local steps are plain.*client_engine="trainer"'):
            ls.FederatedModule(two, clients_per_round=2)

    def test_hooks_of_the_run_run_once_on_the_server(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        calls: list[str] = []

        def spy(name: str) -> Any:
            def hook(self: Any, *args: Any) -> Any:
                assert self is server
                calls.append(name)
                return [] if name == "configure_callbacks" else None

            return hook

        names = ["configure_callbacks", "prepare_data", "setup", "on_fit_start", "on_train_start", "on_train_end"]
        names += ["on_fit_end", "teardown"]
        server = type("LitSpied", (lit_mlp,), {name: spy(name) for name in names})()
        fit(server, data)
        assert calls == names

    def test_what_no_engine_can_honour_is_still_refused(self, lit_mlp: Any) -> None:
        module = type("Lit", (lit_mlp,), {"configure_model": lambda self: None})()
        with pytest.raises(ValueError, match="`configure_model`"):
            ls.FederatedModule(module, clients_per_round=2, client_engine="trainer")
        with pytest.raises(ValueError, match="must be 'loop' or 'trainer', got 'Trainer'"):
            ls.FederatedModule(lit_mlp(), clients_per_round=2, client_engine="Trainer")  # type: ignore[arg-type]


class TestCounters:
    def test_every_client_counts_as_if_it_had_been_in_all_rounds(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        seen: list[tuple[int, int, int]] = []

        class Lit(lit_mlp):  # type: ignore[misc]
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                seen.append((self.current_epoch, self.global_step, self.trainer.max_epochs))

        data.val, data.batch_size = None, 5  # ten examples a client: two batches
        fit(Lit(), data, clients_per_round=2, local_epochs=3)
        of_round_0 = [(0, 0, 6), (0, 1, 6), (1, 2, 6), (1, 3, 6), (2, 4, 6), (2, 5, 6)]
        of_round_1 = [(epoch + 3, step, total) for epoch, step, total in of_round_0]
        assert seen == 2 * of_round_0 + 2 * of_round_1

    @pytest.mark.parametrize(("max_steps", "seen"), [(2, 4), (-1, -1)])
    def test_runs_that_end_by_steps_or_never(
        self, max_steps: int, seen: int, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        totals: list[int] = []

        class Lit(lit_mlp):  # type: ignore[misc]
            def on_train_epoch_start(self) -> None:
                totals.append(self.trainer.max_epochs)

        class Stop(ls.RoundCallback):
            def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
                trainer.should_stop = summary.round_idx == 1

        data.val = None
        options: dict[str, Any] = {"max_epochs": -1, "trainer": {"max_steps": max_steps}, "callbacks": [Stop()]}
        fit(Lit(), data, algorithm=DENSE, clients_per_round=2, local_epochs=2, **options)
        assert totals == [seen] * 8


class TestQuiet:
    def test_clients_write_no_line_and_no_file(
        self,
        lit: Any,
        data: Any,
        fit: Fit,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        watched = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
        levels = [logger.level for logger in watched]
        for logger in watched:
            logger.addHandler(handler)
        try:
            said = []
            for engine in ("loop", "trainer"):
                records.clear()
                fit(copy.deepcopy(lit), data, client_engine=engine)  # a spectral start is announced once for a module
                said.append(([record.getMessage() for record in records], capfd.readouterr()))
        finally:
            for logger in watched:
                logger.removeHandler(handler)
        assert said[0] == said[1]  # what the Trainer of the rounds says
        assert list(tmp_path.iterdir()) == []
        assert [logger.level for logger in watched] == levels

    def test_one_trainer_serves_all_clients_until_one_fails(self, lit_mlp: Any, data: Any, quiet: Any) -> None:
        trainers: list[pl.Trainer] = []

        class Lit(lit_mlp):  # type: ignore[misc]
            def on_train_epoch_start(self) -> None:
                assert self.trainer is not federation
                trainers.append(self.trainer)

        data.val = None
        federation = pl.Trainer(max_epochs=2, **quiet)
        federation.fit(ls.FederatedModule(Lit(), clients_per_round=3, client_engine="trainer"), data)
        assert len(trainers) == 6
        assert len({id(trainer) for trainer in trainers}) == 1

        class Failing(Lit):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise KeyError("no")

        federation = pl.Trainer(max_epochs=1, **quiet)
        model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer")
        with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: KeyError: 'no'"):
            federation.fit(model, data)

        trainers.clear()
        leaving_out = ls.Faults(on_error=ls.LeaveOut(1.0))
        model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer", faults=leaving_out)
        federation = pl.Trainer(max_epochs=1, **quiet)
        with pytest.warns(ls.SpectralWarning, match=r"left out|no client is left"):
            federation.fit(model, data)
        assert len({id(trainer) for trainer in trainers}) == 3  # one that failed is not used again

    def test_global_generators_stay_as_they_are(self, lit: Any, data: Any, fit: Fit) -> None:
        state = torch.get_rng_state()
        data.val = None
        fit(lit, data)
        assert torch.equal(torch.get_rng_state(), state)

    def test_evaluation_data_may_be_a_loader(self, lit: Any, data: Any, toy: Any, fit: Fit) -> None:
        data.val = DataLoader(toy, batch_size=60)
        assert len(fit(lit, data).history.column("val_acc")) == 2
