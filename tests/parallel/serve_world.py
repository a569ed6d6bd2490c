"""Checks for a world of two processes: a parallel engine says what one device says."""

import dataclasses

import torch.distributed as dist
from serve.toy import assert_says, greedy, make, prompt, text

from perilune.serve.engine import Engine
from perilune.serve.parallel import Ranks
from perilune.serve.request import EngineOptions, Request, Sampling

OPTIONS = EngineOptions(block_tokens=16, pool_tokens=1024, max_batch=4, token_budget=40)


def answers(ranks: Ranks, requests: list[Request]) -> dict[str, list]:
    """On the leader; the others follow."""
    said: dict[str, list] = {}
    if ranks.rank:
        ranks.follow()
        return said
    for request in requests:
        ranks.submit(request)
    while ranks.busy:
        for delta in ranks.step():
            said.setdefault(delta.id, []).append(delta)
    ranks.close()
    return said


def check_two_ranks_say_what_one_says(_: object) -> None:
    for drafts in (0, 2):
        ranks = Ranks(make(), dataclasses.replace(OPTIONS, speculate=drafts))
        assert ranks.stats().page_tokens == 32  # one head's state is half of two heads': 20 tokens, 2 blocks
        prompts = {f"r{i}": prompt(30) + prompt(7 + 20 * i, i) for i in range(3)}
        for _again in range(2):
            said = answers(ranks, [Request(name, ids, greedy(6)) for name, ids in prompts.items()])
        for name, ids in prompts.items():
            if ranks.rank == 0:
                assert_says(make(), ids, said[name])
                assert said[name][-1].usage.cached_tokens > 0
        assert ranks.stats().pages_running == 0
        ranks.engine.scheduler.pool.audit()


def check_sampling_agrees(_: object) -> None:
    hot = Sampling(temperature=1.2, max_tokens=12, ignore_eos=True)
    ranks = Ranks(make(), OPTIONS)
    answers(ranks, [Request("a", prompt(20), hot), Request("b", prompt(9), hot)])
    books: list = [None, None]
    dist.all_gather_object(books, ranks.stats().completion_tokens)
    assert books == [24, 24]


def check_a_state_moves_between_widths(_: object) -> None:
    """Prefill on one device, decode on two, and back again: the same text as without moving."""
    ids = prompt(50)
    whole = Engine(make(), OPTIONS)
    whole.submit(Request("a", ids, greedy(1), keep_state=True))
    (first,) = [d for _ in range(9) for d in whole.step()]
    ranks = Ranks(make(), OPTIONS)
    ids = (*ids, *first.tokens)
    said = answers(ranks, [Request("a", ids, greedy(5), state=first.state, keep_state=True)])
    if ranks.rank:
        return
    assert_says(make(), ids, said["a"])
    assert said["a"][-1].usage.cached_tokens == first.state.length
    state = said["a"][-1].state
    ids = (*ids, *text(said["a"]))
    back = Engine(make(), OPTIONS)
    back.submit(Request("a", ids, greedy(4), state=state))
    more = []
    while back.busy:
        more += back.step()
    assert more[-1].usage.cached_tokens == state.length == len(ids) - 1
    assert_says(make(), ids, more)


def check_packed_experts_divide_too(_: object) -> None:
    """Experts in MXFP4 on two ranks say what all of them say on one."""
    wide = {"moe_intermediate_size": 64, "routed_expert_hidden_size": 32}
    ids = prompt(30)
    said = answers(Ranks(make(**wide).pack_experts(), OPTIONS), [Request("a", ids, greedy(6))])
    if said:
        assert_says(make(**wide).pack_experts(), ids, said["a"])
