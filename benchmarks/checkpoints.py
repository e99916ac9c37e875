"""What a long run and a large federation add to a checkpoint, and what the server keeps of clients in memory.

    python benchmarks/checkpoints.py

Each row is measured in a process of its own. First the record of a run with 10 turns a round: the bytes it adds to a
checkpoint and the time to collect and to write it, for runs of 10^3, 10^5 and 10^6 turns. Then the stale updates of
10^4 and 10^5 clients, each a weight of 2 x 5 and a bias of 5 numbers, 60 bytes: the same, and the resident memory that
one of them takes.
"""

import argparse
import io
import json
import subprocess
import sys
import time
from typing import Any

import torch
from page import show, write

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.checkpoint_files import digest_of_tensors
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary, WorkUnit

TURNS, CLIENTS, COHORT = (10**3, 10**5, 10**6), (10**4, 10**5), 10
STAGES = ("refresh", "sample", "load", "train", "aggregate", "apply")


def resident_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096


def history(turns: int) -> RoundHistory:
    made, generator = RoundHistory(), torch.Generator().manual_seed(0)
    made.keeps_turns = True
    for round_idx in range(turns // COHORT):
        clients = torch.randint(10_000, (COHORT,), generator=generator).tolist()
        seconds = torch.rand(len(STAGES), generator=generator, dtype=torch.float64).tolist()
        outcomes = tuple(
            ClientOutcome(
                round_idx, WorkUnit(c, coefficient=100.0), (0.2, 0.4)[c % 2], 100, 5, 0.5 + 1 / (c + 1), 8000, 8000
            )
            for c in clients
        )
        summary = RoundSummary(round_idx, outcomes, dict(zip(STAGES, seconds, strict=True)), {"lr": 0.1}, {})
        made.on_round_end(None, None, summary)  # type: ignore[arg-type]
        made.rows[-1].update({"val_loss": seconds[0], "val_acc": seconds[1]})
    return made


def store(clients: int) -> ClientStore:
    made = ClientStore()
    for first in range(0, clients, COHORT):
        for client in range(first, first + COHORT):
            made[WorkUnit(client)] = {"weight": torch.full((5, 2), float(client)), "bias": torch.full((5,), 1.0)}
        made.commit()
    return made


def measure(what: str, count: int) -> dict[str, float]:
    torch.set_num_threads(1)
    before = resident_bytes()
    kept: Any = history(count) if what == "turns" else store(count)
    memory = resident_bytes() - before
    start = time.perf_counter()
    kept.state_dict()
    collected = time.perf_counter()  # again below: the first time may do what later times need not
    state, file = kept.state_dict(), io.BytesIO()
    again = time.perf_counter()
    digest_of_tensors(state)
    torch.save(state, file)
    written = time.perf_counter()
    seconds = {"first": collected - start, "collect": again - collected, "write": written - again}
    return {"bytes": file.tell(), "memory": memory, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "COUNT"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    table = [("record", "bytes", "bytes each", "ms to collect", "ms to write", "bytes of memory each")]
    for what, counts in (("turns", TURNS), ("clients", CLIENTS)):
        for count in counts:
            command = [sys.executable, __file__, "--measure", what, str(count)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            per = f"{found['bytes'] / count:.0f}", f"{found['memory'] / count:.0f}"
            times = f"{1e3 * found['collect']:.1f}", f"{1e3 * found['write']:.1f}"
            table.append((f"{count:,} {what}", f"{found['bytes']:,.0f}", per[0], *times, per[1]))
    show(table)
    if options.write:
        write("checkpoints", {"torch": torch.__version__}, table)


if __name__ == "__main__":
    main()
