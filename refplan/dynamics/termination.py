"""When the imagined world ends: by the task's rule, by a classifier learned beside the model, or never.

Ends are rare (a fall in hundreds of steps), so the classifier sees as many ends as other steps, and its last bias is
moved afterwards by the log-odds of an end in the data: its probabilities then hold for the data as it is. Few ends are
soon learned by heart, so the classifier that judges held-out rows best is kept.
"""

import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Int

from refplan.data.dataset import Dataset
from refplan.data.sampling import take_rows
from refplan.dynamics.base import AbstractTermination, LearnedTermination, NeverTerminates, RuleTermination
from refplan.nn import fit_normaliser, make_mlp
from refplan.types import Key, Metrics, Scalar, Transition


class Ends(NamedTuple):
    """The rows where the world ended, and those where it went on."""

    ended: Int[Array, " ended"]
    went_on: Int[Array, " went_on"]


class TerminationState(NamedTuple):
    """What says when the world ends and, if it is learned, its optimiser, the odds of the data, and the best so far."""

    termination: AbstractTermination
    optimiser: optax.OptState  # empty for a rule
    log_odds: Scalar  # of an end, in the data
    best: AbstractTermination  # with these odds
    best_loss: Scalar


class TerminationLearner(eqx.Module):
    """Trains the classifier where one is needed, and hands the task's rule through where there is one."""

    hidden: tuple[int, ...] = eqx.field(static=True, default=(64, 64))
    batch_size: int = eqx.field(static=True, default=256)
    rate: Scalar = eqx.field(converter=jnp.asarray, default=1e-3)

    def init(self, data: Dataset, key: Key) -> TerminationState:
        """The task's rule; without one a fresh classifier if the data has ends to learn from, else no end at all."""
        ends = find_ends(data)
        if ends is None:
            rule = data.task.termination
            known = NeverTerminates() if rule is None else RuleTermination(rule)
            if rule is None and data.terminated.any():
                warnings.warn(_nothing_to_learn(data), RuntimeWarning, stacklevel=2)
            return TerminationState(known, (), jnp.zeros(()), known, jnp.array(jnp.inf))
        rows = data.complete()
        inputs = np.concatenate([rows.observations, rows.actions, rows.next_observations], axis=1)
        scale = fit_normaliser(inputs)
        net = make_mlp((inputs.shape[1], *self.hidden, 1), key, jax.nn.swish)
        head = LearnedTermination(net, scale.mean, scale.std)
        log_odds = jnp.log(ends.ended.size / ends.went_on.size)
        optimiser = optax.adam(self.rate).init(eqx.filter(net, eqx.is_array))
        return TerminationState(head, optimiser, log_odds, _with_odds(head, log_odds), jnp.array(jnp.inf))

    def batch(self, rows: Transition, ends: Ends | None, key: Key) -> Transition | None:
        """As many ends as other steps, drawn with replacement."""
        if ends is None:
            return None
        half = self.batch_size // 2
        key_ended, key_went_on = jr.split(key)
        ended = jr.randint(key_ended, (half,), 0, ends.ended.size)
        went_on = jr.randint(key_went_on, (half,), 0, ends.went_on.size)
        return take_rows(rows, jnp.concatenate([ends.ended[ended], ends.went_on[went_on]]))

    def update(self, state: TerminationState, batch: Transition | None) -> tuple[TerminationState, Metrics]:
        """One Adam step on the cross-entropy; nothing to do for a rule."""
        if batch is None or not isinstance(state.termination, LearnedTermination):
            return state, {}
        head = state.termination
        loss, grads = eqx.filter_value_and_grad(lambda net: cross_entropy(_with_net(head, net), batch))(head.net)
        updates, optimiser = optax.adam(self.rate).update(grads, state.optimiser)
        head = _with_net(head, eqx.apply_updates(head.net, updates))
        return state._replace(termination=head, optimiser=optimiser), {"termination_loss": loss}

    def review(self, state: TerminationState, held: Transition) -> tuple[TerminationState, Metrics]:
        """Keep the classifier with the least cross-entropy on held-out rows; without an end among them, the newest."""
        if not isinstance(state.termination, LearnedTermination):
            return state, {}
        head = _with_odds(state.termination, state.log_odds)
        loss = cross_entropy(head, held)
        keep = (loss < state.best_loss) | ~jnp.any(held.terminated)
        best = jax.tree.map(lambda new, old: jnp.where(keep, new, old), head, state.best)
        best_loss = jnp.where(keep, loss, state.best_loss)
        return state._replace(best=best, best_loss=best_loss), {"held_termination_loss": loss}

    def result(self, state: TerminationState) -> AbstractTermination:
        """The rule, or the best classifier (the newest if none was ever reviewed)."""
        if not isinstance(state.termination, LearnedTermination):
            return state.termination
        newest = _with_odds(state.termination, state.log_odds)
        reviewed = jnp.isfinite(state.best_loss)
        return jax.tree.map(lambda best, new: jnp.where(reviewed, best, new), state.best, newest)


def find_ends(data: Dataset) -> Ends | None:
    """Where the world ended among the complete rows; None if the task has a rule, or if there is nothing to learn."""
    terminated = data.complete().terminated
    if data.task.termination is not None or not terminated.any() or terminated.all():
        return None
    return Ends(jnp.asarray(np.flatnonzero(terminated), int), jnp.asarray(np.flatnonzero(~terminated), int))


def cross_entropy(head: LearnedTermination, batch: Transition) -> Scalar:
    """Mean of -log p(what happened)."""
    logits = jax.vmap(head.logit)(batch.obs, batch.action, batch.next_obs)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch.terminated.astype(logits.dtype)))


def _with_odds(head: LearnedTermination, log_odds: Scalar) -> LearnedTermination:
    """The classifier for data with these odds of an end instead of even ones."""
    bias = head.net.layers[-1].bias
    return eqx.tree_at(lambda h: h.net.layers[-1].bias, head, bias + log_odds)


def _with_net(head: LearnedTermination, net: eqx.Module) -> LearnedTermination:
    return eqx.tree_at(lambda h: h.net, head, net)


def _nothing_to_learn(data: Dataset) -> str:
    return (
        f"dataset '{data.meta.name}': the world ends in it, but the task has no rule for that and no classifier can "
        "learn it (the successors of the ends are unknown, or every row is an end). The model will never end an "
        "imagined episode. Store next_observations, or name a task with a rule."
    )
