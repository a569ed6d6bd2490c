"""Linear maps as the model needs them: bias-free, several from one input in one product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A bias-free nn.Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Every layer applied to the same x [T, D].

    In training as one product over the concatenated weights: the gradient of x is then one product too, instead of
    one per layer and their sums. Without gradients the weights stay where they are.
    """
    if not torch.is_grad_enabled():
        return tuple(layer(x) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])
    return F.linear(x, weight).split([layer.out_features for layer in layers], dim=-1)


class Weight(nn.Module):
    """Holds a bare norm weight, so that its name ends in `.weight` as in the release."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
