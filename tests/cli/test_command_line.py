"""The root command: variables, configuration files and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from tanghulu.cli.main import load_command, root
from tanghulu.cli.up import without_options
from tanghulu.errors import ConfigError


def _run(*arguments, **variables):
    command = [sys.executable, "-W", "error", "-m", "tanghulu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables)


def test_a_variable_of_another_command_is_no_mistake():
    done = _run("store", "nodes", "--master", "127.0.0.1:1", TANGHULU_NODE_MEMORY="1GiB", PYTHONVERBOSE="1")
    assert done.returncode == 4, done.stderr[-2000:]
    assert "127.0.0.1:1" in done.stderr
    assert "import 'tanghulu.store.client" in done.stderr
    assert "import 'tanghulu.conductor" not in done.stderr, "nor does it import that command"


def test_a_variable_of_no_command_refuses_to_start():
    done = _run("master", TANGHULU_PROT="1")
    assert done.returncode == 7
    assert "TANGHULU_PROT is unknown; did you mean TANGHULU_PORT?" in done.stderr


@pytest.mark.parametrize(
    ("text", "named"), [("[master]\nprot = 1", "did you mean port"), ("[mastre]\nport = 1", "mastre")]
)
def test_a_bad_file_refuses_to_start(tmp_path, text, named):
    file = tmp_path / "tanghulu.toml"
    file.write_text(text)
    done = _run("--config", str(file), "master")
    assert done.returncode == 7
    assert named in done.stderr


def test_more_memory_than_the_machine_has_refuses_to_start(tmp_path):
    done = _run("node", "--memory", "999TiB")
    assert done.returncode == 1
    assert "request less" in done.stderr
    done = _run("up", "--node-memory", "999TiB", "--engine", "mock", "--state-dir", str(tmp_path))
    assert done.returncode == 7
    assert "--nodes 1 of --node-memory, together" in done.stderr


def test_vllm_s_worker_says_what_it_lacks(tmp_path):
    done = _run("up", "--engine", "vllm", "--state-dir", str(tmp_path))
    assert done.returncode == 7
    assert "vLLM is not installed here" in done.stderr
    done = _run("vllm-worker", "--model", str(tmp_path))
    assert done.returncode == 7
    assert "needs a directory with config.json" in done.stderr
    (tmp_path / "config.json").write_text("{}")
    done = _run("vllm-worker", "--model", str(tmp_path), "--port", "0", "--master", "127.0.0.1:1")
    assert done.returncode == 1
    assert "run tanghulu vllm-worker in vLLM's environment" in done.stderr


def test_up_says_what_is_wrong_with_its_directory_and_with_tables_of_its_parts(tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    done = _run("up", "--engine", "mock", "--state-dir", str(taken))
    assert done.returncode == 7
    assert f"--state-dir {taken} cannot be used" in done.stderr
    file = tmp_path / "tanghulu.toml"
    file.write_text("[node]\nport = 1\n")
    done = _run("--config", str(file), "up", "--engine", "mock", "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 7
    assert "[node] port is set by `tanghulu up`" in done.stderr


def test_a_table_of_a_part_goes_before_what_up_gives_to_all():
    given = ["--host", "h", "--memory", "1", "--eviction", "lru"]
    assert without_options(given, {}) == given
    assert without_options(given, {"memory": "2MiB", "max_connections": 3}) == ["--host", "h", "--eviction", "lru"]
    flagged = ["--batch-invariant", "--model", "m", "--checks"]
    assert without_options(flagged, {}) == flagged
    assert without_options(flagged, {"batch_invariant": False, "model": "other"}) == ["--checks"]


def test_help_names_every_command_without_importing_them():
    code = "import sys; from tanghulu.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'grpc', 'torch', 'fastapi'} & set(sys.modules), 'too much'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in (
        "up",
        "chat",
        "store",
        "master",
        "node",
        "prefill",
        "decode",
        "worker",
        "conductor",
        "status",
        "doctor",
    ):
        assert f"  {name} " in done.stdout


def _numeric_options():
    for name in root.list_commands(click.Context(root)):
        command = load_command(name)
        for each in command.commands.values() if isinstance(command, click.Group) else [command]:
            for option in each.params:
                yield f"{name} {each.name} --{option.name}", option


def test_every_number_of_a_command_line_has_bounds():
    """Those of configurations have them by ``check_bounds``; the others by click's types."""
    plain, ranges = (type(click.INT), type(click.FLOAT)), (click.IntRange, click.FloatRange)
    for name, option in _numeric_options():
        if isinstance(option.type, ranges):
            assert None not in (option.type.min, option.type.max), name
        else:
            assert option.envvar or not isinstance(option.type, plain), name


@pytest.mark.parametrize(
    "words",
    [
        ("master", "--port", "70000"),
        ("node", "--metrics-port", "70000"),
        ("conductor", "--grpc-port", "112999"),
        ("store", "serve", "--port", "-1"),
        ("router", "--grpc-port", "65536"),
        ("up", "--port", "99999"),
        ("up", "--store-http-port", "99999"),
        ("up", "--master-port", "65530"),
        ("up", "--nodes", "25"),
        ("up", "--nodes", "1000000"),
        ("up", "--host", "a..b"),
    ],
)
def test_a_port_that_cannot_be_is_refused(words):
    with pytest.raises(ConfigError, match=words[-2]):
        root.main(args=words, standalone_mode=False)


def test_up_gives_a_refusal_s_reason_at_once(tmp_path):
    command = [sys.executable, "-m", "tanghulu", "up", "--engine", "mock", "--model", "mock", "--node-memory", "0"]
    command += ["--port", "0", "--master-port", "0", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "node-0: --memory 0 is less than one page" in done.stderr
    assert "restarted" not in done.stderr


def _printing(redirection, **variables):
    line = f"{sys.executable} -W error -m tanghulu topology {redirection}"
    return subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, env=os.environ | variables)


@pytest.mark.parametrize(("redirection", "why"), [("> /dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_output_that_cannot_be_written_ends_in_a_sentence(redirection, why):
    done = _printing(redirection)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert f"tanghulu: cannot write to standard output: {why}".encode() in done.stderr


def test_a_reader_that_goes_ends_a_command_without_a_word():
    done = _printing("| head -c 1; exit ${PIPESTATUS[0]}")
    assert (done.returncode in (0, 1), done.stderr) == (True, b"")


def test_text_that_the_terminal_cannot_show_is_escaped():
    code = "import sys; from tanghulu.cli.main import _mend_streams; _mend_streams(); print('\\u00fc')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.stdout, done.stderr) == (b"\\xfc\n", b"")


@pytest.mark.parametrize("key", ["caf\u00e9", "sk-a\nb", b"caf\xe9"])
@pytest.mark.parametrize(
    "command", [("chat", "--message", "hi", "--api-key"), ("status", "--token"), ("bench", "http", "--api-key")]
)
def test_a_key_that_no_header_takes_is_refused(command, key):
    done = _run(*command, key)
    assert done.returncode == 7, done.stderr
    assert "ASCII" in done.stderr or "--api-key is not UTF-8" in done.stderr
    assert "caf" not in done.stderr


@pytest.mark.parametrize("flag", ["--message", "--system", "--model"])
def test_text_that_is_not_utf_8_is_refused(flag):
    done = _run("chat", "--message", "hi", flag, b"caf\xe9")
    assert done.returncode == 7, done.stderr
    assert f"{flag} is not UTF-8" in done.stderr


@pytest.mark.parametrize("words", [("store", "watch"), ("status", "--namespace")])
def test_names_that_are_not_utf_8_are_refused(words):
    done = _run(*words, b"caf\xe9")
    assert done.returncode == 7, done.stderr
    assert "'caf\\udce9' is not UTF-8" in done.stderr


def test_standard_input_that_is_not_utf_8_is_refused():
    command = [sys.executable, "-m", "tanghulu", "chat", "--model", "tiny"]
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, timeout=60)
    assert done.returncode == 7
    assert b"standard input is not UTF-8" in done.stderr
