"""Eight gloo processes, spawned once, that train a very small model on every mesh shape.

`world.py FOLDER [CASES]` runs the cases in turn and prints what became of each; the first error ends the world.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perilune.config import ModelConfig, preset
from perilune.data import Prepared, Shard
from perilune.train.checkpoint import CheckpointError, latest
from perilune.train.checkpoint import load as open_checkpoint
from perilune.train.loop import Trainer
from perilune.train.mesh.boxes import as_matrix
from perilune.train.mesh.config import MeshConfig
from perilune.train.mesh.routed import ForcedRouting
from perilune.train.mesh.store import MeshCheckpoints
from perilune.train.mesh.trainer import MeshTrainer
from perilune.train.options import TrainConfig

PROCESSES = 8
MODEL = preset("tiny").replace(
    hidden_size=32, num_hidden_layers=5, mla_layers=(2, 4), kda_num_heads=4, kda_head_dim=8, num_attention_heads=4,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, attn_res_block_size=2,
    intermediate_size=32, num_experts=8, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=16,
    routed_expert_hidden_size=16, vocab_size=64, num_nextn_predict_layers=1, max_position_embeddings=256,
)  # fmt: skip
OPTIONS = TrainConfig(
    steps=2, context=32, batch_tokens=512, micro_tokens=256, lr=0.02, qk_clip=0.02, logit_every=1, balance_bins=50,
    eval_every=100, eval_tokens=600, checkpoint_every=100, peak_flops=1e11, device="cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A mesh, and what its model and options change."""

    mesh: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, Any]
    slack: float = 1.0  # of every tolerance


def case(**mesh: Any) -> Case:
    return Case(mesh, {}, {})


FOUR_MICROS = {"batch_tokens": 1024}
CASES: dict[str, Case] = {
    "dp8-zero1": case(dp=8, zero=1),
    "ep8": case(dp=8, ep=8),
    "hsdp": case(dp=4, tp=2, replicas=2, ep=2, zero=3),
    "cp4": case(dp=2, cp=4),
    "tp4": case(dp=2, tp=4),
    "pp4-zero1": Case({"pp": 4, "dp": 2, "zero": 1}, {}, FOUR_MICROS),
    "pp2-virtual2": case(pp=2, virtual=2, dp=4),
    "pp2-cp2-tp2-ep4": case(pp=2, cp=2, tp=2, ep=4),
    "activations": case(
        dp=4,
        tp=2,
        ep=2,
        zero=3,
        activations={
            "kda": "recompute+offload",
            "mla": "recompute",
            "moe": "recompute",
            "mlp": "offload",
        },
    ),
    "bf16": Case({"dp": 2, "tp": 2, "cp": 2, "ep": 8}, {}, {"precision": "bf16"}, 200.0),
    "plain-residuals": Case(
        {"pp": 2, "dp": 4, "zero": 3, "ep": 4, "dispatcher": "standard"}, {"attn_res_block_size": None}, {}
    ),
}


def corpus(seed: int = 0, documents: int = 60) -> Shard:
    """Documents of 5 to 90 tokens with some structure, ended by token 0."""
    rng = np.random.default_rng(seed)
    texts = [np.append(1 + (rng.integers(63) + rng.integers(1, 4) * np.arange(rng.integers(4, 90))) % 63, 0)
             for _ in range(documents)]  # fmt: skip
    ends = np.cumsum([len(t) for t in texts])
    sizes = np.array([len(t) - 1 for t in texts])
    return Shard(np.concatenate(texts).astype(np.uint16), ends, sizes, np.array([0] + [1] * 63, np.int32))


class Nothing:
    def save(self, path: Path) -> None:
        """There is nothing to save."""


class Data(Prepared):
    """Shards without files; its tokenizer has nothing to save."""

    def tokenizer(self) -> Any:
        return Nothing()


def data() -> Data:
    return Data(Path(), corpus(0), corpus(1, 20), {"fingerprint": "toy", "vocab_size": 64})


def single(folder: Path, model: ModelConfig, options: TrainConfig) -> Trainer:
    """One process, routed as the mesh is."""
    trainer = Trainer(model, options, data(), folder, {})
    force(trainer)
    return trainer


def force(trainer: Trainer) -> None:
    forced = ForcedRouting()
    for layer in (*trainer.model.layers, *trainer.model.mtp):
        if hasattr(layer, "block_sparse_moe"):
            forced.force(layer.block_sparse_moe.gate, layer.layer)


def watch_gradients(optimizer: Any, read: Any) -> list[dict[str, torch.Tensor]]:
    """Copies of the gradients of every step, before clipping."""
    seen: list[dict[str, torch.Tensor]] = []
    step = optimizer.step

    def stepping(*args: Any) -> Any:
        seen.append({n: g.clone() for n, g in read()})
        return step(*args)

    optimizer.step = stepping
    return seen


@dataclass
class Result:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    loads: list[tuple[float, ...]]
    held_out: float


def run_single(folder: Path, case: Case) -> Result:
    from perilune.train.inspect import evaluate

    trainer = single(folder, MODEL.replace(**case.model), replace(OPTIONS, **case.options))
    grads = watch_gradients(
        trainer.optimizer, lambda: [(n, p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None]
    )
    records = [trainer.train_step() for _ in range(OPTIONS.steps)]
    weights = {n: t.detach().clone() for n, t in (*trainer.model.named_parameters(), *trainer.model.named_buffers())}
    return Result(
        [r.loss for r in records], [r.grad_norm for r in records], grads[0], weights,
        [r.max_violation for r in records],
        evaluate(trainer.model, trainer.data.held_out, trainer.options, 600, trainer.dtype),
    )  # fmt: skip


def run_mesh(folder: Path, case: Case) -> Result | None:
    """The same on the mesh; whole tensors on rank 0."""
    mesh = MeshConfig(**{"forced_routing": True, **case.mesh})
    trainer = MeshTrainer(MODEL.replace(**case.model), replace(OPTIONS, **case.options), data(), folder, {}, mesh)
    grads = watch_gradients(
        trainer.optimizer, lambda: [(n, p.grad) for n, p in trainer.part.locals.items() if p.grad is not None]
    )
    records = [trainer.train_step() for _ in range(OPTIONS.steps)]
    held_out = trainer.evaluate(600)
    mine = [(n, trainer.part.box(n), g) for n, g in grads[0].items()]
    gradients = whole_tensors(mine, trainer.part.shapes)
    weights = whole_tensors([(h.name, h.box, h.values) for h in trainer.part.held(reading=True)], trainer.part.shapes)
    if dist.get_rank():
        return None
    losses, norms, loads = zip(*((r.loss, r.grad_norm, r.max_violation) for r in records))
    return Result(list(losses), list(norms), gradients, weights, list(loads), held_out)


def whole_tensors(mine: list[Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Every rank's boxes put together, on rank 0; nothing elsewhere."""
    parts: list[Any] | None = None if dist.get_rank() else [None] * PROCESSES
    dist.gather_object([(n, b, v.detach().numpy().copy()) for n, b, v in mine], parts)
    found: dict[str, torch.Tensor] = {}
    for part in parts or ():
        for name, box, values in part:
            target = found.setdefault(name, torch.full(shapes[name], float("nan")))
            as_matrix(target)[box.top : box.bottom, box.left : box.right] = torch.from_numpy(values).view(box.shape)
    return found


def compare(got: Result, want: Result, slack: float) -> None:
    near = lambda x, y, rtol: np.testing.assert_allclose(x, y, rtol=rtol * slack)  # noqa: E731
    near(got.losses[:1], want.losses[:1], 2e-6)
    for name, w in want.gradients.items():
        error = (got.gradients[name] - w).norm() / w.norm().clamp_min(1e-12)
        assert error < 2e-4 * slack, f"gradient of {name}: relative error {error:.1e}"
    near(got.norms[0], want.norms[0], 1e-4)
    near(got.losses, want.losses, 5e-4)
    for name, w in want.weights.items():
        error = (got.weights[name] - w).abs().max()
        assert error < 2e-2 * slack * w.abs().max().clamp_min(0.1), f"{name} after training: {error:.1e}"
    np.testing.assert_allclose(got.loads, want.loads, rtol=1e-6)
    near(got.held_out, want.held_out, 1e-3)


def key(case: Case) -> str:
    return hashlib.sha256(repr((case.model, case.options)).encode()).hexdigest()[:12]


def references(folder: Path, cases: list[Case]) -> None:
    """What one process makes of every model and options among the cases."""
    torch.set_num_threads(1)
    for name, one in {key(c): c for c in cases}.items():
        torch.save(run_single(folder / name, one), folder / "writing.pt")
        (folder / "writing.pt").rename(folder / f"{name}.pt")


def check(folder: Path, name: str, case: Case) -> None:
    got = run_mesh(folder / name, case)
    if got is not None:
        path = folder / f"{key(case)}.pt"
        while not path.exists():
            time.sleep(0.1)
        try:
            compare(got, torch.load(path, weights_only=False), case.slack)
        except AssertionError as error:  # rank 0's alone: the other cases can go on
            (folder / f"{name}.failed").write_text(str(error))
            return
        (folder / f"{name}.ok").touch()


def check_resharding(folder: Path) -> None:
    """Parameters and optimiser state are bit-equal on any mesh and in one process, and training goes on the same."""
    files = dist.new_group(backend="gloo")
    made = _trainer(folder, dp=2, cp=2, tp=2, ep=4)
    made.train_step()
    with MeshCheckpoints(folder / "checkpoints", 2, files) as checkpoints:
        made.save(checkpoints)
        after = made.train_step().loss  # while the files are written: they hold what was copied before
        checkpoints.wait()
    saved = open_checkpoint(latest(folder / "checkpoints"))
    before: dict[str, torch.Tensor] = {}
    for mesh in (
        {"dp": 2, "cp": 2, "tp": 2, "ep": 4},
        {"pp": 2, "dp": 4, "ep": 2, "zero": 3},
        {"dp": 8, "ep": 4, "replicas": 2},
    ):
        other = _trainer(folder, steps=5, **mesh)  # a run may go further than it was made for, and no other way
        other.restore(saved)
        found = _whole_state(other)
        before = before or found
        assert found.keys() == before.keys()
        for name, value in found.items():
            assert torch.equal(value, before[name]), f"{name} differs on {mesh}"
        assert abs(other.train_step().loss - after) < 1e-4
    other.recipe = {"train": {"steps": 5, "lr": 1.0}}
    try:
        other.restore(saved)
    except CheckpointError as error:
        assert "train.lr" in str(error), error
    else:
        raise AssertionError("a run with another rate was continued")
    if dist.get_rank() == 0:
        one = Trainer(MODEL, OPTIONS, data(), folder, {})
        one.restore(saved)
        state = {n: t.clone() for n, t in one.optimizer.state_dict().items() if n != "skipped"}
        state |= {n: t.detach() for n, t in (*one.model.named_parameters(), *one.model.named_buffers())}
        assert state.keys() == before.keys(), state.keys() ^ before.keys()
        for name, value in state.items():
            assert torch.equal(as_matrix(value.reshape(value.shape or (1,))), as_matrix(before[name])), name


def _trainer(folder: Path, steps: int = OPTIONS.steps, **mesh: Any) -> MeshTrainer:
    recipe, options = {"train": {"steps": steps}}, replace(OPTIONS, steps=steps)
    return MeshTrainer(MODEL, options, data(), folder, recipe, MeshConfig(forced_routing=True, **mesh))


def _whole_state(trainer: MeshTrainer) -> dict[str, torch.Tensor]:
    shapes = {n: shape or (1,) for n, (shape, _) in trainer.state_shapes().items()} | trainer.part.shapes
    mine = [(h.name, h.box, h.values) for h in (*trainer.part.held(reading=True), *trainer.held_state(reading=True))]
    return whole_tensors(mine, shapes)


def main(rank: int, folder: Path, cases: dict[str, Case], resharding: bool) -> None:
    """Each case has process groups of its own: a hundred idle ones would cost more than the training."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    parts: dict[str, Any] = {name: partial(check, folder, name, one) for name, one in cases.items()}
    if resharding:
        parts["resharding"] = partial(check_resharding, folder / "resharding")
    for name, part in parts.items():
        own = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=100))
        part()
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    if resharding:
        (folder / "resharding.ok").touch()


def spawn(folder: Path, names: list[str], limit: float = 1500.0) -> dict[str, str]:
    """Fork the processes from this one, which has imported everything; all end when one fails or time is up."""
    cases = {name: one for name, one in CASES.items() if name in names or not names}
    resharding = "resharding" in names or not names
    ranks = {}
    for rank in range(PROCESSES + 1):
        pid = os.fork()
        if pid == 0:
            try:
                main(rank, folder, cases, resharding) if rank < PROCESSES else references(folder, [*cases.values()])
                os._exit(0)
            except BaseException:  # the others wait for this rank: the world ends with the first error
                (folder / f"error{rank}").write_text(traceback.format_exc(limit=-8))
                os._exit(1)
        ranks[pid] = rank
    deadline, failed = time.monotonic() + limit, ""
    while ranks and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            failed = f"rank {rank} ended with status {status}" if status else ""
        elif time.monotonic() > deadline:
            failed = f"{PROCESSES} processes took more than {limit:.0f} s"
        else:
            time.sleep(0.05)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = {path.stem: path.read_text() for path in folder.glob("*.failed")}
    found |= {path.stem: "ok" for path in folder.glob("*.ok")}
    errors = sorted(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns)
    first = f"{errors[0].name}: {errors[0].read_text()}" if errors else ""
    return found | ({"world": f"{failed}\n{first}"} if failed else {})


if __name__ == "__main__":
    outcome = spawn(Path(sys.argv[1]), sys.argv[2:])
    (Path(sys.argv[1]) / "outcome.json").write_text(json.dumps(outcome))
    print("\n".join(f"{name}: {said}" for name, said in outcome.items()))
