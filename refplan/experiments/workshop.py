"""Stages of work that are made once: each lives in a folder named by a digest of everything it was made from.

Change an input and the stage, and all that follow from it, get other folders; change it back and the old ones are found
again. A stage that was killed continues where its own folder says.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refplan.errors import RefplanError
from refplan.files import write_text, writing
from refplan.modules import load_module, save_module
from refplan.settings import settings_of

FINISHED = "stage.json"


@dataclass(frozen=True)
class Stage:
    """A finished stage: what it made, where, and the digest others are made from."""

    name: str
    digest: str
    folder: Path
    about: dict[str, Any]
    made: Any


def digest_inputs(inputs: Mapping[str, Any]) -> str:
    """A short name for everything a stage depends on."""
    text = json.dumps(inputs, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass
class Workshop:
    """Makes stages, or finds them made; `say` hears one line per stage."""

    folder: Path
    say: Callable[[str], None] = print
    total: int = 0
    number: int = field(default=0, init=False)

    def stage(
        self,
        name: str,
        inputs: Mapping[str, Any],
        make: Callable[[Path], tuple[Any, dict[str, Any]]],
        load: Callable[[Path], Any],
    ) -> Stage:
        """`make(folder)` gives (the product, notes about it) and has written what `load(folder)` reads."""
        digest = digest_inputs({"stage": name, **inputs})
        folder = self.folder / "stages" / f"{name}-{digest}"
        self.number += 1
        place = f"[{self.number}/{max(self.total, self.number)}]"
        finished = folder / FINISHED
        if finished.is_file():
            self.say(f"{place} {name}: there already")
            return Stage(name, digest, folder, _read(finished)["about"], load(folder))
        self.say(f"{place} {name}")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        made, about = make(folder)
        # Written last: a folder without it is unfinished.
        document = {"stage": name, "inputs": dict(inputs), "about": about}
        write_text(finished, json.dumps(document, indent=1, sort_keys=True, default=str) + "\n")
        return Stage(name, digest, folder, about, made)

    def module(self, name: str, inputs: Mapping[str, Any], make: Callable[[Path], tuple[Any, dict[str, Any]]]) -> Stage:
        """A stage whose product is an agent or a model."""

        def make_and_save(folder: Path) -> tuple[Any, dict[str, Any]]:
            made, about = make(folder)
            save_module(folder / "product.safetensors", made)
            return made, about

        return self.stage(name, inputs, make_and_save, lambda folder: load_module(folder / "product.safetensors"))

    def found(self, folder_name: str) -> Stage:
        """A finished stage by the name of its folder: an agent, a model, or plain data."""
        folder = self.folder / "stages" / folder_name
        name, _, digest = folder_name.rpartition("-")
        module = folder / "product.safetensors"
        made = load_module(module) if module.is_file() else _read(folder / "product.json")
        return Stage(name, digest, folder, _read(folder / FINISHED)["about"], made)

    def document(self, name: str, inputs: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Stage:
        """A stage whose product is plain data."""

        def make_and_save(folder: Path) -> tuple[Any, dict[str, Any]]:
            made = make(folder)
            write_text(folder / "product.json", json.dumps(made, indent=1) + "\n")
            return made, {}

        return self.stage(name, inputs, make_and_save, lambda folder: _read(folder / "product.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RefplanError(
            f"{path}: cannot be read ({error}). Remove its folder; the stage is then made again."
        ) from None


def inputs_of(thing: Any) -> dict[str, Any]:
    """A learner's or planner's settings as inputs of a stage."""
    return {"class": type(thing).__name__, **settings_of(thing)}
