"""Which files are not collected for doctests, for lack of what they import."""

from importlib.util import find_spec

NEED_FLOWER = [
    "lightning_spectral/network/flower/*",
    "lightning_spectral/network/cli/*",
    "tests/loopback_app.py",
    "tests/other_packages_app.py",
]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
