"""`diagnose` on worlds whose answers are known on paper."""

import argparse
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.stats import norm, spearmanr

from refplan.agent import AbstractPrior
from refplan.cli import diagnose as command
from refplan.data.assemble import make_dataset
from refplan.data.dataset import Meta
from refplan.dynamics.base import (
    AbstractDynamics,
    AbstractLatentDynamics,
    AbstractTermination,
    NeverTerminates,
    Outcome,
    RuleTermination,
)
from refplan.dynamics.diagnose import diagnose
from refplan.dynamics.diagnose_data import Randomness, cut_segments, eligible_rows, remember
from refplan.dynamics.diagnose_latent import gaussian_kl
from refplan.dynamics.diagnose_measure import measure_ends, rank, spearman
from refplan.errors import RefplanError
from refplan.modules import register
from refplan.store import save

SHRINK = 0.9  # the linear world: s' = SHRINK s + a + noise, r = s[0] + 0.5 a[0] + noise
NOISE, REWARD_NOISE = 0.3, 0.1
# One size for all: most of the time is compilation.
SMALL = {"segments": 600, "particles": 60, "states": 40, "plans": 40, "repeats": 10, "horizon": 5}


@register
class Linear(AbstractDynamics):
    """The linear world as a model: member i adds `bias[i]`, and all are sure to within `std`."""

    bias: jax.Array  # (members, obs)
    std: jax.Array
    reward_std: jax.Array
    termination: AbstractTermination = NeverTerminates()

    @property
    def members(self):
        return self.bias.shape[0]

    def best(self, count):
        return self

    def start(self):
        return ()

    def observe(self, belief, transition):
        return belief

    def sample(self, belief, obs, key):
        return ()

    def centre(self, belief, obs):
        return ()

    def predict(self, hypothesis, obs, action):
        after = SHRINK * obs + action[None, : obs.shape[1]] + self.bias
        return Outcome(
            after,
            obs[:, 0] + 0.5 * action[0],
            jnp.broadcast_to(self.std, after.shape),
            jnp.broadcast_to(self.reward_std, after.shape[:1]),
        )


def linear(std=NOISE, reward_std=REWARD_NOISE, bias=((0.0, 0.0),), **more):
    return Linear(jnp.asarray(bias), jnp.asarray(std), jnp.asarray(reward_std), **more)


def linear_data(noise=NOISE, reward_noise=REWARD_NOISE, episodes=100, length=20, end_above=np.inf, seed=0, spread=1.0):
    """Logged episodes of the linear world; they terminate when s[0] passes `end_above`."""
    random = np.random.default_rng(seed)
    rows = {name: [] for name in ("observations", "actions", "rewards", "next_observations", "terminated", "truncated")}
    for _ in range(episodes):
        obs = random.normal(size=2)
        for time in range(length):
            action = spread * random.normal(size=2)
            after = SHRINK * obs + action + noise * random.normal(size=2)
            reward = obs[0] + 0.5 * action[0] + reward_noise * random.normal()
            ended = after[0] > end_above
            for name, value in zip(rows, (obs, action, reward, after, ended, time == length - 1), strict=True):
                rows[name].append(value)
            obs = after
            if ended:
                rows["truncated"][-1] = False
                break
    arrays = {name: np.array(values) for name, values in rows.items()}
    floats = {name: x if x.dtype == bool else x.astype(np.float32) for name, x in arrays.items()}
    return make_dataset(**floats, meta=Meta(name="linear"))


@pytest.fixture(scope="module")
def noisy():
    return linear_data()


@pytest.fixture(scope="module")
def clean():
    return linear_data(0.0, 0.0, episodes=40)


@pytest.fixture(scope="module")
def exact(noisy):
    return diagnose(linear(), noisy, key=jr.key(0), **SMALL)


def test_an_exact_model_is_calibrated_at_every_step(exact):
    assert np.abs(exact.errors.coverage_90 - 0.9).max() < 0.05
    assert np.abs(exact.errors.coverage_50 - 0.5).max() < 0.08
    assert exact.errors.calibration_error.max() < 0.03
    np.testing.assert_allclose(exact.doubt.sampled_ratio, 1.0, atol=0.06)
    assert not {"overconfident", "underconfident", "overconfident_far_ahead"} & set(exact.flags)
    assert "calibrated" in exact.verdict


def test_an_exact_model_errs_by_the_noise_alone(exact, noisy):
    change = (noisy.next_observations - noisy.observations).std(axis=0)
    steps = np.arange(1, 6)
    expected = NOISE * np.sqrt((1 - SHRINK ** (2 * steps)) / (1 - SHRINK**2))
    np.testing.assert_allclose(exact.errors.rmse_per_output[:, :2] * change, expected[:, None].repeat(2, 1), rtol=0.12)
    # A single draw carries the noise twice.
    squares = (exact.errors.rmse_draw / exact.errors.rmse) ** 2
    np.testing.assert_allclose(squares, 2.0, rtol=0.2)
    assert (exact.errors.rmse_low < exact.errors.rmse).all() and (exact.errors.rmse < exact.errors.rmse_high).all()
    assert exact.errors.outputs == ("obs[0]", "obs[1]", "reward")


def test_likelihood_of_an_exact_model_is_the_entropy_of_the_noise(exact, noisy):
    change = (noisy.next_observations - noisy.observations).std(axis=0)
    scaled = np.append(NOISE / change, REWARD_NOISE / noisy.rewards.std())
    entropy = 0.5 * np.log(2 * np.pi * np.e * scaled**2)
    np.testing.assert_allclose(exact.errors.nll, entropy, atol=0.08)
    np.testing.assert_allclose(exact.errors.nll_member, exact.errors.nll)  # one member: the mixture is that member
    np.testing.assert_allclose(exact.errors.nll_trivial, 0.5 * np.log(2 * np.pi * np.e), atol=0.1)


@pytest.mark.parametrize(("factor", "flag"), [(0.3, "overconfident"), (3.0, "underconfident")])
def test_wrong_confidence_is_measured_and_flagged(noisy, factor, flag):
    found = diagnose(linear(factor * NOISE, factor * REWARD_NOISE), noisy, key=jr.key(1), **SMALL)
    for level, coverage in ((0.5, found.errors.coverage_50), (0.9, found.errors.coverage_90)):
        expected = 1 - 2 * norm.cdf(-factor * norm.ppf(0.5 + level / 2))
        np.testing.assert_allclose(coverage[0].mean(), expected, atol=0.05)
    assert flag in found.flags
    assert flag in found.verdict
    np.testing.assert_allclose(found.doubt.sampled_ratio, factor, rtol=0.12)


def test_no_error_where_nothing_is_random(clean):
    found = diagnose(linear(0.0, 0.0), clean, key=jr.key(0), **SMALL)
    assert found.errors.rmse.max() < 1e-5
    assert found.errors.rmse_draw.max() < 1e-5
    assert found.diverged == 0.0
    for match in found.returns:
        assert match.pearson > 0.99999 and match.spearman > 0.9999
        assert match.spearman_shuffled < 0.9
        assert match.given_state > 0.999  # the actions matter beyond the state, and the model knows how
        assert abs(match.bias) < 1e-5
    assert [m.horizon for m in found.returns] == [2, 4, 5]
    assert "should find better actions" in found.verdict
    assert found.ends.logged == 0 and found.ends.false_alarm == 0.0


def test_a_bias_grows_as_on_paper(clean):
    bias = 0.2
    found = diagnose(linear(0.0, 0.0, bias=((bias, 0.0),)), clean, key=jr.key(0), **SMALL)
    change = (clean.next_observations - clean.observations).std(axis=0)
    steps = np.arange(1, 6)
    error = found.errors.rmse_per_output * np.append(change, clean.rewards.std())
    np.testing.assert_allclose(error[:, 0], bias * (1 - SHRINK**steps) / (1 - SHRINK), rtol=1e-4)
    np.testing.assert_allclose(error[:, 1], 0.0, atol=1e-5)
    np.testing.assert_allclose(error[:, 2], np.append(0.0, error[:-1, 0]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.errors.median, found.errors.rmse, rtol=1e-4)  # the same everywhere


def test_trivial_predictors_are_those_described(clean):
    found = diagnose(linear(0.0, 0.0), clean, key=jr.key(0), **{**SMALL, "horizon": 1, "segments": 10_000})
    change = clean.next_observations - clean.observations
    stays = np.sqrt(((change**2).mean(axis=0) / change.var(axis=0)).sum() / 3 + 1 / 3)
    np.testing.assert_allclose(found.errors.rmse_stays, stays, rtol=1e-4)
    np.testing.assert_allclose(found.errors.rmse_drifts, 1.0, rtol=1e-4)
    assert found.segments == len(clean)
    assert found.errors.count.tolist() == [len(clean)]


def test_a_model_worse_than_nothing_is_called_that(clean):
    found = diagnose(linear(0.0, 0.0, bias=((9.0, 9.0),)), clean, key=jr.key(0), **SMALL)
    assert "no_better_than_trivial" in found.flags
    assert "will not help" in found.verdict


def test_spread_of_members_is_set_against_their_error(clean):
    sizes = np.array([-1.0, 1.0])  # members err to both sides of the truth plus 0.3
    bias = (0.3 + 0.6 * sizes)[:, None] * np.ones((1, 2))
    found = diagnose(linear(0.0, 0.0, bias=tuple(map(tuple, bias))), clean, key=jr.key(0), **SMALL)
    # At k = 1 only the observation is wrong: error 0.3, spread 0.6 sqrt(2), both in the same units.
    np.testing.assert_allclose(found.doubt.member_ratio[0], 0.6 * np.sqrt(2) / 0.3, rtol=1e-4)
    assert found.members == 2


def test_one_member_has_no_spread_to_judge(exact):
    assert np.isnan(exact.doubt.member_rank).all() and np.isnan(exact.doubt.member_ratio).all()
    assert "doubt_is_blind" not in exact.flags
    assert exact.to_dict()["doubt"]["member_rank"] == [None] * 5


@pytest.mark.parametrize("members", [1, 4])
def test_noise_share_is_the_one_on_paper(members):
    data = linear_data(episodes=60)
    sigma, horizon = 0.4, 5
    model = linear(bias=((0.0, 0.0),) * members)
    found = diagnose(model, data, key=jr.key(2), sigma=sigma, **SMALL)
    # r_t = s_t + a_t / 2 and s_(t+1) = SHRINK s_t + a_t + e_t: what a shock at t adds to later states.
    later = np.array([sum(SHRINK**j for j in range(horizon - 1 - t)) for t in range(horizon)])
    noise = (NOISE**2 * (later**2).sum() + horizon * REWARD_NOISE**2) / members
    action = (sigma * data.actions[:, 0].std()) ** 2 * ((0.5 + later) ** 2).sum()
    deepest = found.plans[-1]
    assert deepest.horizon == horizon
    np.testing.assert_allclose(deepest.noise_std, np.sqrt(noise), rtol=0.05)
    np.testing.assert_allclose(deepest.action_std, np.sqrt(action), rtol=0.08)
    np.testing.assert_allclose(deepest.noise_share, noise / (noise + action), rtol=0.12)
    np.testing.assert_allclose(deepest.ranking, np.sqrt(action / (noise + action)), atol=0.06)


def ends_above(obs, action, next_obs):
    return next_obs[0] > 2.0


def test_ends_are_found_by_an_exact_rule_and_missed_without_one():
    data = linear_data(0.0, 0.0, episodes=60, end_above=2.0)
    assert data.terminated.any() and data.truncated.any()
    found = diagnose(linear(0.0, 0.0, termination=RuleTermination(ends_above)), data, key=jr.key(0), **SMALL)
    assert (found.ends.precision, found.ends.recall, found.ends.false_alarm) == (1.0, 1.0, 0.0)
    assert found.ends.logged == data.terminated.sum()
    assert min(m.spearman for m in found.returns) > 0.9999  # returns stop at the end in both
    assert found.errors.count[0] > found.errors.count[-1]  # episodes that end within the horizon count while they last
    blind = diagnose(linear(0.0, 0.0), data, key=jr.key(0), **SMALL)
    assert blind.ends.recall == 0.0 and np.isnan(blind.ends.precision)
    assert "misses_ends" in blind.flags
    assert blind.returns[-1].spearman < 0.999


def test_false_alarms_of_a_sample_stand_for_all_rows():
    data = linear_data(0.0, 0.0, episodes=60, end_above=2.0)
    ended, other = np.flatnonzero(data.terminated), np.flatnonzero(~data.terminated)
    row = np.concatenate([ended, other[:100]])
    alarm = np.concatenate([np.ones(len(ended), bool), np.arange(100) < 10])
    found = measure_ends(data, row, alarm, alarm)
    np.testing.assert_allclose(found.false_alarm, 0.1)
    np.testing.assert_allclose(found.precision, len(ended) / (len(ended) + 0.1 * len(other)))


def test_segments_never_cross_episodes():
    random = np.random.default_rng(0)
    lengths = random.integers(1, 12, 30)
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    terminated = ends & (random.random(len(ends)) < 0.5)
    number = np.repeat(np.arange(30), lengths).astype(np.float32)
    time = np.concatenate([np.arange(n) for n in lengths]).astype(np.float32)
    obs = np.stack([number, time], axis=1)
    data = make_dataset(obs, obs, time, terminated, ends & ~terminated, next_observations=obs + np.array([0.0, 1.0]))
    first = eligible_rows(data, 4)
    cut = cut_segments(data, first, 4)
    seen, valid = np.asarray(cut.steps.obs), np.asarray(cut.valid)
    assert (seen[..., 0] == number[first][:, None]).all()
    assert (seen[..., 1] == time[first][:, None] + np.arange(4))[valid].all()
    short = ~valid.all(axis=1)
    assert short.any() and (~short).any()
    # A run shorter than asked for is one whose world ended: its last valid step terminated.
    last = valid.sum(axis=1) - 1
    assert np.asarray(cut.steps.terminated)[np.arange(len(first)), last][short].all()
    left = np.repeat(lengths, lengths) - time
    truncated_end = ~np.repeat(terminated[np.cumsum(lengths) - 1], lengths)
    np.testing.assert_array_equal(np.setdiff1d(np.arange(len(data)), first), np.flatnonzero((left < 4) & truncated_end))


class Drift(AbstractLatentDynamics):
    """s' = s + a + m; the belief follows the drift of the real steps: mu <- rate mu + (1 - rate) (s' - s - a)."""

    rate: jax.Array = eqx.field(converter=jnp.asarray)
    log_var: jax.Array = eqx.field(converter=jnp.asarray)
    std: jax.Array = eqx.field(converter=jnp.asarray)
    termination: AbstractTermination = NeverTerminates()

    members = 1

    def best(self, count):
        return self

    def start(self):
        return jnp.zeros(2)

    def observe(self, belief, transition):
        shown = transition.next_obs - transition.obs - transition.action
        return self.rate * belief + (1 - self.rate) * shown

    def posterior(self, belief, obs):
        return belief, jnp.broadcast_to(self.log_var, (2,))

    def sample(self, belief, obs, key):
        return belief + jnp.exp(0.5 * self.log_var) * jr.normal(key, (2,))

    def centre(self, belief, obs):
        return belief

    def predict(self, hypothesis, obs, action):
        after = obs + action[None] + hypothesis[None]
        return Outcome(after, obs[:, 0], jnp.broadcast_to(self.std, after.shape), jnp.broadcast_to(self.std, (1,)))


def drift_data(drifts, length=24, seed=0):
    random = np.random.default_rng(seed)
    rows = len(drifts) * length
    drift = np.repeat(np.asarray(drifts, np.float32), length, axis=0)
    actions = random.normal(size=(rows, 2)).astype(np.float32)
    steps = (drift + actions).reshape(-1, length, 2)
    after = np.cumsum(steps, axis=1)
    obs = (after - steps).reshape(rows, 2)
    ends = np.arange(rows) % length == length - 1
    return make_dataset(obs, actions, obs[:, 0], ~ends & ends, ends, next_observations=after.reshape(rows, 2))


@pytest.fixture(scope="module")
def drifting():
    drifts = np.random.default_rng(1).normal(size=(40, 2))
    rate, var, std = 0.5, 0.04, 0.5
    data = drift_data(drifts)
    return drifts, rate, var, std, data, diagnose(Drift(rate, np.log(var), std), data, key=jr.key(0), **SMALL)


def test_latent_statistics_are_those_on_paper(drifting):
    drifts, rate, var, _, data, found = drifting
    latent, length = found.latent, 24
    square = (drifts**2).sum(axis=1).mean()
    times = np.arange(length)
    moved = rate ** times[:-1] * (1 - rate)
    np.testing.assert_allclose(latent.kl_previous, square * (moved**2).mean() / (2 * var), rtol=1e-4)
    first = 2 * 0.5 * (var - 1 - np.log(var))
    np.testing.assert_allclose(latent.kl_first, first, rtol=1e-4)
    np.testing.assert_allclose(latent.kl_standard, first + 0.5 * square * ((1 - rate**times) ** 2).mean(), rtol=1e-4)
    np.testing.assert_allclose(latent.posterior_std, np.sqrt(var), rtol=1e-5)
    means = (1 - rate**times)[None, :, None] * drifts[:, None]
    np.testing.assert_allclose(latent.means_std, means.reshape(-1, 2).std(axis=0).mean(), rtol=1e-4)
    np.testing.assert_allclose(latent.episode_std, means.mean(axis=1).std(axis=0).mean(), rtol=1e-4)
    np.testing.assert_allclose(latent.movement, np.linalg.norm(drifts, axis=1).mean() * moved, rtol=1e-3, atol=1e-5)
    assert latent.settled_after == 4  # 0.5^t < 0.1
    assert found.segments == 600 and data.episodes == 40


def test_likelihood_under_other_latents_is_worse_by_their_distance(drifting):
    drifts, rate, var, std, data, found = drifting
    latent = found.latent
    change = np.append((data.next_observations - data.observations).std(axis=0), data.rewards.std())
    floor = (0.5 * np.log(2 * np.pi) + np.log(std / change)).mean()  # of a perfect prediction
    nll = lambda square: floor + square / (2 * 3 * std**2)  # noqa: E731  (three outputs, the reward is always right)
    times = np.arange(24 - 4)  # rows with five steps left
    square = (drifts**2).sum(axis=1).mean()
    np.testing.assert_allclose(latent.nll_mean, nll(square * (rate ** (2 * times)).mean()), atol=0.05)
    np.testing.assert_allclose(latent.nll_zero, nll(square), atol=0.15)
    np.testing.assert_allclose(latent.nll_sampled - latent.nll_mean, 2 * var / (6 * std**2), atol=0.03)
    assert latent.nll_mean < latent.nll_sampled < latent.nll_constant < latent.nll_shuffled
    assert "latent_unused" not in found.flags
    assert "nat per output" in found.verdict


def test_a_latent_without_use_is_called_that():
    data = drift_data(np.zeros((40, 2)) + 0.3)  # every episode is the same world
    found = diagnose(Drift(0.0, np.log(1e-8), 1.0), data, key=jr.key(0), **SMALL)
    assert {"latent_unused", "thin_posterior"} <= set(found.flags)
    assert "hardly used" in found.verdict


def test_kl_matches_monte_carlo():
    random = np.random.default_rng(0)
    mean, log_var, other, other_log_var = random.normal(size=(4, 3))
    assert gaussian_kl(mean, log_var, mean, log_var) == 0.0
    draws = mean + np.exp(0.5 * log_var) * random.normal(size=(200_000, 3))
    log_p, log_q = (
        norm.logpdf(draws, m, np.exp(0.5 * v)).sum(axis=1) for m, v in ((mean, log_var), (other, other_log_var))
    )
    np.testing.assert_allclose(gaussian_kl(mean, log_var, other, other_log_var), (log_p - log_q).mean(), rtol=0.02)


class Counting(AbstractPrior):
    """Remembers how many steps it saw; a state is worth its first entry plus that number."""

    def start(self):
        return jnp.zeros(())

    def observe(self, state, transition):
        return state + 1.0

    def act(self, state, obs, key):
        return jnp.zeros(2), state

    def sample(self, state, obs, key):
        return 0.3 * jr.normal(key, (2,)), jnp.zeros(())

    def value(self, state, obs):
        return obs[0] + 100.0 * state


def test_memories_are_those_of_walking_each_episode():
    drifts = np.random.default_rng(3).normal(size=(5, 2))
    data = drift_data(drifts, length=7)
    model = Drift(0.5, -1.0, 1.0)
    row = np.array([0, 6, 7, 8, 20, 34, 8])
    memory = remember(model, Counting(), data, row, Randomness(jr.key(0)))
    time = row % 7
    np.testing.assert_array_equal(memory.prior, time)
    np.testing.assert_allclose(memory.belief, (1 - 0.5**time)[:, None] * drifts[row // 7], atol=1e-5)
    assert memory.mu.shape == (7, 5, 2)


def test_the_prior_adds_its_value_and_its_proposals(clean):
    found = diagnose(linear(0.0, 0.0), clean, key=jr.key(0), prior=Counting(), discount=0.5, **SMALL)
    plain = [m for m in found.returns if not m.with_value]
    valued = [m for m in found.returns if m.with_value]
    assert [m.horizon for m in plain] == [m.horizon for m in valued] == [2, 4, 5]
    assert min(m.spearman for m in valued) > 0.9999
    # At H = 2 and discount 1/2 the value adds a quarter of up to 100 per step seen: far more than the rewards.
    assert valued[0].realised.std() > 5 * plain[0].realised.std()
    # Plans of the prior differ by 0.3 per action: score = (0.5 + 1/2 + 1/4 SHRINK) a_0 + (0.25 + 1/4) a_1.
    wanted = 0.3 * np.hypot(0.5 + 0.5 + 0.25 * SHRINK, 0.25 + 0.25)
    np.testing.assert_allclose(found.plans[0].action_std, wanted, rtol=0.12)
    assert found.plans[0].noise_share < 1e-6


def test_one_episode_is_enough():
    data = linear_data(episodes=1, length=30)
    found = diagnose(linear(), data, key=jr.key(0), **SMALL)
    assert (found.episodes, found.segments) == (1, 26)
    latent = diagnose(Drift(0.5, -1.0, 1.0), drift_data([(0.2, 0.1)]), key=jr.key(0), **SMALL).latent
    assert np.isnan(latent.episode_std)
    assert np.isfinite(latent.nll_shuffled)


def test_many_episodes_are_sampled_down(noisy):
    found = diagnose(linear(), noisy, key=jr.key(0), episodes=10, **SMALL)
    assert found.episodes == 10
    assert found.transitions == 200


def test_same_key_same_answer(noisy, exact):
    again = diagnose(linear(), noisy, key=jr.key(0), **SMALL)
    assert again.to_dict() == exact.to_dict()


def test_runs_that_leave_the_numbers_are_counted_and_left_out(clean):
    class Fragile(Linear):
        def predict(self, hypothesis, obs, action):
            outcome = super().predict(hypothesis, obs, action)
            far = jnp.abs(obs[:, :1]) > 3.0
            return outcome._replace(next_obs=jnp.where(far, jnp.nan, outcome.next_obs))

    model = Fragile(jnp.zeros((1, 2)), jnp.zeros(()), jnp.zeros(()))
    found = diagnose(model, clean, key=jr.key(0), **SMALL)
    assert 0.02 < found.diverged < 0.9
    assert "diverges" in found.flags and "left the finite numbers" in found.verdict
    assert found.errors.rmse.max() < 1e-5
    json.dumps(found.to_dict(), allow_nan=False)


def test_bad_input_is_refused_in_words(noisy):
    bag, _ = noisy.split(0.5, key=jr.key(0), by="transition")
    for data, more, said in (
        (bag, {}, "split by transition"),
        (noisy, {"horizon": 21}, "longest episode has 20 steps"),
        (noisy, {"horizon": 0}, "at least 1"),
        (drift_data([(0.0, 0.0)]).replace_meta(name="x"), {"model": linear(bias=((0.0,) * 5,))}, "does not fit"),
    ):
        with pytest.raises(RefplanError, match=said):
            settings = {"model": linear(), "horizon": 5, **more}
            diagnose(settings["model"], data, key=jr.key(0), horizon=settings["horizon"])


def test_ranks_agree_with_scipy():
    x, y = np.random.default_rng(0).integers(0, 6, (2, 50)).astype(float)
    np.testing.assert_allclose(spearman(x, y), spearmanr(x, y).statistic)
    np.testing.assert_array_equal(rank(np.array([3.0, 1.0, 3.0])), [2.5, 1.0, 2.5])


def test_text_and_json_hold_the_numbers(exact, drifting):
    text = drifting[-1].text()
    for word in ("Errors k steps ahead", "across states", "noise share", "Latent: KL per step", "rmse"):
        assert word in text
    assert f"{exact.errors.rmse[0]:.3g}" in exact.text()
    found = json.loads(json.dumps(drifting[-1].to_dict(), allow_nan=False))
    np.testing.assert_allclose(found["errors"]["rmse"], drifting[-1].errors.rmse, rtol=1e-5)
    assert found["latent"]["settled_after"] == 4
    assert exact.to_dict()["latent"] is None
    assert found["verdict"] == drifting[-1].verdict


@register
class Still(AbstractDynamics):
    """Nothing ever changes: a model that fits any robot."""

    std: jax.Array
    termination: AbstractTermination = NeverTerminates()

    members = 1

    def best(self, count):
        return self

    def start(self):
        return ()

    def observe(self, belief, transition):
        return belief

    def sample(self, belief, obs, key):
        return ()

    def centre(self, belief, obs):
        return ()

    def predict(self, hypothesis, obs, action):
        spread = jnp.broadcast_to(self.std, obs.shape)
        return Outcome(obs, jnp.zeros(1), spread, spread[:, 0])


def ask(*words):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["diagnose", *map(str, words)])
    return args.run(args)


def test_command_judges_home_and_another_world(tmp_path, capsys):
    source = "halfcheetah-medium-replay-mini"
    run = save(tmp_path / "run", model=Still(jnp.asarray(1.0)), data={"source": source, "task": "halfcheetah"})
    out = tmp_path / "out"
    words = [run, "--world", "joint", "--episodes", 1, "--horizon", 2, "--segments", 50, "--out", out, "--json"]
    assert ask(*words) == 0
    said = json.loads(capsys.readouterr().out)
    written = json.loads((out / "diagnosis.json").read_text())
    assert written == said
    assert list(said["diagnoses"]) == ["home", "joint"]
    assert said["diagnoses"]["joint"]["data"] == "RandomAgent in halfcheetah-joint"
    assert said["diagnoses"]["joint"]["transitions"] == 1000
    assert "no_better_than_trivial" in said["diagnoses"]["home"]["flags"]
    assert said["home_is_training_data"] and "commit" in said["provenance"]
    for name in ("errors", "calibration", "returns"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (out / f"{name}.png").stat().st_size < 200_000
    assert not (out / "latent.png").exists()


def test_figures_show_the_latent(tmp_path, drifting):
    from refplan.report.diagnosis import draw_diagnoses

    written = draw_diagnoses({"home": drifting[-1]}, tmp_path, ".svg")
    assert [p.name for p in written] == ["errors.svg", "calibration.svg", "returns.svg", "latent.svg"]
    with pytest.raises(RefplanError, match="figures are written as"):
        draw_diagnoses({"home": drifting[-1]}, tmp_path, ".gif")


def test_command_says_what_is_missing(tmp_path):
    run = save(tmp_path / "run", data={"task": "hopper"})
    with pytest.raises(RefplanError, match="no model"):
        ask(run)
    save(tmp_path / "run", model=Still(jnp.asarray(1.0)))
    with pytest.raises(RefplanError, match="--data"):
        ask(run)


def test_short_world_names_follow_the_robot():
    assert command.find_world("joint", "halfcheetah-d4rl").name == "halfcheetah-joint"
    assert command.find_world("hopper", "halfcheetah").name == "hopper"
    with pytest.raises(RefplanError, match="unknown task"):
        command.find_world("jiont", "halfcheetah")


def test_nothing_recompiles_for_another_model_of_the_same_shape(noisy):
    traces = []

    class Traced(Linear):
        def predict(self, hypothesis, obs, action):
            traces.append(1)
            return super().predict(hypothesis, obs, action)

    make = lambda std: Traced(jnp.zeros((1, 2)), jnp.asarray(std), jnp.asarray(std))  # noqa: E731
    diagnose(make(0.1), noisy, key=jr.key(0), **SMALL)
    before = len(traces)
    diagnose(eqx.tree_at(lambda m: m.std, make(0.1), jnp.asarray(0.2)), noisy, key=jr.key(1), **SMALL)
    assert len(traces) == before + 1  # only the check of sizes, which runs nothing
