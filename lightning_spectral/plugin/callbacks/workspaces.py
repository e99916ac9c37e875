"""Pages of a wandb project as code: a short specification, and the workspace made from it.

    python -m lightning_spectral.plugin.callbacks.workspaces ENTITY PROJECT --metric val_acc --publish

Without ``--publish`` the specification is printed as JSON and nothing is sent. Publishing is the only thing here that
needs an account and the network; for a server of your own, set ``WANDB_BASE_URL``. Needs the ``dashboards`` extra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_spectral.errors import from_extra

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

ROUND = "fl/round"
BYTES = "fl/bytes_total"
STRATEGY = "federation.algorithm.strategy.name"
# What a panel shows is under "panel": "lines" (curves of metrics over another metric), "rows" (the last table of that
# name in `RoundDashboard`), "bins" (one of its histograms over the rounds) or "pictures" (of it, with a slider).
Panel: TypeAlias = dict[str, Any]
View: TypeAlias = dict[str, Any]  # one page: "name", "group_by" and "sections", panels by title of their section


def _lines(*metrics: str, over: str = ROUND) -> Panel:
    return {"panel": "lines", "metrics": list(metrics), "over": over}


def _accuracy(metric: str) -> list[Panel]:
    return [_lines(metric), _lines(f"over_bytes/{metric}", over=BYTES)]


def run_view(metric: str, model: str = "", histograms: Sequence[str] = ()) -> View:
    """One run: whether it learns, what it costs, how well its sub-models represent the weights, who its clients were.

    wandb adds sections of its own for everything else that is logged.

    Args:
        metric: A validation metric, as the model's module logs it, such as ``"val_acc"``.
        model: Which of several models; empty if there is only one.
        histograms: Histograms of `RoundDashboard` to show, such as ``"singular_values/net.2"``.
    """
    own = f"{model}/" if model else ""
    sections = {
        "Accuracy": [*_accuracy(own + metric), _lines(f"{own}fl/loss")],
        "Bytes": [_lines(f"{own}fl/bytes_down", f"{own}fl/bytes_up"), _lines(BYTES)],
        "Spectra": [
            _lines(f"{own}fl/discrepancy", f"{own}fl/client_error"),
            _lines(f"{own}fl/expected_coverage", f"{own}fl/terms_visited"),
            _lines(*(f"{own}fl/{kind}_rank" for kind in ("entropy", "participation", "stable"))),
            {"panel": "pictures", "names": [f"{own}pictures/spectra"]},
            *({"panel": "bins", "name": f"{own}{name}"} for name in histograms),
            {"panel": "rows", "name": f"{own}tables/layers"},
        ],
        "Clients": [
            {"panel": "pictures", "names": [f"{own}pictures/partition"]},
            _lines(f"{own}fl/clients", f"{own}fl/clients_left_out"),
            {"panel": "rows", "name": f"{own}tables/clients"},
            {"panel": "rows", "name": f"{own}tables/keep_ratios"},
        ],
    }
    return {"name": f"One run: {own}{metric}", "group_by": None, "sections": sections}


def comparison_view(metric: str, model: str = "", group_by: str = STRATEGY) -> View:
    """Many runs: accuracy by round and by byte, and how evenly clients are served, with one curve for each group.

    Args:
        metric: A validation metric.
        model: Which of several models; empty if there is only one.
        group_by: Key of the config; its parts may be separated by dots, as in wandb, or by slashes, as in a report.
    """
    own = f"{model}/" if model else ""
    sections = {
        "Accuracy": _accuracy(own + metric),
        "Sub-models": [_lines(f"{own}fl/discrepancy"), _lines(f"{own}fl/terms_visited")],
        "Fairness": [_lines(f"{own}fl/clients/{metric}/{spread}") for spread in ("std", "lowest_decile", "jain")],
    }
    return {"name": f"Comparison: {own}{metric}", "group_by": group_by.replace("/", "."), "sections": sections}


def workspace(view: View, entity: str, project: str) -> Workspace:
    """Make the workspace of a page; nothing is sent until its ``save`` is called."""
    with from_extra("dashboards"):
        from wandb_workspaces import workspaces as ws
        from wandb_workspaces.reports import v2 as wr

    grouping: dict[str, Any] = {}
    if view["group_by"] is not None:
        grouping = {"groupby": wr.Config(view["group_by"]), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    draw: dict[str, Callable[[Panel], Any]] = {
        "lines": lambda one: wr.LinePlot(title=", ".join(one["metrics"]), x=one["over"], y=one["metrics"], **grouping),
        "rows": lambda one: wr.WeavePanelSummaryTable(table_name=one["name"]),
        "bins": lambda one: wr.LinePlot(title=one["name"], x=ROUND, y=[one["name"]]),  # wandb draws it as a heat map
        "pictures": lambda one: wr.MediaBrowser(media_keys=one["names"]),
    }
    drawn = {title: [draw[one["panel"]](one) for one in panels] for title, panels in view["sections"].items()}
    sections = [ws.Section(name=title, panels=panels, is_open=True) for title, panels in drawn.items()]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=view["name"],
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=ROUND, max_runs=50),
        auto_generate_panels=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both pages as one JSON list, or publish them."""
    name, layout = "python -m lightning_spectral.plugin.callbacks.workspaces", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=layout)
    parser.add_argument("entity", help="user or team")
    parser.add_argument("project")
    parser.add_argument("--metric", default="val_acc", help="metric of validation (default: %(default)s)")
    parser.add_argument("--model", default="", help="which of several models")
    parser.add_argument("--group-by", default=STRATEGY, help="key of the config (default: %(default)s)")
    parser.add_argument("--histogram", action="append", default=[], help="one to show, such as singular_values/net.2")
    parser.add_argument("--publish", action="store_true", help="send them to the server")
    options = parser.parse_args(arguments)
    page = options.metric, options.model
    views = [run_view(*page, options.histogram), comparison_view(*page, options.group_by)]
    if options.publish:
        for view in views:
            print(workspace(view, options.entity, options.project).save().url)
    else:
        print(json.dumps(views, indent=2))


if __name__ == "__main__":
    main()
