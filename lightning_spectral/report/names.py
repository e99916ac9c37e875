"""The names that the report looks for in a run, which are those under which callbacks log."""

ROUND = "fl/round"
BYTES = ("fl/bytes_down", "fl/bytes_up", "fl/bytes_measuring")  # all that is sent in a round
VIRTUAL_SECONDS = "fl/virtual_seconds"  # until the last client of a round is done
VISITED = "fl/terms_visited"
EXPECTED_COVERAGE = "fl/expected_coverage"
MOVED = "fl/probs_moved"
BITS = {  # of Zampling, with the titles of their panels
    "fl/bit_entropy": "entropy of a bit",
    "fl/bits_agreed": "bits on which all clients agree",
    "fl/probs_settled": "probabilities that are 0 or 1",
    "fl/bit_disagreement": "bits in which two clients differ",
    MOVED: "how far a client moves a probability",
}
SAMPLING_GAP = "/sampling_gap"  # after the name of a metric, of `SampledNetworks`
SECONDS = "fl/seconds_"  # before the name of a stage

OVER_BYTES = "over_bytes/"  # copies of evaluation metrics, for loggers that draw them over bytes

# Statistics of a metric over clients, of `ClientEvaluation`: ``fl/clients/<metric>/<statistic>``.
CLIENTS = "fl/clients/"
LOW, MIDDLE, HIGH = "lowest_decile", "mean", "highest_decile"

# Of `RoundDashboard`; with several models, all begin with the model's name.
SPECTRUM = "singular_values/"  # a histogram for each layer
TABLES = "tables/"
CLIENT_TABLE = f"{TABLES}clients"
HISTOGRAMS = "histograms"  # the file that has all of them

BOOKKEEPING = frozenset({"epoch", "step", "trainer/global_step", "hp_metric"})
# Settings in which repetitions of one experiment differ, by the last part of their names.
REPETITION = frozenset({"seed", "seed_everything", "random_state", "fingerprint", "partition"})
ALGORITHM = "algorithm"  # the setting that names it, with several models of each
BASELINE = "FedAvg"  # what others are compared with
SWEEP = "sweep/"  # before the names of settings that a sweep varied
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "nll", "wer")
AFTER_TRAINING = "test"  # how names of metrics begin that are evaluated once, at the end
HIGHER_IS_BETTER = ("acc", "f1", "auc", "auroc", "iou", "precision", "recall")

# What to switch on if a section has nothing to show.
SWITCH_ON = {
    "bytes": "No bytes were logged: `FederatedModule` logs `fl/bytes_down` and `fl/bytes_up` to every logger.",
    "clients": "No evaluation of single clients in these runs: hold out examples with "
    "`FederatedDataModule(client_val_fraction=0.2)`, and add `ClientEvaluation()` to the callbacks.",
    "spectra": "No singular values in these runs: add `RoundDashboard()` to the callbacks, and use a `WandbLogger`, "
    "a `CSVLogger` or a `TensorBoardLogger`.",
    "coverage": "No coverage in these runs: `SpectralSharding` logs `fl/terms_visited`, and `SpectralDiagnostics()` "
    "what was expected.",
    "bits": "No bits in these runs: `Zampling` logs `fl/bit_entropy` and the like, and `SampledNetworks()` logs how "
    "much worse sampled networks are than the expected one.",
    "seconds": "No stage was timed: `FederatedModule` logs `fl/seconds_...` to every logger.",
    "table": "No client table in these runs: add `RoundDashboard()` to the callbacks, and use a `WandbLogger`, "
    "a `CSVLogger` or a `TensorBoardLogger`.",
}

EQUAL_CURVES = (
    "While `fl/inclusion_entropy` is 0, every client holds the largest terms and strategies do not differ; after a "
    "spectral start, that is the rule. Compare strategies with `spectral_start=None`."
)
FLAT_CURVES = (
    "If that is chance, nothing has been learned yet: train longer, with a larger learning rate, or with a spectral "
    "start; `fl/loss`, of clients, says whether they learn at all. Pretrained networks may begin where they end."
)
FLAT_BASELINE = "FedAvg is among them, so sharding is not the reason."
DIVERGED = "Training diverged: lower the clients' learning rate, or bound their updates."
