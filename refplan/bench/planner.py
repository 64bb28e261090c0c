"""Milliseconds per decision of RefPlan, belief update included, beside the bare matrix products of the same shapes."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.agent import act_many, start_many
from refplan.bench.products import bare_seconds, flops, median_seconds, products
from refplan.dynamics.base import NeverTerminates
from refplan.dynamics.belief_dynamics import BeliefDynamics
from refplan.dynamics.decoder import Decoder, make_gaussian_nets
from refplan.dynamics.encoder import make_encoder
from refplan.nn import identity_normaliser, make_ensemble, make_mlp
from refplan.planners.base import AbstractPlanner
from refplan.planners.refplan import RefPlan
from refplan.priors.actor_critic import ActorCritic, ActorValue, Critics
from refplan.priors.policy import GaussianPolicy
from refplan.types import Transition

OBS, ACT = 17, 6  # HalfCheetah's sizes
ROUNDS = 3


def make_prior(value_net: bool = False, hidden: int = 256) -> Any:
    """A fresh prior of the usual size: actor and two critics of 2x256, or with a value net beside them."""
    keys = jr.split(jr.key(0), 3)
    low, high, scale = -jnp.ones(ACT), jnp.ones(ACT), identity_normaliser(OBS)
    policy = GaussianPolicy(make_mlp((OBS, hidden, hidden, 2 * ACT), keys[0]), scale, low, high)
    critics = Critics(make_ensemble(2, (OBS + ACT, hidden, hidden, 1), keys[1]), scale, low, high)
    if value_net:
        return ActorValue(policy, critics, make_mlp((OBS, hidden, hidden, 1), keys[2]), scale)
    return ActorCritic(policy, critics)


def make_model(members: int) -> BeliefDynamics:
    """A fresh belief model of the paper's size with that many elites."""
    decoder = make_decoder(members, latent=16)
    parts: dict[str, Any] = {"encoder": make_encoder(OBS, ACT, jr.key(2)), "scale": identity_normaliser(OBS + ACT + 1)}
    return BeliefDynamics(**parts, decoder=decoder, termination=NeverTerminates())


def make_decoder(members: int, latent: int) -> Decoder:
    """Fresh networks of the paper's size."""
    nets = make_gaussian_nets(members, OBS + ACT, latent, OBS + 1, (200,) * 4, jr.key(1), residual=True)
    return Decoder(nets, identity_normaliser(OBS + ACT), identity_normaliser(OBS + 1), members)


@eqx.filter_jit
def decide(agent: AbstractPlanner, state: Any, steps: Transition, keys: Any) -> tuple[Any, Any]:
    """What one real step costs: reflect on the last one, then plan the next; all episodes in one call."""

    return act_many(agent, jax.vmap(agent.observe)(state, steps), steps.next_obs, keys)


def measure(agent: AbstractPlanner, episodes: int, repeats: int = 8) -> dict[str, float]:
    """Time of one call and of its bare products, in turns, so that a load that comes and goes weighs on both alike."""
    key = jr.key(3)
    obs = jr.normal(key, (episodes, OBS))
    steps = Transition(obs, jnp.zeros((episodes, ACT)), jnp.zeros(episodes), obs, jnp.zeros(episodes, bool))
    args = (agent, start_many(agent, episodes), steps, jr.split(key, episodes))
    found = products(decide, *args)
    pairs = []
    for _ in range(ROUNDS):
        act = median_seconds(lambda: jax.block_until_ready(decide(*args)), repeats)
        pairs.append((act, bare_seconds(found, repeats)))
    act, bare = np.median(np.array(pairs), axis=0)
    ratio = float(np.median([a / b for a, b in pairs]))
    gflop = flops(found) / 1e9
    return {
        "ms_per_action": 1e3 * act / episodes,
        "bare_ms": 1e3 * bare / episodes,
        "ratio": ratio,
        "gflop": gflop / episodes,
        "gflops": gflop / act,
    }


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Every combination of horizon, latents, members and episodes of the table in the docs."""
    horizons, latents = ((2,), (1, 4)) if quick else ((2, 4), (1, 2, 3, 4, 16))
    members, batches = ((5,), (1,)) if quick else ((5, 14), (1, 10))
    rows = []
    for elites, horizon, count, episodes in itertools.product(members, horizons, latents, batches):
        if episodes > 1 and count * elites > 60:
            continue  # minutes per call, and nothing new: the products are large already with one episode
        agent = RefPlan(make_prior(), make_model(elites), horizon=horizon, latents=count)
        what = {"members": elites, "horizon": horizon, "latents": count, "episodes": episodes}
        rows.append({"what": "act refplan", **what, **measure(agent, episodes, 2 if quick else 8)})
    for value_net in (False, True):
        agent = RefPlan(make_prior(value_net), make_model(5), horizon=2, latents=4)
        what = {"members": 5, "horizon": 2, "latents": 4, "episodes": 1}
        name = "act refplan, value net" if value_net else "act refplan, critics"
        rows.append({"what": name, **what, **measure(agent, 1, 2 if quick else 8)})
    return rows
