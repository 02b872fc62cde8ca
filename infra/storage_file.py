"""Storage in a directory of this machine."""

import errno
import fcntl
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import IO, Any, BinaryIO

from infra.storage_names import PARTIAL, WILD, Entries, Entry, name_matches, pattern_parts, whole_range

DIRECT_BYTES = 1 << 20  # what is smaller goes by the page cache


class FileStorage:
    """A directory on this machine; `root` and `uri` are the same for all its spellings."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.uri = str(self.root)

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"object name {name!r} must stay below {self.uri}")
        return self.root / name

    def list(self, prefix: str = "") -> Entries:
        name = self._path(prefix).relative_to(self.root).as_posix()
        stat = _stat(self.root / name)
        if stat is not None and S_ISREG(stat.st_mode):
            return [_entry(name, stat)]
        return self._walk("" if name == "." else name, ("**", "*"))

    def glob(self, pattern: str) -> Entries:
        return self._walk("", pattern_parts(self._path(pattern).relative_to(self.root).as_posix()))

    def _walk(self, top: str, pattern: tuple[str, ...]) -> Entries:
        """The files below the directory `top` whose names from there on match."""
        entries = []
        # A directory's parts below `top`, and where it and those that led to it through links really are.
        pending: list[tuple[tuple[str, ...], tuple[Path, ...]]] = [((), ((self.root / top).resolve(),))]
        while pending:
            directory, places = pending.pop()
            for name in _names(self.root.joinpath(top, *directory), pattern[: len(directory) + 1]):
                parts = (*directory, name)
                matches, leads = name_matches(parts, pattern), name_matches(parts, pattern, leads=True)
                path = self.root.joinpath(top, *parts)
                stat = _stat(path) if matches or leads else None
                if stat is None:
                    continue
                if matches and S_ISREG(stat.st_mode) and not name.startswith(PARTIAL):
                    entries.append(_entry(path.relative_to(self.root).as_posix(), stat))
                elif leads and S_ISDIR(stat.st_mode):
                    real = places[-1] / name
                    if not real.is_symlink():
                        pending.append((parts, (*places[:-1], real)))
                    elif not any(place.is_relative_to(real.resolve()) for place in places):
                        pending.append((parts, (*places, real.resolve())))
        return sorted(entries, key=lambda entry: entry.name)

    def open(self, name: str) -> BinaryIO:
        return self._path(name).open("rb")

    def stream(self, name: str) -> io.RawIOBase:
        return _UncachedFile(self._path(name))

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def read_range(self, name: str, start: int, length: int) -> bytes:
        with self.open(name) as file:
            file.seek(start)
            return whole_range(f"{self.uri}/{name}", file.read(length), start, length)

    def write(self, name: str, data: bytes | memoryview) -> None:
        with self._replacing(name) as file:
            file.write(memoryview(data)[_write_directly(file.fileno(), memoryview(data)) :])

    def upload(self, path: Path, name: str) -> None:
        with path.open("rb") as source, self._replacing(name) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def delete(self, name: str) -> None:
        path = self._path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def delete_unfinished(self) -> None:
        for path in self.root.rglob(f"{PARTIAL}*"):
            path.unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        path = self._path(name)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        return path

    @contextmanager
    def _replacing(self, name: str) -> Iterator[IO[bytes]]:
        """A file that takes its name only when it is whole and on the disk."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=PARTIAL, delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


class _UncachedFile(io.FileIO):
    """A file that is read past the page cache, for as long as its place, the buffer and the position allow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _bypass_cache(self.fileno(), True)

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        _bypass_cache(self.fileno(), False)
        return super().readinto(buffer)


def _write_directly(fd: int, data: memoryview) -> int:
    """Write what can go straight to the disk, past the page cache: that is a copy less, and what is cached there, such
    as the training data, stays. Returns how many bytes went: none where file system or place in memory are against."""
    position = 0
    _bypass_cache(fd, True)
    try:
        while len(data) - position >= DIRECT_BYTES:
            position += os.write(fd, data[position : position + DIRECT_BYTES])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        _bypass_cache(fd, False)
    return position


def _bypass_cache(fd: int, on: bool) -> None:
    """Of no effect where the file system knows no way past its cache."""
    flags, direct = fcntl.fcntl(fd, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _entry(name: str, stat: os.stat_result) -> Entry:
    return Entry(name, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}")


def _names(directory: Path, pattern: tuple[str, ...]) -> Iterable[str]:
    """The names in a directory that can match the pattern's last part."""
    if "**" not in pattern and not WILD.search(pattern[-1]):
        return pattern[-1:]
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):  # deleted while we looked
        return ()


def _stat(path: Path) -> os.stat_result | None:
    """What the path leads to; None where that is nothing, since it was deleted meanwhile or is a broken link."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
