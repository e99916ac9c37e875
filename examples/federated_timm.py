"""Any image model from timm on twenty clients that hold a fifth or two fifths of it.

    python examples/federated_timm.py --model resnet10t

Needs timm and scikit-learn, whose digits are the images. ``timm.create_model(..., pretrained=True)`` fine-tunes.
"""

import argparse

import lightning.pytorch as pl
import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, random_split

import lightning_spectral as ls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet10t", help="one of timm.list_models()")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 8 - 1).float().view(-1, 1, 8, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    train, val = random_split(TensorDataset(images, torch.tensor(digits)), [1500, 297])

    net = timm.create_model(args.model, num_classes=10, in_chans=1)
    module = ls.models.LitClassifier(net, num_classes=10, lr=0.05)
    module.example_input_array = images[:2]  # a pass shows in which order layers run
    algorithm = ls.SpectralSharding(keep_ratio={0.2: 0.6, 0.4: 0.4})
    model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=5, local_epochs=2)
    data = ls.FederatedDataModule(train, ls.IIDPartitioner(num_clients=20), val=val, batch_size=15, drop_last=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=args.rounds, callbacks=[ls.RoundProgressBar()], **quiet)
    trainer.fit(model, data)
    print(f"{trainer.callback_metrics['val_accuracy']:.1%} of the test images")


if __name__ == "__main__":
    main()
