"""What `fit` can train: a learning rule with its hyper-parameters as fields; what it learns goes in and out."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import numpy as np

from refplan.data.dataset import Dataset
from refplan.errors import RefplanError
from refplan.logs import Row
from refplan.settings import settings_of
from refplan.types import Flag, Key, Metrics, State


class AbstractLearner(eqx.Module):
    """Something `fit` can train: an agent's or a model's learning rule with its hyper-parameters as fields."""

    @abstractmethod
    def prepare(self, data: Dataset) -> Any:
        """The data on the device, in the form `batch` draws from."""

    @abstractmethod
    def init(self, data: Dataset, key: Key) -> State:
        """Networks, optimiser states, normalisers: everything that is learned or carried."""

    @abstractmethod
    def batch(self, source: Any, state: State, key: Key) -> Any:
        """Draw what one update needs."""

    @abstractmethod
    def update(self, state: State, batch: Any, key: Key) -> tuple[State, Metrics]:
        """One update."""

    @abstractmethod
    def result(self, state: State) -> Any:
        """The trained agent or model."""


class AbstractReviewingLearner(AbstractLearner):
    """A learner that looks up between chunks of updates: to validate and stop early, or to refresh imagined data."""

    @abstractmethod
    def schedule(self, data: Dataset) -> tuple[int, int]:
        """(updates between reviews, most updates), for when the caller does not say."""

    @abstractmethod
    def hold_out(self, data: Dataset, key: Key) -> tuple[Dataset, Dataset | None]:
        """(training, held-out) data, for when the caller gives no held-out data."""

    @abstractmethod
    def review(self, state: State, source: Any, held: Any, key: Key) -> tuple[State, Metrics]:
        """Called after every chunk with the prepared training and held-out data (`None` without any)."""

    @abstractmethod
    def finished(self, state: State) -> Flag:
        """Whether training may stop now."""


class AbstractStagedLearner(AbstractReviewingLearner):
    """A learner whose result is the beginning of another training."""

    @abstractmethod
    def following(self, result: Any) -> AbstractLearner:
        """The learner of the next stage; `fit` returns what the last one gives."""


class AbstractWatchedLearner(AbstractLearner):
    """A learner whose metrics can show that training has run away long before anything becomes infinite."""

    @abstractmethod
    def trouble(self, row: Row) -> str:
        """What is wrong in a row of averaged metrics; empty when nothing is."""


# Settings that count something: with none of it there is nothing to train.
_COUNTS = (
    "batch_size",
    "critics",
    "decoder_batch",
    "epochs",
    "hidden",
    "lanes",
    "latent",
    "length",
    "members",
    "memory",
)


# What is off at zero and has no meaning below it.
_NOT_NEGATIVE = ("anneal", "cloning", "drawn", "penalty_states")


def check_sizes(learner: AbstractLearner) -> None:
    """Sizes of at least 1 and rates above 0; a network of no width fails in ways that say nothing."""
    for name, value in settings_of(learner).items():
        last, values = name.rpartition(".")[2], np.ravel(value) if not isinstance(value, str) else np.zeros(0)
        if last in _COUNTS and (values < 1).any():
            raise RefplanError(f"setting '{name}' of {type(learner).__name__} must be at least 1, got {value}.")
        if (last == "rate" or last.endswith("_rate") or last in _NOT_NEGATIVE) and (values < 0).any():
            raise RefplanError(f"setting '{name}' of {type(learner).__name__} must not be negative, got {value}.")
