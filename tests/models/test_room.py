"""The folder `models/`: what it imports, what imports it, and that the reference lists all of it."""

from pathlib import Path

import lightning_spectral as ls
from lightning_spectral import models

PACKAGE = Path(ls.__file__).parent
MODELS = PACKAGE / "models"


def our_imports(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("from lightning_spectral")]


def test_models_import_only_each_other() -> None:
    imports = [line for file in MODELS.glob("*.py") for line in our_imports(file)]
    assert imports
    assert all(line.startswith("from lightning_spectral.models.") for line in imports)


def test_the_package_does_not_import_its_models() -> None:
    others = [file for file in PACKAGE.rglob("*.py") if MODELS not in file.parents]
    assert others
    assert not [file for file in others if any("lightning_spectral.models" in line for line in our_imports(file))]


def test_the_reference_lists_every_model() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert not [name for name in models.__all__ if f":: lightning_spectral.models.{name}\n" not in reference]
