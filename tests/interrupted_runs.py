"""A run that is interrupted, each time by a signal at a random moment, and resumed from what it left behind.

``python interrupted_runs.py FOLDER 2,SIGKILL,SIGTERM`` does one of two processes that is interrupted twice. It writes
``result.pt`` into a folder of the run's own, ``FOLDER/2,SIGKILL,SIGTERM``, and the outcome of the same run without any
signal, in one process. The processes that are interrupted are forks of this one, so that everything is imported once.
If there are several, all of them get a SIGKILL, but maybe only some a SIGTERM.
"""

import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ports import free_port
from toy_models import LitSmall, toy_examples

import lightning_spectral as ls

CLIENTS_PER_ROUND = 4
ROUNDS_PER_SIGNAL = 1  # at most this many between two signals, so that the run outlasts the signals


class Report(ls.RoundCallback):
    """Writes a byte into a pipe whenever a client begins."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_client_start(self, *args: Any) -> None:
        os.write(self.pipe, b".")


def train(folder: Path, num_rounds: int, pipe: int | None = None, num_processes: int = 1) -> None:
    """Fit, from the newest complete checkpoint if there is one, and write the outcome."""
    torch.manual_seed(0)
    examples = toy_examples(80)
    clock = ls.VirtualClock(
        {ls.simulation.DeviceProfile(1e4, 1e4, 1e6): 0.5, ls.simulation.DeviceProfile(1e3, 1e3, 1e6): 0.5}, deadline=9.0
    )
    model = ls.FederatedModule(
        LitSmall(dropout=0.2),  # and momentum, batch norm and a schedule, all of which a resumed run might get wrong
        algorithm=ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}),
        clients_per_round=CLIENTS_PER_ROUND,
        server_optimizer=partial(torch.optim.Adam, lr=0.05),
        dropout=ls.ClientDropout(0.2),
        clock=clock,
    )
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(num_clients=8), val=examples, batch_size=4)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    save = ModelCheckpoint(folder / "checkpoints", save_last=True, save_on_exception=True)
    several = {"strategy": ls.plugin.ClientParallelStrategy(timeout=timedelta(seconds=60)), "devices": num_processes}
    trainer = pl.Trainer(
        max_epochs=num_rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[history, ledger, save] + ([] if pipe is None else [Report(pipe)]),
        enable_progress_bar=False,
        enable_model_summary=False,
        **(several if num_processes > 1 else {}),
    )
    trainer.fit(model, data, ckpt_path=ls.latest_checkpoint(folder / "checkpoints"))
    rows = [{k: v for k, v in row.items() if not k.startswith("fl/seconds_")} for row in history.rows]
    result = {
        "weights": model.module.state_dict(),
        "server_optimizer": model.lasting.state_dict()["server optimizer"],
        "rounds": [repr(sorted(row.items())) for row in rows],
        "ledger": [repr(row) for row in ledger.rows],
        "global_step": trainer.global_step,
    }
    torch.save(result, folder / "result.pt")


def start(folder: Path, num_rounds: int, num_processes: int) -> tuple[list[int], int]:
    """Train in forks; return their process ids and the pipe that they report to."""
    reading, writing = os.pipe()
    port, pids = free_port(), []
    for rank in range(num_processes):
        if (pid := os.fork()) == 0:
            os.close(reading)
            if num_processes > 1:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", LOCAL_RANK=str(rank))
            os._exit(status_of(folder, num_rounds, writing, num_processes))
        pids.append(pid)
    os.close(writing)
    return pids, reading


def status_of(*arguments: Any) -> int:
    try:
        train(*arguments)
    except SystemExit:
        return 143  # Lightning's answer to SIGTERM
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
    return 0


def interrupt(folder: Path, num_rounds: int, num_processes: int, kind: signal.Signals, chance: random.Random) -> None:
    """Start or resume the run, and send it a signal after a random number of turns and milliseconds."""
    pids, pipe = start(folder, num_rounds, num_processes)
    for _ in range(chance.randint(1, ROUNDS_PER_SIGNAL * CLIENTS_PER_ROUND)):
        if not os.read(pipe, 1):
            break  # the run is over: its exit status says why
    time.sleep(chance.uniform(0.0, 0.05))
    for pid in chance.sample(pids, num_processes if kind == signal.SIGKILL else chance.randint(1, num_processes)):
        os.kill(pid, kind)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(pipe)
    expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[kind]
    for status in statuses:
        ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if ended != expected:
            raise RuntimeError(f"the run ended with {ended}, not with {expected}")


def main(folder: Path, plan: str) -> None:
    num_processes, *names = plan.split(",")
    own, num_rounds, chance = folder / plan, ROUNDS_PER_SIGNAL * (len(names) + 1) + 2, random.Random(len(names))
    for name in names:
        interrupt(own, num_rounds, int(num_processes), signal.Signals[name], chance)
    for each in own, own / "uninterrupted":  # when all is forked
        each.mkdir(exist_ok=True)
        train(each, num_rounds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
