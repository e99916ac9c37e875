"""How far the average of a cohort's sub-models is from the weight: for every strategy and two ways to draw.

    python benchmarks/discrepancy.py

prints E||W - W_bar||^2 / ||W||^2 before any client trains, for ten clients of keep ratio 0.1 or 0.2 and for the papers'
mix (six of 0.2, four of 0.4), and draws the figure of the page on strategies. The last table is that of the mix if its
clients have 2 to 30 examples. The values come from exact formulas, without sampling. The trained spectrum is that of an
MLP's middle layer after 300 steps on scikit-learn's digits.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.functional.figures import cohort_discrepancy, coordinated_discrepancy, group_discrepancy
from lightning_spectral.functional.sampling.cohorts import coordinated_multipliers
from lightning_spectral.functional.spectra import factorize, num_terms_for
from lightning_spectral.report.printed import GRID, legend_above, look, printed
from lightning_spectral.tables import aligned

Weights = list[list[float]]

COHORT = 10
EQUAL: Weights = [[1.0] * 6, [1.0] * 4]  # examples of the mix's clients, by keep ratio
UNEQUAL: Weights = [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [16.0, 20.0, 25.0, 30.0]]
STRATEGIES: dict[str, ls.sharding.ShardingStrategy] = {
    "TopN": ls.TopN(),
    "PriSM": ls.PriSM(),
    "PriSM + Wallenius": ls.PriSM(compensation="wallenius"),
    "Unbiased": ls.Unbiased(),
    "Schatten (p = 4)": ls.sharding.Schatten(),
    "Collective": ls.Collective(),
}
MIXED = {"Collective, the paper's recipe": "group", "Collective, joint": "joint", "Collective, best": "best"}
METHODS = [*STRATEGIES, "Unbiased, coordinated", "Collective, coordinated", *MIXED]
OFFSETS = {name: 0.8 * (index / (len(METHODS) - 1) - 0.5) for index, name in enumerate(METHODS)}
# methods that draw differently have the same colour, but hollow markers
LOOKS = {name: look(index) for index, name in enumerate(STRATEGIES)}
LOOKS |= {f"{name}, coordinated": LOOKS[name] for name in ("Unbiased", "Collective")}
LOOKS |= {
    name: look(len(STRATEGIES) + index)._replace(colour=LOOKS["Collective"].colour) for index, name in enumerate(MIXED)
}


def trained_spectrum() -> Tensor:
    torch.manual_seed(0)
    pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(pixels.float() / 16), digits).backward()
        optimizer.step()
    return factorize(net[2].weight).s


def spectra() -> dict[str, Tensor]:
    gaussian = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    index = torch.arange(1, 65).double()
    return {
        "1/i": 1 / index,
        "i^-0.5": index**-0.5,
        "Gaussian 64x576": factorize(gaussian).s,
        "trained": trained_spectrum(),
    }


def independent(strategy: ls.sharding.ShardingStrategy, s: Tensor, keep_ratio: float) -> float:
    probs, multipliers = strategy(s, num_terms_for(len(s), keep_ratio), COHORT)
    return float(group_discrepancy(s, probs, multipliers, COHORT) / (s**2).sum())


def coordinated(strategy: ls.sharding.ShardingStrategy, s: Tensor, keep_ratio: float) -> float:
    probs, _ = strategy(s, num_terms_for(len(s), keep_ratio), COHORT)
    return float(coordinated_discrepancy(s, probs, coordinated_multipliers(probs, COHORT), COHORT) / (s**2).sum())


def mixed(
    strategy: ls.sharding.ShardingStrategy, s: Tensor, weights: Weights = EQUAL, planned: Weights | None = None
) -> float:
    """Return the discrepancy of the papers' mix, planned for the clients' weights unless others are given."""
    groups = strategy.for_groups(s, [num_terms_for(len(s), r) for r in (0.2, 0.4)], planned or weights)
    rows = [group for group, own in zip(groups, weights, strict=True) for _ in own]
    probs, multipliers = (torch.stack(column) for column in zip(*rows, strict=True))
    flat = torch.tensor([weight for own in weights for weight in own], dtype=torch.float64)
    return float(cohort_discrepancy(s, probs, multipliers, flat / flat.sum()) / (s**2).sum())


def rows(all_spectra: dict[str, Tensor]) -> dict[str, dict[str, list[float]]]:
    """Return the relative discrepancy on every spectrum, by setup and method."""
    tables: dict[str, dict[str, list[float]]] = {}
    for r in (0.1, 0.2):
        table = {
            name: [independent(strategy, s, r) for s in all_spectra.values()] for name, strategy in STRATEGIES.items()
        }
        for name in ("Unbiased", "Collective"):
            table[f"{name}, coordinated"] = [coordinated(STRATEGIES[name], s, r) for s in all_spectra.values()]
        tables[f"keep ratio {r}, {COHORT} clients"] = table
    recipes: dict[str, ls.sharding.ShardingStrategy] = {"Unbiased": ls.Unbiased()}
    recipes |= {name: ls.Collective(cohort=cohort) for name, cohort in MIXED.items()}  # type: ignore[arg-type]
    tables["6 clients of 0.2, 4 of 0.4"] = {n: [mixed(x, s) for s in all_spectra.values()] for n, x in recipes.items()}
    return tables


def unequal_rows(all_spectra: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the same for the papers' mix of clients with 2 to 30 examples, by method."""
    table = {}
    for name, cohort in MIXED.items():
        strategy = ls.Collective(cohort=cohort)  # type: ignore[arg-type]
        table[name] = [mixed(strategy, s, UNEQUAL) for s in all_spectra.values()]
        if cohort != "group":
            ignored = [mixed(strategy, s, UNEQUAL, planned=EQUAL) for s in all_spectra.values()]
            table[f"{name}, planned as if equal"] = ignored
    return table


def plot(tables: dict[str, dict[str, list[float]]], names: list[str], path: Path) -> None:
    """Draw dots: a row for each method of each spectrum."""
    with printed(path, 9.5, 6.0) as figure:
        for axes, (title, table) in zip(figure.subplots(1, len(tables), sharey=True), tables.items(), strict=True):
            for method, values in table.items():
                colour, marker, _ = LOOKS[method]
                rows = [spectrum + OFFSETS[method] for spectrum in range(len(names))]
                hollow = {"markerfacecolor": "none"} if "coordinated" in method else {}
                axes.plot(values, rows, ls="", color=colour, marker=marker, label=method, markersize=6, **hollow)
            for between in range(1, len(names)):
                axes.axhline(between - 0.5, color=GRID)
            axes.grid(visible=False, axis="y")
            axes.set(title=title, xscale="log", ylim=(len(names) - 0.5, -0.5))
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(axis="y", length=0)
        figure.supxlabel(r"$E\|W - \bar W\|^2 / \|W\|^2$")
        legend_above(figure, 4)


def main(show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/discrepancy.png"), help="figure (%(default)s)")
    path: Path = parser.parse_args().output
    path.parent.mkdir(parents=True, exist_ok=True)
    all_spectra = spectra()
    tables = rows(all_spectra)
    for title, table in {**tables, "the mix, 2 to 30 examples": unequal_rows(all_spectra)}.items():
        body = [(name, *(f"{value:.4f}" for value in values)) for name, values in table.items()]
        show("\n".join(aligned([(title, *all_spectra), *body])) + "\n")
    plot(tables, list(all_spectra), path)


if __name__ == "__main__":
    main()
