"""Quantile Balancing: the router bias that gives each expert its share (technical report §2.3.3, appendices C and D).

    α_i = (k+1)-th largest of s_i + b             token i's cutoff
    r_ij = α_i − s_ij                              the bias that would put expert j exactly there
    b̂_j = the (k/n)-quantile of r_·j,             b ← b̂ − mean b̂, used by the next step

r lies in [b_min − 1, b_max + 1] for scores in (0, 1), so it is histogrammed: counts add over micro-batches and ranks,
and the quantile of the sum is the quantile of the whole step, within one bin.
Shapes: T tokens, E experts (n), B bins, k chosen. fp32 margins, integer counts.
"""

import torch
from torch import Tensor

from perilune.ops.dispatch import fused, kernels

BINS = 1000


def bin_range(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends [] of the interval that holds every r under this bias, fp32 scalars on its device."""
    return bias_E.amin().float() - 1.0, bias_E.amax().float() + 1.0


def margins(scores_TE: Tensor, threshold_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """r [T',E] fp32 without gradient; `mask_T` False leaves a padding token out."""
    r_TE = (threshold_T.unsqueeze(-1) - scores_TE).detach().float()
    return r_TE if mask_T is None else r_TE[mask_T]


def expert_counts(idx_Tk: Tensor, experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Tokens each expert received, int64 [E]; padding tokens count for nothing. No host sync."""
    one = torch.ones_like(idx_Tk) if mask_T is None else mask_T.to(idx_Tk.dtype).unsqueeze(-1).expand_as(idx_Tk)
    return torch.zeros(experts, dtype=idx_Tk.dtype, device=idx_Tk.device).scatter_add_(
        0, idx_Tk.flatten(), one.flatten()
    )


def margin_histogram(
    scores_TE: Tensor,
    threshold_T: Tensor,
    bias_E: Tensor,
    bins: int = BINS,
    mask_T: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Counts of r in `bins` equal bins over `bin_range(bias_E)`: int32 [E,B], every kept token once an expert.

    One scatter of ones: no sort, no host sync, the same counts however the tokens are split.
    """
    T, E = scores_TE.shape
    if threshold_T.shape != (T,) or bias_E.shape != (E,) or bins < 1:
        raise ValueError(
            f"margin_histogram: need threshold [{T}], bias [{E}] and bins > 0, "
            f"got {[*threshold_T.shape]}, {[*bias_E.shape]}, {bins}."
        )
    if mask_T is not None and (mask_T.shape != (T,) or mask_T.dtype != torch.bool):
        raise ValueError(f"margin_histogram: mask must be [{T}] bool, got {[*mask_T.shape]} {mask_T.dtype}.")
    low, high = bin_range(bias_E)
    if fused("margin_histogram", impl, scores_TE):
        scores, threshold = (x.detach().float().contiguous() for x in (scores_TE, threshold_T))
        counts: Tensor = kernels("quantile_triton").histogram(scores, threshold, low, high, bins, mask_T)
        return counts
    bin_TE = ((threshold_T.unsqueeze(-1) - scores_TE).detach().float() - low).mul_(bins / (high - low))
    flat = bin_TE.to(torch.int64).clamp_(0, bins - 1)
    flat += torch.arange(0, E * bins, bins, device=flat.device)
    counts = torch.zeros(E * bins, dtype=torch.int32, device=flat.device)
    if mask_T is None:
        one = counts.new_ones(1).expand(T * E)
    else:
        one = mask_T.to(torch.int32).unsqueeze(-1).expand(T, E).reshape(-1)
    return counts.scatter_add_(0, flat.view(-1), one).view(E, bins)


def histogram_quantile(counts_EB: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """b̂ [E] fp32 from a step's summed counts under the bias the step ran with; not yet centred.

    The first bin whose cumulative count reaches ⌈q⌉, q = k·m/n, and linear inside it. An expert without tokens in its
    histogram keeps its bias.
    """
    low, high = (x.double() for x in bin_range(bias_E))
    experts, bins = counts_EB.shape
    cumulative_EB = counts_EB.long().cumsum(-1)
    q_E1 = cumulative_EB[:, -1:].double() * top_k / experts
    bin_E1 = torch.searchsorted(cumulative_EB, q_E1.ceil().long()).clamp_max_(bins - 1)
    inside_E1 = counts_EB.long().gather(-1, bin_E1)
    before_E1 = cumulative_EB.gather(-1, bin_E1) - inside_E1
    part_E1 = ((q_E1 - before_E1) / inside_E1.clamp_min(1)).clamp_(0, 1)
    found_E = (low + (bin_E1 + part_E1) * (high - low) / bins).squeeze(-1).float()
    return torch.where(cumulative_EB[:, -1] > 0, found_E, bias_E.float())


def exact_quantile(r_TE: Tensor, top_k: int) -> Tensor:
    """b̂ [E]: minus the (q+1)-th largest margin s − α, that is the (q+1)-th smallest r, q = ⌊k·m/n⌋."""
    tokens, experts = r_TE.shape
    if tokens == 0:
        raise ValueError("exact_quantile: there is no token.")
    return r_TE.kthvalue(min(tokens, tokens * top_k // experts + 1), dim=0).values


def centred(bias_E: Tensor) -> Tensor:
    """The same choice with mean zero: a shift of all biases moves no top-k."""
    return bias_E - bias_E.mean()


def sign_step(bias_E: Tensor, counts_E: Tensor, gamma: float = 1e-3) -> Tensor:
    """The rule QB replaces: b + γ·sign(mean load − load), sign-SGD on the same dual objective (eq. 27)."""
    load_E = counts_E.double()
    return bias_E + gamma * torch.sign(load_E.mean() - load_E).to(bias_E.dtype)


def alternating_solver(scores_TE: Tensor, top_k: int, steps: int = 100) -> Tensor:
    """The oracle (algorithm 1): exact coordinate steps on the dual of the balanced assignment.

    Returns b = −β [E], centred. No step raises the dual; it need not reach the optimum where few tokens make it kinked.
    """
    tokens, experts = scores_TE.shape
    if tokens == 0 or not 1 <= top_k < experts:
        raise ValueError(f"alternating_solver: cannot give {tokens} tokens {top_k} of {experts} experts.")
    beta_E = scores_TE.new_zeros(experts)
    target = min(tokens - 1, tokens * top_k // experts)
    for _ in range(steps):
        alpha_T1 = (scores_TE - beta_E).sort(1, descending=True).values[:, top_k : top_k + 1]
        beta_E = (scores_TE - alpha_T1).sort(0, descending=True).values[target]
    return centred(-beta_E)
