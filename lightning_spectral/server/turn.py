"""Turns: what happens to one unit in a round, and how a process plays its share of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from lightning_spectral.errors import ClientError, SpectralWarning
from lightning_spectral.protocol.records import (
    EXPLANATIONS,
    ClientOutcome,
    Download,
    ExclusionReason,
    Failure,
    Receipt,
    Upload,
    WorkUnit,
)
from lightning_spectral.server.advice import check_weights
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.round import OpenRound, address, client_error, named
from lightning_spectral.sums.exact_mean import can_be_summed


class Turn:
    """One unit's turn.

    Args:
        opened: The round.
        unit: Whose turn it is.

    Attributes:
        num_examples: Number of the client's training examples.
        download: What it was sent; ``None`` before `send`, and if it has no data.
        upload: What it sent back; ``None`` before `accept`.
    """

    _receipt: Receipt

    def __init__(self, opened: OpenRound, unit: WorkUnit) -> None:
        self.round = opened
        self.unit = unit
        self.num_examples = opened.num_examples[unit.key]
        self.simulated = opened.simulated.outcomes[unit.key]
        self.download: Download | None = None
        self.upload: Upload | None = None
        self._is_bounded = False

    @property
    def round_idx(self) -> int:
        """Communication round, from 0."""
        return self.round.round_idx

    def send(self) -> None:
        """Draw the client's download. A client without data says so beforehand and is sent nothing."""
        if self.simulated.left_out == "no_data":
            self._receipt = Receipt(self.unit, self.round.cohort.keep_ratio_of(self.unit))
        else:
            self.download, self._receipt = self.round.send(self.unit)

    @property
    def takes_part(self) -> bool:
        """Whether the client trains: one that will not report back does not."""
        return self.download is not None and self.simulated.left_out is None

    def skip(self) -> None:
        """Note why the round goes on without a client that does not take part."""
        self.upload = Upload(self.unit, {}, left_out=self.simulated.left_out)

    def accept(self, upload: Upload) -> None:
        """Accept the upload of the client's device.

        Raises:
            ClientError: If the device failed and `Faults` does not allow the round to go on without it.
            RoundError: If the device failed because the server's weights are not finite.
        """
        self.round.clock.add(upload.seconds)
        if upload.failure is not None:
            self._check(upload.failure)
        self.upload = upload

    def _check(self, failure: Failure) -> None:
        """Raise a failure that `Faults` does not tolerate; failures to load or collect are the algorithm's fault."""
        is_clients = failure.stage in ("local training", "network")
        check_weights(self.round.run.server, self.round_idx, failure.cause)
        if not is_clients or self.round.run.faults.ends_run("error"):
            raise client_error(self.round_idx, self.unit, failure.stage, failure.message) from failure.cause

    def receive(self) -> ClientOutcome:
        """Add the client's update to the round's sums; an update that cannot be used is left out, with a warning.

        Raises:
            ClientError: If it cannot be used and `Faults` says `Raise`.
            RoundError: If it is not finite because the server's weights are not.
        """
        assert self.upload is not None, "an upload is accepted before it is received"
        left_out, message = self.upload.left_out, ""
        if self.upload.failure is not None:
            message = self.upload.failure.message
        if left_out is None:
            with self.round.clock.measure("aggregate"), address(self.round_idx, self.unit, "aggregation"):
                left_out, message = self._add(self.upload)
        if left_out is not None:
            self._leave_out(left_out, message)
        outcome = self._outcome(self.upload, left_out)
        self.round.outcomes.append(outcome)
        return outcome

    def _add(self, upload: Upload) -> tuple[ExclusionReason | None, str]:
        """Add an upload, or say why it cannot be summed; in that case no part of it has been added."""
        averaged = self.round.averaged(self._receipt, upload)
        if not averaged.can_be_averaged():
            return "not_finite", _too_large(averaged)
        if names := self.round.extremes.not_numbers(upload.tensors):
            return "not_finite", f"NaN in {', '.join(names)}"
        if not can_be_summed(largest := self.round.opened.largest_summand(self._receipt, averaged)):
            return "not_finite", f"its contribution to the sums holds values up to {largest:.0e}"
        bound = self.round.run.update_bound
        if bound is not None and self.download is not None:
            bounded = bound.applied(self.round.averaged(self._receipt, self.download), averaged)
            self._is_bounded, averaged = bounded is not averaged, bounded
        self.round.opened.add(self._receipt, averaged)
        self.round.add_extremes(self._receipt, upload)
        return None, ""

    def _outcome(self, upload: Upload, left_out: ExclusionReason | None) -> ClientOutcome:
        sent = downloads_sent(self.download, upload)
        return ClientOutcome(
            round_idx=self.round_idx,
            unit=self.unit,
            keep_ratio=self._receipt.capacity,
            num_examples=self.num_examples,
            num_steps=upload.num_steps,
            loss=upload.loss,
            downlink_bytes=sum(download.num_bytes for download in sent),
            frozen_bytes=sum(download.frozen_bytes for download in sent),
            uplink_bytes=upload.num_bytes,
            left_out=left_out,
            logged=upload.logged if left_out is None else {},
            virtual_seconds=self.simulated.seconds,
            update_norm=self.round.update_norm(self._receipt, self.download, upload) if left_out is None else math.nan,
            unreached=upload.unreached,
            discarded=upload.discarded,
            missing=upload.missing,
            put_back=upload.put_back,
            is_bounded=self._is_bounded,
            seconds=math.fsum(upload.seconds.values()) if upload.seconds else math.nan,
        )

    def _leave_out(self, reason: ExclusionReason, message: str) -> None:
        """Continue without the client if `Faults` allows it, with a warning unless the reason was to be expected."""
        if reason == "not_finite":
            check_weights(self.round.run.server, self.round_idx)
        what = f"{EXPLANATIONS[reason]} ({message})" if message else EXPLANATIONS[reason]
        if self.round.run.faults.ends_run(reason):
            raise ClientError(
                f"Round {self.round_idx}, {named(self.unit)}: {what}; to go on without such clients, write "
                f"faults=Faults(on_{reason}=LeaveOut())."
            )
        if reason in ("error", "not_finite", "no_update"):
            warnings.warn(
                f"Round {self.round_idx}: {named(self.unit)} is left out of the average: {what}.",
                SpectralWarning,
                stacklevel=4,
            )


def _too_large(upload: Upload) -> str:
    """Why an upload of finite values cannot be summed; empty if its values are not finite."""
    magnitudes = upload.largest.values()
    return f"it holds values up to {max(magnitudes):.0e}" if all(map(math.isfinite, magnitudes)) else ""


def uploads_of(executor: Executor, downloads: Iterable[Download]) -> Iterator[Upload]:
    """Yield one upload for each download, as they arrive.

    A device that lost frozen tensors is sent the same download once more, with all of them, after the others have
    answered. Its upload then names what was missing.

    Args:
        executor: Runs the downloads.
        downloads: Drawn as the executor takes them.
    """
    incomplete: dict[tuple[int, str], Download] = {}
    missing: dict[tuple[int, str], tuple[str, ...]] = {}
    again: list[Download] = []

    def noted() -> Iterator[Download]:
        for download in downloads:
            if download.held:
                incomplete[download.unit.key] = download
            yield download

    for upload in executor.run(noted()):
        download = incomplete.pop(upload.unit.key, None)
        if not upload.missing:
            yield upload
        elif download is None:
            yield _contradiction(upload)
        else:
            missing[upload.unit.key] = upload.missing
            again.append(download.with_everything())
    if again:
        for upload in uploads_of(executor, again):
            yield replace(upload, missing=missing.get(upload.unit.key, ()))


def downloads_sent(download: Download | None, upload: Upload) -> list[Download]:
    """The downloads that an upload answers: two if the device had lost frozen tensors, none if it was not asked."""
    if download is None:
        return []
    return [download, download.with_everything()] if upload.missing else [download]


def _contradiction(upload: Upload) -> Upload:
    what = f"the device says that it lacks {', '.join(upload.missing)}, which came with this download."
    return Upload(upload.unit, {}, left_out="error", failure=Failure("loading", what))


Act = Callable[[Turn], object]


def play(opened: OpenRound, units: Iterable[WorkUnit], start: Act = Turn.send, end: Act = Turn.receive) -> None:
    """Play the turns of some units.

    Units are taken, and their downloads drawn, as the executor asks for them. So an executor that trains one client
    after another needs the memory of one download, however many there are. Uploads are received as they arrive.

    Args:
        opened: The round.
        units: Whose turns to play.
        start: Called when a client's download is due; it must send it.
        end: Called when a client's upload has arrived; it must receive it.

    Raises:
        ClientError: If a turn fails; with several processes, only when they meet.
    """
    _Share(opened, start, end).play(units)


class _Share:
    """The turns of one process in one round; after a failure that is held back, no more of them begin."""

    def __init__(self, opened: OpenRound, start: Act, end: Act) -> None:
        self.opened, self.start, self.end = opened, start, end
        self.waiting: dict[tuple[int, str], Turn] = {}  # sent, and not back yet
        self.latest: WorkUnit | None = None

    def play(self, units: Iterable[WorkUnit]) -> None:
        uploads = self._uploads(units)
        while (upload := self._next(uploads)) is not None:
            self._receive(upload)

    def _uploads(self, units: Iterable[WorkUnit]) -> Iterator[Upload]:
        yield from uploads_of(self.opened.executor, self._downloads(units))

    def _downloads(self, units: Iterable[WorkUnit]) -> Iterator[Download]:
        """Send each client its download; one that will not report back has its whole turn here."""
        for self.latest in units:
            with self.opened.containing_failures(self.latest):
                turn = self._begin(self.latest)
            if self.opened.failure is not None:
                return
            if turn.download is not None and turn.takes_part:
                yield turn.download

    def _begin(self, unit: WorkUnit) -> Turn:
        turn = Turn(self.opened, unit)
        self.start(turn)
        if turn.takes_part:
            self.waiting[unit.key] = turn
        else:
            turn.skip()
            self.end(turn)
        return turn

    def _next(self, uploads: Iterator[Upload]) -> Upload | None:
        """The next upload, if there is one and nothing has failed."""
        try:
            return None if self.opened.failure is not None else next(uploads, None)
        except Exception as error:  # of the executor: most likely about the client that was sent to last
            self.opened.contain(error, self.latest)
            return None

    def _receive(self, upload: Upload) -> None:
        with self.opened.containing_failures(upload.unit):
            turn = self.waiting.pop(upload.unit.key, None)
            if turn is None:
                message = "its executor returned an upload that nobody waits for, or returned it twice."
                raise client_error(self.opened.round_idx, upload.unit, "", message)
            turn.accept(upload)
            self.end(turn)
