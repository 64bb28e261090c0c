"""A learner small enough to train in milliseconds and rich enough to resume wrongly: momentum, randomness, a review."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from refplan.data.assemble import make_dataset
from refplan.data.dataset import Dataset, Meta
from refplan.learner import AbstractLearner, AbstractReviewingLearner, AbstractStagedLearner
from refplan.nn import MLP, make_mlp

TRACES: list[int] = []


def toy_data(rows: int = 200, obs: int = 3, seed: int = 0, episode: int = 20) -> Dataset:
    random = np.random.default_rng(seed)
    observations = random.normal(size=(rows, obs)).astype(np.float32)
    ends = np.arange(rows) % episode == episode - 1
    return make_dataset(
        observations,
        random.uniform(-1, 1, (rows, 2)).astype(np.float32),
        observations.sum(1),
        np.zeros(rows, bool),
        ends,
        next_observations=observations + 0.1,
        meta=Meta(name="toy"),
    )


def _loss(net: MLP, obs, target):
    return jnp.mean((net(obs)[..., 0] - target) ** 2)


class Toy(AbstractLearner):
    rate: float = 1e-2
    width: int = 8

    def prepare(self, data):
        return data.device()

    def init(self, data, key):
        net = make_mlp((data.obs_dim, self.width, 1), key)
        return net, optax.adam(self.rate).init(net.layers)

    def batch(self, source, state, key):
        rows = jr.randint(key, (16,), 0, len(source.reward))
        return jax.tree.map(lambda x: x[rows], source)

    def update(self, state, batch, key):
        TRACES.append(self.width)  # Python runs only while tracing
        net, optimiser = state
        target = batch.reward + 0.01 * jr.normal(key, batch.reward.shape)
        loss, grads = jax.value_and_grad(lambda layers: _loss(MLP(layers, net.activation), batch.obs, target))(
            net.layers
        )
        updates, optimiser = optax.adam(self.rate).update(grads, optimiser)
        return (MLP(optax.apply_updates(net.layers, updates), net.activation), optimiser), {"loss": loss}

    def result(self, state):
        return state[0]


class PatientToy(AbstractReviewingLearner):
    """Stops when the held-out loss has not improved for `patience` reviews."""

    toy: Toy = Toy()
    patience: int = 3
    start: MLP | None = None

    def schedule(self, data):
        return 20, 100_000

    def hold_out(self, data, key):
        return data.split(0.8, key=key)

    def prepare(self, data):
        return self.toy.prepare(data)

    def init(self, data, key):
        net, optimiser = self.toy.init(data, key)
        return {"toy": (self.start or net, optimiser), "best": jnp.inf, "since": jnp.asarray(0)}

    def batch(self, source, state, key):
        return self.toy.batch(source, state["toy"], key)

    def update(self, state, batch, key):
        toy, metrics = self.toy.update(state["toy"], batch, key)
        return {**state, "toy": toy}, metrics

    def review(self, state, source, held, key):
        loss = _loss(state["toy"][0], held.obs, held.reward)
        better = loss < state["best"] - 1e-3
        since = jnp.where(better, 0, state["since"] + 1)
        return {**state, "best": jnp.minimum(loss, state["best"]), "since": since}, {"held": loss}

    def finished(self, state):
        return state["since"] >= self.patience

    def result(self, state):
        return state["toy"][0]


class Twice(AbstractStagedLearner):
    """A first training whose result is where a second one starts counting from."""

    first: PatientToy = PatientToy()

    def schedule(self, data):
        return 20, 60

    def hold_out(self, data, key):
        return self.first.hold_out(data, key)

    def prepare(self, data):
        return self.first.prepare(data)

    def init(self, data, key):
        return self.first.init(data, key)

    def batch(self, source, state, key):
        return self.first.batch(source, state, key)

    def update(self, state, batch, key):
        return self.first.update(state, batch, key)

    def review(self, state, source, held, key):
        return self.first.review(state, source, held, key)

    def finished(self, state):
        return self.first.finished(state)

    def result(self, state):
        return self.first.result(state)

    def following(self, result):
        return PatientToy(Toy(rate=1e-3), start=result)
