"""Finds and reads the list of bad words that a configuration names."""

from infra.storage import find
from model.data.config import FilterConfig
from model.data.filtering.bad_words import BadWords, parse_bad_words

MAX_LIST_BYTES = 1 << 20


def load_bad_words(filters: FilterConfig) -> BadWords:
    """What the list of filters.c4.bad_words holds; nothing where its rule is not asked for.

    Raises:
        ValueError: there is no such file, or it is no list.
    """
    uri = filters.c4.bad_words
    if not uri or not filters.c4.enabled:
        return ()
    try:
        storage, entries = find(uri)
        if len(entries) != 1:
            raise ValueError(f"{uri!r} finds {len(entries)} files; it must name one")
        if entries[0].size_bytes > MAX_LIST_BYTES:
            raise ValueError(f"{uri!r} has {entries[0].size_bytes} bytes; a list has at most {MAX_LIST_BYTES}")
        try:
            return parse_bad_words(storage.read(entries[0].name).decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError(f"{uri!r} is not in UTF-8") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"data.filters.c4.bad_words: {error}") from error
