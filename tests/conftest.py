"""Strictness for every test: implicit rank promotion is an error, and no test reads the user's caches."""

import gc
import os
from pathlib import Path

# Tests compile much and run little: level 1 compiles in two thirds of the time, and without the newer emitters of fused
# loops in three quarters of that. Read when the backend starts.
# (Level 0 would be faster still, but its code gives infinities for very unlikely densities.)
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of a test's time is compilation, and tests compile the same small programs again and again.
# Two processes (tests/together.py) do not share a cache: JAX may read what another one is still writing.
CACHE = "xla-2" if "REFPLAN_TEST_BACKWARDS" in os.environ else "xla"
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REFPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Each compiled program holds memory maps; a whole session of them runs into the system's limit and aborts."""
    yield
    jax.clear_caches()
    gc.collect()
