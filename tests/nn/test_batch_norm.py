import torch
from torch import nn

from lightning_spectral.nn import use_batch_statistics


def test_evaluation_uses_the_batchs_statistics_and_the_original_keeps_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    copied = use_batch_statistics(module).eval()
    assert not list(copied.buffers())
    assert len(list(module.buffers())) == 3
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    hidden = module[0](x)
    expected = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + module[1].eps).sqrt()
    torch.testing.assert_close(copied(x), expected)
    assert copied(x).mean(0).abs().max() < 1e-5
