"""The loader that Lightning iterates over in an epoch: its only batch is this process's share of a round."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl

from lightning_spectral.plugin.host import Host, Share, is_host


class RoundLoader:
    """Iterates over one epoch for Lightning: a single batch, with all clients that this process trains in a round.

    Args:
        host: Knows the round and its clients. It is asked when the batch is fetched, because Lightning creates the
            iterator before it knows which epoch a resumed run is in.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Share]:
        yield self.host.share(self.host.current_epoch)


def round_loader(trainer: pl.Trainer | None, owner: str) -> RoundLoader:
    """Make the loader of the rounds of the module that a Trainer fits.

    Args:
        trainer: The Trainer, if there is one.
        owner: Name of the data module's class, for the error.

    Raises:
        TypeError: If that module trains on batches instead of clients.
    """
    host = None if trainer is None else trainer.lightning_module
    if not is_host(host):
        raise TypeError(
            f"{owner} feeds clients, not batches, and {type(host).__name__} trains on batches; "
            "wrap it: FederatedModule(module, clients_per_round=...)."
        )
    return RoundLoader(host)
