"""Decontamination: what the evaluation holds is cut, however it is written there, and nothing else is."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_text import make_documents

from model.data.config import DecontaminationConfig
from model.data.filtering.decontamination import Decontaminator, Example, FileHits, merge_hits, save_evaluation_texts
from model.data.words import split_words, word_hashes

CONFIG = DecontaminationConfig(window_chars=20)
QUESTION = (
    "A woman removes the glass piece from the aquarium. She pours water into it and then cleans: "
    "which tool does she need now?"
)


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def decontaminator(
    folder: Path, texts: Sequence[Sequence[str]] = ((QUESTION,),), config: DecontaminationConfig = CONFIG
) -> Decontaminator:
    folder.mkdir(parents=True, exist_ok=True)
    examples = [Example("questions", line, tuple(of_example)) for line, of_example in enumerate(texts, start=1)]
    save_evaluation_texts(examples, config, folder)
    return Decontaminator(folder, config)


def cut(found: Decontaminator, *texts: str) -> list[tuple[str, ...] | None]:
    return found.cut(texts, *word_hashes(split_words(texts)))


def test_an_overlap_and_its_window_are_cut_and_the_text_is_split_there(tmp_path: Path) -> None:
    found = decontaminator(tmp_path)
    before, after = words("before", 20), words("after", 20)
    (rest,) = cut(found, f"{before} {QUESTION} {after}")
    # 20 characters before are "before18 before19" and part of before17; 20 after are "after0 after1 after2".
    assert rest == (words("before", 17), after.removeprefix("after0 after1 after2 "))
    assert cut(found, f"{before} {after}") == [None]


@pytest.mark.parametrize(
    "written",
    [
        QUESTION.upper(),
        QUESTION.replace(" ", "\n"),
        QUESTION.replace(" ", "\r\n  > ").replace(".", " …"),
        f"«{QUESTION.replace(' ', '_ — ').title()}»",
        " ".join(QUESTION.split()[4:17]),
    ],
    ids=["case", "lines", "quoted", "punctuation", "13 words"],
)
def test_it_is_found_however_it_is_written(tmp_path: Path, written: str) -> None:
    (rest,) = cut(decontaminator(tmp_path), f"{words('before', 20)} {written} {words('after', 20)}")
    assert rest is not None
    assert [text.split()[0] for text in rest] == ["before0", "after3"]


def test_fewer_than_13_words_of_a_longer_example_are_no_overlap(tmp_path: Path) -> None:
    part = " ".join(QUESTION.split()[4:16])
    assert cut(decontaminator(tmp_path), f"{words('before', 20)} {part} {words('after', 20)}") == [None]


def test_short_examples_are_matched_whole(tmp_path: Path) -> None:
    ten, seven = words("ten", 10), words("seven", 7)
    found = decontaminator(tmp_path, [[ten], [seven], [seven, f"{seven} more"]])
    text = "{} " + words("after", 20)
    rests = cut(found, text.format(ten), text.format(words("ten", 9)), text.format(seven), text.format(f"{seven} more"))
    assert [rest is None for rest in rests] == [False, True, True, False]
    assert found.report()["questions"]["examples"] == 3
    assert found.report()["questions"]["too_short"] == 1
    assert list(found.report()["questions"]["found"]) == ["1", "3"]


def test_one_overlap_in_five_megabytes(tmp_path: Path) -> None:
    filler = "\n".join(make_documents(1, seed=1, sentences=400))
    text = "\n\n".join([filler] * (2_500_000 // len(filler)))
    (rest,) = cut(decontaminator(tmp_path), f"{text}\n{QUESTION}\n{text}")
    assert rest is not None
    assert len(rest) == 2
    assert text.startswith(rest[0])
    assert text.endswith(rest[1])
    assert 2 * len(text) - sum(map(len, rest)) < 2 * (CONFIG.window_chars + 20)


def test_scripts_without_spaces(tmp_path: Path) -> None:
    question = "水族館のガラスを外して水を注いだ女性は何を使いますか"
    rests = cut(decontaminator(tmp_path, [[question]]), f"{'前' * 50}「{question}」。{'後' * 50}", "前" * 80)
    assert rests == [("前" * 31, "後" * 32), None]  # a window is 20 characters, the quotation mark and full stop too


def test_a_text_with_more_than_max_cuts_overlaps_is_dropped(tmp_path: Path) -> None:
    found = decontaminator(tmp_path, config=CONFIG.model_copy(update={"max_cuts": 2}))
    fill = [words(name, 20) for name in "abcd"]
    twice = f" {QUESTION} ".join(fill[:3])
    thrice = f" {QUESTION} ".join(fill)
    two, three = cut(found, twice, thrice)
    assert two is not None
    assert [rest.split()[0][0] for rest in two] == ["a", "b", "c"]
    assert three == ()
    strict = decontaminator(tmp_path / "strict", config=CONFIG.model_copy(update={"max_cuts": 0}))
    assert cut(strict, f"{fill[0]} {QUESTION} {fill[1]}", fill[2]) == [(), None]


def test_overlaps_that_touch_are_one_and_short_rests_go(tmp_path: Path) -> None:
    found = decontaminator(tmp_path, config=CONFIG.model_copy(update={"max_cuts": 1}))
    fill = words("fill", 20)
    assert cut(found, f"{QUESTION} {QUESTION}\n{QUESTION} {fill}") == [(words("fill", 20).split(" ", 4)[4],)]
    assert cut(found, f"{QUESTION} {words('w', 12)}") == [()]


def test_the_report_says_what_was_found_where(tmp_path: Path) -> None:
    shared = words("shared", 14)
    found = decontaminator(tmp_path, [[QUESTION], [f"{shared} one", f"{shared} two"], [f"{shared} three"]])
    fill = words("fill", 20)
    cut(found, f"{fill} {QUESTION} {fill} {QUESTION} {fill}", fill, f"{fill} {shared}")
    cut(found, f"{QUESTION.upper()} {fill}")
    excerpt = "A woman removes the glass piece from the aquarium. She pours water into"
    assert found.report() == {
        "questions": {
            "examples": 3,
            "too_short": 0,
            "documents": 3,
            "found": {
                "1": {"documents": 2, "excerpt": excerpt},
                "2": {"documents": 1, "excerpt": words("shared", 13)},
                "3": {"documents": 1, "excerpt": words("shared", 13)},
            },
        }
    }


def test_reports_add_up(tmp_path: Path) -> None:
    fill = words("fill", 20)
    reports = []
    for number, texts in enumerate([[f"{QUESTION} {fill}", fill], [f"{fill} {QUESTION.lower()}"], [fill]]):
        found = decontaminator(tmp_path / f"{number}")
        cut(found, *texts)
        reports.append(json.loads(json.dumps(found.report()))["questions"])
    total: FileHits | None = None
    for report in reports:
        total = merge_hits(total, report)
    assert total is not None
    assert (total["examples"], total["documents"]) == (1, 2)
    assert total["found"]["1"]["documents"] == 2
    assert total["found"]["1"]["excerpt"].startswith("A woman removes")
    assert reports[0]["documents"] == 1


def test_nothing_to_look_for(tmp_path: Path) -> None:
    assert cut(decontaminator(tmp_path / "short", [["too short"]]), QUESTION) == [None]
    assert cut(decontaminator(tmp_path / "none", []), QUESTION) == [None]
    assert cut(decontaminator(tmp_path / "empty"), "", "—", "one") == [None] * 3


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(5, 8), st.integers(1, 8))
def test_exactly_the_shared_ngrams_are_found(data: st.DataObject, ngram_words: int, min_words: int) -> None:
    """Against a search by hand, over words of which many are equal."""
    texts = st.lists(st.sampled_from(["a", "b", "A.", "-"]), max_size=25)
    examples = data.draw(st.lists(texts, min_size=1, max_size=4))
    documents = data.draw(st.lists(texts, min_size=1, max_size=4))
    config = DecontaminationConfig(ngram_words=ngram_words, min_words=min_words)
    with TemporaryDirectory() as folder:
        found = decontaminator(Path(folder), [[" ".join(text)] for text in examples], config)
        rests = cut(found, *(" ".join(text) for text in documents))

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


def test_planted_examples_of_a_large_evaluation_are_all_found(tmp_path: Path) -> None:
    chance = random.Random(0)
    examples = [text.replace("\n", " ")[:200] for text in make_documents(300, seed=7, sentences=8)]
    found = decontaminator(tmp_path, [[text] for text in examples])
    clean = make_documents(60, seed=8)
    planted = []
    for text in clean:
        split = text.split()
        place = chance.randrange(len(split))
        planted.append(" ".join([*split[:place], chance.choice(examples).upper(), *split[place:]]))
    overlapping = [rest is not None for rest in cut(found, *clean)]
    assert all(rest is not None for rest in cut(found, *planted))
    assert not np.any(overlapping)
