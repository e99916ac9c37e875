"""Speed of the sampling functions against the paper's printed algorithms and R's packages, in one run.

    python benchmarks/designs.py

Milliseconds on one thread, the minimum of several runs. The printed algorithms are Algorithms 1 and 2 of Korzhenkov &
Louizos (2024), line by line in numpy, with the sign of line 30 of Algorithm 2 corrected. R's packages are timed by R
itself, without its start-up; if Rscript or the package `sampling` is missing, their column says so. R refits
conditional Poisson sampling for every draw. The goals at the end are for one core of a small shared machine.
"""

import math
import shutil
import subprocess
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, proportional_inclusion_probs
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs
from lightning_spectral.tables import aligned

COHORT = 10
SIZES = [(64, 13), (128, 26), (256, 52), (512, 103), (1024, 205), (2048, 410), (4096, 820), (4096, 2048)]
LAYERS = [64, 128, 256, 512] * 5  # the 20 convolutions of a ResNet-18, by the smaller side of their matrix
KEEP_RATIOS = [0.1, 0.2, 0.4]
DESIGNS = [
    ls.ConditionalPoisson(),
    ls.Brewer(),
    ls.MinimumSupport(),
    ls.Systematic(),
    ls.designs.RandomSystematic(),
]
R_FUNCTIONS = {
    "UPmaxentropy": ls.ConditionalPoisson(),
    "UPbrewer": ls.Brewer(),
    "UPminimalsupport": ls.MinimumSupport(),
    "UPsystematic": ls.Systematic(),
    "UPrandomsystematic": ls.designs.RandomSystematic(),
}


def milliseconds(work: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def spectrum(size: int) -> Tensor:
    """Return the singular values of a random 3 x 3 convolution with this many channels: neither flat nor steep."""
    weight = torch.randn(size, 9 * size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return torch.linalg.eigvalsh(weight @ weight.T).flip(0).clamp_min(0).sqrt()


def power_law(size: int) -> Tensor:
    return 1 / torch.arange(1, size + 1, dtype=torch.float64).sqrt()


def algorithm_1(lam: np.ndarray, n: int) -> np.ndarray:
    """Compute Algorithm 1, line by line, for descending positive values."""
    best_error, best = math.inf, np.ones(len(lam))
    for t in range(n):
        tail = lam[t:].sum()
        if lam[t] < tail / (n - t):
            pi = np.ones(len(lam))
            pi[t:] = (n - t) * lam[t:] / tail
            error = (lam**2 * (1 / pi - 1)).sum()
            if error < best_error:
                best_error, best = error, pi
    return best


def algorithm_2(lam: np.ndarray, n: int, C: float) -> np.ndarray:
    """Compute Algorithm 2, line by line, for descending positive values, with the sign of line 30 corrected."""
    best_error, best = -(lam[:n] ** 2).sum(), (np.arange(len(lam)) < n).astype(float)
    for t in range(n):
        error_t = -(lam[:t] ** 2).sum()
        for u in range(1, len(lam) - t + 1):
            active = lam[t : t + u]
            root = math.sqrt(C) * active.sum() / ((n - t) * (C - 1) + u)
            previous = lam[t - 1] if t else math.inf
            below = lam[t] / math.sqrt(C) < root <= previous / math.sqrt(C)
            if below and root < lam[t + u - 1] * math.sqrt(C):
                error = error_t - C / (C - 1) * (active * (active - root / math.sqrt(C))).sum()
                if error < best_error:
                    pi = np.zeros(len(lam))
                    pi[:t] = 1
                    pi[t : t + u] = (active * math.sqrt(C) / root - 1) / (C - 1)
                    best_error, best = error, pi
    return best


def against_the_printed_algorithms() -> tuple[list[list[str]], dict[str, float]]:
    rows, figures = [["N, n", "Unbiased", "Algorithm 1", "ratio", "Collective", "Algorithm 2", "ratio"]], {}
    for N, n in [(64, 13), (512, 52), (512, 205)]:
        s = power_law(N)
        ours = collective_inclusion_probs(s, n, COHORT).numpy()
        assert np.abs(ours - algorithm_2(s.numpy(), n, COHORT)).max() < 1e-12
        times = [
            milliseconds(lambda s=s, n=n: proportional_inclusion_probs(s, n), 50),
            milliseconds(lambda s=s, n=n: algorithm_1(s.numpy(), n), 3),
            milliseconds(lambda s=s, n=n: collective_inclusion_probs(s, n, COHORT), 50),
            milliseconds(lambda s=s, n=n: algorithm_2(s.numpy(), n, COHORT), 2),
        ]
        figures[f"{N}, {n}"] = times[3] / times[2]
        cells = [f"{x:.3f}" if x < 10 else f"{x:.0f}" for x in times]
        ratios = [f"{times[1] / times[0]:.0f}", f"{times[3] / times[2]:.0f}"]
        rows.append([f"{N}, {n}", *cells[:2], ratios[0], *cells[2:], ratios[1]])
    for n in (820, 2048):
        s = power_law(4096)
        figures[f"4096, {n}"] = milliseconds(lambda s=s, n=n: collective_inclusion_probs(s, n, COHORT), 50)
        unbiased = milliseconds(lambda s=s, n=n: proportional_inclusion_probs(s, n), 50)
        rows.append([f"4096, {n}", f"{unbiased:.3f}", "", "", f"{figures[f'4096, {n}']:.3f}", "", ""])
    return rows, figures


def conditional_poisson() -> list[list[str]]:
    rows = [["N, n", "fit", "1 draw", "10 draws", "exact marginals", "Manly"]]
    for N, n in SIZES:
        s, generator = power_law(N), torch.Generator().manual_seed(0)
        pi = collective_inclusion_probs(s, n, COHORT)
        design = ls.ConditionalPoisson().fit(pi)
        log_sizes = 4 * s.log()
        times = [
            milliseconds(lambda pi=pi: ls.ConditionalPoisson().fit(pi)),
            milliseconds(lambda d=design, g=generator: d.draw(1, g), 20),
            milliseconds(lambda d=design, g=generator: d.draw(10, g)),
            milliseconds(lambda x=log_sizes, n=n: successive_inclusion_probs(x, n), 3),
            milliseconds(lambda x=log_sizes, n=n: manly_inclusion_probs(x, n), 20),
        ]
        rows.append([f"{N}, {n}", *(f"{x:.2f}" for x in times)])
    return rows


def r_milliseconds(pi: Tensor) -> dict[str, float] | str:
    """Return the mean time of one draw by each function of R's package `sampling`, or why it is missing."""
    if shutil.which("Rscript") is None:
        return "no Rscript"
    script = f"""
        if (!requireNamespace('sampling', quietly=TRUE)) quit(status=3)
        pi <- scan('stdin', quiet=TRUE)
        clock <- function() proc.time()[['elapsed']]
        for (name in c({", ".join(map(repr, R_FUNCTIONS))})) {{
          draw <- getExportedValue('sampling', name); draw(pi); count <- 0; start <- clock()
          while (clock() < start + 0.2) {{ draw(pi); count <- count + 1 }}
          cat(name, 1000 * (clock() - start) / count, '\n')
        }}"""
    numbers = " ".join(repr(x) for x in pi.tolist())
    done = subprocess.run(["Rscript", "-e", script], input=numbers, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return "no package"
    if done.returncode:
        return "R fails"
    return {name: float(value) for name, value in map(str.split, done.stdout.splitlines())}


def against_r() -> list[list[str]]:
    rows = [["N, n", "design", "fit", "10 draws", "R, 10 draws", "ratio"]]
    for N, n in [(64, 13), (512, 103)]:
        pi = proportional_inclusion_probs(power_law(N), n)
        theirs, generator = r_milliseconds(pi), torch.Generator().manual_seed(0)
        for name, design in R_FUNCTIONS.items():
            fitted = design.fit(pi)
            fit = milliseconds(lambda d=design, pi=pi: d.fit(pi))
            draws = milliseconds(lambda d=fitted, g=generator: d.draw(10, g))
            cells = [theirs, ""] if isinstance(theirs, str) else _compare(10 * theirs[name], fit + draws)
            rows.append([f"{N}, {n}", repr(design), f"{fit:.2f}", f"{draws:.2f}", *cells])
    return rows


def _compare(theirs: float, ours: float) -> list[str]:
    return [f"{theirs:.1f}", f"{theirs / ours:.1f}"]


def one_round(design: ls.designs.Design, keep_ratio: float) -> float:
    """Return the CPU milliseconds of probabilities, fits and draws, client by client, for all layers of a round."""
    values = [spectrum(N) for N in LAYERS[:4]] * 5
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(5):
        start = time.process_time()
        for s in values:
            pi = collective_inclusion_probs(s, math.ceil(keep_ratio * len(s)), COHORT)
            fitted = design.fit(pi)
            for _ in range(COHORT):
                fitted.draw(1, generator)
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def rounds() -> tuple[list[list[str]], float]:
    rows = [["design", *(f"keep ratio {r}" for r in KEEP_RATIOS)]]
    table = {design: [one_round(design, r) for r in KEEP_RATIOS] for design in DESIGNS}
    rows += [[repr(design), *(f"{x:.0f}" for x in times)] for design, times in table.items()]
    return rows, max(table[ls.ConditionalPoisson()])


def show(title: str, rows: list[list[str]]) -> None:
    print(f"\n{title}\n", *aligned(rows), sep="\n")


def main() -> None:
    torch.set_num_threads(1)
    solvers, figures = against_the_printed_algorithms()
    show("Solvers against the paper's algorithms as printed, sign corrected (s_i = i^-1/2, C = 10), ms", solvers)
    show("Conditional Poisson sampling, and the marginals of successive sampling of s^4, ms", conditional_poisson())
    show("Designs against R's package `sampling`, which refits for each draw, ms", against_r())
    round_rows, round_ms = rounds()
    show("One round of a ResNet-18: 20 layers, 10 clients, Collective; CPU ms", round_rows)
    marginals = max(
        milliseconds(lambda s=s: successive_inclusion_probs(4 * s.log(), 103), 3)
        for s in (power_law(512), spectrum(512))
    )
    ratio = min(figures["512, 52"], figures["512, 205"])
    largest = max(figures["4096, 820"], figures["4096, 2048"])
    goals = [
        ["goal", "measured", "met"],
        ["Collective, N = 512: at least 1,000 x Algorithm 2", f"{ratio:.0f} x", str(ratio >= 1000)],
        ["Collective, N = 4096: at most 1 ms", f"{largest:.2f} ms", str(largest <= 1)],
        ["conditional Poisson, whole round: under 80 ms CPU", f"{round_ms:.0f} ms", str(round_ms < 80)],
        ["exact marginals, N = 512: under 150 ms", f"{marginals:.0f} ms", str(marginals < 150)],
    ]
    show("Goals", goals)


if __name__ == "__main__":
    main()
