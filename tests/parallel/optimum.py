"""The planning problem as an integer program (HiGHS), for small cases: what the greedy could at best reach."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def fewest_remote(totals: list[int], ranks: int) -> int:
    """min over exactly balanced plans of the largest number of remote experts on a rank (appendix E: M(I)).

    Variables: rows A[d, e], whether e is copied to d (C[d, e], away from home), and the largest number of copies m.
    """
    experts = len(totals)
    share = sum(totals) // ranks
    if share * ranks != sum(totals):
        raise ValueError("totals: the rows do not divide evenly over the ranks")
    cells = ranks * experts
    home = np.arange(experts) // (experts // ranks)
    A, C, m = np.eye(2 * cells + 1)[:cells], np.eye(2 * cells + 1)[cells : 2 * cells], np.eye(2 * cells + 1)[-1:]
    A, C = A.reshape(ranks, experts, -1), C.reshape(ranks, experts, -1)
    away = home[None] != np.arange(ranks)[:, None]
    constraints = [
        LinearConstraint(A.sum(0), totals, totals),
        LinearConstraint(A.sum(1), share, share),
        LinearConstraint((A - C * np.array(totals)[None, :, None])[away], -np.inf, 0),
        LinearConstraint((C * away[:, :, None]).sum(1) - m, -np.inf, 0),
    ]
    upper = np.concatenate([np.full(cells, share), np.ones(cells), [experts // ranks]])
    solved = milp(m[0], constraints=constraints, integrality=np.ones(2 * cells + 1), bounds=Bounds(0, upper))
    if not solved.success:
        raise RuntimeError(f"the integer program found no plan: {solved.message}")
    return round(solved.fun)
