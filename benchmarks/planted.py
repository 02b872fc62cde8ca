"""A corpus with planted near duplicates, and the yardstick for what deduplication made of it: exact Jaccard similarity.

Written without the project's own shingles and signatures, which it judges: sets of word 5-grams in plain Python.
"""

import json
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NGRAM_WORDS = 5
# Of the words; 2 % edited leaves a similarity of about 0.8.
EDIT_RATES = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.12)
_LEAST_WORDS, _MOST_WORDS = 200, 100_000
_ORIGINALS_PER_COPY = 4
_FILE_BYTES = 4_000_000
_VARIED_WORDS = 0.3
_WORD = re.compile(r"\S+\s*")
_NO_LETTER_OR_DIGIT = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Planted:
    """Documents by id, and for each edited copy the ids of original and copy and their exact similarity."""

    texts: dict[str, str]
    pairs: list[tuple[str, str, float]]

    @property
    def megabytes(self) -> float:
        return sum(len(text.encode()) for text in self.texts.values()) / 1e6


def plant(texts: Iterable[str], size_bytes: int, folder: Path, seed: int = 0) -> Planted:
    """Writes the texts as JSONL in random order, and one edited copy for every four of them.

    Args:
        texts: The documents; those of fewer than 200 or more than 100,000 words are left out.
        size_bytes: UTF-8 bytes of all documents' text, about.
        folder: Is made; see write.
        seed: Of edits and order.

    Raises:
        ValueError: The texts are not enough.
    """
    chance = random.Random(seed)
    documents: list[str] = []
    copies: list[tuple[int, int]] = []
    size = 0
    long_enough = (text for text in texts if _LEAST_WORDS <= len(text.split()) <= _MOST_WORDS)
    for number, text in enumerate(long_enough, start=1):
        documents.append(text)
        size += len(text.encode())
        if number % _ORIGINALS_PER_COPY == 0:
            new_words = documents[chance.randrange(len(documents))].split()
            copy = edit(text, EDIT_RATES[len(copies) % len(EDIT_RATES)], new_words, chance)
            copies.append((len(documents) - 1, len(documents)))
            documents.append(copy)
            size += len(copy.encode())
        if size >= size_bytes:
            break
    else:
        raise ValueError(f"the texts give documents of {size} bytes, and {size_bytes} are asked for")
    order = list(range(len(documents)))
    chance.shuffle(order)
    ids = dict(zip(order, write(folder, (documents[place] for place in order)), strict=True))
    pairs = [(ids[a], ids[b], jaccard(shingles(documents[a]), shingles(documents[b]))) for a, b in copies]
    return Planted({ids[place]: documents[place] for place in order}, pairs)


def edit(text: str, rate: float, new_words: list[str], chance: random.Random) -> str:
    """Replaces, removes or adds a word at this share of the words."""
    words = _WORD.findall(text)
    for place, word in enumerate(words):
        if chance.random() < rate:
            new = chance.choice(new_words) + " "
            words[place] = chance.choice((new, "", word + new))
    return "".join(words)


def repeat(texts: Collection[str], size_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yields the texts again and again, each time with other words: near duplicates stay so within a time alone.

    A time swaps three in ten distinct words for others of their length, everywhere alike.
    """
    chance = random.Random(seed)
    vocabulary = sorted({word for text in texts for word in text.split(" ")})
    swaps: dict[str, str] = {}
    size = 0
    while True:
        for text in texts:
            varied = " ".join(swaps.get(word, word) for word in text.split(" "))
            yield varied
            size += len(varied.encode())
            if size >= size_bytes:
                return
        chosen = chance.sample(vocabulary, round(len(vocabulary) * _VARIED_WORDS))
        others = chance.sample(chosen, len(chosen))
        swaps = dict(zip(sorted(chosen, key=len), sorted(others, key=len), strict=True))


def write(folder: Path, documents: Iterable[str]) -> list[str]:
    """Writes JSONL files of about 4 MB and returns the documents' ids, FILE#LINE, lines counted from 1."""
    folder.mkdir(parents=True)
    ids = []
    for number, batch in enumerate(_batches(documents)):
        name = f"part-{number:05}.jsonl"
        with (folder / name).open("w", encoding="utf-8") as file:
            for line, text in enumerate(batch, start=1):
                ids.append(f"{name}#{line}")
                file.write(json.dumps({"id": ids[-1], "text": text}) + "\n")
    return ids


def shingles(text: str) -> set[tuple[str, ...]]:
    """Every run of 5 words; a word is what stands between white space, in lower case, letters and digits alone."""
    words = [normal for word in text.split() if (normal := _NO_LETTER_OR_DIGIT.sub("", word.lower()))]
    return set(zip(*(words[start:] for start in range(NGRAM_WORDS)), strict=False))


def jaccard(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other)


def recall(pairs: Iterable[tuple[str, str, float]], kept: set[str], survivors: set[str], target: float) -> float:
    """The share of the pairs at least as similar as the target of which at most one survived.

    Args:
        pairs: See Planted.
        kept: The documents that came to deduplication; pairs that did not are left out.
        survivors: Those that it left.
        target: Jaccard similarity.
    """
    near = [(a, b) for a, b, similarity in pairs if similarity >= target and a in kept and b in kept]
    assert near, "no pair is near"
    return sum(not (a in survivors and b in survivors) for a, b in near) / len(near)


def precision(texts: Mapping[str, str], kept: set[str], survivors: set[str], target: float) -> float:
    """The share of the removed documents that have a survivor at least as similar as the target.

    Every removed document is compared with every survivor, by the shingles that they share.
    """
    removed = sorted(kept - survivors)
    assert removed, "nothing was removed"
    left = [_hashes(texts[name]) for name in sorted(survivors)]
    sizes = np.array([len(hashes) for hashes in left])
    hashes = np.concatenate(left)
    order = np.argsort(hashes)
    hashes, owners = hashes[order], np.repeat(np.arange(len(left)), sizes)[order]
    near = 0
    for name in removed:
        mine = _hashes(texts[name])
        starts, ends = np.searchsorted(hashes, mine, "left"), np.searchsorted(hashes, mine, "right")
        sharers = [owners[start:end] for start, end in zip(starts, ends, strict=True) if end > start]
        shared = np.bincount(np.concatenate(sharers), minlength=len(left)) if sharers else np.zeros(len(left))
        near += bool((shared >= target * (len(mine) + sizes - shared)).any())
    return near / len(removed)


def _hashes(text: str) -> NDArray[np.int64]:
    """The 64-bit hashes of a text's shingles: 10 million different ones collide in one of 300,000 corpora."""
    return np.fromiter(map(hash, shingles(text)), np.int64)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text.encode())
        if size >= _FILE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
