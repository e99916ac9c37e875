"""What Flower imports on a device for each message of ours; it finds the process that imports the rest."""

from lightning_spectral.network import client_app

device = client_app("ours:module", "ours:client")
