"""Teachers, target networks and averages of weights, which a user's hooks update on clients."""

import copy
from typing import Any

import pytest
import torch
from federation import Fit, said_during, seeded
from observed_runs import acting
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy_models import variant

import lightning_spectral as ls

ALGORITHMS = [
    *(ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5), ls.FIARSE(keep_ratio=0.5), ls.Zampling(2), ls.StaleUpdates())
]


def with_teacher(lit_mlp: Any, **attributes: Any) -> Any:
    """A module whose teacher follows the student, layer by layer."""

    @torch.no_grad()
    def follow(self: Any, *args: Any) -> None:
        for own, of in zip(self.teacher, self.net, strict=True):
            if isinstance(own, nn.Linear):
                own.weight.data = 0.5 * own.weight.data + 0.5 * of.weight.detach()
                own.bias.lerp_(of.bias, 0.5)

    def prepare(lit: Any) -> None:
        lit.teacher = copy.deepcopy(lit.net).requires_grad_(False)

    members = {"example_input_array": torch.zeros(2, 6), "on_train_batch_end": follow, **attributes}
    return seeded(variant(lit_mlp, prepare, **members), momentum=0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_changes_of_a_teacher_that_are_lost_are_named_once(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_teacher(lit_mlp)
    start = copy.deepcopy(module.teacher.state_dict())
    said = said_during(lambda: fit(module, data, algorithm=algorithm))
    (warning,) = [text for text in said if "without an optimizer" in text]
    assert warning.startswith("Round 0: clients change teacher.0.bias, teacher.0.weight, teacher.2.bias and 3 more")
    assert all(torch.equal(value, start[name]) for name, value in module.teacher.state_dict().items())


def test_a_teacher_that_nobody_updates_is_not_mentioned(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_teacher(lit_mlp, on_train_batch_end=lambda *args: None)
    assert not any("optimizer" in text for text in said_during(lambda: fit(module, data, algorithm=ls.FedAvg())))


def test_an_average_of_weights_that_needs_gradients_is_named(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def prepare(lit: Any) -> None:
        lit.ema = AveragedModel(lit.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    kind = variant(
        lit_mlp,
        prepare,
        on_train_batch_end=lambda self, *args: self.ema.update_parameters(self.net),
        configure_optimizers=lambda self: torch.optim.SGD(self.net.parameters(), lr=0.1),
    )
    with pytest.warns(ls.SpectralWarning, match=r"clients change ema\.") as said:
        fit(kind(), data, algorithm=ls.FedAvg(), max_epochs=1)
    counter, average = (str(each.message) for each in said if each.category is ls.SpectralWarning)
    assert "buffers={'ema.n_averaged': 'max'}" in counter
    assert "clients change ema.module.0.bias" in average
    assert "averaged_parameters" in average


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, ls.Scaffold()])
def test_a_teacher_that_is_named_is_averaged(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_teacher(lit_mlp, averaged_parameters=["teacher.*"])
    start = copy.deepcopy(module.teacher.state_dict())
    said = said_during(lambda: fit(module, data, algorithm=algorithm))
    assert not any("without an optimizer" in text for text in said)
    assert not any(torch.equal(value, start[name]) for name, value in module.teacher.state_dict().items())


def test_a_teacher_is_the_clients_mean(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[torch.Tensor] = []
    spy = acting(
        on_client_end=lambda trainer, model, turn: seen.append(turn.upload.tensors["teacher.2.weight"].clone())
    )
    module = with_teacher(lit_mlp, averaged_parameters=["teacher.*"])
    fit(module, data, algorithm=ls.FedAvg(), max_epochs=1, callbacks=[spy])
    assert len(seen) == 3
    torch.testing.assert_close(module.teacher[2].weight, torch.stack(seen).mean(0), rtol=1e-5, atol=1e-6)


def test_a_teacher_may_be_updated_at_the_server(lit_mlp: Any, data: Any, fit: Fit) -> None:
    follow = acting(
        on_round_end=lambda trainer, model, summary: model.module.teacher.load_state_dict(model.module.net.state_dict())
    )
    module = with_teacher(lit_mlp, on_train_batch_end=lambda *args: None)
    fit(module, data, algorithm=ls.SpectralSharding(keep_ratio=0.5), callbacks=[follow])
    assert torch.equal(module.teacher[2].weight, module.net[2].weight)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["tutor.*"], r"`averaged_parameters`: 'tutor\.\*' matches no parameter"),
        (["net.*"], r"`averaged_parameters`: 'net\.\*' matches parameters that need a gradient"),
        ("teacher.*", "averaged_parameters"),
    ],
)
def test_patterns_that_name_no_teacher_are_refused(
    patterns: Any, message: str, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit(with_teacher(lit_mlp, averaged_parameters=patterns), data)


def by_parameters(module: Any, *args: Any) -> None:
    for own, of in zip(module.teacher.parameters(), module.net.parameters(), strict=False):
        own.data.mul_(0.5).add_(of.data, alpha=0.5)


def by_state(module: Any, *args: Any) -> None:
    module.teacher.load_state_dict(module.net.state_dict())


@pytest.mark.parametrize("update", [by_parameters, by_state])
@pytest.mark.parametrize("algorithm", [ls.SpectralSharding(keep_ratio=0.5), ls.WidthSharding(keep_ratio=0.5)])
def test_a_teacher_that_does_not_fit_smaller_layers_is_explained(
    algorithm: Any, update: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    module = with_teacher(lit_mlp, on_train_batch_end=update)
    with pytest.raises(
        ls.ClientError, match=r"(?s)Round 0, client \d+, local training.*a teacher, a target network.*exclude"
    ):
        fit(module, data, algorithm=algorithm)


def test_an_error_of_the_users_own_shapes_has_no_such_advice(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_teacher(lit_mlp, on_train_batch_end=lambda *args: torch.zeros(3) + torch.zeros(2))
    with pytest.raises(ls.ClientError) as error:
        fit(module, data, algorithm=ls.FedAvg())
    assert "teacher" not in str(error.value)
