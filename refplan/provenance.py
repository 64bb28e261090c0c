"""Where a number came from: command, commit, versions, machine, time."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("refplan", "jax", "jaxlib", "equinox", "optax", "numpy", "gymnasium", "mujoco", "minari", "torch", "d3rlpy")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a number."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command line as a person would type it."""
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    # `python -m refplan` leaves the path of refplan/__main__.py behind.
    program = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([program, *sys.argv[1:]])


def commit() -> str:
    """The commit of the source tree, with `+` if it has uncommitted changes; empty outside a checkout of refplan."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = run("status", "--porcelain", "--untracked-files=no", "--", "refplan")
        return run("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def machine() -> dict[str, str | int]:
    """The kind of machine, without its name."""
    return {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count() or 0}


def provenance(seeds: list[int] | None = None, wall_s: float | None = None) -> dict[str, object]:
    """Everything a results file carries about its making."""
    found: dict[str, object] = {"command": command(), "commit": commit()}
    found["made"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found["machine"] = machine()
    found["versions"] = versions()
    if seeds is not None:
        found["seeds"] = seeds
    if wall_s is not None:
        found["wall_s"] = wall_s
    return found
