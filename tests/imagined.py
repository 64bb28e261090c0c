"""Models that imagine worlds known on paper, for the learners that train in imagination."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import worlds

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.dynamics.base import AbstractDynamics, AbstractTermination, NeverTerminates, Outcome
from refplan.dynamics.belief_dynamics import BeliefDynamics
from refplan.dynamics.decoder import Decoder, make_gaussian_nets
from refplan.dynamics.encoder import make_encoder
from refplan.dynamics.ensemble import EnsembleDynamics
from refplan.nn import identity_normaliser
from refplan.priors.imagine import states_along
from refplan.priors.imagining import look_up


class EndsAbove(AbstractTermination):
    """The world ends where the first number of the observation exceeds a limit."""

    limit: jax.Array = eqx.field(converter=jnp.asarray)

    def __call__(self, obs, action, next_obs):
        return next_obs[0] > self.limit


def tiny_decoder(obs: int, act: int, latent: int = 0, key=None) -> Decoder:
    """Fresh networks: three members, two of them elites."""
    nets = make_gaussian_nets(3, obs + act, latent, obs + 1, (8,), jr.key(0) if key is None else key)
    return Decoder(nets, identity_normaliser(obs + act), identity_normaliser(obs + 1), 2)


def tiny_ensemble(obs: int = 3, act: int = 2) -> EnsembleDynamics:
    return EnsembleDynamics(tiny_decoder(obs, act), EndsAbove(1.0), jnp.zeros(3))


def tiny_belief(obs: int = 3, act: int = 2) -> BeliefDynamics:
    encoder = make_encoder(obs, act, jr.key(1), embed=(4, 4, 2), memory=6, latent=2)
    scale = identity_normaliser(obs + act + 1)
    return BeliefDynamics(encoder, scale, tiny_decoder(obs, act, latent=2), EndsAbove(1.0))


class _Memoryless(AbstractDynamics):
    termination: eqx.AbstractVar[AbstractTermination]

    def best(self, count):
        return self

    def start(self):
        return ()

    def observe(self, belief, transition):
        return ()

    def sample(self, belief, obs, key):
        return ()

    def centre(self, belief, obs):
        return ()


class CountingModel(_Memoryless):
    """s' = s + 1 for both members (they differ by `apart`), r = s; what they say of their noise is given."""

    termination: AbstractTermination = EndsAbove(3.5)
    apart: jax.Array = eqx.field(converter=jnp.asarray, default=0.0)
    stds: jax.Array = eqx.field(converter=jnp.asarray, default=((0.0, 0.0), (0.0, 0.0)))  # (state, reward) per member

    @property
    def members(self):
        return 2

    def predict(self, hypothesis, obs, action):
        shift = 1.0 + self.apart * jnp.asarray([[0.0], [1.0]])
        return Outcome(obs + shift, obs[:, 0], self.stds[:, :1], self.stds[:, 1])


class ProbeEnds(AbstractTermination):
    known: jax.Array
    ends: jax.Array

    def __call__(self, obs, action, next_obs):
        return self.ends[jnp.argmin(jnp.abs(self.known - obs[0]))]


class ProbeModel(_Memoryless):
    """A probe world as it is: what follows on each observation there is; all arrays, so that one program serves all."""

    termination: AbstractTermination
    after: jax.Array
    reward: jax.Array
    pays: jax.Array  # 1 where the action decides the reward

    @property
    def members(self):
        return 1

    def predict(self, hypothesis, obs, action):
        at = jnp.argmin(jnp.abs(self.termination.known[None] - obs), axis=1)
        unit = (2.0 * action - worlds.LOW - worlds.HIGH) / (worlds.HIGH - worlds.LOW)
        paid = 1.0 - jnp.sum((unit - worlds.TARGET) ** 2, axis=-1)
        reward = self.reward[at] + self.pays[at] * paid
        return Outcome(self.after[at][:, None], reward, jnp.zeros_like(obs), jnp.zeros_like(reward))


def probe_model(data: Dataset, places: int = 4) -> ProbeModel:
    """The model of a probe world, read off its data; unused places are out of reach."""
    known, first = np.unique(data.observations[:, 0], return_index=True)
    pays = np.array([np.ptp(data.rewards[data.observations[:, 0] == value]) > 0 for value in known])
    fill = lambda x, value: jnp.asarray(np.append(x, np.full(places - len(known), value)), jnp.float32)  # noqa: E731
    ends = ProbeEnds(fill(known, 1e6), fill(data.terminated[first], 1) > 0.5)
    reward = fill(np.where(pays, 0.0, data.rewards[first]), 0)
    return ProbeModel(ends, fill(data.next_observations[first, 0], 0), reward, fill(pays, 0))


class HintModel(_Memoryless):
    """Two worlds, r = +a or r = -a, told apart once: obs = (1, 0) at first, then (0, sign), then (0, 0) for ever."""

    termination: AbstractTermination = NeverTerminates()

    @property
    def members(self):
        return 2

    def predict(self, hypothesis, obs, action):
        sign = jnp.asarray([1.0, -1.0])
        next_obs = jnp.stack([jnp.zeros(2), obs[:, 0] * sign], axis=1)
        reward = sign * jnp.broadcast_to(action, (2, 1))[:, 0]
        return Outcome(next_obs, reward, jnp.zeros_like(next_obs), jnp.zeros(2))


def hint_data(rows: int = 64) -> Dataset:
    """First steps only, so that every rollout begins with nothing remembered."""
    sign = np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32)
    action = np.random.default_rng(0).uniform(-1, 1, rows).astype(np.float32)
    action[:2] = -1.0, 1.0
    return make_dataset(
        np.tile(np.array([[1.0, 0.0]], np.float32), (rows, 1)),
        action[:, None],
        sign * action,
        np.zeros(rows, bool),
        np.ones(rows, bool),
        next_observations=np.stack([np.zeros(rows, np.float32), sign], axis=1),
        meta=Meta(name="hint"),
    )


@eqx.filter_jit
def values_along(prior, logged):
    """The value at every logged row, with what the prior remembers there."""
    rows = logged.rows._replace(action=logged.low + 0.5 * (logged.rows.action + 1.0) * (logged.high - logged.low))
    states = states_along(prior, rows, logged.layout)
    return jax.vmap(prior.value)(states, rows.obs), jax.vmap(lambda s, o: prior.act(s, o, jr.key(0))[0])(
        states, rows.obs
    )


def judged(prior, probe: worlds.Probe):
    """Values and own actions at the observations the probe knows."""
    logged = look_up(probe_model(probe.data), probe.data)
    logged = logged._replace(low=logged.low[None], high=logged.high[None])
    values, actions = (np.asarray(x) for x in values_along(prior, logged))
    at = [probe.data.observations[:, 0] == obs for obs in probe.obs[:, 0]]
    return [values[rows] for rows in at], [actions[rows] for rows in at]
