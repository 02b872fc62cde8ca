"""From source files to the document shards and their funnel."""

import gzip
import json
import os
import random
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sample_text import make_documents

from model.data.config import DataConfig, SourceConfig
from model.data.document_shards import SPLITS, iter_documents
from model.data.filtering.decontamination import Example
from model.data.funnel import Funnel
from model.data.pieces import Engine, InProcess
from model.data.preparation import prepare_documents
from model.data.readers.documents import SourceFile
from tasks.config import EngineConfig
from tasks.engine import open_engine
from tasks.pool import ProcessPool

SOURCE = SourceConfig(uri="made", name="made")
OTHER = SourceConfig(uri="other", name="other")
MEMORY_BYTES = 1 << 28
SECRET = "Which of the following seven heads of state was the first to visit the far side of the moon alone?"
EXAMPLES = [Example("questions", 1, (SECRET,))]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


class Corpus:
    """Files in a folder, and their preparation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[SourceFile] = []

    def add(self, data: bytes, name: str = "a.jsonl", source: SourceConfig = SOURCE) -> None:
        path = self.folder / f"{len(self.files)}-{name}"
        path.write_bytes(data)
        self.files.append(SourceFile(source, source.name, name, partial(path.open, "rb"), len(data)))

    def prepare(
        self, name: str = "out", engine: Engine | None = None, examples: list[Example] | None = None, **changes: Any
    ) -> Funnel:
        """Fills the folder `name`; what is below "work" stays for the next of the same name."""
        out, work = self.folder / name, self.folder / f"{name}-work"
        settings = {"sources": [SOURCE, OTHER], "validation_fraction": 0.2, "test_fraction": 0.2, **changes}
        settings["filters"] = {"min_chars": 1, "gopher": {"enabled": False}} | changes.get("filters", {})
        config = DataConfig.model_validate(settings)
        out.mkdir()
        return prepare_documents(self.files, config, examples or [], work, out, engine or InProcess(), MEMORY_BYTES)

    def paths(self, split: str, name: str = "out") -> list[Path]:
        return sorted((self.folder / name / split).glob("*.parquet"))

    def texts(self, split: str | None = None, name: str = "out") -> list[str]:
        splits = (split,) if split else SPLITS
        return [document.text for each in splits for document in iter_documents(self.paths(each, name))]

    def contents(self, name: str = "out") -> dict[str, bytes]:
        folder = self.folder / name
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def dropped(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / "out" / "dropped.jsonl").read_text().splitlines()]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path)


def edited(text: str, seed: int = 0, words: int = 1) -> str:
    """The text with a few words in other places of it changed: a near duplicate."""
    source, parts = random.Random(seed), text.split(" ")
    for place in source.sample(range(len(parts)), words):
        parts[place] = f"changed{seed}"
    return " ".join(parts)


def held(seed: int) -> str:
    """A document of its own that holds the secret."""
    before, after = make_documents(2, seed=1000 + seed)
    return f"{before}\n{SECRET}\n{after}"


def test_funnel_counts_what_became_of_every_record(corpus: Corpus) -> None:
    texts = make_documents(60)
    extra = ["short", texts[0].upper().replace(" ", "  \r\n", 1), texts[3] + "\x00\n", edited(texts[5])]
    corpus.add(json_lines(texts + extra) + b'{"body": 1}\n{\n' + json_lines(["x" * 40_000]))
    corpus.add(texts[1].encode(), "b.txt")
    corpus.add(json_lines(texts[:1]), "c.ndjson")
    funnel = corpus.prepare(max_document_bytes=20_000, sources=[SOURCE], filters={"min_chars": 200})

    counts = funnel.sources["made"]
    assert counts.files == 3
    assert counts.read == 60 + 4 + 3 + 1 + 1
    assert counts.dropped == {
        "min_chars": 1, "duplicate": 4, "near_duplicate": 1, "no_text_field": 1, "invalid_json": 1, "too_long": 1,
    }  # fmt: skip
    assert counts.kept == 60 == sum(split.documents for split in funnel.splits.values())
    assert counts.kept_bytes == sum(map(len, corpus.texts())) == sum(split.bytes for split in funnel.splits.values())
    assert counts.read_bytes == sum(map(len, [*texts, *extra, texts[1], texts[0]]))
    assert counts.damaged == []
    assert counts.encodings == {"utf-8": 3}
    assert len(corpus.texts()) == 60
    assert json.loads(json.dumps(funnel.to_dict()))["splits"]["train"]["documents"] == funnel.splits["train"].documents
    assert {(line["source"], line["reason"]) for line in corpus.dropped()} == {("made", r) for r in counts.dropped}
    (short,) = [line for line in corpus.dropped() if line["reason"] == "min_chars"]
    assert short == {"source": "made", "reason": "min_chars", "origin": "a.jsonl#61", "excerpt": "short"}


def test_columns_and_compression(corpus: Corpus) -> None:
    corpus.add(json_lines(make_documents(30)))
    corpus.prepare(sources=[SOURCE])
    file = pq.ParquetFile(corpus.paths("train")[0])
    assert file.schema_arrow.names[:6] == ["text", "source", "document_id", "origin", "language", "language_score"]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    row = file.read().to_pylist()[0]
    assert row["source"] == "made"
    assert len(bytes.fromhex(row["document_id"])) == 16
    assert row["origin"].startswith("a.jsonl#")
    assert row["chars"] == len(row["text"])


def test_of_equal_documents_that_of_the_first_source_survives(corpus: Corpus) -> None:
    texts = make_documents(30)
    corpus.add(json_lines([text.upper() for text in texts]), source=OTHER)
    corpus.add(json_lines(texts[:15]))
    corpus.add(json_lines(texts), source=OTHER)
    funnel = corpus.prepare()
    assert sorted(text.lower() for text in corpus.texts()) == sorted(text.lower() for text in texts)
    assert set(texts[:15]) <= set(corpus.texts())
    assert funnel.sources["made"].kept == 15
    assert funnel.sources["other"].dropped == {"duplicate": 45}


def test_a_source_that_another_holds_is_no_error(corpus: Corpus) -> None:
    texts = make_documents(60)
    corpus.add(json_lines(texts))
    corpus.add(json_lines(texts[:10]), source=OTHER)
    assert corpus.prepare().sources["other"].kept == 0


def test_short_documents_are_compared_whole(corpus: Corpus) -> None:  # case D6
    corpus.add(json_lines(["cat", "dog", "cat"]))
    corpus.add(json_lines(make_documents(60)))
    corpus.prepare(sources=[SOURCE], deduplication={"ngram_words": 5})
    assert sorted(text for text in corpus.texts() if len(text) < 5) == ["cat", "dog"]


def test_the_passes_of_deduplication_do_not_eat_each_other(corpus: Corpus) -> None:  # case D7
    words = [f"w{number}" for number in range(5000)]
    random.Random(0).shuffle(words)
    texts = [" ".join(words[50 * number : 50 * number + 50]) for number in range(100)]
    corpus.add(json_lines(texts))
    corpus.prepare(sources=[SOURCE], deduplication={"repeated_paragraphs": True})
    assert sorted(corpus.texts()) == sorted(texts)


def test_survivors_and_splits_do_not_depend_on_order(corpus: Corpus) -> None:  # cases B5 and D8
    texts = make_documents(400)
    everything = [*texts, *map(edited, texts[:50]), *(edited(edited(text), seed=1) for text in texts[:50])]
    corpus.add(json_lines(everything))
    corpus.prepare(sources=[SOURCE])
    other = Corpus(corpus.folder)
    shuffled = random.Random(1).sample(everything, k=len(everything))
    for number in range(10):
        other.add(json_lines(shuffled[number::10]))
    other.prepare("other", sources=[SOURCE], shard_bytes=1 << 16)
    for split in SPLITS:
        assert sorted(corpus.texts(split)) == sorted(other.texts(split, "other"))
    assert len(corpus.texts()) == 400
    # Binomial: 80 +- 4 standard deviations of 8.
    assert 48 < len(corpus.texts("validation")) < 112
    assert 48 < len(corpus.texts("test")) < 112


def test_near_duplicates_that_are_kept_are_in_one_split(corpus: Corpus) -> None:
    texts = make_documents(60)
    corpus.add(json_lines([edited(text, seed) for text in texts for seed in range(3)]))
    funnel = corpus.prepare(sources=[SOURCE], deduplication={"near_duplicates": "keep"})
    assert len(corpus.texts()) == 180 == funnel.sources["made"].kept
    starts = [{text.split("\n")[-1][:200] for text in corpus.texts(split)} for split in SPLITS]
    groups = [{next(i for i, t in enumerate(texts) if close(t, text)) for text in corpus.texts(s)} for s in SPLITS]
    assert all(starts)
    assert sorted(number for group in groups for number in group) == list(range(60))


def close(first: str, second: str) -> bool:
    a, b = first.split(" "), second.split(" ")
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) <= 2


def test_every_engine_gives_the_same_bytes(corpus: Corpus) -> None:
    texts = make_documents(300)
    for number in range(6):
        corpus.add(json_lines([*texts[number::6], edited(texts[number]), held(number)]), f"{number}.jsonl")
    corpus.prepare("here", sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
    pool = ProcessPool(2, lambda _: None)
    corpus.prepare("pool", pool, sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
    pool.close()
    assert pool.made > 20
    assert corpus.contents("here") == corpus.contents("pool")


@pytest.mark.slow
def test_ray_gives_the_same_bytes(corpus: Corpus, prefect_server: str) -> None:
    texts = make_documents(120)
    for number in range(3):
        corpus.add(json_lines([*texts[number::3], edited(texts[number]), held(number)]), f"{number}.jsonl")
    corpus.prepare("here", sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
    with open_engine(EngineConfig(kind="ray", processes=2), lambda _: None) as engine:
        corpus.prepare("ray", engine, sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
        assert engine.made > 20
    assert corpus.contents("here") == corpus.contents("ray")


class Stopping(InProcess):
    """An engine that stops after a number of pieces, as one that is killed."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def finish(self, what: str, pieces: Any) -> None:
        for piece in pieces:
            if not piece.folder.exists():
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
            super().finish(what, [piece])


def test_a_run_that_was_stopped_goes_on_where_it_was(corpus: Corpus) -> None:  # case D10
    texts = make_documents(200)
    for number in range(4):
        corpus.add(json_lines([*texts[number::4], edited(texts[number]), held(number)]), f"{number}.jsonl")
    whole = Stopping(10**6)
    corpus.prepare("whole", whole, sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
    pieces = 10**6 - whole.left
    source, done = random.Random(0), 0
    while True:
        engine = Stopping(source.randint(1, 9))
        steps = engine.left
        try:
            corpus.prepare("stopped", engine, sources=[SOURCE], shard_bytes=1 << 16, examples=EXAMPLES)
            break
        except KeyboardInterrupt:
            done += steps
            (corpus.folder / "stopped").rmdir()
    assert done + steps - engine.left == pieces, "a piece was made twice"
    assert corpus.contents("stopped") == corpus.contents("whole")


def test_shards_are_bounded_and_in_order(corpus: Corpus) -> None:
    texts = make_documents(300)
    corpus.add(json_lines(texts))
    corpus.prepare(sources=[SOURCE], shard_bytes=1 << 16)
    shards = corpus.paths("train")
    assert [shard.name for shard in shards] == [f"made-{number:05}.parquet" for number in range(len(shards))]
    assert len(shards) > 2
    longest = max(map(len, texts))
    assert all(sum(len(document.text) for document in iter_documents([s])) < (1 << 16) + longest for s in shards)
    train = corpus.texts("train")
    assert train == [text for text in texts if text in set(train)]


@pytest.mark.parametrize("near", ["remove", "keep"])
def test_a_new_source_changes_no_part_but_those_that_it_takes_documents_of(corpus: Corpus, near: str) -> None:
    texts = make_documents(600)
    for number in range(4):
        corpus.add(json_lines([*texts[number::4], held(number)]), f"{number}.jsonl")
    settings = {"shard_bytes": 1 << 16, "deduplication": {"near_duplicates": near}, "examples": EXAMPLES}
    funnel = corpus.prepare("before", sources=[SOURCE], **settings)
    before = corpus.contents("before")
    taken = [name for name in before if name.startswith("train/")][2]
    lost = next(iter_documents([corpus.folder / "before" / taken])).text
    corpus.add(json_lines([f"{lost} {'longer ' * 3}" if near == "remove" else lost, *make_documents(60, seed=9)]))
    corpus.files = [replace(corpus.files[-1], source=OTHER, source_name="other"), *corpus.files[:-1]]
    corpus.prepare("after", sources=[OTHER, SOURCE], **settings)
    after = corpus.contents("after")
    assert {name for name, data in before.items() if after.get(name) != data} == {taken, "dropped.jsonl"}
    assert {Path(name).name.partition("-")[0] for name in after.keys() - before.keys()} == {"other"}
    for split in SPLITS:
        sizes = [part["bytes"] for name, part in funnel.parts.items() if name.startswith(split)]
        assert all(0 < size < (1 << 16) + 2 * max(map(len, texts)) for size in sizes)
        assert all(size > 1 << 15 for size in sizes[:-1])


def test_sources_of_any_name_have_files_of_their_own(corpus: Corpus) -> None:
    texts, names = make_documents(90), ["a/b", "a b", "✓"]
    sources = [SourceConfig(uri=name, name=name) for name in names]
    for number, source in enumerate(sources):
        corpus.add(json_lines(texts[number::3]), source=source)
    funnel = corpus.prepare(sources=sources)
    assert {path.name.rpartition("-")[0] for path in corpus.paths("train")} == {"a-b", "a-b_2", "source"}
    for name, part in funnel.parts.items():
        assert {document.source for document in iter_documents([corpus.folder / "out" / name])} == {part["source"]}
    assert [funnel.sources[name].kept for name in names] == [30, 30, 30]


def test_scores_first_and_thresholds_later(corpus: Corpus) -> None:
    corpus.add(json_lines([*make_documents(60), "far too short"]))
    rules = {"min_chars": 200, "gopher": {"enabled": True, "min_words": 100_000}}
    funnel = corpus.prepare(sources=[SOURCE], filters=rules | {"score_only": True})
    assert len(corpus.texts()) == 61 == funnel.sources["made"].kept
    assert funnel.sources["made"].dropped == {}
    assert funnel.sources["made"].would_drop == {"min_chars": 1, "gopher.min_words": 60}
    assert sum(funnel.histograms["words"]["counts"]) == 61


def test_what_the_evaluation_holds_is_cut_out(corpus: Corpus) -> None:
    texts = make_documents(60)
    before, after = texts[7][:600], texts[7][600:]
    corpus.add(json_lines([*texts[:7], f"{before}\n{SECRET.upper().replace(' ', '  ')}\n{after}", *texts[8:]]))
    funnel = corpus.prepare(sources=[SOURCE], examples=EXAMPLES)
    assert not any("far side" in text.lower() for text in corpus.texts())
    assert sum(text[:300] == before[:300] for text in corpus.texts()) == 1, "the document was dropped whole"
    hits = funnel.contamination["questions"]
    assert (hits["examples"], hits["documents"], list(hits["found"])) == (1, 1, ["1"])


def test_what_is_left_of_a_document_is_a_document_like_others(corpus: Corpus) -> None:
    texts = make_documents(60)
    before, after = texts[0], texts[1]
    short = f"{make_documents(1, seed=5)[0][:500]} {SECRET}"
    # All that is left of them is near a document that is there, or too short.
    corpus.add(json_lines([*texts, f"{before} {SECRET} {after}", f"{before}{'.' * 200} {SECRET}", short, SECRET]))
    filters = {"min_chars": 400}
    funnel = corpus.prepare(sources=[SOURCE], examples=EXAMPLES, filters=filters, decontamination={"window_chars": 150})
    counts = funnel.sources["made"]
    assert funnel.contamination["questions"]["documents"] == 3
    assert counts.dropped == {"min_chars": 1, "near_duplicate": 3, "contaminated": 1}
    assert counts.read + counts.cut_off == counts.kept + sum(counts.dropped.values())
    assert len(corpus.texts()) == 60 == counts.kept
    assert {line["reason"] for line in corpus.dropped()} == set(counts.dropped)


def test_what_many_documents_hold_is_left_in(corpus: Corpus) -> None:
    phrase = " ".join(f"w{number}" for number in range(14))
    texts = make_documents(60)
    corpus.add(json_lines([f"{text[:900]} {phrase} {text[900:]}" for text in texts[:30]] + texts[30:]))
    corpus.add(json_lines(texts[:9]), source=OTHER)
    examples = [Example("questions", 1, (f"{phrase} and only here",))]
    funnel = corpus.prepare("left", examples=examples)
    assert sum(phrase in text for text in corpus.texts(name="left")) == 30
    assert funnel.contamination["questions"]["common"]["1"]["documents"] == 30
    assert funnel.contamination["questions"]["documents"] == 0
    funnel = corpus.prepare("cut", examples=examples, decontamination={"max_documents": 30})
    assert not any(phrase in text for text in corpus.texts(name="cut"))
    assert funnel.contamination["questions"]["documents"] == 30


def test_an_evaluation_of_which_nothing_is_found_is_reported(corpus: Corpus) -> None:
    corpus.add(json_lines(make_documents(60)))
    hits = corpus.prepare(sources=[SOURCE], examples=[*EXAMPLES, Example("other", 1, ("short",))]).contamination
    assert {file: (found["examples"], found["too_short"], found["found"]) for file, found in hits.items()} == {
        "questions": (1, 0, {}),
        "other": (1, 1, {}),
    }


def test_an_evaluation_text_is_found_in_either_form_of_its_letters(corpus: Corpus) -> None:
    secret = "Où était l’élève déçu né à l’évêché près du château brûlé?"
    texts = make_documents(60)
    corpus.add(json_lines([*texts[1:], f"{texts[0]} {unicodedata.normalize('NFD', secret)} {texts[0][::-1]}"]))
    funnel = corpus.prepare(sources=[SOURCE], examples=[Example("questions", 1, (secret,))])
    assert funnel.contamination["questions"]["documents"] == 1


def test_a_file_whose_name_is_not_text(corpus: Corpus) -> None:
    corpus.add(json_lines(make_documents(60)))
    corpus.files = [replace(file, name=os.fsdecode(b"caf\xe9.jsonl")) for file in corpus.files]
    corpus.prepare(sources=[SOURCE])
    origins = {document.origin.partition("#")[0] for document in iter_documents(corpus.paths("train"))}
    assert origins == {"caf\\udce9.jsonl"}


def test_repeated_paragraphs_are_removed_once(corpus: Corpus) -> None:
    texts = make_documents(40)
    notice = "This page belongs to everyone who reads it and may be copied by anyone who likes to do so."
    corpus.add(json_lines([f"{text}\n\n{notice}" for text in texts]))
    corpus.prepare(sources=[SOURCE], deduplication={"repeated_paragraphs": True})
    assert sum(notice in text for text in corpus.texts()) == 1
    assert sorted(text.replace(f"\n\n{notice}", "") for text in corpus.texts()) == sorted(texts)


def test_no_paragraph_is_lost_with_a_document_that_is_too_short_without_others(corpus: Corpus) -> None:
    a, b, c, *others = make_documents(60)
    corpus.add(json_lines([f"{a}\n\n{b}", f"{b}\n\n{c}", f"{c}\n\n{a}", *others]))
    corpus.prepare(sources=[SOURCE], deduplication={"repeated_paragraphs": True}, filters={"min_chars": len(a) + 100})
    assert all(any(paragraph in text for text in corpus.texts()) for paragraph in (a, b, c))


def test_damaged_file_is_reported_and_its_whole_records_kept(corpus: Corpus) -> None:  # case D4
    texts = make_documents(60)
    corpus.add(gzip.compress(json_lines(texts[:40]))[:-20], "cut.jsonl.gz")
    corpus.add(json_lines(texts[40:]))
    (damage,) = corpus.prepare(sources=[SOURCE]).sources["made"].damaged
    assert damage.startswith("cut.jsonl.gz: ")
    assert set(texts[:39] + texts[40:]) <= set(corpus.texts()) <= set(texts)


def test_files_of_other_encodings_are_read_and_counted(corpus: Corpus) -> None:
    texts = make_documents(60)
    corpus.add(json_lines(texts[:50]))
    corpus.add(json_lines(texts[50:]).decode().encode("utf-16"), "windows.jsonl")
    counts = corpus.prepare(sources=[SOURCE]).sources["made"]
    assert (counts.read, counts.kept) == (60, 60)
    assert counts.encodings["utf-8"] == 1
    assert sum(counts.encodings.values()) == 2


@pytest.mark.parametrize("sources", [(SOURCE, OTHER), (OTHER, SOURCE)])
def test_source_that_kept_nothing_is_named(corpus: Corpus, sources: tuple[SourceConfig, ...]) -> None:
    corpus.add(json_lines(make_documents(60)))
    corpus.add(b'{"text": "hi"}\n{}\n', source=OTHER)
    message = r"'other' kept no document of 2 read \(dropped: min_chars 1, no_text_field 1\)"
    with pytest.raises(ValueError, match=message):
        corpus.prepare(sources=sources, filters={"min_chars": 200})


def weighted(uri: str) -> SourceConfig:
    return SourceConfig(uri=uri, name=uri, weight=1)


def test_a_source_with_a_weight_and_nothing_to_train_on_is_named(corpus: Corpus) -> None:
    texts, sources = make_documents(60), [weighted("made"), weighted("other")]
    corpus.add(json_lines(texts), source=sources[0])
    corpus.add(json_lines([*texts[:10], texts[10].rpartition(" ")[0]]), source=sources[1])
    message = (
        r"data.sources: 'other' has weight 1, but nothing to train on: of 11 documents read, none kept "
        r"\(dropped: duplicate 10, near_duplicate 1; .*take it out of data.sources, or take the weights away"
    )
    with pytest.raises(ValueError, match=message):
        corpus.prepare(sources=sources)


def test_a_source_with_a_weight_whose_only_document_is_held_out_is_named(corpus: Corpus) -> None:
    texts, sources = make_documents(90), [weighted("made"), weighted("other")]
    corpus.add(json_lines(texts[:60]), source=sources[0])
    corpus.prepare("probe", sources=sources)
    (text, *_) = corpus.texts("validation", "probe")
    corpus.files.clear()
    corpus.add(json_lines([other for other in texts if other != text]), source=sources[0])
    corpus.add(json_lines([text]), source=sources[1])
    with pytest.raises(ValueError, match=r"'other' has weight 1, .*: of 1 documents read, 1 kept and held out"):
        corpus.prepare(sources=sources)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_empty_split_is_named(corpus: Corpus, split: str) -> None:
    corpus.add(json_lines(make_documents(60)))
    with pytest.raises(ValueError, match=f"the {split} split is empty: of 60 documents kept"):
        corpus.prepare(sources=[SOURCE], **{f"{split}_fraction": 1e-9})


def test_one_document_of_many_megabytes_among_small_ones(corpus: Corpus) -> None:
    source = np.random.default_rng(0)
    huge = " ".join(map(str, source.integers(0, 10**6, 300_000)))
    corpus.add(json_lines([*make_documents(60), huge]))
    corpus.prepare(sources=[SOURCE])
    assert huge in corpus.texts()
