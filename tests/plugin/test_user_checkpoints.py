"""A checkpoint of a federation is a checkpoint of the user's own module: its keys, its hyper-parameters, its hooks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from toy_models import LitMLP, plain_sgd, variant

import lightning_spectral as ls

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")  # not all save again
ALGORITHMS = [ls.FedAvg(), ls.Scaffold(), ls.LoRA(2)]  # without state, and with buffers and parameters of their own


class Named(LitMLP):
    """Leaves its metric's weight out of what it saves, and notes what its hooks see."""

    def __init__(self, width: int = 12, momentum: float = 0.0) -> None:
        super().__init__(width=width, momentum=momentum)
        self.seen: list[Any] = []
        self.extra = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        found.pop(f"{options.get('prefix', '')}extra")
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, **options: Any) -> Any:
        self.seen.append(sorted(state_dict))
        return super().load_state_dict({**state_dict, "extra": self.extra}, strict, **options)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = [*sorted(checkpoint["state_dict"]), checkpoint["hyper_parameters"]["width"]]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(checkpoint["words"])


KEYS = sorted(Named().state_dict())


@pytest.fixture
def saved(data: Any, fit: Fit, tmp_path: Path) -> Callable[..., tuple[Fitted, Path]]:
    def saved(module: pl.LightningModule, **options: Any) -> tuple[Fitted, Path]:
        saver = ModelCheckpoint(tmp_path / "run", save_last=True, save_weights_only=options.pop("weights_only", False))
        options.setdefault("trainer", {})["enable_checkpointing"] = True
        fitted = fit(module, data, max_epochs=2, callbacks=[saver, *options.pop("callbacks", ())], **options)
        return fitted, tmp_path / "run" / "last.ckpt"

    return saved


def save_plain(module: pl.LightningModule, path: Path) -> None:
    """What Lightning saves of a module that is not federated."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_the_users_own_class_loads_it(algorithm: Any, strict: Any, weights_only: bool, saved: Any) -> None:
    fitted, path = saved(seeded(LitMLP, width=8, momentum=0.0), algorithm=algorithm, weights_only=weights_only)
    loaded = LitMLP.load_from_checkpoint(path, strict=strict)
    assert same_state(loaded.state_dict(), fitted.state)
    assert loaded.hparams == fitted.module.hparams


def test_all_that_a_federation_adds_is_in_entries_of_its_own(saved: Any, tmp_path: Path) -> None:
    fitted, path = saved(seeded(LitMLP, momentum=0.0), algorithm=ls.Scaffold())
    save_plain(fitted.module, tmp_path / "plain.ckpt")
    ours, theirs = (torch.load(one, weights_only=True) for one in (path, tmp_path / "plain.ckpt"))
    assert {name for name in ours.keys() - theirs.keys() if not name.startswith("federation")} == set()
    assert theirs.keys() <= ours.keys()
    for name in ("hyper_parameters", "hparams_name"):
        assert ours[name] == theirs[name]
    assert list(ours["state_dict"]) == list(theirs["state_dict"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_the_users_overrides_see_their_own_weights(algorithm: Any, saved: Any, data: Any, fit: Fit) -> None:
    fitted, path = saved(seeded(Named), algorithm=algorithm)
    assert Named.load_from_checkpoint(path).seen == [[*KEYS, 12], KEYS]
    built = {"module": Named(), "algorithm": algorithm, "clients_per_round": 4}
    loaded = ls.FederatedModule.load_from_checkpoint(path, **built)
    assert loaded.module.seen == [[*KEYS, 12], KEYS]
    assert same_state(Fitted(loaded, fitted.trainer, fitted.history, fitted.ledger).tensors, fitted.tensors)
    resumed = fit(seeded(Named), data, algorithm=algorithm, max_epochs=3, ckpt_path=path)
    assert resumed.module.seen == [[*KEYS, 12], KEYS]
    assert same_state(resumed.tensors, fit(seeded(Named), data, algorithm=algorithm, max_epochs=3).tensors)


def test_strict_loading_is_the_users(saved: Any, data: Any, quiet: Any) -> None:
    _, path = saved(seeded(LitMLP))

    wider = variant(LitMLP, lambda lit: lit.add_module("head", torch.nn.Linear(3, 3)))
    strict, loose = (ls.FederatedModule(wider(), clients_per_round=4) for _ in range(2))
    loose.module.strict_loading = False
    assert (strict.strict_loading, loose.strict_loading) == (True, False)
    validate = pl.Trainer(**quiet).validate
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "head.weight", "head.bias"'):
        validate(strict, data, ckpt_path=path, verbose=False)
    validate(loose, data, ckpt_path=path, verbose=False)


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_trainer_finds_its_own_checkpoints(which: str, saved: Any, data: Any) -> None:
    fitted, _ = saved(seeded(LitMLP))
    (scores,) = fitted.trainer.validate(fitted.model, data, ckpt_path=which, verbose=False)
    assert scores["val_acc"] == fitted.rows[-1]["val_acc"]
    fitted.trainer.test(fitted.model, data, ckpt_path=which, verbose=False)


def test_a_checkpoint_of_a_plain_run_can_be_evaluated(lit: Any, data: Any, quiet: Any, tmp_path: Path) -> None:
    save_plain(lit, tmp_path / "plain.ckpt")
    model = ls.FederatedModule(LitMLP(), clients_per_round=4)
    pl.Trainer(**quiet).validate(model, data, ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert same_state(model.module.state_dict(), lit.state_dict())


def test_state_of_another_algorithm_is_refused(saved: Any) -> None:
    _, path = saved(seeded(LitMLP, momentum=0.0), algorithm=ls.Scaffold())
    for algorithm in (ls.FedAvg(), ls.LoRA(2)):
        with pytest.raises(RuntimeError, match=r"state of another algorithm.*load_from_checkpoint\(path, algorithm=.*"):
            ls.FederatedModule.load_from_checkpoint(path, module=LitMLP(), algorithm=algorithm)


class Chooses(LitMLP):
    """Has a hyper-parameter that no checkpoint can hold."""

    def __init__(self, activation: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters({"activation": activation})


def test_hyper_parameters_that_cannot_be_pickled_are_left_out_with_lightnings_warning(saved: Any) -> None:
    with pytest.warns(UserWarning, match="Attribute 'activation' removed from hparams because it cannot be pickled"):
        fitted, path = saved(seeded(Chooses, activation=lambda x: x, width=8))
    assert fitted.model.hparams_initial["user_module"]["activation"].endswith("<lambda>")  # what loggers show
    assert "activation" not in torch.load(path, weights_only=True)["hyper_parameters"]
    assert same_state(Chooses.load_from_checkpoint(path).state_dict(), fitted.state)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_parameters_and_buffers_have_the_users_names(algorithm: Any) -> None:
    module = LitMLP(momentum=0.0)
    module.net.insert(1, torch.nn.BatchNorm1d(12))
    model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=4)
    for prefix in ("", "own"):
        assert [*model.named_parameters(prefix)] == [*module.named_parameters(prefix)]
        assert [*model.named_buffers(prefix)] == [*module.named_buffers(prefix)]
    assert all(map(torch.is_tensor, [*model.parameters(), *model.buffers()]))
    assert len([*model.parameters()]) == len([*module.parameters()])
    several = ls.MultiModelModule({"words": ls.FederatedModule(LitMLP())}, participation=ls.Uniform(active=3))
    assert {name for name, _ in several.named_parameters()} <= set(several.state_dict())


def test_a_callback_that_freezes_by_name_freezes(data: Any, fit: Fit) -> None:
    class Freezes(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(not name.startswith("net.0."))

    trainable = variant(LitMLP, configure_optimizers=plain_sgd())
    before = seeded(trainable).state_dict()
    after = fit(seeded(trainable), data, callbacks=[Freezes()]).state
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("net.") and not name.startswith("net.0.")}


class Remembers(pl.Callback):
    """A callback whose state may hold what cannot be saved."""

    def __init__(self, state: Any) -> None:
        self.state, self.rounds = state, 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": [1, self.state]}

    def on_train_epoch_start(self, *args: Any) -> None:
        self.rounds += 1


Adds = variant(
    LitMLP, on_save_checkpoint=lambda self, checkpoint: checkpoint.update(words={"split": lambda text: text.split()})
)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (
            LitMLP,
            (i for i in ()),
            r"\['callbacks'\]\['Remembers'\]\['steps'\]\[1\] .* generator; .*callback's `state_dict`",
        ),
        (Adds, 0, r"\['words'\]\['split'\] cannot be pickled, got function; leave it out of what `on_save_checkpoint`"),
    ],
)
def test_what_cannot_be_saved_is_named_before_the_first_round(make: Any, state: Any, message: str, saved: Any) -> None:
    callback = Remembers(state)
    with pytest.raises(ValueError, match=rf"^The run could not save a checkpoint: checkpoint{message}"):
        saved(seeded(make), callbacks=[callback])
    assert callback.rounds == 0


def test_a_run_that_saves_nothing_may_hold_anything(data: Any, fit: Fit) -> None:
    assert fit(seeded(Adds), data, callbacks=[Remembers(print)]).trainer.global_step == 1


class MakesOptimizer:
    """As jsonargparse's functions do, it cannot be pickled once it was called."""

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        self.called_with = parameters
        return torch.optim.SGD(list(parameters), lr=0.1)


class WithMaker(LitMLP):
    def __init__(self, optimizer: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters({"optimizer": optimizer, "width": 12})
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def test_a_hyper_parameter_that_fitting_makes_unpicklable_is_left_out_of_checkpoints(saved: Any) -> None:
    with pytest.warns(UserWarning, match="Attribute 'optimizer' removed from hparams because it cannot be pickled"):
        _, path = saved(seeded(WithMaker, optimizer=MakesOptimizer()))
    kept = torch.load(path, weights_only=True)["hyper_parameters"]
    assert kept["width"] == 12
    assert "optimizer" not in kept
