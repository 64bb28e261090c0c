"""What the benchmarks of beliefs ask on the command line: a prior and an ensemble of HalfCheetah, and where rows go."""

import argparse


def parser(about: str | None, *, episodes: int, steps: int | None = None) -> argparse.ArgumentParser:
    """PRIOR and ENSEMBLE are .safetensors files: of a run folder, or `product.safetensors` of a stage."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("prior")
    made.add_argument("ensemble")
    made.add_argument("--out", required=True)
    made.add_argument("--name", default="", help="of the data both were trained on")
    made.add_argument("--method", default="cql", help="that the prior was trained by")
    made.add_argument("--seed", type=int, default=0, help="of their training")
    made.add_argument("--episodes", type=int, default=episodes)
    if steps is not None:
        made.add_argument("--steps", type=int, default=steps)
    return made
