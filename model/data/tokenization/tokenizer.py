"""The tokenizer: a SentencePiece unigram model with multi-word pieces, which gives every text back exactly."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

from model.data.readers.documents import replace_surrogates

ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # made when it is imported

UNKNOWN, END_OF_TEXT, PAD = 0, 1, 2
CONTROL_PIECES = ("<unk>", "<|endoftext|>", "<pad>")
SPACE = "\u2581"  # how SentencePiece writes a space
SCORES_PER_UNIT = 64
"""All scores are multiples of 1 / 64. SentencePiece adds them in float32, which is exact up to 2 ** 18 then: rounding
never decides between segmentations, and a line has the same tokens alone and within a document."""

_SPACE_BYTES = SPACE.encode()
_BLOCK_BYTES = 2048  # whose segmentation a core's cache holds
_UNKNOWN_PENALTY = 10  # SentencePiece's: what a character that is no piece scores less than the least piece


class Tokenizer:
    """A trained vocabulary. Every text comes back exactly, but for lone surrogates, which become U+FFFD.

    Control pieces are never made from text. END_OF_TEXT ends every document, and is what a first token follows.

    Raises:
        ValueError: The file holds no such vocabulary.
    """

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError:
            raise ValueError(f"{path} is no SentencePiece model") from None
        proto = ModelProto.FromString(data)
        scores = np.array([piece.score for piece in proto.pieces])
        if fault := _fault(proto, scores):
            raise ValueError(f"{path} is of another system: {fault}")
        # A character scores that much less at worst; it has at least one byte.
        exact_bytes = int((1 << 24) / SCORES_PER_UNIT / (_UNKNOWN_PENALTY - scores.min()))
        self._block_bytes = min(_BLOCK_BYTES, exact_bytes)
        self._newline = self._model.piece_to_id("\n")
        self._space_bytes = self._model.piece_to_id([f"<0x{byte:02X}>" for byte in _SPACE_BYTES])

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    @property
    def end_of_text(self) -> int:
        return END_OF_TEXT

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that no text has: the unknown piece, the end of text, padding, and those kept free for later use."""
        ids = range(self.vocab_size)
        return frozenset(token for token in ids if self._model.is_control(token) or self._model.is_unknown(token))

    def encode(self, text: str) -> list[int]:
        ids, _ = self.encode_documents([text])
        return ids[:-1].tolist()

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Returns the tokens of each text with an end of text after it; many texts at once take much less time.

        Returns:
            The ids of all documents, (tokens,), and for each document the place after its last, (documents,).
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        blocks: list[bytes] = []
        last_blocks = []
        for text in texts:
            # The newline after a text makes the place for its end of text.
            blocks += _blocks(_utf8(text) + b"\n", self._block_bytes)
            last_blocks.append(len(blocks) - 1)
        encoded = self._model.encode(blocks, out_type="numpy", num_threads=1)
        for number, block in enumerate(blocks):
            if _SPACE_BYTES in block:
                encoded[number] = np.array(self._encode_space_signs(block.decode()), np.int32)
        ids = np.concatenate(encoded).view(np.uint32)
        ends = np.cumsum([len(block_ids) for block_ids in encoded])[last_blocks]
        ids[ends - 1] = END_OF_TEXT
        return ids, ends

    def _encode_space_signs(self, text: str) -> list[int]:
        """Encodes text that holds SentencePiece's own sign for a space, which would come back as a space."""
        first, *others = self._model.encode(text.split(SPACE))
        return first + [token for ids in others for token in (*self._space_bytes, *ids)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; control ids give none."""
        return self._model.decode([int(token) for token in ids if token > PAD])

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def is_normal(self, token: int) -> bool:
        """Whether the piece was trained: no control piece, byte or newline."""
        is_other = (self._model.is_control, self._model.is_unknown, self._model.is_byte)
        return token != self._newline and not any(kind(token) for kind in is_other)

    def is_multi_word(self, token: int) -> bool:
        return SPACE in self.piece(token).strip(SPACE)


def _fault(proto: Any, scores: NDArray[np.float64]) -> str:
    """Returns why a SentencePiece model does not give every text back, or add its scores exactly; else nothing."""
    pieces = {piece.piece for piece in proto.pieces}
    normalizer = proto.normalizer_spec
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
        return "it is no unigram model"
    if [piece.piece for piece in proto.pieces[: len(CONTROL_PIECES)]] != list(CONTROL_PIECES):
        return f"its first pieces are not {', '.join(CONTROL_PIECES)}"
    if normalizer.precompiled_charsmap or normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        return "it changes text before it encodes it"
    if not pieces.issuperset({"\n", SPACE, *(f"<0x{byte:02X}>" for byte in range(256))}):
        return "it has not all bytes, the newline and the space as pieces"
    if (scores * SCORES_PER_UNIT % 1).any():
        return f"its scores are not multiples of 1 / {SCORES_PER_UNIT}"
    return ""


def _blocks(text: bytes, max_bytes: int) -> Iterator[bytes]:
    """Yields the lines of a text that ends with one, as many together as max_bytes hold; a longer line alone."""
    start = 0
    while start < len(text):
        end = text.rfind(b"\n", start, start + max_bytes) + 1 or text.index(b"\n", start) + 1
        yield text[start:end]
        start = end


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()
