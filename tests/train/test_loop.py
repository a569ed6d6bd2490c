"""The trainer's story: it learns, it resumes bit for bit, a killed run continues the same curve."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from perilune.config import ModelConfig, preset
from perilune.data import DataConfig, Prepared, prepare
from perilune.train.checkpoint import CheckpointError
from perilune.train.loop import Trainer
from perilune.train.loss import batch_loss
from perilune.train.options import TrainConfig

CONFIG = preset("tiny").replace(
    hidden_size=32, num_hidden_layers=5,
    mla_layers=(3, 4), kda_num_heads=2, kda_head_dim=16, num_attention_heads=2, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=48, num_experts=8, num_experts_per_token=2,
    moe_intermediate_size=16, routed_expert_hidden_size=16, vocab_size=400, num_nextn_predict_layers=1,
    max_position_embeddings=256,
)  # fmt: skip
OPTIONS = TrainConfig(
    steps=12, context=32, batch_tokens=256, micro_tokens=128, lr=0.02, eval_every=6, eval_tokens=512, inspect_every=6,
    sample_tokens=4, checkpoint_every=3, peak_flops=1e11,
)  # fmt: skip
TIMED = ("tokens_per_second", "mfu", "memory")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("corpus")
    for source in sorted(Path(json.__file__).parent.parent.glob("[a-d]*.py"))[:40]:
        (folder / source.name).write_text(source.read_text())
    return prepare(DataConfig(sources=(str(folder),), vocab_size=400, held_out=3), None, folder / "shards")


def trainer(data: Prepared, path: Path, config: ModelConfig = CONFIG, **changes) -> Trainer:
    options = TrainConfig(**{**vars(OPTIONS), **changes})
    return Trainer(config, options, data, path, {"train": {k: v for k, v in changes.items() if k != "steps"}})


def curve(path: Path) -> list[dict]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMED} for r in records]


def weights(path: Path) -> dict[str, torch.Tensor]:
    from perilune.model.shards import read_shards

    return {s.name: s.read() for s in read_shards(path / "weights")}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    trainer(data, path).run()
    return path


def assert_same_run(path: Path, whole: Path) -> None:
    assert curve(path) == curve(whole)
    looks = [(p / "inspect.jsonl").read_text() for p in (path, whole)]
    assert looks[0] == looks[1]
    ours, theirs = weights(path), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_it_learns_and_records(whole) -> None:
    records = curve(whole)
    assert [r["step"] for r in records] == list(range(12))
    assert records[-1]["loss"] < records[0]["loss"] - 0.2
    assert records[-1]["val_bpb"] and records[5]["val_bpb"] and records[4]["val_bpb"] is None
    assert all(len(r["max_violation"]) == 5 for r in records)  # four MoE layers and the MTP layer
    assert all(r["max_logit"] > 0 for r in records)
    run = json.loads((whole / "run.json").read_text())
    assert run["parameters"]["active"] < run["parameters"]["total"]
    look = json.loads((whole / "inspect.jsonl").read_text().splitlines()[-1])
    assert look["samples"][0]["prompt"] == "def "
    assert len(look["attn_res"]) == 2 * 5  # the first read has a lone source; the output read ends the list
    assert (whole / "weights" / "tiktoken.model").is_file()


def test_a_run_is_reproducible(data, whole, tmp_path) -> None:
    trainer(data, tmp_path).run()
    assert_same_run(tmp_path, whole)


def test_stopping_and_resuming_changes_nothing(data, whole, tmp_path) -> None:
    stop_after(trainer(data, tmp_path), 7)
    trainer(data, tmp_path).run()
    assert_same_run(tmp_path, whole)


def stop_after(run: Trainer, steps: int) -> None:
    class StopError(Exception):
        pass

    step = run.train_step

    def stepping():
        if run.step == steps:
            raise StopError
        return step()

    run.train_step = stepping  # type: ignore[method-assign]
    with pytest.raises(StopError):
        run.run()


def test_recomputing_activations_changes_no_loss(data, whole, tmp_path) -> None:
    """Bit for bit: the recomputed forward is the same program."""
    trainer(data, tmp_path, activations="recompute").run()
    assert [r["loss"] for r in curve(tmp_path)] == [r["loss"] for r in curve(whole)]


def test_micro_batches_sum_to_the_batch(data, tmp_path) -> None:
    losses = []
    for micro in (256, 128, 64):
        run = trainer(data, tmp_path / str(micro), micro_tokens=micro, balance="quantile")
        losses.append([run.train_step().loss for _ in range(3)])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), atol=2e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(losses[2]), torch.tensor(losses[0]), atol=2e-3, rtol=0)


def test_another_runs_checkpoint_is_refused(data, tmp_path) -> None:
    stop_after(trainer(data, tmp_path, lr=0.02), 4)
    with pytest.raises(CheckpointError, match=r"train\.lr"):
        trainer(data, tmp_path, lr=0.01).run()


def test_other_data_is_refused(data, tmp_path) -> None:
    stop_after(trainer(data, tmp_path), 4)
    changed = Prepared(data.path, data.train, data.held_out, {**data.index, "fingerprint": "another"})
    with pytest.raises(CheckpointError, match="other data"):
        trainer(changed, tmp_path).run()


def test_qk_clip_reaches_every_attention_layer(data, tmp_path) -> None:
    """The closing layers and the MTP layer: with a tiny ceiling all of them are scaled."""
    run, loose = (trainer(data, tmp_path / str(c), qk_clip=c) for c in (1e-6, 1e6))
    run.train_step()
    loose.train_step()
    names = [n for n, _ in run.model.named_parameters() if n.endswith("self_attn.kv_b_proj.weight")]
    assert len(names) == 3
    for name in names:
        ours, theirs = run.model.get_parameter(name), loose.model.get_parameter(name)
        nope = ours.view(2, 8 + 16, -1)[:, :8]
        assert nope.norm() < 0.1 * theirs.view(2, 8 + 16, -1)[:, :8].norm(), name


@pytest.mark.parametrize("balance", ["exact", "sign", "none"])
def test_every_balance_mode_trains(data, tmp_path, balance: str) -> None:
    run = trainer(data, tmp_path, balance=balance)
    before = run.train_step().loss
    for _ in range(4):
        after = run.train_step()
    assert after.loss < before
    biases = torch.stack(list(run.balancer.biases.values()))
    assert biases.any() == (balance != "none")


def test_bad_options_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"train\.batch_tokens 4096 must be whole micro-batches of 1000"):
        TrainConfig(micro_tokens=1000)
    with pytest.raises(ValueError, match=r"train\.steps must be at least 1"):
        TrainConfig(steps=0)


SCRIPT = """
import sys; from pathlib import Path
sys.path.insert(0, sys.argv[3])
from perilune.data import open_shards
from test_loop import trainer
trainer(open_shards(Path(sys.argv[1])), Path(sys.argv[2])).run()
"""


def test_kill_9_at_random_instants(data, whole, tmp_path) -> None:
    """The process is killed again and again; what is left always continues to the same curve and weights."""
    rng = random.Random(int.from_bytes(os.urandom(4), "big"))
    args = [sys.executable, "-c", SCRIPT, str(data.path), str(tmp_path), str(Path(__file__).parent)]
    kills = 0
    for _ in range(40):
        process = subprocess.Popen(args, stderr=subprocess.PIPE)
        if kills < 4:
            _wait_for_progress(tmp_path, process)
            time.sleep(rng.uniform(0, 1.0))
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()[-800:]
        kills += 1
    assert process.returncode == 0
    assert kills >= 1
    assert_same_run(tmp_path, whole)


def _wait_for_progress(path: Path, process: subprocess.Popen) -> None:
    """Until training writes something new: a kill while modules are imported proves nothing."""
    file = path / "metrics.jsonl"
    before = file.stat().st_size if file.exists() else 0
    while process.poll() is None and (not file.exists() or file.stat().st_size == before):
        time.sleep(0.02)


def test_positions_without_a_second_target_do_not_move_the_mtp_balance(data, tmp_path) -> None:
    run = trainer(data, tmp_path)
    batch = run.batches.at(0)
    routes = batch_loss(run.model, batch, torch.float32).routes
    # Of a sequence's targets all but the first are somebody's second.
    second = sum(max(0, int((t >= 0).sum()) - 1) for t in batch.targets.split(list(batch.lengths)))
    assert len(routes[5].idx) == len(routes[5].threshold) == second < len(batch.tokens)
    assert len(routes[4].idx) == len(batch.tokens)
