"""The tokenizer: a SentencePiece unigram model with multi-word pieces, which gives every text back exactly."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from model.data.readers.documents import replace_surrogates

UNKNOWN, END_OF_TEXT, PAD = 0, 1, 2
CONTROL_PIECES = ("<unk>", "<|endoftext|>", "<pad>")
SPACE = "\u2581"  # how SentencePiece writes a space

_SPACE_BYTES = SPACE.encode()
_LINES = re.compile(rb"[^\n]*\n+")  # a line and the newlines after it


class Tokenizer:
    """A trained vocabulary. Every text comes back exactly, but for lone surrogates, which become U+FFFD.

    Control pieces are never made from text. END_OF_TEXT ends every document, and is what a first token follows.

    Raises:
        ValueError: The file holds no such vocabulary.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError:
            raise ValueError(f"{path} is no SentencePiece model") from None
        if self._model.id_to_piece([UNKNOWN, END_OF_TEXT, PAD]) != list(CONTROL_PIECES):
            raise ValueError(f"{path} is of another system: its first pieces are not {', '.join(CONTROL_PIECES)}")
        self._newline = self._model.piece_to_id("\n")
        self._space_bytes = self._model.piece_to_id([f"<0x{byte:02X}>" for byte in _SPACE_BYTES])

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
            ids += self._encode_space_signs(line) if SPACE in line else line_ids
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
        first, *others = self._model.encode(line.split(SPACE))
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


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return replace_surrogates(text).encode()
