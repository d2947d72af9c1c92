"""Checkpoints: bit-equal round trips, and every fault we could think of."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.drill.base import listed

import jaxtd3
from jaxtd3 import durable
from jaxtd3.errors import UserError
from jaxtd3.run import arrays, checkpoint
from jaxtd3.run.checkpoint import (
    CheckpointStore,
    RunLock,
    read_meta,
    restore_agent,
    restore_from,
    state_sha256,
    verify,
)

CHUNK = 3
ROOT = Path(__file__).parent.parent
SMALL = {
    "num_envs": 4,
    "critic_hidden": 16,
    "actor_hidden": 16,
    "num_atoms": 11,
    "batch_size": 16,
    "length": 32,
    "bf16": True,
    "warmup": 2,
}


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def make_tree(seed: int = 0) -> dict:
    """A little of everything that a state may hold."""
    rng = np.random.default_rng(seed)
    payloads = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000], np.uint32)
    return {
        "agent": {"w": jnp.array(rng.standard_normal((33, 7)), jnp.float32)},
        "replay": Pair(jnp.arange(50, dtype=jnp.uint16), jnp.full((3, 4), 9, jnp.uint8)),
        "nan": jnp.array(payloads.view(np.float32)),
        "half": jnp.array(rng.standard_normal(9), jnp.bfloat16),
        "flags": jnp.array([True, False]),
        "zeros": -jnp.zeros(4),
        "empty": jnp.zeros((0, 3)),
        "count": jnp.array(7, jnp.int32),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "reward/term": jnp.ones(2) * seed,
    }


def save(store: CheckpointStore, tree, iteration: int, **more) -> None:
    store.save(tree, iteration=iteration, meta={"config": {}, "env_steps": iteration}, **more)
    store.wait()
    assert store.last_error is None


def restore(store: CheckpointStore, template):
    store.wait()
    return restore_from(store.directory, template)


def assert_same(a, b) -> None:
    """Equal names, dtypes, shapes, weak types and bits."""
    jax.tree.map(lambda x, y: None, a, b)
    assert state_sha256(a) == state_sha256(b)
    weak = [bool(getattr(x, "weak_type", False)) for x in jax.tree.leaves(b)]
    assert not any(weak)


@pytest.fixture(scope="module")
def parts():
    """A small run: (init, chunk)."""
    cfg = jaxtd3.preset("Pendulum", profile="cpu", **SMALL)
    env = jaxtd3.make_env(cfg.env)
    agent = jaxtd3.fast_td3(env.spec, cfg.agent)
    replay = jaxtd3.make_replay(env.spec, cfg.replay)
    init, _, train_step = jaxtd3.make_train_step(env, agent, replay, cfg.loop)
    return jax.jit(init), jaxtd3.make_chunk(train_step, CHUNK)


@pytest.fixture
def two(tmp_path: Path) -> CheckpointStore:
    """A run directory with checkpoints 10 and 20."""
    store = CheckpointStore(tmp_path / "run")
    save(store, make_tree(1), 10)
    save(store, make_tree(2), 20)
    return store


def newest(store: CheckpointStore) -> Path:
    return sorted(p for p in store.directory.iterdir() if p.name.isdigit())[-1]


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def test_round_trip_of_every_kind_of_leaf(tmp_path):
    store, tree = CheckpointStore(tmp_path), make_tree(3)
    save(store, tree, 5)
    got = restore(store, jax.eval_shape(lambda: make_tree(3)))
    assert (got.iteration, got.replay, got.skipped) == (5, True, [])
    assert_same(tree, got.state)
    assert jax.random.key_impl(got.state["keys"]) == "rbg"
    assert np.array_equal(jax.random.uniform(got.state["key"]), jax.random.uniform(tree["key"]))


def test_a_leaf_that_has_moved_is_found_under_its_old_name(tmp_path):
    store, weights = CheckpointStore(tmp_path), jnp.array([1.0, -2.0])
    save(store, {"env": {"weights": weights}}, 5)
    got = restore(store, jax.eval_shape(lambda: {"weights": weights}))
    np.testing.assert_array_equal(got.state["weights"], weights)


def test_resume_continues_bit_equal(tmp_path, parts):
    """1 chunk, save, restore, 1 chunk == 2 chunks; and the restored state compiles nothing anew."""
    init, chunk = parts
    store = CheckpointStore(tmp_path)
    state, _ = chunk(init(jax.random.key(0)))
    saved = state_sha256(state)
    store.save(state, iteration=CHUNK, meta={"config": {}})
    state, _ = chunk(state)  # donates what is being saved
    store.wait()
    compiled = chunk._cache_size()
    got = restore(store, init(jax.random.key(1)))
    assert state_sha256(got.state) == saved
    assert_same(got.state, got.state)
    again, _ = chunk(got.state)
    assert state_sha256(again) == state_sha256(state)
    assert chunk._cache_size() == compiled
    assert state_sha256(state) != saved


def test_save_owns_its_memory(tmp_path, monkeypatch):
    """A step that overwrites the donated buffers before anything is written changes nothing."""
    step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = jnp.zeros(1 << 16)
    pointer = x.unsafe_buffer_pointer()
    hold, write = threading.Event(), arrays.write_arrays

    def late(*args):
        hold.wait()
        write(*args)

    monkeypatch.setattr(checkpoint, "write_arrays", late)
    store = CheckpointStore(tmp_path)
    store.save({"x": x}, iteration=1, meta={})
    y = step(x).block_until_ready()
    hold.set()
    assert y.unsafe_buffer_pointer() == pointer
    assert np.all(restore(store, {"x": y}).state["x"] == 0)


def test_memory_goes_back_after_a_save_that_fails_too(tmp_path, monkeypatch):
    """Held by the saving threads, it grew by a replay buffer within half an hour."""
    seen = []
    monkeypatch.setattr(checkpoint, "give_back", lambda: seen.append(store.last_error))
    store = CheckpointStore(tmp_path)
    save(store, {"x": jnp.ones(3)}, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_arrays", full)
    store.save({"x": jnp.ones(3)}, iteration=2, meta={})
    store.wait()
    assert seen[0] is None
    assert "No space left" in seen[1]


def test_what_was_saved_is_let_go_before_its_memory_is_given_back(tmp_path, monkeypatch):
    plain, copies, alive = checkpoint.to_host, [], []

    def copied(leaf):
        copy = plain(leaf)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(checkpoint, "to_host", copied)
    count = lambda: alive.append(sum(ref() is not None for ref in copies))  # noqa: E731
    monkeypatch.setattr(checkpoint, "give_back", count)
    store = CheckpointStore(tmp_path)
    store.save(make_tree(), iteration=1, meta={})
    store.wait()
    assert copies
    assert alive == [0]


def test_restored_arrays_are_donated_in_place(tmp_path):
    store = CheckpointStore(tmp_path)
    x = {"x": jnp.ones(1 << 16)}
    save(store, x, 1)
    state = restore(store, x).state
    pointer = state["x"].unsafe_buffer_pointer()
    y = jax.jit(lambda s: s["x"] * 2, donate_argnums=0)(state)
    assert y.block_until_ready().unsafe_buffer_pointer() == pointer
    lines = np.zeros(1 << 12, np.uint8)
    lines = lines[-lines.ctypes.data % 64 :][:2048]  # aligned: what jax may borrow, and must not
    placed = arrays.place(lines, jnp.array(lines))
    assert placed.unsafe_buffer_pointer() != lines.ctypes.data
    committed = {"x": jax.device_put(x["x"], jax.devices()[0])}
    assert restore(store, committed).state["x"].committed
    assert not restore(store, x).state["x"].committed


def test_digest_sees_everything():
    tree = make_tree(0)
    digests = {state_sha256(tree)}
    for name in tree:
        other = dict(tree)
        other[name] = make_tree(1)[name] if "key" in name or name == "agent" else [tree[name]]
        digests.add(state_sha256(other))
    digests.add(state_sha256({**tree, "zeros": jnp.zeros(4)}))  # -0.0 is not 0.0
    digests.add(state_sha256({**tree, "empty": jnp.zeros((3, 0))}))
    assert len(digests) == len(tree) + 3
    backwards = dict(reversed(tree.items()))
    assert state_sha256(backwards) == state_sha256(tree)


def test_meta_is_readable(two):
    meta = read_meta(two.directory.parent)
    assert meta["iteration"] == 20
    assert meta["env_steps"] == 20
    assert meta["versions"]["jax"] == jax.__version__
    assert meta["leaves"]["half"] == ["bfloat16", [9]]
    assert meta["leaves"]["key"] == ["key<fry>", []]


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("run"))
    save(store, make_tree(1), 1)
    assert_same(make_tree(1), restore_from(Path("run"), make_tree(0)).state)
    assert_same(make_tree(1), restore_from(Path("run/checkpoints/000000001"), make_tree(0)).state)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


@pytest.mark.parametrize(("harm", "count"), [(flip, 60), (cut, 20)])
def test_damage_is_found_and_passed_over(two, harm, count):
    rng = random.Random(0)
    path, backup = newest(two), two.directory / "backup"
    shutil.copytree(path, backup)
    names = [p.relative_to(path) for p in files_of(path) if p.stat().st_size]
    seen = set()
    for i in range(max(count, len(names))):  # how many files Orbax writes differs
        name = names[i] if i < len(names) else rng.choice(names)
        harm(path / name, rng)
        problems = verify(path)
        assert problems, (name, i)
        assert any(str(name) in line for line in problems), (name, problems)
        seen.add(name)
        shutil.copyfile(backup / name, path / name)
    assert len(seen) == len(names)
    assert verify(path) == []
    harm(path / names[0], rng)
    got = restore(two, make_tree(0))
    assert got.iteration == 10
    assert_same(make_tree(1), got.state)
    assert str(names[0]) in got.skipped[0]
    assert "000000020" in got.skipped[0]
    with pytest.raises(UserError, match=names[0].name):
        restore_from(path, make_tree(0))


def test_missing_and_added_files(two):
    path = newest(two)
    (path / "state" / "more").write_text("")
    assert verify(path) == ["state/more: not in the manifest"]
    (path / "state" / "more").unlink()
    (path / "link").symlink_to("meta.json")
    assert verify(path) == ["link: not in the manifest"]
    (path / "link").unlink()
    os.mkfifo(path / "pipe")  # opening it would wait for ever
    assert verify(path) == ["pipe: not in the manifest"]
    (path / "pipe").unlink()
    assert verify(path) == []
    (path / "manifest.json").unlink()
    assert verify(path) == ["manifest.json: missing"]
    assert restore(two, make_tree(0)).skipped == ["000000020/manifest.json: missing"]
    assert [(i.iteration, i.good) for i in listed(two)] == [(20, False), (10, True)]


def test_names_cannot_escape(two):
    """A manifest that names, or a link that points to, a true file outside is refused."""
    path = newest(two)
    outside = two.directory.parent / "outside"
    outside.write_bytes((path / "meta.json").read_bytes())
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("../../outside", str(outside)):
        files = {**manifest["files"], name: manifest["files"]["meta.json"]}
        (path / "manifest.json").write_text(durable._manifest(files))
        assert verify(path) == [f"{name}: no such file here"]
    (path / "manifest.json").write_text(durable._manifest(manifest["files"]))
    assert verify(path) == []
    (path / "meta.json").unlink()
    (path / "meta.json").symlink_to(outside)
    assert verify(path) == ["meta.json: size or sha256 is not the manifest's"]


def reseal(path: Path) -> None:
    """What a stranger does: any content under a right manifest."""
    (path / "manifest.json").unlink(missing_ok=True)
    durable.seal(path)


def test_a_stranger_can_only_send_data(two):
    """A right manifest over nonsense: one line, no traceback; sizes are checked before reading."""
    path, template = newest(two), make_tree(0)
    meta = json.loads((path / "meta.json").read_text())
    table = meta["leaves"]
    bad = [
        [],
        "x",
        {**meta, "leaves": []},
        {**meta, "leaves": {**table, "half": 3}},
        {**meta, "leaves": {**table, "half": ["bfloat16", [10**15]]}},
        {**meta, "leaves": {**table, "a\nb": ["float32", [1]]}},
        {**meta, "iteration": "1"},
        {**meta, "replay": 1},
        {**meta, "format": 99},
        {k: v for k, v in meta.items() if k != "leaves"},
    ]
    for content in bad:
        (path / "meta.json").write_text(json.dumps(content))
        reseal(path)
        with pytest.raises(UserError) as error:
            restore_from(path, template)
        assert "\n" not in str(error.value)
    for text in ("", "{", "[" * 100_000, "\x00"):
        (path / "meta.json").write_text(text)
        reseal(path)
        with pytest.raises(UserError):
            restore_from(path, template)
        (path / "manifest.json").write_text(text)
        assert verify(path)


def test_arrays_of_another_size_than_the_table_says(tmp_path):
    """The header of an array is compared too, before it is read."""
    big = {"x": jnp.ones(1000)}
    small = {"x": jnp.ones(3)}
    store = CheckpointStore(tmp_path)
    save(store, big, 1)
    path = newest(store)
    text = (path / "meta.json").read_text()
    assert "1000" in text
    (path / "meta.json").write_text(text.replace("1000", "3"))
    reseal(path)
    with pytest.raises(UserError, match=r"x is stored as float32\(1000,\)"):
        restore_from(path, small)
    shutil.rmtree(path / "state")
    reseal(path)
    with pytest.raises(UserError, match="state: "):
        restore_from(path, small)


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    store = CheckpointStore(tmp_path)
    save(store, make_tree(1), 1)
    assert_same(make_tree(1), restore(store, make_tree(0)).state)


def test_another_shape_or_dtype_is_refused_with_the_difference(two):
    tree = make_tree(0)
    cases = {
        r"half: saved bfloat16\[9\], this run float32\[9\]": {"half": jnp.zeros(9)},
        r"agent.w: saved float32\[33,7\], this run float32\[33,8\]": {
            "agent": {"w": jnp.zeros((33, 8))}
        },
        r"flags: saved bool\[2\], this run nothing": {"flags": None},
        r"more.a: saved nothing, this run float32\[1\]": {"more": {"a": jnp.zeros(1)}},
        r"keys: saved key<rbg>\[3\], this run key<fry>\[3\]": {
            "keys": jax.random.split(jax.random.key(0), 3)
        },
    }
    for message, change in cases.items():
        with pytest.raises(UserError, match=message):
            restore(two, {**tree, **change})
    with pytest.raises(UserError, match="and 8 more"):
        restore(two, {"agent": tree["agent"]})


def test_agent_alone(tmp_path, parts, monkeypatch):
    """Only the agent's arrays are read, from a run directory or a checkpoint."""
    init, _ = parts
    store, state = CheckpointStore(tmp_path), init(jax.random.key(0))
    save(store, state, 0)
    asked, read = [], arrays.read_arrays
    monkeypatch.setattr(checkpoint, "read_arrays", lambda p, s: asked.extend(s) or read(p, s))
    template = jax.eval_shape(lambda: init(jax.random.key(1)).agent)
    assert_same(state.agent, restore_agent(tmp_path, template))
    assert all(name.startswith("agent.") for name in asked)
    assert_same(state.agent, restore_agent(newest(store), template))
    with pytest.raises(UserError, match=r"agent\.actor.*this run nothing"):
        restore_agent(tmp_path, template.replace(actor={}))


def test_without_replay(tmp_path, parts):
    init, chunk = parts
    store = CheckpointStore(tmp_path)
    state, _ = chunk(init(jax.random.key(0)))
    save(store, state, 1)
    save(store, state, 2, with_replay=False)
    assert not any(name.startswith("replay") for name in read_meta(tmp_path)["leaves"])
    template = init(jax.random.key(1))
    got = restore(store, template)
    assert not got.replay
    assert int(got.state.replay.size) == 0
    assert_same(state.replace(replay=template.replay), got.state)
    with pytest.raises(ValueError, match="must be arrays"):
        restore(store, jax.eval_shape(init, jax.random.key(1)))


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    tree = {"x": jnp.ones(3)}
    for i, best in enumerate([1.0, 5.0, None, float("nan"), 4.0, 3.0]):
        save(store, tree, i, best=best)
    assert [(i.iteration, i.best) for i in listed(store)] == [(5, 3.0), (4, 4.0), (1, 5.0)]
    store = CheckpointStore(tmp_path, keep=3)
    save(store, tree, 6, best=6.0)
    assert [i.iteration for i in listed(store)] == [6, 5, 4]
    save(store, tree, 5, best=0.0)  # the run was taken back to before 6
    assert [(i.iteration, i.best) for i in listed(store)] == [(5, 0.0), (4, 4.0)]
    with pytest.raises(UserError, match="keep=1"):
        CheckpointStore(tmp_path, keep=1)


def test_old_checkpoints_outlive_a_failed_save(two, monkeypatch):
    """Whatever goes wrong while writing is told, and nothing of it stays."""

    def full(*_):
        raise OSError(28, "No space left on device")

    for module, name in ((checkpoint, "write_arrays"), (durable, "seal"), (durable, "publish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            two.save(make_tree(3), iteration=30, meta={})
            two.wait()
        assert two.last_error == "disk full: [Errno 28] No space left on device"
        assert sorted(p.name for p in two.directory.iterdir()) == ["000000010", "000000020"]
    save(two, make_tree(3), 30)
    assert two.last_error is None
    assert restore(two, make_tree(0)).iteration == 30


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = CheckpointStore(disk)
        save(store, make_tree(1), 1)
        rng = np.random.default_rng(0)
        store.save({"x": rng.standard_normal(1 << 20)}, iteration=2, meta={})
        store.wait()
        assert store.last_error.startswith("disk full: ")
        assert "\n" not in store.last_error
        assert [p.name for p in store.directory.iterdir()] == ["000000001"]
        save(store, make_tree(3), 3)
        assert restore(store, make_tree(0)).iteration == 3
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """
    import os, sys, pathlib
    import numpy as np
    from jaxtd3.run import checkpoint
    from jaxtd3.run.checkpoint import CheckpointStore
    from tests.drill.kill import kill_at
    tree = lambda i: {"a": np.full((256, 256), i, np.float32), "b": np.arange(i)}
    store = CheckpointStore(pathlib.Path(sys.argv[1]))
    for i in (1, 2):
        store.save(tree(i), iteration=i, meta={})
        store.wait()
    checkpoint.at_phase = kill_at(sys.argv[2])
    store.save(tree(3), iteration=3, meta={})
    store.wait()
"""


@pytest.mark.parametrize(
    ("phase", "expected"), [("before", 2), ("arrays", 2), ("manifest", 2), ("after", 3)]
)
def test_killed_at_a_phase_of_a_save(tmp_path, phase, expected):
    """The one before or the new one, never a mixture, and nothing left behind."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), phase]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [p.name for p in (tmp_path / "checkpoints").glob(".tmp-*")]
    assert bool(left) == (phase in ("arrays", "manifest"))
    store = CheckpointStore(tmp_path)
    assert list((tmp_path / "checkpoints").glob(".*")) == []
    template = {"a": np.zeros((256, 256), np.float32), "b": np.arange(expected)}
    got = restore(store, template)
    assert (got.iteration, got.skipped) == (expected, [])
    assert np.all(got.state["a"] == expected)
    assert all(info.good for info in listed(store))
    save(store, template, 4)
    assert [i.iteration for i in listed(store)] == [4, expected]


def test_killed_between_the_renames_of_a_replacement(two):
    path = newest(two)
    path.rename(path.with_name(".old-" + path.name))
    store = CheckpointStore(two.directory.parent)
    assert restore(store, make_tree(0)).iteration == 20
    path.with_name(".old-000000020").mkdir()
    store = CheckpointStore(two.directory.parent)
    assert [i.iteration for i in listed(store)] == [20, 10]
    assert len(list(store.directory.iterdir())) == 2


def test_nothing_saved_and_nothing_good(tmp_path, two):
    assert not (CheckpointStore(tmp_path / "none").directory.exists())
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="no checkpoint in"):
        restore_from(tmp_path / "none", make_tree(0))
    for info in listed(two):
        (info.path / "meta.json").write_text("{}")
    with pytest.raises(UserError, match=r"no good checkpoint in .*000000020/meta\.json"):
        restore(two, make_tree(0))


def test_saving_is_quiet(tmp_path, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        store = CheckpointStore(tmp_path)
        save(store, make_tree(0), 1)
        restore(store, make_tree(0))
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_run_lock(tmp_path):
    run = tmp_path / "run"
    with RunLock(run), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunLock(run).__enter__()
    with RunLock(run):
        pass
    code = f"""
        import pathlib, sys
        from jaxtd3.durable import RunLock
        RunLock(pathlib.Path({str(run)!r})).__enter__()
        print("held", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {owner.pid}"):
            RunLock(run).__enter__()
        owner.kill()
        owner.wait()
        with RunLock(run):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        RunLock(tmp_path / "file").__enter__()
