"""Which files are not collected for doctests, for lack of what they import."""

from importlib.util import find_spec

NEED_FLOWER = [
    "lightning_spectral/network/door.py",
    "lightning_spectral/network/flower.py",
    "lightning_spectral/network/kit.py",
    "lightning_spectral/network/local_network.py",
    "lightning_spectral/network/supernode.py",
    "tests/loopback_app.py",
    "tests/other_packages_app.py",
]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
