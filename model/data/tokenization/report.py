"""What a tokenizer does to text: the gate that it must pass, and the figures by which a person judges it."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.data.config import TokenizerConfig
from model.data.document_shards import Document
from model.data.readers.documents import replace_surrogates
from model.data.tokenization.tokenizer import SPACE, Tokenizer
from model.data.words import split_words

_EXAMPLES = 12
# They must come back whatever the text was that the pieces are from.
_AWKWARD = (
    "a  b",
    "a\nb",
    " x ",
    "\ufb01\u00bd",
    "\u2026",
    "\t\r\n\0",
    "\U0001f600",
    "\u2028",
    "\u2581",
    "</s><unk><|endoftext|>",
)


class TokenizerGateError(ValueError):
    """The tokenizer loses text, or needs too many tokens for it."""


@dataclass(frozen=True)
class TokenizerReport:
    """What a tokenizer does to held-out text.

    Attributes:
        tokens_per_byte_by_source: Tokens by byte of UTF-8, of each source's documents.
        tokens_per_word_by_language: The fertility; words as model/data/words.py splits them.
        entity_pieces: Multi-word pieces all of whose words are capitalised, as in names.
        encoded_mb_per_second: Of text, by one process, a document at a time.
        undertrained_pieces: Pieces that the text which the vocabulary was chosen on does not use; None if unknown.
        examples: The most frequent multi-word pieces, then the longest.
        entity_examples: The most frequent entity pieces.
    """

    documents: int
    bytes: int
    tokens: int
    tokens_per_byte: float
    encoded_mb_per_second: float
    tokens_per_byte_by_source: dict[str, float]
    tokens_per_word_by_language: dict[str, float]
    vocab_size: int
    multi_word_pieces: int
    multi_word_piece_share: float
    multi_word_token_share: float
    entity_pieces: int
    entity_piece_share: float
    undertrained_pieces: int | None
    examples: list[str]
    entity_examples: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Size:
    tokens: int = 0
    bytes: int = 0
    words: int = 0


class _Sizes(defaultdict[str, _Size]):
    """What the texts of each source or language add up to."""

    def __init__(self) -> None:
        super().__init__(_Size)

    def add(self, name: str, text: str, tokens: int) -> None:
        size = self[name]
        size.tokens += tokens
        size.bytes += len(text.encode())
        size.words += len(split_words([text]).codes)


def check_tokenizer(
    tokenizer: Tokenizer, documents: Iterable[Document], use: NDArray[np.int64] | None, config: TokenizerConfig
) -> TokenizerReport:
    """Returns what the first config.round_trip_documents documents show.

    Args:
        use: How often the text that the vocabulary was chosen on uses each piece, (vocab_size,); None if unknown.

    Raises:
        TokenizerGateError: A text does not come back exactly, or tokens per byte exceed config.max_tokens_per_byte.
        ValueError: There is no text.
    """
    for text in _AWKWARD:
        _require_same(text, tokenizer.decode(tokenizer.encode(text)), "an awkward text")
    sources, languages = _Sizes(), _Sizes()
    used = np.zeros(tokenizer.vocab_size, np.int64)
    checked, seconds = 0, 0.0
    for document in islice(documents, config.round_trip_documents):
        text = replace_surrogates(document.text)
        started = time.perf_counter()
        ids = tokenizer.encode(text)
        seconds += time.perf_counter() - started
        _require_same(text, tokenizer.decode(ids), f"document {checked}")
        checked += 1
        used += np.bincount(ids, minlength=len(used))
        sources.add(document.source, text, len(ids))
        languages.add(document.language, text, len(ids))
    tokens, n_bytes = sum(size.tokens for size in sources.values()), sum(size.bytes for size in sources.values())
    if not n_bytes:
        raise ValueError(f"tokenizer: there is no held-out text to check it on ({checked} documents)")
    if tokens > config.max_tokens_per_byte * n_bytes:
        raise TokenizerGateError(
            f"tokenizer: {tokens} tokens for {n_bytes} bytes of held-out text are {tokens / n_bytes:.3f} tokens a "
            f"byte, more than max_tokens_per_byte ({config.max_tokens_per_byte})"
        )
    return TokenizerReport(
        documents=checked,
        bytes=n_bytes,
        tokens=tokens,
        tokens_per_byte=tokens / n_bytes,
        encoded_mb_per_second=n_bytes / 1e6 / seconds,
        tokens_per_byte_by_source={name: size.tokens / size.bytes for name, size in sorted(sources.items())},
        tokens_per_word_by_language={
            name: size.tokens / size.words for name, size in sorted(languages.items()) if size.words
        },
        vocab_size=tokenizer.vocab_size,
        **_describe_pieces(tokenizer, used, use),
    )


def _describe_pieces(tokenizer: Tokenizer, used: NDArray[np.int64], use: NDArray[np.int64] | None) -> dict[str, Any]:
    """Returns the report's figures of pieces, of which `used` occur in the text that was checked."""
    normal = [token for token in range(tokenizer.vocab_size) if tokenizer.is_normal(token)]
    multi_word = [token for token in normal if tokenizer.is_multi_word(token)]
    entities = [token for token in multi_word if _is_entity(tokenizer.piece(token))]
    frequent = sorted(multi_word, key=lambda token: -used[token])[:_EXAMPLES]
    longest = sorted(multi_word, key=lambda token: -len(tokenizer.piece(token)))[:_EXAMPLES]
    return {
        "multi_word_pieces": len(multi_word),
        "multi_word_piece_share": len(multi_word) / tokenizer.vocab_size,
        "multi_word_token_share": float(used[multi_word].sum() / used.sum()),
        "entity_pieces": len(entities),
        "entity_piece_share": len(entities) / tokenizer.vocab_size,
        "undertrained_pieces": None if use is None else int((use[normal] == 0).sum()),
        "examples": _texts(tokenizer, [*frequent, *(token for token in longest if token not in frequent)]),
        "entity_examples": _texts(tokenizer, sorted(entities, key=lambda token: -used[token])[:_EXAMPLES]),
    }


def _require_same(text: str, decoded: str, what: str) -> None:
    if decoded == text:
        return
    at = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), min(len(text), len(decoded)))
    around = slice(max(0, at - 20), at + 20)
    raise TokenizerGateError(
        f"tokenizer: {what} does not come back: at character {at} {text[around]!r} became {decoded[around]!r}"
    )


def _is_entity(piece: str) -> bool:
    return all(word[:1].isupper() and word[1:2].islower() for word in piece.strip(SPACE).split(SPACE))


def _texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.piece(token).replace(SPACE, " ").strip() for token in tokens]
