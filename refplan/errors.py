"""Errors a person can act on.

Everything a user can cause raises `RefplanError`; the command line prints its message and exits with code 2, never a
traceback. A message says what was wrong, where, and what to do about it.
"""

import difflib
from collections.abc import Iterable


class RefplanError(Exception):
    """Bad input or an impossible request; the message says what, where and what to do."""


class MissingExtraError(RefplanError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'refplan[{extra}]'"
        )


def unknown_name(kind: str, name: str, known: Iterable[str], more: str = "") -> RefplanError:
    """The error for a name that is not in a registry: nearest names first, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return RefplanError(f"unknown {kind} '{name}'.{hint} Known: {', '.join(names)}.{more}")
