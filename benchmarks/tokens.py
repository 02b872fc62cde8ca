"""Encoding beside SentencePiece itself, the fastest encoder found that gives exactly its ids; and on two processes.

Beside SentencePiece, the text is the first megabytes of every source of the corpus, a source at a time, as shards of
documents are encoded. SentencePiece's best call form counts: all documents at once or one by one, as lists or NumPy
arrays, one thread. It is told from a sample. Speed is by CPU time, since both are one process. Two processes encode the
whole corpus, from Parquet to token shards; their speed is by the clock, the start of the processes included.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sentencepiece
from corpus import FOLDER, build_corpus
from measure import Row, alternate, arguments, paired, report

from model.data.config import TokenizerConfig
from model.data.pieces import InProcess
from model.data.tokenization.tokenizer import END_OF_TEXT, Tokenizer
from model.data.tokenization.training import train_tokenizer
from model.data.tokens.encoding import encode_parts
from tasks.pool import ProcessPool

Encode = Callable[[list[str]], object]

PEER = "sentencepiece"
ONE = "1 process"
PART_BYTES = 8_000_000
TRAINED_PIECES, QUICK_PIECES = 65_536, 4_096


def main() -> None:
    options = arguments(__doc__ or "")
    source_bytes, rounds = (100_000, 1) if options.quick else (8_000_000, 3)
    corpus = build_corpus(quick=options.quick)
    sources = [take(path, source_bytes) for path in corpus]
    model = find_model(sources, options.quick)
    print(f"{Tokenizer(model).vocab_size:,} pieces, {megabytes(sources):.1f} MB", file=sys.stderr)
    rows = [
        beside_sentencepiece(sources, model, rounds),
        on_two_processes(corpus, model, rounds),
        identity([texts[:50] for texts in sources], model),
    ]
    report(rows, options)


def take(path: Path, size: int) -> list[str]:
    """The first documents of a source, up to a size in bytes."""
    texts: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if size <= 0:
                break
            texts.append(json.loads(line)["text"])
            size -= len(texts[-1].encode())
    return texts


def megabytes(sources: Sequence[Sequence[str]]) -> float:
    return sum(len(text.encode()) for texts in sources for text in texts) / 1e6


def find_model(sources: Sequence[list[str]], quick: bool) -> Path:
    """The vocabulary that tokenizer.py trained, or a smaller one trained here."""
    trained = FOLDER / "tokenizer" / "tokenizer.model"
    if trained.exists() and not quick:
        return trained
    pieces = QUICK_PIECES if quick else TRAINED_PIECES
    path = FOLDER / f"tokenizer-{pieces}"
    if not (path / "tokenizer.model").exists():
        print(f"training {pieces:,} pieces; tokenizer.py's 262,144 are not there", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="tokens-") as work:
            shard = Path(work) / "documents.parquet"
            pq.write_table(pa.table({"text": [text for texts in sources for text in texts]}), shard)
            train_tokenizer([shard], TokenizerConfig(vocab_size=pieces), 0, path, Path(work), InProcess())
    return path / "tokenizer.model"


def beside_sentencepiece(sources: Sequence[list[str]], model: Path, rounds: int) -> Row:
    tokenizer, peer = Tokenizer(model), sentencepiece.SentencePieceProcessor(model_file=str(model))

    def timed(encode: Encode, sources: Sequence[list[str]] = sources) -> Callable[[], float]:
        size = megabytes(sources)

        def work() -> float:
            started = time.process_time()
            for texts in sources:
                encode(texts)
            return size / (time.process_time() - started)

        return work

    forms: dict[str, Encode] = {
        "all, NumPy": lambda texts: peer.encode(texts, out_type="numpy", num_threads=1),
        "all, lists": lambda texts: peer.encode(texts, num_threads=1),
        "one by one, NumPy": lambda texts: [peer.encode(text, out_type="numpy") for text in texts],
        "one by one, lists": lambda texts: [peer.encode(text) for text in texts],
    }
    sample = [texts[:20] for texts in sources]
    tried = alternate({name: timed(form, sample) for name, form in forms.items()}, 3)
    best = max(forms, key=lambda form: sorted(tried[form])[1])
    print(f"SentencePiece's best call form: {best}", file=sys.stderr)

    result = paired(timed(tokenizer.encode_documents), {PEER: timed(forms[best])}, rounds)
    return Row("encode vs sentencepiece", "MB/cpu-s", result.jumbo, result.peers, result.ratios[PEER], ">= 1.0")


def on_two_processes(corpus: Sequence[Path], model: Path, rounds: int) -> Row:
    """The whole step from Parquet to token shards."""
    with tempfile.TemporaryDirectory(prefix="tokens-") as name:
        folder = Path(name)
        parts = write_parts(corpus, folder / "documents")
        size = sum(pc.sum(pc.binary_length(pq.read_table(path)["text"])).as_py() for path in parts.values()) / 1e6
        runs = iter(range(1000))

        def timed(processes: int) -> Callable[[], float]:
            def work() -> float:
                run = folder / f"run-{next(runs)}"
                (run / "out").mkdir(parents=True)
                engine = ProcessPool(processes, lambda message: None)
                started = time.perf_counter()
                encode_parts(parts, model, run / "work", run / "out", engine)
                seconds = time.perf_counter() - started
                engine.close()
                return size / seconds

            return work

        result = paired(timed(2), {ONE: timed(1)}, rounds)
    return Row("encode 2 processes vs 1", "MB/s", result.jumbo, result.peers, result.ratios[ONE], ">= 1.8")


def write_parts(corpus: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Document shards of the corpus, of some PART_BYTES."""
    folder.mkdir()
    parts: dict[str, Path] = {}
    for path in corpus:
        with path.open(encoding="utf-8") as lines:
            while some := lines.readlines(PART_BYTES):
                part = folder / f"{len(parts):05}.parquet"
                pq.write_table(pa.table({"text": [json.loads(line)["text"] for line in some]}), part)
                parts[f"train/{part.stem}"] = part
    return parts


def identity(sources: Sequence[list[str]], model: Path) -> Row:
    """The share of documents whose ids are SentencePiece's own of the whole document."""
    tokenizer, peer = Tokenizer(model), sentencepiece.SentencePieceProcessor(model_file=str(model))
    same = total = 0
    for texts in sources:
        ids, ends = tokenizer.encode_documents(texts)
        expected = peer.encode(texts, num_threads=1)
        for text, document, own in zip(texts, np.split(ids, ends[:-1]), expected, strict=True):
            # SentencePiece alone would lose its own sign for a space.
            same += document.tolist() == [*own, END_OF_TEXT] or "\u2581" in text
            total += 1
    return Row("identical ids", "share of documents", same / total, {}, None, "= 1")


if __name__ == "__main__":
    main()
