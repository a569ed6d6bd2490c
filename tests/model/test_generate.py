"""Generation: greedy equals argmax of the whole, seeds fix the text, bad prompts are one sentence."""

from collections import Counter

import pytest
import torch

from perilune.config import preset
from perilune.model.cache import Dense
from perilune.model.generate import PromptError, Sampling, generate, sample
from perilune.model.layout import Layout
from perilune.model.net import K3


@pytest.fixture(scope="module")
def model() -> K3:
    torch.manual_seed(0)
    model = K3(preset("tiny").replace(vocab_size=64, max_position_embeddings=40, initializer_range=0.1))
    model.reset_parameters()
    return model


def test_greedy_is_the_argmax_of_the_whole_sequence(model: K3) -> None:
    prompt = [3, 1, 4, 1, 5]
    text = list(generate(model, prompt, Sampling(temperature=0, max_tokens=12)))
    with torch.no_grad():
        logits = model(torch.tensor(prompt + text), Layout.packed([17])).logits
    assert logits[4:-1].argmax(-1).tolist() == text


def test_a_seed_fixes_the_text(model: K3) -> None:
    runs = [list(generate(model, [1, 2], Sampling(seed=s, max_tokens=20))) for s in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_a_cache_goes_on_where_it_was(model: K3) -> None:
    cache = Dense(model.config, 1, dtype=torch.float32)
    greedy = Sampling(temperature=0, max_tokens=4)
    first = list(generate(model, [1, 2, 3], greedy, cache))
    # The last token was yielded but not fed: the next turn feeds it.
    second = list(generate(model, [first[-1], 9], greedy, cache))
    assert second == list(generate(model, [1, 2, 3, *first, 9], greedy))


def test_stop_and_length(model: K3) -> None:
    text = list(generate(model, [5], Sampling(temperature=0, max_tokens=6)))
    stop = text[2]
    expected = text[: text.index(stop)]
    assert list(generate(model, [5], Sampling(temperature=0, stop=(stop,)))) == expected
    assert len(list(generate(model, [5] * 38, Sampling(seed=0, max_tokens=100)))) == 3  # 40 positions and the last word


@pytest.mark.parametrize(
    "prompt, words",
    [([], "empty"), ([1] * 41, "41 tokens long; the context holds 40"), ([64], "outside the vocabulary")],
)
def test_bad_prompts(model: K3, prompt: list[int], words: str) -> None:
    with pytest.raises(PromptError, match=words):
        next(generate(model, prompt, Sampling()))


def test_sampling_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)

    def counts(**rule) -> Counter:
        return Counter(sample(probs.log(), Sampling(**rule), generator) for _ in range(4000))

    whole = counts()
    assert all(abs(whole[i] / 4000 - probs[i]) < 0.03 for i in range(4))
    assert set(counts(top_k=2)) == {0, 1}
    assert set(counts(top_p=0.75)) == {0, 1}
    assert set(counts(top_p=0.85)) == {0, 1, 2}
    assert counts(temperature=0.2)[0] > 3500
    with pytest.raises(ValueError, match="top_p must lie in"):
        Sampling(top_p=0)
