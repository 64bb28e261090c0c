"""The environments of an online run side by side: one step in each, then as many updates, in one compiled call."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from refplan.data.sampling import take_rows
from refplan.data.simulate import make_simulator
from refplan.priors.actor_critic import sample_actions
from refplan.priors.policy import GaussianPolicy
from refplan.priors.sac import SAC, SACState
from refplan.types import Key, Metrics, Transition

if TYPE_CHECKING:
    from refplan.collect.online import OnlineRun


class Lanes:
    """The environments of a run, each in some episode."""

    def __init__(self, run: "OnlineRun"):
        self.run = run
        lanes = run.settings.lanes
        self.simulator = make_simulator(run.task, lanes)
        ends = (run.log["terminated"] | run.log["truncated"])[: run.round]
        self.ordinal = ends.sum(axis=0).astype(np.int64)
        last = np.where(ends.any(axis=0), run.round - 1 - np.argmax(ends[::-1], axis=0), -1) if run.round else None
        begun = np.zeros(lanes, np.int64) if last is None else last + 1
        self.obs = self.simulator.reset([self._seed(lane) for lane in range(lanes)])
        self._replay(begun)
        # Summed one by one from what was logged, as the running sums are, so that a resumed run has the same last bits.
        self.returns = np.array(
            [sum(run.log["rewards"][begun[i] : run.round, i].tolist()) for i in range(lanes)], float
        )
        self._add_state_logs()

    def _seed(self, lane: int) -> int:
        key = jr.fold_in(jr.fold_in(self.run.key_seed, lane), int(self.ordinal[lane]))
        return int(jr.randint(key, (), 0, 2**31 - 1))

    def _replay(self, begun: np.ndarray) -> None:
        """Repeat the logged actions of each lane's unfinished episode."""
        elapsed = self.run.round - begun
        for number in range(int(elapsed.max(initial=0))):
            live = number < elapsed
            rows = np.minimum(begun + number, self.run.round - 1)
            actions = self.run.log["actions"][rows, np.arange(len(begun))]
            self.obs = self.simulator.step(actions, live)[0]

    def _add_state_logs(self) -> None:
        states = self.simulator.states()
        for name, state in zip(("qpos", "qvel"), states or (), strict=False):
            shape = (self.run.settings.rounds, *state.shape)
            if name not in self.run.log:
                self.run.log[name] = np.zeros(shape, np.float32)

    def advance(self, buffer: Transition) -> tuple[Transition, Metrics | None, list[float]]:
        """One step in every lane, then as many updates; returns of the episodes that ended."""
        run, now = self.run, self.run.round
        settings = run.settings
        learning = now * settings.lanes >= settings.warmup
        obs = jnp.asarray(self.obs, jnp.float32)
        units = _explore(run.state.policy, obs, run.key_act, jnp.asarray(now), jnp.asarray(not learning))
        low, high = run.task.low, run.task.high
        actions = np.clip(0.5 * (low + high) + 0.5 * (high - low) * np.asarray(units), low, high).astype(np.float32)
        if (states := self.simulator.states()) is not None:
            run.log["qpos"][now], run.log["qvel"][now] = states
        after, rewards, terminated, truncated = self.simulator.step(actions)
        step = jnp.asarray(rewards, jnp.float32), jnp.asarray(after, jnp.float32), jnp.asarray(terminated)
        rows = Transition(obs, units, *step)
        self._write(now, rows, actions, truncated)
        count = jnp.asarray(settings.lanes if learning else 0)
        at = jnp.asarray(now * settings.lanes)
        (run.state, buffer), metrics = _learn((settings.sac, run.key_learn), (run.state, buffer), rows, at, count)
        return buffer, metrics if learning else None, self._next(after, run.log["rewards"][now], terminated | truncated)

    def _write(self, now: int, rows: Transition, actions: np.ndarray, truncated: np.ndarray) -> None:
        log = self.run.log
        names = ("observations", "units", "rewards", "next_observations", "terminated")
        for name, values in zip(names, rows, strict=True):
            log[name][now] = np.asarray(values)
        log["actions"][now], log["truncated"][now] = actions, truncated & ~log["terminated"][now]

    def _next(self, after: np.ndarray, rewards: np.ndarray, ended: np.ndarray) -> list[float]:
        self.returns += rewards
        finished = [float(x) for x in self.returns[ended]]
        self.returns[ended] = 0.0
        self.ordinal += ended
        rows = np.flatnonzero(ended).tolist()
        self.obs = self.simulator.restart(rows, [self._seed(lane) for lane in rows]) if rows else after
        return finished

    def close(self) -> None:
        """Free the simulator."""
        self.simulator.close()


@eqx.filter_jit
def _explore(
    policy: GaussianPolicy, obs: Float[Array, "lanes obs"], key: Key, now: Int[Array, ""], uniform: Bool[Array, ""]
) -> Float[Array, "lanes act"]:
    """Sampled actions in [-1, 1], uniform ones during the warm-up."""
    key_policy, key_uniform = jr.split(jr.fold_in(key, now))
    action, _ = sample_actions(policy, obs, key_policy)
    return jnp.where(uniform, jr.uniform(key_uniform, action.shape, minval=-1.0, maxval=1.0), action)


@eqx.filter_jit(donate="all-except-first")
def _learn(
    fixed: tuple[SAC, Key], carried: tuple[SACState, Transition], rows: Transition, at: Array, count: Array
) -> tuple[tuple[SACState, Transition], Metrics]:
    """Add one round of rows to the buffer, then `count` updates on what it holds."""
    sac, key = fixed
    state, buffer = carried
    lanes = rows.reward.shape[0]
    buffer = jax.tree.map(lambda b, r: jax.lax.dynamic_update_slice_in_dim(b, r, at, 0), buffer, rows)
    dynamic, static = eqx.partition(state, eqx.is_array)

    def one(dynamic: Any, number: Array) -> tuple[Any, Metrics]:
        key_rows, key_update = jr.split(jr.fold_in(key, at + number))
        index = jr.randint(key_rows, (sac.batch_size,), 0, at + lanes)
        new, metrics = sac.update(eqx.combine(dynamic, static), take_rows(buffer, index), key_update)
        return eqx.filter(new, eqx.is_array), metrics

    def body(number: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
        return one(carry[0], number)

    shapes = jax.eval_shape(one, dynamic, at)[1]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    dynamic, metrics = jax.lax.fori_loop(0, count, body, (dynamic, zeros))
    return (eqx.combine(dynamic, static), buffer), metrics
