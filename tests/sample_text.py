"""Seeded prose for the tests: made-up words by Zipf's law, among them phrases that come again and again."""

import random

PHRASES = (
    "the Supreme Court of the United States",
    "the House of Representatives",
    "for the first time",
    "in connection with",
)


def make_documents(count: int, seed: int = 0, sentences: int = 20) -> list[str]:
    source = random.Random(seed)
    words = ["".join(random.Random(i).choices("etaoinshrdlu", k=2 + i % 7)) for i in range(800)]
    weights = [1 / (rank + 1) for rank in range(len(words))]

    def sentence() -> str:
        chosen = source.choices(words, weights, k=source.randint(4, 12))
        chosen.insert(source.randrange(len(chosen)), source.choice(PHRASES))
        text = " ".join(chosen)
        return text[0].upper() + text[1:] + "."

    def document() -> str:
        return "\n".join(" ".join(sentence() for _ in range(4)) for _ in range(sentences // 4))

    return [document() for _ in range(count)]
