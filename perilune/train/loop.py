"""The trainer: a step is accumulate, clip, update, rebalance, record; a run is steps, looks and checkpoints.

Everything that a step depends on is in the checkpoint (weights, router biases, momenta, position, step, generator), so
a run that was killed continues bit for bit on CPU.
"""

import dataclasses
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from perilune.accounting import account, non_embedding_active
from perilune.config import ModelConfig
from perilune.data import Batches, Prepared
from perilune.model.linear import weights_cast_once
from perilune.model.net import K3
from perilune.model.taps import Taps
from perilune.model.weights import load, named_tensors, save_tensors
from perilune.ops.memory import keep_freed_memory
from perilune.ops.quantile import expert_counts, margin_histogram, margins
from perilune.release import to_json
from perilune.train.activations import activation_policy, apply_policy
from perilune.train.balance import QuantileBalancer, RouterTap
from perilune.train.checkpoint import Checkpoint, CheckpointError, Checkpoints, latest, rng_state, set_rng_state
from perilune.train.checkpoint import load as open_checkpoint
from perilune.train.clip import qk_clip_model
from perilune.train.inspect import evaluate, inspect
from perilune.train.loss import batch_loss, second_target_count
from perilune.train.machine import describe, pick_device, pick_precision
from perilune.train.metrics import (
    MetricsLog,
    ProgressLine,
    StepMetrics,
    bits_per_byte,
    layer_loads,
    measure_peak,
    mfu,
    peak_memory,
)
from perilune.train.optim import Optimizer, plan
from perilune.train.options import TrainConfig
from perilune.train.schedule import Schedule

log = logging.getLogger("perilune.train")

_LOOKS = ("eval_every", "eval_tokens", "inspect_every", "sample_prompts", "sample_tokens", "checkpoint_every", "keep")
# What of a recipe may change between a checkpoint and its continuation: how far it goes, and what is shown or exported.
MAY_CHANGE = ("name", "stages", "export", "train.steps", "train.wandb", *(f"train.{key}" for key in _LOOKS))


class Trainer:
    """One pretraining run into `directory`: checkpoints/, metrics.jsonl, inspect.jsonl, run.json, then weights/.

    `recipe` is the resolved recipe, written beside the figures and compared on resume.
    """

    def __init__(
        self, config: ModelConfig, options: TrainConfig, data: Prepared, directory: Path, recipe: dict[str, Any]
    ) -> None:
        self.config, self.options, self.data, self.directory, self.recipe = config, options, data, directory, recipe
        self.device = pick_device(options.device)
        self.dtype = pick_precision(options.precision, self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(options.seed)
        self.model = K3(config)
        self.model.reset_parameters()
        self.model.to(self.device)
        layers = [*self.model.layers, *self.model.mtp]
        apply_policy(layers, activation_policy(options.activations, len(layers)))
        plans = plan(
            self.model.named_parameters(),
            config,
            mode=options.optimizer,
            weight_decay=options.weight_decay,
            adamw_lr_scale=options.adamw_lr_scale,
        )
        self.optimizer = Optimizer(plans)
        self.schedule = Schedule(options.lr, options.steps, options.schedule, options.warmup_share, options.floor_share)
        self.balancer = self._balancer(layers)
        self.batches = Batches(data.train, options.context, options.rows, options.seed)
        self.step = self.position = 0
        self.peak = options.peak_flops or measure_peak(self.device, self.dtype)
        self.active = non_embedding_active(config)

    def _balancer(self, layers: Iterable[Any], group: Any = None) -> QuantileBalancer | None:
        o = self.options
        biases = {
            layer.layer: layer.block_sparse_moe.gate.e_score_correction_bias
            for layer in layers
            if hasattr(layer, "block_sparse_moe")
        }
        if not biases:
            return None
        return QuantileBalancer(
            biases,
            self.config.num_experts_per_token,
            o.balance,
            bins=o.balance_bins,
            ema=o.balance_ema,
            gamma=o.balance_gamma,
            group=group,
        )

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self) -> StepMetrics:
        """Take one optimiser step from the current position."""
        began = time.perf_counter()
        o, rows = self.options, self.options.rows
        batches = [self.batches.at(self.position + i * rows) for i in range(o.accumulate)]
        targets = sum(int((b.targets >= 0).sum()) for b in batches)
        seconds_ahead = max(1, sum(map(second_target_count, batches))) if self.model.mtp else 1
        nats, max_logits = torch.zeros((), device=self.device), dict[int, torch.Tensor]()
        look = self.step % o.logit_every == 0
        with weights_cast_once():
            for batch in batches:
                taps = Taps.of({"max_logit"} if look else ())
                with self._autocast():
                    loss = batch_loss(self.model, batch, self.dtype, taps)
                    total = loss.next_token / max(1, targets) + o.mtp_weight * loss.mtp / seconds_ahead
                total.backward()
                nats += loss.next_token.detach()  # on the device: the host runs ahead
                self._observe(loss.routes)
                for layer, top in taps.max_logits.items():
                    max_logits[layer] = torch.maximum(max_logits[layer], top) if layer in max_logits else top
        lr = self.schedule(self.step)
        report = self.optimizer.step(lr, o.grad_clip)
        self.optimizer.zero_grad()
        found = self._rebalance(report.skipped)
        if o.qk_clip and max_logits and not report.skipped:
            qk_clip_model(self._by_layer(), max_logits, self.config, o.qk_clip)
        self.step += 1
        self.position += o.accumulate * rows
        seconds = time.perf_counter() - began
        mean = float(nats) / max(1, targets)
        return StepMetrics(
            step=self.step - 1,
            tokens=self.step * o.batch_tokens,
            loss=mean,
            bpb=bits_per_byte(mean, targets, max(1, sum(b.n_bytes for b in batches))),
            grad_norm=report.grad_norm,
            lr=lr,
            tokens_per_second=o.batch_tokens / seconds,
            mfu=mfu(self.active, o.batch_tokens / seconds, self.peak),
            peak_flops=self.peak,
            memory=peak_memory(self.device),
            max_logit=max((float(top.max()) for top in max_logits.values()), default=None),
            skipped=self.optimizer.skipped,
            **found,
        )

    def _by_layer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters with the MTP layer counted after the last, as the release names it."""
        for name, p in self.model.named_parameters():
            mtp = re.match(r"mtp\.(\d+)\.", name)
            layer = self.config.num_hidden_layers + int(mtp[1]) if mtp else 0
            yield (f"layers.{layer}.{name[mtp.end() :]}" if mtp else name), p

    def _autocast(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _observe(self, routes: dict[int, Any]) -> None:
        if self.balancer is None:
            return
        o, biases = self.options, self.balancer.biases
        taps = {}
        for layer, route in routes.items():
            histogram = exact = None
            if o.balance == "quantile":
                histogram = margin_histogram(route.scores, route.threshold, biases[layer], o.balance_bins)
            elif o.balance == "exact":
                exact = margins(route.scores, route.threshold)
            taps[layer] = RouterTap(expert_counts(route.idx, self.config.num_experts), histogram, exact)
        self.balancer.observe(taps)

    def _rebalance(self, skipped: bool) -> dict[str, Any]:
        if self.balancer is None:
            return {}
        if skipped:
            self.balancer.discard()
            return {}
        return layer_loads(dict(zip(self.balancer.layers, self.balancer.update())))

    # --- a run ------------------------------------------------------------------------------------------------------

    def run(self) -> K3:
        """Train to the last step, from the newest checkpoint if there is one, and write `weights/`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with Checkpoints(self.directory / "checkpoints", keep=self.options.keep) as checkpoints:
            self._resume()
            self._describe_run()
            looks = Records(self.directory / "inspect.jsonl", self.step)
            with (
                MetricsLog(self.directory, self.step, self.options.wandb) as metrics,
                ProgressLine(self.options.steps, self.step) as line,
            ):
                while self.step < self.options.steps:
                    record = self._one(looks)
                    metrics.write(record)
                    line.update(record)
                    if self._due(self.options.checkpoint_every):
                        metrics.sync()
                        self._save(checkpoints)
            checkpoints.wait()
        self._finish()
        return self.model

    def _one(self, looks: "Records") -> StepMetrics:
        """A step and the looks that are due after it."""
        record = self.train_step()
        if self._due(self.options.eval_every):
            last = self.step == self.options.steps
            tokens = self.data.held_out.n_tokens if last else self.options.eval_tokens
            val = evaluate(self.model, self.data.held_out, self.options, tokens, self.dtype)
            record = dataclasses.replace(record, val_bpb=val)
        if self._due(self.options.inspect_every):
            looks.write({"step": self.step - 1, **inspect(self.model, self.data, self.options)})
        return record

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.options.steps

    def _save(self, checkpoints: Checkpoints) -> None:
        config = self.config
        trainer = {
            "step": self.step,
            "position": self.position,
            "rng": rng_state(),
            "balancer": self.balancer.state_dict() if self.balancer else None,
            "recipe": self.recipe,
            "data": self.data.fingerprint,
        }
        checkpoints.save(
            self.step,
            named_tensors(self.model),
            lambda values, path: _write_weights(config, values, path, self.data),
            self.optimizer.state_dict(),
            trainer,
        )

    def _resume(self) -> None:
        path = latest(self.directory / "checkpoints")
        if path is None:
            return
        checkpoint = open_checkpoint(path)
        self.restore(checkpoint)
        log.info("Continuing from %s (step %d).", path.name, self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Everything as it was; more steps than it was made for stretch the schedule from here on.

        Raises CheckpointError or ConfigError in one sentence if it is another run's.
        """
        state = self._expect(checkpoint)
        load(self.model, checkpoint.weights)
        self.optimizer.load_state_dict(checkpoint.optimizer())
        self._continue(state)

    def _expect(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What the checkpoint says of its run, which is this one as far as `MAY_CHANGE` lets it differ."""
        checkpoint.expect_recipe(self.recipe, MAY_CHANGE)
        state = checkpoint.trainer
        if state["step"] > self.options.steps:
            raise CheckpointError(
                f"{checkpoint.path} has taken {state['step']} steps, so train.steps = {self.options.steps} is "
                "behind it; ask for more, or train into another directory."
            )
        if state["data"] != self.data.fingerprint:
            raise CheckpointError(
                f"{checkpoint.path} was trained on other data or another tokenizer (the sources have changed since); "
                "restore them, or train into another directory."
            )
        before = state["recipe"].get("train", {}).get("steps", self.options.steps)
        if before != self.options.steps:
            was, now = dataclasses.replace(self.schedule, steps=before), self.schedule
            log.warning(
                "This run was made for %d steps and now has %d: from step %d on the rate follows the new schedule "
                "(%.3g, where it was %.3g).", before, self.options.steps, state["step"],
                now(state["step"]), was(state["step"]),
            )  # fmt: skip
        return state

    def _continue(self, state: dict[str, Any]) -> None:
        self.step, self.position = state["step"], state["position"]
        set_rng_state(state["rng"])
        if self.balancer is not None:
            self.balancer.load_state_dict(state["balancer"])

    def _finish(self) -> None:
        _write_weights(self.config, named_tensors(self.model), self.directory / "weights", self.data)

    def _describe_run(self) -> None:
        cost = account(self.config)
        run = {
            "recipe": self.recipe,
            "config": to_json(self.config),
            "parameters": {"total": cost.total - cost.padding, "active": cost.active},
            "machine": describe(self.device),
            "peak_flops": self.peak,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        path = self.directory / "run.json"
        before = json.loads(path.read_text()) if path.exists() and self.step else None
        if before is None or before["recipe"] != self.recipe:
            started = {} if before is None else {"started": before["started"]}
            path.write_text(json.dumps(run | started, indent=1) + "\n")


class Records:
    """A JSONL of looks, cut back to the resumed step like the metrics."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < step]
        path.write_text("".join(line + "\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _write_weights(config: ModelConfig, values: Any, path: Path, data: Prepared) -> None:
    save_tensors(config, values, path, dtype="F32")
    data.tokenizer().save(path)
