"""The ranks as a torch DeviceMesh, and the groups that the parts of the system talk over.

pp · dp · cp · tp, tp innermost; stage = dp · cp · tp flattened, rows = dp · cp, and of the same ranks
pp · edp · ep, the ranks of a stage in two levels: ep neighbours exchange experts, edp groups repeat them
"""

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
        ranks = torch.arange(c.pp * c.stage).view(c.pp, c.stage // c.ep, c.ep)
        self.experts = DeviceMesh(kind, ranks, mesh_dim_names=("pp", "edp", "ep"))
        self.pp, self.dp, self.cp, self.tp = (self.devices.get_local_rank(name) for name in ("pp", "dp", "cp", "tp"))

    @property
    def rank(self) -> int:
        """Of all processes."""
        return dist.get_rank()

    @property
    def stage_rank(self) -> int:
        return self.rank % self.config.stage

    @property
    def last(self) -> bool:
        """Whether this rank ends the pipeline and so sees the loss."""
        return self.pp == self.config.pp - 1

    def group(self, name: str) -> dist.ProcessGroup:
        """Of "pp", "dp", "cp", "tp", "stage", "rows", "ep"."""
        if name == "stage":
            return self.stage.get_group()
        if name == "rows":
            return self.rows.get_group()
        return (self.experts if name == "ep" else self.devices).get_group(name)

    def sharding(self, kind: str) -> DeviceMesh:
        """The ranks over which FSDP shards parameters of a kind: "whole", "split" (by tp) or "experts"."""
        return {"whole": self.stage, "split": self.rows, "experts": self.experts["edp"]}[kind]
