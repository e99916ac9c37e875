import functools
import math
import operator
import random

import pytest

from lightning_spectral.protocol.records import ClientOutcome, LoggedValue, RoundSummary, WorkUnit
from lightning_spectral.server.metrics import round_means, round_metrics


def outcome(client_id: int, size: int, loss: float, logged: dict[str, float]) -> ClientOutcome:
    entries = {name: LoggedValue(value, prog_bar=True, logger=False) for name, value in logged.items()}
    return ClientOutcome(0, WorkUnit(client_id, coefficient=size), 1.0, size, 1, loss, 8, 8, logged=entries)


def test_what_clients_logged_is_weighted_by_their_examples() -> None:
    means = round_means([outcome(0, 4, 0.0, {"loss": 2.0}), outcome(1, 6, 0.0, {"loss": 7.0, "rare": 3.0})])
    assert means["loss"] == LoggedValue(pytest.approx((4 * 2.0 + 6 * 7.0) / 10), prog_bar=True, logger=False)
    assert means["rare"].value == 3.0


def test_means_of_a_round_do_not_depend_on_the_order_of_its_clients() -> None:
    generator = random.Random(0)
    clients = [outcome(i, 1 + i, generator.gauss(0, 10.0 ** (i % 9)), {}) for i in range(20)]
    losses = set()
    plain = set()
    for _ in range(20):
        generator.shuffle(clients)
        losses.add(round_metrics(RoundSummary(0, tuple(clients), {}, {}, {}))["fl/loss"])
        plain.add(functools.reduce(operator.add, (client.loss * client.num_examples for client in clients)))
    assert len(losses) == 1
    assert len(plain) > 1  # or the test would show nothing


@pytest.mark.parametrize(("values", "expected"), [([math.inf, 1.0], math.inf), ([math.inf, -math.inf], math.nan)])
def test_infinite_values_are_averaged_as_floats_do(values: list[float], expected: float) -> None:
    mean = round_means([outcome(i, 1, 0.0, {"x": value}) for i, value in enumerate(values)])["x"].value
    assert mean == expected or (math.isnan(mean) and math.isnan(expected))
