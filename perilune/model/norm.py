"""The RMSNorm layer: a weight, an eps, the op."""

import torch
from torch import Tensor, nn

from perilune.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """y = cast(x / rms(x)) · weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
