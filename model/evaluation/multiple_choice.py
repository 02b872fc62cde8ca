"""Multiple choice by likelihood: the answer is the completion that the model finds likeliest after its context.

Source: Lieber et al. 2021, "Jurassic-1: Technical Details and Evaluation", section 3; row format and the five
normalisations of its evaluation code.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator
from torch import nn

from model.data.readers.records import replace_surrogates
from model.data.tokenization.tokenizer import Tokenizer
from model.evaluation.likelihood import score_completions

PER_TOKEN = "per_token"
MINUS_ANSWER_CONTEXT = "minus_answer_context"
NORMALIZATIONS = ("raw", PER_TOKEN, "per_character", "per_word", MINUS_ANSWER_CONTEXT)

ROWS_AT_ONCE = 256


class Candidate(BaseModel):
    model_config = ConfigDict(frozen=True)

    context: StrictStr
    completion: StrictStr = Field(min_length=1)


class Row(BaseModel):
    """One question; fields that it does not know, such as ids, are ignored."""

    model_config = ConfigDict(frozen=True)

    candidates: tuple[Candidate, ...] = Field(min_length=2)
    target_index: StrictInt = Field(ge=0)
    answer_context: StrictStr | None = None

    @model_validator(mode="after")
    def _target_is_a_candidate(self) -> Self:
        if self.target_index >= len(self.candidates):
            raise ValueError(
                f"target_index ({self.target_index}) must be below the number of candidates ({len(self.candidates)})"
            )
        return self


@dataclass(frozen=True)
class Tally:
    """Counts of a share of the rows; `+` joins shares exactly."""

    rows: int = 0
    candidates: int = 0
    unaligned: int = 0
    """Completions that start in the middle of a token."""
    chance: float = 0.0
    """Rows that guessing gets right, on average."""
    correct: dict[str, int] = field(default_factory=dict)
    """Normalisation -> rows answered rightly. `minus_answer_context` only where the rows have an answer context."""

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.rows + other.rows,
            self.candidates + other.candidates,
            self.unaligned + other.unaligned,
            self.chance + other.chance,
            {name: self.correct.get(name, 0) + other.correct.get(name, 0) for name in self.correct | other.correct},
        )

    def report(self) -> dict[str, Any]:
        """Accuracies with the binomial standard error of the main one, and the level of chance."""
        normalization = MINUS_ANSWER_CONTEXT if MINUS_ANSWER_CONTEXT in self.correct else PER_TOKEN
        accuracies = {name: self.correct[name] / self.rows for name in NORMALIZATIONS if name in self.correct}
        accuracy = accuracies[normalization]
        return {
            "normalization": normalization,
            "accuracy": accuracy,
            "standard_error": math.sqrt(accuracy * (1 - accuracy) / self.rows),
            "chance": self.chance / self.rows,
            "rows": self.rows,
            "candidates": self.candidates,
            "unaligned": self.unaligned,
            "accuracies": accuracies,
        }


def read_rows(lines: Iterable[bytes], name: str) -> list[Row]:
    """The rows of a JSON-lines file, opened in binary mode: lines end at `\\n` alone. Blank lines are skipped.

    Raises:
        ValueError: `name`, the line's number and what is wrong with it.
    """
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse(line, f"{name}, line {number}")
        if rows and (row.answer_context is None) != (rows[0].answer_context is None):
            raise ValueError(f"{name}, line {number}: answer_context must be in every row or in none")
        rows.append(row)
    if not rows:
        raise ValueError(f"{name}: no rows; one JSON object a line is expected")
    return rows


def _parse(line: bytes, where: str) -> Row:
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        fields = json.loads(line.decode("utf-8-sig"), object_hook=_repair)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: must be a JSON object, is {type(fields).__name__}")
    try:
        return Row.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {place + ': ' if place else ''}{message}") from error


def _repair(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: replace_surrogates(value) if isinstance(value, str) else value for key, value in fields.items()}


def split_ids(tokenizer: Tokenizer, context: str, completion: str) -> tuple[list[int], list[int], bool]:
    """The ids of both texts encoded as one, cut where the completion starts, and whether a token starts there too.

    Multi-word pieces reach across the cut often: the token that overlaps the start belongs to the completion, which
    is then unaligned.
    """
    ids = tokenizer.encode(context + completion)
    cut, head = len(ids), context + completion
    # From the end, because a completion has few tokens. Comparing texts, not lengths, passes over the cuts inside of
    # a character that was encoded as bytes.
    while not context.startswith(head):
        cut -= 1
        head = tokenizer.decode(ids[:cut])
    return ids[:cut], ids[cut:], head == context


def score_rows(
    model: nn.Module,
    tokenizer: Tokenizer,
    rows: Iterable[Row],
    *,
    seq_len: int,
    batch_size: int,
    end_of_text: int,
    device: torch.device | str = "cpu",
) -> Tally:
    """What the model answers. Rows are drawn as they are needed; those of several ranks add up."""
    total = Tally()
    rows = iter(rows)
    while group := list(islice(rows, ROWS_AT_ONCE)):
        splits = [
            split_ids(tokenizer, context, candidate.completion)
            for row in group
            for candidate in row.candidates
            for context in _contexts(row, candidate)
        ]
        sums, token_counts = score_completions(
            model,
            [(context, completion) for context, completion, _ in splits],
            seq_len=seq_len,
            batch_size=batch_size,
            end_of_text=end_of_text,
            device=device,
        )
        scored = iter(zip(sums, token_counts, (aligned for *_, aligned in splits), strict=True))
        for row in group:
            total += _judge(row, [[next(scored) for _ in _contexts(row, candidate)] for candidate in row.candidates])
    return total


def _contexts(row: Row, candidate: Candidate) -> list[str]:
    """What a completion is scored after: its own context, then the answer context, if there is one."""
    return [candidate.context] + ([] if row.answer_context is None else [row.answer_context])


def _judge(row: Row, scored: Sequence[Sequence[tuple[float, int, bool]]]) -> Tally:
    """One row's tally from (sum, tokens, aligned) of each candidate after each of its contexts."""
    values: dict[str, list[float]] = {}
    for candidate, (own, *answer) in zip(row.candidates, scored, strict=True):
        log_probability, tokens, _ = own
        of_candidate = {
            "raw": log_probability,
            PER_TOKEN: log_probability / tokens,
            "per_character": log_probability / len(candidate.completion),
            "per_word": log_probability / max(1, len(candidate.completion.split())),
        }
        if answer:
            of_candidate[MINUS_ANSWER_CONTEXT] = log_probability - answer[0][0]
        for name, value in of_candidate.items():
            values.setdefault(name, []).append(value)
    return Tally(
        rows=1,
        candidates=len(row.candidates),
        unaligned=sum(not own[2] for own, *_ in scored),
        chance=1 / len(row.candidates),
        correct={name: int(of.index(max(of)) == row.target_index) for name, of in values.items()},
    )
