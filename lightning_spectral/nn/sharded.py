"""What every sharded layer has: n singular terms instead of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.functional.factors import absorb, factorize


class SpectralShardedLayer(nn.Module):
    r"""A layer whose weight is :math:`W = U\,\mathrm{diag}(\omega)\,V` with n terms.

    Attributes:
        u: Parameter of shape ``(c_out, n)``; column i is :math:`\sqrt{s_i}\,u_i`.
        v: Parameter of shape ``(n, c_in k)``; row i is :math:`\sqrt{s_i}\,v_i^T`.
        omega: Buffer of shape ``(n,)``: the auxiliary multipliers, frozen while a client trains.
        bias: Parameter of shape ``(c_out,)`` or ``None``.

    Training and evaluation do the same. The layer holds ``n (c_out + c_in k)`` trainable values and the bias.
    """

    u: nn.Parameter
    v: nn.Parameter
    omega: Tensor
    bias: nn.Parameter | None
    weight_shape: tuple[int, ...]

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        num_terms: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        rows = weight_shape[0]
        columns = int(torch.Size(weight_shape[1:]).numel())
        check_num_terms(num_terms, min(rows, columns))
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight_shape = weight_shape
        self.u = nn.Parameter(torch.zeros(rows, num_terms, **where))
        self.v = nn.Parameter(torch.zeros(num_terms, columns, **where))
        self.register_buffer("omega", torch.ones(num_terms, **where))
        self.register_parameter("bias", nn.Parameter(torch.zeros(rows, **where)) if bias else None)

    @property
    def num_terms(self) -> int:
        """Number n of singular terms held."""
        return self.v.shape[0]

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, for modules that read it; differentiable, shape ``weight_shape``."""
        return ((self.u * self.omega) @ self.v).view(self.weight_shape)

    @torch.no_grad()
    def load_terms(self, u: Tensor, v: Tensor, multipliers: Tensor) -> None:
        """Overwrite the terms in place: same parameters, new values, so optimizers and hooks stay valid.

        Args:
            u: Shape ``(c_out, n)``, singular values absorbed.
            v: Shape ``(n, c_in k)``, singular values absorbed.
            multipliers: Shape ``(n,)``.
        """
        self.u.copy_(u)
        self.v.copy_(v)
        self.omega.copy_(multipliers)

    @torch.no_grad()
    def load_dense(self, weight: Tensor, bias: Tensor | None) -> None:
        """Load the n largest terms of a dense weight with multipliers 1: its best approximation of rank n."""
        u, v = absorb(factorize(weight), weight.dtype)
        self.load_terms(u[:, : self.num_terms], v[: self.num_terms], torch.ones_like(self.omega))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)


def check_num_terms(num_terms: int, num_singular: int) -> None:
    """Raise ``ValueError`` unless ``1 <= num_terms <= num_singular``."""
    if not 1 <= num_terms <= num_singular:
        raise ValueError(f"`num_terms` must be in [1, N={num_singular}], got {num_terms}.")
