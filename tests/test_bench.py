"""The bench: counts that are exact, ratios that hold, every limit and peer told in one schema."""

from __future__ import annotations

import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import (
    counts,
    measure,
    operations,
    overhead,
    peers,
    processes,
    races,
    roofline,
    scaling,
    suite,
    table,
)
from benchmarks.programs import Held, full_state, with_fill
from benchmarks.sketch import make_sketch, project, sketch_task

import jaxtd3
from jaxtd3.agent import distributional
from jaxtd3.bench import checkout
from jaxtd3.bench.timing import Task, interleave, spread
from jaxtd3.cli import bench
from jaxtd3.cli import main as cli
from jaxtd3.config.config import Config
from jaxtd3.core.types import EnvSpec
from jaxtd3.errors import UserError
from jaxtd3.loop.chunk import make_chunk
from jaxtd3.run.program import build

SMALL = {
    "num_envs": 32,
    "length": 256,
    "batch_size": 128,
    "critic_hidden": 64,
    "actor_hidden": 32,
    "num_atoms": 21,
    "critic_updates": 2,
    "policy_updates": 1,
}


def make_parts(name="Pendulum", **changes):
    return build(jaxtd3.preset(name, profile="cpu", **{**SMALL, **changes}))


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture(scope="module")
def result(parts):
    return measure.measure(parts, 3, length=5, seconds=0.02, beside=[sketch_task], compiles=1)


# --- the result ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_schema(result):
    assert (*[k for k in result if k != "details"],) == measure.HEADLINES
    for name in measure.HEADLINES:
        value = result[name]
        assert set(value) == {"median", "low", "high"}
        assert 0 <= value["low"] <= value["median"] <= value["high"] < math.inf, name
    assert json.loads(json.dumps(result)) == result


@pytest.mark.slow
def test_the_program_is_traced_once_and_stays_on_the_device(result):
    facts = result["details"]["program"]
    assert result["traces"]["median"] == 1
    assert facts["ring_copies"] == 0
    assert facts["host_transfers"] == 0
    assert facts["aliased_bytes"] >= facts["ring_bytes"]


@pytest.mark.slow
def test_rates_are_those_of_the_times(result):
    rate = 1e3 / result["details"]["milliseconds"]["iteration"]["median"]
    assert result["iterations_per_second"]["median"] == pytest.approx(rate)


@pytest.mark.slow
def test_regression_guard(result):
    """Ratios of times, very generous: a tiny program. For a machine that does nothing else."""
    assert result["details"]["over_sketch"]["high"] > 0.5
    assert result["eta"]["low"] < 1.5  # a limit that is always beaten is not one
    ms = result["details"]["milliseconds"]
    halves = ms["collect"]["low"] + ms["update"]["low"]
    assert ms["iteration"]["low"] < 2 * halves


@pytest.mark.slow
def test_the_table_names_every_headline(result):
    text = "\n".join(measure.lines(result))
    for name in measure.HEADLINES:
        assert name in text


def test_ratios_arithmetic():
    times = {
        "iteration": [10.0, 20.0],
        "collect": [4.0, 8.0],
        "update": [5.0, 10.0],
        "env": [2.0, 4.0],
        "gemms": [3.0, 6.0],
        "memory": [0.5, 1.0],
        "sketch": [20.0, 20.0],
    }
    counts = {"flops": 6e9, "replay_bytes": 1, "param_bytes": 1}
    told = measure.ratios(times, counts, collect_steps=2)
    assert told["eta"] == spread([(2 * 2 + 3 + 1) / 10] * 2)
    assert told["eta_env"]["median"] == 0.5
    assert told["eta_learn"]["median"] == 0.6
    assert told["over_sketch"] == spread([2.0, 1.0])
    assert told["peak_gflops"]["high"] == 2.0


# --- counts -------------------------------------------------------------------------------------


def test_dots_count_the_scans_around_them():
    def program(a, b):
        def body(x, _):
            return jnp.tanh(x @ b @ b.T), None

        return jax.lax.scan(body, a, length=7)[0]

    found = counts.count_dots(jax.make_jaxpr(program)(jnp.ones((4, 5)), jnp.ones((5, 6))).jaxpr)
    assert counts.flops(found) == 7 * 2 * (2 * 4 * 5 * 6)
    batched = jax.make_jaxpr(jax.vmap(jnp.matmul))(jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6)))
    found = counts.count_dots(batched.jaxpr)
    assert counts.flops(found) == 3 * 2 * 4 * 5 * 6
    assert not counts.gemms(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"critic_updates": 2, "policy_updates": 1, "collect_steps": 2},
        {"critic": "scalar", "num_critics": 3},
        {"cdq": False, "n_step": 3},
    ],
)
def test_flops_are_those_by_hand(changes):
    parts = make_parts(**changes)
    traced = counts.flops(counts.learner_dots(parts))
    assert traced == counts.mlp_flops(parts.env.spec, parts.config)


def test_g1_is_fasttd3s_work():
    """FastTD3's own sizes give the FLOPs that were counted for FastTD3."""
    spec = EnvSpec("G1", obs_size=103, extra_size=113, action_size=29, episode_length=1000)
    config = Config().override({"batch_size": 32768})
    assert counts.mlp_flops(spec, config) / 1e9 == pytest.approx(1225, rel=0.05)


def test_bytes(parts):
    spec, config = parts.env.spec, parts.config
    one = 4 * (3 + 1) + 4 + 1 + 2  # obs, action, reward, end, slot
    window = 4 * (2 * 3 + 1) + 4 + 1 + 2
    batch = 4 * (2 * 3 + 1 + 3)
    expected = 32 * one + 2 * 128 * (window + batch)
    assert counts.replay_bytes(spec, config) == expected
    actor = 4 * (3 * 32 + 32 + 32 * 16 + 16 + 16 * 8 + 8 + 8 * 1 + 1)
    critic = 2 * 4 * (4 * 64 + 64 + 64 * 32 + 32 + 32 * 16 + 16 + 16 * 21 + 21)
    agent, loop = parts.shapes.agent, config.loop
    assert counts.param_bytes(agent, loop) == 2 * 10 * critic + 8 * actor
    assert counts.gradient_bytes(agent, loop) == 2 * critic + actor


def test_copies_of_the_ring_are_seen(parts):
    shape = ",".join(map(str, parts.shapes.replay.obs.shape))
    line = f"  %copy.1 = f32[{shape}]{{2,1,0}} copy(%x), metadata={{}}\n"
    assert counts.ring_copies(line * 2, parts.shapes.replay) == 2
    assert counts.ring_copies(line.replace(shape, "3,3"), parts.shapes.replay) == 0
    assert counts.HOST.search('custom_call_target="xla_ffi_python_cpu_callback"')


# --- the ring -----------------------------------------------------------------------------------


def test_an_insert_writes_slabs_in_place(parts):
    text = collecting(parts).lower(parts.shapes).compile().as_text()
    assert counts.ring_copies(text, parts.shapes.replay) == 0
    assert "dynamic-update-slice" in text


@pytest.mark.slow
def test_an_insert_costs_the_same_whatever_the_fill(parts):
    """One program for any fill, and no slower when full. For a machine that does nothing else."""
    chunk = collecting(parts)
    held = Held(full_state(parts))

    def task(slabs):
        def prepare():
            held.state = with_fill(held.state, slabs)

        return Task(str(slabs), lambda: held.through(chunk), 20, prepare)

    length = parts.config.replay.length
    times = interleave([task(2), task(length)], rounds=5, seconds=0.02)
    assert np.median(times[str(length)]) / np.median(times["2"]) < 1.5
    assert chunk._cache_size() == 1


def collecting(parts):
    return make_chunk(parts.fns.collect_step, 20, parts.layout)


def test_a_full_state_is_full_and_learns(parts):
    state = full_state(parts)
    assert int(state.replay.size) == parts.config.replay.length
    assert int(state.iteration) >= parts.config.loop.warmup
    assert float(jnp.abs(state.replay.obs).min()) < float(jnp.abs(state.replay.obs).max())
    few = with_fill(state, 3)
    assert (int(few.replay.size), int(few.replay.head)) == (3, 3)


# --- roofline -----------------------------------------------------------------------------------


def test_roofline_arithmetic():
    config = Config().override({"compute": "bf16", "num_envs": 1000})
    counts = {
        "flops": 312e12 * 0.4 * 2e-3,
        "replay_bytes": 2039e9 * 0.7 * 1e-3,
        "param_bytes": 2039e9 * 0.7 * 1e-3,
        "allreduce_bytes": 300e9 * 1e-3,
    }
    told = roofline.predict(counts, roofline.GPUS["a100"], config)
    assert told["matmul_ms"] == pytest.approx(2)
    assert told["memory_ms"] == pytest.approx(2)
    assert told["physics_ms"] == pytest.approx(60)
    assert told["iteration_ms"] == pytest.approx(64)
    assert told["allreduce_ms"] == pytest.approx(2 * 7 / 8)
    slower = roofline.predict(counts, roofline.GPUS["a100"], config.override({"compute": "f32"}))
    assert slower["matmul_ms"] == pytest.approx(2 * 312 / 19.5)
    assert tuple(roofline.GPUS) == bench.GPU_NAMES


@pytest.mark.slow
def test_lowered_for_cuda():
    """No f32 scatter-add in the learner; `highest` on the environment's dots and nowhere else."""
    parts = make_parts("CartpoleBalance", impl="jax")  # native physics runs on a CPU alone
    found = roofline.roofline(parts, "h100")
    assert found["cuda"]["env_dots"] > 0
    assert found["cuda"]["env_dots_highest"] > 0
    assert found["cuda"]["learner_dots"] > 0
    assert all(found["checks"].values()), found
    text = "\n".join(roofline.lines(found, parts.config))
    assert "PREDICTED" in text
    assert "assumed" in text


def test_a_scatter_add_would_be_seen():
    z = jnp.linspace(0.0, 1.0, 5)
    lowered = jax.jit(jax.vmap(distributional.project_scatter, (None, 0, 0))).trace(
        z, jnp.ones((3, 5)), jnp.ones((3, 5))
    )
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert roofline.SCATTER_ADD.search(text)


# --- the sketch ---------------------------------------------------------------------------------


def test_the_sketch_projects_as_c51_does():
    z = jnp.linspace(-2.0, 2.0, 9)
    p = jax.nn.softmax(jnp.arange(9.0))
    for reward, discount in ((0.3, 0.9), (5.0, 0.9), (-9.0, 0.0)):
        r, d = jnp.float32(reward), jnp.float32(discount)
        moved = distributional.bellman_atoms(z, r, d)
        expected = distributional.project_dense(z, moved, p)
        np.testing.assert_allclose(project(z, p, r, d), expected, atol=1e-6)


@pytest.mark.slow
def test_the_sketch_learns(parts):
    init, step, act = make_sketch(parts.env, parts.config)
    first = init(jax.random.key(0), parts.env.init(jax.random.key(1)))
    state = first
    run = jax.jit(step)
    for _ in range(3):
        state = run(state)
    assert int(state.size) == 3 * 32
    assert int(state.opts["critic"][0].count) == 3 * 2
    assert int(state.opts["actor"][0].count) == 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first.params, state.params)
    assert all(x > 0 for x in jax.tree.leaves(moved))
    assert act(state, state.env.obs).shape == (32, 1)


def test_pytorch_projects_as_we_do():
    torch = pytest.importorskip("torch")
    from benchmarks import torch_eager

    z, p = np.linspace(-2, 2, 9, dtype=np.float32), np.full(9, 1 / 9, np.float32)
    for reward, discount in ((0.3, 0.9), (5.0, 0.9), (-9.0, 0.0)):
        given = (torch.tensor(z), torch.tensor(p)[None], torch.tensor([reward]))
        found = torch_eager.project(*given, torch.tensor([discount]))[0]
        np.testing.assert_allclose(found, project(z, p, reward, discount), atol=1e-6)


def test_pytorch_learns_beside_us(parts):
    pytest.importorskip("torch")
    from benchmarks.torch_eager import Learner

    learner = Learner(parts)
    before = [x.detach().clone() for x in learner.actor.parameters()]
    for _ in range(3):
        learner.iterate()
    assert learner.ring.size == 3
    assert all((a != b).any() for a, b in zip(before, learner.actor.parameters(), strict=True))
    assert all(x.isfinite().all() for x in learner.critics.parameters())


def test_pytorch_knows_fasttd3_alone():
    pytest.importorskip("torch")
    from benchmarks.torch_eager import torch_task

    with pytest.raises(UserError, match="two c51 critics"):
        torch_task(make_parts(num_critics=3), 1)


def test_pytorch_is_asked_for_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--env", "Pendulum", "--torch"]) == 2
    assert "PyTorch is not installed" in capsys.readouterr().err


# --- times, peers, tables -----------------------------------------------------------------------


def test_tasks_take_turns():
    order: list[str] = []
    tasks = [Task(name, lambda name=name: order.append(name)) for name in "ab"]
    times = interleave(tasks, rounds=3, seconds=0.0)
    assert order == list("aabb" + "ab" * 3)
    assert {k: len(v) for k, v in times.items()} == {"a": 3, "b": 3}


def test_exponents():
    assert scaling.exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert scaling.exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0)


def test_a_peer_that_cannot_run_is_named_with_its_error():
    row = peers.attempt(peers.PEERS["brax_sac"].run, "Pendulum", 1)
    assert re.fullmatch(r".*Pendulum.*", row["error"])
    shown = peers.lines({"rates": {"brax_sac": row}, "scaled": peers.SCALED})
    assert any("cannot run" in line and row["error"] in line for line in shown)


def test_playgrounds_settings_are_scaled_as_told():
    ppo = peers.ppo_settings("CheetahRun")
    own = peers.playground_settings("CheetahRun", "ppo")
    assert (ppo["num_envs"], ppo["batch_size"]) == (own["num_envs"] // 8, own["batch_size"] // 8)
    assert (ppo["batch_size"] * ppo["num_minibatches"]) % ppo["num_envs"] == 0
    sac = peers.sac_settings("CheetahRun", "race")
    own = peers.playground_settings("CheetahRun", "sac")
    changed = {k for k in sac if k != "network_factory" and sac[k] != own[k]}
    assert changed == {"max_replay_size"}


def test_what_brax_spent_is_told_apart(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])
    watch = peers.Watch()
    now[0] = 110.0
    watch({"eval/epoch_eval_time": 4.0})  # before the first call there is no training
    now[0] = 130.0
    watch.log.spans += [(111.0, 116.0), (128.0, 129.0)]  # in training, in the evaluation
    watch({"eval/epoch_eval_time": 3.0})
    assert watch.train == pytest.approx(20 - 3 - 5)
    assert watch.evaluate == pytest.approx(4 + 3 - 1)
    assert watch.compile == pytest.approx(6)


def a_row(contender, seed, train, reached=True):
    return {
        "contender": contender,
        "env": "E",
        "goal": 9.0,
        "seed": seed,
        "reached": reached,
        "best": 9.0,
        "train_seconds": train,
        "compile_seconds": 10.0,
        "env_steps": 5,
    }


def test_races_are_summed_up():
    rows = [a_row("ours", 0, 10.0), a_row("ours", 1, 20.0), a_row("sketch", 0, 60.0, False)]
    rows.append({"contender": "brax_sac", "env": "E", "seed": 0, "error": "no"})
    told = races.summarize(rows)
    assert told["ours"]["train_seconds"] == spread([10.0, 20.0])
    assert told["sketch"]["over_ours_train_seconds"] == 4.0
    assert told["sketch"]["over_ours_with_compile"] == 70 / 25
    assert (told["sketch"]["reached"], told["ours"]["reached"]) == (0, 2)
    assert "brax_sac" not in told
    assert "cannot run: no" in races.row_text(rows[-1])


@pytest.mark.slow
def test_the_tables_hold_what_was_found(result, tmp_path):
    rows = [a_row("ours", 0, 10.0), a_row("sketch", 0, 60.0)]
    race = {"env": "E", "goal": 9.0, "rows": rows, "summary": races.summarize(rows)}
    parts = {
        "sizes": {"a": {"command": "jaxtd3 bench", **result}},
        "return": {"E": race},
        "warm": {"command": "jaxtd3 train", "warm_over_cold": 0.2},
    }
    where = {"when": "now", "machine": {"cores": 2, "cpu": "c"}}
    found = {name: {**where, "found": part} for name, part in parts.items()}
    text = table.markdown(found)
    assert "| E to 9 | sketch | 1 of 1 | 60 | 70 | 6 |" in text
    assert "warm_over_cold" in text
    suite.write(tmp_path / "out", found)
    assert json.loads((tmp_path / "out" / "latest.json").read_text()) == found
    assert set(suite.PARTS) == set(table.SECTIONS)


def test_figures_in_bf16_stay_where_the_cpu_has_none(monkeypatch):
    monkeypatch.setattr(suite, "cpu_has_bf16", lambda: True)
    assert suite.chosen("") == list(suite.PARTS)
    monkeypatch.setattr(suite, "cpu_has_bf16", lambda: False)
    assert set(suite.PARTS) - set(suite.chosen("")) == {"bf16"}
    assert suite.chosen("ring,bf16") == ["bf16", "ring"]


def test_races_of_other_days_stay(monkeypatch, tmp_path, capsys):
    def race(env, goal, limit, seeds, contenders, tell):
        rows = [a_row(name, seed, limit) for seed in seeds for name in contenders]
        summary = races.summarize(rows)
        return {"env": env, "goal": goal, "limit": limit, "rows": rows, "summary": summary}

    monkeypatch.setattr(races, "race", race)
    start = ["--only", "return", "--out", str(tmp_path), "--seeds", "1", "--races"]
    assert suite.main([*start, "CheetahRun:600:9,CartpoleBalance:950:8"]) == 0
    assert suite.main([*start, "CheetahRun:700:7"]) == 0
    found = json.loads((tmp_path / "latest.json").read_text())["return"]["found"]
    assert {env: row["limit"] for env, row in found.items()} == {
        "CheetahRun": 7.0,
        "CartpoleBalance": 8.0,
    }
    before = (tmp_path / "latest.json").read_bytes()
    for wrong, told in (("CheetahRun:600", "ENV:RETURN:SECONDS"), ("CheetaRun:1:2", "CheetahRun")):
        capsys.readouterr()
        assert suite.main([*start, wrong]) == 2
        assert told in capsys.readouterr().err
    assert (tmp_path / "latest.json").read_bytes() == before


def test_two_cores_divided(monkeypatch):
    """Ways take turns, and each round is compared with its own first."""
    rates = iter([[10.0], [8.0], [5.0], [20.0], [10.0], [4.0]])
    asked = []

    def fake(way, flags, cores, run):
        asked.append(way)
        return next(rates)

    monkeypatch.setattr(processes, "iterations_per_second", fake)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {3, 5})
    found = processes.compare("--env Pendulum", 2, lambda line: None)
    assert asked == [*processes.WAYS, *processes.WAYS]
    two, apart = (f"{way}, of the first" for way in processes.WAYS[1:])
    assert found[two] == {"median": pytest.approx(0.65), "low": 0.5, "high": 0.8}
    assert found[apart]["median"] == pytest.approx(0.35)
    assert "two devices" in table.flats({"Pendulum": found})


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--env Pendul", "Pendulum"),
        ("--env Pendulum --rounds 0", "--rounds 0"),
        ("--roofline b200", "h100"),
        ("--env Pendulum --peers --scaling", "one at a time"),
        ("--env Pendulum --over-devices two", "1,2,4"),
        ("--env Pendulum --population 1", "--population 1"),
        ("--env Pendulum --scaling --axes lenght", "length"),
        ("--env Pendulum --critic-hiden 3", "--critic-hidden"),
        ("", "--env"),
    ],
)
def test_mistakes_are_one_line(flags, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *flags.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert says in said.err
    assert not list(tmp_path.iterdir())


def test_modes_of_a_checkout_say_so_elsewhere(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    for flags in ("--roofline a100", "--env Pendulum --breakdown", "--env Pendulum --scaling"):
        assert cli.main(["bench", *flags.split()]) == 2
        told = capsys.readouterr().err
        assert "run this from a checkout" in told
        assert told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--population 2",
        "--replay-cost",
        "--scaling --axes envs,fill",
        "--roofline 4090",
        "--breakdown",
        "--operations",
    ],
)
def test_other_modes_run(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "2")  # JAX runs already; others are not to inherit one thread
    sizes = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    quick = ["--rounds", "2", "--seconds", "0.02", "--plot", str(tmp_path / "s.png")]
    argv = ["bench", "--env", "Pendulum", *sizes, *quick, *flags.split(), "--json"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["env"] == "Pendulum"
    assert (tmp_path / "s.png").exists() == ("scaling" in flags)


def test_an_operation_is_known_by_what_it_holds():
    text = """
%fused (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %e.1 = f32[2]{0} exponential(%a), metadata={op_name="jit(f)/exp"}
}
ENTRY %main (x: f32[2,2]) -> f32[2] {
  %d.1 = f32[2,2]{1,0} dot(%x, %x), metadata={op_name="jit(f)/Actor/dot_general"}
  %s.1 = f32[2]{0} fusion(%d.1), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/sub"}
  ROOT %m.1 = f32[2]{0} maximum(%s.1, %s.1), metadata={op_name="jit(f)/jit(relu)/max"}
}"""
    known = operations.describe(text)
    kinds = {name: operations.kind_of(known[name]) for name in ("d.1", "s.1", "m.1")}
    assert kinds == {
        "d.1": operations.PRODUCTS,
        "s.1": "softmax and cross-entropy",
        "m.1": "bias, activation and their gradients",
    }
    assert operations.kind_of("add | jit(f)/add") == operations.OTHER


def test_time_within_an_operation_is_not_counted_twice():
    events = [("loop", 0, 10), ("body", 1, 3), ("body", 5, 3), ("inner", 6, 1), ("next", 10, 2)]
    spent = operations.own_seconds(operations.Event(*e) for e in events)
    assert spent == {"loop": 4, "body": 5, "inner": 1, "next": 2}


@pytest.mark.slow
def test_brax_runs_beside_ours():
    found = peers.compare(make_parts("CartpoleBalance"), rounds=1, seconds=0.1)
    for name in ("ours", "ours_full", "brax_sac", "brax_sac_full", "brax_ppo"):
        assert found["rates"][name]["updates_per_second"]["median"] > 0, found["rates"][name]


# --- what a run's extras cost ---------------------------------------------------------------------


def test_a_rate_is_of_the_time_awake_between_the_first_row_and_the_last_but_one():
    run = overhead.Run.__new__(overhead.Run)
    seconds = [1.0, 3.0, 5.0, 6.0, 60.0]  # before training, first, middle, last but one, last
    iterations = [0, 50, 100, 150, 200]
    run.marks = [overhead.Mark(*mark) for mark in zip(seconds, iterations, strict=True)]
    assert run.rate() == pytest.approx(100 / 3)


@pytest.mark.parametrize("words", [["Cartpole", "x"], ["Cartpole", "0"], ["Cartpole", "1", "-1"]])
def test_overhead_refuses_nonsense_in_one_line(words, capsys):
    assert overhead.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_overhead_says_that_a_run_failed(monkeypatch, capsys):
    monkeypatch.setattr(overhead.sys, "executable", "/bin/false")
    assert overhead.main(["CartpoleBalance", "1"]) == 2
    assert capsys.readouterr().err.endswith("a run of CartpoleBalance failed\n")
