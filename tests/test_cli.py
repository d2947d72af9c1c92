"""The command line: every mistake is one line, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtd3 import thirdparty
from jaxtd3.cli import doctor as doctor_module
from jaxtd3.cli import flags
from jaxtd3.cli import main as cli
from jaxtd3.config.sections import SECTIONS
from jaxtd3.run import artifacts, memory
from jaxtd3.run.progress import Live
from test_trainer import TINY

PENDULUM = ["train", "--env", "Pendulum", "--profile", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The smallest of runs."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "make_report", lambda run_dir: None)
        assert cli.main(["train", *TINY, "--iterations", "10", "--run-dir", str(run_dir)]) == 0
    return run_dir


def fails(argv: list[str], capsys) -> str:
    """The one line that a wrong command says."""
    before = sorted(Path.cwd().rglob("*"))
    capsys.readouterr()
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxtd3: error: ")
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    assert sorted(Path.cwd().rglob("*")) == before, "something was written"
    return said


# (arguments after `train --env Pendulum --profile cpu`, what the line says)
BAD_SETTINGS = [
    ("--sed 1", "did you mean '--seed'?"),
    ("--num-env 4", "did you mean '--num-envs'?"),
    ("--reward angel=1", "unknown reward term 'angel': did you mean 'angle'?"),
    ("--reward angle", "write TERM=VALUE"),
    ("--reward angle=x", "write TERM=VALUE"),
    ("--reward angle=nan", "not finite"),
    ("--reward =1", "not finite"),
    ("--reward-preset tunned", "did you mean 'tuned'?"),
    ("--reward-preset tuned", "has no tuned reward"),
    ("--algo fastd3", "did you mean 'fasttd3'?"),
    ("--profile gpuu", "did you mean 'gpu'?"),
    ("--critic-updates 3 --policy-updates 2", "3 is not divisible by policy_updates=2"),
    ("--collect-steps 2 --critic-updates 3", "one must divide the other"),
    ("--num-envs 0", "num_envs=0 is below 1"),
    ("--num-envs -4", "num_envs=-4"),
    ("--num-envs 2.5", "--num-envs: invalid literal"),
    ("--batch-size 0", "batch_size=0 is below 1"),
    ("--iterations -1", "iterations=-1 is below 1"),
    ("--seed -1", "seed=-1 is negative"),
    ("--seed", "--seed"),
    ("--gamma nan", "--gamma nan is not finite"),
    ("--gamma 1.5", "gamma=1.5 is out of range"),
    ("--actor-lr inf", "--actor-lr inf is not finite"),
    ("--max-time 0", "max_time=0.0"),
    ("--max-time soon", "--max-time: could not convert string to float: 'soon'"),
    ("--v-min 5 --v-max -5", "v_min=5.0 is not below v_max=-5.0"),
    ("--sigma-min 0.5 --sigma-max 0.1", "sigma_min=0.5"),
    ("--n-step 64 --length 64", "n_step=64 does not fit"),
    ("--keep 1", "keep=1 is below 2"),
    ("--impl wrap", "did you mean 'warp'?"),
    ("--reset pol", "did you mean 'pool'?"),
    ("--compute f16", "'f16'"),
    ("--push=perhaps", "neither on nor off"),
    ("--length 10000000 --num-envs 4096", "lower --length"),
    ("--config missing.json", "cannot read missing.json"),
    ("--resume", "--resume needs --run-dir"),
    ("--resume --run-dir x --init-from y", "exclude each other"),
    ("--resume-from missing", "missing"),
    ("--init-from missing", "no checkpoint in"),
    ("--run-dir /dev/null/run", "cannot be created"),
    ("--run-dir /proc/run", "cannot be created"),
    ("stray", "stray"),
]


@pytest.mark.parametrize(("given", "says"), BAD_SETTINGS, ids=[given for given, _ in BAD_SETTINGS])
def test_bad_settings(given, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in fails([*PENDULUM, *given.split()], capsys)


BAD_COMMANDS = [
    ("trian", "did you mean 'train'?"),
    ("train", "--env is missing"),
    ("train --env Pendulumm", "did you mean 'Pendulum'?"),
    ("train --env cartpolebalance", "did you mean 'CartpoleBalance'?"),
    ("train --env CartpoleBalance --profile cpu --reward upright=2", "cannot be re-weighted"),
    ("train --env CartpoleBalance --profile cpu --push", "has no pushes"),
    ("train --env CartpoleBalance --profile cpu --sim-dt 0.003", "does not divide"),
    ("train --env CartpoleBalance --profile cpu --sim-dt 0", "not above 0"),
    ("train --env Pendulum --profile cpu --sim-dt 0.01", "no physics step"),
    ("train --resume --run-dir nowhere", "--env is missing: no run in nowhere"),
    ("evaluate", "missing RUN"),
    ("evaluate nowhere", "is not a run"),
    ("evaluate nowhere --episodes 0", "--episodes 0 is below 1"),
    ("evaluate nowhere --seed -1", "--seed -1 is negative"),
    ("render nowhere --out x.avi", ".mp4 or .gif"),
    ("render nowhere --steps 0", "--steps 0 is below 1"),
    ("render nowhere --command a b", "--command"),
    ("export nowhere --out missing/policy.onnx", "missing is not a folder"),
    ("play", "nothing to play"),
    ("play nowhere", "is not a run"),
    ("play t1-flt", "did you mean 't1-flat'?"),
    ("play t1-flat --agent random", "plays without a policy"),
    ("play t1-flat --env G1JoystickFlatTerrain", "it cannot drive G1JoystickFlatTerrain"),
    ("play t1-flat --seconds nan", "--seconds nan is not above 0"),
    ("play t1-flat --port -1", "--port -1 is not between"),
    ("play t1-flat --window --host 0.0.0.0", "--window opens no port"),
    ("play t1-flat --port x", "--port: invalid literal"),
    ("play t1-flat --host=", "--host is empty"),
    ("play t1-flat g1-flat", "g1-flat"),
    ("play --env T1JoystickFlatTerrain --agent policy", "known are zero, random"),
    ("play .", "is not a run"),
    ("train --env Pendulum --profile cpu --history 1000 --length 64", "too short for history=1000"),
    ("train --env Pendulum --profile cpu --actor-hides linvel", "have no names to hide by"),
    ("robustness", "missing RUN"),
    ("robustness nowhere", "is not a run"),
    ("robustness t1-flat --episodes 0", "--episodes 0 is below 1"),
    ("robustness t1-flat --worlds ice", "unknown world 'ice'"),
    ("robustness t1-flat --worlds", "--worlds"),
    ("robustness t1-flat --seconds 1e9", "at most 3600"),
    ("robustness t1-flat --out nowhere", "nowhere is not a folder"),
    ("robustness controller.onnx", "cannot read controller.onnx"),
    ("export t1-flat --controller --out t1.xml", "a controller is an .onnx file"),
    ("export t1-flat --controller --out nowhere/t1.onnx", "nowhere is not a folder"),
    ("export t1-flat --out policy.txt", "a policy is an .onnx or .npz file"),
    ("export --check nowhere.onnx", "cannot read nowhere.onnx"),
    ("export --check . --controller", "leave the rest away"),
    ("export --check .", "cannot read .: Is a directory"),
    ("train --env Pendulum --recipe", "--recipe"),
    ("train --recipe deplyo --env Pendulum", "did you mean 'deploy'?"),
    ("train --env Pendulum --recipe deploy --init-from x", "leave --init-from away"),
    ("train --env Pendulum --best returns", "did you mean 'return'?"),
    ("train --env Pendulum --action-delay nan", "--action-delay nan is not finite"),
    ("train --env Pendulum --action-delay 2", "not between 0 and 1 s"),
    ("train --env Pendulum --video-every -5", "--video-every -5 is negative"),
    ("envs --env G1Joystick", "did you mean 'G1JoystickFlatTerrain'?"),
    ("envs --profile tpu", "unknown profile 'tpu'"),
]


@pytest.mark.parametrize(("given", "says"), BAD_COMMANDS, ids=[given for given, _ in BAD_COMMANDS])
def test_bad_commands(given, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in fails(given.split(), capsys)


BAD_FILES = {
    "not JSON": ("{", "is not JSON"),
    "a list": ("[]", "is not a JSON object"),
    "another kind": ('{"model": "gpt"}', "unknown section 'model'"),
    "a misspelt setting": ('{"agent": {"gama": 0.9}}', "did you mean 'gamma'?"),
    "a text for a number": ('{"agent": {"gamma": "0.9"}}', "is not a float"),
    "a NaN": ('{"agent": {"gamma": NaN}}', "is not a float"),
    "another env": ('{"env": {"name": "CartpoleBalance"}}', "CartpoleBalance"),
    "an unknown algo": ('{"algo": "ppo", "env": {"name": "Pendulum"}}', "algo"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_config_files(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, says = BAD_FILES[kind]
    Path("config.json").write_text(text)
    assert says in fails(["train", "--env", "Pendulum", "--config", "config.json"], capsys)


def test_occupied_run_dir(trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--resume goes on with it" in fails([*PENDULUM, "--run-dir", str(trained)], capsys)
    Path("notes.txt").touch()
    assert "is not empty" in fails([*PENDULUM, "--run-dir", "."], capsys)
    assert "is not a folder" in fails([*PENDULUM, "--run-dir", "notes.txt"], capsys)


def test_read_only_run_dir(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert "is not a writable folder" in fails([*PENDULUM, "--run-dir", "runs/x"], capsys)


def test_bad_checkpoints(trained, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resume = ["train", "--resume", "--iterations", "20", "--quiet", "--run-dir"]
    shutil.copytree(trained, "wide")
    said = fails([*resume, "wide", "--actor-hidden", "32"], capsys)
    assert "cannot change actor_hidden: 16 -> 32" in said
    said = fails([*PENDULUM, "--quiet", "--init-from", "wide", "--actor-hidden", "32"], capsys)
    assert "does not fit this run" in said

    shutil.copytree(trained, "cut")
    largest = max(Path("cut/checkpoints").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    largest.write_bytes(largest.read_bytes()[:-7])
    assert "no good checkpoint" in fails([*resume, "cut"], capsys)
    assert "no good checkpoint" in fails(["evaluate", "cut"], capsys)

    Path("foreign").mkdir()
    Path("foreign/meta.json").write_text('{"weights": [1, 2]}')
    fails([*PENDULUM, "--resume-from", "foreign"], capsys)
    fails([*PENDULUM, "--init-from", "foreign"], capsys)


def test_missing_packages_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "jaxtd3[wandb]" in fails([*PENDULUM, "--wandb"], capsys)
    assert "jaxtd3[tensorboard]" in fails([*PENDULUM, "--tensorboard"], capsys)


# --- flags --------------------------------------------------------------------------------------


def test_every_config_field_is_a_flag():
    for section, cls in SECTIONS.items():
        made = flags.section_class(section, {})
        hidden = flags.HIDDEN.get(section, ())
        fields = [f for f in dataclasses.fields(cls) if f.name not in hidden]
        read = [(f.name, f.default) for f in dataclasses.fields(made)]
        assert read == [(f.name, f.default) for f in fields]
        assert made.__doc__ == cls.__doc__
        assert all(f.metadata["help"] for f in fields), f"a field of {section} has no help"


def test_flags_in_every_spelling():
    cls = flags.with_sections(cli.Train)
    given = (
        "--env Pendulum --num_envs=8 --batch-size 16 --push=True --no-cdq --randomize=False "
        "--reward a=1 b=-2 --reward=c=3 --max-time=5 --quiet True"
    )
    args, named = flags.parse(cls, given.split(), prog="test")
    assert named == {
        "env": "Pendulum",
        "num_envs": 8,
        "batch_size": 16,
        "push": True,
        "cdq": False,
        "randomize": False,
        "reward": (("a=1", "b=-2"), ("c=3",)),
        "max_time": 5.0,
        "quiet": True,
    }
    assert args.env == "Pendulum"


def test_settings_in_order(tmp_path):
    """Preset, then file, then flags."""
    from jaxtd3.cli.train import settings
    from jaxtd3.envs.registry import preset

    def resolve(*argv: str):
        return settings(*flags.parse(flags.with_sections(cli.Train), argv, "test"))[0]

    plain = resolve("--env", "Pendulum", "--profile", "cpu")
    assert plain == preset("Pendulum", profile="cpu")  # it has no physics to name
    assert resolve("--env", "CartpoleBalance", "--impl", "jax").env.impl == "jax"
    assert resolve("--env", "CartpoleBalance").env.impl == "native"
    preset("Pendulum", profile="cpu", gamma=0.9, num_envs=8).save(tmp_path / "config.json")
    file = ("--config", str(tmp_path / "config.json"))
    assert resolve(*file).agent.gamma == 0.9
    both = resolve(*file, "--gamma", "0.5", "--reward", "angle=-2")
    assert (both.agent.gamma, both.env.num_envs) == (0.5, 8)
    assert both.env.weights == {"angle": -2.0}
    tuned = resolve("--env", "G1JoystickFlatTerrain", "--reward-preset", "tuned", "--profile=cpu")
    assert tuned.env.weights["energy"] == -5e-5


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "None" not in printed
    assert f"jaxtd3 {command}" in printed


def test_help_and_mistakes_load_nothing_heavy():
    code = (
        "import sys; from jaxtd3.cli.main import main; code = main(['train', '--sed', '1']);"
        "heavy = {'jax', 'mujoco', 'flax', 'matplotlib'} & set(sys.modules);"
        "sys.exit(0 if code == 2 and not heavy else str(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_environment_of_ones_own_loads_no_mujoco():
    code = (
        "import sys, jaxtd3, jaxtd3.run.session; from jaxtd3.run.program import build;"
        "jaxtd3.register_env('Mine', jaxtd3.Pendulum);"
        "build(jaxtd3.preset('Mine', num_envs=4, length=16, batch_size=4));"
        "heavy = {'mujoco', 'mujoco_playground', 'brax'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_fetches_its_names_lazily():
    import jaxtd3

    assert set(jaxtd3.__all__) == set(jaxtd3._HOME_OF)
    for name in jaxtd3.__all__:
        assert getattr(jaxtd3, name) is not None
    with pytest.raises(AttributeError):
        _ = jaxtd3.nonsense


# --- other commands -----------------------------------------------------------------------------


def test_usage(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cli.COMMANDS)
    assert cli.main([]) == 2


def test_envs(capsys):
    from jaxtd3.envs.playground.adapter import playground_names

    assert cli.main(["envs", "--json", "--profile", "gpu"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 50
    assert rows[0] == {
        "env": "Pendulum",
        "physics": "own",
        "reward": "weighted sum",
        "profile": "gpu",
        "iterations": 2000,
        "num_envs": 1024,
        "batch": 32768,
        "gamma": 0.99,
    }
    robots = [row for row in rows if row["env"] in playground_names()]
    assert len(robots) > 50
    assert {row["physics"] for row in robots} == {"native"}  # on a CPU
    assert cli.main(["envs", "--env", "Pendulum"]) == 0
    printed = capsys.readouterr().out
    assert "angle=-1, velocity=-0.1, effort=-0.004" in printed
    assert "physics         own\n" in printed


def test_doctor(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no luck")

    quick = ("precision", "compile cache", "memory", "onnx", "wandb login")
    checks = {name: doctor_module.CHECKS[name] for name in quick} | {"luck": broken}
    monkeypatch.setattr(doctor_module, "CHECKS", checks)
    monkeypatch.setattr(memory, "free_device", lambda: (8 * memory.GiB, "this machine"))
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "✗ luck" in printed
    assert all(f"✓ {name}" in printed for name in ("precision", "compile cache", "memory"))
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [finding["what"] for finding in found] == [*quick, "luck"]
    monkeypatch.setattr(memory, "free_device", lambda: (memory.GiB, "this machine"))
    assert cli.main(["doctor"]) == 0
    assert "✗ memory" in capsys.readouterr().out


def test_doctor_has_a_line_for_private_names(monkeypatch):
    check = doctor_module.CHECKS["other packages"]
    assert check().ok
    monkeypatch.setattr(thirdparty, "missing", lambda: ["jax._src.x is not in jax 9"])
    assert not check().ok
    assert "jax._src.x" in check().found


def test_live_panel(capsys):
    live = Live()
    live.update(title="Pendulum", iteration=5, iterations=10, env_steps=20, rate=3.0)
    live.note("a [bracketed] line")
    live.stage("training")
    live.close("done")
    printed = capsys.readouterr().out
    assert "a [bracketed] line" in printed
    assert printed.endswith("done\n")


def test_one_line_of_any_text():
    assert flags.one_line("") == "the arguments cannot be read"
