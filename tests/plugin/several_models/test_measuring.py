"""Losses and norms measured before a round for the samplers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from linear_models import SIZES, WIDTHS, LitLine, two_lines, update

import lightning_spectral as ls
from lightning_spectral.plugin.checks.sampler import check_measurable


def test_losses_are_measured_of_everybody_and_paid_for(run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    _, history, ledger = run(model, data)

    assert model.federation.cohorts.sampled is not None
    for index, (name, module) in enumerate(before.items()):
        tensors: Any = data.modules[name].train
        able = [client for client, size in enumerate(SIZES[name]) if size]
        examples = {i: [tensor[data.modules[name].partition[i]] for tensor in tensors.tensors] for i in able}
        measured = [row for row in ledger.rows if row.measured and row.model == name]
        assert [row.client_id for row in measured] == able
        assert {(row.downlink_bytes, row.uplink_bytes) for row in measured} == {(4 * (WIDTHS[name] + 1), 4)}
        assert history.rows[0][f"{name}/fl/measured_examples"] == sum(SIZES[name])
        trained = {unit.client_id for unit in model.cohort(0) if unit.model == name}
        for client in set(able) - trained:  # clients that trained have reported a later loss
            loss = float(module.training_step(examples[client], 0).detach())
            assert float(model.federation.cohorts.sampled.figures[client, index]) == pytest.approx(loss, rel=1e-6)


def test_norms_are_those_of_the_updates(run: Any) -> None:
    model, data = two_lines(ls.UpdateVarianceReduced(active=3))
    before = {name: copy.deepcopy(member.module) for name, member in model.members.items()}
    run(model, data)
    assert model.federation.cohorts.sampled is not None
    for index, (name, module) in enumerate(before.items()):
        for client, size in enumerate(SIZES[name]):
            known = float(model.federation.cohorts.sampled.figures[client, index])
            if size:
                assert known == pytest.approx(float(update(module, data.modules[name], client).norm()), rel=1e-5)
            else:
                assert known != known  # NaN: a client without data is not asked


@pytest.mark.parametrize(("measure", "expected"), [("last", 0), (2, 2)])
def test_fewer_may_be_measured(measure: Any, expected: int, run: Any) -> None:
    model, data = two_lines(ls.LossVarianceReduced(active=3, measure=measure))
    _, history, _ = run(model, data, 3)
    assert [row.get("words/fl/measured_clients", 0) for row in history.rows] == [expected] * 3


def test_losses_of_manual_optimisation_are_not_measured() -> None:
    module = LitLine()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"LitLine.training_step \('words'\) uses manual optimisation and would train"):
        check_measurable(ls.LossVarianceReduced(active=2), {"words": module})
