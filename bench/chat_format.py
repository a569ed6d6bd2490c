"""Speed of the chat format: segments to ids, and ids through the streaming parser one at a time.

    python bench/chat_format.py [--tokenizer TIKTOKEN_MODEL] [--words 200000]

Without a tokenizer it trains one of 4,096 tokens on the text it renders.
"""

import argparse
import platform
import time

from perilune.chat import Parser, encode_with_targets, read_request, render
from perilune.tokenizer import Tokenizer

SENTENCE = "The rain in Hangzhou falls on 西湖, and the build takes 1.5 times as long as it did. "


def conversation(words: int) -> dict:
    """Equal parts of reasoning, answer and one string argument."""
    text = SENTENCE * (words // (3 * len(SENTENCE.split())))
    call = {"id": "a", "function": {"name": "write", "arguments": {"content": text, "lines": 1}}}
    said = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}
    return {"messages": [said], "add_generation_prompt": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer")
    parser.add_argument("--words", type=int, default=200_000)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else Tokenizer.train([SENTENCE * 100], 4096)
    tokenizer.encode("")  # builds the encoder
    body = conversation(args.words)
    start = time.perf_counter()
    ids, targets = encode_with_targets(render(read_request(body)).segments, tokenizer)
    rendered = time.perf_counter() - start
    written = [token for token, target in zip(ids, targets) if target]
    stream = Parser(tokenizer)
    start = time.perf_counter()
    for token in written:
        stream.feed([token])
    stream.finish()
    parsed = time.perf_counter() - start
    print(f"{platform.machine()}, Python {platform.python_version()}, {len(written)} ids")
    print(
        f"render and encode {len(ids) / rendered / 1e6:.2f} M ids/s, parse {parsed / len(written) * 1e6:.1f} us an id"
    )


if __name__ == "__main__":
    main()
