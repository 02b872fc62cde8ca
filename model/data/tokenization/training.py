"""Trains the vocabulary: mined candidates, a backbone by SentencePiece, and a choice among them by encoding text."""

import heapq
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from model.data.config import TokenizerConfig
from model.data.pieces import Engine, Piece, finish_piece
from model.data.tokenization.phrases import GroupLimits, Words, joins, mine_groups, mine_words
from model.data.tokenization.text_sample import Blocks, TextSample, sample_text
from model.data.tokenization.tokenizer import CONTROL_PIECES, END_OF_TEXT, PAD, SPACE, UNKNOWN
from model.data.tokenization.vocabulary import choose_vocabulary, count_pieces, count_use, with_exact_scores

TRAINING_VERSION = 2  # of what follows from documents and a configuration; with another one it is done anew
MODEL_FILE = "tokenizer.model"
USE_FILE = "use.npy"

_USER_PIECES = ["\n"]
_N_BYTES = 256
# SentencePiece keeps these for itself, or its training file cannot hold them; they are encoded as bytes.
_UNTRAINABLE = frozenset("\0\t\n\r\u2581\u2585")
_COVERAGE = 0.9999
_MIN_WORD_COUNT = 2
_MAX_LINE_CHARS = 1024  # SentencePiece drops lines above 4,192 bytes
_BACKBONE_SHARE = 0.2  # of the pieces, besides single characters
_BACKBONE_WORDS = 1 << 18  # the most frequent; subwords of the others are the same
_BACKBONE_CHARS = 1 << 25  # the trainer needs memory for every occurrence of a word: some 20 bytes a character
# The trainer says nothing while it works, so all of it has a deadline. Its time grows with the text, repeated parts not
# counted, of which one core does some 50,000 characters a second: what is slower than this hangs.
_TRAINER_BASE_SECONDS = 1800.0
_TRAINER_CHARS_PER_SECOND = 1000
_CANDIDATES_PER_PIECE = 4
_CHOICE_BYTES_PER_PIECE = 512  # of text that the choice is made on

# It ends with the process that waits for it, which cannot end it when it is killed itself.
_TRAIN = """
import json, os, sentencepiece, sys, threading, time
def watch(parent=os.getppid()):
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
sentencepiece.SentencePieceTrainer.train(**json.loads(sys.argv[1]))
"""
_TRAINER_OPTIONS: dict[str, Any] = {
    "input_format": "tsv",
    "model_type": "unigram",
    "hard_vocab_limit": False,  # the caller looks how many pieces were reached
    "character_coverage": 1.0,  # the rare characters are out already, and written as bytes
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    # What is trained on is what may become a piece, so white space and scripts need no rules of their own.
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": _USER_PIECES,
    "unk_id": UNKNOWN,
    "bos_id": -1,
    "eos_id": END_OF_TEXT,
    "eos_piece": CONTROL_PIECES[END_OF_TEXT],
    "pad_id": PAD,
    "pad_piece": CONTROL_PIECES[PAD],
    "num_threads": 8,  # part of the result: it fixes the order in which the threads' sums are added
    "minloglevel": 2,
}


class TrainerKilled(RuntimeError):
    """SentencePiece's trainer was killed: most likely because memory was exhausted, or by its deadline."""


def train_tokenizer(
    shards: Sequence[Path], config: TokenizerConfig, seed: int, out: Path, work: Path, engine: Engine
) -> Path:
    """Returns out/tokenizer.model, trained on a sample of the shards' text that the seed chooses.

    Beside it, out/use.npy says how often that text uses each piece, (vocab_size,) int64. Equal documents and seed, in
    any order and shards, give equal bytes.

    Args:
        shards: Parquet files with a column of text.
        work: A folder of this corpus, configuration and seed. What an earlier run finished in it is not done again.

    Raises:
        ValueError: The text does not support config.vocab_size pieces.
        TrainerKilled: SentencePiece's trainer was killed, or did not end in time.
    """
    sample = sample_text(shards, config.sample_bytes, seed, work / "sample", engine)
    if config.method == "direct":
        model = _train_on_lines(sample, config, work)
    else:
        model = _train_on_phrases(sample, config, work, engine)
    model = with_exact_scores(model)
    parts = _choice_parts(sample, config)
    use = count_use(model, config.vocab_size, parts, work / "use", engine)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / USE_FILE, use)
    path = out / MODEL_FILE
    unfinished = path.with_suffix(".partial")
    unfinished.write_bytes(model)
    return unfinished.replace(path)


def _train_on_phrases(sample: TextSample, config: TokenizerConfig, work: Path, engine: Engine) -> bytes:
    words = mine_words(sample.parts(sample.bytes), sample.bytes, work / "words", engine)
    n_chunks = sum(count for _, count in words.counts)
    for alphabet in _alphabets(words.counts, config):
        candidates = _mine_candidates(words, alphabet, config, work / f"groups-{len(alphabet)}", engine)
        if len(alphabet | candidates.keys()) >= _room(config):
            break
    chunks, size = _backbone_chunks(words.counts, candidates, alphabet, config)
    del words  # the choice needs memory of its own
    backbone = _train_sentencepiece(chunks, size, config, work / "backbone")
    _require_supported(count_pieces(backbone, candidates), config)
    return choose_vocabulary(
        backbone, candidates, n_chunks, config.vocab_size, _choice_parts(sample, config), work / "choice", engine
    )


def _mine_candidates(
    words: Words, alphabet: frozenset[str], config: TokenizerConfig, work: Path, engine: Engine
) -> dict[str, int]:
    """Returns what may become a piece, as SentencePiece writes it: the most frequent words and groups."""
    limit = _CANDIDATES_PER_PIECE * config.vocab_size
    trainable = [word for word in words.counts if _is_trainable(word[0], alphabet, config)]
    lexicon = [chunk for chunk, count in trainable if count >= config.min_phrase_count and joins(chunk)]
    limits = GroupLimits(config.max_phrase_words, config.min_phrase_count, config.max_piece_chars, limit)
    groups = mine_groups(words, lexicon, limits, work, engine)
    longer = (word for word in trainable if word[1] >= _MIN_WORD_COUNT and len(word[0]) > 1)
    chunks = heapq.merge(longer, groups, key=lambda item: -item[1])
    return {chunk.replace(" ", SPACE): count for chunk, count in islice(chunks, limit)}


def _is_trainable(chunk: str, alphabet: frozenset[str], config: TokenizerConfig) -> bool:
    """Whether the chunk may be a piece or stand in one."""
    return (
        len(chunk) <= config.max_piece_chars
        and _UNTRAINABLE.isdisjoint(chunk)
        and alphabet.issuperset(chunk.replace(" ", SPACE))
    )


def _backbone_chunks(
    words: Sequence[tuple[str, int]], candidates: Mapping[str, int], alphabet: frozenset[str], config: TokenizerConfig
) -> tuple[dict[str, int], int]:
    """Returns what the backbone is trained on, with counts, and how many pieces it is to have."""
    room = _room(config)
    if len(alphabet | candidates.keys()) < room:
        size, n_words = config.vocab_size, len(words)  # only subwords can fill it
    else:
        size = config.vocab_size - room + len(alphabet) + int(_BACKBONE_SHARE * (room - len(alphabet)))
        n_words = _BACKBONE_WORDS
    # Every character of the alphabet is in the backbone, whatever words it stands in.
    chars = dict.fromkeys((char.replace(SPACE, " ") for char in sorted(alphabet)), 1)
    return chars | _scaled(_covered(words[:n_words], alphabet)), size


def _train_on_lines(sample: TextSample, config: TokenizerConfig, work: Path) -> bytes:
    lines = Counter(chain.from_iterable(map(_lines, chain.from_iterable(sample.parts(sample.bytes)))))
    counted = sorted(lines.items())
    for alphabet in _alphabets(counted, config):
        chunks = {" ": 1} | _covered(counted, alphabet)
        model = _train_sentencepiece(chunks, config.vocab_size, config, work / f"lines-{len(alphabet)}")
        supported = count_pieces(model, {})
        if supported >= config.vocab_size:
            break
    _require_supported(supported, config)
    return model


def _lines(block: str) -> Iterator[str]:
    """Yields the lines, the long ones in parts."""
    for line in block.splitlines():
        for start in range(0, len(line), _MAX_LINE_CHARS):
            yield line[start : start + _MAX_LINE_CHARS]


def _choice_parts(sample: TextSample, config: TokenizerConfig) -> list[Blocks]:
    return sample.parts(_CHOICE_BYTES_PER_PIECE * config.vocab_size)


def _room(config: TokenizerConfig) -> int:
    """Returns how many pieces are trained."""
    return config.vocab_size - _N_BYTES - len(CONTROL_PIECES) - config.reserved_pieces - len(_USER_PIECES)


def _require_supported(supported: int, config: TokenizerConfig) -> None:
    if supported < config.vocab_size:
        try:
            TokenizerConfig.model_validate(config.model_dump() | {"vocab_size": supported})
            advice = "lower it or add text"
        except ValueError:
            advice = "add text"
        raise ValueError(
            f"tokenizer.vocab_size ({config.vocab_size}) is more than the corpus supports ({supported}); {advice}"
        )


def _alphabets(chunks: Iterable[tuple[str, int]], config: TokenizerConfig) -> list[frozenset[str]]:
    """Returns the characters that are pieces, as SentencePiece writes them: at most half of the pieces, and what to
    take where there is too little else to be one.

    Bytes write the rare ones: nearly all text is covered.

    Raises:
        ValueError: There are none.
    """
    chars: Counter[str] = Counter()
    for chunk, count in chunks:
        for char in chunk:
            chars[char] += count
    for char in _UNTRAINABLE:
        del chars[char]
    if not chars:
        raise ValueError(f"tokenizer.vocab_size ({config.vocab_size}): there is no text to train on")
    # The space too where there is none: its bytes would not be read as a space again.
    alphabet = [SPACE]
    rest = chars.total() - chars.pop(" ", 0)
    uncovered = (1 - _COVERAGE) * chars.total()
    for char, count in sorted(chars.items(), key=lambda item: (-item[1], item[0])):
        if rest <= uncovered:
            break
        alphabet.append(char)
        rest -= count
    room = _room(config)
    return list(dict.fromkeys([frozenset(alphabet[: room // 2]), frozenset(alphabet[:room])]))


def _covered(chunks: Iterable[tuple[str, int]], alphabet: frozenset[str]) -> dict[str, int]:
    """Returns the chunks, cut where they leave the alphabet, with their counts."""
    chars = {char.replace(SPACE, " ") for char in alphabet}
    covered: Counter[str] = Counter()
    for chunk, count in chunks:
        for inside, run in groupby(chunk, chars.__contains__):
            if inside:
                covered["".join(run)] += count
    return covered


def _scaled(chunks: Mapping[str, int]) -> dict[str, int]:
    """Returns the chunks with counts so small that all their occurrences have some _BACKBONE_CHARS characters."""
    total = sum(len(chunk) * count for chunk, count in chunks.items())
    divisor = max(1, total // _BACKBONE_CHARS)
    return {chunk: -(-count // divisor) for chunk, count in chunks.items()}


def _train_sentencepiece(chunks: Mapping[str, int], vocab_size: int, config: TokenizerConfig, work: Path) -> bytes:
    options = _TRAINER_OPTIONS | {
        "vocab_size": vocab_size,
        "max_sentencepiece_length": config.max_piece_chars,
        "control_symbols": [f"<|reserved_{number}|>" for number in range(config.reserved_pieces)],
    }
    trained = Piece(work, partial(_run_trainer, chunks, options))
    finish_piece(trained)
    return (work / MODEL_FILE).read_bytes()


def _run_trainer(chunks: Mapping[str, int], options: Mapping[str, Any], out: Path) -> None:
    """Writes out/tokenizer.model, trained in a process of its own: the kernel kills that one when memory runs out."""
    with (out / "chunks.tsv").open("w", encoding="utf-8") as file:
        file.writelines(f"{chunk}\t{count}\n" for chunk, count in chunks.items())
    # Names without a folder: the model holds them.
    files = {"input": "chunks.tsv", "model_prefix": Path(MODEL_FILE).stem}
    command = [sys.executable, "-c", _TRAIN, json.dumps({**options, **files})]
    seconds = _TRAINER_BASE_SECONDS + sum(map(len, chunks)) / _TRAINER_CHARS_PER_SECOND
    try:
        done = subprocess.run(
            command,
            cwd=out,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,  # it is killed then
        )
    except subprocess.TimeoutExpired:
        raise TrainerKilled(
            f"SentencePiece's trainer was killed: it did not end within {seconds:.0f} s; lower tokenizer.sample_bytes "
            "or tokenizer.vocab_size"
        ) from None
    if done.returncode < 0:
        raise TrainerKilled(
            f"SentencePiece's trainer was killed ({signal.Signals(-done.returncode).name}); where memory was short, "
            "lower tokenizer.sample_bytes"
        )
    if done.returncode:
        raise RuntimeError(f"SentencePiece's trainer failed: {done.stderr.strip()}")
    (out / "chunks.tsv").unlink()
    (out / Path(MODEL_FILE).with_suffix(".vocab")).unlink()
