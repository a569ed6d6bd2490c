"""Kimi Delta Attention: `kda` for sequences, `kda_step` for one token, both with the same raw inputs."""

from perilune.ops.kda.api import kda, kda_step
from perilune.ops.kda.reference import log_decay

__all__ = ["kda", "kda_step", "log_decay"]
