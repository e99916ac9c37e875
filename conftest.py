"""Which files of the package have no doctests to collect, for lack of what they import."""

from importlib.util import find_spec

NEED_FLOWER = ["lightning_spectral/network/flower/*", "lightning_spectral/network/cli/*"]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
