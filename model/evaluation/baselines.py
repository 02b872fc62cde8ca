"""What a model must beat on the same text: the frequencies of its pieces, and a compressor."""

import lzma
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def unigram_bits_per_byte(
    documents: Iterable[Sequence[int]], byte_lengths: Iterable[int], counts: NDArray[np.int64], end_of_text: int
) -> float:
    """Bits per byte of a model that knows how often each piece occurs in the training tokens, and no context.

    Each piece counts once more than it was seen, so that an unseen one is possible. The end of a document is neither
    scored nor given any probability, as in `score_documents`.

    Args:
        documents: Ids of each document, without `end_of_text`.
        byte_lengths: UTF-8 bytes of each document's text.
        counts: Occurrences of each id in the training tokens, (V,).
    """
    smoothed = counts + 1.0
    smoothed[end_of_text] = 0.0
    smoothed /= smoothed.sum()
    with np.errstate(divide="ignore"):
        bits = -np.log2(smoothed)
    total_bits, total_bytes = 0.0, 0
    for ids, byte_length in zip(documents, byte_lengths, strict=True):
        total_bits += float(bits[np.asarray(ids, dtype=np.int64)].sum())
        total_bytes += byte_length
    assert math.isfinite(total_bits), "a document holds end_of_text"
    return _per_byte(total_bits, total_bytes)


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits per byte of the texts, joined, under `xz -9` (which `lzma` calls preset 9), container included."""
    compressor = lzma.LZMACompressor(preset=9)
    text_bytes = compressed_bytes = 0
    for text in texts:
        data = text.encode()
        text_bytes += len(data)
        compressed_bytes += len(compressor.compress(data))
    compressed_bytes += len(compressor.flush())
    return _per_byte(8 * compressed_bytes, text_bytes)


def _per_byte(bits: float, text_bytes: int) -> float:
    if not text_bytes:
        raise ValueError("no text was scored: bits per byte needs at least 1 byte")
    return bits / text_bytes
