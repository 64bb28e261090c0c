"""A made-up run folder with everything a report shows, small enough to make in seconds; one recorded for real."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from imagined import tiny_belief
from models import LinearPrior

from refplan.data.tasks import task
from refplan.dynamics.diagnose_record import Diagnosis, Doubt, Ends, Errors, LatentUse, PlanNoise, ReturnMatch
from refplan.evaluation import evaluate
from refplan.planners.critic_choice import CriticChoice
from refplan.planners.refplan import RefPlan
from refplan.report.record import Recorder
from refplan.settings import to_toml
from refplan.store import COLUMNS, append_results

HOPPER = dataclasses.replace(task("hopper"), horizon=20)
BOX = {"low": jnp.full(3, -1.0), "high": jnp.full(3, 1.0)}


def _weights():
    return 0.1 * jr.normal(jr.key(0), (3, 11)), jnp.eye(11)


def linear_prior() -> LinearPrior:
    return LinearPrior(*_weights())


def refplan() -> RefPlan:
    return RefPlan(linear_prior(), tiny_belief(11, 3), plans=12, latents=2, horizon=2, kappa=1.0, **BOX)


class CriticPrior(LinearPrior):
    """The same with two critics that like small actions."""

    def critics(self, obs, action):
        q = -jnp.sum(action**2)
        return jnp.stack([q, q - 1.0])


def critic(plans: int = 12) -> CriticChoice:
    """A planner without a model, so without a belief."""
    return CriticChoice(CriticPrior(*_weights()), plans=plans, kappa=1.0, **BOX)


def record(agent, path: Path, pictures: bool = False, **about) -> Path:
    recorder = Recorder(HOPPER.horizon, pictures=pictures)
    evaluate(agent, HOPPER, 2, key=jr.key(0), watcher=recorder, show=False)
    said = {"planner": "refplan", "prior": "linear", "dataset": "made-up", "world": "hopper", "seed": 0}
    return recorder.save(path, **{**said, **about})


def result(planner: str, earned: list[float], **changes) -> dict:
    """A row of results.csv of a world with references (hopper)."""
    score = task("hopper").score(np.array(earned))
    row = dict.fromkeys(COLUMNS, "")
    row |= {"dataset": "made-up", "prior": "cql", "planner": planner, "world": "hopper", "seed": 0}
    row |= {"episodes": len(earned), "return": np.mean(earned), "score": score.mean(), "score_lo": score.min()}
    row |= {"score_hi": score.max(), "ms_per_action": 0.2 if planner == "none" else 3.0, "wall_s": 1.0}
    row |= {"settings": json.dumps({"run": "x"}), "command": f"refplan evaluate runs/x --planner {planner}"}
    return {**row, "commit": "abc123", "returns": json.dumps(earned), **changes}


def curve(folder: Path, rows: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{100 * n},{np.exp(-n / 5)},{n / 10}" for n in range(1, rows + 1)]
    (folder / "metrics.csv").write_text("\n".join(["step,loss,q", *lines]) + "\n")


def run_toml(folder: Path, name: str = "made-up") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "refplan": {"format": 1},
        "prior": {"class": "ActorCritic", "sha256": "ab" * 32},
        "prior_learner": {"method": "cql", "preset": "cpu", "updates": 20_000, "wall_s": 60.0},
        "data": {"name": name, "task": "hopper", "transitions": 5000},
        "provenance": {"command": "refplan fit prior made-up", "commit": "abc123", "versions": {"jax": "1"}},
    }
    (folder / "run.toml").write_text(to_toml(tables))


def diagnosis(steps: int = 4, outputs: int = 3) -> Diagnosis:
    rising = np.linspace(0.2, 1.0, steps)
    table = np.full((steps, outputs), 0.8)
    levels = np.array([0.1, 0.5, 0.9])
    errors = Errors(
        outputs=("a", "b", "reward"),
        count=np.full(steps, 9),
        **{f"rmse{end}": rising for end in ("", "_low", "_high", "_sampled", "_draw")},
        median=rising,
        rmse_stays=2 * rising,
        rmse_drifts=3 * rising,
        rmse_per_output=table,
        coverage_50=table / 2,
        coverage_90=table,
        levels=levels,
        coverage=np.tile(levels, (steps, 1)),
        calibration_error=rising,
        **{name: np.zeros(outputs) for name in ("nll", "nll_member", "nll_trivial")},
    )
    match = ReturnMatch(2, False, 9, 0.9, 0.8, 0.8, 0.1, 0.5, 0.0, np.arange(9.0), np.arange(9.0) + 0.5)
    latent = LatentUse(*[0.1] * 11, settled_after=3, movement=np.ones(5), distance=np.linspace(1, 0, 6))
    doubt = Doubt(*[np.full(steps, np.nan)] * 4)
    ends = Ends(0, *[float("nan")] * 6)
    noise = PlanNoise(2, 0.1, 0.2, 0.2, 0.9)
    return Diagnosis("made-up", 100, 4, 9, 3, steps, 0.0, errors, doubt, (match,), (noise,), ends, latent)


def judged(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"run": folder.name, "home_is_training_data": True, "diagnoses": {"home": diagnosis().to_dict()}}
    (folder / "diagnosis.json").write_text(json.dumps(document))


def whole(folder: Path, pictures: bool = False) -> Path:
    """A run folder with every part."""
    run_toml(folder)
    curve(folder / "prior")
    curve(folder / "model")
    judged(folder)
    rows = [result("none", [100.0, 110.0, 120.0]), result("refplan", [140.0, 160.0, 165.0])]
    append_results(folder / "results.csv", [*rows, result("loop", [90.0, 130.0, 121.0])])
    record(refplan(), folder / "episodes" / "refplan.npz", pictures=pictures)
    record(linear_prior(), folder / "episodes" / "prior.npz", planner="none")
    return folder
