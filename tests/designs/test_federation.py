"""Every design trains in a federation of two rounds."""

import math

import pytest

import lightning_spectral as ls


@pytest.mark.parametrize(
    "design",
    [
        ls.ConditionalPoisson(),
        ls.SuccessiveSampling(),
        ls.Brewer(),
        ls.MinimumSupport(),
        ls.Systematic(),
        ls.designs.RandomSystematic(),
    ],
    ids=repr,
)
def test_every_design_trains_for_two_rounds(design, lit, data, fit):
    before = [parameter.detach().clone() for parameter in lit.parameters()]
    algorithm = ls.SpectralSharding(ls.Collective(), keep_ratio=0.4, design=design)
    history = fit(lit, data, algorithm=algorithm, clients_per_round=3, max_epochs=2).history
    assert len(history.rows) == 2
    assert all(math.isfinite(value) for value in history.column("train_loss"))
    assert any(not before_.equal(after) for before_, after in zip(before, lit.parameters(), strict=True))
