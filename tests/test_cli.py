"""The command line: what goes to stdout and to stderr, the exit codes, and what is not imported."""

from __future__ import annotations

import fcntl
import inspect
import json
import logging
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import lazymerge
from lazymerge import api, cli, display, errors
from lazymerge.cli import failures
from lazymerge.cli.verify import lines as cli_lines
from lazymerge.conversions import model_process
from lazymerge.files.size import format_size
from lazymerge.manifest import ManifestReport
from lazymerge.report import MergeReport, Progress
from lazymerge.verification import VerifyReport
from tests.checks import refused, tree

ROOT = Path(__file__).parents[1]
LAZYMERGE = [sys.executable, "-m", "lazymerge"]
HEAVY = ["torch", "numpy", "rich", "transformers", "huggingface_hub", "psutil"]


def lazymerge_cli(*args: object) -> Result:
    return CliRunner().invoke(cli.cli, [str(arg) for arg in args], prog_name="lazymerge")


def process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A real process, its stdout and stderr in pipes."""
    command = [*LAZYMERGE, *(str(arg) for arg in args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


def modules_after(code: str, names: list[str]) -> list[str]:
    """Which of the modules are imported once a new interpreter has run the code."""
    code += f"\nimport json, sys; print(json.dumps([name for name in {names!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full state dict of 12 tensors, 480 kB, with the config of its model."""
    import transformers

    folder = tmp_path_factory.mktemp("src")
    sizes = {"hidden_size": 100, "intermediate_size": 99, "num_hidden_layers": 1, "vocab_size": 250}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=5, architectures=["LlamaForCausalLM"], dtype="float32"
    )
    torch.manual_seed(0)
    torch.save(transformers.LlamaForCausalLM(config).state_dict(), folder / "model.pt")
    (folder / "config.json").write_text(config.to_json_string())
    return folder


@pytest.fixture(scope="module")
def truth(src: Path) -> dict[str, torch.Tensor]:
    return torch.load(src / "model.pt")


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of `api.merge`, which ends at once."""
    arguments: list[dict[str, Any]] = []
    signature = inspect.signature(api.merge)

    @wraps(api.merge)
    def merge(*args: object, **kwargs: object) -> None:
        arguments.append(signature.bind(*args, **kwargs).arguments)
        raise errors.PlanError("enough")

    monkeypatch.setattr(api, "merge", merge)
    return arguments


def test_every_argument_of_merge_is_an_option_with_the_same_default(calls: list[dict[str, Any]]):
    wanted = inspect.signature(api.merge).parameters
    lazymerge_cli("merge", "a", "b", "c", "-q")
    (given,) = calls
    assert (given.pop("src"), given.pop("dst")) == ((Path("a"), Path("b")), Path("c"))
    assert given == {name: wanted[name].default for name in wanted if name not in {"src", "dst"}}


def test_options_are_passed_on(calls: list[dict[str, Any]]):
    flags = ["--max_ram=1GB", "--include", "x", "--include", "y_z", "--fsdp_version", 2, "--hf-config", "d"]
    lazymerge_cli("merge", "a", "b", *flags)
    (given,) = calls
    assert given["max_ram"] == "1GB"
    assert given["include"] == ("x", "y_z")  # underscores of values are left alone
    assert given["fsdp_version"] == 2
    assert given["hf_config"] == Path("d")


@pytest.mark.parametrize("style", ["-", "_"])
def test_flags_take_dashes_and_underscores(src: Path, tmp_path: Path, style: str):
    flags = ["--max-ram=1GB", "--max-shard-size=100kB", "--no-check-copies", "--dry-run", "--log-level=error"]
    done = lazymerge_cli("merge", src, tmp_path / "out", *("--" + f[2:].replace("-", style) for f in flags))
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["merge", "only-one"],
        ["merge", "a", "b", "--no-such-flag"],
        ["merge", "a", "b", "--output-format", "x"],
    ],
)
def test_wrong_usage_is_exit_code_2(args: list[str]):
    done = lazymerge_cli(*args)
    assert done.exit_code == 2
    assert "Usage: lazymerge merge" in done.stderr
    assert done.stdout == ""


PLACES = ["--hf-config", "--hf_model_path", "--backfill", "--adapter", "--lora-config", "--family"]
"""Options of merge that take a path."""


@pytest.mark.parametrize(
    "args",
    [
        ["merge", "", "b"],
        ["merge", "a", ""],
        ["merge", "a", "", "b"],
        ["merge", "--local_dir", "", "--target_dir", "b"],
        ["merge", "--local_dir", "a", "--target_dir", ""],
        *(["merge", "a", "b", option, ""] for option in [*PLACES, "--param-mapping"]),
        ["verify", ""],
        ["verify", "a", "--against", ""],
        ["test", "--local_dir", "", "--test_hf_dir", "b"],
        ["test", "--local_dir", "a", "--test_hf_dir", ""],
        ["upload", "", "lab/model"],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(src: Path, tmp_path: Path, monkeypatch, args: list[str]):
    """It is what an unset variable of the shell leaves, and --target_dir replaces what is there."""
    monkeypatch.chdir(shutil.copytree(src, tmp_path / "here"))
    before = tree(tmp_path)
    done = lazymerge_cli(*args)
    assert done.exit_code == 2
    assert "Usage: " in done.stderr and "the path is empty" in done.stderr
    assert tree(tmp_path) == before


def test_nor_is_one_that_is_given_to_the_library(src: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(src, tmp_path / "here"))
    for call in (
        lambda: lazymerge.open(""),
        lambda: lazymerge.open([src, ""]),
        lambda: lazymerge.open(src, hf_config=""),
        lambda: lazymerge.merge("", "out"),
        lambda: lazymerge.merge(src, "", overwrite=True),
        lambda: lazymerge.merge(src, "out", hf_config=""),
        lambda: lazymerge.merge(src, "out", backfill=""),
        lambda: lazymerge.merge(src, "out", lora_config=""),
        lambda: lazymerge.merge(src, "out", adapter=""),
        lambda: lazymerge.merge(src, "out", adapter=["=0.5"]),
        lambda: lazymerge.verify(""),
        lambda: lazymerge.verify(src, ""),
        lambda: lazymerge.verify("", src),
        lambda: lazymerge.upload("", "lab/model"),
    ):
        with refused(errors.PlanError, "the path is empty", dst=tmp_path):
            call()


@pytest.mark.parametrize(
    "flags", [["--token", "t"], ["--revision", "b"], ["--create-pr"], ["--commit-message", "m"]]
)
def test_options_of_an_upload_without_one(src: Path, tmp_path: Path, flags: list[str]):
    """verl's --private alone is taken, as there, and a note says that it does nothing."""
    done = lazymerge_cli("merge", src, tmp_path / "out", *flags, "--private")
    assert done.exit_code == 2
    assert f"{flags[0]}: nothing is uploaded" in done.stderr
    assert not (tmp_path / "out").exists()
    done = lazymerge_cli("merge", src, tmp_path / "out", "--private", "--dry-run")
    assert done.exit_code == 0
    assert "note: --private: does nothing without --push-to-hub" in done.stdout


@pytest.mark.parametrize(
    ("args", "kind", "word"),
    [
        (["merge", "a", "b", "--json", "--no-such-flag"], "NoSuchOption", "--no-such-flag"),
        (["merge", "--json", "only-one"], "MissingParameter", "DST"),
        (["merge", "a", "b", "--json", "--output-format", "x"], "BadParameter", "'x' is not one of"),
        (["merge", "a", "b", "--json", "--max-workers", "0"], "BadParameter", "--max-workers"),
        (["merge", "a", "b", "--json", "--dtype"], "BadOptionUsage", "--dtype"),
        (["no-such-command", "--json"], "NoSuchCommand", "no-such-command"),
        (["--json"], "NoSuchOption", "--json"),
    ],
    ids=str,
)
def test_wrong_usage_is_json_where_that_is_asked_for(args: list[str], kind: str, word: str):
    done = lazymerge_cli(*args)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["kind"]) == (2, kind)
    assert word in told["error"]
    assert told["hint"].startswith("lazymerge")
    assert set(told) == {"error", "hint", "kind"}
    assert done.stderr.endswith(f"Error: {told['error']}\n")


def test_wrong_usage_in_a_real_process():
    done = process("merge", "a", "b", "--json", "--strikt")
    assert done.returncode == 2
    assert json.loads(done.stdout)["kind"] == "NoSuchOption"


def test_version():
    assert lazymerge_cli("--version").stdout == f"lazymerge {lazymerge.__version__}\n"


@pytest.mark.parametrize("args", [["-h"], ["merge", "-h"]])
def test_help_has_examples(args: list[str]):
    assert "Examples:\n    lazymerge merge " in lazymerge_cli(*args).stdout


def test_the_page_shows_this_help():
    done = subprocess.run(
        [sys.executable, "-m", "cogapp", "--check", "docs/cli.md"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, "run `python -m cogapp -r docs/cli.md`"


@pytest.mark.parametrize("command", ["merge", "upload", "verify", "test"])
def test_help_has_every_option_once_and_under_a_heading(command: str):
    text = lazymerge_cli(command, "--help").stdout
    for option in cli.cli.commands[command].params:
        if isinstance(option, click.Option):
            name = next(each for each in option.opts if each.startswith("--"))
            assert len(re.findall(rf"^  (-\w, )?{name}(?=[ ,]|$)", text, re.MULTILINE)) == 1, name
    rest = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert rest.split()[:2] == ["-h,", "--help"] and rest.count("--") == 1


def test_commands_are_told_apart_in_80_columns():
    listed = lazymerge_cli("-h").stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    assert "..." not in listed and len(listed.splitlines()) == 4
    assert "  test    verl's name of verify." in listed.splitlines()


# ---- what is imported -------------------------------------------------------------------------------------


def test_the_public_names():
    names = ["Checkpoint", "LazymergeError", "MergeReport", "Note", "Progress", "Topology", "VerifyReport"]
    names += ["merge", "open", "upload", "verify"]
    assert lazymerge.__all__ == names
    for name in names:
        assert getattr(lazymerge, name).__name__ == name
    assert set(names) <= set(dir(lazymerge))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = lazymerge.other  # type: ignore[attr-defined]


@pytest.mark.parametrize("args", [["--help"], ["merge", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(args: list[str]):
    run = f"from lazymerge.cli import cli\ncli.main({args!r}, standalone_mode=False)"
    assert modules_after(run, HEAVY) == []


@pytest.mark.parametrize(
    ("flags", "imported"), [([], []), (["--dtype", "bfloat16"], []), (["--dtype", "float16"], ["torch"])]
)
def test_a_merge_imports_torch_only_for_casts_that_need_it(
    src: Path, tmp_path: Path, flags: list[str], imported: list[str]
):
    args = ["merge", str(src), str(tmp_path / "out"), *flags]
    run = f"from lazymerge.cli import cli\ncli.main({args!r}, standalone_mode=False)"
    assert modules_after(run, ["torch", "transformers", "rich"]) == imported


# ---- what is printed --------------------------------------------------------------------------------------


def test_a_merge_imports_no_verification(src: Path, tmp_path: Path):
    code = f"import lazymerge; lazymerge.merge({str(src)!r}, {str(tmp_path / 'out')!r}, check=False"
    assert modules_after(f"{code})", ["lazymerge.compare"]) == []
    assert modules_after(f"{code}, overwrite=True, verify=True)", ["lazymerge.compare"]) != []


def test_the_report_is_on_stdout_and_the_progress_on_stderr(
    src: Path, tmp_path: Path, truth: dict[str, torch.Tensor]
):
    out = tmp_path / "out"
    done = process("merge", src, out)
    assert done.returncode == 0
    merged = load_file(out / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in truth.items())
    for text in [
        f"Merged fsdp, 1 rank, into {out}\n",
        f"files     model.safetensors  {format_size((out / 'model.safetensors').stat().st_size)}\n",
        "tensors   12: 12 float32 (480 kB)\n",
        "sidecars  config.json\n",
        f"Load it:\n  transformers.LlamaForCausalLM.from_pretrained({str(out)!r}, dtype='auto')\n",
    ]:
        assert text in done.stdout
    assert re.search(r"memory    [\d.]+ MB at most, of a budget of ", done.stdout)
    assert re.search(r"written   481 kB in [\d.]+ m?s \([\d.]+ .B/s\), [\d.]+ m?s in all\n", done.stdout)
    assert "writing" not in done.stderr  # of what is done at once


def test_the_line_that_loads_keeps_what_was_written(
    src: Path, tmp_path: Path, truth: dict[str, torch.Tensor]
):
    """fp32 ranks of a bf16 model: transformers loads what config.json says unless it is told."""
    import transformers

    half = shutil.copytree(src, tmp_path / "half")
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    unasked = ["--no-check", "--names", "runtime", "--no-check-copies"]
    for flags, dtype in (([], "float32"), (["--dtype", "bfloat16"], "auto")):
        out = tmp_path / dtype
        done = lazymerge_cli("merge", half, out, *unasked, *flags)
        line = f"transformers.LlamaForCausalLM.from_pretrained({str(out)!r}, dtype={dtype!r})"
        assert f"\nLoad it (that it loads was not checked):\n  {line}\n" in done.stdout
        assert ("a plain from_pretrained loads it as bfloat16" in done.stdout) is not flags
        plain = transformers.LlamaForCausalLM.from_pretrained(out).state_dict()
        assert {tensor.dtype for tensor in plain.values()} == {torch.bfloat16}
        loaded = eval(line, {"transformers": transformers}).state_dict()  # noqa: S307
        for name, tensor in truth.items():
            wanted = tensor if not flags else tensor.bfloat16()
            assert loaded[name].dtype == wanted.dtype and torch.equal(loaded[name], wanted)


def test_a_wait_for_transformers_is_told(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAZYMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_process.subprocess, "run", raising(PermissionError(1, "not here")))
    line = "asking transformers about LlamaForCausalLM (some seconds, once for each config.json)\n"
    assert lazymerge_cli("merge", src, tmp_path / "out").stderr.startswith(f"{line}error: ")
    assert lazymerge_cli("merge", src, tmp_path / "out", "--log-level", "error").stderr.startswith(line)
    assert (
        " MB  asking transformers about "
        in lazymerge_cli("merge", src, tmp_path / "out", "--log-level", "debug").stderr
    )
    as_json = lazymerge_cli("merge", src, tmp_path / "out", "--json")
    assert line in as_json.stderr and json.loads(as_json.stdout)["kind"] == "PlanError"
    assert lazymerge_cli("merge", src, tmp_path / "out", "-q").stderr.startswith("error: ")


def test_ranks_cannot_be_verified_alone(src: Path, tmp_path: Path, checkpoint: Callable[[str], Any]):
    for folder in (src, checkpoint("fsdp2-llama-tied").root):
        done = lazymerge_cli("verify", folder)
        assert done.exit_code == 2
        assert done.stderr.splitlines()[0].endswith(
            f"{folder}: a training checkpoint (fsdp), and no model that was merged"
        )
        assert "--against" in done.stderr.splitlines()[1]
    (tmp_path / "notes.txt").write_text("nothing")
    assert "--against" not in lazymerge_cli("verify", tmp_path).stderr


def test_the_time_of_reading_is_not_that_of_waiting():
    manifest = ManifestReport(2, 3, 9_760, ())
    facts = ("out", None, (), manifest, None, None, {}, ((), ()))
    report = VerifyReport(*facts, seconds=12.0, peak=80_000_000, reading=0.5)
    assert list(cli_lines(report)) == [
        "unchanged: 2 files, 3 tensors (9.76 kB read in 0.5 s, 12 s in all, 80 MB of memory)"
    ]


def test_a_pipe_gets_no_carriage_return_and_no_colour(src: Path, tmp_path: Path):
    options = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = process("merge", src, tmp_path / "out", "--log-level", "debug", env=options)
    assert "\r" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert process("merge", src, tmp_path / "out", env=options).stderr.startswith("error: ")


def test_json_is_one_object_and_all_of_stdout(src: Path, tmp_path: Path):
    done = process("merge", src, tmp_path / "out", "--json", "--max-shard-size", "100kB")
    report = json.loads(done.stdout)
    assert report["destination"] == str(tmp_path / "out")
    assert report["per_dtype"] == {"float32": [12, 480_000]}
    assert (
        sum(report["files"].values())
        == report["bytes_written"]
        == report["disk"] - (src / "config.json").stat().st_size
    )
    assert report["budget"] >= report["peak"] > 0
    assert report["seconds"] >= report["moving"] > 0


def test_quiet_prints_nothing(src: Path, tmp_path: Path):
    done = process("merge", src, tmp_path / "out", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    again = process("merge", src, tmp_path / "out", "-q")
    assert (again.returncode, again.stdout, again.stderr[:6]) == (2, "", "error:")


def test_quiet_json_prints_json_alone(src: Path, tmp_path: Path):
    done = process("merge", src, tmp_path / "out", "-q", "--json")
    assert json.loads(done.stdout)["tensors"] == 12
    assert done.stderr == ""


def test_a_dry_run_shows_the_plan_and_writes_nothing(src: Path, tmp_path: Path):
    out = tmp_path / "new" / "out"
    done = lazymerge_cli("merge", src, out, "--dry-run", "--max-workers", 2, "--max-shard-size", "200kB")
    assert done.exit_code == 0
    assert not out.parent.exists()
    assert re.search(
        r"read      480 kB\n  write     48\d kB of [\d.,]+ .B that are free on the disk\n", done.stdout
    )
    assert re.search(
        r"memory    [\d.]+ MB at most, of a budget of [\d.]+ .B\n  workers   2, with blocks of", done.stdout
    )
    assert "model-00001-of-00003.safetensors" in done.stdout
    assert done.stdout.endswith("Nothing was written; run without --dry-run to merge.\n")


def test_a_sharded_checkpoint(checkpoint: Callable[[str], Any], tmp_path: Path):
    made = checkpoint("fsdp2-llama-tied")
    done = lazymerge_cli("merge", made.root, tmp_path / "out", "--dtype", "bf16")
    assert done.exit_code == 0, done.stderr
    assert "4 ranks (fsdp=4)" in done.stdout
    assert "  left out  lm_head.weight: " in done.stdout


def test_debug_logs_each_step_with_the_memory(src: Path, tmp_path: Path):
    done = lazymerge_cli("merge", src, tmp_path / "out", "--log-level", "debug", "--max-shard-size", "400kB")
    steps = re.findall(r"^\d\d:\d\d:\d\d +\d+ MB  debug: (\w+)", done.stderr, re.MULTILINE)
    assert steps == ["opened", "planned", "checked", "begun", "finished", "begun", "finished", "published"]
    assert logging.getLogger("lazymerge").level == logging.NOTSET  # as it was


def test_the_library_prints_and_configures_nothing(
    src: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    handlers = list(logging.getLogger("lazymerge").handlers)
    lazymerge.merge(src, tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("lazymerge").handlers == handlers


# ---- the report -------------------------------------------------------------------------------------------


def a_report(**changes: Any) -> MergeReport:
    facts: dict[str, Any] = {
        "destination": Path("out"),
        "format": "fsdp",
        "topology": "4 ranks",
        "dry_run": False,
        "files": {"model.safetensors": 2_000_000_000},
        "sidecars": (),
        "tensors": 3,
        "per_dtype": {"bfloat16": (3, 2_000_000_000)},
        "bytes_read": 2_000_000_000,
        "bytes_written": 2_000_000_000,
        "disk": 2_000_000_000,
        "disk_free": 9_000_000_000,
        "workers": 2,
        "block": 1 << 20,
        "budget": 300_000_000,
        "predicted_peak": 150_000_000,
        "peak": 140_000_000,
        "seconds": 2.0,
        "notes": (),
        "left_out": {},
        "resumed": (),
        "how_to_load": "load()",
    }
    return MergeReport(**facts | changes)


def shown(everything: bool = False, **changes: Any) -> str:
    return "\n".join(display.report_lines(a_report(**changes), everything=everything))


def test_long_lists_are_cut_unless_everything_is_wanted():
    left_out = {f"w{i}": "why not" for i in range(9)}
    assert shown(left_out=left_out).count("why not") == 5
    assert "            and 4 more (--log-level debug lists all)" in shown(left_out=left_out)
    assert shown(True, left_out=left_out).count("why not") == 9


def test_bytes_of_an_earlier_run_are_not_in_the_rate():
    files = {"a": 1_500_000_000, "b": 500_000_000}
    text = shown(files=files, resumed=("a",), moving=2.0, seconds=57.0)
    assert "written   500 MB in 2.0 s (250 MB/s), 57 s in all\n" in text
    assert "resumed   a  finished by an earlier run" in text


def test_warnings_come_last_and_are_marked():
    notes = (lazymerge.Note("warning", "look out"), lazymerge.Note("info", "by the way"))
    assert "note: by the way\n\x1b[33m\x1b[1mwarning: \x1b[0mlook out\n\nLoad it:" in shown(notes=notes)


def test_a_line_that_loads_is_marked_where_nobody_checked_it():
    assert "\nLoad it:\n  load()" in shown()
    assert "\nLoad it (that it loads was not checked):\n  load()" in shown(checked=False)


def test_what_was_verified_stands_apart():
    text = shown(verified=True, url="https://hub")
    assert text.endswith("byte for byte.\nUploaded: https://hub\n\nLoad it:\n  load()")


def test_a_model_folder_is_called_so():
    assert shown(format="huggingface", topology="1 rank").startswith(
        "Merged a Hugging Face model, into out\n"
    )


def test_a_dry_run_warns_of_a_full_disk():
    text = shown(dry_run=True, disk_free=500_000_000)
    assert "write     2 GB of 500 MB that are free on the disk" in text
    assert "the disk of out is short of 1.5 GB" in text


def test_a_dry_run_where_the_file_system_does_not_say_what_is_free():
    text = shown(dry_run=True, disk_free=None)
    assert "write     2 GB\n" in text
    assert "short" not in text


def test_a_name_cannot_steer_the_terminal():
    text = shown(left_out={"w\x1b]0;gotcha\x07\n[red]": "no\rno"})
    assert r"w\x1b]0;gotcha\x07\n[red]: no\rno" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (4.4e9, "4.4 GB"),
        (1.5e15, "1,500 TB"),
    ],
)
def test_sizes(nbytes: float, text: str):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0042, "4 ms"), (0.84, "0.8 s"), (12.4, "12 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_durations(seconds: float, text: str):
    assert display.duration(seconds) == text


# ---- progress ---------------------------------------------------------------------------------------------


def test_lines_come_at_most_every_five_seconds(capsys: pytest.CaptureFixture[str]):
    now = 100.0
    lines = display.Lines(clock=lambda: now)
    for step in range(23):
        lines(Progress("write", step * 10**8, 44 * 10**8, 150_000_000, "model.safetensors"))
        now += 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "writing  500 MB of 4.4 GB (11 %)  100 MB/s  39 s left  150 MB resident  model.safetensors",
        "writing  1 GB of 4.4 GB (22 %)  100 MB/s  34 s left  150 MB resident  model.safetensors",
        "writing  1.5 GB of 4.4 GB (34 %)  100 MB/s  29 s left  150 MB resident  model.safetensors",
        "writing  2 GB of 4.4 GB (45 %)  100 MB/s  24 s left  150 MB resident  model.safetensors",
    ]


def stepped(*events: tuple[str, int, int]) -> None:
    """Lines for these events (stage, done, total), one a second."""
    times = iter(range(100))
    lines = display.Lines(clock=lambda: next(times))
    for stage, done, total in events:
        lines(Progress(stage, done, total, 150_000_000, "w"))


def test_lines_of_comparing_copies_have_no_rate(capsys: pytest.CaptureFixture[str]):
    stepped(*[("check", 0, 0)] * 6)
    assert capsys.readouterr().err == "comparing copies  150 MB resident  w\n"


def test_there_are_no_lines_of_what_takes_a_few_seconds(capsys: pytest.CaptureFixture[str]):
    written = [*(("write", n, 4) for n in range(1, 5)), ("finish", 4, 4)]
    stepped(*written, *(("verify", n, 4) for n in range(1, 5)))
    assert capsys.readouterr().err == ""


def test_lines_end_with_all_of_it_and_begin_anew(capsys: pytest.CaptureFixture[str]):
    written = [*(("write", n * 10**6, 7 * 10**6) for n in range(1, 8)), ("finish", 7 * 10**6, 7 * 10**6)]
    stepped(*written, *(("verify", n * 10**6, 9 * 10**6) for n in range(1, 10)))
    assert capsys.readouterr().err.splitlines() == [
        "writing  6 MB of 7 MB (85 %)  1 MB/s  1.0 s left  150 MB resident  w",
        "writing  7 MB of 7 MB (100 %)  1 MB/s  150 MB resident  w",
        "comparing  6 MB of 9 MB (66 %)  1 MB/s  3.0 s left  150 MB resident  w",
        "comparing  9 MB of 9 MB (100 %)  1 MB/s  150 MB resident  w",
    ]


def in_terminal(*args: object, term: str = "xterm-256color") -> tuple[int, str]:
    """The exit code and what a terminal gets to see."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(
            sys.executable, [*LAZYMERGE, *map(str, args)], {**os.environ, "TERM": term, "COLUMNS": "80"}
        )
    seen = b""
    try:
        while chunk := os.read(terminal, 65536):
            seen += chunk
    except OSError:
        pass  # the other side is closed
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_terminal_gets_a_bar(src: Path, tmp_path: Path):
    code, seen = in_terminal("merge", src, tmp_path / "out", "--log-level", "debug")
    assert code == 0
    assert re.search(r"\r\x1b\[2K\S*━+.*480.0/480.0 kB.*RAM [\d.]+ MB model", seen)
    assert re.search(r"\x1b\[2K\d\d:\d\d:\d\d +\d+ MB  debug: finished", seen)  # above the bar, not in it
    assert seen.endswith("dtype='auto')\r\n")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_terminal_without_a_cursor_gets_lines(src: Path, tmp_path: Path):
    code, seen = in_terminal("merge", src, tmp_path / "out", term="dumb")
    assert code == 0
    assert "━" not in seen and "\r\x1b" not in seen


# ---- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DamagedFile("f: is cut", "copy it again"), 2),
        (errors.VerificationError("w: differs", "look"), 3),
    ],
)
def test_an_error_is_two_lines_and_an_exit_code(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int):
    monkeypatch.setattr(api, "merge", raising(error))
    done = lazymerge_cli("merge", "a", "b")
    assert done.exit_code == code
    assert done.stderr == f"error: {error.args[0]}\nhint: {error.args[1]}\n"
    assert done.stdout == ""
    done = lazymerge_cli("merge", "a", "b", "--json")
    assert json.loads(done.stdout) == {
        "error": error.args[0],
        "hint": error.args[1],
        "kind": type(error).__name__,
    }
    assert done.exit_code == code


def raising(error: BaseException) -> Callable[..., Any]:
    def merge(*args: object, **kwargs: object) -> None:
        raise error

    return merge


def test_errors_of_a_real_process(tmp_path: Path):
    done = process("merge", tmp_path / "nothing", tmp_path / "out")
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*nothing: No such file or directory\nhint: .+\n", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(src: Path, tmp_path: Path, closed: str):
    """As a daemon has it."""
    for command in (
        ["merge", src, tmp_path / "out", "--no-check"],
        ["verify", src, "--against", tmp_path / "out"],
    ):
        words = [sys.executable, "-m", "lazymerge", *map(str, command)]
        done = subprocess.run(["sh", "-c", f"exec {shlex.join(words)} {closed}"], cwd=ROOT, timeout=60)
        assert done.returncode == 0
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_full_stdout_is_said_on_stderr(src: Path, tmp_path: Path):
    with open("/dev/full", "w") as full:
        for flags in ([], ["--json"]):
            words = [
                sys.executable,
                "-m",
                "lazymerge",
                "merge",
                str(src),
                str(tmp_path / "out"),
                "--no-check",
            ]
            done = subprocess.run(
                [*words, "--overwrite", *flags],
                cwd=ROOT,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
            assert "error: the system: No space left on device" in done.stderr
            assert "Traceback" not in done.stderr
            assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    "where", ["source", "result", "--hf-config", "--adapter", "--lora-config", "--backfill"]
)
@pytest.mark.parametrize("name", ["x" * 256, "loop/x", "null\0"], ids=["long", "loop", "null"])
def test_paths_that_no_file_has(src: Path, tmp_path: Path, where: str, name: str):
    (tmp_path / "loop").symlink_to("loop")
    arguments: dict[str, Any] = {"src": src, "dst": tmp_path / "out"}
    if where.startswith("--"):
        arguments[where[2:].replace("-", "_")] = str(tmp_path / name)
    else:
        arguments["src" if where == "source" else "dst"] = tmp_path / name
    with pytest.raises(lazymerge.LazymergeError) as caught:
        lazymerge.merge(**arguments, check=False)
    assert name[:200].replace("\0", "") in caught.value.problem
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-ram", "lots"], "'lots' is not a size"),
        (["--max-ram", "1MB"], "a budget of 1 MB is too small"),
        (["--hf-config", "/no/such"], "/no/such: no such folder"),
        (["--dtype", "int8"], "--dtype 'int8' is not a type to cast to"),
        (["--include", "nothing*"], "nothing"),
    ],
)
def test_values_that_cannot_be(src: Path, tmp_path: Path, flags: list[str], text: str):
    done = lazymerge_cli("merge", src, tmp_path / "out", *flags)
    assert done.exit_code == 2
    assert text in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("hint: ")
    assert not (tmp_path / "out").exists()


def test_a_bug_is_one_line_and_its_traceback_only_for_debug(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "merge", raising(ZeroDivisionError("by zero")))
    done = lazymerge_cli("merge", "a", "b")
    assert done.exit_code == 1
    assert done.stderr.startswith("internal error: ZeroDivisionError: by zero\nhint: ")
    assert "please report it" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in lazymerge_cli("merge", "a", "b", "--log-level", "debug").stderr
    assert json.loads(lazymerge_cli("merge", "a", "b", "--json").stdout)["kind"] == "ZeroDivisionError"


def test_too_little_memory_is_no_bug(monkeypatch: pytest.MonkeyPatch):
    """torch has an error of its own for it."""
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        monkeypatch.setattr(api, "merge", raising(error))
        done = lazymerge_cli("merge", "a", "b")
        assert done.exit_code == 2
        assert done.stderr.startswith("error: there is not enough memory")
        assert "smaller --max-ram" in done.stderr


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (failures.Terminated(), 143)])
def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int):
    monkeypatch.setattr(api, "merge", raising(stop))
    done = lazymerge_cli("merge", "a", "b", "-q")
    assert done.exit_code == code
    assert done.stderr == "interrupted: the same command again goes on where this one stopped\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("flags", [["-q", "--json"], []])
def test_a_closed_pipe_is_no_error(src: Path, tmp_path: Path, flags: list[str]):
    read, write = os.pipe()
    os.close(read)
    command = [*LAZYMERGE, "merge", str(src), str(tmp_path / "out"), *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert not [line for line in done.stderr.splitlines() if not line.startswith("writing  ")]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB in 60 tensors."""
    folder = tmp_path_factory.mktemp("large")
    torch.save({f"w{i}": torch.full((1250, 1000), float(i)) for i in range(60)}, folder / "model.pt")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_merge_that_was_stopped_goes_on(large: Path, tmp_path: Path, number: int, code: int):
    command = ["merge", large, tmp_path / "out", "--max-shard-size", "6MB", "--log-level", "debug"]
    running = subprocess.Popen(
        [*LAZYMERGE, *map(str, command)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )
    assert running.stderr is not None
    fcntl.fcntl(running.stderr, fcntl.F_SETPIPE_SZ, 4096)  # soon full, so that the merge waits for this test
    seen = iter(running.stderr.readline, "")
    assert any("finished model-00005-of-" in line for line in seen)
    running.send_signal(number)
    rest = running.communicate(timeout=60)[1].splitlines()
    assert running.returncode == code
    if number != signal.SIGKILL:
        assert rest[-1] == "interrupted: the same command again goes on where this one stopped"
    assert "Traceback" not in "\n".join(rest)
    assert not list((tmp_path / "out").glob("*.safetensors"))  # nothing has its name before all is there

    done = process(*command, "--json")
    assert done.returncode == 0
    assert 5 <= len(json.loads(done.stdout)["resumed"]) < 60
    merged = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert len(merged) == 60
    assert all(bool((merged[f"w{i}"] == i).all()) for i in range(60))
