"""Checks for worlds of two and more processes: an engine whose ranks share out the tokens of MLA latents says what one
process says that keeps them all, in fp64, whatever becomes of its pages."""

import dataclasses

import torch
import torch.distributed as dist
from parallel.serve_world import answers
from serve.toy import assert_says, greedy, make, prompt, text

from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.parallel import Ranks
from perilune.serve.request import EngineOptions, Request

OPTIONS = EngineOptions(block_tokens=16, pool_tokens=1024, max_batch=4, token_budget=40)
WIDE = {"kda_num_heads": 4, "num_attention_heads": 4, "num_experts": 8}  # what four ranks divide


def toy() -> K3:
    return make(**WIDE)


def shared(**changes: object) -> Ranks:
    return Ranks(toy(), dataclasses.replace(OPTIONS, **changes), shard_latents=True)


def check_batches_chunks_and_hits(_: object) -> None:
    """Contexts shorter than the ranks are many, chunks that end anywhere, drafts; all of it again from the cache."""
    prompts = {f"r{i}": prompt(30) + prompt(7 + 20 * i, i) for i in range(3)}
    prompts |= {f"s{n}": prompt(n, 9) for n in (1, 2, 3)}
    for drafts in (0, 2):
        ranks = shared(speculate=drafts)
        for again in (False, True):
            said = answers(ranks, [Request(name, ids, greedy(6)) for name, ids in prompts.items()])
            for name, ids in prompts.items() if ranks.rank == 0 else ():
                assert_says(toy(), ids, said[name])
                assert not again or len(ids) < 16 or said[name][-1].usage.cached_tokens > 0
        assert ranks.stats().pages_running == 0
        ranks.engine.scheduler.pool.audit()


def check_preempted_and_offloaded(_: object) -> None:
    """Three requests in a pool for hardly two, and prefixes that only CPU memory has room for."""
    ranks = shared(speculate=1, max_batch=3, pool_bytes=20 * _page(), offload_bytes=10**6)
    prompts = [prompt(90 + i, i) for i in range(3)]
    for _again in range(3):
        said = answers(ranks, [Request(str(i), ids, greedy(20)) for i, ids in enumerate(prompts)])
        for i, ids in enumerate(prompts if ranks.rank == 0 else ()):
            assert_says(toy(), ids, said[str(i)])
    stats = ranks.stats()
    assert stats.preemptions > 0 and stats.evictions > 0 and stats.offload_tokens > 0


def _page() -> int:
    return shared(speculate=1).engine.scheduler.geometry.page_bytes


def check_a_state_moves_between_engines(_: object) -> None:
    """From one process to a share of the latents, to ranks that repeat them, back to shares, and to one process."""
    ids, state = prompt(50), None
    for make_engine in (_one, shared, _repeated, shared, _one):
        said = answers(make_engine(), [Request("a", ids, greedy(5), state=state, keep_state=True)])
        box = [None]
        if dist.get_rank() == 0:
            assert_says(toy(), ids, said["a"])
            assert said["a"][-1].usage.cached_tokens == (0 if state is None else state.length)
            box = [((*ids, *text(said["a"])), said["a"][-1].state)]
        dist.broadcast_object_list(box, 0)
        ids, state = box[0]
        assert state.length == len(ids) - 1 and all(len(x) == state.length for x in state.mla.values())


def _repeated() -> Ranks:
    return Ranks(toy(), OPTIONS)


class _One(Ranks):
    """One process: its leader alone, with the face of several."""

    def __init__(self) -> None:
        self.engine, self.rank, self._orders = Engine(toy(), OPTIONS), dist.get_rank(), []
        self.size = 1

    def _broadcast(self, value: object) -> object:
        return value

    def follow(self) -> None:
        """The others are not needed."""

    def _join(self, share: object) -> object:
        return share


def _one() -> Ranks:
    return _One()


def check_the_same_bytes_hold_as_many_times_the_tokens(_: object) -> None:
    size = dist.get_world_size()
    one, many = _repeated().engine.scheduler, shared().engine.scheduler
    pages = dataclasses.replace(one.geometry, shares=size)
    assert many.geometry == pages and many.pool.latents.shape[1] == pages.page_tokens // size
    per_token = [g.pages("mla") * g.page_bytes / g.page_tokens for g in (one.geometry, pages)]
    assert per_token[0] == size * per_token[1]


def check_float32(_: object) -> None:
    """In a dtype that is served, to the tolerance that the engine is held to."""
    ids = prompt(60)
    ranks = Ranks(make(dtype=torch.float32, **WIDE), OPTIONS, shard_latents=True)
    said = answers(ranks, [Request("a", ids, greedy(6))])
    if said:
        assert_says(make(dtype=torch.float32, **WIDE), ids, said["a"], atol=1e-4)
