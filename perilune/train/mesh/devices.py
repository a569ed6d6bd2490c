"""The ranks as a torch DeviceMesh, and the groups that the parts of the system talk over.

pp · dp · cp · tp, tp innermost; stage = dp · cp · tp flattened, rows = dp · cp, and of the same ranks
pp · edp · ep, the ranks of a stage in two levels: ep neighbours exchange experts, edp groups repeat them
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perilune.train.mesh.config import MeshConfig


class Mesh:
    """A resolved MeshConfig on the default process group. Every process makes the same ones, in the same order."""

    def __init__(self, config: MeshConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        kind, c = device.type, config
        self.devices = init_device_mesh(kind, (c.pp, c.dp, c.cp, c.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
        self.stage = self.devices["dp", "cp", "tp"]._flatten("stage")
        self.rows = self.devices["dp", "cp"]._flatten("rows")
        self.experts = self._of_a_stage("edp", c.stage // c.ep, "ep", c.ep)
        self.pp, self.dp, self.cp, self.tp = (self.devices.get_local_rank(name) for name in ("pp", "dp", "cp", "tp"))
        self._sharding = {"whole": self.stage, "split": self.rows, "experts": self.experts["edp"]}
        self._shard = self.stage
        if c.replicas > 1:
            wholes = self._of_a_stage("replica", c.replicas, "shard", c.shard)
            self._shard = wholes["shard"]
            self._sharding = {
                "whole": wholes["replica", "shard"],
                "split": self._of_a_stage("replica", c.replicas, "rows", c.shard // c.tp, "tp", c.tp)[
                    "replica", "rows"
                ],
                "experts": self._of_a_stage("replica", c.replicas, "edp", c.shard // c.ep, "ep", c.ep)[
                    "replica", "edp"
                ],
            }

    def _of_a_stage(self, *axes: Any) -> DeviceMesh:
        """Every stage's ranks, in order, under other names and sizes."""
        names, sizes = axes[::2], axes[1::2]
        ranks = torch.arange(self.config.pp * self.config.stage).view(self.config.pp, *sizes)
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=("pp", *names))

    @property
    def rank(self) -> int:
        """Of all processes."""
        return dist.get_rank()

    @property
    def stage_rank(self) -> int:
        return self.rank % self.config.stage

    @property
    def shard_rank(self) -> int:
        """Among the ranks that hold the stage's parameters once; `replica`: which of these."""
        return self.stage_rank % self.config.shard

    @property
    def replica(self) -> int:
        return self.stage_rank // self.config.shard

    @property
    def last(self) -> bool:
        """Whether this rank ends the pipeline and so sees the loss."""
        return self.pp == self.config.pp - 1

    def group(self, name: str) -> dist.ProcessGroup:
        """Of "pp", "dp", "cp", "tp", "stage", "rows", "ep", and "shard": a stage, or one replica of it."""
        if flat := {"stage": self.stage, "rows": self.rows, "shard": self._shard}.get(name):
            return flat.get_group()
        return (self.experts if name == "ep" else self.devices).get_group(name)

    def sharding(self, kind: str) -> DeviceMesh:
        """The ranks over which FSDP shards parameters of a kind: "whole", "split" (by tp) or "experts"; where there
        are replicas, a mesh of two axes, replicas and shards."""
        return self._sharding[kind]
