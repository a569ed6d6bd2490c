"""Speed of the tokenizer on the running Python's standard library: training, encoding, bytes per token.

    python bench/tokenizer.py [--vocab 2048 4096 16384] [--threads 1]

Also counts the files that the written ranks and the trained `tokenizers` object encode differently (must be 0).
"""

import argparse
import os
import platform
import sys
import sysconfig
import time
from pathlib import Path

from perilune.tokenizer import Tokenizer, special_ids, train_bpe

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}


def corpus() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts))
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    texts = corpus()
    size = sum(len(text.encode()) for text in texts)
    machine = f"{args.threads} thread(s), {platform.machine()}, Python {platform.python_version()}"
    print(f"{len(texts)} files, {size / 1e6:.2f} MB, {machine}")
    different = 0
    for vocab in args.vocab:
        start = time.perf_counter()
        tokenizer = Tokenizer.train(texts, vocab)
        trained = time.perf_counter()
        ids = tokenizer.encode_batch(texts, args.threads)
        encoded = time.perf_counter()
        reference = train_bpe(texts, special_ids(vocab)["[BOS]"])
        unequal = sum(reference.encode(text).ids != mine for text, mine in zip(texts, ids))
        different += unequal
        tokens = sum(map(len, ids))
        seconds = encoded - trained
        print(
            f"vocab {vocab:6d}: train {trained - start:5.2f} s, encode {size / seconds / 1e6:5.2f} MB/s "
            f"({tokens / seconds / 1e6:.2f} M tokens/s), {size / tokens:.3f} bytes/token, {unequal} files differ"
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
