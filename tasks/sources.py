"""Finds the files that a run's sources name, with the version of each."""

from dataclasses import dataclass
from functools import partial

from infra.storage import Entry, find, open_storage
from model.data.config import DataConfig, SourceConfig
from model.data.readers.documents import SourceFile, document_format


@dataclass(frozen=True)
class FoundSource:
    """One source and its files that hold anything, in order of name."""

    config: SourceConfig
    name: str
    files: tuple[SourceFile, ...]
    entries: tuple[Entry, ...]

    @property
    def is_local(self) -> bool:
        return not self.config.uri.startswith("s3:")

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


def find_sources(data: DataConfig, run_uri: str) -> list[FoundSource]:
    """Every source of the run. Files below the run directory are its own output, and no source.

    Raises:
        ValueError: no source is named, one finds nothing or only empty files, two have one name, or a file's kind is
            unknown.
    """
    if not data.sources:
        raise ValueError(
            "data.sources is empty; name your text, such as --data.sources 'texts/*.txt', "
            "or start from --preset laptop, which brings its own"
        )
    run = open_storage(run_uri).uri
    found = [_find_source(index, source, run) for index, source in enumerate(data.sources)]
    names = [source.name for source in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"data.sources: two sources are named {twice[0]!r}; give each a name of its own")
    return found


def source_name(source: SourceConfig) -> str:
    """The source's name in the reports and in the names of its files."""
    return source.name or _last_folder(source.uri)


def source_weights(data: DataConfig) -> dict[str, float] | None:
    """The weight of each source by name; None where all text is one source."""
    weights = {source_name(source): source.weight for source in data.sources if source.weight is not None}
    return weights or None


def source_versions(sources: list[FoundSource]) -> dict[str, str]:
    """The version of every source file, by source and name."""
    return {f"{source.name}:{entry.name}": entry.version for source in sources for entry in source.entries}


def _find_source(index: int, source: SourceConfig, run: str) -> FoundSource:
    field = f"data.sources.{index}.uri"
    try:
        storage, entries = find(source.uri)
    except (ValueError, OSError) as error:
        raise ValueError(f"{field}: {error}") from error
    entries = [entry for entry in entries if not f"{storage.uri}/{entry.name}".startswith(f"{run}/")]
    if not entries:
        raise ValueError(f"{field}: {source.uri!r} finds no file")
    entries = [entry for entry in entries if entry.size_bytes]
    if not entries:
        raise ValueError(f"{field}: {source.uri!r} finds only empty files")
    name = source_name(source)
    for entry in entries:
        try:
            document_format(entry.name)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
    files = tuple(
        SourceFile(source, name, entry.name, partial(storage.open, entry.name), entry.size_bytes) for entry in entries
    )
    return FoundSource(source, name, files, tuple(entries))


def _last_folder(uri: str) -> str:
    """A name from the last part of a URI that holds no wildcard and is not a file's name."""
    parts = [part for part in uri.split(":")[-1].split("/") if part and "*" not in part and "?" not in part]
    folders = parts[:-1] if parts and uri.endswith(parts[-1]) and "." in parts[-1] else parts
    return (folders or parts or ["source"])[-1]
