"""Every ablation is a model that trains, one change away from the baseline."""

import importlib
from types import ModuleType

import pytest
import torch

from perilune.config import preset
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.release import to_json
from perilune.train.optim import Optimizer, plan
from perilune.train.options import TrainConfig

FIRST_READ = "layers.0.self_attention_res_proj.weight"


@pytest.fixture
def ablate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend("bench")
    return importlib.import_module("ablate")


def test_every_variant_takes_a_step_that_moves_every_parameter(ablate: ModuleType) -> None:
    tokens, layout = torch.randint(256, (32,)), Layout.packed([20, 12])
    for name, (model_changes, train_changes, _) in ablate.VARIANTS.items():
        torch.manual_seed(0)
        config = preset("tiny").replace(vocab_size=256, **model_changes)
        options = TrainConfig(**train_changes)
        to_json(config)  # run.json needs it
        model = K3(config)
        model.reset_parameters()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = Optimizer(plan(model.named_parameters(), config, mode=options.optimizer))
        model(tokens, layout).logits.logsumexp(-1).sum().backward()
        optimizer.step(1e-2)
        # Some expert may get no token; AttnRes norms stay while their queries are zero, layer 0 mixes nothing.
        watched = [n for n in before if "experts" not in n and "res_norm" not in n and n != FIRST_READ]
        still = [n for n in watched if torch.equal(model.get_parameter(n), before[n])]
        assert not still, f"{name} leaves {still[:3]} untrained"


def test_the_table_pairs_seeds(ablate: ModuleType) -> None:
    """Variant minus baseline is 0.1 at either seed though the seeds differ by 1: spread 0, not 0.7."""
    rest = {"max_violation": 0.2, "dead": 0.0, "tokens_per_second": 8000.0, "total": 2_400_000, "active": 1_200_000}
    done = {
        f"{n}/{s}": {"val_bpb": 1.0 + s + 0.1 * (n == "sign"), **rest} for n in ("baseline", "sign") for s in (0, 1)
    }
    baseline, sign = ablate.table(done, 2).splitlines()[2:]
    assert baseline.startswith("| baseline | 1.500 ± 0.707 |  |")
    assert sign.startswith("| sign | 1.600 ± 0.707 | +0.100 ± 0.000 | 0.20 | 0.0% | 8,000 | 2.40M, 1.20M |")
