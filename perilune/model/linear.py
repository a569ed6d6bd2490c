"""Linear maps as the model needs them: bias-free, several from one input in one product."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A bias-free nn.Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def project(x: Tensor, *layers: nn.Linear | tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
    """Every layer applied to the same x [T, D]; of a tuple of layers, the results side by side in one tensor.

    In training as one product over the concatenated weights: the gradient of x is then one product too, instead of
    one per layer and their sums. Without gradients the weights stay where they are.
    """
    groups = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    if not torch.is_grad_enabled():
        return tuple(torch.cat([layer(x) for layer in g], -1) if len(g) > 1 else g[0](x) for g in groups)
    weight = torch.cat([layer.weight for g in groups for layer in g])
    return F.linear(x, weight).split([sum(layer.out_features for layer in g) for g in groups], dim=-1)


class Weight(nn.Module):
    """Holds a bare norm weight, so that its name ends in `.weight` as in the release."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
