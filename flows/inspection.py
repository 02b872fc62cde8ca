"""`jumbo inspect documents|tokens`: what is in a shard, as a person would want to see it."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.inspection import Line, SeenDocument, SeenDocuments, SeenTokens

EXCERPT_CHARS = 600
SHOWN_PIECES = 400
_COLOURS = ("black on bright_cyan", "black on bright_yellow")


def show_documents(seen: SeenDocuments) -> None:
    """Print what was seen of documents."""
    console = Console(highlight=False)
    console.print(_what_there_is(seen.lines))
    total = sum(seen.languages.values())
    languages = [f"{name} {count / total:.1%}" for name, count in list(seen.languages.items())[:10]]
    console.print(f"Languages: {', '.join(languages) or 'none'}", soft_wrap=True)
    console.print(f"{len(seen.examples)} documents of {seen.file}", soft_wrap=True, markup=False)
    for document in seen.examples:
        _show_document(console, document)


def show_tokens(seen: SeenTokens) -> None:
    """Print what was seen of token shards."""
    console = Console(highlight=False)
    console.print(_what_there_is(seen.lines))
    console.print(f"{seen.file}", style="bold", soft_wrap=True, markup=False)
    console.print(
        f"{len(seen.lengths):,} documents, {seen.lengths.sum():,} tokens of {seen.bytes_per_token} bytes; "
        f"vocabulary {seen.vocab_size:,}"
    )
    median, p95 = np.percentile(seen.lengths, [50, 95])
    console.print(f"Tokens a document: median {median:,.0f}, p95 {p95:,.0f}, longest {seen.lengths.max():,}")
    pieces = [f"{_visible(piece)!r} {count:,}" for piece, count in seen.frequent]
    console.print(f"Most frequent pieces: {', '.join(pieces)}", soft_wrap=True, markup=False)
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
        console.print(f"Round trip: WRONG: {seen.round_trip}", style="bold red", soft_wrap=True, markup=False)
    else:
        console.print("Round trip: exact")


def _what_there_is(lines: Sequence[Line]) -> Table:
    """Sizes and shares by split and source."""
    table = Table(box=None, pad_edge=False)
    with_tokens = any(line.tokens is not None for line in lines)
    table.add_column("split")
    table.add_column("source", overflow="fold")
    for column in ("documents", "MB", *(("tokens", "tokens a byte") if with_tokens else ()), "share"):
        table.add_column(column, justify="right")
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
