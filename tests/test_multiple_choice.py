import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from model.evaluation.likelihood import shard
from model.evaluation.multiple_choice import Row, Tally, read_rows, score_rows, split_ids

END = 0


class WordPairs:
    """A stand-in tokenizer whose tokens are bytes, or two words at once: the multi-word pieces that matter here.

    Ids 1 to 256 are bytes, 257 onwards the pieces.
    """

    PIECES = (" of the", "the Senate", " Representatives", "New York")

    def encode(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.PIECES)) + ")", text)
        ids: list[int] = []
        for part in parts:
            ids += [257 + self.PIECES.index(part)] if part in self.PIECES else [1 + byte for byte in part.encode()]
        return ids

    def decode(self, ids: list[int]) -> str:
        data = b"".join(bytes([i - 1]) if i <= 256 else self.PIECES[i - 257].encode() for i in ids)
        return data.decode("utf-8", "replace")


class Bigram(nn.Module):
    """Gives each id the same logit after any id: `favourites`, and 0 for the others."""

    def __init__(self, favourites: dict[int, float]) -> None:
        super().__init__()
        self.logits = torch.zeros(262)
        for token, logit in favourites.items():
            self.logits[token] = logit

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, -1)


def row(completions: list[str], target: int, context: str = "Q:", answer_context: str | None = None) -> Row:
    return Row.model_validate(
        {
            "candidates": [{"context": context, "completion": completion} for completion in completions],
            "target_index": target,
            "answer_context": answer_context,
        }
    )


def score(model: nn.Module, rows: list[Row], batch_size: int = 4) -> Tally:
    return score_rows(model, WordPairs(), rows, seq_len=32, batch_size=batch_size, end_of_text=END)


def as_line(**changes: object) -> bytes:
    fields = {
        "candidates": [{"context": "a", "completion": "b"}, {"context": "a", "completion": "c"}],
        "target_index": 1,
    }
    return json.dumps({key: value for key, value in (fields | changes).items() if value is not ...}).encode() + b"\n"


def test_an_aligned_completion_begins_where_its_context_ends() -> None:
    assert split_ids(WordPairs(), "ab", " Representatives") == ([1 + 97, 1 + 98], [259], True)
    assert split_ids(WordPairs(), "", "ab") == ([], [1 + 97, 1 + 98], True)


def test_the_token_that_overlaps_the_start_is_scored() -> None:
    # " of the" begins in the context: all of it belongs to the completion.
    assert split_ids(WordPairs(), "a of", " the b") == ([98], [257, 1 + 32, 1 + 98], False)
    # "the Senate" lies around the whole completion.
    assert split_ids(WordPairs(), "the S", "ena") == (WordPairs().encode("the S"), WordPairs().encode("ena"), True)
    assert split_ids(WordPairs(), "the S", "enate") == ([], [258], False)


@given(st.text(max_size=12), st.text(min_size=1, max_size=6), st.sampled_from(["", " of", "New ", "é", "�"]))
def test_a_split_loses_nothing(context: str, completion: str, joint: str) -> None:
    context += joint
    head, tail, aligned = split_ids(WordPairs(), context, completion)
    assert head + tail == WordPairs().encode(context + completion)
    assert context.startswith(WordPairs().decode(head))
    assert aligned == (WordPairs().decode(head) == context)
    assert tail


def test_each_normalisation_decides_by_its_own_measure() -> None:
    # With logits of 0 but for "x", "y" and "z", log p(x) - log p(other) = 2, and so on. Sums: "x" is the likeliest
    # single token; "xxyy yy" has more tokens but cheap ones.
    model = Bigram({1 + ord("x"): 5.0, 1 + ord("y"): 4.0})
    normalizer = math.log(260 + math.exp(5) + math.exp(4))
    x, y, other = 5 - normalizer, 4 - normalizer, -normalizer
    candidates = {
        "y": (y, 1, 1, 1),
        "xxx": (3 * x, 3, 3, 1),
        " Representatives": (other, 1, 16, 1),
        "yy yy": (4 * y + other, 5, 5, 2),
    }
    best = {
        "raw": max(candidates, key=lambda text: candidates[text][0]),
        "per_token": max(candidates, key=lambda text: candidates[text][0] / candidates[text][1]),
        "per_character": max(candidates, key=lambda text: candidates[text][0] / candidates[text][2]),
        "per_word": max(candidates, key=lambda text: candidates[text][0] / candidates[text][3]),
    }
    assert best == {"raw": "y", "per_token": "xxx", "per_character": " Representatives", "per_word": "y"}
    for target, text in enumerate(candidates):
        tally = score(model, [row(list(candidates), target)])
        assert tally.correct == {name: int(choice == text) for name, choice in best.items()}


def test_the_answer_context_takes_off_what_an_answer_says_by_itself() -> None:
    class Contextual(nn.Module):
        """After "Q", "a" has 0.30 and "b" 0.20; after "A", "a" has 0.6 and "b" 0.1."""

        def forward(self, tokens: Tensor) -> Tensor:
            probabilities = torch.full((*tokens.shape, 262), 1e-3)
            answer = (tokens == 1 + ord("A"))[..., None]
            probabilities[..., 1 + ord("a")] = torch.where(answer, 0.6, 0.3)[..., 0]
            probabilities[..., 1 + ord("b")] = torch.where(answer, 0.1, 0.2)[..., 0]
            return probabilities.log()

    tally = score(Contextual(), [row(["a", "b"], 1, context="Q", answer_context="A")])
    assert tally.correct["per_token"] == 0
    assert tally.correct["minus_answer_context"] == 1
    assert tally.report()["normalization"] == "minus_answer_context"
    assert tally.report()["accuracy"] == 1.0


def test_accuracy_standard_error_and_chance() -> None:
    # 15 of 20 right: sqrt(0.75 * 0.25 / 20) = 0.09682. Chance: 10 rows of 2 and 10 of 4, (10/2 + 10/4) / 20 = 0.375.
    model = Bigram({1 + ord("x"): 5.0})
    rows = [row(["x", "b"], int(i >= 9)) for i in range(10)] + [
        row(["a", "b", "x", "c"], 2 if i < 6 else 0) for i in range(10)
    ]
    report = score(model, rows).report()
    assert report["normalization"] == "per_token"
    assert report["accuracy"] == report["accuracies"]["per_token"] == 0.75
    assert report["standard_error"] == pytest.approx(0.09682, abs=5e-6)
    assert report["chance"] == pytest.approx(0.375)
    assert (report["rows"], report["candidates"]) == (20, 60)


def test_unaligned_completions_are_counted() -> None:
    tally = score(Bigram({}), [row([" the x", " a x", "f"], 0, context="a of"), row(["b", "c"], 0)])
    assert tally.report()["unaligned"] == 1


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_add_up(batch_size: int, world_size: int) -> None:
    # E4.
    model = Bigram({1 + ord(c): i / 3 for i, c in enumerate("abcdefg")})
    rows = [
        row([a, b * 2, " of the"], i % 3, context="it is")
        for i, (a, b) in enumerate(zip("abcde", "gfedc", strict=True))
    ]
    parts = [score(model, list(shard(rows, rank, world_size)), batch_size) for rank in range(world_size)]
    joined, whole = sum(parts, Tally()), score(model, rows)
    assert joined.rows == 5
    assert joined.chance == pytest.approx(whole.chance)
    assert replace(joined, chance=0) == replace(whole, chance=0)


def test_a_file_is_read_line_by_line() -> None:
    # Line ends inside of texts are not the file's; a byte order mark and blank lines are harmless, more fields too.
    rows = read_rows(
        [
            b"\xef\xbb\xbf" + as_line(id=7),
            b"\n",
            b"  \r\n",
            as_line(target_index=0, candidates=[{"context": "\u2028", "completion": "\x85"}] * 3),
        ],
        "f",
    )
    assert [r.target_index for r in rows] == [1, 0]
    assert rows[1].candidates[0].completion == "\x85"


def test_surrogates_become_characters() -> None:
    # D5's kind: a pair is its character, a lone one U+FFFD, which a tokenizer can encode.
    candidates = rb'[{"context": "\ud83d", "completion": "\ud83d\ude00"}, {"context": "", "completion": "x"}]'
    line = b'{"candidates": ' + candidates + b', "target_index": 0}'
    [only] = read_rows([line], "f")
    assert only.candidates[0].context == "�"
    assert only.candidates[0].completion == "😀"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops}\n", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b"\xff\xfe{}\n", "line 2: not UTF-8"),
        (b"[1]\n", "line 2: must be a JSON object, is list"),
        (as_line(target_index=2), r"line 2: target_index \(2\) must be below the number of candidates \(2\)"),
        (as_line(target_index=-1), "line 2: target_index: Input should be greater than or equal to 0"),
        (as_line(target_index=True), "line 2: target_index: Input should be a valid integer"),
        (as_line(target_index="1"), "line 2: target_index: Input should be a valid integer"),
        (as_line(target_index=...), "line 2: target_index: Field required"),
        (as_line(candidates=...), "line 2: candidates: Field required"),
        (as_line(candidates=[]), "line 2: candidates: .* at least 2 items"),
        (as_line(candidates=[{"context": "a", "completion": "b"}]), "line 2: candidates: .* at least 2 items"),
        (as_line(candidates=[{"context": "a"}] * 2), r"line 2: candidates.0.completion: Field required"),
        (as_line(candidates=[{"completion": "a"}] * 2), r"line 2: candidates.0.context: Field required"),
        (
            as_line(candidates=[{"context": "a", "completion": ""}] * 2),
            r"line 2: candidates.0.completion: .* at least 1",
        ),
        (
            as_line(candidates=[{"context": "a", "completion": 5}] * 2),
            r"line 2: candidates.0.completion: .* valid string",
        ),
        (as_line(answer_context="A:"), "line 2: answer_context must be in every row or in none"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^questions.jsonl, {message}"):
        read_rows([as_line(), line], "questions.jsonl")


@pytest.mark.parametrize("lines", [[], [b"\n", b"  "]])
def test_an_empty_file_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"questions.jsonl: no rows"):
        read_rows(lines, "questions.jsonl")


def test_the_shipped_example_is_well_formed() -> None:
    with (files("model") / "evaluation" / "examples" / "presidents.jsonl").open("rb") as lines:
        rows = read_rows(lines, "presidents")
    assert len(rows) >= 20
    assert {len(r.candidates) for r in rows} <= {3, 4}
    assert len({r.target_index for r in rows}) > 1
    assert all(len({c.completion for c in r.candidates}) == len(r.candidates) for r in rows)
