"""Training a vocabulary when something is odd: the text, the trainer's process, a kill between two pieces of work."""

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from sample_text import make_documents
from trained_tokenizer import train_tokenizer, write_shards

from model.data.config import TokenizerConfig
from model.data.pieces import InProcess, Piece, finish_piece
from model.data.tokenization import phrases, training, vocabulary
from model.data.tokenization.tokenizer import Tokenizer
from model.data.tokenization.training import TrainerKilled

TEXTS = make_documents(100)
CONFIG = TokenizerConfig(vocab_size=400)


# --- the trainer's process


def test_killed_trainer_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case T6
    monkeypatch.setattr(training, "_TRAIN", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(TrainerKilled, match=r"trainer was killed \(SIGKILL\).*lower tokenizer\.sample_bytes"):
        train_tokenizer(TEXTS, CONFIG, 0, tmp_path)
    assert not list(tmp_path.iterdir())


def test_trainer_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    hang = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(training, "_TRAIN", hang)
    monkeypatch.setattr(training, "_TRAINER_BASE_SECONDS", 3.0)
    monkeypatch.setattr(training, "_TRAINER_CHARS_PER_SECOND", 1e9)
    with pytest.raises(TrainerKilled, match=r"within 3 s; lower tokenizer\.sample_bytes or tokenizer\.vocab_size"):
        train_tokenizer(TEXTS[:2], CONFIG, 0, tmp_path / "out")
    assert not Path("/proc", pid.read_text()).exists()


def test_time_for_the_trainer_grows_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TRAIN", "import time; time.sleep(60)")
    monkeypatch.setattr(training, "_TRAINER_BASE_SECONDS", 0.2)
    monkeypatch.setattr(training, "_TRAINER_CHARS_PER_SECOND", 10)
    with pytest.raises(TrainerKilled, match="did not end within 1 s"):
        training._train_sentencepiece({"abcd": 1000, "efgh": 1}, 300, CONFIG, tmp_path / "work")


def test_trainer_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    started, out = tmp_path / "pid", tmp_path / "out"
    script = f"""
from pathlib import Path
from model.data.tokenization import training
note = "import os; from pathlib import Path; Path({str(started)!r}).write_text(str(os.getpid()));"
busy = "sentencepiece.SentencePieceTrainer"
assert busy in training._TRAIN
training._TRAIN = training._TRAIN.replace(busy, note + "time.sleep(60);" + busy)
Path({str(out)!r}).mkdir()
training._run_trainer({{"a": 1}}, {{}}, Path({str(out)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        deadline = time.monotonic() + 30
        while not (started.exists() and started.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = Path("/proc", started.read_text())
        assert child.exists()
        parent.kill()
    while child.exists() and "(zombie)" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_the_trainer_says_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TRAIN", "raise SystemExit('no disk')")
    with pytest.raises(RuntimeError, match="trainer failed: no disk"):
        train_tokenizer(TEXTS, CONFIG, 0, tmp_path)


# --- a kill


class Killed(BaseException):
    pass


def finish_and_be_killed(piece: Piece) -> None:
    if not piece.folder.exists():
        finish_piece(piece)
        raise Killed


class KilledAfterEachPiece:
    def finish(self, what: str, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            finish_and_be_killed(piece)


def test_killed_between_any_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_shards(TEXTS[:20], tmp_path / "shards", 2)
    whole = training.train_tokenizer(shards, CONFIG, 0, tmp_path / "whole", tmp_path / "work", InProcess())
    for module in (phrases, training, vocabulary):
        monkeypatch.setattr(module, "finish_piece", finish_and_be_killed)
    kills = 0
    while True:
        try:
            model = training.train_tokenizer(
                shards, CONFIG, 0, tmp_path / "killed", tmp_path / "again", KilledAfterEachPiece()
            )
            break
        except Killed:
            kills += 1
            assert not (tmp_path / "killed").exists()
    assert kills == sum(any(map(Path.is_file, path.iterdir())) for path in (tmp_path / "work").rglob("*/"))
    assert kills > 20
    for name in ("tokenizer.model", "use.npy"):
        assert (model.parent / name).read_bytes() == (whole.parent / name).read_bytes()


# --- odd text


RANDOM = random.Random(0)
THAI = "".join(RANDOM.choices([chr(code) for code in range(0xE01, 0xE2F)], k=20_000))
HAN = "".join(RANDOM.choices([chr(0x4E00 + place) for place in range(200)], k=20_000))


@pytest.mark.parametrize("method", ["phrases", "direct"])
@pytest.mark.parametrize(
    "texts",
    [
        ["the same line\n" * 2000],
        ["".join(RANDOM.choices("0123456789", k=20_000))],
        [THAI],
        [HAN],
        [" \n" * 500 + "   \n" * 500 + " " * 500],
        ["x" * 200_000],
        ["ab"],
    ],
    ids=["one line", "digits", "thai", "han", "spaces", "one letter", "one word"],
)
def test_odd_text(tmp_path: Path, texts: list[str], method: str) -> None:
    config = TokenizerConfig(vocab_size=400, method=method)
    try:
        path = train_tokenizer(texts, config, 0, tmp_path)
    except ValueError as error:
        found = re.fullmatch(r"tokenizer.vocab_size .400. is more than the corpus supports .(\d+).; (.*)", str(error))
        assert found
        supported = int(found[1])
        assert found[2] == ("lower it or add text" if supported >= 300 else "add text")
        if supported < 300:
            return
        config = TokenizerConfig(vocab_size=supported, method=method)
        path = train_tokenizer(texts, config, 0, tmp_path)
    tokenizer = Tokenizer(path)
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 1400, "reserved_pieces": 1024},
        {"max_phrase_words": 1},
        {"max_phrase_words": 8, "max_piece_chars": 128, "min_phrase_count": 2},
        {"min_phrase_count": 1 << 40},
        {"sample_bytes": 20_000},  # one block has 16,384
        {"max_piece_chars": 4},
    ],
)
def test_bounds_of_the_settings(tmp_path: Path, settings: dict[str, int]) -> None:
    config = TokenizerConfig(**{"vocab_size": 400, **settings})
    tokenizer = Tokenizer(train_tokenizer(TEXTS, config, 0, tmp_path))
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_sample_that_is_smaller_than_any_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"supports \(\d+\)"):
        train_tokenizer(TEXTS, TokenizerConfig(vocab_size=1000, sample_bytes=1 << 10), 0, tmp_path)


@pytest.mark.parametrize("method", ["phrases", "direct"])
def test_a_space_comes_back_though_no_text_had_one(method: Literal["phrases", "direct"], tmp_path: Path) -> None:
    """Without a piece for it, it would be written as SentencePiece's own sign for a space, and come back as that."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("thequickbrownfox", k=200)) + "\n" for _ in range(100)]
    tokenizer = Tokenizer(train_tokenizer(texts, TokenizerConfig(vocab_size=320, method=method), 0, tmp_path))
    for text in ("a b  c", " ", "hello world"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
