"""Devices that lost frozen tensors: sent again, once, within the round, and no failure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.round import downloads_sent, uploads_of


@dataclass
class Devices(Executor):
    """Each answers with what it was sent; some have lost the weight, and some say so whatever they were sent."""

    lost: set[int]
    stubborn: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for download in downloads:
            client = download.unit.client_id
            self.asked.append(client)
            lacks = client in self.stubborn or (client in self.lost and download.held)
            yield Upload(download.unit, {} if lacks else download.travelling, missing=("weight",) if lacks else ())


def downloads(*held: bool) -> list[Download]:
    """One for each client, without the weight where it holds that."""
    tensors = {"weight": torch.ones(3), "bias": torch.ones(1)}
    names = frozenset({"weight"})
    return [
        Download(WorkUnit(i), 1.0, tensors, frozen={"weight": "digest"}, held=names if holds else frozenset())
        for i, holds in enumerate(held)
    ]


def test_what_a_device_lost_is_sent_after_the_others_have_answered() -> None:
    devices, asked = Devices({1, 2}), downloads(True, True, True, False)
    uploads = {upload.unit.client_id: upload for upload in uploads_of(devices, asked)}
    assert devices.asked == [0, 1, 2, 3, 1, 2]
    assert [upload.missing for upload in uploads.values()] == [(), (), ("weight",), ("weight",)]
    assert {client: set(upload.tensors) for client, upload in uploads.items()} == {
        0: {"bias"},
        1: {"weight", "bias"},
        2: {"weight", "bias"},
        3: {"weight", "bias"},
    }
    sent = {client: downloads_sent(asked[client], upload) for client, upload in uploads.items()}
    assert {client: [download.num_bytes for download in both] for client, both in sent.items()} == {
        0: [4],
        1: [4, 16],
        2: [4, 16],
        3: [16],
    }
    assert downloads_sent(None, uploads[0]) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_device_that_lacks_what_it_was_just_sent_has_failed(held: bool) -> None:
    devices = Devices(set(), stubborn={0})
    (upload,) = uploads_of(devices, downloads(held))
    assert devices.asked == ([0, 0] if held else [0])
    assert upload.failure is not None
    assert upload.failure.stage == "loading"
    assert upload.failure.message == "the device says that it lacks weight, which came with this download."


def test_downloads_are_drawn_as_the_executor_takes_them() -> None:
    devices, drawn = Devices({0}), list[int]()

    def drawing() -> Iterator[Download]:
        for download in downloads(True, False):
            drawn.append(download.unit.client_id)
            yield download

    uploads = uploads_of(devices, drawing())
    assert (next(uploads).unit.client_id, drawn) == (1, [0, 1])
    assert next(uploads).missing == ("weight",)
    assert next(uploads, None) is None
