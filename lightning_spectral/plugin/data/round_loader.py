"""The loader that Lightning iterates over in an epoch: its only batch is this process's share of a round."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl

from lightning_spectral.plugin.host import Host, Share, as_host


class RoundLoader:
    """A single batch for an epoch of Lightning's, with all clients that this process trains in a round.

    The host is asked when the batch is fetched: Lightning creates the iterator before a resumed run knows its epoch.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Share]:
        yield self.host.share(self.host.current_epoch)


def round_loader(trainer: pl.Trainer | None, owner: str) -> RoundLoader:
    """The rounds of the module that a Trainer fits; raise ``TypeError`` if it trains on batches instead of clients."""
    module = None if trainer is None else trainer.lightning_module
    return RoundLoader(as_host(module, f"{owner} feeds clients, not batches"))
