"""A tokenizer that is trained on texts which a test makes."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from model.data.config import TokenizerConfig
from model.data.pieces import Engine, InProcess
from model.data.tokenization.training import train_tokenizer as train


def write_shards(texts: Sequence[str], folder: Path, count: int = 1) -> list[Path]:
    """Writes the texts in turn to `count` shards of documents and returns these."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.parquet" for number in range(count)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"text": pa.array(texts[number::count], pa.string())}), path)
    return paths


def train_tokenizer(
    texts: Iterable[str], config: TokenizerConfig, seed: int, out: Path, shards: int = 1, engine: Engine | None = None
) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(list(texts), Path(folder) / "shards", shards)
        return train(paths, config, seed, out, Path(folder) / "work", engine or InProcess())
