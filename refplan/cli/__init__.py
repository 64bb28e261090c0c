"""The command line: `refplan COMMAND ...`. Nothing heavy is imported until a command runs.

Each command lives in its own file with `add(commands)`, which declares its options, and a function that runs it and
returns the exit code: 0 all well, 1 the answer is "no" (a check found errors), 2 bad input, 130 interrupted.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from refplan.cli import advise, bench, data, demo, diagnose, evaluate, fit, plot, report, reproduce, run, tune, worlds
from refplan.errors import RefplanError

COMMANDS = (demo, run, data, fit, diagnose, evaluate, advise, tune, reproduce, plot, report, worlds, bench)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors also say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        print(f"refplan: error: {message}{self._hint(message)}", file=sys.stderr)
        print(f"Try: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _hint(self, message: str) -> str:
        if "invalid choice: '" not in message:
            return ""
        word = message.split("invalid choice: '")[1].split("'")[0]
        choices = [c for action in self._actions if action.choices for c in map(str, action.choices)]
        return _did_you_mean(word, choices)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f". Did you mean {' or '.join(near)}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The whole command tree."""
    parser = _Parser(
        prog="refplan",
        description="Make any offline-learned policy better while it is in use.",
        epilog="Every command has --help. Docs: docs/ in the source tree (make docs).",
    )
    parser.add_argument("--version", action="store_true", help="versions that matter for reproduction, then exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if args.version:
        return _print_versions()
    if not hasattr(args, "run"):
        getattr(args, "parser", parser).print_help()
        return 0 if not unknown else 2
    if unknown:
        options = list(args.parser._option_string_actions)
        args.parser.error(f"unrecognised argument '{unknown[0]}'{_did_you_mean(unknown[0].split('=')[0], options)}")
    _use_compilation_cache()
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args) or 0)
    except RefplanError as error:
        print(f"refplan: error: {error}", file=sys.stderr)
        return 130 if type(error).__name__ == "Interrupted" else 2
    except KeyboardInterrupt:
        print(f"refplan: interrupted.{_how_to_resume(args)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`refplan ... | head`); keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"refplan: error: {where}{error.strerror or error}.", file=sys.stderr)
        return 2


def _how_to_resume(args: argparse.Namespace) -> str:
    """Commands that keep what they have made name the option that says where (`kept_in`)."""
    kept_in = getattr(args, getattr(args, "kept_in", ""), None)
    return f" What is finished is kept in {kept_in}; run the same command again to go on." if kept_in else ""


def _use_compilation_cache() -> None:
    """Compiled programs are kept between processes; JAX reads these when it is first imported."""
    from refplan.cache import cache_folder

    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_folder() / "xla")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:  # JAX would warn at every single program
        print(f"refplan: note: {folder} cannot be written, so every command compiles anew (REFPLAN_CACHE names another "
              "folder).", file=sys.stderr)  # fmt: skip
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _print_versions() -> int:
    from refplan.provenance import commit, versions

    for name, version in {**versions(), "commit": commit()}.items():
        if version:
            print(f"{name} {version}")
    return 0
