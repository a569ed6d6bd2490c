"""Running the stages of a rank over the micro-batches of a step: one after the other, or 1F1B over pp ranks.

The schedules are torch's (1F1B, interleaved 1F1B with `virtual` stages a rank). What travels besides the running sum
are AttnRes blocks that the receiving rank has not seen; the stages know which (`stage.py`).
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from perilune.train.mesh.devices import Mesh
from perilune.train.mesh.stage import Stage


class _Plain(nn.Module):
    """A stage that torch's pipelining does not recognise as FSDP's: when gradients are summed is ours to say."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        return self.stage(index, *(() if self.stage.first else received))


class Pipeline:
    """The stages of this rank and their schedule. tokens: of a micro-batch on this rank."""

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, micros: int, tokens: int) -> None:
        self.stages, self.micros, self.mesh = stages, micros, mesh
        self.schedule: Any = None
        if mesh.config.pp > 1:
            # A block may pass a stage unchanged, through FSDP's hooks a view of itself; nobody writes to blocks.
            warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
            self.schedule = self._schedule(tokens)

    def _schedule(self, tokens: int) -> Any:
        group, index = self.mesh.group("pp"), torch.zeros(1, dtype=torch.int64, device="meta")
        parts: list[Any] = [
            PipelineStage(
                _Plain(s), s.index, s.stages, self.mesh.device,
                input_args=(index,) if s.first else s.takes(tokens),
                output_args=(torch.zeros((), device="meta"),) if s.last else s.gives(tokens), group=group,
            )
            for s in self.stages
        ]  # fmt: skip
        loss = lambda out, _: out  # noqa: E731 - the last stage's output is the loss
        if len(parts) > 1:
            return ScheduleInterleaved1F1B(parts, self.micros, loss_fn=loss, scale_grads=False)
        return Schedule1F1B(parts[0], self.micros, loss_fn=loss, scale_grads=False)

    def train(self) -> None:
        """Forward and backward of every micro-batch; gradients lie on the sharded parameters afterwards."""
        if self.schedule is not None:
            self._step(self.schedule.step)
            return
        for i in range(self.micros):
            self.stages[0](torch.tensor([i])).backward()

    def evaluate(self) -> None:
        """Forward alone."""
        if self.schedule is not None:
            self._step(self.schedule.eval)
            return
        for i in range(self.micros):
            self.stages[0](torch.tensor([i]))

    def _step(self, run: Any) -> None:
        index = torch.arange(self.micros, device=self.mesh.device)
        first = (index,) if any(s.first for s in self.stages) else ()
        target = index if any(s.last for s in self.stages) else None
        run(*first, target=target, losses=[] if target is not None else None, return_outputs=False, index=index)
