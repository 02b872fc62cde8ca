"""What a tokenizer does to text: the gate that it must pass, and the figures by which a person judges it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.data.config import TokenizerConfig
from model.data.document_shards import Document
from model.data.documents import replace_surrogates
from model.data.tokenizer import SPACE, Tokenizer
from model.data.words import split_words

_EXAMPLES = 12


class TokenizerGateError(ValueError):
    """The tokenizer loses text, or needs too many tokens for it."""


@dataclass(frozen=True)
class TokenizerReport:
    """What a tokenizer does to held-out text.

    Attributes:
        tokens_per_byte_by_source: Tokens by byte of UTF-8, of each source's documents.
        tokens_per_word_by_language: The fertility; words as model/data/words.py splits them.
        entity_pieces: Multi-word pieces all of whose words are capitalised, as in names.
        undertrained_pieces: Pieces that the text which the vocabulary was chosen on does not use.
        examples: The most frequent multi-word pieces, then the longest.
        entity_examples: The most frequent entity pieces.
    """

    documents: int
    bytes: int
    tokens: int
    tokens_per_byte: float
    tokens_per_byte_by_source: dict[str, float]
    tokens_per_word_by_language: dict[str, float]
    vocab_size: int
    multi_word_pieces: int
    multi_word_piece_share: float
    multi_word_token_share: float
    entity_pieces: int
    entity_piece_share: float
    undertrained_pieces: int
    examples: list[str]
    entity_examples: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Size:
    tokens: int = 0
    units: int = 0  # bytes or words

    def add(self, tokens: int, units: int) -> None:
        self.tokens += tokens
        self.units += units


@dataclass
class _Sizes:
    of: dict[str, _Size] = field(default_factory=dict)

    def add(self, name: str, tokens: int, units: int) -> None:
        self.of.setdefault(name, _Size()).add(tokens, units)

    def ratios(self) -> dict[str, float]:
        return {name: size.tokens / size.units for name, size in sorted(self.of.items()) if size.units}


def check_tokenizer(
    tokenizer: Tokenizer, documents: Iterable[Document], use: NDArray[np.int64], config: TokenizerConfig
) -> TokenizerReport:
    """Returns what the first config.round_trip_documents documents show.

    Args:
        use: How often the text that the vocabulary was chosen on uses each piece, (vocab_size,).

    Raises:
        TokenizerGateError: A text does not come back exactly, or tokens per byte exceed config.max_tokens_per_byte.
        ValueError: There is no text.
    """
    sources, languages, total = _Sizes(), _Sizes(), _Size()
    used: Counter[int] = Counter()
    checked = 0
    for document in islice(documents, config.round_trip_documents):
        text = replace_surrogates(document.text)
        ids = tokenizer.encode(text)
        _require_same(text, tokenizer.decode(ids), checked)
        checked += 1
        used.update(ids)
        size = len(text.encode())
        total.add(len(ids), size)
        sources.add(document.source, len(ids), size)
        languages.add(document.language, len(ids), len(split_words([text]).codes))
    if not total.units:
        raise ValueError(f"tokenizer: there is no held-out text to check it on ({checked} documents)")
    if total.tokens > config.max_tokens_per_byte * total.units:
        raise TokenizerGateError(
            f"tokenizer: {total.tokens} tokens for {total.units} bytes of held-out text are "
            f"{total.tokens / total.units:.3f} tokens a byte, more than max_tokens_per_byte "
            f"({config.max_tokens_per_byte})"
        )
    multi_word = [token for token in range(tokenizer.vocab_size) if tokenizer.is_multi_word(token)]
    entities = [token for token in multi_word if _is_entity(tokenizer.piece(token))]
    return TokenizerReport(
        documents=checked,
        bytes=total.units,
        tokens=total.tokens,
        tokens_per_byte=total.tokens / total.units,
        tokens_per_byte_by_source=sources.ratios(),
        tokens_per_word_by_language=languages.ratios(),
        vocab_size=tokenizer.vocab_size,
        multi_word_pieces=len(multi_word),
        multi_word_piece_share=len(multi_word) / tokenizer.vocab_size,
        multi_word_token_share=sum(used[token] for token in multi_word) / total.tokens,
        entity_pieces=len(entities),
        entity_piece_share=len(entities) / tokenizer.vocab_size,
        undertrained_pieces=sum(
            not use[token] for token in range(tokenizer.vocab_size) if tokenizer.is_normal(token)
        ),
        examples=_examples(tokenizer, multi_word, used),
        entity_examples=_texts(tokenizer, sorted(entities, key=lambda token: (-used[token], token))[:_EXAMPLES]),
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


def _is_entity(piece: str) -> bool:
    return all(word[:1].isupper() and word[1:2].islower() for word in piece.strip(SPACE).split(SPACE))


def _examples(tokenizer: Tokenizer, multi_word: list[int], used: Counter[int]) -> list[str]:
    frequent = sorted(multi_word, key=lambda token: -used[token])[:_EXAMPLES]
    longest = sorted(multi_word, key=lambda token: -len(tokenizer.piece(token)))[: 2 * _EXAMPLES]
    return _texts(tokenizer, [*frequent, *(token for token in longest if token not in frequent)][: 2 * _EXAMPLES])


def _texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.piece(token).replace(SPACE, " ").strip() for token in tokens]
