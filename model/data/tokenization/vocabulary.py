"""Chooses the pieces of a vocabulary from more candidates than it holds, and their scores, by encoding text with them.

SentencePiece's own trainer prunes by the loss of likelihood over isolated words. Here the candidates are words and
groups of words too, and what counts is how many tokens real text needs: a piece is worth its occurrences times the
tokens that it saves each time. The scores are re-estimated from the same counts (expectation-maximisation with the best
segmentation alone), since a piece's neighbours occur less often once it is there.

Source: pruning and re-estimation in turn: Kudo 2018, arXiv:1804.10959, section 3.2.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from model.data.pieces import Engine, Piece, finish_piece
from model.data.tokenization.text_sample import Blocks
from model.data.tokenization.tokenizer import SCORES_PER_UNIT, SPACE, ModelProto

Counts = NDArray[np.int64]

_PRUNINGS = 2
_UNSEEN = 0.5  # the count of a piece that the text does not use
# Subtracted from every log probability: of two segmentations that are about as likely, the shorter one is taken.
_TOKEN_PENALTY = 1.0
_BLOCKS_AT_ONCE = 256
_NBEST_PIECES = 1 << 16


def count_pieces(backbone: bytes, candidates: Mapping[str, int]) -> int:
    """Returns how many pieces a vocabulary of these can have."""
    pieces = {piece.piece for piece in ModelProto.FromString(backbone).pieces}
    return len(pieces | candidates.keys())


def choose_vocabulary(
    backbone: bytes,
    candidates: Mapping[str, int],
    n_chunks: int,
    vocab_size: int,
    parts: Sequence[Blocks],
    work: Path,
    engine: Engine,
) -> bytes:
    """Returns a SentencePiece model of vocab_size pieces.

    Args:
        backbone: A SentencePiece model. All its pieces stay, so that any word can still be written in few of them.
        candidates: Other pieces, as SentencePiece writes them, with how often the text has them.
        n_chunks: How many chunks the text has.
        parts: The text.
    """
    trained = ModelProto.FromString(backbone)
    n_fixed = sum(piece.type != ModelProto.SentencePiece.NORMAL for piece in trained.pieces)
    scores = {piece.piece: piece.score for piece in trained.pieces[n_fixed:]}
    kept = set(scores)
    scores |= {piece: float(np.log(count / n_chunks)) for piece, count in candidates.items() if piece not in kept}
    _demote_space(scores)
    room = vocab_size - n_fixed
    assert len(kept) <= room <= len(scores)
    sizes = [*np.geomspace(len(scores), room, _PRUNINGS + 1)[1:-1].astype(int).tolist(), room]
    for number, size in enumerate(sizes):
        model = _with_pieces(trained, n_fixed, scores)
        use = count_use(model, n_fixed + len(scores), parts, work / f"{number}", engine)
        count_of = dict(zip(scores, use[n_fixed:].tolist(), strict=True))
        worth = _worth(model, n_fixed, count_of, kept)
        # Those that are kept have no worth; equal ones go by their text.
        chosen = sorted(count_of, key=lambda piece: (piece not in kept, -worth.get(piece, 0), piece))[:size]
        scores = _scores({piece: count_of[piece] for piece in chosen})
    use = count_use(_with_pieces(trained, n_fixed, scores), vocab_size, parts, work / "last", engine)
    scores = _scores(dict(zip(scores, use[n_fixed:].tolist(), strict=True)))
    return _with_pieces(trained, n_fixed, dict(sorted(scores.items(), key=lambda item: (-item[1], item[0]))))


def with_exact_scores(model: bytes) -> bytes:
    """Returns the model with scores that add up without rounding: see SCORES_PER_UNIT.

    The newline, a piece of its own that no other holds, becomes an ordinary one: SentencePiece gives those that a user
    defines a score of its own making.
    """
    proto = ModelProto.FromString(model)
    normal = [piece for piece in proto.pieces if piece.type == ModelProto.SentencePiece.NORMAL]
    for piece in normal:
        piece.score = round(piece.score * SCORES_PER_UNIT) / SCORES_PER_UNIT
    for piece in proto.pieces:
        if piece.type == ModelProto.SentencePiece.USER_DEFINED:
            piece.type = ModelProto.SentencePiece.NORMAL
            piece.score = max(other.score for other in normal)
    return proto.SerializeToString(deterministic=True)


def count_use(model: bytes, vocab_size: int, parts: Sequence[Blocks], work: Path, engine: Engine) -> Counts:
    """Returns how often the best segmentations of the text use each piece, (vocab_size,)."""
    written = Piece(work / "model", partial(_save, model))
    finish_piece(written)
    counted = [
        Piece(work / "counts" / f"{number:05}", partial(_count, part, written.folder / "model"))
        for number, part in enumerate(parts)
    ]
    engine.finish("encoding with the candidates", counted)
    counts = np.zeros(vocab_size, np.int64)
    for piece in counted:
        counts += np.load(piece.folder / "counts.npy")
    return counts


def _scores(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values()) or 1
    scores = {piece: float(np.log(max(count, _UNSEEN) / total)) - _TOKEN_PENALTY for piece, count in counts.items()}
    _demote_space(scores)
    return scores


def _demote_space(scores: dict[str, float]) -> None:
    """Gives the space alone the least score: before a word that also occurs without one, it would often beat the word
    with its space, which then would never be used."""
    if SPACE in scores:
        scores[SPACE] = min(scores.values())


def _with_pieces(trained: Any, n_fixed: int, scores: Mapping[str, float]) -> bytes:
    """Returns the model with its first n_fixed pieces, then those of scores."""
    changed = ModelProto()
    changed.CopyFrom(trained)
    del changed.pieces[n_fixed:]
    for piece, score in scores.items():
        changed.pieces.add(piece=piece, score=score)
    changed.trainer_spec.vocab_size = len(changed.pieces)
    return changed.SerializeToString(deterministic=True)


def _save(model: bytes, out: Path) -> None:
    (out / "model").write_bytes(model)


def _count(blocks: Blocks, model: Path, out: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    counts = np.zeros(processor.vocab_size(), np.int64)
    left = iter(blocks)
    while some := list(islice(left, _BLOCKS_AT_ONCE)):
        ids = np.concatenate(processor.encode(some, out_type="numpy", num_threads=1))
        counts += np.bincount(ids, minlength=len(counts))
    np.save(out / "counts.npy", counts)


def _worth(model: bytes, n_fixed: int, count_of: Mapping[str, int], kept: set[str]) -> dict[str, int]:
    """Returns for each piece that is used, and not kept anyway, how many tokens more the text needs without it."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    asked = [(n_fixed + place, piece) for place, piece in enumerate(count_of) if count_of[piece] and piece not in kept]
    worth = {}
    for start in range(0, len(asked), _NBEST_PIECES):
        some = asked[start : start + _NBEST_PIECES]
        texts = [piece.replace(SPACE, " ") for _, piece in some]
        for (token, piece), segmentations in zip(some, processor.nbest_encode(texts, nbest_size=2), strict=True):
            # Its own characters are pieces that are kept, so there is another way to write it.
            others = min(len(ids) for ids in segmentations if ids != [token])
            worth[piece] = count_of[piece] * (others - 1)
    return worth
