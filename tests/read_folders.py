"""Read folders for the tests of what comes after reading: documents as deduplication is given them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from model.data.config import DeduplicationConfig
from model.data.duplicates.minhash import band_keys
from model.data.pieces import InProcess, Piece
from model.data.words import split_words, word_hashes


class Killed(Exception):
    pass


class DyingEngine:
    """Dies before it has made more than so many pieces; counts those that it made."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.made = 0

    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.folder.exists():
                continue
            if not self.left:
                raise Killed(what)
            InProcess().finish(what, [piece])
            self.left -= 1
            self.made += 1


def write_read_folders(
    root: Path, shards: Sequence[Sequence[str]], config: DeduplicationConfig, sources: Sequence[str] = ()
) -> list[Path]:
    """One folder a shard of texts; each shard's source, if given, tells exact copies of the same text apart."""
    folders = []
    for number, texts in enumerate(shards):
        folder = root / f"{number:05}"
        folder.mkdir(parents=True)
        source = sources[number] if sources else ""
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), folder / "documents.parquet", row_group_size=3)
        digests = [xxhash.xxh3_128_intdigest(" ".join(text.lower().split()).encode()) for text in texts]
        content = [[digest >> 64, digest & (2**64 - 1)] for digest in digests]
        np.save(folder / "content.npy", np.array(content, np.uint64).reshape(-1, 2))
        raw = [xxhash.xxh3_64_intdigest(f"{source}\0{text}".encode()) for text in texts]
        np.save(folder / "raw.npy", np.array(raw, np.uint64))
        np.save(folder / "size.npy", np.array([len(text.encode()) for text in texts], np.uint32))
        np.save(folder / "bands.npy", band_keys(*word_hashes(split_words(texts)), config))
        folders.append(folder)
    return folders


def surviving_texts(shards: Sequence[Sequence[str]], verdicts: Sequence[Path]) -> list[str]:
    """The texts that survive, sorted."""
    return sorted(
        text
        for texts, folder in zip(shards, verdicts, strict=True)
        for text, survives in zip(texts, np.load(folder / "survives.npy"), strict=True)
        if survives
    )


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
