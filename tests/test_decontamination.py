"""Decontamination: what the evaluation holds is cut, however it is written there, and nothing else is."""

import json
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_text import make_documents

from model.data.config import DataConfig
from model.data.document_shards import SCHEMA
from model.data.filtering.decontamination import (
    Example,
    FileHits,
    OverlapWriter,
    decontaminate,
    merge_hits,
    read_files,
    save_evaluation_texts,
)
from model.data.pieces import InProcess
from model.data.words import split_words, word_offsets

MEMORY_BYTES = 1 << 28
WINDOW = 20
QUESTION = (
    "A woman removes the glass piece from the aquarium. She pours water into it and then cleans: "
    "which tool does she need now?"
)


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


BEFORE, AFTER = words("before", 20), words("after", 20)


class Decontaminated:
    """Documents in some shards after decontamination.

    Attributes:
        rests: What is left of each text, in order; None where nothing was found.
        report: What was found, by evaluation file.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Sequence[str]], examples: Sequence[Sequence[str]], **changes: Any
    ) -> None:
        settings = {"window_chars": WINDOW} | changes
        config = DataConfig.model_validate({"decontamination": settings, "filters": {"min_chars": 1}})
        evaluation = folder / "evaluation"
        evaluation.mkdir(parents=True)
        numbered = [Example("questions", line, tuple(texts)) for line, texts in enumerate(examples, start=1)]
        save_evaluation_texts(numbered, config.decontamination, evaluation)
        read = []
        for number, texts in enumerate(shards):
            read.append(folder / f"{number}")
            read[-1].mkdir()
            rows = [{"text": text, "origin": f"{number}#{row}"} for row, text in enumerate(texts)]
            with OverlapWriter(read[-1], 0, config.deduplication, evaluation) as writer:
                for first in range(0, len(rows), 3):
                    table = pa.Table.from_pylist(rows[first : first + 3], SCHEMA)
                    writer.set_aside(table, split_words(texts[first : first + 3]))
        left = decontaminate(read, evaluation, config, folder / "work", InProcess(), MEMORY_BYTES)
        self.report = read_files(evaluation)
        self.rests: list[tuple[str, ...] | None] = []
        for number, (of_read, rest) in enumerate(zip(read, left, strict=True)):
            aside, by_origin = set(), dict[str, list[str]]()
            if rest:
                aside = set(pq.read_table(of_read / "overlapping" / "documents.parquet")["origin"].to_pylist())
                for row in pq.read_table(rest / "documents.parquet").to_pylist():
                    by_origin.setdefault(row["origin"], []).append(row["text"])
                hits = json.loads((rest / "counts.json").read_text())["contamination"]
                self.report = {file: merge_hits(self.report[file], hits[file]) for file in hits}
            origins = [f"{number}#{row}" for row in range(len(shards[number]))]
            self.rests += [tuple(by_origin.get(origin, ())) if origin in aside else None for origin in origins]


def cut(folder: Path, *texts: str, examples: Sequence[Sequence[str]] = ((QUESTION,),), **changes: Any) -> list[Any]:
    return Decontaminated(folder, [texts], examples, **changes).rests


def test_an_overlap_and_its_window_are_cut_and_the_text_is_split_there(tmp_path: Path) -> None:
    cut_text, other = cut(tmp_path, f"{BEFORE} {QUESTION} {AFTER}", f"{BEFORE} {AFTER}")
    # 20 characters before are "before18 before19" and part of before17; 20 after are "after0 after1 after2".
    assert cut_text == (words("before", 17), AFTER.removeprefix("after0 after1 after2 "))
    assert other is None


def numbered_lines(text: str, number: str, width: int = 4) -> str:
    parts = text.split()
    lines = [" ".join(parts[first : first + width]) for first in range(0, len(parts), width)]
    return "\n" + "\n".join(f"{number.format(line)}{text}" for line, text in enumerate(lines, start=9)) + "\n"


@pytest.mark.parametrize(
    "written",
    [
        QUESTION.upper(),
        QUESTION.replace(" ", "\n"),
        QUESTION.replace(" ", "\r\n  > ").replace(".", " …"),
        f"«{QUESTION.replace(' ', '_ — ').title()}»",
        " ".join(QUESTION.split()[4:17]),
        QUESTION.replace("glass piece", "glass—piece").replace(" into ", "/into,"),
        QUESTION.replace("aquarium", "aqua-\nrium").replace("water", "wa-\nter").replace("cleans", "cl-\n\neans"),
        QUESTION.replace("o", "o\u00ad").replace(" she", " \u200bshe").replace("pours", "po\u2060urs"),
        " ".join(f"*{word}*" for word in QUESTION.split()),
        "| " + " | ".join(QUESTION.split()) + " |",
        " ".join(f"**{word}**" if number % 3 else f"[{word}]" for number, word in enumerate(QUESTION.split())),
        numbered_lines(QUESTION, "{} "),
        numbered_lines(QUESTION, "{}. "),
        numbered_lines(QUESTION, "  [{}] > ", width=1),
        numbered_lines(QUESTION, "> {:05}: ").replace("aquarium", "aqua-\n17 rium"),
        numbered_lines(QUESTION, "").replace("\n", "   12\n"),
        QUESTION.replace(". She", ".\n\n- 12 -\n\nShe"),
        QUESTION.replace(" ", "\u00a0"),
        "".join(chr(ord(char) + 0xFEE0) if char.isalpha() else char for char in QUESTION),
    ],
    ids=[
        "case", "lines", "quoted", "punctuation", "13 words", "glued", "hyphens", "invisible", "emphasis", "table",
        "marked", "line numbers", "items", "a word a line", "numbers and hyphens", "right margin", "page number",
        "no-break", "wide",
    ],
)  # fmt: skip
def test_it_is_found_however_it_is_written(tmp_path: Path, written: str) -> None:
    (rest,) = cut(tmp_path, f"{BEFORE} {written} {AFTER}")
    assert rest is not None
    # The window is 20 characters, of which numbers behind the question take some.
    assert [text.split()[0] for text in rest] in (["before0", "after3"], ["before0", "after2"])
    assert "aqua" not in " ".join(rest).lower()


@pytest.mark.parametrize("written", ["what", "document"])
def test_either_text_may_have_typographic_marks(tmp_path: Path, written: str) -> None:
    plain = "\"It isn't the dog's,\" - she said - 'and it won't be: the three-year-old boys' dogs don't bark...\""
    marked = "“It isn’t the dog’s,” — she said — ‘and it won’t be: the three‑year‑old boys’ dogs don’t bark…”"
    looked_for, document = (plain, marked) if written == "what" else (marked, plain)
    (rest,) = cut(tmp_path, f"{BEFORE} {document} {AFTER}", examples=[[looked_for]])
    assert rest is not None
    assert [text.split()[0] for text in rest] == ["before0", "after3"]


def test_case_and_composition_of_letters_beyond_ascii(tmp_path: Path) -> None:
    question = "Où était l’élève déçu, né à l’évêché près du château, à côté de la STRASSE Σίσυφος ŉ ﬁn?"
    ways = [question.upper(), question.lower(), unicodedata.normalize("NFD", question), question.casefold()]
    ways += [question.replace("STRASSE", "Straße"), question.replace("ﬁ", "fi").title()]
    rests = cut(tmp_path, *(f"{BEFORE} {way} {AFTER}" for way in ways), examples=[[question]], ngram_words=19)
    assert rests == [(words("before", 17), words("after", 20).split(" ", 3)[3])] * len(ways)


def test_a_question_without_its_answers_is_cut(tmp_path: Path) -> None:
    """A multiple-choice example has its question alone, and with each answer: the n-grams of all reach into both."""
    question, answers = words("question", 9), ["a mop", "a rake"]
    examples = [[question, *(f"{question} {answer}" for answer in answers)]]
    texts = [question, f"{question} A: a mop B: a rake", f"{question} a rake", words("question", 8), "a mop a rake"]
    rests = cut(tmp_path, *(f"{BEFORE} {text} {AFTER}" for text in texts), examples=examples)
    assert [rest is not None for rest in rests] == [True, True, True, False, False]
    assert not any("question" in part for rest in rests[:3] for part in rest)


def test_fewer_than_13_words_of_a_longer_example_are_no_overlap(tmp_path: Path) -> None:
    part = " ".join(QUESTION.split()[4:16])
    assert cut(tmp_path, f"{BEFORE} {part} {AFTER}") == [None]


def test_an_overlap_starts_and_ends_with_a_word(tmp_path: Path) -> None:
    question = "5 and 7 and 9 and 11 make 32 as he said on day 4"
    texts = [question, f"1{question}", f"{question}2", question.replace(" ", ""), question.replace("9", "8")]
    found = cut(tmp_path, *(f"{BEFORE} {text} {AFTER}" for text in texts), examples=[[question]], ngram_words=15)
    assert [rest is not None for rest in found] == [True, False, False, True, False]


def test_numbers_within_a_line_are_words(tmp_path: Path) -> None:
    """Problems that differ in their numbers are different problems."""
    problem = "Tom has {} apples and buys {} more for {} cents each: how many apples does he have then?"
    sum_ = "{} + {} + {} + {} + {} + {} + {} + {} + {} + {} + {} + {} + {} = ?"
    texts = [problem.format(3, 4, 5), problem.format(3, 6, 5), sum_.format(*range(13)), sum_.format(*range(1, 14))]
    examples = [[problem.format(3, 4, 5)], [sum_.format(*range(13))]]
    rests = cut(tmp_path, *(f"{BEFORE} {text} {AFTER}" for text in texts), examples=examples)
    assert [rest is not None for rest in rests] == [True, False, True, False]


def test_a_number_that_a_line_happens_to_begin_with_is_a_word(tmp_path: Path) -> None:
    question = "In the hot summer of 1984 he sold 17 of his 21 sheep to a man from Ayr"
    texts = [question.replace(number, f"\n{number}") for number in ("1984", "17", "21")]
    texts += [numbered_lines(text, "{} ", width=100) for text in texts]
    rests = cut(tmp_path, *(f"{BEFORE} {text} {AFTER}" for text in texts), examples=[[question]], ngram_words=18)
    assert [rest is not None for rest in rests[:3]] == [True] * 3


def test_short_examples_are_matched_whole(tmp_path: Path) -> None:
    ten, seven = words("ten", 10), words("seven", 7)
    texts = [ten, words("ten", 9), seven, f"{seven} more"]
    found = Decontaminated(
        tmp_path, [[f"{text} {AFTER}" for text in texts]], [[ten], [seven], [seven, f"{seven} more"]]
    )
    assert [rest is None for rest in found.rests] == [False, True, True, False]
    assert found.report["questions"]["examples"] == 3
    assert found.report["questions"]["too_short"] == 1
    assert list(found.report["questions"]["found"]) == ["1", "3"]


def test_one_overlap_in_five_megabytes(tmp_path: Path) -> None:
    filler = "\n".join(make_documents(1, seed=1, sentences=400))
    text = "\n\n".join([filler] * (2_500_000 // len(filler)))
    (rest,) = cut(tmp_path, f"{text}\n{QUESTION}\n{text}")
    assert len(rest) == 2
    assert text.startswith(rest[0])
    assert text.endswith(rest[1])
    assert 2 * len(text) - sum(map(len, rest)) < 2 * (WINDOW + 20)


def test_scripts_without_spaces(tmp_path: Path) -> None:
    question = "水族館のガラスを外して水を注いだ女性は何を使いますか"
    broken = "\n".join(question[first : first + 5] for first in range(0, len(question), 5))
    texts = [f"{'前' * 50}「{text}」。{'後' * 50}" for text in (question, broken)]
    rests = cut(tmp_path, *texts, "前" * 80, examples=[[question]])
    # A window is 20 characters, the quotation mark and full stop too.
    assert rests == [("前" * 31, "後" * 32)] * 2 + [None]


def test_a_text_with_more_than_max_cuts_overlaps_is_dropped(tmp_path: Path) -> None:
    fill = [words(name, 20) for name in "abcd"]
    twice = f" {QUESTION} ".join(fill[:3])
    thrice = f" {QUESTION} ".join(fill)
    two, three = cut(tmp_path / "two", twice, thrice, max_cuts=2)
    assert [rest.split()[0][0] for rest in two] == ["a", "b", "c"]
    assert three == ()
    assert cut(tmp_path / "none", f"{fill[0]} {QUESTION} {fill[1]}", fill[2], max_cuts=0) == [(), None]


def test_overlaps_that_touch_are_one_and_short_rests_go(tmp_path: Path) -> None:
    fill = words("fill", 20)
    rests = cut(tmp_path, f"{QUESTION} {QUESTION}\n{QUESTION} {fill}", f"{QUESTION} {words('w', 12)}", max_cuts=1)
    assert rests == [(fill.split(" ", 4)[4],), ()]


PHRASE = words("phrase", 15)


def with_phrase(number: int) -> str:
    return f"{words(f'x{number}a', 20)} {PHRASE} {words(f'x{number}b', 20)}"


def test_what_many_documents_have_stays_unless_it_is_a_whole_example(tmp_path: Path) -> None:
    """Brown et al. 2020, appendix C: 13-grams that more than 10 training documents have are ignored."""
    example = f"{words('start', 10)} {PHRASE} {words('end', 10)}"
    others = [f"{words(f'y{number}', 30)} {example} {words(f'z{number}', 30)}" for number in range(11)]
    for documents in (10, 11):
        texts = [with_phrase(number) for number in range(documents)]
        found = Decontaminated(tmp_path / f"{documents}", [texts[::2], texts[1::2]], [[example]])
        left = [*texts[::2], *texts[1::2]]
        if documents == 10:
            assert all(rest is not None and "phrase" not in " ".join(rest) for rest in found.rests)
            assert found.report["questions"]["found"]["1"]["documents"] == 10
        else:
            assert found.rests == [(text,) for text in left]
            common = {"1": {"documents": 11, "excerpt": words("phrase", 13)[:120]}}
            assert (found.report["questions"]["common"], found.report["questions"]["found"]) == (common, {})
            assert found.report["questions"]["documents"] == 0
    whole = Decontaminated(tmp_path / "whole", [others], [[example]])
    assert all(rest is not None and len(rest) == 2 and "phrase" not in " ".join(rest) for rest in whole.rests)
    assert whole.report["questions"]["documents"] == 11


@pytest.mark.parametrize("shards", [1, 4])
def test_copies_and_near_duplicates_are_one_document(tmp_path: Path, shards: int) -> None:
    example = f"{words('start', 10)} {PHRASE}"
    filler = " ".join(make_documents(1, seed=3))
    near = [f"{filler} {PHRASE} changed{number}" for number in range(8)]
    copies = [with_phrase(0).replace(" ", "\n", number).title() for number in range(8)]
    texts = [*near, *copies, with_phrase(1)]
    found = Decontaminated(
        tmp_path / "one", [texts[number::shards] for number in range(shards)], [[example]], max_documents=3
    )
    assert not any("phrase" in part.lower() for rest in found.rests for part in rest or ())
    assert found.report["questions"]["documents"] == 17
    texts.append(with_phrase(2))
    four = Decontaminated(
        tmp_path / "four", [texts[number::shards] for number in range(shards)], [[example]], max_documents=3
    )
    assert all(rest and len(rest) == 1 for rest in four.rests)


def test_the_report_says_what_was_found_where(tmp_path: Path) -> None:
    shared = words("shared", 14)
    fill = words("fill", 20)
    texts = [f"{fill} {QUESTION} {fill} {QUESTION} {fill}", fill, f"{fill} {shared}", f"{QUESTION.upper()} {fill}"]
    examples = [[QUESTION], [f"{shared} one", f"{shared} two"], [f"{shared} three"]]
    assert Decontaminated(tmp_path, [texts[:3], texts[3:]], examples).report == {
        "questions": {
            "examples": 3,
            "too_short": 0,
            "documents": 3,
            "found": {
                "1": {"documents": 2, "excerpt": " ".join(QUESTION.split()[:13])},
                "2": {"documents": 1, "excerpt": words("shared", 13)},
                "3": {"documents": 1, "excerpt": words("shared", 13)},
            },
            "common": {},
        }
    }


def test_reports_add_up() -> None:
    one = FileHits(examples=2, too_short=1, documents=3, found={"1": {"documents": 3, "excerpt": "a"}}, common={})
    two = FileHits(
        examples=2,
        too_short=1,
        documents=2,
        found={"1": {"documents": 1, "excerpt": "b"}, "2": {"documents": 1, "excerpt": "c"}},
        common={"1": {"documents": 20, "excerpt": "d"}},
    )
    assert merge_hits(one, two) == {
        "examples": 2,
        "too_short": 1,
        "documents": 5,
        "found": {"1": {"documents": 4, "excerpt": "a"}, "2": {"documents": 1, "excerpt": "c"}},
        "common": {"1": {"documents": 20, "excerpt": "d"}},
    }


def test_nothing_to_look_for(tmp_path: Path) -> None:
    assert cut(tmp_path / "short", QUESTION, examples=[["too short"]]) == [None]
    assert cut(tmp_path / "none", QUESTION, examples=[]) == [None]
    assert cut(tmp_path / "marks", QUESTION, examples=[["— " * 20], [""]]) == [None]
    assert cut(tmp_path / "empty", "", "—", "one", "1", "\n2\n") == [None] * 5


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(5, 8), st.integers(1, 8))
def test_exactly_the_shared_ngrams_are_found(data: st.DataObject, ngram_words: int, min_words: int) -> None:
    """Against a search by hand, over words of which many are equal, and of which none is made of others."""
    texts = st.lists(st.sampled_from(["a", "b", "A.", "-"]), max_size=25)
    examples = data.draw(st.lists(texts, min_size=1, max_size=4))
    documents = data.draw(st.lists(texts, min_size=1, max_size=4))
    with TemporaryDirectory() as folder:
        rests = cut(
            Path(folder),
            *(" ".join(text) for text in documents),
            examples=[[" ".join(text)] for text in examples],
            ngram_words=ngram_words,
            min_words=min_words,
        )

    def normal(text: list[str]) -> list[str]:
        return [word.lower().strip(".") for word in text if word != "-"]

    looked_for = set()
    for example in map(normal, examples):
        n = min(len(example), ngram_words)
        if len(example) >= min_words:
            looked_for |= {tuple(example[start : start + n]) for start in range(len(example) - n + 1)}
    for document, rest in zip(map(normal, documents), rests, strict=True):
        runs = {
            tuple(document[start : start + n])
            for n in range(1, ngram_words + 1)
            for start in range(len(document) - n + 1)
        }
        assert (rest is not None) == bool(runs & looked_for)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(), max_size=4))
def test_words_stand_where_their_offsets_say(texts: list[str]) -> None:
    found = split_words(texts)
    for number, text in enumerate(texts):
        own = found.codes[found.starts[number] : found.starts[number + 1]]
        assert [text[first:end] for first, end in word_offsets(text)] == [found.vocabulary[code] for code in own]


def test_planted_examples_of_a_large_evaluation_are_all_found(tmp_path: Path) -> None:
    chance = random.Random(0)
    examples = [text.replace("\n", " ")[:200] for text in make_documents(300, seed=7, sentences=8)]
    clean = make_documents(60, seed=8)
    planted = []
    for text in clean:
        split = text.split()
        place = chance.randrange(len(split))
        planted.append(" ".join([*split[:place], chance.choice(examples).upper(), *split[place:]]))
    rests = cut(tmp_path, *clean, *planted, examples=[[text] for text in examples])
    assert not np.any([rest is not None for rest in rests[:60]])
    assert all(rest is not None for rest in rests[60:])
