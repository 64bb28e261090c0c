"""MPPI, the critic's choice, the true world, planners on planners, memory in plans, and a world where belief pays."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from models import GAMMA, HiddenGain, LinearModel, LinearPrior, ScalarPrior, Unsure, riccati, true_cost

from refplan.agent import AbstractPrior
from refplan.data.tasks import task
from refplan.dynamics.base import AbstractLatentDynamics
from refplan.errors import RefplanError
from refplan.planners import PLANNERS, find_planner
from refplan.planners.critic_choice import CriticChoice
from refplan.planners.loop import LOOP
from refplan.planners.presets import FIXED, make_planner, paper_settings, planner_settings_of
from refplan.planners.refplan import RefPlan
from refplan.priors.external import from_callable

P, K = riccati()
OBS = jnp.asarray([1.0, -0.5])
BOX = {"low": jnp.asarray([-8.0]), "high": jnp.asarray([8.0])}
SMALL = {**BOX, "plans": 30, "horizon": 2, "discount": GAMMA, "kappa": 2.0, "sigma": 0.1}


class CriticPrior(LinearPrior):
    """The linear prior with two critics, one of them pessimistic; Q is the cost of the action and of where it leads."""

    def critics(self, obs, action):
        q = -0.1 * jnp.sum((action + 2.0) ** 2)
        return jnp.stack([q, q - 1.0])


def prior(**changes):
    return CriticPrior(0.3 * K, P, **changes)


@eqx.filter_jit
def compiled_plan(agent, state, obs, key):
    return agent.plan(state, obs, key)


def plan_of(agent, state=None, seed=0, obs=OBS):
    return compiled_plan(agent, agent.start() if state is None else state, obs, jr.key(seed))


def make(name, **changes):
    kind = find_planner(name)
    settings = {k: v for k, v in {**SMALL, **changes}.items() if k in {f.name for f in dataclasses.fields(kind)}}
    return kind(prior(), **settings) if name == "critic" else kind(prior(), LinearModel(), **settings)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_keeps_the_contract(name):
    agent = make(name)
    plan, state = plan_of(agent)
    assert jax.tree.structure(state) == jax.tree.structure(agent.start())
    assert np.allclose(plan.weights.sum(1), 1.0, atol=1e-5)
    assert (plan.action >= BOX["low"]).all() and (plan.action <= BOX["high"]).all()
    assert not bool(plan.fallback)
    action, log_weight = eqx.filter_jit(lambda a, k: a.sample(a.start(), OBS, k))(agent, jr.key(1))
    drawn = compiled_plan(agent, agent.start(), OBS, jr.split(jr.key(1))[0])[0]
    assert np.abs(np.asarray(drawn.proposals[:, 0]) - np.asarray(action)).min() < 1e-5, "a sample is one of the plans"
    assert float(log_weight) <= 0.0
    assert float(agent.value(agent.start(), OBS)) == pytest.approx(float(prior().value((), OBS)))


@pytest.mark.parametrize("name", PLANNERS)
def test_an_observation_of_the_wrong_shape_is_a_clear_error(name):
    agent = make(name)
    with pytest.raises(RefplanError, match="does not accept an observation of shape"):
        agent.act(agent.start(), jnp.zeros(3), jr.key(0))


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(RefplanError, match=r"proposal of LOOP.*means.*mean"):
        LOOP(prior(), LinearModel(), proposal="means", **BOX)
    with pytest.raises(RefplanError, match="latents of RefPlan must be at least 1"):
        RefPlan(prior(), LinearModel(), latents=0, **BOX)
    with pytest.raises(RefplanError, match=r"effective of LOOP is a share.*got 20"):
        LOOP(prior(), LinearModel(), effective=20.0, **BOX)
    with pytest.raises(RefplanError, match="kappa of LOOP must not be negative"):
        LOOP(prior(), LinearModel(), kappa=-1.0, **BOX)
    with pytest.raises(RefplanError, match="does not say its action bounds"):
        LOOP(prior(), LinearModel())
    with pytest.raises(RefplanError, match="has no critics"):
        CriticChoice(LinearPrior(K, P), **BOX)
    with pytest.raises(RefplanError, match="give it a model"):
        make_planner("loop", prior())


def test_the_critics_choice_is_the_softmax_of_the_smaller_critic():
    plan = plan_of(make("critic"))[0]
    q = -0.1 * (np.asarray(plan.proposals[:, 0, 0]) + 2.0) ** 2 - 1.0
    weights = np.exp(2.0 * (q - q.max()))
    assert np.allclose(plan.weights[0], weights / weights.sum(), atol=1e-5)


def test_mppi_returns_by_a_plain_loop_and_mixing_with_the_last_plan():
    agent = make("mppi", shift=False, mixing=0.0, discount=0.9, value_at_end="prior")
    plan, _ = plan_of(agent)
    A, B, Q, R = (np.asarray(x, np.float64) for x in LinearModelParts())
    for n in range(5):
        s, earned = np.asarray(OBS, np.float64), 0.0
        for h in range(2):
            a = np.asarray(plan.proposals[n, h], np.float64)
            earned += 0.9**h * -(s @ Q @ s + a @ R @ a)
            s = A @ s + B @ a
        assert float(plan.scores[0, n]) == pytest.approx(earned - 0.81 * s @ P @ s, rel=1e-4)
    # All of the next plan is the last one when the share is 1; shifted, it begins with its second step.
    for shift in (False, True):
        stubborn = dataclasses.replace(agent, mixing=jnp.asarray(1.0), shift=shift)
        first, state = plan_of(stubborn)
        assert np.ptp(first.proposals[:, 0]) > 0.1, "there is no last plan at the first step"
        second, _ = plan_of(stubborn, state, 5)
        expected = first.mean_plan[1] if shift else first.mean_plan[0]
        assert np.allclose(second.proposals[:, 0], expected, atol=1e-5)


def LinearModelParts():
    from models import matrices

    return matrices()


def test_fewer_members_are_the_best_ones():
    model = LinearModel(gains=(0.0, 0.5, -0.5))
    few = plan_of(LOOP(prior(), model, members=1, **SMALL))[0]
    alone = plan_of(LOOP(prior(), LinearModel(), **SMALL))[0]
    assert few.returns.shape[2] == 1
    proposals = few.proposals
    agent = LOOP(prior(), model, members=2, **SMALL)
    returns = agent.evaluate((), agent.worlds((), OBS, jr.key(0)), OBS, proposals, jr.key(0))
    assert np.allclose(returns[..., 0], few.returns[..., 0], atol=1e-4)
    assert alone.returns.shape == few.returns.shape


def test_scores_joined_over_worlds_are_between_the_worst_and_the_mean():
    model = LinearModel(spread=0.4)
    each = plan_of(RefPlan(prior(), model, latents=4, **SMALL))[0]
    mean, careful, worst = (
        plan_of(RefPlan(prior(), model, latents=4, across="scores", share=s, **SMALL))[0].scores[0]
        for s in (1.0, 0.5, 0.25)
    )
    assert np.allclose(mean, each.scores.mean(0), atol=1e-4)
    assert np.allclose(worst, each.scores.min(0), atol=1e-4)
    assert (careful <= mean + 1e-5).all() and (worst <= careful + 1e-5).all()
    short = plan_of(RefPlan(prior(), model, latents=4, across="scores", shortlist=3, **SMALL))[0].scores[0]
    listed = np.isfinite(short)
    assert listed.sum() == 3 and np.allclose(short[listed], mean[listed], atol=1e-4)


class Gaussian(LinearModel, AbstractLatentDynamics):
    """The linear world whose gain is believed to be N(mean, spread^2)."""

    def posterior(self, belief, obs):
        return self.mean[None], jnp.log(self.spread[None] ** 2)


def test_the_plan_shows_the_belief():
    plan = plan_of(RefPlan(prior(), Gaussian(mean=1.1, spread=0.3), **SMALL))[0]
    assert np.allclose(plan.belief_mean, 1.1) and np.allclose(plan.belief_std, 0.3)
    assert plan_of(RefPlan(prior(), LinearModel(), **SMALL))[0].belief_mean.shape == (0,)


class Counting(AbstractPrior):
    """A prior whose action is how many steps it has seen, and whose value is that number too."""

    def start(self):
        return jnp.zeros(())

    def observe(self, state, transition):
        return state + 1.0

    def act(self, state, obs, key):
        return state[None], state

    def sample(self, state, obs, key):
        return state[None], jnp.zeros(())

    def value(self, state, obs):
        return 100.0 * state


def test_memory_of_a_prior_follows_the_imagined_steps():
    agent = LOOP(Counting(), LinearModel(), **{**SMALL, "horizon": 3, "sigma": 0.0, "discount": 1.0})
    state = agent.start()._replace(prior=jnp.asarray(2.0))
    plan, after = plan_of(agent, state)
    assert np.allclose(plan.proposals[..., 0], [[2.0, 3.0, 4.0]])
    without = LOOP(
        Counting(), LinearModel(), **{**SMALL, "horizon": 3, "sigma": 0.0, "discount": 1.0}, value_at_end="none"
    )
    gap = plan.scores - without.plan(state, OBS, jr.key(0))[0].scores
    assert np.allclose(gap, 500.0, atol=1e-2), "the value is asked with the memory after three imagined steps"
    assert float(after.prior) == 2.0, "only real steps move the real memory"
    assert float(agent.observe(after, None_step()).prior) == 3.0


def None_step():
    from refplan.types import Transition

    return Transition(OBS, jnp.zeros(1), jnp.zeros(()), OBS, jnp.zeros((), bool))


def test_a_planner_can_be_the_prior_of_another():
    inner = LOOP(prior(), LinearModel(), **{**SMALL, "plans": 10})
    outer = RefPlan(inner, LinearModel(), latents=2, **{**SMALL, "plans": 8})
    plan, state = plan_of(outer)
    assert np.isfinite(plan.action).all()
    assert jax.tree.structure(state) == jax.tree.structure(outer.start())
    alone, start = (np.abs(float(plan_of(a)[0].action[0]) + float((K @ OBS)[0])) for a in (inner, prior_only()))
    assert np.abs(float(plan.action[0]) + float((K @ OBS)[0])) < start
    assert alone < start


def prior_only():
    return LOOP(prior(), LinearModel(), **{**SMALL, "sigma": 0.0}, proposal="mean")


def test_a_python_function_can_be_planned_with():
    policy = from_callable(lambda obs: -0.3 * obs @ np.asarray(K).T, low=[-8.0], high=[8.0], noise=0.1)

    class Valued(LinearPrior):
        def act(self, state, obs, key):
            return policy.act((), obs, key)[0], state

        def sample(self, state, obs, key):
            return policy.sample((), obs, key)

    agent = LOOP(Valued(0.3 * K, P), LinearModel(), **SMALL)
    plan = plan_of(agent)[0]
    assert np.isfinite(plan.action).all() and plan.proposals.std() > 0.05
    assert true_value(agent) > true_cost(lambda s, t: -0.3 * K @ s, [2.0, 0.0])


def true_value(agent):
    act = eqx.filter_jit(lambda o, k: agent.act(agent.start(), o, k)[0])
    return true_cost(lambda s, t: act(jnp.asarray(s, jnp.float32), jr.fold_in(jr.key(1), t)), np.array([2.0, 0.0]))


def regret(kind, spread, episodes=200, steps=30):
    """Mean return of a planner in worlds whose hidden gain is drawn with `spread`, all planners in the same worlds."""
    world = HiddenGain(spread=spread)
    model = world if kind is RefPlan else Unsure(world)
    agent = kind(ScalarPrior(), model, low=jnp.asarray([-6.0]), high=jnp.asarray([6.0]), plans=200, horizon=1,
                 discount=1.0, kappa=20.0, sigma=0.3)  # fmt: skip
    keys = jr.split(jr.key(7), episodes)
    return np.asarray(play(world, agent, keys, steps))


@eqx.filter_jit
def play(world, agent, keys, steps):
    return jax.vmap(lambda k: world.episode(agent, k, steps))(keys)


def test_where_a_parameter_is_hidden_refplan_beats_loop_by_more_the_more_it_varies():
    margins = []
    for spread in (0.0, 0.45, 0.9):
        gain = regret(RefPlan, spread) - regret(LOOP, spread)
        margins.append((gain.mean(), gain.std() / np.sqrt(len(gain))))
    (home, _), (some, some_error), (much, much_error) = margins
    assert abs(home) < 0.5 * some, "with nothing hidden there is nothing to gain"
    assert some > 2.0 * some_error
    assert much - some > 2.0 * np.hypot(some_error, much_error)


def test_the_papers_numbers_are_typed_in_correctly():
    """The tables of the paper, parsed from its own text, against the file that ships."""
    import re
    from pathlib import Path

    text = (Path(__file__).parent / "fixtures" / "paper_planner_tables.tex").read_text(encoding="utf-8")
    found = {}
    for table in text.split(r"\begin{table*}")[1:]:
        prior_name = re.search(r"used for (\w+) \+ RefPlan", table)[1].lower()
        for kind in ("random", "medium", "med-replay", "med-expert", "full-replay"):
            numbers = [float(x) for x in re.search(rf"& {kind}\s+&(.*?)\\\\", table, re.DOTALL)[1].split("&")]
            for robot, five in zip(("hopper", "halfcheetah", "walker2d"), np.reshape(numbers, (3, 5)), strict=True):
                found[prior_name, robot, kind.replace("med-", "medium-")] = tuple(five)
    names = ("horizon", "sigma", "kappa", "latents", "penalty")
    shipped = {cell: tuple(row[n] for n in names) for cell, row in paper_settings().items()}
    assert len(found) == 75
    assert shipped == found
    picks = list(shipped.values())
    assert max(set(picks), key=picks.count) == tuple(FIXED[n] for n in names), "the fixed setting is the most frequent"


def test_kappa_is_found_by_default_and_used_where_it_is_given():
    def softness(name, **changes):
        return float(make_planner(name, prior_with_bounds(), LinearModel(), changes=changes).effective)

    assert softness("loop") == softness("refplan") == pytest.approx(0.1)
    assert softness("loop", kappa="5") == softness("mppi") == softness("critic") == 0.0
    assert softness("loop", kappa=5.0, effective=0.3) == pytest.approx(0.3)


def test_presets_reach_the_planner():
    agent = make_planner("refplan", prior_with_bounds(), LinearModel(), preset="paper",
                         dataset="hopper-medium-replay-v2", method="cql")  # fmt: skip
    settings = planner_settings_of(agent)
    assert (settings["horizon"], settings["sigma"], settings["kappa"], settings["latents"]) == (4, 0.05, 0.1, 8)
    assert settings["propagation"] == "sample"
    loop = make_planner("loop", prior_with_bounds(), LinearModel(), preset="fixed", changes={"kappa": "2"})
    assert planner_settings_of(loop)["horizon"] == 4
    assert float(loop.kappa) == 2.0
    assert float(agent.effective) == float(loop.effective) == 0.0, "these presets have a kappa"
    careful = planner_settings_of(make_planner("loop", prior_with_bounds(), LinearModel(), preset="careful"))
    assert (careful["anchor"], careful["width"], careful["effective"]) == (
        "prior",
        pytest.approx(0.3),
        pytest.approx(0.1),
    )
    away = planner_settings_of(make_planner("refplan", prior_with_bounds(), LinearModel(), preset="away"))
    assert (away["anchor"], away["width"], away["effective"]) == ("own", 1.0, pytest.approx(0.1))
    mppi = planner_settings_of(make_planner("mppi", prior_with_bounds(), LinearModel(), preset="careful"))
    assert (mppi["anchor"], mppi["width"]) == ("plans", 1.0), "for those it was measured with"
    with pytest.raises(RefplanError, match="unknown setting of planner 'loop' 'latents'"):
        make_planner("loop", prior_with_bounds(), LinearModel(), changes={"latents": 4})
    with pytest.raises(RefplanError, match="no planner settings for prior 'iql'"):
        make_planner("loop", prior_with_bounds(), LinearModel(), preset="paper", dataset="hopper-random", method="iql")
    with pytest.raises(RefplanError, match="unknown preset of planners"):
        make_planner("loop", prior_with_bounds(), LinearModel(), preset="papers")


class Bounded(CriticPrior):
    """The linear prior that says its bounds."""

    low: jax.Array = eqx.field(converter=jnp.asarray, default=(-8.0,))
    high: jax.Array = eqx.field(converter=jnp.asarray, default=(8.0,))


def prior_with_bounds():
    return Bounded(0.3 * K, P)


def test_one_compilation_serves_a_whole_episode():
    agent = make("refplan")
    act = eqx.filter_jit(
        eqx.debug.assert_max_traces(lambda a, s, o, k: a.act(a.observe(s, None_step()), o, k), max_traces=1)
    )
    state = agent.start()
    for t in range(3):
        _, state = act(agent, state, (1.0 + t) * OBS, jr.key(t))


@pytest.mark.parametrize("name", ["halfcheetah", "hopper"])
def test_the_true_world_is_what_the_simulator_does(name):
    pytest.importorskip("mujoco")
    from refplan.data.simulate import make_simulator
    from refplan.dynamics.true import make_true_dynamics

    model = make_true_dynamics(task(name))
    simulator = make_simulator(task(name), 3)
    obs = simulator.reset([0, 1, 2]).astype(np.float32)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, task(name).action_dim)).astype(np.float32)
    for _ in range(5):
        outcome = jax.vmap(lambda o, a: model.predict_from((), o, a))(jnp.asarray(obs), jnp.asarray(actions))
        after, rewards, _, _ = simulator.step(actions)
        assert np.allclose(outcome.next_obs[:, 0], after, atol=5e-3)
        assert np.allclose(outcome.reward[:, 0], rewards, atol=5e-3)
        obs = after.astype(np.float32)
    strange = model.predict_from((), jnp.full(obs.shape[1], jnp.nan), jnp.asarray(actions[0]))
    assert np.isnan(strange.next_obs).all()


def test_a_world_that_cannot_be_rebuilt_is_refused():
    pytest.importorskip("mujoco")
    from refplan.dynamics.true import make_true_dynamics

    for name in ("halfcheetah-hill", "halfcheetah-joint"):
        with pytest.raises(RefplanError, match="another world in every episode or at every place"):
            make_true_dynamics(task(name))
