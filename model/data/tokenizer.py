"""The vocabulary: a SentencePiece unigram model with multi-word pieces, its training and its quality gate."""

import heapq
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from model.data.config import TokenizerConfig
from model.data.documents import replace_surrogates
from model.data.phrases import count_chunks

UNKNOWN, END_OF_TEXT, PAD = 0, 1, 2
CONTROL_PIECES = ("<unk>", "<|endoftext|>", "<pad>")

_USER_PIECES = ["\n"]
_N_BYTES = 256
_SPACE = "\u2581"  # how SentencePiece writes a space
_SPACE_BYTES = _SPACE.encode()
_LINES = re.compile(rb"[^\n]*\n+")  # a line and the newlines after it
# SentencePiece keeps these for itself, or its training file cannot hold them; they are encoded as bytes.
_UNTRAINABLE = frozenset("\0\t\n\r\u2581\u2585")
_COVERAGE = 0.9999
_BLOCK_CHARS = 1 << 14
_EXAMPLES = 12

_TRAINER_OPTIONS: dict[str, Any] = {
    "input_format": "tsv",
    "model_type": "unigram",
    "hard_vocab_limit": False,  # train_tokenizer reports how many pieces were reached
    "character_coverage": 1.0,  # the rare characters are out already, and written as bytes
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    # The chunks are what may become a piece, so white space and scripts need no rules of their own.
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


class TokenizerGateError(ValueError):
    """The tokenizer loses text, or needs too many tokens for it."""


class Tokenizer:
    """A trained vocabulary. Every text comes back exactly, but for lone surrogates, which become U+FFFD.

    Control pieces are never made from text. END_OF_TEXT ends every document, and is what a first token follows.
    """

    def __init__(self, path: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        assert self._model.id_to_piece([UNKNOWN, END_OF_TEXT, PAD]) == list(CONTROL_PIECES)
        self._newline = self._model.piece_to_id("\n")
        self._space_bytes = self._model.piece_to_id([f"<0x{byte:02X}>" for byte in _SPACE.encode()])

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    @property
    def end_of_text(self) -> int:
        return END_OF_TEXT

    def encode(self, text: str) -> list[int]:
        # By line, which makes the tokens of a line independent of its document: over a whole document the rounding of
        # the sums of scores would decide between equal segmentations.
        lines = replace_surrogates(text).split("\n")
        ids: list[int] = []
        for number, (line, line_ids) in enumerate(zip(lines, self._model.encode(lines), strict=True)):
            if number:
                ids.append(self._newline)
            ids += self._encode_space_signs(line) if _SPACE in line else line_ids
        return ids

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Returns what `encode` gives for each text, an end of text after it, much faster for many at once.

        Every line is encoded with the newlines that follow it, which changes none of its own tokens, and once for all
        texts that have it. The newline that is added to a text makes the place for its end of text.

        Returns:
            The ids of all documents, (tokens,), and for each document the place after its last, (documents,).
        """
        number_of: dict[bytes, int] = {}
        order: list[int] = []
        newlines: list[int] = []
        for text in texts:
            data = _utf8(text) + b"\n"
            order += [number_of.setdefault(line, len(number_of)) for line in _LINES.findall(data)]
            newlines.append(data.count(b"\n"))
        encoded = self._encode_lines(list(number_of))
        ids = np.frombuffer(b"".join([encoded[number] for number in order]), np.int32).astype(np.uint32)
        ends = np.flatnonzero(ids == self._newline)[np.cumsum(newlines, dtype=np.int64) - 1] + 1
        ids[ends - 1] = END_OF_TEXT
        return ids, ends

    def _encode_lines(self, lines: list[bytes]) -> list[Any]:
        """Returns the ids of each line with its newlines, as bytes of int32."""
        # What encode(out_type="numpy") calls; that would make an array of every line, which takes a fifth of the time.
        encoded = self._model._processor._EncodeAsBufferBatch(lines, 1, None, False, -1, 0.0, False, False, False)
        for number, line in enumerate(lines):
            if _SPACE_BYTES in line:
                text = line.rstrip(b"\n")
                ids = self._encode_space_signs(text.decode()) + [self._newline] * (len(line) - len(text))
                encoded[number] = np.array(ids, np.int32).tobytes()
        return encoded

    def _encode_space_signs(self, line: str) -> list[int]:
        """Encodes a line that holds SentencePiece's own sign for a space, which would come back as a space."""
        first, *others = self._model.encode(line.split(_SPACE))
        return first + [token for ids in others for token in (*self._space_bytes, *ids)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; control ids give none."""
        return self._model.decode([int(token) for token in ids if token > PAD])

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def is_multi_word(self, token: int) -> bool:
        return _SPACE in self.piece(token).strip(_SPACE)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, seed: int, out: Path) -> Path:
    """Returns out/tokenizer.model, trained on a sample of the texts that the seed chooses. Equal texts and seed, in any
    order, give equal bytes.

    Raises:
        ValueError: The texts do not support config.vocab_size pieces.
    """
    sample = _sample(texts, config.sample_bytes, seed)
    counts = count_chunks(sample, config.max_phrase_words, config.min_phrase_count, config.max_piece_chars)
    counts = _covered(
        {chunk: count for chunk, count in counts.items() if _UNTRAINABLE.isdisjoint(chunk)}, config.vocab_size
    )
    if not counts:
        raise ValueError(f"tokenizer.vocab_size ({config.vocab_size}): there is no text to train on")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{chunk}\t{count}" for chunk, count in counts.items()),
        model_writer=model,
        vocab_size=config.vocab_size,
        max_sentencepiece_length=config.max_piece_chars,
        **_TRAINER_OPTIONS,
    )
    supported = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    if supported < config.vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size ({config.vocab_size}) is more than the corpus supports ({supported}); "
            "lower it or add text"
        )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tokenizer.model"
    partial = path.with_suffix(".partial")
    partial.write_bytes(model.getvalue())
    return partial.replace(path)


def _sample(texts: Iterable[str], sample_bytes: int, seed: int) -> Iterator[str]:
    """Yields blocks of the texts, at most sample_bytes of them: those with the smallest seeded hash, in its order."""
    heap: list[tuple[int, bytes]] = []
    size, limit = 0, 0  # hashes are negative, so that the heap's first is the largest
    for block in _blocks(texts, max(1, min(_BLOCK_CHARS, sample_bytes >> 4))):
        key = -1 - int.from_bytes(blake2b(block, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")
        if limit and key <= limit:
            continue
        heapq.heappush(heap, (key, block))
        size += len(block)
        while size > sample_bytes:
            # What is larger than a dropped block must not come in later: the order of the texts would decide.
            limit, dropped = heapq.heappop(heap)
            size -= len(dropped)
    yield from (block.decode() for _, block in sorted(heap, reverse=True))


def _blocks(texts: Iterable[str], max_chars: int) -> Iterator[bytes]:
    """Yields the texts in blocks, cut after a newline where there is one, so that long texts are sampled in parts."""
    for text in texts:
        start = 0
        while start < len(text):
            end = start + max_chars
            if end < len(text):
                end = text.rfind("\n", start, end) + 1 or end
            yield replace_surrogates(text[start:end]).encode()
            start = end


def _covered(counts: dict[str, int], vocab_size: int) -> dict[str, int]:
    """Returns the chunks without the rare characters, which bytes write: nearly all text stays, but the characters take
    at most half of the vocabulary."""
    chars: Counter[str] = Counter()
    for chunk, count in counts.items():
        for char in chunk:
            chars[char] += count
    room = (vocab_size - _N_BYTES - len(CONTROL_PIECES) - len(_USER_PIECES)) // 2
    alphabet = set()
    uncovered = (1 - _COVERAGE) * chars.total()
    rest = chars.total()
    for char, count in chars.most_common(room):
        if rest <= uncovered:
            break
        alphabet.add(char)
        rest -= count
    covered: Counter[str] = Counter()
    for chunk, count in counts.items():
        for inside, run in groupby(chunk, alphabet.__contains__):
            if inside:
                covered["".join(run)] += count
    return covered


@dataclass(frozen=True)
class TokenizerReport:
    """What a tokenizer does to held-out text. Examples are the most frequent multi-word pieces, then the longest."""

    documents: int
    bytes: int
    tokens: int
    tokens_per_byte: float
    vocab_size: int
    multi_word_pieces: int
    multi_word_piece_share: float
    multi_word_token_share: float
    examples: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], config: TokenizerConfig) -> TokenizerReport:
    """Returns what the first config.round_trip_documents texts show.

    Raises:
        TokenizerGateError: A text does not come back exactly, or tokens per byte exceed config.max_tokens_per_byte.
        ValueError: There is no text.
    """
    documents = n_bytes = 0
    used: Counter[int] = Counter()
    for text in islice(texts, config.round_trip_documents):
        ids = tokenizer.encode(text)
        _require_same(replace_surrogates(text), tokenizer.decode(ids), documents)
        documents += 1
        n_bytes += len(replace_surrogates(text).encode())
        used.update(ids)
    if not n_bytes:
        raise ValueError(f"tokenizer: there is no held-out text to check it on ({documents} documents)")
    tokens = used.total()
    multi_word = [token for token in range(tokenizer.vocab_size) if tokenizer.is_multi_word(token)]
    if tokens > config.max_tokens_per_byte * n_bytes:
        raise TokenizerGateError(
            f"tokenizer: {tokens} tokens for {n_bytes} bytes of held-out text are {tokens / n_bytes:.3f} tokens a "
            f"byte, more than max_tokens_per_byte ({config.max_tokens_per_byte})"
        )
    return TokenizerReport(
        documents=documents,
        bytes=n_bytes,
        tokens=tokens,
        tokens_per_byte=tokens / n_bytes,
        vocab_size=tokenizer.vocab_size,
        multi_word_pieces=len(multi_word),
        multi_word_piece_share=len(multi_word) / tokenizer.vocab_size,
        multi_word_token_share=sum(used[token] for token in multi_word) / tokens,
        examples=_examples(tokenizer, multi_word, used),
    )


def _require_same(text: str, decoded: str, document: int) -> None:
    if decoded == text:
        return
    at = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), min(len(text), len(decoded)))
    around = slice(max(0, at - 20), at + 20)
    raise TokenizerGateError(
        f"tokenizer: document {document} does not come back: at character {at} {text[around]!r} became "
        f"{decoded[around]!r}"
    )


def _examples(tokenizer: Tokenizer, multi_word: list[int], used: Counter[int]) -> list[str]:
    frequent = sorted(multi_word, key=lambda token: -used[token])[:_EXAMPLES]
    longest = sorted(multi_word, key=lambda token: -len(tokenizer.piece(token)))[: 2 * _EXAMPLES]
    chosen = [*frequent, *(token for token in longest if token not in frequent)][: 2 * _EXAMPLES]
    return [tokenizer.piece(token).replace(_SPACE, " ").strip() for token in chosen]
