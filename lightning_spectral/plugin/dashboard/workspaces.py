"""Pages of a wandb project as code: a short specification, and the workspace made from it.

    python -m lightning_spectral.plugin.dashboard.workspaces ENTITY PROJECT --metric val_acc --publish

Without ``--publish`` the specification is printed as JSON and nothing is sent. Publishing is the only thing here that
needs an account and the network; for a server of your own, set ``WANDB_BASE_URL``. Needs the ``dashboards`` extra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_spectral.errors import from_extra

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

ROUND = "fl/round"
BYTES = "fl/bytes_total"
STRATEGY = "federation.algorithm.strategy.name"


@dataclass(frozen=True)
class Lines:
    """Curves of some metrics in one panel, over another metric."""

    metrics: tuple[str, ...]
    over: str = ROUND


@dataclass(frozen=True)
class Rows:
    """The last table with a given name in `RoundDashboard`."""

    name: str


@dataclass(frozen=True)
class Bins:
    """One histogram of `RoundDashboard`, over the rounds."""

    name: str


@dataclass(frozen=True)
class Pictures:
    """Pictures of `RoundDashboard`, with a slider over the rounds."""

    names: tuple[str, ...]


Panel: TypeAlias = Lines | Rows | Bins | Pictures


@dataclass(frozen=True)
class View:
    """One page.

    Args:
        name: Title of the page.
        sections: Panels by title of their section, in order.
        group_by: Key of the config, with dots, with one curve for each of its values; ``None`` for one curve per run.
    """

    name: str
    sections: Mapping[str, Sequence[Panel]]
    group_by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The page as JSON: each panel has its kind, under ``"panel"``, and its fields."""
        sections = {
            title: [{"panel": type(panel).__name__.lower(), **asdict(panel)} for panel in panels]
            for title, panels in self.sections.items()
        }
        return {"name": self.name, "group_by": self.group_by, "sections": sections}


def run_view(metric: str, model: str = "", histograms: Sequence[str] = ()) -> View:
    """One run: whether it learns, what it costs, how well its sub-models represent the weights, who its clients were.

    wandb adds sections of its own for everything else that is logged.

    Args:
        metric: A validation metric, as the model's module logs it, such as ``"val_acc"``.
        model: Which of several models; empty if there is only one.
        histograms: Histograms of `RoundDashboard` to show, such as ``"singular_values/net.2"``.

    Example:
        >>> print(run_view("val_acc").sections["Accuracy"][1])
        Lines(metrics=('over_bytes/val_acc',), over='fl/bytes_total')
    """
    own = f"{model}/" if model else ""
    ranks = ("entropy_rank", "participation_rank", "stable_rank")
    return View(
        f"One run: {own}{metric}",
        {
            "Accuracy": [Lines((f"{own}{metric}",)), *_over_bytes(own, metric), Lines((f"{own}fl/loss",))],
            "Bytes": [Lines((f"{own}fl/bytes_down", f"{own}fl/bytes_up")), Lines((BYTES,))],
            "Spectra": [
                Lines((f"{own}fl/discrepancy", f"{own}fl/client_error")),
                Lines((f"{own}fl/expected_coverage", f"{own}fl/terms_visited")),
                Lines(tuple(f"{own}fl/{rank}" for rank in ranks)),
                Pictures((f"{own}pictures/spectra",)),
                *(Bins(f"{own}{name}") for name in histograms),
                Rows(f"{own}tables/layers"),
            ],
            "Clients": [
                Pictures((f"{own}pictures/partition",)),
                Lines((f"{own}fl/clients", f"{own}fl/clients_left_out")),
                Rows(f"{own}tables/clients"),
                Rows(f"{own}tables/keep_ratios"),
            ],
        },
    )


def comparison_view(metric: str, model: str = "", group_by: str = STRATEGY) -> View:
    """Many runs: accuracy by round and by byte, and how evenly clients are served, with one curve for each group.

    Args:
        metric: A validation metric.
        model: Which of several models; empty if there is only one.
        group_by: Key of the config; its parts may be separated by dots, as in wandb, or by slashes, as in a report.
    """
    own = f"{model}/" if model else ""
    clients = f"{own}fl/clients/{metric}"
    return View(
        f"Comparison: {own}{metric}",
        {
            "Accuracy": [Lines((f"{own}{metric}",)), *_over_bytes(own, metric)],
            "Sub-models": [Lines((f"{own}fl/discrepancy",)), Lines((f"{own}fl/terms_visited",))],
            "Fairness": [Lines((f"{clients}/std",)), Lines((f"{clients}/lowest_decile",)), Lines((f"{clients}/jain",))],
        },
        group_by.replace("/", "."),
    )


def _over_bytes(own: str, metric: str) -> list[Panel]:
    return [Lines((f"over_bytes/{own}{metric}",), BYTES)]


def workspace(view: View, entity: str, project: str) -> Workspace:
    """Make the workspace of a page; nothing is sent until its ``save`` is called."""
    with from_extra("dashboards"):
        from wandb_workspaces import workspaces as ws

    sections = [
        ws.Section(name=title, panels=[_panel(panel, view.group_by) for panel in panels], is_open=True)
        for title, panels in view.sections.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=view.name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=ROUND, max_runs=50),
        auto_generate_panels=True,
    )


def _panel(panel: Panel, group_by: str | None) -> Any:
    from wandb_workspaces.reports import v2 as wr

    if isinstance(panel, Rows):
        return wr.WeavePanelSummaryTable(table_name=panel.name)
    if isinstance(panel, Pictures):
        return wr.MediaBrowser(media_keys=list(panel.names))
    if isinstance(panel, Bins):  # wandb draws a histogram over rounds as a heat map, in a panel of this type
        return wr.LinePlot(title=panel.name, x=ROUND, y=[panel.name])
    grouping: dict[str, Any] = {}
    if group_by is not None:
        grouping = {"groupby": wr.Config(group_by), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    return wr.LinePlot(title=", ".join(panel.metrics), x=panel.over, y=list(panel.metrics), **grouping)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both pages as one JSON list, or publish them."""
    parser = argparse.ArgumentParser(
        "python -m lightning_spectral.plugin.dashboard.workspaces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        print(json.dumps([view.as_dict() for view in views], indent=2))


if __name__ == "__main__":
    main()
