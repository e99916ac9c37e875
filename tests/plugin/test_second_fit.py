"""A second fit of the same federation: what lasts goes on for the same clients and parameters, and for no others."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import same_state
from torch import Tensor, nn
from toy_models import LitNet, toy_examples

import lightning_spectral as ls
from lightning_spectral.errors import SpectralWarning

SIZES = (12, 10, 8, 8, 6)
OWNERS = [client for client, size in enumerate(SIZES) for _ in range(size)]
COHORT = {"clients_per_round": 4, "seed": 2}


def net() -> LitNet:
    torch.manual_seed(0)
    return LitNet(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))


def hospital(seed: int) -> Any:
    """Clients of the same sizes as those of any other hospital, with examples of their own."""
    return ls.FederatedDataModule(toy_examples(len(OWNERS), seed), ls.NaturalPartitioner(OWNERS), batch_size=4)


KINDS: dict[str, dict[str, Any]] = {
    "personal": {"filters": [ls.Personal(["net.4.*"])]},
    "packed": {"filters": [ls.TopK(0.1)]},
    "Scaffold": {"algorithm": ls.Scaffold()},
    "FedDyn": {"algorithm": ls.FedDyn(0.1)},
    "Ditto": {"algorithm": ls.Ditto()},
    "StaleUpdates": {"algorithm": ls.StaleUpdates()},
}


def train(model: Any, data: Any, quiet: Any, rounds: int = 2) -> dict[str, Tensor]:
    pl.Trainer(**quiet, max_epochs=rounds).fit(model, data)
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def own_models(model: Any) -> list[dict[str, Tensor]]:
    return [dict(model.own_model(client)) for client in range(len(SIZES))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_other_clients_get_nothing_of_those_before_and_the_user_is_told(kind: str, quiet: Any) -> None:
    model = ls.FederatedModule(net(), **COHORT, **KINDS[kind])
    train(model, hospital(1), quiet)
    fresh = ls.FederatedModule(copy.deepcopy(model.module), **COHORT, **KINDS[kind])
    with pytest.warns(SpectralWarning, match="This fit has other clients than the one before, so what was kept of"):
        found = train(model, hospital(2), quiet)
    assert same_state(found, train(fresh, hospital(2), quiet))
    assert all(map(same_state, own_models(model), own_models(fresh)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_clients_go_on_without_a_word(kind: str, quiet: Any) -> None:
    """Their devices' states are used: a federation that forgets them ends elsewhere."""
    model, data = ls.FederatedModule(net(), **COHORT, **KINDS[kind]), hospital(1)
    train(model, data, quiet)
    forgetful = ls.FederatedModule(copy.deepcopy(model.module), **COHORT, **KINDS[kind])
    found = [train(model, hospital(1), quiet), *own_models(model)]  # other objects with the same examples
    assert not all(map(same_state, found, [train(forgetful, data, quiet), *own_models(forgetful)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", ["another head", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_of_parameters_that_are_others(kind: str, change: str, quiet: Any) -> None:
    def changed(lit: Any) -> Any:
        if change == "frozen":
            lit.net[0].requires_grad_(False)
        else:
            torch.manual_seed(5)
            lit.net[4] = nn.Linear(8, 4)
        return lit

    model, data = ls.FederatedModule(net(), **COHORT, **KINDS[kind]), hospital(1)
    train(model, data, quiet)
    changed(model.module)
    fresh = ls.FederatedModule(copy.deepcopy(model.module), **COHORT, **KINDS[kind])
    with pytest.warns(SpectralWarning, match=r"other parameters \(net\.[04]\.(weight|bias)"):
        found = train(model, data, quiet)
    assert same_state(found, train(fresh, data, quiet))


def test_unfreezing_in_stages_trains_what_is_unfrozen(quiet: Any) -> None:
    lit = net()
    lit.net[0].requires_grad_(False)
    model, data = ls.FederatedModule(lit, algorithm=ls.StaleUpdates(), **COHORT), hospital(1)
    before = train(model, data, quiet)
    lit.net[0].requires_grad_(True)
    with pytest.warns(SpectralWarning, match="their stored updates"):
        after = train(model, data, quiet)
    assert not torch.equal(before["net.0.weight"], after["net.0.weight"])


def test_a_federation_that_keeps_nothing_changes_hospitals_without_a_word(quiet: Any) -> None:
    model = ls.FederatedModule(net(), **COHORT)
    train(model, hospital(1), quiet)
    before = train(model, hospital(2), quiet)  # warnings are errors
    assert not same_state(before, train(model, hospital(3), quiet))


def test_a_checkpoint_that_is_only_loaded_belongs_to_its_clients(quiet: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {**COHORT, "filters": [ls.Personal(["net.4.*"])]}
    model, path = ls.FederatedModule(net(), **options), tmp_path / "two.ckpt"
    trainer = pl.Trainer(**quiet, max_epochs=2)
    trainer.fit(model, hospital(1))
    trainer.save_checkpoint(path)
    same_clients, others = (ls.FederatedModule.load_from_checkpoint(path, module=net(), **options) for _ in range(2))
    assert all(map(same_state, own_models(same_clients), own_models(model)))
    train(same_clients, hospital(1), quiet)  # warnings are errors
    dealt_anew = ls.FederatedDataModule(hospital(1).train, ls.IIDPartitioner(5), batch_size=4)
    with pytest.warns(SpectralWarning, match="other clients"):
        train(others, dealt_anew, quiet)


def test_the_model_of_a_client_that_is_not_there_is_an_error(quiet: Any) -> None:
    model = ls.FederatedModule(net(), **COHORT, filters=[ls.Personal(["net.4.*"])])
    train(model, hospital(1), quiet)
    with pytest.raises(ValueError, match="There is no client 5; the last fit had 5, numbered from 0"):
        model.own_model(5)
    with pytest.raises(ValueError, match="`client_id` must be at least 0, got -1"):
        model.own_model(-1)
    with pytest.raises(TypeError, match="`client_id` must be a whole number, got 'a'"):
        model.own_model("a")
