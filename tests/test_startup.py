"""`refplan bench startup`: what a fresh process does before its first action, on small parts."""

from refplan.bench import startup
from refplan.bench.planner import make_model, make_prior


def test_processes_act_and_the_second_one_reads_the_cache(monkeypatch):
    monkeypatch.setattr("refplan.bench.planner.make_prior", lambda: make_prior(hidden=8))
    monkeypatch.setattr("refplan.bench.planner.make_model", lambda members: make_model(1))
    rows = startup.run(quick=True)
    assert [row["process"] for row in rows] == [1, 2]
    assert all(0.0 < row["of_that_acting"] < row["seconds"] for row in rows)
