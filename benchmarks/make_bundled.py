"""Make the files in `refplan/data/bundled` from a folder of full datasets and policies.

python benchmarks/make_bundled.py FOLDER
"""

import argparse
import json
from pathlib import Path

import numpy as np

import refplan
from refplan.data.dataset import Dataset
from refplan.data.hdf5 import read_hdf5, save_hdf5
from refplan.data.sources import BUNDLED_FOLDER
from refplan.files import save_arrays, sha256, write_text


def thinned_halfcheetah(data: Dataset) -> Dataset:
    """5 of every 9 episodes (numbers 0, 2, 4, 6, 8 of each 9), in the order they were recorded."""
    order = np.arange(data.episodes)
    return data.take_episodes(order[order % 9 % 2 == 0])


def thinned_hopper(data: Dataset) -> Dataset:
    """Every 16th episode that is not cut by the end of the buffer, and the best one, in the order recorded."""
    whole = np.flatnonzero(data.terminated[data.ends - 1] | (data.lengths == data.lengths.max()))
    return data.take_episodes(np.union1d(whole[::16], data.returns.argmax()))


CUTS = {
    "halfcheetah-medium-replay-mini": ("halfcheetah-medium-replay", thinned_halfcheetah),
    "hopper-medium-replay-tiny": ("hopper-medium-replay", thinned_hopper),
}


def make_dataset(folder: Path, name: str) -> dict:
    source, cut = CUTS[name]
    whole = read_hdf5(folder / f"{source}.hdf5").build()
    part = cut(whole)
    recipe = f"cut from {source} by benchmarks/make_bundled.py: {cut.__doc__} The source: {whole.meta.recipe}"
    references = "D4RL reference returns (random policy, expert)"
    path = BUNDLED_FOLDER / f"{name}.hdf5"
    save_hdf5(part.replace_meta(name=name, recipe=recipe, ref_source=references), path)
    scores = part.task.score(part.returns)
    print(
        f"{name}: {part}, {path.stat().st_size / 1e6:.2f} MB, scores {scores.mean():.1f} mean {scores.max():.1f} best"
    )
    print(f"  source: scores {whole.task.score(whole.returns).mean():.1f} mean")
    return {
        "file": path.name,
        "transitions": len(part),
        "episodes": part.episodes,
        "megabytes": round(path.stat().st_size / 1e6, 2),
        "sha256": sha256(path),
        "about": f"{len(part)} transitions in {part.episodes} whole episodes of {part.meta.env_id}, cut from {source}",
    }


def convert_policy(folder: Path, name: str) -> None:
    with np.load(folder / "policies" / f"{name}.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    about = (
        "medium SAC policy: relu(relu(obs l0) l1), action = tanh(mu + exp(clip(ls, -20, 2)) noise), raw observations"
    )
    save_arrays(BUNDLED_FOLDER / "policies" / f"{name}.safetensors", arrays, {"name": name, "about": about})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the full datasets and a subfolder 'policies'")
    folder = parser.parse_args().folder
    index = {name: make_dataset(folder, name) for name in CUTS}
    write_text(BUNDLED_FOLDER / "index.json", json.dumps(index, indent=2) + "\n")
    for robot in ("hopper", "halfcheetah", "walker2d"):
        convert_policy(folder, f"{robot}-medium")
    print(f"written by refplan {refplan.__version__}")


if __name__ == "__main__":
    main()
