"""What decoding keeps of tokens that are not certain yet (§5.4.2): their projected inputs, not states."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Drafts:
    """Projected inputs of the last drafts, by row: qkv [rows,D,C], gate [rows,D,HV,K], beta [rows,D,HV]."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, rows: int, drafts: int, qkv: Tensor, gate: Tensor, beta: Tensor) -> "Drafts":
        """Room for `drafts` tokens of tensors like these [R,W,...]."""
        return cls(*(x.new_zeros(rows, drafts, *x.shape[2:]) for x in (qkv, gate, beta)))
