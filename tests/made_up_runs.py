"""Made-up runs, as `RoundHistory` would record them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_spectral.report.runs import NAME, Line, LoggedRun, run_of, write_record

SECONDS = {f"fl/seconds_{stage}": 0.1 for stage in ("refresh", "sample", "load", "train", "aggregate", "apply")}


def rounds(accuracies: Iterable[float], **extra: float) -> list[dict[str, float]]:
    """The metrics of each round, and those of its evaluation."""
    rows: list[dict[str, float]] = []
    for index, accuracy in enumerate(accuracies):
        sent = {"fl/bytes_down": 2e6, "fl/bytes_up": 1e6, "fl/loss": 1.0, "train_loss": 1.0, **SECONDS}
        rows.append({"fl/round": index, **sent, **extra})
        rows.append({"fl/round": index, "val_acc": accuracy, "val_loss": 1 - accuracy})
    return rows


def lines_of(logged: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """Lines of a record; what is logged with the bytes of a round is of its clients."""
    for entry in logged:
        is_of_clients = any(name.endswith("fl/bytes_down") for name in entry)
        yield {"round": int(entry["fl/round"]), "trained" if is_of_clients else "evaluated": dict(entry)}


def made_run(name: str, config: Mapping[str, Any], logged: Iterable[Mapping[str, Any]]) -> LoggedRun:
    return run_of(name, Path(name), config, lines_of(logged))


def write_run(
    folder: Path,
    logged: Iterable[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
    more: Iterable[Line] = (),
) -> Path:
    """``rounds.jsonl`` with further lines, in a folder, which is returned."""
    write_record(folder / NAME, str(folder), dict(config or {}), [*lines_of(logged), *more])
    return folder


def strategies(root: Path, **extra: float) -> Path:
    """Two strategies with two seeds each."""
    for strategy, gain in (("TopN", 0.0), ("Collective", 0.1)):
        for seed in range(2):
            algorithm = {"name": "SpectralSharding", "strategy": {"name": strategy}}
            config = {"federation": {"algorithm": algorithm, "seed": seed}}
            accuracies = [0.5 + gain + 0.01 * seed, 0.6 + gain + 0.02 * seed]
            own = {"fl/bytes_up": 1e6 * (1 + gain), **extra}
            write_run(root / strategy / f"version_{seed}", rounds(accuracies, **own), config)
    return root
