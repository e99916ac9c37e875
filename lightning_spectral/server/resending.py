"""A device that lost frozen tensors is sent its download again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_spectral.protocol.records import Download, Failure, Upload
from lightning_spectral.server.executor import Executor


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
