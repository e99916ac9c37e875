"""Tests of the network; those of Flower need it installed."""

import warnings
from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["test_door.py", "test_flower.py", "test_kit.py"]
if find_spec("flwr"):
    with warnings.catch_warnings():  # of click, which typer calls by an old name
        warnings.simplefilter("ignore")
        import flwr.clientapp
        import flwr.serverapp  # noqa: F401
