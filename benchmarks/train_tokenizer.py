"""Jumbo's part of tokenizer.py: trains a vocabulary on documents, on 2 processes.

python train_tokenizer.py DOCUMENTS PIECES OUT. DOCUMENTS is a folder of Parquet files; OUT/tokenizer/tokenizer.model is
the vocabulary.
"""

import sys
from pathlib import Path

from model.data.config import TokenizerConfig
from model.data.tokenization.training import train_tokenizer
from tasks.pool import ProcessPool

PROCESSES = 2


def run(documents: Path, pieces: int, out: Path) -> None:
    pool = ProcessPool(PROCESSES, lambda line: print(line, file=sys.stderr))
    config = TokenizerConfig(vocab_size=pieces, sample_bytes=1 << 30)
    train_tokenizer(sorted(documents.glob("*.parquet")), config, 0, out / "tokenizer", out / "work", pool)
    pool.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
