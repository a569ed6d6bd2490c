"""The trainer on a mesh: the steps, records and checkpoints of `train.loop`, each rank with its part (report §5.2).

batch        dp ranks take rows, cp and tp ranks tokens of them      loss    a sum over all ranks' tokens
gradients    FSDP sums them over the ranks that share a parameter    norm    one number of all processes
biases       one integer all-reduce a stage                          files   every rank writes its own boxes
"""

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.accounting import non_embedding_active
from perilune.config import ModelConfig
from perilune.data import Batch, Batches, Prepared, bits_per_byte, held_out_batches
from perilune.data.batches import NO_TARGET
from perilune.model.shards import replace_directory
from perilune.ops.memory import keep_freed_memory
from perilune.train.checkpoint import Checkpoint, rng_state
from perilune.train.clip import qk_clip
from perilune.train.loop import Trainer
from perilune.train.loss import second_target_count
from perilune.train.machine import pick_device, pick_precision
from perilune.train.mesh.boxes import Box
from perilune.train.mesh.config import MeshConfig
from perilune.train.mesh.devices import Mesh
from perilune.train.mesh.model import MeshModel
from perilune.train.mesh.optimizer import ShardedOptimizer
from perilune.train.mesh.pipeline import Pipeline
from perilune.train.mesh.places import (
    Held,
    create_weights,
    read_states,
    read_weights,
    weight_places,
    write_boxes,
)
from perilune.train.mesh.stage import Blocks, Step
from perilune.train.mesh.store import MeshCheckpoints
from perilune.train.mesh.tokens import Micro, cut
from perilune.train.metrics import MetricsLog, ProgressLine, StepMetrics, measure_peak, mfu, peak_memory
from perilune.train.metrics import bits_per_byte as bpb
from perilune.train.options import TrainConfig
from perilune.train.schedule import Schedule

log = logging.getLogger("perilune.train")


class MeshTrainer(Trainer):
    """One pretraining run over all processes of torchrun, into one `directory` that all of them see."""

    def __init__(
        self, config: ModelConfig, options: TrainConfig, data: Prepared, directory: Path, recipe: dict[str, Any],
        mesh: MeshConfig,
    ) -> None:  # fmt: skip
        self.config, self.options, self.data, self.directory, self.recipe = config, options, data, directory, recipe
        self.device = local_device(options.device)
        self.dtype = pick_precision(options.precision, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        mesh = mesh.resolve(dist.get_world_size())
        mesh.check(config, options)
        self.mesh = Mesh(mesh, self.device)
        self.shared = Step(observe=self._observe_training)
        self.part = part = MeshModel(config, options, self.mesh, self.dtype, self.shared)
        plans = [replace(p, param=part.locals[p.name]) for p in part.plans if p.name in part.locals]
        place = (self.mesh.shard_rank, self.mesh.group("shard"))
        self.optimizer: Any = ShardedOptimizer(plans, part.shapes, part.sizes, *place, part.repeats, mesh.replicas)
        tokens = options.rows * options.context // mesh.stage
        self.pipeline = Pipeline(part.stages, self.mesh, options.accumulate, tokens)
        self.schedule = Schedule(options.lr, options.steps, options.schedule, options.warmup_share, options.floor_share)
        self.balancer = self._balancer(part.layers, self.mesh.group("stage"))
        self.batches = Batches(data.train, options.context, options.rows, options.seed, self.mesh.dp, mesh.dp)
        self.step = self.position = 0
        self.peak = options.peak_flops or measure_peak(self.device, self.dtype)
        self.active = non_embedding_active(config)

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self) -> StepMetrics:
        """Take one optimiser step from the current position; a collective call."""
        began = time.perf_counter()
        o, mesh = self.options, self.mesh.config
        batches = [self.batches.at(self.position + i * o.rows) for i in range(o.accumulate)]
        targets, seconds_ahead, n_bytes = self._counts(batches)
        self._begin(batches, targets, seconds_ahead, look=self.step % o.logit_every == 0)
        self.pipeline.train()
        self.part.take_gradients()
        lr = self.schedule(self.step)
        report = self.optimizer.step(lr, o.grad_clip)
        self.part.forget_gradients()
        found = self._rebalance(report.skipped)
        top = self._clip_attention(report.skipped)
        nats = self._sum_of_last(self.shared.nats)
        self.step += 1
        self.position += o.accumulate * o.rows
        seconds = time.perf_counter() - began
        mean = nats / max(1, targets)
        return StepMetrics(
            step=self.step - 1, tokens=self.step * o.batch_tokens, loss=mean, bpb=bpb(mean, targets, max(1, n_bytes)),
            grad_norm=report.grad_norm, lr=lr, tokens_per_second=o.batch_tokens / seconds,
            mfu=mfu(self.active, o.batch_tokens / seconds, self.peak * mesh.pp * mesh.stage), peak_flops=self.peak,
            memory=peak_memory(self.device), max_logit=top, skipped=self.optimizer.skipped,
            **self._of_all_stages(found),
        )  # fmt: skip

    def _counts(self, batches: list[Batch]) -> tuple[int, int, int]:
        """Targets, targets one further and bytes of the step, over the data-parallel ranks."""
        ahead = sum(map(second_target_count, batches)) if self.config.num_nextn_predict_layers else 0
        mine = [sum(int((b.targets >= 0).sum()) for b in batches), ahead, sum(b.n_bytes for b in batches)]
        counts = torch.tensor(mine, dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=self.mesh.group("dp"))
        targets, ahead, n_bytes = counts.tolist()
        return targets, ahead, n_bytes

    def _begin(self, batches: list[Batch], targets: int, seconds_ahead: int, *, look: bool) -> None:
        step = self.shared
        step.micros = [self._micro(b) for b in batches]
        step.scale, step.scale_mtp = 1 / max(1, targets), self.options.mtp_weight / max(1, seconds_ahead)
        step.look, step.nats, step.max_logits, step.blocks = look, None, {}, Blocks()

    def _micro(self, batch: Batch) -> Micro:
        m, c = self.mesh, self.mesh.config
        return cut(batch, cp=(m.cp, c.cp), tp=(m.tp, c.tp), dp=m.dp, device=self.device)

    def _observe_training(self, routes: dict[int, Any]) -> None:
        if torch.is_grad_enabled():
            self._observe(routes)

    def _clip_attention(self, skipped: bool) -> float | None:
        """QK-Clip on the rows this rank holds; returns the largest logit of all layers."""
        c, tau, largest = self.config, self.options.qk_clip, -1.0
        for layer, top_h in sorted(self.shared.max_logits.items()):
            top_H = self._all_heads(top_h)
            largest = max(largest, float(top_H.max()))
            if tau and not skipped:
                self._clip_layer(layer, top_H, c, tau)
        if not self.shared.look:
            return None
        value = torch.tensor(largest, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value) if value >= 0 else None

    def _all_heads(self, top_h: Tensor) -> Tensor:
        """Every head's largest logit over the stage, from that of the heads this rank attended with."""
        m, heads = self.mesh, self.config.num_attention_heads
        first = (m.tp * m.config.cp + m.cp if m.config.cp > 1 else m.tp) * len(top_h)
        top_H = torch.full((heads,), float("-inf"), device=self.device)
        top_H[first : first + len(top_h)] = top_h.float()
        dist.all_reduce(top_H, dist.ReduceOp.MAX, m.group("stage"))
        return top_H

    def _clip_layer(self, layer: int, top_H: Tensor, c: ModelConfig, tau: float) -> None:
        """The factors of all rows come from clipping columns of ones; each rank scales the rows it holds."""
        inside = layer - c.num_hidden_layers
        at = f"layers.{layer}.self_attn." if inside < 0 else f"mtp.{inside}.self_attn."
        dims = {"nope": c.qk_nope_head_dim, "rope": c.qk_rope_head_dim, "v": c.v_head_dim}
        q = torch.ones(len(top_H) * c.qk_head_dim, 1, device=self.device)
        kv = torch.ones(len(top_H) * (c.qk_nope_head_dim + c.v_head_dim), 1, device=self.device)
        qk_clip(q, kv, top_H, **dims, tau=tau)
        names = {"q_b_proj" if c.q_lora_rank is not None else "q_proj": q, "kv_b_proj": kv}
        for name, factor in names.items():
            full = f"{at}{name}.weight"
            box = self.part.box(full)
            self.part.locals[full].mul_(factor[box.top : box.bottom])

    def _sum_of_last(self, nats: Tensor | None) -> float:
        """Of the ranks that saw the loss, each token once: with words split, tp ranks see the same ones."""
        counts = (self.mesh.last and self.mesh.tp == 0) or (self.mesh.last and self.mesh.config.tp == 1)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if counts and nats is not None:
            total += nats.double()
        dist.all_reduce(total)
        return float(total)

    def _of_all_stages(self, found: dict[str, Any]) -> dict[str, Any]:
        """The loads of every stage's layers, in order of depth."""
        if self.mesh.config.pp == 1:
            return found
        seen: list[Any] = [None] * self.mesh.config.pp
        dist.all_gather_object(seen, found, self.mesh.group("pp"))
        rows = sorted(row for part in seen if part for row in zip(part["layers"], part["max_violation"], part["dead"]))
        return dict(zip(("layers", "max_violation", "dead"), zip(*rows))) if rows else {}

    # --- held-out text ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, tokens: int) -> float:
        """Held-out bits per byte over the first `tokens` tokens; ranks take batches in turn."""
        o, m, total = self.options, self.mesh, torch.zeros(2, dtype=torch.float64, device=self.device)
        source = held_out_batches(self.data.held_out, o.context, o.rows // m.config.dp)
        size, read, rounds = o.rows // m.config.dp * o.context, 0, o.accumulate * m.config.dp
        while read < tokens:
            batches = [b for b, _ in zip(source, range(rounds))]
            if not batches:
                break
            read += sum(len(b.tokens) for b in batches)
            mine = [padded(b, size) for b in batches[m.dp :: m.config.dp]]
            mine += [padded(None, size)] * (o.accumulate - len(mine))
            self._begin(mine, 1, 1, look=False)
            self.pipeline.evaluate()
            nats = self._sum_of_last(self.shared.nats)
            total += torch.tensor([nats, float(sum(b.n_bytes for b in batches))], device=self.device)
        self.shared.blocks = Blocks()
        nats, text = total.tolist()
        return bits_per_byte(nats, text) if text else float("nan")

    # --- a run ------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Train to the last step, from the newest checkpoint if there is one, and write `weights/`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        files = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        first = self.mesh.rank == 0
        with ExitStack() as stack:
            checkpoints = stack.enter_context(MeshCheckpoints(self.directory / "checkpoints", self.options.keep, files))
            self._resume()
            if first:
                self._describe_run()
                log.warning(
                    "On a mesh no samples and looks are taken (train.inspect_every): nobody holds the whole model."
                )
            metrics = stack.enter_context(MetricsLog(self.directory, self.step, self.options.wandb)) if first else None
            line: Any = stack.enter_context(ProgressLine(self.options.steps, self.step) if first else nullcontext())
            while self.step < self.options.steps:
                record = self.train_step()
                if self._due(self.options.eval_every):
                    last = self.step == self.options.steps
                    tokens = self.data.held_out.n_tokens if last else self.options.eval_tokens
                    record = replace(record, val_bpb=self.evaluate(tokens))
                if metrics is not None:
                    metrics.write(record)
                    line.update(record)
                if self._due(self.options.checkpoint_every):
                    if metrics is not None:
                        metrics.sync()
                    self.save(checkpoints)
            checkpoints.wait()
        self._finish()
        return self.part.stages

    def save(self, checkpoints: MeshCheckpoints) -> None:
        """Every rank copies what it holds; files are written while training goes on."""
        trainer = {
            "step": self.step,
            "position": self.position,
            "rng": rng_state(),
            "balancer": self._balancer_state(),
            "recipe": self.recipe,
            "data": self.data.fingerprint,
        }
        checkpoints.save(
            self.step, self.config, self.part.shapes, self.part.held(), self.state_shapes(), self.held_state(), trainer,
            lambda path: self.data.tokenizer().save(path),
        )  # fmt: skip

    def _balancer_state(self) -> dict[str, int] | None:
        """Rank 0's, or, where its stage has no experts, what any balancer would say: they all count steps."""
        if self.balancer is not None:
            return self.balancer.state_dict()
        return {"updates": self.step} if self.config.num_experts else None

    def held_state(self, *, reading: bool = False) -> Iterator[Held]:
        for name, (parameter, value) in self.optimizer.state().items():
            box = self.part.box(parameter)
            if not reading and (self.mesh.replica or self.part.repeats(parameter)):
                continue
            if value.dim() == 0:
                if reading or box.top == box.left == 0:
                    yield Held(name, Box(0, 1, 0, 1), value.view(1, 1))
            else:
                yield Held(name, box, value.view(box.shape))
        if not reading and self.mesh.rank == 0:
            yield Held("skipped", Box(0, 1, 0, 1), torch.tensor([[self.optimizer.skipped]]))

    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Every optimiser state tensor of the whole model, as `Optimizer.state_dict` has them."""
        found: dict[str, tuple[tuple[int, ...], str]] = {"skipped": ((), "I64")}
        for p in self.part.plans:
            shape = self.part.shapes[p.name]
            if p.kind == "muon":
                found[f"muon.{p.name}"] = (shape, "F32")
            else:
                found |= {f"adamw.{key}.{p.name}": (shape, "F32") for key in ("exp_avg", "exp_avg_sq")}
                found[f"adamw.step.{p.name}"] = ((), "F32")
        return found

    def restore(self, checkpoint: Checkpoint) -> None:
        """Everything as it was, whatever mesh or single process wrote it."""
        state = self._expect(checkpoint)
        read_weights(checkpoint.weights, self.config, self.part.held(reading=True), self.part.shapes)
        path = checkpoint.path / "optimizer.safetensors"
        read_states(path, self.held_state(reading=True))
        skipped = Held("skipped", Box(0, 1, 0, 1), torch.zeros(1, 1, dtype=torch.int64))
        read_states(path, [skipped])
        self.optimizer.skipped = int(skipped.values)
        self._continue(state)

    def _finish(self) -> None:
        target = self.directory / "weights"
        partial = target.with_name("weights.partial")
        if self.mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            create_weights(partial, self.config, self.part.shapes)
        dist.barrier()
        places = [p for file in weight_places(self.config, self.part.shapes) for p in file]
        write_boxes(partial, places, self.part.held())
        dist.barrier()
        if self.mesh.rank == 0:
            self.data.tokenizer().save(partial)
            replace_directory(partial, target)
        dist.barrier()


def local_device(name: str) -> torch.device:
    """The processor, or this process's own GPU."""
    device = pick_device(name)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device


def padded(batch: Batch | None, size: int) -> Batch:
    """A batch of exactly `size` tokens: what is missing is one more document without targets."""
    have = 0 if batch is None else len(batch.tokens)
    rest = size - have
    if batch is not None and rest == 0:
        return batch
    tokens, targets = torch.zeros(rest, dtype=torch.int64), torch.full((rest,), NO_TARGET)
    if batch is None:
        return Batch(tokens, targets, (rest,), 0, 0, 0)
    return replace(
        batch, tokens=torch.cat([batch.tokens, tokens]), targets=torch.cat([batch.targets, targets]),
        lengths=(*batch.lengths, rest),
    )  # fmt: skip
