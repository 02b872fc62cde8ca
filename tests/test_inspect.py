"""`jumbo inspect`: what a person sees of documents and token shards."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from sample_text import make_documents
from token_runs import Corpus, make_config, prepare_tokens
from trained_tokenizer import train_tokenizer

from flows.__main__ import main
from flows.inspection import _pieces, _visible
from infra.storage import open_storage
from model.data.config import TokenizerConfig
from model.data.funnel import SourceCounts
from tasks.config import PipelineConfig

Said = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("prefect_server")

CORPUS: Corpus = {
    "train/books-00000": make_documents(10, seed=1),
    "train/web-00000": ["A tale of\nthe House\u2581 of 東.\x1b[31m", *make_documents(5, seed=2)],
    "validation/web-00000": make_documents(4, seed=3),
    "test/web-00000": make_documents(4, seed=4),
}


SOURCES = {
    "web": SourceCounts(
        files=2,
        read=20,
        read_bytes=1_250_000,
        dropped={"gopher.min_words": 4, "near_duplicate": 2, "languages": 1},
        cut_off=1,
        would_drop={"gopher.min_words": 4, "languages": 1},
        kept=14,
        kept_bytes=1_000_000,
        damaged=["b.jsonl.gz: the gzip stream ends before its end mark"],
        encodings={"utf-8": 1, "cp1252": 3},
        languages={"fr": 3, "en": 11},
    ),
    "books": SourceCounts(
        files=1, read=11, read_bytes=20_000, dropped={"near_duplicate": 1}, kept=10, kept_bytes=10_000
    ),
}
LONG = "word " * 200  # an excerpt that is no whole document
DROPPED = [
    ("web", "gopher.min_words", "web.jsonl#3", "The five words\x1b[31m are here."),
    ("web", "gopher.min_words", "web.jsonl#4", LONG),
    ("web", "languages", "web.jsonl#5", "Bonjour, comment allez-vous aujourd'hui ? Il fait beau à Paris."),
    ("web", "near_duplicate", "web.jsonl#9", "Twice."),
    ("books", "near_duplicate", "books.jsonl#7", "Thrice."),
]


def configured(run: Path | str, weights: tuple[float, ...] = (), **layers: object) -> PipelineConfig:
    """Writes the configuration that a run was last used with."""
    config = make_config(run, "web", "books", weights=weights, **layers)
    Path(run, "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> str:
    folder = tmp_path_factory.mktemp("inspect")
    model = train_tokenizer(make_documents(40), TokenizerConfig(vocab_size=500), 0, folder / "model")
    run = folder / "a run"
    run.mkdir()
    prepare_tokens(configured(run), CORPUS, model, folder / "prepared")
    manifest = json.loads((run / "documents/manifest.json").read_text())
    manifest["counts"]["sources"] = {name: asdict(counts) for name, counts in SOURCES.items()}
    (run / "documents/manifest.json").write_text(json.dumps(manifest))
    rows = [dict(zip(("source", "reason", "origin", "excerpt"), row, strict=True)) for row in DROPPED]
    (run / "documents/dropped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(run)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")

    def said(*arguments: str) -> list[str]:
        main(["inspect", *arguments])
        return capsys.readouterr().out.splitlines()

    return said


def test_documents_of_a_run(run: str, said) -> None:
    lines = said("documents", run, "--source", "web", "--number", "2")
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("split")) :]
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in CORPUS.items()}
    total = sizes["train/web-00000"] + sizes["train/books-00000"]
    assert lines[0].split() == ["split", "source", "documents", "MB", "share"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["train", "books", "10"],
        ["train", "web", "6"],
        ["validation", "web", "4"],
        ["test", "web", "4"],
    ]
    assert lines[2].split()[-1] == f"{sizes['train/web-00000'] / total:.1%}"
    assert lines[5] == f"2 documents of {run}/documents/train/web-00000.parquet"
    assert lines[7].startswith("Document 0  source web  origin web.jsonl#1  language fr  language_score 2  chars 2")
    assert "mean_word_chars" not in lines[7]  # not a number
    assert lines[8:10] == ["A tale of", "the House▁ of 東.\\x1b[31m"]
    assert lines[11].startswith("Document 5  source web")
    assert lines[12].endswith("more characters") or lines[-1].endswith("more characters")


def test_what_became_of_each_source(run: str, said) -> None:
    lines = [line.rstrip() for line in said("documents", run, "--number", "0")]
    assert lines[:14] == [
        "source  files  read  text read  dropped  kept  text kept",
        "web         2    20    1.25 MB        7    14    1.00 MB",
        "books       1    11    0.02 MB        1    10    0.01 MB",
        "",
        "source  encodings of files  languages kept",
        "web     cp1252 3, utf-8 1   en 78.6%, fr 21.4%",  # 11 and 3 of 14
        "books   -                   -",
        "Documents more than were read, where an evaluation text was cut out of the middle: 1",
        "Damaged, kept in part: web: b.jsonl.gz: the gzip stream ends before its end mark",
        "",
        "dropped           documents  in",
        "gopher.min_words          4  web 4",
        "near_duplicate            3  web 2, books 1",
        "languages                 1  web 1",
    ]
    assert lines[14] == f"Samples of them, shown by --dropped all (or a reason): {run}/documents/dropped.jsonl"


def test_dropped_documents(run: str, said) -> None:
    def samples(*arguments: str) -> list[str]:
        lines = said("documents", run, *arguments)
        return lines[next(i for i, line in enumerate(lines) if line.startswith("languages  ")) + 1 :]

    everything = samples("--dropped", "all")
    assert [line for line in everything if "  one of " in line] == [
        "gopher.min_words  source web  origin web.jsonl#3  one of 4",
        "gopher.min_words  source web  origin web.jsonl#4  one of 4",
        "near_duplicate  source web  origin web.jsonl#9  one of 2",
        "near_duplicate  source books  origin books.jsonl#7  one of 1",
        "languages  source web  origin web.jsonl#5  one of 1",
    ]
    assert everything[2:4] == ["words < 50: it has 5", "The five words\\x1b[31m are here."]
    assert everything[6] == "words < 50"  # of a longer document, its score is not known
    assert everything[7].endswith(" …")
    assert len([line for line in samples("--dropped", "all", "--number", "1") if "  one of " in line]) == 4
    assert len([line for line in samples("--dropped", "gopher") if "  one of " in line]) == 2
    (alone,) = [line for line in samples("--dropped", "near_duplicate", "--source", "books") if "  one of " in line]
    assert alone.startswith("near_duplicate  source books")


def test_a_file_of_documents(run: str, said) -> None:
    lines = said("documents", f"{run}/documents/test/web-00000.parquet", "--number", "1")
    assert lines[0].startswith("split")  # what became of the source's records is known of a run alone
    assert lines[1].split()[:3] == ["-", "web", "4"]
    assert lines[2] == "Languages: en 75.0%, fr 25.0%"
    assert sum(line.startswith("Document ") for line in lines) == 1


def test_tokens_of_a_run(run: str, said) -> None:
    lines = said("tokens", run, "--source", "web", "--document", "0")
    assert lines[0].split() == ["split", "source", "documents", "MB", "tokens", "tokens", "a", "byte", "share"]
    assert len(lines[1:5]) == 4
    lines = lines[lines.index(f"{run}/tokens/train/web-00000.tokens") :]
    assert lines[1].startswith("6 documents, ")
    assert lines[1].endswith(" tokens of 4 bytes; vocabulary 500")
    assert lines[2].startswith("Tokens a document: median ")
    assert lines[3].startswith("Most frequent pieces: ")
    assert lines[4].startswith("Document 0: ")
    text = "\n".join(lines[5:-1])
    assert text.endswith("|<|endoftext|>")
    assert "|↵\n|" in text
    assert "<0xE6>|<0x9D>|<0xB1>" in text  # 東
    assert "\x1b" not in text
    assert lines[-1] == "Round trip: exact"


def mixture(lines: list[str]) -> list[str]:
    start = next(i for i, line in enumerate(lines) if line.startswith("Training reads"))
    return [line.rstrip() for line in lines[start : lines.index("", start)]]


def tokens_of(run: str) -> dict[str, int]:
    parts = json.loads(Path(run, "tokens/manifest.json").read_text())["counts"]["parts"]
    return {part["source"]: part["tokens"] for name, part in parts.items() if name.startswith("train/")}


def test_how_training_will_read_the_sources(run: str, said) -> None:
    tokens = tokens_of(run)
    shown = mixture(said("tokens", run))
    assert shown[0] == "Training reads 2,560 tokens in 10 steps:"  # of 8 sequences of 32
    assert shown[1].split() == ["source", "weight", "tokens", "share", "of", "training", "epochs"]
    rows = {line.split()[0]: line.split()[1:] for line in shown[2:]}
    share = tokens["web"] / sum(tokens.values())
    assert rows["web"][:3] == ["-", f"{tokens['web']:,}", f"{share:.1%}"]
    assert rows["web"][3] == rows["books"][3] == f"{80 / ((sum(tokens.values()) - 1) // 32):.2f}"
    try:
        configured(run, weights=(3.0, 1.0), tokens={"max_epochs": 0.5})
        shown = mixture(said("tokens", run))
        epochs = 60 / ((tokens["web"] - 1) // 32)  # three quarters of 80 sequences
        assert epochs > 0.5
        rows = {line.split()[0]: line.split()[1:] for line in shown[2:4]}
        assert rows["web"] == f"3 {tokens['web']:,} 75.0% {epochs:.2f} ! above tokens.max_epochs (0.5)".split()
        assert rows["books"][:3] == ["1", f"{tokens['books']:,}", "25.0%"]
        assert shown[-1].startswith("! Training refuses this: lower training.steps")
    finally:
        configured(run)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda run: configured(run, model={"seq_len": 100_000}), "must be less than the train split's tokens"),
        (lambda run: configured(run, data={"sources": [{"uri": "x.txt", "name": "x", "weight": 1}]}), "other sources"),
        (lambda run: Path(run, "config.yaml").write_text("seed: [1"), "config.yaml is damaged"),
        (lambda run: Path(run, "config.yaml").write_text("seed: -1"), "config.yaml is damaged, or of another version"),
    ],
)
def test_a_mixture_that_cannot_be_is_said(run: str, said, change: Callable[[str], object], fault: str) -> None:
    try:
        change(run)
        lines = said("tokens", run)
    finally:
        configured(run)
    assert any(line.startswith("Mixture: ") and fault in line for line in lines)
    assert lines[-1] == "Round trip: exact"


def test_a_shard_of_a_run_and_one_that_is_alone(run: str, tmp_path: Path, said) -> None:
    lines = said("tokens", f"{run}/tokens/test/web-00000.tokens", "--document", "3")
    assert lines[1].split()[:4] == ["-", "-", "4", "-"]
    assert lines[-1] == "Round trip: exact"
    for suffix in (".tokens", ".index"):
        (tmp_path / f"alone{suffix}").write_bytes(Path(f"{run}/tokens/test/web-00000{suffix}").read_bytes())
    model = f"{run}/tokenizer/tokenizer.model"
    alone = said("tokens", f"{tmp_path}/alone.tokens", "--document", "3", "--tokenizer", model)
    assert alone[3:] == lines[3:]


def test_a_text_that_is_not_the_documents_is_said(run: str, said, tmp_path: Path) -> None:
    path = Path(run) / "documents/validation/web-00000.parquet"
    whole = path.read_bytes()
    path.write_bytes(Path(f"{run}/documents/test/web-00000.parquet").read_bytes())
    try:
        assert said("tokens", run, "--split", "validation")[-1] == (
            "Round trip: WRONG: its text is not that of web-00000.parquet"
        )
    finally:
        path.write_bytes(whole)


def test_in_s3(run: str, s3_bucket: str, said, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(f"{s3_bucket}/runs/a ✓")
    for path in Path(run).rglob("*"):
        if path.is_file():
            storage.upload(path, path.relative_to(run).as_posix())
    for kind, *options in (["documents"], ["tokens"], ["documents", "--dropped", "all"]):
        here, there = said(kind, run, *options), said(kind, storage.uri, *options)
        assert [line.replace(storage.uri, run) for line in there] == here
    with pytest.raises(SystemExit):
        said("documents", f"{storage.uri}/documents/train")
    error = capsys.readouterr().err
    assert error == (
        f"jumbo: {storage.uri}/documents/train holds no finished documents/; it lies in a run: "
        f"did you mean {storage.uri}?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"inspect what\? jumbo inspect documents RUN, or jumbo inspect tokens RUN"),
        (["tokens"], "the following arguments are required: TARGET"),
        (
            ["documents", "RUN/documents"],
            r"documents holds no finished documents/; it lies in a run: .* mean /.*/a run\?",
        ),
        (["documents", "RUN/tokens/train/"], r"it lies in a run: did you mean /.*/a run\?"),
        (["documents", "RUN2"], r"a run2 holds no finished documents/; it does not exist; did you mean /.*/a run\?"),
        (["documents", "RUN/.."], r"it holds the runs a run, empty run"),
        (["documents", "RUN/../model"], r"it is no run directory"),
        (
            ["documents", "RUN/../empty run"],
            r"this run has finished no stage so far; jumbo prepare --run-uri /.*/empty",
        ),
        (["documents", "RUN/tokens/manifest.json"], r"manifest.json holds no finished documents/; it lies in a run: "),
        (["documents", "RUN/tokens/train/web-00000.tokens"], "it is a file for jumbo inspect tokens"),
        (["tokens", "RUN/../model/tokenizer.model"], r"it is a file; name a run directory, or a \.tokens file"),
        (["documents", "RUN/absent.parquet"], r"absent\.parquet is no file; there are broken\.parquet"),
        (["documents", "RUN/documents/train/wep-00000.parquet"], r"\(did you mean web-00000\.parquet\?\)"),
        (["documents", "RUN/documents/*/web-00000.parquet"], r"is 3 files; name one, such as /.*\.parquet$"),
        (["documents", "RUN/other.parquet"], r"its columns are text \(int64\), c0 \(int64\), .* and 20 more; to make "),
        (["documents", "RUN/nulls.parquet"], r"nulls\.parquet is no shard of documents .*: it holds nulls"),
        (["documents", "RUN/broken.parquet"], r"broken\.parquet is no Parquet file of documents: "),
        (["documents", "RUN", "--number", "-1"], "number: must be greater than or equal to 0, not '-1'"),
        (
            ["documents", "RUN", "--split", "dev"],
            r"split \(dev\) has no documents in .*; there are train, validation, test$",
        ),
        (["documents", "RUN", "--split", "valid"], r"there are train, validation, test \(did you mean validation\?\)"),
        (["tokens", "RUN", "--split", "Train"], r"\(did you mean train\?\)"),
        (["documents", "RUN", "--source", "web1"], r"source \(web1\) .* there are books, web \(did you mean web\?\)"),
        (["documents", "RUN", "--dropped", "min_words"], r"there are gopher\.min_words, near_duplicate, languages"),
        (["documents", "RUN", "--dropped", "all", "--source", "wbe"], r"source \(wbe\) is none of .*mean web\?"),
        (["documents", "RUN/documents/test/web-00000.parquet", "--dropped", "all"], r"dropped \(all\) needs a run"),
        (
            ["tokens", "RUN", "--source", "code"],
            r"source \(code\) has no tokens in .*; there are books, web",
        ),
        (["tokens", "RUN", "--document", "10"], r"document \(10\) must be below the number of documents \(10\) in "),
        (["tokens", "RUN/broken.tokens"], r"broken\.index is no file"),
        (["tokens", "RUN/tokens/manifest.json"], "holds no finished tokens/"),
        (["tokens", "RUN", "--docment", "1"], "--docment"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken.parquet", "broken.tokens"):
        Path(run, name).write_bytes(b"PAR1?")
    pq.write_table(pa.table({"text": [1]} | {f"c{i}": [1] for i in range(27)}), Path(run, "other.parquet"))
    nothing = pa.array([None], pa.string())
    pq.write_table(
        pa.table(dict.fromkeys(("text", "source", "origin", "language"), nothing)), Path(run, "nulls.parquet")
    )
    empty = Path(run).parent / "empty run"
    empty.mkdir(exist_ok=True)
    (empty / "config.yaml").touch()
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *(argument.replace("RUN", run) for argument in arguments)])
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error


def test_pieces_are_told_apart_by_colour_or_bar() -> None:
    pieces = ["The", " House", "\n", " of"]
    assert _pieces(pieces, coloured=False).plain == "The| House|↵\n| of"
    coloured = _pieces(pieces, coloured=True)
    assert coloured.plain == "The House↵\n of"
    assert [str(span.style) for span in coloured.spans] == ["black on bright_cyan", "black on bright_yellow"] * 2


def test_no_control_character_reaches_the_terminal() -> None:
    assert _visible("a\x1b[2J\r\u202e\x00b 東\n") == "a\\x1b[2J\\r\\u202e\\x00b 東\n"
