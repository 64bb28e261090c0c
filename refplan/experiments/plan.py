"""What to do on the line: which prior, which planners, in which models, how much of everything."""

from dataclasses import dataclass

from refplan.dynamics.around import AROUND
from refplan.errors import RefplanError, unknown_name
from refplan.planners import PLANNERS
from refplan.planners.presets import asks_first
from refplan.priors.imagining import AbstractImaginingLearner
from refplan.priors.presets import load_preset

BELIEFS = (*AROUND, "belief")
MODEL_OF = {"mppi": "ensemble", "loop": "ensemble", "refplan": "belief"}


@dataclass(frozen=True)
class Plan:
    """What to do: which prior, which planners, how much of everything."""

    method: str = "iql"
    planners: tuple[str, ...] = ("prior", "loop", "refplan")
    preset: str = "cpu"
    planner_preset: str = "default"
    episodes: int = 10
    prior_steps: int | None = None
    critic_steps: int = 20_000
    prior_settings: tuple[tuple[str, str], ...] = ()
    model_settings: tuple[tuple[str, str], ...] = ()
    planner_settings: tuple[tuple[str, str], ...] = ()
    policy: str | None = None  # a foreign policy file, instead of a method
    belief: str = "refined-worlds"  # what RefPlan believes with: made around the ensemble, or the paper's, "belief"
    elsewhere: tuple[str, ...] = ()  # other worlds to evaluate in

    def __post_init__(self) -> None:
        known = ("prior", *PLANNERS)
        if not self.planners:
            raise RefplanError(f"no planner is named; name at least one of {', '.join(known)}.")
        for name in self.planners:
            if name not in known:
                raise unknown_name("planner", name, known)
        if self.belief not in BELIEFS:
            raise unknown_name("belief", self.belief, BELIEFS)

    def model_of(self, planner: str) -> str:
        """The model a planner plans in; empty if it needs none."""
        return self.belief if planner == "refplan" else MODEL_OF.get(planner, "")

    @property
    def asks(self) -> bool:
        """Whether the ensemble is asked how to plan."""
        return any(asks_first(self.planner_preset, name) for name in self.planners)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are trained for the planners and the prior; some beliefs are made from the ensemble."""
        named = {self.model_of(name) for name in self.planners} - {""}
        needed = {"ensemble" if name in AROUND else name for name in named}
        if self.asks or (self.policy is None and needs_model(self.method)):
            needed.add("ensemble")
        return tuple(sorted(needed, reverse=True))

    def stages(self, seeds: int, simulated: bool = True) -> int:
        """How many stages there are, for the display; without a simulator nothing is evaluated."""
        places = (1 + len(self.elsewhere)) * simulated
        return 1 + seeds * (1 + 2 * len(self.models) + self.asks * simulated + len(self.planners) * places)


def needs_model(method: str) -> bool:
    """Whether a prior is learned inside a model."""
    return isinstance(load_preset(method, "cpu").learner, AbstractImaginingLearner)
