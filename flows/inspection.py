"""`jumbo inspect documents|tokens`: what is in a shard, as a person would want to see it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from model.data.funnel import SourceCounts
from tasks.dropped_documents import DroppedDocument
from tasks.inspection import Line, SeenDocument, SeenDocuments, SeenMixture, SeenTokens

EXCERPT_CHARS = 600
SHOWN_PIECES = 400
SHOWN_REASONS = 12
SHOWN_LANGUAGES = 10
SHOWN_DAMAGES = 5
_PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False}  # lines that a person can copy, names as they are
_COLOURS = ("black on bright_cyan", "black on bright_yellow")


def show_documents(seen: SeenDocuments) -> None:
    """Print what was seen of documents."""
    console = Console(highlight=False)
    if seen.sources:
        _show_sources(console, seen.sources)
    if seen.dropped:
        for dropped in seen.dropped:
            _show_dropped(console, dropped)
        return
    if seen.samples:
        console.print(f"Samples of them, shown by --dropped all (or a reason): {seen.samples}", **_PLAIN)
    if seen.sources:
        console.print()
    console.print(_what_there_is(seen.lines))
    if not seen.sources:
        console.print(f"Languages: {_shares(seen.languages) or 'none'}", soft_wrap=True)
    console.print(f"{len(seen.examples)} documents of {seen.file}", **_PLAIN)
    for document in seen.examples:
        _show_document(console, document)


def show_tokens(seen: SeenTokens) -> None:
    """Print what was seen of token shards."""
    console = Console(highlight=False)
    console.print(_what_there_is(seen.lines))
    if seen.mixture:
        _show_mixture(console, seen.mixture)
    console.print(f"{seen.file}", style="bold", **_PLAIN)
    console.print(
        f"{len(seen.lengths):,} documents, {seen.lengths.sum():,} tokens of {seen.bytes_per_token} bytes; "
        f"vocabulary {seen.vocab_size:,}"
    )
    median, p95 = np.percentile(seen.lengths, [50, 95])
    console.print(f"Tokens a document: median {median:,.0f}, p95 {p95:,.0f}, longest {seen.lengths.max():,}")
    pieces = [f"{_visible(piece)!r} {count:,}" for piece, count in seen.frequent]
    console.print(f"Most frequent pieces: {', '.join(pieces)}", **_PLAIN)
    tokens = len(seen.pieces)
    console.print(
        f"Document {seen.document}: {tokens:,} tokens, {seen.text_bytes:,} bytes, "
        f"{tokens / max(1, seen.text_bytes):.3f} tokens a byte",
        style="bold",
    )
    console.print(_pieces(seen.pieces[:SHOWN_PIECES], console.is_terminal and not console.no_color), soft_wrap=True)
    if tokens > SHOWN_PIECES:
        console.print(f"… {tokens - SHOWN_PIECES:,} more tokens")
    if seen.round_trip:
        console.print(f"Round trip: WRONG: {seen.round_trip}", style="bold red", **_PLAIN)
    else:
        console.print("Round trip: exact")


def _show_sources(console: Console, sources: Mapping[str, SourceCounts]) -> None:
    """What became of the records of each source, and why those that are not there were dropped."""
    table = _table(["source"], ["files", "read", "text read", "dropped", "kept", "text kept"])
    for name, counts in sources.items():
        numbers = (counts.files, counts.read, counts.read_bytes, sum(counts.dropped.values()), counts.kept)
        files, read, read_bytes, dropped, kept = (f"{number:,}" for number in numbers)
        read_bytes = f"{_megabytes(counts.read_bytes)} MB"
        table.add_row(Text(name), files, read, read_bytes, dropped, kept, f"{_megabytes(counts.kept_bytes)} MB")
    console.print(table)
    console.print()
    table = _table(["source", "encodings of files", "languages kept"], [])
    for name, counts in sources.items():
        encodings = ", ".join(f"{encoding} {files:,}" for encoding, files in _most(counts.encodings))
        table.add_row(Text(name), encodings or "-", _shares(counts.languages) or "-")
    console.print(table)
    if cut_off := sum(counts.cut_off for counts in sources.values()):
        console.print(f"Documents more than were read, where an evaluation text was cut out of the middle: {cut_off:,}")
    _show_damages(console, sources)
    _show_reasons(console, sources)


def _show_damages(console: Console, sources: Mapping[str, SourceCounts]) -> None:
    damages = [f"{name}: {damage}" for name, counts in sources.items() for damage in counts.damaged]
    for damage in damages[:SHOWN_DAMAGES]:
        console.print(Text(f"Damaged, kept in part: {_visible(damage)}", "bold red"), soft_wrap=True)
    if len(damages) > SHOWN_DAMAGES:
        console.print(f"… {len(damages) - SHOWN_DAMAGES:,} more damaged files, listed in report.html")


def _show_reasons(console: Console, sources: Mapping[str, SourceCounts]) -> None:
    """What was dropped by reason, the most frequent first, and what would have been if the rules were obeyed."""
    dropped = sum((Counter(counts.dropped) for counts in sources.values()), Counter[str]())
    would = sum((Counter(counts.would_drop) for counts in sources.values()), Counter[str]())
    would = Counter({reason: count for reason, count in would.items() if reason not in dropped})
    for title, field, reasons in (("dropped", "dropped", dropped), ("would drop (score only)", "would_drop", would)):
        if not reasons:
            continue
        table = _table([title], ["documents"], ["in"])
        for reason, count in reasons.most_common(SHOWN_REASONS):
            of = Counter({name: getattr(counts, field).get(reason, 0) for name, counts in sources.items()})
            where = ", ".join(f"{name} {number:,}" for name, number in _most(+of))
            table.add_row(reason, f"{count:,}", Text(where))
        console.print()
        console.print(table)
        if len(reasons) > SHOWN_REASONS:
            console.print(f"… {len(reasons) - SHOWN_REASONS} more reasons")


def _show_mixture(console: Console, mixture: SeenMixture) -> None:
    """How training will read each source, and which of them too often."""
    if mixture.fault:
        console.print(Text(f"Mixture: {mixture.fault}", "bold red"), soft_wrap=True)
        return
    console.print(f"\nTraining reads {mixture.tokens:,} tokens in {mixture.steps:,} steps:")
    table = _table(["source"], ["weight", "tokens", "share of training", "epochs"], [""])
    for source in mixture.sources:
        above = source.epochs > mixture.max_epochs
        weight = "-" if source.weight is None else f"{source.weight:g}"
        mark = Text(f"! above tokens.max_epochs ({mixture.max_epochs:g})", "bold red") if above else ""
        table.add_row(
            Text(source.name), weight, f"{source.tokens:,}", f"{source.share:.1%}", f"{source.epochs:.2f}", mark
        )
    console.print(table)
    if any(source.epochs > mixture.max_epochs for source in mixture.sources):
        console.print("! Training refuses this: lower training.steps or the weight, add text, or allow more epochs")
    console.print()


def _table(left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()) -> Table:
    """A table with columns of text, then of numbers, then of text."""
    table = Table(box=None, pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    for column in last:
        table.add_column(column, overflow="fold")
    return table


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return Counter(counts).most_common(SHOWN_LANGUAGES)


def _shares(languages: Mapping[str, int]) -> str:
    total = sum(languages.values())
    return ", ".join(f"{name} {count / total:.1%}" for name, count in _most(languages))


def _what_there_is(lines: Sequence[Line]) -> Table:
    """Sizes and shares by split and source."""
    with_tokens = any(line.tokens is not None for line in lines)
    columns = ["documents", "MB", *(("tokens", "tokens a byte") if with_tokens else ()), "share"]
    table = _table(["split", "source"], columns)
    for line in lines:
        of_split = [other for other in lines if other.split == line.split]
        size, total = _size(line), sum(map(_size, of_split))
        where: tuple[str | Text, ...] = (line.split or "-", Text(line.source or "-"))
        row = [f"{line.documents:,}", _megabytes(line.bytes)]
        if with_tokens:
            ratio = f"{line.tokens / line.bytes:.3f}" if line.tokens is not None and line.bytes else "-"
            row += [f"{line.tokens:,}", ratio]
        table.add_row(*where, *row, f"{size / total:.1%}" if total else "-")
    return table


def _size(line: Line) -> int:
    return line.tokens if line.tokens is not None else line.bytes or 0


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.2f}"


def _show_document(console: Console, document: SeenDocument) -> None:
    about = "  ".join(f"{name} {value}" for name, value in document.about.items())
    console.print(Text(f"\nDocument {document.number}", "bold").append(f"  {about}", "not bold dim"), soft_wrap=True)
    rest = len(document.text) - EXCERPT_CHARS
    excerpt = Text(_visible(document.text[:EXCERPT_CHARS]))
    console.print(excerpt.append(f" … {rest:,} more characters" if rest > 0 else "", "dim"), soft_wrap=True)


def _show_dropped(console: Console, document: DroppedDocument) -> None:
    about = f"  source {document.source}  origin {document.origin}  one of {document.alike:,}"
    console.print(Text(f"\n{document.reason}", "bold").append(_visible(about), "not bold dim"), soft_wrap=True)
    if document.rule:
        console.print(Text(document.rule, "yellow"), soft_wrap=True)
    rest = len(document.excerpt) > EXCERPT_CHARS
    console.print(Text(_visible(document.excerpt[:EXCERPT_CHARS]) + (" …" if rest else "")), soft_wrap=True)


def _pieces(pieces: Sequence[str], coloured: bool) -> Text:
    """The pieces one after the other, their boundaries told by colours, or by | where there are none."""
    text = Text()
    for number, piece in enumerate(pieces):
        shown = "↵" if piece == "\n" else _visible(piece)
        if coloured:
            text.append(shown, _COLOURS[number % 2])
        else:
            text.append(f"{'|' if number else ''}{shown}")
        if piece == "\n":
            text.append("\n")
    return text


def _visible(text: str) -> str:
    """The text with control characters as escapes, so that none reaches the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
