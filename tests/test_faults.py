"""The fault drill in short, and what it stands on: guard, dump, crash, the best checkpoint."""

from __future__ import annotations

import functools
import json
import random
import signal
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tests.drill import __main__ as drill
from tests.drill import disk, files, fuzz, poison, saves, soak
from tests.drill.base import SMALL, Settings, listed

from jaxtd3.agent import td3
from jaxtd3.agent.critics import CRITICS, c51_loss
from jaxtd3.agent.td3 import FAULTS, fast_td3
from jaxtd3.cli import flags
from jaxtd3.cli import main as cli
from jaxtd3.config.config import config_from_dict
from jaxtd3.config.sections import AgentConfig
from jaxtd3.core.types import Batch, EnvSpec, Health
from jaxtd3.envs.registry import preset
from jaxtd3.errors import UserError
from jaxtd3.run import artifacts, nonfinite
from jaxtd3.run import session as trainer
from jaxtd3.run.checkpoint import CheckpointStore, read_meta, state_sha256
from jaxtd3.run.load import best_checkpoint
from jaxtd3.run.program import build
from jaxtd3.run.progress import Plain, Quiet
from jaxtd3.run.session import Options, Session

LIMIT = 4
SPEC = EnvSpec("toy", obs_size=3, action_size=2, episode_length=10)
AGENT = AgentConfig(actor_hidden=8, critic_hidden=8, num_atoms=5, max_bad_updates=LIMIT)


# --- the drill in short -------------------------------------------------------------------------


# Short tests of most of this: below, in test_checkpoint.py, test_env.py and test_native.py.
@pytest.mark.slow
@pytest.mark.parametrize("part", ["kills", "bits", "nan", "fuzz", "disk", "phases"])
def test_drill_in_short(part, tmp_path, monkeypatch, bare_ends):
    monkeypatch.setattr(saves, "ITERATIONS", 300)
    monkeypatch.setattr(files, "COMMANDS", 1)
    monkeypatch.setattr(fuzz, "BY_COMMAND", 1)
    monkeypatch.setitem(disk.SIZE, "iterations", 1500)
    settings = Settings(kills=1, flips=24, truncations=12, fuzz=60)
    rows = list(drill.run_part(part, settings, tmp_path))
    assert rows
    assert [row for row in rows if not row["ok"]] == []


def test_drill_command(tmp_path, capsys, monkeypatch):
    """A line that fails, or a part that breaks, gives exit code 1; a part nobody knows, 2."""
    good, bad = soak.Line("x", True, "a"), soak.Line("y", False, "b")

    def broken(_):
        yield good
        raise RuntimeError("oh")

    for name, function, code, count in (
        ("good", lambda _: iter([good]), 0, 1),
        ("bad", lambda _: iter([good, bad]), 1, 2),
        ("broken", broken, 1, 2),
    ):
        monkeypatch.setattr(soak, name, function, raising=False)
        monkeypatch.setitem(drill.PARTS, name, f"tests.drill.soak:{name}")
        assert drill.main(["--only", name, "--out", str(tmp_path)]) == code
        assert len(json.loads((tmp_path / "faults.json").read_text())) == count
    assert "RuntimeError: oh" in capsys.readouterr().out
    assert drill.main(["--only", "kils"]) == 2
    assert "did you mean 'kills'" in capsys.readouterr().err


def rows_of(rates, compiled=None):
    count = len(rates)
    compiled = compiled or [9.0] * count
    return [
        {"seconds": i + 1.0, "time/iterations_per_second": r, "compile_seconds": c}
        for i, (r, c) in enumerate(zip(rates, compiled, strict=True))
    ]


@pytest.mark.parametrize(
    ("fails", "sizes", "rates", "compiled"),
    [
        (set(), [1000 + i % 20 for i in range(100)], [50.0] * 100, None),
        (set(), [1000 + 900 * (i % 10 == 0) for i in range(100)], [50.0] * 100, None),
        ({1}, [1000 + 2 * i for i in range(100)], [50.0] * 100, None),
        ({2}, [1000] * 100, [50 - i / 10 for i in range(100)], None),
        ({3}, [1000] * 100, [50.0] * 100, [9.0] * 60 + [9.5] * 40),
        (set(), [100 + i * 20 for i in range(15)] + [1000] * 85, [1.0] * 15 + [50.0] * 85, None),
    ],
    ids=["flat", "saves", "a leak", "slower and slower", "traced again", "a warm-up"],
)
def test_soak_is_judged(fails, sizes, rates, compiled):
    samples = [(i + 1.0, size) for i, size in enumerate(sizes)]
    lines = list(soak.verdicts(0, 100.0, samples, rows_of(rates, compiled)))
    assert {i for i, line in enumerate(lines) if not line.ok} == fails
    assert not next(soak.verdicts(1, 100.0, samples, rows_of(rates))).ok


def test_a_soak_that_never_begins_is_killed(tmp_path, monkeypatch):
    plain, started = subprocess.Popen, []

    def sleeps(words, **options):
        started.append(plain([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(soak.subprocess, "Popen", sleeps)
    monkeypatch.setattr(soak, "START_LIMIT", 0.5)
    lines = list(soak.soak(drill.Drill(Settings(soak=9.0), tmp_path, "soak", random.Random(0))))
    assert started[0].poll() == -signal.SIGKILL
    assert [line.ok for line in lines] == [False]
    assert "no metrics after" in lines[0].found


def test_mutants_differ_and_repeat():
    data = json.dumps(preset("Pendulum", profile="cpu").to_dict()).encode()
    for level in fuzz.LEVELS:
        mutants = {level(data, random.Random(i)) for i in range(50)}
        assert len(mutants - {data}) > 40
        assert level(data, random.Random(1)) == level(data, random.Random(1))


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"iterations": 10**30}},
        {"run": {"seed": 2**64}},
        {"env": {"num_envs": 10**15}},
        {"replay": {"length": 2**40}},
        {"agent": {"actor_hidden": 10**12}},
        {"agent": {"critic_lr": 1e308}},
        {"agent": {"max_bad_updates": 10**10}},
    ],
    ids=str,
)
def test_sizes_are_bounded_before_anything_is_made(change):
    with pytest.raises(UserError):
        config_from_dict(change)
    (section,) = change
    with pytest.raises(UserError):
        preset("Pendulum", profile="cpu").override(change[section])


# --- the guard ----------------------------------------------------------------------------------


def batch(reward: float = 1.0, weight: float = 1.0) -> Batch:
    ones = jnp.ones(6)
    return Batch(
        obs=jnp.ones((6, 3)),
        action=jnp.zeros((6, 2)),
        reward=reward * ones,
        discount=0.9 * ones,
        next_obs=jnp.ones((6, 3)),
        weight=weight * ones,
    )


def sick_loss(loss):
    return lambda *args: poison.sick_gradient(loss(*args), jnp.ones((), bool))


@functools.cache
def updates(**losses):
    """update(state, reward=1.0, weight=1.0) -> the state after it."""
    agent = fast_td3(SPEC, AGENT, **losses)
    update = jax.jit(partial(agent.update, policy=True))
    return lambda state, **more: update(state, batch(**more), jax.random.key(1))[0]


CASES = {
    "critic_loss": {"reward": jnp.nan},
    "critic_grad_norm": {"critic": CRITICS["c51"].with_loss(sick_loss(c51_loss))},
    "critic_params": {"critic_lr": jnp.inf},
    "actor_loss": {"actor_loss": lambda *_: jnp.full((), jnp.nan)},
    "actor_grad_norm": {"actor_loss": sick_loss(td3.actor_loss)},
    "actor_params": {"actor_lr": jnp.inf},
}


@pytest.mark.parametrize("metric", FAULTS)
def test_whatever_is_not_finite_is_refused_and_named(metric):
    cause = CASES[metric]
    losses = {k: v for k, v in cause.items() if k in ("critic", "actor_loss")}
    state = fast_td3(SPEC, AGENT, **losses).init(jax.random.key(0))
    rates = {k: jnp.float32(v) for k, v in cause.items() if k.endswith("_lr")}
    state = state.replace(hyper=state.hyper._replace(**rates))
    new = updates(**losses)(state, reward=cause.get("reward", 1.0))
    assert FAULTS[int(new.bad_metric)] == metric
    network = metric.split("_")[0]
    net = nonfinite.NETWORKS.index(network)
    assert int(new.skipped) == int(new.bad_streak[net]) == 1
    assert int(new.bad_streak[1 - net]) == 0
    assert state_sha256(getattr(new, network)) == state_sha256(getattr(state, network))
    other = "actor" if network == "critic" else "critic"
    assert state_sha256(getattr(new, other)) != state_sha256(getattr(state, other))
    assert nonfinite.not_finite(new.replace(hyper=())) == []


def test_a_streak_ends_with_a_good_update_unless_it_reached_the_limit():
    start, update = fast_td3(SPEC, AGENT).init(jax.random.key(0)), updates()

    def after(*rewards):
        state = start
        for reward in rewards:
            state = update(state, reward=reward)
        return int(state.bad_streak[0]), int(state.skipped)

    bad = float("nan")
    assert after(1.0) == (0, 0)
    assert after(bad, bad, 1.0) == (0, 2)
    assert after(bad, 1.0, bad) == (1, 2)
    assert after(*[bad] * LIMIT, 1.0) == (LIMIT, LIMIT)
    assert int(update(start, reward=bad, weight=0.0).skipped) == 0


@pytest.mark.parametrize(
    ("streak", "metric", "said"),
    [
        ([3, 3], 0, None),
        ([4, 0], 2, "critic_params not finite: 4 critic updates in a row skipped"),
        ([0, 9], 4, "actor_grad_norm not finite: 9 actor updates in a row skipped"),
    ],
)
def test_a_streak_in_words(streak, metric, said):
    assert nonfinite.reached(Health(9, jnp.array(streak), metric), LIMIT) == said


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
    changes = {"iterations": 40, "eval_every": 10, "checkpoint_every": 40, "max_bad_updates": 8}
    return build(preset("Pendulum", profile="cpu", **(SMALL | changes)))


@pytest.fixture(scope="module")
def program(parts, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "first"
    return Session(parts, run_dir, Options(video=False), Quiet()).compile()


@pytest.fixture
def session(parts, program, tmp_path, bare_ends):
    """A run whose evaluations return what the test says."""

    def make(returns=(1.0, 2.0, 3.0, 4.0), ui=None, evaluate_robust=None, **changes) -> Session:
        scores = iter((0.0, *returns))  # first the weights it began with
        own = parts._replace(
            config=parts.config.override(changes),
            evaluate=lambda *_: {"return": next(scores), "length": 1.0},
        )
        session = Session(
            own, tmp_path / "run", Options(video=False), ui or Quiet(), evaluate_robust
        )
        session.compile = lambda: program
        return session

    return make


def test_a_run_that_has_nothing_to_learn_from_stops(session):
    """A NaN policy makes every step NaN: that is said, not called completed."""
    run = session()
    first = run.program.fns.init

    def poisoned(key):
        state = first(key)
        actor = jax.tree.map(lambda x: x * jnp.nan, state.agent.actor)
        return state.replace(agent=state.agent.replace(actor=actor))

    run.program = run.program._replace(fns=run.program.fns._replace(init=poisoned))
    summary = run.run()
    assert summary["status"] == "failed"
    assert "not one of" in summary["error"]
    assert summary["iterations"] == run.config.run.log_every


@pytest.mark.parametrize(
    ("returns", "every", "kept"),
    [
        ((1.0, 5.0, 2.0, 3.0), 40, [20, 40]),
        ((5.0, 1.0, 2.0, 3.0), 40, [10, 40]),
        ((5.0, float("nan"), 4.0, 3.0), 40, [10, 40]),
        ((5.0, 2.0, 1.0, 3.0), 20, [10, 20, 40]),
        ((1.0, 5.0, 2.0, 3.0), 0, [40]),
    ],
)
def test_the_best_is_kept_though_it_fell_between_two_saves(session, tmp_path, returns, every, kept):
    session(returns, checkpoint_every=every).run()
    found = listed(CheckpointStore(tmp_path / "run"))
    assert [info.iteration for info in reversed(found)] == kept
    best = max(found, key=lambda info: info.best or -1.0)
    if every:
        assert best.best == 5.0
    assert read_meta(best.path)["env_steps"] == best.iteration * SMALL["num_envs"]


@pytest.mark.parametrize(
    ("first", "pause", "every", "made"),
    [
        (1e9, 20, 0, ["report"]),  # at the end alone
        (0.0, 0, 0, ["report"] * 4),  # after each evaluation
        (0.0, 1e9, 0, ["report"] * 2),
        (1e9, 1e9, 15, ["film", "report", "report"]),  # every whole chunks: after 20 of 40
    ],
)
def test_a_run_can_be_watched(session, monkeypatch, first, pause, every, made):
    found = []
    monkeypatch.setattr(trainer, "FIRST_REPORT", first)
    monkeypatch.setattr(trainer, "REPORT_PAUSE", pause)
    monkeypatch.setattr(artifacts, "make_report", lambda run_dir: found.append("report"))
    monkeypatch.setattr(artifacts, "make_video", lambda session, state: found.append("film"))
    run = session()
    run.options = Options(video=False, video_every=every)
    run.run()
    assert found == made


def scores_of(*scores):
    said = iter(scores)
    return lambda agent: {"score": (x := next(said)), "survival": x, "tracking_error": 1 - x}


def test_the_best_is_what_is_most_robust(session, tmp_path):
    """Returns rise all the time; the robust checkpoint is an early one, after a resume too."""
    run = session(evaluate_robust=scores_of(0.0, 0.2, 0.9, 0.3, 0.4), best="robust")
    run.run()
    again = session((5.0, 6.0), evaluate_robust=scores_of(0.8, 0.7), best="robust", iterations=60)
    again.options = Options(video=False, resume=True)
    again.run()
    assert [row["eval/robust_score"] for row in again.rows] == [0.2, 0.9, 0.3, 0.4, 0.8, 0.7]
    best = best_checkpoint(tmp_path / "run")
    assert int(best.name) == 20
    meta = read_meta(best)
    assert (meta["best"], meta["robustness"]["survival"]) == (0.9, 0.9)


@pytest.mark.parametrize(
    ("words", "token"),
    [
        (["--checkpoint-replay", "off"], "--no-checkpoint-replay"),
        (["--checkpoint-replay", "on"], "--checkpoint-replay"),
        (["--checkpoint-replay=off"], "--no-checkpoint-replay"),
        (["--no-checkpoint-replay"], "--no-checkpoint-replay"),
    ],
)
def test_replay_in_checkpoints_is_on_or_off(words, token):
    known = {"checkpoint_replay"}
    assert flags.canonical(words, known, known) == ([token], ["checkpoint_replay"])


def test_sizes_are_told_once(session, capsys):
    session(ui=Plain(), checkpoint_every=10).run()
    assert capsys.readouterr().out.count("each checkpoint takes") == 1


def test_what_nobody_expected_leaves_a_summary(session, program, tmp_path):
    calls = []

    def breaks(state):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the cat\nsat on it")
        return program(state)

    broken = session(checkpoint_every=10)
    broken.compile = lambda: breaks
    found = broken.run()
    assert found == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (found["status"], found["iterations"], found["state_sha256"]) == ("failed", 20, None)
    assert found["error"].startswith("RuntimeError: the cat sat on it (see crash.txt); last good")
    assert found["error"].endswith("000000020")
    assert "in breaks" in (tmp_path / "run" / "crash.txt").read_text()
    again = session(returns=(3.0, 4.0))
    again.options = Options(video=False, resume=True)
    assert again.run()["status"] == "completed"


def test_a_crash_ends_the_command_with_one_line(tmp_path, monkeypatch, capsys, bare_ends):
    def broken(*_):
        raise RuntimeError("oh")

    monkeypatch.setattr(trainer.Session, "loop", broken)
    words = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    words = ["train", "--env", "Pendulum", "--profile", "cpu", *words, "--iterations=40"]
    assert cli.main([*words, "--quiet", "--run-dir", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jaxtd3: error: RuntimeError: oh")
    assert said.count("\n") == 1
    assert "Traceback" not in said


def test_a_fault_is_dumped_and_replayed(session, parts, tmp_path, capsys):
    """NaN weights from the start: the run stops, and the dump names them."""
    sick = session()
    init = parts.fns.init

    def poisoned(key):
        state = init(key)
        critic = jax.tree.map(lambda x: x * jnp.nan, state.agent.critic)
        return state.replace(agent=state.agent.replace(critic=critic))

    sick.program = sick.program._replace(fns=sick.program.fns._replace(init=poisoned))
    found = sick.run()
    assert found["status"] == "failed"
    assert "critic_loss not finite: " in found["error"]
    assert "no checkpoint yet" in found["error"]
    assert str(tmp_path / "run" / "fault") in found["error"]
    assert cli.main(["doctor", "--fault", str(tmp_path / "run" / "fault")]) == 0
    said = capsys.readouterr().out
    assert "critic_loss was the first that was not finite, in critic update 1 of 2" in said
    assert "not finite before it: agent.critic." in said
    # From the seed nothing is wrong: whatever it was came from outside.
    words = ["doctor", "--fault", str(tmp_path / "run" / "fault"), "--from-checkpoint"]
    assert cli.main(words) == 1
    assert "did not come back" in capsys.readouterr().out


def test_doctor_refuses_what_is_no_dump(tmp_path, capsys):
    assert cli.main(["doctor", "--fault", str(tmp_path)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_the_reset_pool_is_refreshed_before_every_chunk_but_the_first(session, parts):
    keys, pools = [], set()

    def refresh(state, key):
        keys.append(state_sha256(key))
        state = parts.env.refresh(state, key)
        pools.add(state_sha256(state.pool))
        return state

    watched = session()
    watched.program = watched.program._replace(env=parts.env._replace(refresh=refresh))
    found = watched.run()
    assert len(keys) == len(set(keys)) == len(pools) == 3

    still = session()
    still.run_dir = still.run_dir.with_name("still")
    still.program = still.program._replace(env=parts.env._replace(refresh=lambda state, key: state))
    assert still.run()["state_sha256"] != found["state_sha256"]  # it matters


def test_a_full_disk_under_the_log_does_not_stop_a_run(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    Plain().note("hello")
    Plain().note("hello again")
    with pytest.raises(OSError, match="No space left"):  # so it was
        full.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(number):
    code = """
        import time
        from jaxtd3.run.signals import StopSignals
        with StopSignals(lambda text: print(text, flush=True)) as stop:
            print("ready", flush=True)
            while True:
                time.sleep(0.01)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert "once more to stop at once" in process.stdout.readline()
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=10) == 128 + number
