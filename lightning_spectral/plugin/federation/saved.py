"""What a checkpoint holds of a federation besides weights and what Lightning saves."""

from __future__ import annotations

from typing import Any

from lightning_spectral.plugin.federation.federation import Federation

Checkpoint = dict[str, Any]


def write_federation(federation: Federation, checkpoint: Checkpoint) -> None:
    """Write what lasts between rounds; an entry without content is left out."""
    members = federation.members
    reached = {name: member.first_rounds.unreached for name, member in members.items()}
    sampled = federation.cohorts.sampled
    entries = {
        "federation_clients": {k: entry for m in members.values() for k, entry in m.store.state_dict().items()},
        "federation_frozen": {name: found for name, m in members.items() if (found := m.frozen_base.state_dict())},
        "federation_unreached": {name: names for name, names in reached.items() if names is not None},
        "federation_decisions": {name: dict(m.decisions) for name, m in members.items() if m.decisions},
        "federation_sampler": {} if sampled is None else sampled.state_dict(),
    }
    checkpoint.update({name: entry for name, entry in entries.items() if entry})
    checkpoint["federation_schedules"] = {name: m.schedules.state_dict() for name, m in members.items()}


def read_federation(federation: Federation, checkpoint: Checkpoint) -> None:
    """Restore all that `write_federation` wrote, except schedules, which exist only once optimizers do."""
    clients, frozen = checkpoint.get("federation_clients", {}), checkpoint.get("federation_frozen", {})
    unreached, decisions = checkpoint.get("federation_unreached", {}), checkpoint.get("federation_decisions", {})
    for name, member in federation.members.items():
        member.restore(clients, frozen.get(name, {}), unreached.get(name), decisions.get(name, {}))
    if federation.cohorts.sampled is not None:
        federation.cohorts.sampled.load_state_dict(checkpoint.get("federation_sampler", {}))
