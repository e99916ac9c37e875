"""What is known of each client by its name, in files that are written whole and by Flower, and how it is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_spectral.tables import as_text

SERVER = "server"  # folder of the server's machine, and the name of its SuperLink for `flwr run`
FILE = "status.jsonl"  # in Flower's folder on the server: a line of JSON for each client of the last run
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
FIGURES = ("connected", "answered", "round_idx", "sent_bytes", "received_bytes")


@dataclass
class Seen:
    """What a run has seen of one client."""

    client: str  # its name
    node: int
    answered: float = 0.0  # in seconds since 1970; 0 before its first answer
    round_idx: int = 0  # of its last answer, from 0
    sent_bytes: int = 0  # of all messages to it, before the network repeats anything
    received_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # how often, by reason
    why: str = ""  # the last reason in words

    def note(self, round_idx: int, num_bytes: int, reason: str | None, why: str) -> None:
        """Note an answer in a round, or why there is none that can be used."""
        if num_bytes:
            self.answered, self.round_idx = time.time(), round_idx
            self.received_bytes += num_bytes
        if reason is not None:
            self.left_out[reason] = self.left_out.get(reason, 0) + 1
            self.why = why or reason


def write_status(path: Path, clients: Iterable[Seen], rejected: Mapping[int, str]) -> None:
    """Replace the file of a run by one that is whole, with clients, and the nodes that were rejected and why."""
    rows = [*map(asdict, clients), *({"node": node, "why": f"rejected: {why}"} for node, why in rejected.items())]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def write_whole(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file by one that is whole, and was never readable for more than ``mode`` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def enrolled_beside(path: Path | None) -> dict[int, str]:
    """The names for which keys are enrolled, by node, in the kit that has this file; none if it is in no kit."""
    if path is None or path.parts[-3:] != (SERVER, "flwr", FILE):
        return {}
    return {int(noted.read_text()): noted.parent.name for noted in path.parents[2].glob("*/registered")}


def asked_flower(folder: Path, *command: str) -> dict[str, Any]:
    """What a command of Flower says of the SuperLink of this machine; `RuntimeError` if it fails."""
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder.resolve() / SERVER / "flwr")}
    program = [str(Path(sys.executable).with_name("flwr")), *command, SERVER, "--format=json"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    with suppress(ValueError):
        if (said := json.loads(done.stdout)).get("success"):
            return dict(said)
    raise RuntimeError(f"`flwr {' '.join(command)}` failed:\n{done.stdout}{done.stderr}")


def status_of(kit: Path) -> list[dict[str, Any]]:
    """What is known of each client: the fields of `Seen`, and whether it is connected to the SuperLink now."""
    listed, path = asked_flower(kit, "supernode", "list")["nodes"], kit / SERVER / "flwr" / FILE
    connected = {int(node["node-id"]) for node in listed if node["status"] == "online"}
    names = enrolled_beside(path)
    rows = {name: asdict(Seen(name, node)) for node, name in names.items()}
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        name = row.get("client") or names.get(row["node"], f"node {row['node']}")
        known = rows.get(name, asdict(Seen(name, row["node"])))
        rows[name] = {**known, **row, "node": known["node"]}
    return [{**row, "connected": row["node"] in connected} for _, row in sorted(rows.items())]


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The status as a table for people; rounds are counted from 0."""
    cells = [("client", "node", "connected", "last answer", "round", "MB sent", "MB received", "left out", "why")]
    for row in rows:
        known = row["answered"] > 0
        ago = f"{time.time() - row['answered']:,.0f} s ago" if known else ""
        sizes = (f"{row[name] / 1e6:.3g}" for name in ("sent_bytes", "received_bytes"))
        reasons = ", ".join(f"{reason} {times}" for reason, times in row["left_out"].items())
        is_there, round_idx = "yes" if row["connected"] else "no", str(row["round_idx"]) if known else ""
        cells.append((row["client"], str(row["node"]), is_there, ago, round_idx, *sizes, reasons, row["why"]))
    return as_text([cells])


def as_prometheus(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""The status as numbers in Prometheus' text format.

    Example:
        >>> as_prometheus([{**asdict(Seen("ward 7", 1)), "connected": True}]).splitlines()[:2]
        ['federation_answered{client="ward 7"} 0.0', 'federation_connected{client="ward 7"} 1.0']
    """
    found = [(name, {"client": row["client"]}, row[name]) for row in rows for name in FIGURES]
    for row in rows:
        reasons = row["left_out"].items()
        found += [("left_out", {"client": row["client"], "reason": reason}, times) for reason, times in reasons]
    lines = []
    for name, labels, value in sorted(found, key=lambda one: one[0]):  # those of one name must be together
        said = ",".join(f"{label}={json.dumps(text, ensure_ascii=False)}" for label, text in labels.items())
        lines.append(f"federation_{name}{{{said}}} {float(value)}")
    return "\n".join(lines)
