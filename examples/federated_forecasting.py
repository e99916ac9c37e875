"""N-BEATS of pytorch-forecasting on the made-up load of thirty households, each of which is a client.

    python examples/federated_forecasting.py

Needs pytorch-forecasting, whose model is a LightningModule of its own and trains unchanged.
"""

import argparse

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import NBeats, TimeSeriesDataSet

import lightning_spectral as ls

HOUSEHOLDS, HOURS, KEPT_BACK, PAST, AHEAD = 30, 240, 48, 48, 6


def loads() -> pd.DataFrame:
    """A day's rhythm, with a peak of its own for each household, and noise."""
    rng, hours = np.random.default_rng(0), np.arange(HOURS)
    peaks = rng.uniform(0, 24, (HOUSEHOLDS, 1))
    load = 1 + np.cos(2 * np.pi * (hours - peaks) / 24) + 0.1 * rng.standard_normal((HOUSEHOLDS, HOURS))
    index = {"household": np.repeat(np.arange(HOUSEHOLDS), HOURS), "hour": np.tile(hours, HOUSEHOLDS)}
    return pd.DataFrame({**index, "load": load.ravel()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    pl.seed_everything(0, verbose=False)
    table = loads()
    columns = {"time_idx": "hour", "target": "load", "group_ids": ["household"]}
    lengths = {"max_encoder_length": PAST, "max_prediction_length": AHEAD, "time_varying_unknown_reals": ["load"]}
    train = TimeSeriesDataSet(table[table.hour < HOURS - KEPT_BACK], **columns, **lengths)
    val = TimeSeriesDataSet.from_dataset(train, table, min_prediction_idx=HOURS - KEPT_BACK)

    module = NBeats.from_dataset(train, learning_rate=1e-2, optimizer="sgd", widths=[64, 64], log_interval=-1)
    algorithm = ls.SpectralSharding(keep_ratio={0.2: 0.5, 0.5: 0.5})
    model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=6)
    households = ls.partition.NaturalPartitioner(train.decoded_index["household"].tolist())
    later = val.to_dataloader(train=False, batch_size=256)
    data = ls.FederatedDataModule(train, households, val=later, batch_size=32, collate_fn=train._collate_fn)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=rounds, callbacks=[ls.RoundProgressBar()], **quiet)
    trainer.fit(model, data)
    print(f"mean absolute error {trainer.callback_metrics['val_MAE']:.3f}; the noise alone causes about 0.08")


if __name__ == "__main__":
    main()
