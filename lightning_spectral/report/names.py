"""What the report looks for in a run: the names under which callbacks log, in one place."""

from __future__ import annotations

ROUND = "fl/round"
BYTES = ("fl/bytes_down", "fl/bytes_up", "fl/bytes_measuring")  # all that travels in a round
VISITED = "fl/terms_visited"
EXPECTED_COVERAGE = "fl/expected_coverage"
SECONDS = "fl/seconds_"  # before the name of a stage

# Statistics of a metric over clients: ``fl/clients/<metric>/<statistic>``. The first of each that a run has is drawn.
CLIENTS = "fl/clients/"
CENTRE = ("mean", "median")
LOW = ("p10", "worst_decile", "worst10", "worst_10", "min", "worst")
HIGH = ("p90", "best_decile", "best10", "best_10", "max", "best")

# Spectra: a histogram or a table for each layer, ``fl/singular_values/<layer>``, or one table for all layers.
SPECTRUM = "fl/singular_values/"
SPECTRA_TABLE = "fl/spectra"
LAYER_COLUMN, SINGULAR_VALUE_COLUMN = "layer", "singular_value"

CLIENT_TABLE = "fl/client_table"

BOOKKEEPING = frozenset({"epoch", "step", "trainer/global_step"})
# Settings in which repetitions of one experiment differ, by the last part of their names.
REPETITION = frozenset({"seed", "seed_everything", "random_state", "fingerprint", "partition"})
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "nll", "wer")
HIGHER_IS_BETTER = ("acc", "f1", "auc", "auroc", "iou", "precision", "recall")

# What to switch on where a section has nothing to show.
SWITCH_ON = {
    "bytes": "No bytes were logged: `FederatedModule` logs `fl/bytes_down` and `fl/bytes_up` to every logger.",
    "clients": "No per-client evaluation in these runs: evaluate single clients, and log `fl/clients/<metric>/...`.",
    "spectra": "No singular values in these runs: add `RoundDashboard()` to the callbacks, and use a `WandbLogger`.",
    "coverage": "No coverage in these runs: `SpectralSharding` logs `fl/terms_visited`, and `SpectralDiagnostics()` "
    "what was expected.",
    "seconds": "No stage was timed: `FederatedModule` logs `fl/seconds_...` to every logger.",
    "table": "No client table in these runs: add `RoundDashboard()` to the callbacks, and use a `WandbLogger`.",
}
