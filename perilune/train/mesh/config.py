"""What the user says about devices: one frozen dataclass that the recipe nests as `[mesh]` (report §5.2).

processes = pp · dp · cp · tp,      stage = dp · cp · tp ranks that hold the same layers and different tokens

dp   rows of the batch             cp   tokens of a row, in contiguous pieces
tp   heads, hidden units, words; between those parts a rank keeps 1/tp of its piece's tokens
ep   experts; ep ranks of a stage exchange tokens, and stage / ep groups hold the same experts
replicas   shards lie on stage / replicas ranks, and that many times (HSDP): gathered near, summed far
pp   layers, `virtual` stages a rank
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from perilune.config import ModelConfig
from perilune.train.mesh.activations import check_policies
from perilune.train.options import TrainConfig

_SIZES = ("cp", "tp", "pp", "ep", "virtual", "replicas")


@dataclass(frozen=True)
class MeshConfig:
    """The shape of the mesh, and what each part of it does."""

    dp: int = 0
    """0: what the other axes leave of the processes."""
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: int = 1
    """Stages a rank; above 1 they interleave."""
    zero: Literal[1, 2, 3] = 2
    """1 shards optimiser states, 2 also gradients after each micro-batch, 3 also parameters between uses."""
    replicas: int = 1
    """Groups of dp ranks that each hold everything; parameters are gathered within one, gradients summed over all."""
    dispatcher: Literal["balanced", "standard"] = "balanced"
    fabric: Literal["collective", "symmetric"] = "collective"
    """"symmetric": peers' memory over NVLink; needs CUDA devices of one host that reach each other."""
    activations: dict[str, str] = field(default_factory=dict)
    """By tensor class (kda, mla, mlp, moe): keep, recompute, fp8, offload, or several joined by +."""
    forced_routing: bool = False
    """Debugging: experts by token position instead of score, so that a tie cannot hide or fake an error."""
    patience: float = 20.0
    """Seconds without a sign of life after which a rank is named and the job ends."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"mesh.{name} must be at least 1, not {getattr(self, name)}.")
        if self.dp < 0:
            raise ValueError(f"mesh.dp must not be negative, but is {self.dp}.")
        if self.patience <= 0:
            raise ValueError(f"mesh.patience must be positive, not {self.patience}.")
        check_policies(self.activations)

    @property
    def stage(self) -> int:
        """Ranks that hold the same layers."""
        return self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Ranks of a stage that together hold every parameter once."""
        return self.stage // self.replicas

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    def resolve(self, processes: int) -> "MeshConfig":
        """With dp filled in. Raises ValueError if the sizes do not make `processes`."""
        others = self.pp * self.cp * self.tp
        dp = self.dp or max(processes // others, 1)
        if dp * others != processes:
            sizes = f"pp {self.pp} · dp {dp} · cp {self.cp} · tp {self.tp}"
            raise ValueError(
                f"mesh: {sizes} needs {dp * others} processes, there are {processes}; "
                "start with torchrun --nproc-per-node N -m perilune run."
            )
        return replace(self, dp=dp)

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        """Raises ValueError in one sentence for the first thing that a resolved mesh cannot divide."""
        for holds, sentence in _checks(self, model, train):
            if not holds:
                raise ValueError(sentence)


def _checks(m: MeshConfig, c: ModelConfig, t: TrainConfig) -> list[tuple[bool, str]]:
    row_tokens = t.rows * t.context // max(m.dp, 1)
    heads: Mapping[str, tuple[int, int]] = {
        "kda_num_heads": (c.kda_num_heads, m.tp),
        "num_attention_heads": (c.num_attention_heads, m.tp * m.cp),
        "vocab_size": (c.vocab_size, m.tp),
        "intermediate_size": (c.intermediate_size, m.tp),
        "shared expert width": (c.shared_width, m.tp),
        "num_experts": (c.num_experts, m.ep),
    }
    return [
        (m.dp % m.replicas == 0, f"mesh.replicas {m.replicas} must divide mesh.dp {m.dp}."),
        (m.shard % m.ep == 0, f"mesh.ep {m.ep} must divide dp · cp · tp / replicas = {m.shard}."),
        (m.ep == 1 or c.num_experts > 0, f"mesh.ep is {m.ep}, but the model has no experts."),
        *((n % by == 0, f"{name} {n} is not divided by the mesh ({by} ways).") for name, (n, by) in heads.items()),
        (t.rows % m.dp == 0, f"A micro-batch of {t.rows} rows does not divide among mesh.dp {m.dp}."),
        (
            row_tokens % (m.cp * m.tp) == 0,
            f"{row_tokens} tokens of a data-parallel rank's micro-batch do not divide by cp · tp = {m.cp * m.tp}.",
        ),
        (m.virtual == 1 or m.pp > 1, f"mesh.virtual is {m.virtual}, but mesh.pp is 1."),
        (
            m.stages <= c.num_hidden_layers,
            f"mesh.pp · mesh.virtual = {m.stages} stages are more than the model's {c.num_hidden_layers} layers.",
        ),
        (
            m.virtual == 1 or t.accumulate % m.pp == 0,
            f"{t.accumulate} micro-batches a step do not divide by mesh.pp {m.pp}, as interleaved stages need.",
        ),
        (
            not c.tie_word_embeddings or m.pp * m.tp == 1,
            "mesh.pp and mesh.tp need a model whose head is not tied to its embedding.",
        ),
        (t.balance != "exact" or m.stage == 1, 'train.balance "exact" works in one process only; use "quantile".'),
        (t.activations == "keep", "On a mesh, activations are declared in mesh.activations, not train.activations."),
    ]
