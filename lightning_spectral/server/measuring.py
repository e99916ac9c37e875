"""Measures losses or update norms before a round, for samplers that use them, and discards the updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_spectral.errors import ClientError
from lightning_spectral.protocol.records import ClientOutcome, Download, Receipt, Upload, WorkUnit
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.round import OpenRound, client_error
from lightning_spectral.server.turn import downloads_sent, uploads_of

NUMBER = 4  # bytes of the one number that a client uploads


def measure_figures(engine: Engine, round_idx: int, units: Sequence[WorkUnit]) -> list[ClientOutcome]:
    """Measure the loss or update norm of some clients at the server's current weights, without changing the server.

    For losses, a client evaluates ``training_step`` once on each of its batches, without gradients, which takes a third
    of the multiplications of an epoch. For update norms, it trains as it would in the round and obtains the same
    update, so a client that is drawn afterwards trains twice. It is sent its sub-model and sends one number back.

    Args:
        engine: Runs the model's rounds.
        round_idx: The round that is about to begin.
        units: The units to measure.

    Returns:
        One outcome per unit, the same in all processes; those of failed clients are marked as left out.

    Raises:
        ClientError: If training fails and `Faults.on_error` says `Raise`.
    """
    processes = engine.run.processes
    executor = engine.measuring_executor
    opened = OpenRound(engine.run, executor, round_idx, units)

    def measure() -> list[ClientOutcome]:
        executor.begin_round()
        try:
            return list(_measured(opened, units[processes.rank :: processes.size]))
        finally:
            executor.end_round()

    gathered = processes.gather_results(measure, ClientError)
    by_client = {outcome.client_id: outcome for part in gathered for outcome in part}
    engine.run.frozen_base.note_outcomes(by_client.values())
    return [by_client[unit.client_id] for unit in units]


def _measured(opened: OpenRound, units: Sequence[WorkUnit]) -> Iterator[ClientOutcome]:
    sent: dict[tuple[int, str], tuple[Download, Receipt]] = {}

    def downloads() -> Iterator[Download]:
        for unit in units:
            sent[unit.key] = opened.send(unit)
            yield sent[unit.key][0]

    for upload in uploads_of(opened.executor, downloads()):
        unit = upload.unit
        if upload.failure is not None and opened.run.faults.ends_run("error"):
            raise client_error(opened.round_idx, unit, "measuring", upload.failure.message) from upload.failure.cause
        yield _outcome(opened, upload, *sent.pop(unit.key))


def _outcome(opened: OpenRound, upload: Upload, download: Download, receipt: Receipt) -> ClientOutcome:
    sent = downloads_sent(download, upload)
    return ClientOutcome(
        round_idx=opened.round_idx,
        unit=upload.unit,
        keep_ratio=receipt.capacity,
        num_examples=opened.num_examples[upload.unit.key],
        num_steps=upload.num_steps,
        loss=upload.loss,
        downlink_bytes=sum(one.num_bytes for one in sent),
        frozen_bytes=sum(one.frozen_bytes for one in sent),
        uplink_bytes=NUMBER,
        left_out="error" if upload.failure is not None else None,
        update_norm=opened.update_norm(receipt, download, upload),
        missing=upload.missing,
    )
