"""A hand-written loop that copies weights to the client, takes steps and averages.

It has no Trainer, no logging, no ledger and no check for finite updates. With ``--sharded`` the server itself holds a
sub-model of keep ratio 0.2, without factorisation and sampling.
"""

import copy
import time
from collections.abc import Iterator

import torch
from torch import nn
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, make_model, parser, print_report, tensors


def run(model: str, rounds: int, sharded: bool) -> Iterator[float]:
    server = make_model(model)
    if sharded:
        import lightning_spectral as ls

        server = ls.replace_layers(server, keep_ratio=0.2)
    client = copy.deepcopy(server)
    optimizer = torch.optim.SGD(client.parameters(), lr=LR, momentum=MOMENTUM)
    if sharded:
        ls.nn.FrobeniusDecay(dict.fromkeys(ls.nn.sharded_layers(client), 1e-4)).register(optimizer, client)
        ls.EffectiveLRClip(10.0).register(optimizer, client)
    x, y = tensors()
    for _ in range(rounds):
        start = time.perf_counter()
        sums = [torch.zeros_like(p) for p in server.parameters()]
        for client_id in torch.randperm(NUM_CLIENTS)[:COHORT].tolist():
            with torch.no_grad():
                for mine, theirs in zip(client.parameters(), server.parameters(), strict=True):
                    mine.copy_(theirs)
            optimizer.state.clear()
            for chosen in (client_id * EXAMPLES + torch.randperm(EXAMPLES)).split(BATCH_SIZE):
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(x[chosen]), y[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(sums, list(client.parameters()), alpha=EXAMPLES)
        with torch.no_grad():
            for theirs, total in zip(server.parameters(), sums, strict=True):
                theirs.copy_(total / (COHORT * EXAMPLES))
        yield time.perf_counter() - start


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--sharded", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print_report(list(run(options.model, options.rounds + 1, options.sharded))[1:], [])
