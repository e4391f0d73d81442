"""The command: quick help, one-line errors with exit code 2, lists as people write them, the same names as Python."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from raptor.cli import main, parse, run_command, split_words
from raptor.config import COMMANDS, DistillConfig, ModelsConfig, PhasesConfig
from raptor.run import Interrupted
from raptor.terminal.help import about, help_of


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_help_takes_a_command(capsys):
    assert main(["help", "distill"]) == 0
    assert capsys.readouterr().out.startswith("usage: raptor distill")


def test_help_and_version_import_nothing_heavy():
    code = "import sys; from raptor.cli import main; main(['--help']); main(['--version']); "
    code += "print([m for m in ('torch', 'timm', 'numpy', 'tyro') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["phaess"], "did you mean phases?"),
        (["phases", "scenes", "--num-imges", "3"], "did you mean --num_images?"),
        (["phases", "scenes", "--stand", "true"], "did you mean --standardise?"),
        (["phases"], "give MODEL; see raptor phases --help"),
        (["phases", "--data", "tests", "scenes"], "give MODEL; see raptor phases --help"),
        (["states", "--layers", "3", "scenes"], "give MODEL; see raptor states --help"),
        (["phases", "scenes", "--data", "a b", "--data=c"], "--data is given twice: leave out one of them"),
        (["distill", "scenes", "--k", "2", "--k=3"], "--k is given twice: leave out one of them"),
        (["phases", "scenes", "--skip-bad", "--skip_bad"], "--skip_bad is given twice: leave out one of them"),
        (["phases", "scenes", "--budget", "3s"], "unknown option --budget: it is an option of distill, head, probe"),
        (["phases", "scenes", "--seed", "3"], "unknown option --seed: it is an option of "),
        (["phases", "scenes", "--zeal", "3"], "unknown option --zeal; see raptor phases --help"),
        (["phases", "scenes", "--k", "two"], "--k must be whole numbers, got two"),
        (["phases", "scenes", "--size", "20.5"], "--size must be a whole number, got 20.5"),
        (["phases", "scenes", "--standardise=maybe"], "--standardise must be true or false, got maybe"),
        (["phases", "scenes", "--method", "best"], "--method must be one of maxcut, dp, function, got best"),
        (["phases", "scenes", "--split", "test"], "unknown split 'test' of scenes; use train, val, all"),
        (["distill", "scenes", "--lr", "high"], "--lr must be a number, got high"),
        (["evaluate", "scenes", "more"], "unexpected more; see raptor evaluate --help"),
        (["study", "scenes", "tests"], "unexpected tests: did you mean --data tests?"),
        (["phases", "scenes", "--config", "nowhere.yaml"], "--config: there is no file nowhere.yaml"),
        (["phases", "resnet18"], "did you mean timm/resnet18"),
        (["phases", "scenes", "--data", "nowhere"], "unknown data 'nowhere'"),
        (["phases", "scenes", "--device", "tpu"], "--device must be one of auto, cpu, cuda, got tpu"),
        (["distill", "scenes", "--budget", "soon"], "cannot read the budget"),
        (["distill", "scenes", "--recipe", "papr"], "did you mean paper?"),
        (["evaluate", "scenes"], "is no surrogate"),
        (
            ["phases", "scenes", "--data", "tests", "--out", "./tests/"],
            "is the folder of the images: choose another --out",
        ),
        (["report", "runs/nowhere"], "there is no run folder runs/nowhere: give the --out of an earlier command"),
        (["report", "tests/reprt"], "there is no run folder tests/reprt: did you mean tests/report?"),
        (["phases", "scenes", "--data", "tests/jorneys"], "unknown data 'tests/jorneys': did you mean tests/journeys?"),
        (["probe", "scenes", "--task", "dream"], "--task must be one of classify, segment, depth, got dream"),
        (["probe", "scenes", "--budget", "0s"], "cannot read the budget"),
        (["models", "zzz"], "no model matches"),
        (["train-teacher", "--smoothing", "-1"], "--smoothing must be at least 0, got -1"),
        (["train-teacher", "--smoothing", "2"], "--smoothing must be less than 1"),
        (["train-teacher", "--mixup", "-1"], "--mixup must be at least 0"),
        (["train-teacher", "--cutmix", "-1"], "--cutmix must be at least 0"),
        (["train-teacher", "--warmup", "5"], "--warmup must be less than 1"),
        (["train-teacher", "--lr", "0"], "--lr must be more than 0"),
        (["train-teacher", "--shape", "resnet50"], "--shape resnet50 is no plain timm ViT"),
        (["distill", "scenes", "--lr", "0"], "--lr must be more than 0"),
        (["distill", "scenes", "photos", "--data", "scenes"], "--data is given twice"),
        (["dynamics", "scenes", "--model", "scenes-k2"], "MODEL is given twice"),
        (["evaluate", "scenes-k3", "--num_images", "4", "--head_file", "/etc/passwd"], "is no linear head"),
        (["phases", "scenes", "--tokens", "pixels"], "has no 'pixels' tokens"),
        (["phases", "scenes", "--k", "2", "13"], "k=13 phases"),
        (["phases", "scenes", "--method", "guess"], "--method must be one of maxcut, dp, function"),
        (["train-teacher", "--dim", "32", "--heads", "3"], "could not be built"),
        (["train-teacher", "--dim", "32", "--heads", "0"], "--heads must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("raptor: ") and message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("distill scenes --block mine", "--block must be one of teacher, paper, got mine"),
        ("distill scenes --conditioning time", "--conditioning must be one of table, mlp, none, got time"),
        ("distill scenes --copy all", "--copy must be one of middle, first, last, representative, got all"),
        ("distill scenes --normalise all", "--normalise must be one of none, layer, group, coordinate, got all"),
        ("distill scenes --augment blur", "--augment must be one of none, crop, got blur"),
        ("distill scenes --stage 3", "--stage must be one of all, 1, 2, got 3"),
        ("distill scenes --track paper", "--track must be one of wandb, tensorboard, got paper"),
        ("distill scenes --start nowhere", "unknown model 'nowhere'"),
        ("probe scenes --closed_form lasso", "--closed_form must be one of ridge, got lasso"),
        ("probe scenes --init_head mine.pth", "choose from own, random"),
        ("probe scenes --classes mine.txt", "--classes: there is no file mine.txt"),
        ("phases dinov2s.pt", "weights file dinov2s.pt does not exist"),
        ("phases my_vit.py:make", "unknown model 'my_vit.py:make': did you mean --module my_vit.py:make?"),
        ("phases my_vit.py", "unknown model 'my_vit.py': did you mean --module my_vit.py:FUNCTION?"),
        ("phases scnes", "unknown model 'scnes': did you mean scenes?"),
        ("phases vit_tiny_patch16_224", "did you mean timm/vit_tiny_patch16_224?"),
        ("evaluate missing", "there is no run folder missing: give the --out of an earlier command"),
    ],
)
def test_what_can_be_refused_early_is_refused_before_the_command_is_imported(words, message, monkeypatch, capsys):
    def imported(module: str) -> None:
        raise AssertionError(f"{module} was imported")

    monkeypatch.setattr("raptor.cli.import_module", imported)
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_known_words_pass_the_early_checks() -> None:
    words = "scenes --stage 2 --conditioning none --augment none --normalise none --copy last --block paper"
    found = parse("distill", words.split())
    assert isinstance(found, DistillConfig)
    assert (found.stage, found.conditioning, found.augment, found.normalise) == ("2", "none", "none", "none")
    assert DistillConfig("scenes").block == "teacher" and DistillConfig("scenes", recipe="paper").block == "paper"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space\nleft on device"), "[Errno 28] No space left on device"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory.\nTried"), "memory is full"),
    ],
)
def test_the_machines_errors_are_one_line_too(error, message, monkeypatch, capsys):
    def fail(*_words):
        raise error

    monkeypatch.setattr("raptor.cli.run_command", fail)
    assert main(["phases"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("raptor: ") and message in printed and printed.count("\n") == 1


def test_the_programs_own_errors_are_not_hidden(monkeypatch):
    def fail(*_words):
        raise RuntimeError("a defect")

    monkeypatch.setattr("raptor.cli.run_command", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["phases"])


def test_options_may_stand_before_the_words_and_switches_alone():
    words = ["--num-images", "8", "scenes", "scenes-k2", "--skip_bad", "--k", "2", "3"]
    found = parse("phases", words)
    assert found == PhasesConfig(["scenes", "scenes-k2"], num_images=8, skip_bad=True, k=[2, 3])
    assert split_words("distill", ["--skip_bad", "scenes"]) == {
        "model": ["scenes"],
        "skip_bad": ["true"],
    }
    assert parse("distill", ["--skip_bad", "false", "scenes", "--pretrained", "False"]) == DistillConfig(
        "scenes", skip_bad=False, pretrained=False
    )


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("scenes --k r2=.5", DistillConfig("scenes", k="r2=.5")),
        ("scenes --k 3 --sizes 224 280", DistillConfig("scenes", k=3, sizes=[224, 280])),
        ("scenes --lr 1e-3 --compile false", DistillConfig("scenes", lr=1e-3, compile=False)),
        ("scenes --data tests raptor", DistillConfig("scenes", data=["tests", "raptor"])),
    ],
)
def test_words_are_the_arguments_of_python(words: str, config: DistillConfig) -> None:
    assert parse("distill", words.split()) == config


def test_the_optional_word_of_models_may_stand_after_a_flag(monkeypatch, capsys):
    def given(config: ModelsConfig) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: vars(config))

    monkeypatch.setattr(import_module("raptor.commands.models"), "models", given)
    for words in (["--json", "dinov2"], ["dinov2", "--json"]):
        assert main(["models", *words]) == 0
        assert json.loads(capsys.readouterr().out)["filter"] == "dinov2"


def test_an_option_of_a_config_file_may_be_typed_too(tmp_path: Path, monkeypatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(import_module("raptor.commands.models"), "models", lambda config: given.update(vars(config)))
    (tmp_path / "options.yaml").write_text("filter: deit\n")
    assert main(["models", "--config", str(tmp_path / "options.yaml")]) == 0
    assert given["filter"] == "deit"
    assert main(["models", "--config", str(tmp_path / "options.yaml"), "--filter", "dinov2"]) == 0
    assert given["filter"] == "dinov2"


def test_a_config_file_is_checked_as_words_are(tmp_path: Path, capsys) -> None:
    path = tmp_path / "options.yaml"
    for text, message in (
        ("num_images: many", "--num_images must be a whole number, got many"),
        ("k: [2, 0]", "--k"),
    ):
        path.write_text(text)
        assert main(["phases", "scenes", "--config", str(path)]) == 2
        assert message in capsys.readouterr().err
    path.write_text("data: scenes\nk: [2, 3]\nnum-images: 7\n")
    found = parse("phases", ["scenes", "--config", str(path), "--num_images", "8"])
    assert isinstance(found, PhasesConfig) and (found.data, found.k, found.num_images) == (["scenes"], [2, 3], 8)


def test_the_home_folder_is_expanded_in_every_option(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    given: dict[str, object] = {}
    monkeypatch.setattr(import_module("raptor.commands.phases"), "phases", lambda config: given.update(vars(config)))
    (tmp_path / "file").write_text("")
    assert main(["phases", "~/file", "--out=~/x", "--weights=~/file", "--data", "~/", "scenes"]) == 0
    assert (given["out"], given["weights"]) == (f"{tmp_path}/x", f"{tmp_path}/file")
    assert (given["models"], given["data"]) == ([f"{tmp_path}/file"], [f"{tmp_path}/", "scenes"])
    assert main(["phases", "scenes", "--data", "~/", "--out=~/"]) == 2
    assert "is the folder of the images" in capsys.readouterr().err


def test_help_names_no_classes_of_the_library():
    for name in ("distill", "train-teacher"):
        text = help_of(name, everything=True)
        assert "subclass" not in text and "ImageData" not in text and "Module" not in text


@pytest.mark.parametrize(("error", "code"), [(Interrupted("stopped after step 3"), 130), (BrokenPipeError(), 2)])
def test_exit_codes_of_a_stop_and_of_a_broken_pipe_elsewhere(monkeypatch, capsys, error, code):
    def fails(*_):
        raise error

    monkeypatch.setattr("raptor.cli.run_command", fails)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert main(["phases"]) == code


# Ctrl-C at the moment at which a module is looked for.
STOPPED_AT = """
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Stop())
runpy.run_module("raptor", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["raptor.cli", "pydantic", "raptor.config", "raptor.commands.models"])
def test_a_command_can_be_stopped_while_it_is_imported(module: str) -> None:
    words = [sys.executable, "-c", STOPPED_AT, module, "models"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "raptor: stopped\n")


# Prints a lot, then saves a file: what training does.
CHATTY = """
import sys, time
from pathlib import Path
from raptor import cli

def run_command(name, words):
    for _ in range(20):
        print("x" * 10_000, file=getattr(sys, words[0]), flush=True)
        time.sleep(0.005)
    Path(words[1]).write_text("saved")
    return 0

cli.run_command = run_command
sys.exit(cli.main(sys.argv[1:]))
"""


def run_shell(line: str) -> subprocess.CompletedProcess[str]:
    script = f"set -o pipefail; {line}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PY": sys.executable, "CODE": CHATTY}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(
    "ending",
    ["stderr saved 2>&1 | head -c 1", "stdout saved | head -c 1", "stderr saved 2>&-", "stderr saved 2>/dev/full"],
)
def test_a_broken_stream_ends_nothing(ending: str, tmp_path: Path) -> None:
    done = run_shell(f'cd {tmp_path}; "$PY" -c "$CODE" distill {ending}')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").read_text() == "saved"


def test_a_result_that_cannot_be_printed_is_an_error(tmp_path: Path) -> None:
    done = run_shell(f'cd {tmp_path}; "$PY" -c "$CODE" distill stdout saved > /dev/full')
    assert done.returncode == 2 and done.stderr.startswith("raptor: ") and done.stderr.count("\n") == 1


def test_distill_into_a_pipe_that_closes_saves_its_surrogate(tmp_path: Path) -> None:
    options = "--phases 6 6 --budget 2steps --batch_size 4 --train_images 8 --num_images 4 --out run"
    done = run_shell(f'cd {tmp_path}; "$PY" -m raptor distill scenes {options} 2>&1 | head -c 1')
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run" / "surrogate" / "model.safetensors").exists()


REFUSED_EARLY = """
phases
phases --help
phases scenes --nope 1
phases scenes --k two
phases scenes --method best
phases scenes --device tpu
probe scenes --task dream
phases scenes --weights nowhere.pth
phases scenes --weights=
phases ./nowhere
phases scenes --data nowhere
evaluate runs/nowhere
distill scenes --lr high
train-teacher --drop much
completion bash
"""

# One process for all of them: it stops at the first line that imports something slow.
SAY_WHAT_IS_IMPORTED = """
import sys
from raptor.cli import main

for line in sys.argv[1].strip().splitlines():
    try:
        main(line.split())
    except SystemExit:
        pass
    slow = [name for name in ("torch", "timm", "numpy") if name in sys.modules]
    assert not slow, f"raptor {line} imports {slow}"
"""


def test_usage_is_checked_before_anything_slow_is_imported() -> None:
    words = [sys.executable, "-c", SAY_WHAT_IS_IMPORTED, REFUSED_EARLY]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("raptor: ") == 13


@pytest.mark.parametrize("option", ["weights", "out", "data", "tokens"])
def test_an_empty_value_is_refused(option: str, capsys) -> None:
    assert main(["phases", "scenes", f"--{option}="]) == 2
    assert capsys.readouterr().err == f"raptor: --{option} is empty: give a value, or leave it out\n"
    assert main(["phases", ""]) == 2
    assert "MODEL is empty" in capsys.readouterr().err


def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch) -> None:
    def fail(*_words: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"})
    module = import_module("raptor.commands.models")
    monkeypatch.setattr(module, "models", lambda _config: None)
    assert main(["models", "timm/vit_tiny"]) == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raptor ph", ["phases"]),
        ("raptor phases scenes --st", ["--standardise"]),
        ("raptor phases scenes --method ", ["maxcut", "dp", "function"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(line: str, expected: list[str], monkeypatch, capsys) -> None:
    *_, previous, current = line.split(" ")
    monkeypatch.setenv("COMP_LINE", line)
    # So bash asks for candidates, by `complete -C`.
    assert main(["completion", "raptor", current, previous]) == 0
    assert capsys.readouterr().out.split() == expected


def test_the_script_of_a_shell_is_one_that_bash_takes(capsys) -> None:
    assert main(["completion", "bash"]) == 0
    subprocess.run(["bash", "-c", capsys.readouterr().out + "complete -p raptor"], check=True, capture_output=True)
    assert main(["completion", "fish"]) == 2


def test_every_command_has_a_module_and_an_example():
    for name in COMMANDS:
        function = name.replace("-", "_")
        assert callable(getattr(import_module(f"raptor.commands.{function}"), function)), name
        assert about(name)[1], name


def test_python_has_the_same_verbs_as_functions():
    from raptor import commands

    for name in COMMANDS:
        assert inspect.isfunction(getattr(commands, name.replace("-", "_"))), name


def test_a_config_file_with_an_unknown_option_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "options.yaml").write_text("num_imges: 3\n")
    assert main(["phases", "scenes", "--config", str(tmp_path / "options.yaml")]) == 2
    assert "unknown option --num_imges: did you mean --num_images?" in capsys.readouterr().err


def test_a_command_that_is_one_process_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="raptor report is one process: start it without torchrun"):
        run_command("report", ["runs/mine"])


def test_a_revision_after_a_models_name_is_not_taken_for_a_file(capsys):
    assert main(["phases", "timm/vit_tiny_patch16_224@v9", "--pretrained", "false", "--data", "scenes"]) == 2
    assert "names a revision of published weights" in capsys.readouterr().err


def test_json_stays_json_where_a_module_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom raptor import open_vit\n\ndef make_vit():\n    print('hello')\n"
        "    os.system('echo from a process')\n    return open_vit('scenes')\n"
    )
    few = ["--data", "scenes", "--num_images", "4", "--k", "2", "--twin", "false", "--device", "cpu", "--json"]
    words = ["phases", "--module", f"{tmp_path / 'mine.py'}:make_vit", "--out", str(tmp_path / "out"), *few]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["models"]
    assert "hello" in printed.err and "from a process" in printed.err
