"""Whether the files of a source hold the fields that it names."""

from collections.abc import Sequence

from model.data.readers.documents import SourceFile, document_format, field_names

_SHOWN_NAMES = 20
_SHOWN_CHARS = 40


def check_fields(files: Sequence[SourceFile], max_document_bytes: int) -> None:
    """Looks for what the source wants: all columns in tables, but one field in records of JSON, which may lack any.

    It ends with the file that has the last of it, which mostly is the first one.

    Args:
        files: Files of one source.
        max_document_bytes: Longest record to look at.

    Raises:
        ValueError: It is in none of the files; names what the first of them has.
        DamagedFile: A table is damaged.
    """
    wanted = files[0].source.text_fields
    missing = list(wanted)
    may_lack = False
    there = ""
    for file in files:
        names = field_names(file, max_document_bytes)
        if names is None:
            return
        if names and not there:
            there = f"{file.name}, which has {_shown(names)}"
        may_lack = may_lack or document_format(file.name)[0] in ("json", "jsonl")
        missing = [field for field in missing if not _has(names, field)]
        if not missing or (may_lack and len(missing) < len(wanted)):
            return
    if there:
        raise ValueError(f"{missing[0]!r} is no field of {there}")


def _has(names: Sequence[str], field: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for name in names)


def _shown(names: Sequence[str]) -> str:
    shown = [name if len(name) <= _SHOWN_CHARS else f"{name[: _SHOWN_CHARS - 1]}…" for name in names[:_SHOWN_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
