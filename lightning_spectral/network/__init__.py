"""The same federation with clients on other machines, over Flower.

The server runs the user's Trainer, as in a simulation; each device runs the device half of the algorithm on its own
data. Names are imported on first use, so that a device needs neither the server's code nor Flower to be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_spectral.filters import LocalNoise
    from lightning_spectral.network.device import ClientData, own_model
    from lightning_spectral.network.flower import client_app, server_app
    from lightning_spectral.network.remote_clients import RemoteClients

__all__ = ["ClientData", "LocalNoise", "RemoteClients", "client_app", "own_model", "server_app"]

_MODULE_OF = {
    "ClientData": "network.device",
    "LocalNoise": "filters",
    "RemoteClients": "network.remote_clients",
    "client_app": "network.flower",
    "own_model": "network.device",
    "server_app": "network.flower",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lightning_spectral.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
