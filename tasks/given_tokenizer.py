"""Finds the tokenizer that a configuration names, in place of one to train. Imports no Prefect."""

from pathlib import Path

from infra.storage import find
from model.data.config import TokenizerConfig
from model.data.tokenization.tokenizer import Tokenizer


def given_tokenizer(config: TokenizerConfig) -> Path | None:
    """A local copy of tokenizer.uri; None where none is named.

    Raises:
        ValueError: there is no such file, it is no tokenizer of this system, or not of the size that is configured.
    """
    if not config.uri:
        return None
    try:
        storage, entries = find(config.uri)
        if len(entries) != 1:
            raise ValueError(f"{config.uri!r} finds {len(entries)} files; it must name one tokenizer.model")
        path = storage.local(entries[0].name)
        tokenizer = Tokenizer(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer.uri: {error}") from error
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"tokenizer.vocab_size ({config.vocab_size}) must be {tokenizer.vocab_size}, that of tokenizer.uri"
        )
    return path
