"""The files of a study as modules: they are scripts, which import each other from their own folder."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

STUDIES = Path(__file__).parents[1] / "studies"
EXAMPLES = STUDIES.parent / "examples"  # which studies may import


@contextmanager
def study_files(study: str | Path, names: Sequence[str], folder: Path) -> Iterator[Any]:
    """Import some files of a study, in an empty working folder that has a folder ``docs``.

    Afterwards, files that these import from other studies or from examples are unloaded as well, the folders they add
    to ``sys.path`` are removed, and Lightning's log, which they silence, is restored.

    Args:
        study: Name of its folder, or the whole path of another folder of scripts.
        names: The files, without ``.py``.
        folder: Becomes the working folder until the block ends.
    """
    before, path, known = os.getcwd(), list(sys.path), set(sys.modules)
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    (folder / "docs").mkdir()
    os.chdir(folder)
    sys.path[:0] = [str(STUDIES / study), str(STUDIES)]  # the second has what the studies share
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    finally:
        log.setLevel(level)
        sys.path[:] = path
        os.chdir(before)
        folders = (STUDIES, STUDIES / study, EXAMPLES)
        for name in {file.stem for folder in folders for file in folder.rglob("*.py")} - known:
            sys.modules.pop(name, None)


def studied(study: str | Path, names: Sequence[str]) -> Any:
    """A fixture of a whole file of tests: the files of a study as modules, in a folder of their own."""

    @pytest.fixture(scope="module")
    def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        with study_files(study, names, tmp_path_factory.mktemp("study")) as modules:
            yield modules

    return files
