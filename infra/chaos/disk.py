"""A disk that can be made full: a small file system in memory, and ballast on it. Every write beyond meets ENOSPC."""

import errno
import os
import subprocess
from pathlib import Path

SIZE_BYTES = 128 << 20


class SmallDisk:
    """A tmpfs at `path` while the block runs; `why_not` says why there is none where it cannot be mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.why_not = ""
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        self.path.mkdir(parents=True)
        if os.geteuid() != 0:
            self.why_not = "needs root to mount a small disk; or run: unshare --map-root-user --mount jumbo chaos …"
            return self
        size = f"size={SIZE_BYTES}"
        command = ["mount", "-t", "tmpfs", "-o", size, "jumbo-chaos", str(self.path)]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            self.why_not = " ".join(mounted.stderr.split()) if mounted.returncode else ""
        except FileNotFoundError:
            self.why_not = "there is no mount command"
        return self

    def __exit__(self, *_: object) -> None:
        if not self.why_not:  # lazily: a process that was just killed may still hold a file
            subprocess.run(["umount", "--lazy", str(self.path)], timeout=30, check=True)

    def fill(self, free_bytes: int) -> None:
        """Leave room for so many bytes."""
        assert not self.why_not
        with self._ballast.open("ab") as file:
            # Others write at the same time: what is free now need not be so in a moment.
            while (surplus := _free_bytes(self.path) - free_bytes) >= os.sysconf("SC_PAGE_SIZE"):
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), surplus)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Take the ballast away; twice is fine."""
        self._ballast.unlink(missing_ok=True)


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
