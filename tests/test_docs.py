"""The docs are true: every Python block and every `refplan` command of the README and docs/ runs.

The blocks of a page run in the order they are read, in one namespace and one temporary folder, after `SMALLER` has
shrunk their numbers; the robots' episodes last `HORIZON` steps. A command must exit with 0, or with what an `$ echo $?`
below it says. Its printed output is only compared under `<!-- output checked -->`; there a line `...` stands for any
lines, and nothing is shrunk but the options.
"""

import argparse
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import refplan
from refplan.cli import build_parser, main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
CHECKED = "<!-- output checked -->"
BLOCK = re.compile(rf"(?P<checked>{CHECKED}\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
# Numbers of the docs -> numbers of a test. Python keywords first, then command-line options.
SMALLER = (
    (r"\bsteps=[\d_]+", "steps=2"),
    (r"\bepisodes=\d+", "episodes=2"),
    (r"\bhidden=\(256, 256\)", "hidden=(16, 16)"),
    (r"\bcritics=10", "critics=2"),
    (r"\bstarts=\d+", "starts=20"),
    (r"--episodes \d+", "--episodes 2"),
    (r"--steps \d+", "--steps 96"),
    (r"decoder_epochs=\d+", "decoder_epochs=1"),
    (r"--warmup \d+", "--warmup 48"),
    (r"--snapshot-every \d+", "--snapshot-every 48"),
    (r"--rows \d+", "--rows 200"),
    (r"--segments \d+", "--segments 8"),
    (r"--critic-steps \d+", "--critic-steps 2"),
    (r"--set epochs=\d+", "--set epochs=1"),
    (r"rp\.(IQL|BC)\(\)", r"rp.\1(hidden=(16, 16))"),
    (r"rp\.EDAC\(\)", "rp.EDAC(sac=rp.SAC(hidden=(16, 16)))"),
    (r"rp\.Ensemble\(\)", "rp.Ensemble(members=2, elites=2, hidden=(16, 16))"),
    (r"rp\.Ensemble\(members=3, elites=2\)", "rp.Ensemble(members=3, elites=2, hidden=(16, 16))"),
)
# Settings of what `refplan fit` and `refplan run` train, where the page itself does not give them.
SMALL_SAC = {"hidden": "16,16", "batch_size": "32"}
SMALL_SETTINGS = {
    "bc": {"hidden": "16,16"},
    "iql": {"hidden": "16,16"},
    "cql": {f"sac.{name}": value for name, value in SMALL_SAC.items()},
    "edac": {f"sac.{name}": value for name, value in SMALL_SAC.items()},
    "mopo": {**{f"sac.{name}": value for name, value in SMALL_SAC.items()}, "imagined.starts": "20"},
    "combo": {**{f"cql.sac.{name}": value for name, value in SMALL_SAC.items()}, "imagined.starts": "20"},
    "maple": {**{f"sac.{name}": value for name, value in SMALL_SAC.items()}, "imagined.starts": "20", "memory": "16"},
    "ensemble": {"members": "2", "elites": "2", "hidden": "16,16"},
    "belief": {"members": "2", "elites": "2", "hidden": "16,16", "memory": "16", "lanes": "8", "length": "10"},
}
HORIZON = 60


class Block(NamedTuple):
    page: Path
    kind: str
    body: str
    checked: bool
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, m["kind"], m["body"], m["checked"] is not None, text[: m.start("body")].count("\n"))
        for m in BLOCK.finditer(text)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def smaller(text: str) -> str:
    for pattern, small in SMALLER:
        text = re.sub(pattern, small, text)
    return text


def with_small_settings(words: list[str]) -> list[str]:
    """A training command with `SMALL_SETTINGS`, but for those the page sets itself."""
    said = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
    if words[0] == "fit":
        trained = {"--set": said.get("--method", "iql") if words[1] == "prior" else said.get("--model", "ensemble")}
    elif words[0] == "run":
        plans = {"loop", "mppi", "refplan"} & set(said.get("--planners", "loop").split(","))
        trained = {} if "--policy" in said else {"--set-prior": said.get("--prior", "iql")}
        trained |= {"--set-model": "ensemble"} if plans else {}
    else:
        return words
    added = []
    for option, thing in trained.items():
        given = {pair.split("=")[0] for at, pair in enumerate(words) if words[at - 1] == option}
        small = {name: value for name, value in SMALL_SETTINGS.get(thing, {}).items() if name not in given}
        added += [word for name, value in small.items() for word in (option, f"{name}={value}")]
    return [*words, *added]


RUNNABLE = [page for page in PAGES if any(b.kind in ("python", "console") for b in blocks_of(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The command line sets these for its own process; here they must not outlive the test.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if page.name == "policy.md":
        lay_out_policies(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        with monkeypatch.context() as patch:
            if not block.checked:
                patch.setattr("refplan.data.tasks.HORIZON", HORIZON)
            if block.kind == "python":
                run_python(block, namespace)
            elif block.kind == "console":
                run_console(block, capsys)


def run_python(block: Block, namespace: dict[str, object]) -> None:
    # Blank lines before the code make a traceback point at the page's own line.
    exec(compile("\n" * block.line + smaller(block.body), str(block.page), "exec"), namespace)


def run_console(block: Block, capsys) -> None:
    commands = commands_of(block.body)
    for number, (command, shown) in enumerate(commands):
        if not command.startswith("refplan "):
            assert command == "echo $?", f"{name_of(block.page)}: the docs' test cannot run '{command}'"
            continue
        following = commands[number + 1] if number + 1 < len(commands) else None
        expected = int(following[1][0]) if following and following[0] == "echo $?" else 0
        capsys.readouterr()
        code = main(with_small_settings(shlex.split(smaller(command))[1:]))
        said = capsys.readouterr()
        assert code == expected, f"{name_of(block.page)}: '{command}' ended with {code}\n{said.out}{said.err}"
        if block.checked:
            assert_shown(shown, said.out, f"{name_of(block.page)}: {command}")


def commands_of(body: str) -> list[tuple[str, list[str]]]:
    """Each `$ command` with the lines printed below it."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"a console block begins with '{line}' instead of a command"
            found[-1][1].append(line)
    return found


def assert_shown(shown: list[str], said: str, where: str) -> None:
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else rf"{re.escape(line.rstrip())}\n" for line in shown)
    said = "".join(f"{line.rstrip()}\n" for line in said.splitlines())
    assert re.fullmatch(pattern, said), f"{where}\nthe docs show:\n" + "\n".join(shown) + f"\nit printed:\n{said}"


def lay_out_policies(folder: Path) -> None:
    """The files a reader of policy.md brings: policies of real libraries, an ONNX graph, and training data."""
    fixtures = Path(__file__).parent / "fixtures" / "policies"
    for theirs, ours in (("sb3_sac.zip", "sac.zip"), ("d3rlpy_cql.d3", "cql.d3"), ("corl_cql.pt", "checkpoint.pt")):
        shutil.copy(fixtures / theirs, folder / ours)
    rows = np.random.default_rng(0).normal(size=(20, 5))
    flags = {"terminated": np.zeros(20, bool), "truncated": np.arange(20) == 19}
    flags |= {"action_low": [-2.0, -0.5], "action_high": [1.0, 0.75]}  # those of sac.zip
    np.savez(folder / "training_data.npz", observations=rows, actions=np.zeros((20, 2)), rewards=np.zeros(20), **flags)
    write_onnx(folder / "policy.onnx", observation=11, action=3)


def write_onnx(path: Path, observation: int, action: int) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    weight = np.random.default_rng(0).normal(size=(observation, action)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["obs", "w"], ["u"]), helper.make_node("Tanh", ["u"], ["action"])],
        "policy",
        [helper.make_tensor_value_info("obs", onnx.TensorProto.FLOAT, ["batch", observation])],
        [helper.make_tensor_value_info("action", onnx.TensorProto.FLOAT, ["batch", action])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))


def commands_shown(page: Path) -> list[str]:
    """The commands of the blocks that are not executed."""
    lines = [line for block in blocks_of(page) if block.kind in ("", "text") for line in block.body.splitlines()]
    return [line.split("#")[0] for line in lines if re.match(r"refplan [a-z]+ ", line) and "..." not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_shown(page)], ids=name_of)
def test_commands_that_are_only_shown_exist(page):
    for command in commands_shown(page):
        args, unknown = build_parser().parse_known_args(shlex.split(command)[1:])
        assert hasattr(args, "run") and not unknown, f"{name_of(page)}: {command}"


def test_a_wrong_output_is_noticed():
    assert_shown(["a", "...", "d"], "a  \nb\nc\nd\n", "here")
    with pytest.raises(AssertionError, match="the docs show"):
        assert_shown(["a", "x"], "a\nb\n", "here")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them from plain words."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)}: {target} leads nowhere"
        assert not anchor or anchor in anchors_of(linked), f"{name_of(page)}: no heading for {target}"


@pytest.mark.parametrize("name", refplan.__all__)
def test_every_public_name_is_described(name):
    assert re.search(rf"^\| `{name}` \| .+ \|$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def command_names(parser: argparse.ArgumentParser, prefix: str = "refplan") -> list[str]:
    """Every command that can be run, such as `refplan data list`."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return [prefix]
    return [
        n for group in groups for word, inner in group.choices.items() for n in command_names(inner, f"{prefix} {word}")
    ]


@pytest.mark.parametrize("command", command_names(build_parser()))
def test_every_command_is_described(command):
    assert re.search(rf"^\| `{command}` \| .+ \|$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def test_every_method_has_a_page_with_the_same_headings():
    from refplan.dynamics import MODELS
    from refplan.planners import PLANNERS
    from refplan.priors import PRIORS

    wanted = ["Idea", "Equations", "Departures from the paper", "Metrics", "Command", "Numbers"]
    for method in (*PRIORS, *MODELS, *(name for name in PLANNERS if name != "critic")):  # the control is no method
        text = (ROOT / "docs" / "methods" / f"{method}.md").read_text(encoding="utf-8")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == wanted, method


def test_readme_names_the_two_commands_and_stays_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text and "make test" in text
    assert len(text.splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_machine_paths(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.~$}])/(?:home|root|work|tmp|Users|mnt|var|opt)/", text)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
