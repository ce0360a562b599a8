"""One entrance for configuration: flags, variables and TOML map mechanically onto a frozen dataclass."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tanghulu.errors import ConfigError
from tanghulu.runtime.config import (
    check_bounds,
    command,
    describe,
    forget_service_variables,
    load_toml,
    option,
    refuse_unknown_variables,
    settings_of,
    variables,
)
from tanghulu.types import Address


@dataclass(frozen=True, kw_only=True)
class Config:
    port: int = option(7400, "port")
    master: Address | None = option(None, "master")
    memory: int = option(1 << 20, "memory", size=True)
    eviction: str = option("lru", "policy", choices=("lru", "fifo"))
    verbose: bool = option(False, "talk")
    token: str = option("", "secret")
    seed: int = option(0, "seed of placement", debug=True)
    checks: bool = option(False, "assert invariants", debug=True)
    status_fd: int = option(-1, "descriptor", least=-1, hidden=True)


@pytest.fixture
def invoke():
    seen = []
    group = click.Group("root", commands={"probe": command("probe", Config, seen.append, "help")})

    def run(*arguments, env=None, toml=None):
        seen.clear()
        result = CliRunner().invoke(group, ["probe", *arguments], env=env, default_map=toml)
        return result, seen[0] if seen else None

    run.commands = group.commands
    return run


def test_flags_are_parsed_by_type(invoke):
    flags = ("--port", "1", "--master", "h:2", "--memory", "2MiB", "--verbose", "--eviction", "fifo")
    result, config = invoke(*flags)
    assert result.exit_code == 0, result.output
    assert config == Config(port=1, master=Address("h", 2), memory=2 << 20, verbose=True, eviction="fifo")


def test_debug_sets_the_fields_of_developers(invoke, tmp_path):
    _, config = invoke("--debug", "seed=7", "--debug", "checks=true", "--status-fd", "3")
    assert (config.seed, config.checks, config.status_fd) == (7, True, 3)
    file = tmp_path / "t.toml"
    file.write_text('[probe]\ndebug = ["seed=8"]\n')
    _, config = invoke(toml=load_toml(file, settings_of(invoke.commands)))
    assert (config.seed, config.checks) == (8, False)
    shown = invoke("--help")[0].output
    assert "--debug KEY=VALUE" in shown
    assert "--seed" not in shown
    assert "--status-fd" not in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--debug", "sead=1"), "--debug sead=1: 'sead' is not one of checks, seed"),
        (("--debug", "seed"), "--debug seed: '' is not a valid integer."),
        (("--debug", "seed=-1"), "--seed is -1; it cannot be negative"),
    ],
)
def test_debug_options_name_themselves(invoke, flags, message):
    result, config = invoke(*flags)
    assert config is None
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message == message


def test_flag_beats_variable_beats_toml(invoke, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text('memory = "3MiB"\n[probe]\nport = 1\neviction = "fifo"\n')
    toml = load_toml(file, settings_of(invoke.commands))
    _, config = invoke("--port", "3", env={"TANGHULU_PORT": "2", "TANGHULU_EVICTION": "lru"}, toml=toml)
    assert (config.port, config.eviction, config.memory) == (3, "lru", 3 << 20)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--memory", "x"), "--memory"),
        (("--master", "x"), "--master"),
        (("--eviction", "x"), "--eviction"),
        (("--prot", "1"), "--prot"),
    ],
)
def test_bad_flags_name_themselves(invoke, flags, named):
    result, config = invoke(*flags)
    assert (result.exit_code, config) == (2, None)
    assert named in result.output


def test_an_unknown_variable_names_itself_and_what_was_meant(invoke, monkeypatch):
    known = {each.variable for each in settings_of({"all": click.Group("all", commands=invoke.commands)})}
    assert known >= {"TANGHULU_PORT", "TANGHULU_MEMORY"}
    monkeypatch.setenv("TANGHULU_PORT", "1")
    refuse_unknown_variables(known)
    monkeypatch.setenv("TANGHULU_PROT", "1")
    with pytest.raises(ConfigError, match="TANGHULU_PROT is unknown; did you mean TANGHULU_PORT"):
        refuse_unknown_variables(known)


def test_what_kubernetes_sets_for_services_of_this_name_is_no_option(invoke, monkeypatch):
    service = {
        "TANGHULU_SERVICE_HOST": "10.0.0.1",
        "TANGHULU_SERVICE_PORT": "7400",
        "TANGHULU_SERVICE_PORT_HTTP": "8000",
        "TANGHULU_MASTER_SERVICE_HOST": "10.0.0.1",
        "TANGHULU_PORT": "tcp://10.0.0.1:7400",
        "TANGHULU_PORT_7400_TCP": "tcp://10.0.0.1:7400",
        "TANGHULU_PORT_7400_TCP_PROTO": "tcp",
        "TANGHULU_PORT_7400_TCP_PORT": "7400",
        "TANGHULU_PORT_7400_TCP_ADDR": "10.0.0.1",
    }
    for name, value in (service | {"TANGHULU_MEMORY": "3MiB"}).items():
        monkeypatch.setenv(name, value)
    forget_service_variables()
    assert variables() == {"TANGHULU_MEMORY"}
    refuse_unknown_variables({each.variable for each in settings_of(invoke.commands)})
    _, config = invoke()
    assert (config.port, config.memory) == (7400, 3 << 20)


def test_help_names_variables_and_the_table_of_a_file(invoke):
    result, _ = invoke("--help")
    assert "TANGHULU_MEMORY" in result.output
    assert "[probe]" in result.output


@pytest.mark.parametrize(
    ("text", "named"),
    [("prot = 1", "did you mean port"), ("[prob]\nport = 1", "prob"), ("[probe]\nmemroy = 1", "memroy"), ("=", "read")],
)
def test_bad_toml_names_the_key(invoke, tmp_path, text, named):
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_toml(file, settings_of(invoke.commands))


@pytest.mark.parametrize("value", ["[80]", "true", "2021-01-01", "{ a = 1 }", "80.5", '"eighty"', "nan"])
@pytest.mark.parametrize("table", ["[probe]\n", ""])
def test_a_value_of_another_type_is_refused(invoke, tmp_path, table, value):
    file = tmp_path / "t.toml"
    file.write_text(f"{table}port = {value}")
    read = value in ("80.5", '"eighty"', "nan")  # as text, which is no number of a port
    with nullcontext() if read else pytest.raises(ConfigError, match="port"):
        result, config = invoke(toml=load_toml(file, settings_of(invoke.commands)))
        assert (result.exit_code, config) == (2, None)
        assert "--port" in result.output


def test_values_of_a_file_are_read_as_those_of_a_command_line(tmp_path):
    params = [click.Option(["--flag/--no-flag"]), click.Option(["--name"]), click.Option(["--host"], multiple=True)]
    commands = {"probe": click.Command("probe", params=params)}
    file = tmp_path / "t.toml"
    file.write_text('[probe]\nflag = true\nname = 5\nhost = ["a", "b"]')
    assert load_toml(file, settings_of(commands)) == {"probe": {"flag": True, "name": "5", "host": ["a", "b"]}}
    file.write_text('[probe]\nhost = "a"')
    assert load_toml(file, settings_of(commands)) == {"probe": {"host": ["a"]}}
    for text in ("flag = 1", "flag = [true]", 'name = ["a"]', "name = false", "host = [[1]]"):
        file.write_text(f"[probe]\n{text}")
        with pytest.raises(ConfigError, match="must be"):
            load_toml(file, settings_of(commands))


def test_a_file_without_an_end_is_refused(invoke):
    with pytest.raises(ConfigError, match="more than 16"):
        load_toml(Path("/dev/zero"), [])


def test_a_command_of_a_group_has_a_table_of_its_own(invoke, tmp_path):
    """Of its keys those that are for one call, like ``--limit`` of a listing, do not belong into a file."""
    listing = click.Command("ls", params=[click.Option(["--limit"]), click.Option(["--master"], envvar="X_MASTER")])
    commands = {**invoke.commands, "store": click.Group("store", commands={**invoke.commands, "ls": listing})}
    file = tmp_path / "t.toml"
    file.write_text('master = "h:1"\n[probe]\nport = 1\n[store.probe]\nport = 2\n[store.ls]\nmaster = "h:3"\n')
    assert load_toml(file, settings_of(commands)) == {
        "probe": {"master": "h:1", "port": "1"},
        "store": {"probe": {"master": "h:1", "port": "2"}, "ls": {"master": "h:3"}},
    }
    for text, named in (
        ("limit = 1", "limit"),
        ("[store]\nport = 1", "port"),
        ("[store]\nprobe = 1", "probe"),
        ("[store.prob]\nport = 1", "did you mean probe"),
        ("[store.probe]\nprot = 1", "did you mean port"),
        ("[store.probe.port]\nx = 1", "port"),
        ("[stor]\nx = 1", "stor"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=named):
            load_toml(file, settings_of(commands))


def test_the_printed_configuration_hides_secrets():
    shown = describe(Config(token="s3cret", master=Address("h", 2)))
    assert shown["token"] == "***"
    assert shown["master"] == "h:2"


def test_the_printed_configuration_lists_several_values():
    assert describe(Several(hosts=(Address("h", 1), Address("h", 2)))) == {"hosts": ["h:1", "h:2"]}


@dataclass(frozen=True, kw_only=True)
class Several:
    hosts: tuple[Address, ...] = option((), "hosts")


@dataclass(frozen=True, kw_only=True)
class Bounded:
    connections: int = option(2, "at a time", least=1)
    grace_s: float = option(0.0, "at the end", least=0)
    speed_up: float = option(1.0, "times as fast", above=0)
    free: int = option(-1, "anything", least=-1)
    port: int = option(0, "port")
    memory: int = option(0, "memory", size=True)
    host: str = option("127.0.0.1", "host")
    advertise_host: str = option("", "host")

    def __post_init__(self) -> None:
        check_bounds(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"connections": 0}, "--connections is 0; it must be at least 1"),
        ({"grace_s": -0.5}, "--grace-s is -0.5; it cannot be negative"),
        ({"speed_up": 0.0}, "--speed-up is 0.0; it must be above 0"),
        ({"speed_up": float("nan")}, "--speed-up is nan; it must be above 0"),
        ({"grace_s": float("nan")}, "--grace-s is nan; it cannot be negative"),
        ({"speed_up": float("inf")}, "--speed-up is inf; it must be at most 1000000000"),
        ({"port": 65536}, "--port is 65536; it must be at most 65535"),
        ({"port": -1}, "--port is -1; it cannot be negative"),
        ({"memory": 1 << 51}, f"--memory is {1 << 51}; it must be at most 1024.0 TiB"),
        ({"host": ""}, "--host: the host is empty; use 0.0.0.0 for all addresses of this machine"),
        ({"host": "a..b"}, "--host: 'a..b' is not a host: each part of a name has 1 to 63 characters"),
        ({"host": "a b"}, "--host: 'a b' is not a host: ' ' is not allowed in a name or an IPv4 address"),
    ],
)
def test_a_number_outside_the_bounds_of_its_option_names_its_flag(values, message):
    assert Bounded().free == -1
    with pytest.raises(ConfigError) as caught:
        Bounded(**values)
    assert caught.value.message == message
