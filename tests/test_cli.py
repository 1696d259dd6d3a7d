"""The command line: exit statuses, one sentence per error, JSON for programs, and no slow imports for `--help`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from tests.starters import starter_of
from varuna_capslog import cli
from varuna_capslog.base import fork_server
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.record import Profile

GIB = 2**30
PROFILE = {
    "format": "varuna-capslog/profile/1",
    "layers": [
        {"name": name, "isolated_bytes": size * GIB, "added_bytes": added}
        for name, size, added in (("stem", 3, None), ("body", 2, 2 * GIB), ("neck", 2, GIB), ("head", 1, GIB))
    ],
}
TOY = """
from torch import nn
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Workload

class Toy(Workload):
    name = "toy"
    def build_chain(self):
        return Chain([Layer(f"l{i}", nn.Linear(2, 2)) for i in range(4)], name="toy")
    def loss(self, outputs, targets, normalisers):
        return {"loss": outputs["x"].sum()}
    def profile_inputs(self, microbatch_size):
        return {"x": TensorSpec((microbatch_size, 2))}

def workload(config):
    return Toy()
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of a four-layer workload in the current folder, whose profile needs no measuring."""
    (tmp_path / "toy_of_test_cli.py").write_text(TOY)
    config = tmp_path / "toy.yaml"
    config.write_text("workload: toy_of_test_cli:workload\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    measure = types.ModuleType("varuna_capslog.profiling.measure")
    measure.profile_config = lambda config, workers, progress, variants: Profile.from_json(PROFILE)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "varuna_capslog.profiling.measure", measure)
    return config


def run(*arguments: object) -> int:
    return cli._run([str(argument) for argument in arguments])


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("capslog: ")
    return lines[0]


@pytest.mark.parametrize("command", ["", "profile", "plan", "check", "train", "evaluate", "predict", "report"])
def test_every_command_has_help(command, capsys):
    assert run(*command.split(), "--help") == 0
    assert "Usage: capslog" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["run.yaml", "--faults", "3", "--json", "model.dim=4"]])
def test_chaos_names_the_program_that_took_its_place(words, capsys):
    assert run("chaos", *words) == 2
    assert "launch/chaos.sh [CONFIG]" in sentence(capsys)
    assert run("--help") == 0
    assert "chaos" not in capsys.readouterr().out


def check_in_a_fresh_process(*lines):
    """Run lines of Python, which make their own assertions."""
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_import_need_no_slow_module():
    check_in_a_fresh_process(
        "import sys, varuna_capslog, varuna_capslog.config.reading",
        "import varuna_capslog.base.supervisor, varuna_capslog.planners",
        # a machine's supervisor, with the store that it serves, and the command that prepares a run
        "import varuna_capslog.start.elastic_host, varuna_capslog.elastic.host.terminal",
        "import varuna_capslog.start.local_run, varuna_capslog.start.choices",
        "from varuna_capslog import cli",
        "assert cli._run(['train', '--help']) == 0",
        "slow = {'torch', 'torchvision', 'scipy', 'matplotlib'} & set(sys.modules)",
        "assert not slow, slow",
    )


def test_no_help_text_needs_numpy():
    """`--help` took 2.6 times as long when a command imported the module that prints plans."""
    check_in_a_fresh_process(
        "import sys",
        "from varuna_capslog import cli",
        "for words in ([], ['plan'], ['front'], ['largest'], ['compare']):",
        "    assert cli._run([*words, '--help']) == 0",
        "assert 'numpy' not in sys.modules",
    )


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_plan_from_a_profile_writes_what_it_prints(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run("plan", "--profile", profile, "--devices", 2, "--capacity", "16GiB", "-o", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    # By hand: [stem | body neck head] costs 3 and 2+1+1=4; [stem body | ...] costs 5; the first is best.
    assert (printed["cuts"], printed["stage_bytes"], printed["fits"]) == ([0, 1], [3 * GIB, 4 * GIB], True)


def test_plan_prints_a_table_with_names_peaks_and_margins(profile, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("plan", "--profile", profile, "--devices", 2, "--capacity", "16GiB,5GiB") == 0
    text = capsys.readouterr().out
    for expected in (
        "stem",
        "body",
        "head",
        "3.00",
        "4.00",
        "13.00",
        "1.00",
        "16.00",
        "GiB",
        "peak + margin = capacity",
    ):
        assert expected in text


def test_nothing_fits_is_exit_status_3_one_sentence_and_a_plan_all_the_same(profile, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run("plan", "--profile", profile, "--devices", 2, "--capacity", "3.5GiB", "-o", out) == 3
    assert "stage 1 needs 4 GiB of 3.5 GiB" in sentence(capsys)
    plan = read_plan(out)
    assert plan.fits is False
    assert plan.shortfall is not None
    assert plan.shortfall.devices_that_fit == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan"], "give a CONFIG file, --profile FILE, --model"),
        (["plan", "--profile", "P"], "--devices N"),
        (["plan", "--model", "a:b"], "--model needs --devices N"),
        (["plan", "--model", "a:b", "--devices", "2", "--input", "x"], "the input 'x' is not of the form"),
        (["plan", "--model", "a:b", "P"], "both a CONFIG and --model"),
        (["plan", "P", "--input", "x=float32[1]"], "--input and --cut-points describe the model of --model"),
        (["plan", "--profile", "P", "--devices", "5"], "5 devices but only 4 layers"),
        (["plan", "--profile", "P", "--devices", "2", "--capacity", "16G"], "16GiB"),
        (
            ["plan", "--profile", "P", "--devices", "2", "--capacity", "16"],
            "capacity is 16, without a unit; write 16GiB",
        ),
        (["plan", "--profile", "P", "--devices", "2", "--capacity", "9GiB,8"], "capacity of device 1 is 8, without a"),
        (["plan", "--profile", "P", "--model", "a:b", "--devices", "2"], "both --profile and --model"),
        (["plan", "--profile", "P", "--hf", "folder", "--devices", "2"], "both --profile and --model (or --hf)"),
        (["plan", "--profile", "P", "--devices", "2", "--numerics", "close"], "leave --profile out"),
        (["plan", "--profile", "P", "--devices", "2", "--planner", "exat"], "did you mean 'exact'?"),
        (["plan", "--profile", "P", "--devices", "2", "--planner", "jiont"], "did you mean 'joint'?"),
        (["front", "--profile", "P", "--devices", "2", "--planner", "joint"], "planner joint makes several"),
        (["front", "--profile", "P", "--devices", "2", "--planner", "piper"], "planner piper makes several"),
        (["plan", "--profile", "/no/such/profile", "--devices", "2"], "/no/such/profile cannot be read"),
        (["plan", "--profile", "P", "--devices", "two"], "--devices: the kind of GPU 'two' is not in"),
        (["plan", "--colour"], "see capslog plan --help"),
        (["plam"], "plam"),
        (["train", "/no/such/config.yaml", "--nproc", "0"], "--nproc is '0' but must be greater than or equal to 1"),
        (["train"], "see capslog train --help"),
        (["train", "/no/such/config.yaml"], "config file /no/such/config.yaml cannot be read: No such file"),
        (["evaluate", "/no/such/run"], "/no/such/run is not the folder of a run"),
        (["report", "/no/such/run"], "/no/such/run is not the folder of a run"),
        (["predict", "/no/such/run", "/no/such/image.jpg"], "image '/no/such/image.jpg' is not a file"),
    ],
)
def test_mistakes_end_in_one_sentence_and_status_2(arguments, expected, profile, capsys):
    assert run(*[profile if argument == "P" else argument for argument in arguments]) == 2
    assert expected in sentence(capsys)


def test_plan_of_a_config_takes_its_pipeline_and_the_flags_go_before(toy, capsys):
    assert run("plan", toy, "pipeline.devices=3", "pipeline.planner=varuna", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["planner"], len(first["cuts"]), first["microbatch_size"]) == ("varuna", 3, 1)
    assert run("plan", toy, "pipeline.cuts=[0,2]", "--devices", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["cuts"] == [0, 1], "planning must search, whatever cuts the config has"


def test_plan_of_an_ordinary_module_needs_no_config(toy, tmp_path, monkeypatch, capsys):
    """The module's own chain is measured, with the flags' microbatch and devices."""
    seen = []

    def profile_config(config, workers, progress, variants):
        from varuna_capslog.model.workload import load_workload

        seen.append((config.train.microbatch_size, len(load_workload(config).build_chain())))
        return Profile.from_json(PROFILE)

    sys.modules["varuna_capslog.profiling.measure"].profile_config = profile_config  # type: ignore[attr-defined]
    (tmp_path / "nets_of_test_cli.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])\n"
    )
    arguments = ["plan", "--model", "nets_of_test_cli:net", "--input", "x=float32[2,8]", "--devices", "2", "--json"]
    arguments.append("--measure")
    assert run(*arguments, "--capacity", "16GiB") == 0
    assert json.loads(capsys.readouterr().out)["capacity_bytes"] == 16 * GIB
    assert run(*arguments, "--cut-points", "2") == 0
    assert seen == [(2, 4), (2, 2)]


def test_a_schedule_that_the_memory_model_does_not_describe_gives_cuts_but_no_numbers(toy, capsys):
    assert run("plan", toy, "pipeline.recompute=false", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["peak_bytes"] is None
    assert "fits and peak_bytes are unknown" in captured.err


def test_profile_shows_what_layers_read_from_where_they_are_no_plain_chain(toy, capsys, monkeypatch):
    assert run("profile", toy) == 0
    assert "reads from" not in capsys.readouterr().out
    handed = ((0, [1, 2]), (1, [3]), (2, [3]), (3, [4]))  # the body and the neck are two branches
    tensors = [
        {"name": f"t{writer}", "bytes": 4, "gradient": True, "writer": writer, "readers": readers}
        for writer, readers in handed
    ]
    branched = Profile.from_json(PROFILE | {"format": "varuna-capslog/profile/2", "tensors": tensors})
    measure = sys.modules["varuna_capslog.profiling.measure"]
    monkeypatch.setattr(measure, "profile_config", lambda config, workers, progress, variants: branched)
    assert run("profile", toy) == 0
    table = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    writers = {cells[2]: cells[-2] for cells in table if len(cells) > 3}
    assert writers == {"stem": "", "body": "0", "neck": "0", "head": "1, 2"}


def test_profile_writes_into_the_run_dir(toy, tmp_path, capsys):
    assert run("profile", toy, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "runs/toy/profile.json").read_text())


def workers_that(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Replace the engine's worker by a few lines of Python."""

    def starter(config, *flags):
        command = [sys.executable, "-S", "-c", body, str(config.run_dir), *flags]
        process_starter = starter_of(command)
        process_starter.server = None  # this process has torch, and plans itself
        return contextlib.nullcontext(process_starter)

    monkeypatch.setattr("varuna_capslog.start.local_run.worker_starter", starter)


def test_train_lays_out_the_run_before_its_workers_start(toy, tmp_path, monkeypatch, capsys):
    workers_that(monkeypatch, "import os, sys; open(os.path.join(sys.argv[1], os.environ['RANK']), 'w')")
    assert run("train", toy, "train.max_steps=3", "--nproc", "4") == 0
    folder = tmp_path / "runs/toy"
    assert sorted(path.name for path in folder.iterdir()) == (
        ["0", "1", "2", "3", "config.yaml", "events.jsonl", "mark.json", "plan-0.json", "profile.json", "workers"]
    )
    assert read_plan(folder / "plan-0.json").cuts == (0, 1, 2, 3)
    assert "max_steps: 3" in (folder / "config.yaml").read_text()


def test_train_begins_its_fork_server_before_it_reads_the_config(toy, monkeypatch):
    """Both import for a second; where the config is refused, the process is killed."""
    begun = []
    monkeypatch.setattr("varuna_capslog.commands.train.begun_early", fork_server.begun_early)
    monkeypatch.setattr("varuna_capslog.start.local_run.train_here", lambda *_: begun.extend(fork_server._early))
    assert run("train", toy) == 0
    ((process, *_),) = begun
    assert process.returncode == -signal.SIGKILL
    assert run("train", toy, "train.max_steps=-1") == 2
    assert not fork_server._early


def test_an_equal_plan_keeps_its_generation_and_another_gets_the_next(toy, tmp_path, monkeypatch, capsys):
    workers_that(monkeypatch, "")
    for arguments in ((), (), ("--nproc", "3"), ("pipeline.cuts=[0,3]",)):
        assert run("train", toy, *arguments) == 0
    plans = [read_plan(tmp_path / f"runs/toy/plan-{number}.json").cuts for number in range(3)]
    assert plans == [(0, 1), (0, 1, 3), (0, 3)]
    assert not (tmp_path / "runs/toy/plan-3.json").exists()


def test_train_exits_3_before_any_worker_starts(toy, tmp_path, monkeypatch, capsys):
    workers_that(monkeypatch, "import os, sys; open(os.path.join(sys.argv[1], 'started'), 'w')")
    assert run("train", toy, "pipeline.capacity=1GiB") == 3
    assert "stage 1 needs 4 GiB of 1 GiB" in sentence(capsys)
    assert read_plan(tmp_path / "runs/toy/plan-0.json").fits is False
    assert not (tmp_path / "runs/toy/started").exists()


def test_train_refuses_cuts_that_the_chain_does_not_have(toy, capsys):
    assert run("train", toy, "pipeline.cuts=[0,7]") == 2
    assert "these cuts do not split a chain of 4 layers: cuts is [0, 7]; no stage can begin at 7" in sentence(capsys)


def test_train_refuses_workers_that_replicas_do_not_divide(toy, capsys):
    assert run("train", toy, "pipeline.replicas=2", "--nproc", "3") == 2
    assert "--nproc 3 is not divisible by pipeline.replicas=2" in sentence(capsys)
    assert run("train", toy, "pipeline.devices=2", "--nproc", "3") == 2
    assert "--nproc 3 is given, but pipeline.devices=2 makes 2 workers" in sentence(capsys)


def test_a_dead_worker_is_one_sentence(toy, monkeypatch, capsys):
    workers_that(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run("train", toy, "pipeline.devices=1") == 1
    assert "rank 0 was killed by SIGKILL" in sentence(capsys)


def broken(error: BaseException):
    def command(*arguments, **options):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (StepRefused("loss is nan"), 4, "loss is nan"),
        (CapslogError("two\nlines"), 2, "two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("oh"), 1, "unexpected RuntimeError: oh; this is a defect"),
    ],
)
def test_no_error_escapes_as_a_traceback(error, status, expected, monkeypatch, capsys):
    monkeypatch.delenv("CAPSLOG_DEBUG", raising=False)
    monkeypatch.setattr(cli, "app", broken(error))
    assert run("plan") == status
    assert expected in sentence(capsys)


@pytest.mark.parametrize("error", [CapslogError("bad"), RuntimeError("oh")])
def test_debug_shows_the_traceback(error, monkeypatch):
    monkeypatch.setenv("CAPSLOG_DEBUG", "1")
    monkeypatch.setattr(cli, "app", broken(error))
    with pytest.raises(type(error)):
        run("plan")


ROOT = Path(__file__).parents[1]
SCRIPTS = [
    "launch/gpu.sh",
    "launch/install.sh",
    "launch/quickstart.sh",
    "launch/test.sh",
    "launch/torchrun.sh",
    ".ci/run",
]


def script(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(ROOT / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_help_from_any_folder(name, tmp_path):
    done = script(name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free_gb", "warned"), [(2, True), (8, True), (9, False), (500, False)])
def test_installing_warns_of_a_small_disk_before_pip_begins(free_gb, warned, tmp_path):
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    put("launch/install.sh", (ROOT / "launch/install.sh").read_text())
    put(".venv/bin/python", "#!/bin/sh\necho pip >&2; exit 7\n")
    put("bin/df", f"#!/bin/sh\necho Filesystem; echo disk 0 0 {free_gb * 2**20} 0% /\n")
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = [str(tmp_path / "launch/install.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7, "pip's own status"
    assert done.stderr.endswith("pip\n")
    warning = f"warning: {free_gb} GB are free in {tmp_path}; installing torch"
    assert (warning in done.stderr) == warned == ("warning" in done.stderr)


def test_torchrun_takes_its_workers_from_the_config(tmp_path):
    (tmp_path / "run.yaml").write_text("workload: a:b\npipeline: {devices: 2}\n")
    arguments = ("run.yaml", "pipeline.replicas=2")
    standalone = script("launch/torchrun.sh", "--dry-run", *arguments, cwd=tmp_path).stdout
    assert standalone.split(maxsplit=1)[1].strip() == (
        "-m torch.distributed.run --nnodes 1 --nproc-per-node 4 --standalone "
        "-m detr_pipeline.train run.yaml pipeline.replicas=2"
    )
    options = ("--dry-run", "--nnodes", 2, "--node-rank", 1, "--master", "10.0.0.1", "--port", 1234)
    two_nodes = script("launch/torchrun.sh", *options, *arguments, cwd=tmp_path).stdout
    assert two_nodes.split(maxsplit=1)[1].strip() == (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 "
        "--master-port 1234 -m detr_pipeline.train run.yaml pipeline.replicas=2"
    )


def test_torchrun_takes_its_workers_from_a_given_plan(tmp_path):
    """Also where the config is elastic, which torchrun ignores, and an elastic run could not begin with the plan."""
    pieces, ranks = ([[0, 1]], [[1, 3]], [[3, 4]]), ([0], [2], [1])
    stages = [{"layers": layers, "ranks": rank} for layers, rank in zip(pieces, ranks, strict=True)]
    plan = {"format": "varuna-capslog/plan/2", "num_layers": 4, "schedule": "1f1b", "units": {}, "stages": stages}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "run.yaml").write_text("workload: a:b\npipeline: {plan: plan.json}\nelastic: {enabled: true}\n")
    done = script("launch/torchrun.sh", "--dry-run", "run.yaml", cwd=tmp_path)
    assert "--nproc-per-node 3 " in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no CONFIG given"),
        (["--nodes", "2", "run.yaml"], "unknown option --nodes"),
        (["--nproc", "two", "run.yaml"], "--nproc is 'two'"),
        (["--nnodes", "2", "run.yaml"], "needs --master HOST"),
        (["--node-rank", "1", "run.yaml"], "--node-rank 1 is not below --nnodes 1"),
        (["--nnodes", "3", "--master", "h", "run.yaml"], "2 workers cannot be spread evenly over 3 nodes"),
        (["run.yaml", "trian.seed=1"], "did you mean train?"),
    ],
)
def test_torchrun_refuses_what_cannot_start(arguments, expected, tmp_path):
    (tmp_path / "run.yaml").write_text("workload: a:b\npipeline: {devices: 2}\n")
    done = script("launch/torchrun.sh", "--dry-run", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_in_the_terminal_is_130_and_one_sentence(tmp_path):
    """Before any worker exists, while something slow is read."""
    end, pipe = os.pipe()
    profile = f"/dev/fd/{end}"
    command = [sys.executable, "-c", "from varuna_capslog.cli import main; main()", "plan", "--profile", profile]
    process = subprocess.Popen([*command, "--devices", "2"], stderr=subprocess.PIPE, text=True, pass_fds=[end])
    os.close(end)
    with open(pipe, "wb", buffering=0) as file:
        file.write(bytes(1 << 20))  # more than a pipe holds: returns when the command reads
        time.sleep(0.5)  # and it waits: a signal between two reads is heard when the second one ends
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == "capslog: interrupted\n"
    assert process.wait() == 130


def test_a_wrong_name_is_refused_before_anything_is_imported(tmp_path):
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "run.yaml").write_text("workload: takes_long:workload\npipeline: {planner: exakt}\n")
    code = "import sys; from varuna_capslog.cli import _run; print(_run(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "train", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["2", "False"]
    assert "unknown planner 'exakt'; did you mean 'exact'?" in done.stderr


@pytest.mark.parametrize(
    ("command", "config", "message"),
    [
        ("train", "engine: varuna", "Microsoft's Varuna is not importable here"),
    ],
)
def test_what_this_version_lacks_is_refused_and_never_replaced(command, config, message, tmp_path):
    """`engine=varuna` trained on our own engine, without a word."""
    (tmp_path / "run.yaml").write_text(f"workload: a:b\n{config}\n")
    done = subprocess.run(
        [sys.executable, "-c", "from varuna_capslog.cli import main; main()", command, "run.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},  # where there is a Varuna, hide it
        timeout=180,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"capslog: {message}")
