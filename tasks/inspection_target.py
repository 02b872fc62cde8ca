"""Finds the run, split, source or file that a person means, and says what there is instead of one that is not there."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from infra.storage import FileStorage, Storage, find, open_storage
from tasks.manifest import MANIFEST, Manifest, inside, read_manifest

_CONFIG = "config.yaml"
_STAGES = ("documents", "tokenizer", "tokens")
_FILES = {"documents": ".parquet", "tokens": ".tokens"}
_NAMED = 8  # names in one message


def run_manifest(target: str, directory: str) -> Manifest:
    """The manifest of a run's stage.

    Raises:
        ValueError: there is none; the message says where there is one, as far as that is known.
        OSError: it cannot be read.
    """
    storage = open_storage(target)
    if not _holds(storage, inside(directory, MANIFEST)):
        with suppress(OSError):  # the hint must not fail where the answer is known
            if hint := _hint(storage, directory):
                raise ValueError(f"{target} holds no finished {directory}/; {hint}")
        raise ValueError(f"{target} holds no finished {directory}/ ({inside(directory, MANIFEST)} is missing)")
    return read_manifest(target, directory)


def chosen_part(manifest: Manifest, split: str, source: str) -> str:
    """The first file of a split and source that holds a document.

    Raises:
        ValueError: there is none, with what there is.
    """
    target, directory = manifest.run_uri, manifest.directory
    parts = {name: part for name, part in manifest.counts["parts"].items() if part["documents"]}
    of_split = {name: part for name, part in parts.items() if name.startswith(f"{split}/")}
    if not of_split:
        splits = [name.partition("/")[0] for name in parts]
        raise ValueError(f"split ({split}) has no {directory} in {target}; there are {what_there_is(split, splits)}")
    of_source = [name for name, part in of_split.items() if source in ("", part["source"])]
    if not of_source:
        sources = [part["source"] for part in of_split.values()]
        raise ValueError(
            f"source ({source}) has no {directory} in the {split} split of {target}; "
            f"there are {what_there_is(source, sources)}"
        )
    return of_source[0]


def local_file(uri: str) -> Path:
    """The one file at a URI, fetched from remote storage.

    Raises:
        ValueError: there is none, or several.
    """
    storage, entries = find(uri)
    if len(entries) == 1:
        return storage.local(entries[0].name)
    if entries:
        raise ValueError(f"{uri} is {len(entries)} files; name one, such as {storage.uri}/{entries[0].name}")
    folder, _, name = uri.rpartition("/")
    there = ""
    if isinstance(storage, FileStorage):
        beside = find(f"{folder or '.'}/*{Path(name).suffix}")[1]
        there = what_there_is(name, (Path(entry.name).name for entry in beside))
    raise ValueError(f"{uri} is no file" + (f"; there are {there}" if there else ""))


def what_there_is(given: str, there: Iterable[str]) -> str:
    """The names that there are, as the end of a sentence, with the one that was probably meant."""
    names = list(dict.fromkeys(there))
    said = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return f"{said} (did you mean {meant}?)" if (meant := _nearest(given, names)) else said


def _nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that is like the one given, whatever its case; one that begins alike first."""
    folded = {name.casefold(): name for name in names}
    given = given.casefold()
    alike = [name for name in folded if given and (name.startswith(given) or given.startswith(name))]
    near = alike or get_close_matches(given, folded, n=1)
    return folded[near[0]] if near else None


def _hint(storage: Storage, directory: str) -> str:
    """Where the run is that was probably meant, or how far it has come; empty where that is unknown."""
    if _holds(storage, _CONFIG):
        finished = [stage for stage in _STAGES if _holds(storage, inside(stage, MANIFEST))]
        so_far = ", ".join(finished) or "no stage"
        return f"this run has finished {so_far} so far; jumbo prepare --run-uri {storage.uri} continues it"
    for kind, suffix in _FILES.items():
        if storage.uri.endswith(suffix):
            return f"it is a file for jumbo inspect {kind}"
    for above in _above(storage.uri):
        if _holds(open_storage(above), _CONFIG) or _holds(open_storage(above), inside(directory, MANIFEST)):
            return f"it lies in a run: did you mean {above}?"
    if not isinstance(storage, FileStorage):  # to look around in a bucket would be to list all of it
        return ""
    if storage.root.is_file():
        return f"it is a file; name a run directory, or a {_FILES[directory]} file"
    if below := list(_runs(storage.root)):
        return f"it holds the runs {what_there_is('', below)}"
    if storage.root.is_dir():
        return "it is no run directory"
    near = _nearest(storage.root.name, _runs(storage.root.parent))
    return "it does not exist" + (f"; did you mean {storage.root.parent / near}?" if near else "")


def _holds(storage: Storage, name: str) -> bool:
    return any(entry.name == name for entry in storage.list(name))


def _above(uri: str) -> Iterator[str]:
    """The directories that a URI lies in, the nearest first; of S3 down to the bucket."""
    scheme, found, path = uri.rpartition("://")
    parts = path.split("/")
    for count in range(len(parts) - 1, 0, -1):
        if above := "/".join(parts[:count]):
            yield f"{scheme}{found}{above}"


def _runs(folder: Path) -> Iterator[str]:
    """The names of the runs in a folder; what may not be looked into is none."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(OSError):
            if (path / _CONFIG).is_file():
                yield path.name
