"""How tests are collected; and `shared_fixtures`, where they run."""

import gc
import random
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # every test can import the modules beside this file by name


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with files of many tests; those of few take longest
    if getattr(config.option, "dist", "no") == "no":  # xdist's own process runs no test; its workers wait for it
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all files that check a contract in one process: for these checks it starts an interpreter, once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @cache
    def checks_a_contract(file: str) -> bool:
        source = (config.rootpath / file).read_text(encoding="utf-8")
        return "check_algorithm(" in source or "check_filter(" in source

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "contracts" if file.startswith("tests/") and checks_a_contract(file) else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without collecting garbage, and then spare all that is imported: it stays."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests which cases of a test that is marked as `sampled` are not drawn."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, found in cases.items():
        number = found[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        drawn = random.Random(name).sample(found, min(number, len(found)))
        for item in found:
            if item not in drawn:
                item.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["pretended", "cuda"], help="run the tests in tests/devices, on this device")
