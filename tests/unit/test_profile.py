from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_profile

from promptmill import settings
from promptmill.errors import ConfigError
from promptmill.profile import find_profile, load_profile

TOML = """
model = "m"
[server]
port = 1000
[server.flags]
mem-fraction-static = 0.88
[server.env]
HF_HOME = "/data/hub"
[sampling]
temperature = 0.7
[classes.short]
max_new_tokens = 10
[classes.long]
max_new_tokens = 20
[[partitions]]
name = "B1_glaive"
source = "a.jsonl"
[[partitions]]
name = "B2-code"
source = "b.jsonl"
class = "long"
sampling = { top_p = 0.5 }
"""


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "p.toml"
    path.write_text(TOML)
    return str(path)


def wrong(text: str, tmp_path: Path) -> str:
    """The message for a profile of this text."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path), environ={})
    return str(caught.value)


PARTITION = '\n[[partitions]]\nname = "A"\nsource = "a.jsonl"\n'


def test_profile_layers_default_file_environment_command_line(toml: str) -> None:
    env = {"PROMPTMILL_SERVER__PORT": "2000"}
    assert make_profile().server.port == 0
    assert load_profile(toml, environ={}).server.port == 1000
    assert load_profile(toml, environ=env).server.port == 2000
    assert load_profile(toml, ["server.port=3000"], env).server.port == 3000


def test_profile_layers_merge_inside_a_table(toml: str) -> None:
    profile = load_profile(toml, ["server.replicas=2"], {"PROMPTMILL_SERVER__INACTIVITY_TIMEOUT_S": "7.5"})
    assert (profile.server.port, profile.server.replicas, profile.server.inactivity_timeout_s) == (
        1000,
        2,
        7.5,
    )


def test_profile_last_override_wins(toml: str) -> None:
    assert load_profile(toml, ["server.port=1", "server.port=2"], {}).server.port == 2


def test_profile_environment_names_match_in_any_case(toml: str) -> None:
    env = {
        "promptmill_sampling__temperature": "0.1",
        "PROMPTMILL_CLASSES__LONG__MAX_NEW_TOKENS": "99",
        "PROMPTMILL_PARTITIONS__B2_CODE__SAMPLING__SEED": "5",
        "PROMPTMILL_SERVER__FLAGS__MEM_FRACTION_STATIC": "0.9",
        "OTHER_SERVER__PORT": "9",
    }
    profile = load_profile(toml, environ=env)
    assert profile.sampling.temperature == 0.1
    assert profile.classes["long"].max_new_tokens == 99
    assert profile.partition("B2-code").sampling.seed == 5
    assert profile.server.flags == {"mem-fraction-static": 0.9}
    assert profile.server.port == 1000


def test_profile_keeps_the_case_of_variables_for_the_server(toml: str) -> None:
    env = {"PROMPTMILL_SERVER__ENV__CUDA_VISIBLE_DEVICES": "0,1"}
    profile = load_profile(toml, ["server.env.NCCL_DEBUG=INFO"], env)
    assert profile.server.env == {"HF_HOME": "/data/hub", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}


def test_profile_override_values_are_typed_as_the_setting_is(toml: str) -> None:
    overrides = [
        "model=123",
        'server.command=["python", "-m", "x"]',
        "server.flags.tp-size=8",
        "server.flags.kv-cache-dtype=fp8_e4m3",
        "server.flags.enable-metrics=true",
        "run.stop_at=07:00",
        "release.url=s3://bucket/a=b",
    ]
    profile = load_profile(toml, overrides, {})
    assert profile.model == "123"
    assert profile.server.command == ["python", "-m", "x"]
    assert profile.server.flags == {
        "mem-fraction-static": 0.88,
        "tp-size": 8,
        "kv-cache-dtype": "fp8_e4m3",
        "enable-metrics": True,
    }
    assert profile.run.stop_at == "07:00"
    assert profile.release.url == "s3://bucket/a=b"


def test_profile_override_addresses_a_partition_by_name(toml: str) -> None:
    profile = load_profile(toml, ["partitions.B1_glaive.sampling.temperature=0.6"], {})
    sampling = [profile.sampling_for(part) for part in profile.partitions]
    assert [p.name for p in profile.partitions] == ["B1_glaive", "B2-code"]
    assert [(s.temperature, s.top_p) for s in sampling] == [(0.6, 1.0), (0.7, 0.5)]


def test_profile_class_decides_the_cap(toml: str) -> None:
    profile = load_profile(toml, ["partitions.B1_glaive.class=long"], {})
    assert [profile.max_new_tokens(part) for part in profile.partitions] == [20, 20]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("server.prot=1", "did you mean 'port'?"),
        ("sevrer.port=1", "did you mean 'server'?"),
        ("partitions.B1_glave.mode=rollout", "there is no partition 'B1_glave'. did you mean 'B1_glaive'?"),
        ("partitions.B1_glaive.sampling.temprature=1", "did you mean 'temperature'?"),
        ("partitions.B1_glaive.length_class=long", "did you mean 'class'?"),
    ],
)
def test_profile_unknown_override_suggests_the_name(toml: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(toml, [override], {})
    assert f"--set {override}" in str(caught.value)
    assert said.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PROMPTMILL_SERVER__PROT", "Did you mean 'port'?"),
        ("PROMPTMILL_SERVR__PORT", "Did you mean 'server'?"),
        ("PROMPTMILL_SERVER_PORT", "Did you mean 'server'?"),
        ("PROMPTMILL_PARTITIONS__B1_GLAVE__MODE", "Did you mean 'B1_glaive'?"),
    ],
)
def test_profile_unknown_variable_suggests_the_name(toml: str, variable: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(toml, environ={variable: "1"})
    assert f"environment variable {variable}" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where", "meant"),
    [
        ('modle = "x"\nmodel = "m"', "modle", "model"),
        ('model = "m"\n[server]\nprot = 1', "server.prot", "port"),
        ('model = "m"\n[classes.short]\nmax_tokens = 1', "classes.short.max_tokens", "max_new_tokens"),
    ],
)
def test_profile_unknown_name_in_the_file_suggests_the_name(
    tmp_path: Path, text: str, where: str, meant: str
) -> None:
    assert f"there is no setting {where!r}. Did you mean {meant!r}?" in wrong(text + PARTITION, tmp_path)


def test_profile_unknown_name_in_a_partition_suggests_the_name(tmp_path: Path) -> None:
    said = wrong('model = "m"' + PARTITION + "columns = { promt = 'q' }", tmp_path)
    assert "columns.promt" in said
    assert "Did you mean 'prompt'?" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "not valid TOML"),
        ('model = "m"', "partitions is missing."),
        (PARTITION, "model is missing."),
        ('model = "m"' + PARTITION + PARTITION, "two partitions are named 'A'"),
        ('model = "m"' + PARTITION + 'class = "huge"', "class 'huge'; [classes] knows: short"),
        ('model = "m"\n[[partitions]]\nsource = "a"', "partition 1 has no name"),
        ('model = "m"\n[partitions.A]\nsource = "a"', "[[partitions]] tables"),
        ('model = "m"\n[sampling]\ntop_p = 2' + PARTITION, "sampling.top_p: "),
        ('model = "m"\n[run]\nstop_at = "7 pm"' + PARTITION, "run.stop_at: "),
        ('model = "m"\n[[partitions]]\nname = "a/b"\nsource = "a"', "name: "),
    ],
)
def test_profile_mistake_in_the_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in wrong(text, tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("server.port", "expected name=value"),
        ("server=1", "server is a table"),
        ("partitions.B1_glaive=1", "partitions.B1_glaive is a table"),
        ("partitions={ A = 1 }", "partitions is a table"),
        ("model.name=1", "model is not a table"),
        ("sampling.seed.x=1", "below a plain value"),
        ("server.port=many", "server.port: "),
        ("server.port=70000", "server.port: "),
        ("sampling.temperature=inf", "sampling.temperature: "),
        ("run.max_hours=inf", "run.max_hours: "),
        ("classes.short.max_new_tokens=1000000000000", "classes.short.max_new_tokens: "),
        ("partitions.B1_glaive.source=", "partitions.0.source: "),
        ("store.url=", "store.url: "),
        ("release.url=", "release.url: "),
        ("chat.template_kwargs.day=2026-11-30", "chat.template_kwargs.day: "),
        ("chat.template_kwargs.share=nan", "chat.template_kwargs.share"),
    ],
)
def test_profile_override_that_cannot_be_is_refused(toml: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_profile(toml, [override], {})


def test_profile_missing_names_the_known_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments" / "mine.toml").write_text(TOML)
    with pytest.raises(ConfigError, match=r"Known: demo, .*mine"):
        find_profile("mien")
    with pytest.raises(ConfigError, match="no such file"):
        find_profile("elsewhere/mine.toml")
    assert find_profile("mine") == Path("deployments/mine.toml")


def test_profile_masks_what_may_be_secret() -> None:
    profile = make_profile(
        server={
            "command": ["docker", "-e", "HF_TOKEN=hf_1", "--api-key", "k1", "--auth-token=t1", "--port", "1"],
            "env": {"AWS_SECRET_ACCESS_KEY": "s1", "HF_HOME": "/hub"},
            "flags": {"api-key": "k2", "tp-size": 8},
            "api_key_env": "MY_KEY",
        }
    )
    server = profile.masked()["server"]
    assert server["command"] == [
        *("docker", "-e", "HF_TOKEN=***", "--api-key", "***", "--auth-token=***", "--port", "1")
    ]
    assert server["env"] == {"AWS_SECRET_ACCESS_KEY": "***", "HF_HOME": "/hub"}
    assert server["flags"] == {"api-key": "***", "tp-size": 8}
    assert server["api_key_env"] == "MY_KEY"
    assert profile.server.env["AWS_SECRET_ACCESS_KEY"] == "s1"


def test_profile_masked_uses_the_names_of_the_file(toml: str) -> None:
    part = load_profile(toml, environ={}).masked()["partitions"][1]
    assert part["class"] == "long"
    assert "length_class" not in part


def sections() -> list[type[settings.Section] | type[settings.Profile]]:
    found = [c for c in vars(settings).values() if isinstance(c, type) and issubclass(c, settings.Section)]
    return [*found, settings.Profile]


def is_table(annotation: object) -> bool:
    return any(section.__name__ in str(annotation) for section in sections())


def test_settings_every_field_is_documented() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description and not is_table(field.annotation)
    ]
    assert [name for name in bare if not name.startswith("SamplingOverride.")] == []
    assert [section.__name__ for section in sections() if not section.__doc__] == []


def test_settings_partition_overrides_every_sampling_field() -> None:
    assert list(settings.SamplingOverride.model_fields) == list(settings.SamplingSettings.model_fields)
    assert all(f.default is None for f in settings.SamplingOverride.model_fields.values())


@pytest.mark.parametrize(
    ("overrides", "environ", "origin"),
    [
        (["server.port=many"], {}, "--set server.port=many: server.port: "),
        (
            [],
            {"PROMPTMILL_SERVER__PORT": "many"},
            "environment variable PROMPTMILL_SERVER__PORT: server.port: ",
        ),
        (["partitions.B2_code.weight=-1"], {}, "--set partitions.B2_code.weight=-1: partitions."),
    ],
)
def test_wrong_value_is_told_of_whoever_set_it(
    overrides: list[str], environ: dict[str, str], origin: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile("demo", overrides, environ)
    assert str(caught.value).startswith(origin)


def test_each_wrong_value_is_told_of_its_own_origin(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    text = 'model = "m"\nwrong = 1\n[run]\nmax_hours = -1\n[[partitions]]\nname = "A"\nsource = "a.jsonl"\n'
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path), ["server.port=many"], {})
    said = str(caught.value)
    assert said.count(f"Profile {path}: ") >= 1
    assert said.count("--set server.port=many: server.port: ") == 1
    assert "run.max_hours" in said.partition(f"Profile {path}: ")[2]
