"""The report: what it finds, what it says, what it leaves out and why; pages of made-up run folders."""

import base64
import json
import re
from html.parser import HTMLParser

import jax.random as jr
import numpy as np
import pytest
import reports
from reports import HOPPER, curve, judged, record, result, run_toml

from refplan.cli import main
from refplan.errors import RefplanError
from refplan.evaluation import evaluate
from refplan.report.charts import Line, bounds, level, line_chart, number, ticks
from refplan.report.explorer import payload, principal_components, realised
from refplan.report.gain import find_entries, find_gains, headline
from refplan.report.gather import gather
from refplan.report.page import write_report
from refplan.report.record import MOST_PICTURES, Recorder, find_reasons, is_recording, load_recording, recording_path
from refplan.stats import mean_interval
from refplan.store import append_results


class Checker(HTMLParser):
    """Every element that is opened is closed, in order."""

    void = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and re.match(r"(\w+:)?//", v)]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(path) -> tuple[str, Checker]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert not checker.outside, "nothing is fetched"
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/)", text)
    return text, checker


def found_in(folder, *rows):
    append_results(folder / "results.csv", list(rows))
    return find_entries(gather([folder]).evaluations)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return load_recording(record(reports.refplan(), tmp_path_factory.mktemp("recorded") / "one.npz"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return reports.whole(tmp_path_factory.mktemp("runs") / "x")


def test_a_whole_run_on_one_page(whole, tmp_path):
    text, checker = checked(write_report([whole], tmp_path / "report.html"))
    assert "Planning helped: RefPlan scores" in text
    for name in ("gains", "results", "explorer", "diagnosis", "curves", "provenance"):
        assert f'<section id="{name}">' in text
    assert "Left out" not in text
    assert "refplan evaluate runs/x --planner refplan" in text and "abc123" in text
    assert checker.tags.count("svg") > 10
    shown = json.loads(re.search(r'id="recordings">(.*?)</script>', text, re.DOTALL)[1])
    assert [each["plans"] for each in shown] == [12, 0]


def test_several_folders_and_files_are_read_once(whole, tmp_path):
    together = gather([whole, whole.parent, whole / "results.csv"])
    assert len(together.runs) == 1 and len(together.evaluations) == 3 and len(together.trainings) == 2
    assert [run.name for run in together.runs] == ["x"]
    assert {training.name for training in together.trainings} == {"x/prior", "x/model"}
    alone = gather([whole / "results.csv", whole / "episodes" / "prior.npz", whole / "diagnosis.json"])
    assert (len(alone.evaluations), len(alone.recordings), len(alone.judgements)) == (3, 1, 1)


@pytest.mark.parametrize("part", [run_toml, curve, judged, lambda folder: found_in(folder, result("loop", [1.0, 2.0]))])
def test_every_part_alone_makes_a_page(part, tmp_path):
    part(tmp_path)
    text, _ = checked(write_report([tmp_path], tmp_path / "report.html"))
    assert "Left out" not in text
    assert "No episode was recorded" in text


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(RefplanError, match="nothing to report on"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(RefplanError, match="no such file or folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(RefplanError, match=r"ending in \.html"):
        write_report([tmp_path], tmp_path / "report.pdf")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RefplanError, match=r"diagnosis\.json"):
        write_report([tmp_path / "notes.txt"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_what_is_damaged_is_named_and_the_rest_is_shown(whole, tmp_path):
    folder = tmp_path / "x"
    rows = [result("none", [1.0, 2.0]), result("loop", [2.0, 4.0])]
    append_results(folder / "results.csv", rows)
    with open(folder / "results.csv", "a") as file:
        file.write("a,b,c\n")
        file.write(",".join(["x"] * 16) + "\n")
    (folder / "run.toml").write_text("[refplan\n")
    (folder / "diagnosis.json").write_text('{"diagnoses": {"home": {"data": "d", "verdict": "v", "flags": []}}}')
    (folder / "metrics.csv").write_text("step,loss\n")
    half = (whole / "episodes" / "prior.npz").read_bytes()
    broken = bytearray(half)
    broken[len(half) // 3 : len(half) // 3 + 200] = bytes(200)
    (folder / "broken.npz").write_bytes(broken)
    np.savez(folder / "data.npz", observations=np.zeros(3))  # a dataset: none of a report's business
    text, _ = checked(write_report([folder], tmp_path / "report.html"))
    said = re.search(r'<aside class="problems".*?</aside>', text, re.DOTALL)[0]
    assert "results.csv, line 4: a damaged row" in said and "line 5: a damaged row" in said
    for word in ("run.toml", "diagnosis.json", "no row in it yet", "broken.npz"):
        assert word in said
    assert said.count("<li>") == 6
    assert "a change of" in text, "the good rows are still compared"


def test_names_are_escaped(tmp_path):
    evil = '<img src=x onerror="boom()">&{{body}}'
    run_toml(tmp_path / "x", name=evil)
    settings = json.dumps({evil: evil, "run": evil})
    words = {"dataset": evil, "prior": evil, "world": evil, "command": evil, "commit": evil, "settings": settings}
    found_in(tmp_path, result("none", [1.0, 2.0], **words), result(evil, [2.0, 4.0], **words))
    record(reports.linear_prior(), tmp_path / "one.npz", prior=f"</script>{evil}", world=evil, planner="none")
    text, checker = checked(write_report([tmp_path], tmp_path / "report.html", title=evil))
    assert "<img src=x" not in text and "onerror=" not in re.sub(r"onerror=(&quot;|\\\\?\")", "", text)
    assert checker.tags.count("img") == 1, "only the explorer's own"
    assert text.count("</script>") == 2
    assert text.count("<main>") == 1, "a name that looks like a placeholder is not one"


def test_gain_is_paired_by_seed_and_run(tmp_path):
    base = [100.0, 300.0, 200.0, 400.0]
    rows = [result("none", base), result("none", [1.0, 2.0], seed=1), result("refplan", [b + 10 for b in base])]
    entries = found_in(tmp_path, *rows, result("loop", base[::-1], settings='{"run": "other"}'))
    (gain,) = find_gains(entries)  # LOOP's run has no prior beside it
    points = 100 / (HOPPER.references.high - HOPPER.references.low)
    assert gain.entry.planner == "refplan" and gain.verdict == "helped"
    assert gain.change == pytest.approx((10 * points,) * 3), "pairs differ by exactly ten: nothing is uncertain"
    assert gain.basis == "over 4 paired episodes"


def test_interval_of_a_gain_is_over_runs_when_there_are_three(tmp_path):
    rows = []
    for seed, gained in enumerate((10.0, 20.0, 60.0)):
        rows += [result("none", [100.0, 200.0], seed=seed, settings="{}")]
        rows += [result("loop", [100.0 + gained, 200.0 + gained], seed=seed, settings="{}")]
    (gain,) = find_gains(found_in(tmp_path, *rows))
    points = 100 / (HOPPER.references.high - HOPPER.references.low)
    expected = mean_interval(points * np.array([10.0, 20.0, 60.0]))
    assert gain.change == pytest.approx(tuple(expected)) and gain.basis == "over 3 runs"


def test_the_same_evaluation_twice_is_no_new_evidence(tmp_path):
    entries = found_in(tmp_path, result("none", [1.0, 5.0]), result("none", [2.0, 6.0]))
    assert len(entries) == 1 and len(entries[0].rows) == 1
    assert entries[0].rows[0].earned == 4.0, "the later one counts"


def test_rows_of_older_files_have_no_returns(tmp_path):
    rows = [result("none", [100.0, 200.0], returns=""), result("loop", [300.0, 400.0], returns="")]
    (gain,) = find_gains(found_in(tmp_path, *rows))
    assert gain.basis == "from the two intervals" and gain.verdict == "helped"
    width = rows[0]["score_hi"] - rows[0]["score_lo"]
    assert gain.change.high - gain.change.low == pytest.approx(np.sqrt(2) * width)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ([150.0, 260.0, 171.0], "Planning helped: RefPlan scores"),
        ([50.0, 160.0, 71.0], "Planning made it worse"),
        ([50.0, 260.0, 110.0], "No clear gain from planning"),
    ],
)
def test_headline(planned, said, tmp_path):
    entries = found_in(tmp_path, result("none", [100.0, 200.0, 120.0]), result("refplan", planned))
    assert headline(entries, find_gains(entries)).startswith(said)


def test_headline_without_a_comparison(tmp_path):
    assert "Nothing has been evaluated" in headline([], [])
    entries = found_in(tmp_path, result("none", [100.0]))
    assert "No planner has been evaluated yet; cql alone reaches a score" in headline(entries, [])
    entries = found_in(tmp_path, result("loop", [100.0], settings='{"run": "y"}'))
    assert "No prior alone was evaluated" in headline([e for e in entries if e.planner == "loop"], [])
    entries = found_in(tmp_path, result("loop", [130.0]))
    assert "too few episodes to say" in headline(entries, find_gains(entries))


def test_headline_does_not_pick_the_best_setting(tmp_path):
    rows = [result("none", [100.0, 200.0])]
    for kappa, gained in ((1, 5.0), (9, 500.0)):
        settings = json.dumps({"run": "x", "kappa": kappa})
        rows.append(result("loop", [100.0 + gained, 200.0 + gained], settings=settings))
    rows += [
        result("none", [10.0, 20.0], seed=1),
        result("loop", [9.0, 20.0], seed=1, settings='{"run":"x","kappa":1}'),
    ]
    entries = found_in(tmp_path, *rows)
    gains = find_gains(entries)
    assert len(gains) == 2 and "One of 2 settings tried" in headline(entries, gains)
    assert level(max(gain.after for gain in gains)) not in headline(entries, gains)
    elsewhere = found_in(tmp_path, result("none", [1.0], world="walker2d"), result("loop", [9.0], world="walker2d"))
    assert "over 2 combinations" in headline(elsewhere, find_gains(elsewhere))


def test_recorded_reasons_are_those_of_the_evaluation(recording):
    arrays = recording.arrays
    steps = len(arrays["rewards"])
    trace = evaluate(reports.refplan(), HOPPER, 2, key=jr.key(0), trace=True, show=False).trace
    assert steps == trace.live[:, 0].sum()
    np.testing.assert_array_equal(arrays["actions"], trace.actions[:steps, 0])
    np.testing.assert_allclose(arrays["rewards"], trace.rewards[:steps, 0])
    assert arrays["proposals"].shape == (steps, 12, 3) and arrays["belief_mean"].shape == (steps, 2)
    # The reasons are the decision's own: weighing the recorded proposals gives the executed action.
    weights = arrays["weights"].astype(np.float32)
    mixed = np.einsum("tp,tpa->ta", weights, arrays["proposals"].astype(np.float32))
    np.testing.assert_allclose(mixed, arrays["actions"], atol=5e-3)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=5e-3)
    assert not arrays["fallback"].any() and (arrays["best"] >= arrays["mean"]).all()
    assert recording.about["discount"] == pytest.approx(0.99) and recording.about["no_pictures"]


def test_watching_changes_nothing():
    plain = evaluate(reports.linear_prior(), HOPPER, 2, key=jr.key(3), show=False)
    watched = evaluate(
        reports.linear_prior(), HOPPER, 2, key=jr.key(3), show=False, watcher=Recorder(20, pictures=False)
    )
    np.testing.assert_array_equal(plain.returns, watched.returns)


def test_agents_without_a_belief_or_without_plans(tmp_path):
    one = payload("critic", load_recording(record(reports.critic(), tmp_path / "critic.npz", planner="critic")))
    assert one["plans"] == 12 and one["beliefMean"] is None and one["path"] is None and one["effective"]
    path = record(reports.linear_prior(), tmp_path / "prior.npz", planner="none")
    other = payload("prior", load_recording(path))
    assert other["plans"] == 0 and other["proposals"] is None and other["toGo"] is None
    assert other["value"], "its critic is shown"
    assert other["low"] and other["title"] == "linear alone in hopper, seed 0"
    json.dumps([one, other], allow_nan=False)


def test_pictures_are_kept_or_their_absence_explained(tmp_path, monkeypatch):
    from refplan.data.simulate import BatchSimulator

    drawn = np.zeros((12, 16, 3), np.uint8)
    monkeypatch.setattr(BatchSimulator, "frame", lambda self, episode: drawn)
    recorder = Recorder(horizon=4 * MOST_PICTURES)
    evaluate(reports.linear_prior(), HOPPER, 1, key=jr.key(0), show=False, watcher=recorder)
    found = load_recording(recorder.save(tmp_path / "with.npz"))
    assert found.picture_steps == list(range(0, len(found.arrays["rewards"]), 4)) and recorder.every == 4
    shown = payload("with", found)
    assert len(shown["pictures"]) == len(found.picture_steps)
    assert base64.b64decode(shown["pictures"][0])[8:12] == b"WEBP"

    def broken(self, episode):
        raise RefplanError("no OpenGL here")

    monkeypatch.setattr(BatchSimulator, "frame", broken)
    found = load_recording(record(reports.linear_prior(), tmp_path / "without.npz", pictures=True))
    assert found.pictures == [] and payload("x", found)["noPictures"] == "no OpenGL here"


def test_recordings_that_cannot_be_read(whole, tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros(3))
    assert not is_recording(tmp_path / "data.npz") and not is_recording(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no zip")
    assert not is_recording(tmp_path / "text.npz") and is_recording(whole / "episodes" / "prior.npz")
    for name in ("data.npz", "text.npz", "none.npz"):
        with pytest.raises(RefplanError, match="record it again"):
            load_recording(tmp_path / name)
    with pytest.raises(RefplanError, match="no step was recorded"):
        Recorder(10).save(tmp_path / "empty.npz")


def test_where_a_recording_goes(tmp_path):
    assert recording_path("a/b.npz", "loop") == recording_path("a/b.npz")
    assert (
        recording_path(tmp_path, "loop", "my world/1").relative_to(tmp_path).as_posix()
        == "episodes/loop-my_world_1.npz"
    )


def test_only_the_heaviest_plans_are_kept():
    agent = reports.critic(plans=150)
    reasons = find_reasons(agent, agent.start(), np.zeros(11, np.float32), jr.key(0))
    assert reasons.proposals.shape == (100, 3)
    assert (np.diff(reasons.weights) <= 0).all()


def test_realised_return_is_unknown_where_the_recording_ends():
    rewards = np.ones(300, np.float32)
    open_end = realised(rewards, {"discount": 0.9})
    assert np.isnan(open_end[-1]) and open_end[0] == pytest.approx(10.0)
    assert realised(rewards, {"discount": 0.9, "terminated": True})[-1] == 1.0
    assert realised(rewards, {}).size == 0


def test_principal_components_carry_the_movement():
    rng = np.random.default_rng(0)
    path = rng.normal(size=(50, 2)) * (3.0, 1.0)
    means = path @ np.linalg.qr(rng.normal(size=(5, 5)))[0][:2] + 7.0
    found, shares = principal_components(means.astype(np.float32))
    assert sum(shares) == pytest.approx(1.0, abs=1e-5) and shares[0] > 0.8
    distances = np.linalg.norm(means[:, None] - means, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found, axis=-1), distances, atol=1e-4)
    assert principal_components(np.zeros((5, 0)))[0].size == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12346"), (-0.25, "\N{MINUS SIGN}0.25"), (1.5e7, "1.5e7"), (2e-5, "2e\N{MINUS SIGN}5")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
    assert number(float("nan")) == number(None) == "\N{EN DASH}"


def test_charts_survive_odd_numbers():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert bounds([np.array([np.nan])]) == (0.0, 1.0)
    assert bounds([np.array([3.0, 3.0])])[0] < 3 < bounds([np.array([3.0, 3.0])])[1]
    y = np.array([1.0, np.nan, np.inf, 2.0, 3.0])
    chart = line_chart("t", [Line("a", np.arange(5.0), y), Line("b", np.array([2.0]), np.array([1.0]))], "x")
    assert chart.count("M", chart.index('data-name="a"'), chart.index("</path>") if "</path>" in chart else None) >= 2
    assert "nan" not in chart and "inf" not in chart


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("refplan.data.tasks.HORIZON", 5)
    place = tmp_path / "runs"
    words = [
        "evaluate",
        "hopper-medium",
        "--episodes",
        "2",
        "--out",
        str(place / "results.csv"),
        "--record",
        str(place),
    ]
    assert main(words) == 0
    assert "recorded the first episode" in capsys.readouterr().err
    (path,) = (place / "episodes").glob("*.npz")
    assert path.name == "prior-hopper-seed0.npz"
    assert main(["report", str(place), "--out", str(tmp_path / "r.html"), "--title", "Mine"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "r.html")
    text, _ = checked(tmp_path / "r.html")
    assert "<h1>Mine</h1>" in text and "hopper-medium alone in hopper, seed 0" in text
    assert main(["report", str(tmp_path / "nowhere")]) == 2
