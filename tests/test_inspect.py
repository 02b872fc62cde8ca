"""`jumbo inspect`: what a person sees of documents and token shards."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_text import make_documents
from token_runs import Corpus, make_config, prepare_tokens
from trained_tokenizer import train_tokenizer

from flows.__main__ import main
from flows.inspection import _pieces, _visible
from infra.storage import open_storage
from model.data.config import TokenizerConfig

Said = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("prefect_server")

CORPUS: Corpus = {
    "train/books-00000": make_documents(10, seed=1),
    "train/web-00000": ["A tale of\nthe House\u2581 of 東.\x1b[31m", *make_documents(5, seed=2)],
    "validation/web-00000": make_documents(4, seed=3),
    "test/web-00000": make_documents(4, seed=4),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> str:
    folder = tmp_path_factory.mktemp("inspect")
    model = train_tokenizer(make_documents(40), TokenizerConfig(vocab_size=500), 0, folder / "model")
    prepare_tokens(make_config(folder / "a run", "web", "books"), CORPUS, model, folder / "prepared")
    return str(folder / "a run")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")

    def said(*arguments: str) -> list[str]:
        main(["inspect", *arguments])
        return capsys.readouterr().out.splitlines()

    return said


def test_documents_of_a_run(run: str, said) -> None:
    lines = said("documents", run, "--source", "web", "--number", "2")
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
    assert lines[5] == "Languages: en 83.3%, fr 16.7%"  # 4 of 24
    assert lines[6] == f"2 documents of {run}/documents/train/web-00000.parquet"
    assert lines[8].startswith("Document 0  source web  origin web.jsonl#1  language fr  language_score 2  chars 2")
    assert "mean_word_chars" not in lines[8]  # not a number
    assert lines[9:11] == ["A tale of", "the House▁ of 東.\\x1b[31m"]
    assert lines[12].startswith("Document 5  source web")
    assert lines[13].endswith("more characters") or lines[-1].endswith("more characters")


def test_a_file_of_documents(run: str, said) -> None:
    lines = said("documents", f"{run}/documents/test/web-00000.parquet", "--number", "1")
    assert lines[1].split()[:3] == ["-", "web", "4"]
    assert lines[2] == "Languages: en 75.0%, fr 25.0%"
    assert sum(line.startswith("Document ") for line in lines) == 1


def test_tokens_of_a_run(run: str, said) -> None:
    lines = said("tokens", run, "--source", "web", "--document", "0")
    assert lines[0].split() == ["split", "source", "documents", "MB", "tokens", "tokens", "a", "byte", "share"]
    assert len(lines[1:5]) == 4
    assert lines[5] == f"{run}/tokens/train/web-00000.tokens"
    assert lines[6].startswith("6 documents, ")
    assert lines[6].endswith(" tokens of 4 bytes; vocabulary 500")
    assert lines[7].startswith("Tokens a document: median ")
    assert lines[8].startswith("Most frequent pieces: ")
    assert lines[9].startswith("Document 0: ")
    text = "\n".join(lines[10:-1])
    assert text.endswith("|<|endoftext|>")
    assert "|↵\n|" in text
    assert "<0xE6>|<0x9D>|<0xB1>" in text  # 東
    assert "\x1b" not in text
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


def test_in_s3(run: str, s3_bucket: str, said) -> None:
    storage = open_storage(f"{s3_bucket}/runs/a ✓")
    for path in Path(run).rglob("*"):
        if path.is_file():
            storage.upload(path, path.relative_to(run).as_posix())
    for kind in ("documents", "tokens"):
        here, there = said(kind, run), said(kind, storage.uri)
        assert [line.replace(storage.uri, run) for line in there] == here


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"inspect what\? jumbo inspect documents RUN, or jumbo inspect tokens RUN"),
        (["tokens"], "the following arguments are required: TARGET"),
        (["documents", "RUN/absent"], r"absent holds no finished documents/ \(documents/manifest\.json is missing\)"),
        (["documents", "RUN/tokens/manifest.json"], "manifest.json holds no finished documents/"),
        (["documents", "RUN/absent.parquet"], r"absent\.parquet is no file"),
        (["documents", "RUN/broken.parquet"], r"broken\.parquet is no Parquet file of documents: "),
        (["documents", "RUN", "--number", "-1"], "number: must be greater than or equal to 0, not '-1'"),
        (
            ["documents", "RUN", "--split", "dev"],
            r"split \(dev\) has no documents in .*; there are train, ",
        ),
        (
            ["tokens", "RUN", "--source", "code"],
            r"source \(code\) has no tokens in .*; there are books, web",
        ),
        (["tokens", "RUN", "--document", "10"], r"document \(10\) must be below the number of documents \(10\) in "),
        (["tokens", "RUN/broken.tokens"], r"broken\.index is no file"),
        (["tokens", "RUN/tokens/manifest.json"], "holds no finished tokens/"),
        (["tokens", "RUN", "--docment", "1"], "unknown field: --docment"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken.parquet", "broken.tokens"):
        Path(run, name).write_bytes(b"PAR1?")
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
