"""Policies that stay Python functions: torch modules, numpy code, ONNX graphs, called from compiled code.

A call leaves the compiled program, so weights read by `refplan.priors.external` are faster; any number of `vmap`s
around it still makes one call with all rows.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from refplan.agent import AbstractPolicy
from refplan.errors import MissingExtraError, RefplanError
from refplan.priors.policy import Bound, check_bounds, noise_log_prob, to_unit, to_world
from refplan.types import Action, Key, Obs, Scalar, State, Transition

ActFunction = Callable[[np.ndarray], Any]
SampleFunction = Callable[[np.ndarray, np.random.Generator], tuple[Any, Any]]


class CallablePolicy(AbstractPolicy):
    """A policy behind a Python function; without `sample_function` it explores with normal noise, clipped."""

    function: ActFunction = eqx.field(static=True)
    low: Action
    high: Action
    noise: Scalar  # std of the exploration, in units of half the action range
    sample_function: SampleFunction | None = eqx.field(static=True, default=None)

    def start(self) -> State:
        """Nothing to remember."""
        return ()

    def observe(self, state: State, transition: Transition) -> State:
        """Nothing to learn."""
        return state

    def act(self, state: State, obs: Obs, key: Key) -> tuple[Action, State]:
        """The function's action inside the bounds; the middle of the range where it is not a number."""
        return to_world(self._unit(obs), self.low, self.high), state

    def sample(self, state: State, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        """The function's own sample and log-probability or, without one, its action with noise.

        The random generator given to `sample_function` is seeded by the keys of all rows of the call.
        """
        if self.sample_function is not None:
            return self._own_sample(obs, key)
        unit = self._unit(obs)
        noisy = jnp.clip(unit + self.noise * jr.normal(key, unit.shape), -1.0, 1.0)
        log_scale = jnp.sum(jnp.log(0.5 * (self.high - self.low)))
        return to_world(noisy, self.low, self.high), noise_log_prob(noisy - unit, self.noise, log_scale)

    def _unit(self, obs: Obs) -> Action:
        actions = self.low.shape[0]

        def host(obs: Any) -> np.ndarray:
            rows = np.array(obs, np.float32).reshape(-1, np.shape(obs)[-1])
            answer = _answer(self.function, "policy function", (len(rows), actions), rows)
            return answer.reshape(*np.shape(obs)[:-1], actions)

        shape = jax.ShapeDtypeStruct((actions,), jnp.float32)
        action = jax.pure_callback(host, shape, obs, vmap_method="broadcast_all")
        return jnp.clip(to_unit(action, self.low, self.high), -1.0, 1.0)

    def _own_sample(self, obs: Obs, key: Key) -> tuple[Action, Scalar]:
        actions, function = self.low.shape[0], self.sample_function

        def host(obs: Any, seeds: Any) -> tuple[np.ndarray, np.ndarray]:
            rows = np.array(obs, np.float32).reshape(-1, np.shape(obs)[-1])
            generator = np.random.default_rng(np.asarray(seeds).ravel())
            drawn = _pair(function, rows, generator)
            batch = np.shape(obs)[:-1]
            action = _checked(drawn[0], "sample function's actions", (len(rows), actions))
            log_prob = _checked(drawn[1], "sample function's log-probabilities", (len(rows),))
            return action.reshape(*batch, actions), log_prob.reshape(batch)

        shapes = jax.ShapeDtypeStruct((actions,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
        action, log_prob = jax.pure_callback(host, shapes, obs, jr.key_data(key), vmap_method="broadcast_all")
        return to_world(to_unit(action, self.low, self.high), self.low, self.high), log_prob


def _answer(function: Callable[..., Any], what: str, shape: tuple[int, ...], *arguments: Any) -> np.ndarray:
    try:
        answer = function(*arguments)
    except Exception as error:
        raise RefplanError(f"the {what} failed on {shape[0]} observations: {type(error).__name__}: {error}") from error
    return _checked(answer, what, shape)


def _pair(function: Callable[..., Any] | None, rows: np.ndarray, generator: np.random.Generator) -> tuple[Any, Any]:
    try:
        action, log_prob = function(rows, generator)  # ty: ignore[call-non-callable]
    except Exception as error:
        raise RefplanError(
            f"the sample function failed on {len(rows)} observations (it must return actions and log-probabilities): "
            f"{type(error).__name__}: {error}"
        ) from error
    return action, log_prob


def _checked(answer: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """A function's answer as an array of the shape it must have; tensors with gradients are detached."""
    if hasattr(answer, "detach"):
        answer = answer.detach().cpu()
    values = np.asarray(answer, np.float32)
    if values.shape != shape:
        raise RefplanError(
            f"the {what} returned shape {values.shape} where {shape} was expected: it gets observations as rows "
            "(N, observation) and must answer with one row for each."
        )
    return values


def from_callable(
    function: ActFunction,
    low: Bound,
    high: Bound,
    *,
    sample_function: SampleFunction | None = None,
    noise: float = 0.0,
    batched: bool = True,
) -> CallablePolicy:
    """A policy from any Python function from observations (N, obs) to actions (N, act) in the world's units.

    `sample_function(observations, generator)` may return (actions, log-probabilities); without it, samples are the
    action plus normal noise of std `noise` in units of half the action range. With `batched=False` the functions get
    one observation at a time.
    """
    low, high = check_bounds(low, high)
    if not batched:
        function, sample_function = _row_by_row(function), sample_function and _sample_row_by_row(sample_function)
    return CallablePolicy(function, low, high, jnp.asarray(noise, jnp.float32), sample_function)


def _row_by_row(function: ActFunction) -> ActFunction:
    def rows(obs: np.ndarray) -> np.ndarray:
        return np.stack([_checked(answer, "policy function", np.shape(answer)) for answer in map(function, obs)])

    return rows


def _sample_row_by_row(function: SampleFunction) -> SampleFunction:
    def rows(obs: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        drawn = [function(row, generator) for row in obs]
        actions = [_checked(action, "sample function", np.shape(action)) for action, _ in drawn]
        return np.stack(actions), np.array([float(log_prob) for _, log_prob in drawn], np.float32)

    return rows


def from_onnx(
    path: str | Path,
    low: Bound,
    high: Bound,
    *,
    output: str | None = None,
    unit: bool = False,
    noise: float = 0.0,
) -> CallablePolicy:
    """A policy from an ONNX graph with one input (batch, obs) and an action output: the first, or the one of that name.

    A graph exported for a fixed batch is rewritten to any batch and checked against the original; where that fails it
    is run in pieces. `unit` says that the graph answers in [-1, 1], to be rescaled to the bounds.
    """
    low, high = check_bounds(low, high)
    path = Path(path)
    graph = OnnxGraph(_read_graph(path), str(path), output, *((np.asarray(low), np.asarray(high)) if unit else ()))
    graph.run  # noqa: B018 -- a graph that does not fit is refused here, not at its first observation
    return from_callable(graph, low, high, noise=noise)


@dataclasses.dataclass(frozen=True, eq=False)
class OnnxGraph:
    """An ONNX graph as a function; it keeps the file's bytes, so that a policy can be saved with it."""

    graph: np.ndarray  # of bytes
    where: str
    output: str | None
    low: np.ndarray | None = None  # bounds to rescale answers in [-1, 1] to
    high: np.ndarray | None = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Actions in the world's units."""
        answer = self.run(obs)
        return answer if self.low is None else 0.5 * (self.low + self.high) + 0.5 * (self.high - self.low) * answer

    @functools.cached_property
    def run(self) -> ActFunction:
        """The graph in onnxruntime, made when it is first needed."""
        return _onnx_function(self.graph.tobytes(), self.where, self.output)


def _import_onnx() -> tuple[Any, Any]:
    try:
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtraError(error.name or "onnxruntime", "onnx", "reading an ONNX policy") from None


def _read_graph(path: Path) -> np.ndarray:
    onnx, _ = _import_onnx()
    if not path.is_file():
        raise RefplanError(f"{path}: no such file.")
    try:
        return np.frombuffer(onnx.load(str(path)).SerializeToString(), np.uint8)  # with weights from files beside it
    except Exception as error:  # protobuf raises types of its own
        raise RefplanError(f"{path}: not a readable ONNX graph ({error}).") from None


def _onnx_function(graph: bytes, path: str, output: str | None) -> ActFunction:
    onnx, onnxruntime = _import_onnx()
    try:
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises types of its own
        raise RefplanError(f"{path}: not a readable ONNX graph ({error}).") from None
    size, dim, name = _onnx_input(path, session)
    known = [each.name for each in session.get_outputs()]
    if output is not None and output not in known:
        raise RefplanError(f"{path}: has no output '{output}'; it has {', '.join(known)}.")
    chosen = output or known[0]
    fixed = _runner(session, name, chosen)
    if size is None:
        return fixed
    pieces = _in_pieces(fixed, size)
    return _any_batch(onnxruntime, onnx.load_model_from_string(graph), name, chosen, pieces, dim) or pieces


def _onnx_input(path: str, session: Any) -> tuple[int | None, int, str]:
    """The fixed batch size (None if free), the observation size and the name of the graph's one input."""
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or not isinstance(inputs[0].shape[1], int):
        shapes = {each.name: each.shape for each in inputs}
        raise RefplanError(f"{path}: a policy graph has one input (batch, observation); this one has {shapes}.")
    batch, dim = inputs[0].shape
    return (batch if isinstance(batch, int) else None), dim, inputs[0].name


def _runner(session: Any, name: str, output: str) -> ActFunction:
    return lambda obs: session.run([output], {name: obs})[0]


def _in_pieces(function: ActFunction, size: int) -> ActFunction:
    """Run a graph of fixed batch `size` on any number of rows; the last piece is filled up with its first row."""

    def pieces(obs: np.ndarray) -> np.ndarray:
        missing = -len(obs) % size
        rows = np.concatenate([obs, np.repeat(obs[:1], missing, axis=0)]) if missing else obs
        return np.concatenate([function(rows[at : at + size]) for at in range(0, len(rows), size)])[: len(obs)]

    return pieces


def _any_batch(
    onnxruntime: Any, model: Any, name: str, output: str, pieces: ActFunction, dim: int
) -> ActFunction | None:
    """The graph with its batch dimension freed, if it then still gives the original's answers."""
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a graph that cannot be freed is expected here and handled
    probe = np.random.default_rng(0).normal(size=(5, dim)).astype(np.float32)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        answer = session.run([output], {name: probe})[0]
    except Exception:  # whatever the reason, the original graph in pieces is always right
        return None
    expected = pieces(probe)
    same = answer.shape == expected.shape and np.allclose(answer, expected, atol=1e-5)
    return _runner(session, name, output) if same else None
