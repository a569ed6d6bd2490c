"""Products by group where the first groups' weights are parameters and the others' lie in slots (report §5.2.1).

    out[n] = x[n] W_g      W_g = own[g] for g < L, lent[g − L] after;   rows n of group g: ends[g−1] ≤ n < ends[g]

torch's grouped product takes one array of weights and rows from 0 on. It computes the first L groups of all N rows and
leaves the others untouched; these are filled in place: by a loop on the host (the reference, any dtype), or by one
Triton kernel that reads `ends` on the device. Where groups have few rows, one kernel walks own and lent groups alike.
Nothing is copied and nothing is waited for. `ends[-1]` is N: every row belongs to a group.
Legend: N rows, D and F widths, L own groups, B slots, G = L + B; ends int32 [G].
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 512  # rows a group


def product(x_ND: Tensor, own_LDF: Tensor, lent_BDF: Tensor, ends_G: Tensor) -> Tensor:
    """x [N, D], own [L, D, F], lent [B, D, F] (any strides) -> [N, F]."""
    local = own_LDF.shape[0]
    if x_ND.is_cuda and lent_BDF.shape[0] and x_ND.shape[0] < FEW * local:
        from perilune.parallel.products_triton import described, grouped  # Triton is absent from CPU installs

        if described(x_ND, own_LDF, lent_BDF):
            return grouped(x_ND, own_LDF, lent_BDF, ends_G)
    out = _home(x_ND, own_LDF, ends_G[:local])
    if lent_BDF.shape[0]:
        _lent(out, x_ND, lent_BDF, ends_G[local - 1 :])
    return out


def weight_gradients(x_ND: Tensor, dy_NF: Tensor, lent_BDF: Tensor, ends_G: Tensor, local: int) -> Tensor:
    """Gradients of the own weights [L, D, F]; those of used slots are written into `lent_BDF`, idle ones are not."""
    if lent_BDF.shape[0]:
        _lent_gradients(lent_BDF, x_ND, dy_NF, ends_G[local - 1 :])
    ends = ends_G[:local]
    if x_ND.dtype == torch.float64:
        return torch.stack([x_ND[i:j].T @ dy_NF[i:j] for i, j in itertools.pairwise([0, *ends.tolist()])])
    return F.grouped_mm(x_ND.T, dy_NF, offs=ends)


def _home(x_ND: Tensor, own_LDF: Tensor, ends_L: Tensor) -> Tensor:
    if x_ND.dtype != torch.float64:  # which torch's grouped product refuses
        return F.grouped_mm(x_ND, own_LDF, offs=ends_L)
    out = x_ND.new_empty(x_ND.shape[0], own_LDF.shape[2])
    for weight, (i, j) in zip(own_LDF, itertools.pairwise([0, *ends_L.tolist()])):
        out[i:j] = x_ND[i:j] @ weight
    return out


def _lent(out_NF: Tensor, x_ND: Tensor, lent_BDF: Tensor, borders: Tensor) -> None:
    if x_ND.device.type == "cuda":
        from perilune.parallel.products_triton import lent_product

        return lent_product(out_NF, x_ND, lent_BDF, borders)
    for weight, (i, j) in zip(lent_BDF, itertools.pairwise(borders.tolist())):
        if i < j:
            out_NF[i:j] = x_ND[i:j] @ weight
    return None


def _lent_gradients(grad_BDF: Tensor, x_ND: Tensor, dy_NF: Tensor, borders: Tensor) -> None:
    if x_ND.device.type == "cuda":
        from perilune.parallel.products_triton import lent_gradients

        return lent_gradients(grad_BDF, x_ND, dy_NF, borders)
    for grad, (i, j) in zip(grad_BDF, itertools.pairwise(borders.tolist())):
        if i < j:
            grad.copy_(x_ND[i:j].T @ dy_NF[i:j])
    return None
