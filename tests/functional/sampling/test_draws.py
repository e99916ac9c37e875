"""What the draws of all designs have in common."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional import (
    draw_brewer,
    draw_conditional_poisson,
    draw_from_support,
    draw_successive,
    draw_systematic,
    minimum_support,
)

PI = torch.full((10,), 0.4)
CHUNKED: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "conditional Poisson": lambda size, generator: draw_conditional_poisson(PI, 4, size, generator),
    "successive": lambda size, generator: draw_successive(torch.zeros(10), 4, size, generator),
    "Brewer": lambda size, generator: draw_brewer(PI, size, generator),
    "shuffled systematic": lambda size, generator: draw_systematic(PI, size, generator, shuffled=True),
}
OTHERS = {
    "systematic": lambda size, generator: draw_systematic(PI, size, generator),
    "from a list": lambda size, generator: draw_from_support(minimum_support(PI), size, generator),
}


@pytest.mark.parametrize("chunk", [1, 25])
@pytest.mark.parametrize("draw", CHUNKED.values(), ids=CHUNKED)
def test_draws_in_chunks_are_complete(draw, chunk, monkeypatch):
    for module in ("open_terms", "conditional_poisson"):
        monkeypatch.setattr(f"lightning_spectral.functional.sampling.{module}.CHUNK", chunk)
    draws = draw(7, torch.Generator().manual_seed(0))
    assert draws.shape == (7, 4)
    assert (draws.diff(dim=1) > 0).all()
    assert len(set(map(tuple, draws.tolist()))) > 1


@pytest.mark.parametrize("draw", [*CHUNKED.values(), *OTHERS.values()], ids=[*CHUNKED, *OTHERS])
def test_no_samples_is_an_error(draw):
    with pytest.raises(ValueError, match="`num_samples` must be at least 1, got 0"):
        draw(0, torch.Generator())
