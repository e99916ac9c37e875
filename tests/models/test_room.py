"""The room `models/`: what it knows, who knows it, and that its page is complete."""

from pathlib import Path

import lightning_spectral as ls
from lightning_spectral import models

PACKAGE = Path(ls.__file__).parent
ROOM = PACKAGE / "models"


def our_imports(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("from lightning_spectral")]


def test_the_models_know_nothing_of_the_package() -> None:
    imports = [line for file in ROOM.glob("*.py") for line in our_imports(file)]
    assert imports
    assert all(line.startswith("from lightning_spectral.models.") for line in imports)


def test_the_package_knows_nothing_of_its_models() -> None:
    others = [file for file in PACKAGE.rglob("*.py") if ROOM not in file.parents]
    assert others
    assert not [file for file in others if any("lightning_spectral.models" in line for line in our_imports(file))]


def test_the_reference_has_every_model() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert not [name for name in models.__all__ if f":: lightning_spectral.models.{name}\n" not in reference]
