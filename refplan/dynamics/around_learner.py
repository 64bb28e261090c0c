"""The ensemble's learner, whose result is a belief around what it learned: nothing else is trained."""

from abc import abstractmethod
from typing import Any

import equinox as eqx

from refplan.data.dataset import Dataset
from refplan.dynamics.around import expectations
from refplan.dynamics.ensemble import Ensemble, EnsembleBatch, EnsembleSource, EnsembleState
from refplan.dynamics.refined import AbstractRefining, RefinedDynamics, refine
from refplan.dynamics.refined_worlds import AbstractRefinedWorlds, RefinedWorldsDynamics, refine_worlds
from refplan.dynamics.worlds import AbstractWorlds, WorldsDynamics, around
from refplan.learner import AbstractReviewingLearner
from refplan.types import Flag, Key, Metrics


class AbstractAroundLearner(AbstractReviewingLearner):
    """Everything is learned by the ensemble; the rest are the settings of the belief around it."""

    ensemble: eqx.AbstractVar[Ensemble]

    def schedule(self, data: Dataset) -> tuple[int, int]:
        """The ensemble's."""
        return self.ensemble.schedule(data)

    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, Dataset | None]:
        """The ensemble's."""
        return self.ensemble.hold_out(data, key)

    def prepare(self, data: Dataset) -> EnsembleSource:
        """The ensemble's."""
        return self.ensemble.prepare(data)

    def init(self, data: Dataset, key: Key) -> EnsembleState:
        """The ensemble's."""
        return self.ensemble.init(data, key)

    def batch(self, source: EnsembleSource, state: EnsembleState, key: Key) -> EnsembleBatch:
        """The ensemble's."""
        return self.ensemble.batch(source, state, key)

    def update(self, state: EnsembleState, batch: EnsembleBatch, key: Key) -> tuple[EnsembleState, Metrics]:
        """The ensemble's."""
        return self.ensemble.update(state, batch, key)

    def review(self, state: EnsembleState, source: Any, held: Any, key: Key) -> tuple[EnsembleState, Metrics]:
        """The ensemble's."""
        return self.ensemble.review(state, source, held, key)

    def finished(self, state: EnsembleState) -> Flag:
        """The ensemble's."""
        return self.ensemble.finished(state)

    @abstractmethod
    def result(self, state: EnsembleState) -> Any:
        """The belief around the trained ensemble."""


class Worlds(AbstractAroundLearner, AbstractWorlds):
    """An ensemble and the worlds around it."""

    ensemble: Ensemble = Ensemble()

    def result(self, state: EnsembleState) -> WorldsDynamics:
        """The worlds around the trained ensemble."""
        return around(self.ensemble.result(state), **expectations(self, "worlds"))


class Refined(AbstractAroundLearner, AbstractRefining):
    """An ensemble whose last layers go on learning."""

    ensemble: Ensemble = Ensemble()

    def result(self, state: EnsembleState) -> RefinedDynamics:
        """The trained ensemble, ready to learn on."""
        return refine(self.ensemble.result(state), **expectations(self, "refined"))


class RefinedWorlds(AbstractAroundLearner, AbstractRefinedWorlds):
    """An ensemble, the worlds around it, and last layers that go on learning."""

    ensemble: Ensemble = Ensemble()

    def result(self, state: EnsembleState) -> RefinedWorldsDynamics:
        """The worlds around the trained ensemble, ready to learn on."""
        return refine_worlds(self.ensemble.result(state), **expectations(self, "refined-worlds"))
