"""Profiles: what a run is made of. Command line > environment > profile file > default.

    profile = load_profile("demo", overrides=["server.port=8000"])

A profile is TOML; every field below carries its own documentation. An unknown name is an error wherever
it stands: in the file, in an override or in an environment variable that starts with PROMPTMILL_.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
FlagValue = bool | int | float | str | list[str]

ROLLED_OUT = ("turns", "bfcl")
"""Formats of which every turn is answered where the partition does not say."""

# Ends of names, so that max-total-tokens and tokenizer-path are shown.
_SECRET = re.compile(r"(key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")


class Section(BaseModel):
    """A table of a profile: immutable, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ServerSettings(Section):
    """How the model is served, and how patient we are with it."""

    engine: Literal["sglang", "openai", "llama_cpp"] = "sglang"
    """`llama_cpp` is embedded and runs on a CPU; `openai` is any OpenAI-compatible server; `sglang` is
    SGLang's native interface."""
    api: Literal["completions", "chat"] = "completions"
    """What an OpenAI-compatible server is asked for. `completions` takes and gives token ids. `chat` is for
    servers that do not: it takes messages and gives texts, the server's own template renders, an answer that
    breaks off starts over, and a release has no `turns` of such rows."""
    version: str = Field(default="", pattern=r"^(\d+\.\d+\.\d+.*)?$")
    """SGLang's version, e.g. "0.5.9": names of flags differ. Empty: asked of the command's Python; where that
    cannot be (a container), the newest known one."""
    command: list[str] = []
    """What starts the server; flags are appended. Empty: the engine's own command, for SGLang
    `python -m sglang.launch_server`. `{name}` stands for the life's name."""
    cleanup: list[str] = []
    """Run after a life has ended, to end what the command started outside its process group.
    `{name}` stands for the life's name, e.g. ["docker", "rm", "-f", "{name}"]."""
    env: dict[str, str] = {}
    """Added to the environment that the server inherits."""
    urls: list[str] = []
    """Servers that somebody else runs. Not empty: none is launched and none is ended."""
    restart_command: list[str] = []
    """Run when one of `urls` was lost, before it is waited for; `{url}` stands for its address. Empty: its
    owner brings it back."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key for `urls`."""
    served_model_name: str = ""
    """The model name that `urls` answer to. Empty: the first one that /v1/models lists."""
    replicas: int = Field(default=1, ge=1)
    """Servers to launch."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the launched server; 0 takes a free one."""
    startup_timeout_s: float = Field(default=3600, gt=0)
    """Bound on one start, from the command to the first answer."""
    startup_silence_timeout_s: float = Field(default=900, gt=0)
    """A start whose log does not grow for this long is ended and tried again."""
    inactivity_timeout_s: float = Field(default=600, gt=0)
    """A server with requests in flight that moves no token for this long counts as hung."""
    collapse_timeout_s: float = Field(default=600, gt=0)
    """A server that falls below a quarter of the throughput it had, with as many requests in flight, and
    stays there for this long, is relaunched."""
    canary_interval_s: float = Field(default=600, ge=0)
    """How often a server is asked again what it answered at the gate. Where its answer is quite another one,
    twice, it is relaunched, and what it gave since its last good check-up is asked again. 0: never."""
    poll_interval_s: float = Field(default=2.0, gt=0)
    """How often a server is asked for its load."""
    stop_grace_s: float = Field(default=30, ge=0)
    """From SIGTERM to SIGKILL of the whole process group. An idle SGLang takes 5 to 16 s to end."""
    gpu_wait_s: float = Field(default=120, ge=0)
    """How long a start waits for GPUs whose memory is still in use; 0 does not look."""
    min_headroom_gib: float = Field(default=2.0, ge=0)
    """Free GPU memory that a start must leave, where the server reports it."""
    max_relaunches: int = Field(default=8, ge=0)
    """Relaunches in one run before it gives up."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Requests in flight on one server, at most. Empty: as many as keep SGLang's own queue short and never
    empty (by its load, every few seconds); the embedded engine's slots; 32 for others."""
    stream: bool = True
    """Whether SGLang's answers come piece by piece. Whole ones cost the client less, but what there was of an
    answer is lost with its server, and after a death every prompt that was in flight is tried by itself (and
    streamed, so that a trial ends with its first token)."""
    stream_interval: int = Field(default=32, ge=1)
    """Tokens in one event of SGLang's streams; at most one less is lost when a server dies."""
    accept_rendering_difference: bool = False
    """Go on although the server's own chat path renders the same messages to other ids than we do."""
    flags: dict[str, FlagValue] = {}
    """The server's own flags under its own names, passed verbatim; SGLang's are renamed where the version
    has another name for the same thing."""


class ChatSettings(Section):
    """How a conversation becomes input ids, and how the answer's ids are split."""

    template: str = ""
    """Path of a Jinja chat template. Empty: the model's own."""
    template_kwargs: dict[str, JsonValue] = {}
    """Passed to the template, e.g. { thinking = false }."""
    tool_arguments: Literal["auto", "mapping", "text"] = "auto"
    """How the template is given the arguments of earlier tool calls: JSON text is parsed for one that wants a
    mapping, a mapping written as JSON for one that wants text. `auto` renders one call both ways."""
    ignored_tools: Literal["reject", "keep"] = "reject"
    """What becomes of a row with tools that the template renders exactly as without them."""
    reasoning: Literal["auto", "none", "think", "kimi_k2", "minimax_m3", "gpt_oss"] = "auto"
    """How the model writes reasoning: `think` as <think>…</think>; `kimi_k2` the same, and a section of tool
    calls ends it too; `minimax_m3` as <mm:think>…</mm:think>; `gpt_oss` in its analysis channel. `auto` goes
    by the tokens that the vocabulary has."""
    reasoning_open: str | None = None
    """The marker that opens reasoning, in place of the family's. Empty text: no reasoning."""
    reasoning_close: str | None = None
    """The marker that closes reasoning, in place of the family's; answers are split at its first ids. Empty
    text: no reasoning."""
    reasoning_ids: list[Annotated[int, Field(ge=0)]] = []
    """The ids of both markers, where they are known: a tokenizer that gives others is refused."""
    open_reasoning: bool = False
    """Append the opening marker where the template has not opened reasoning, for a model that would not think
    otherwise. One that writes the marker itself needs it not."""


class RunSettings(Section):
    """When a run ends by itself, and what it needs from the host."""

    max_hours: float | None = Field(default=None, gt=0)
    """Stop sending prompts after this many hours, drain, and end with exit status 3 if rows are left."""
    stop_at: str | None = Field(default=None, pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """The same at a time of day, local time, e.g. "07:00"."""
    drain_timeout_s: float = Field(default=600, ge=0)
    """How long requests in flight may finish once a run is stopping."""
    min_free_gib: float = Field(default=1.0, ge=0)
    """Free disk that a start asks for where journal, segments and staged releases lie."""
    max_unrendered: float = Field(default=0.5, ge=0, le=1)
    """No server is started where the template refuses more than this share of a partition's rows, or leaves
    out their tools: it is the template then, and not the rows. 1: start all the same."""


class SamplingSettings(Section):
    """Sampling, under SGLang's native names. What is None is left to the server."""

    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Leave out tokens below this share of the likeliest one's probability."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Taken off a token's logit for each time that it was generated."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Taken off a token's logit once it was generated."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    """Divides the logits of tokens that occurred; 1 changes nothing."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    """Texts that end an answer."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """Token ids that end an answer, besides the model's own."""
    seed: int | None = None
    """Sample k of a prompt is asked with seed + k."""
    ebnf: str | None = None
    """A grammar that answers must follow (GBNF on llama.cpp)."""
    samples: int = Field(default=1, ge=1)
    """Answers to ask for each prompt."""


class SamplingOverride(Section):
    """What a partition changes in `sampling`; the fields mean the same."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    seed: int | None = None
    ebnf: str | None = None
    samples: int | None = Field(default=None, ge=1)


class ClassSettings(Section):
    """A length class."""

    max_new_tokens: int = Field(default=2048, ge=1, le=1_000_000_000)
    """Cap on the answer. Raising it redoes the answers that were cut, and no others."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Cap on the requests of this class in flight, over all servers."""


class ColumnSettings(Section):
    """Which columns of the source hold what; empty: the usual names are looked for."""

    prompt: str = ""
    """The text, the messages or the turns. Empty: the format's own (docs/formats.md), for `auto` messages,
    conversations, turns, prompt, question, text, input or instruction, the first that a row has."""
    id: str = ""
    """The row's own id, kept in the release. Empty: id, task_id, question_id, uuid or conversation_id, else
    the row's place."""
    tools: str = ""
    """Functions that may be called, as a list or as JSON text. Empty: tools; for `bfcl` function."""
    system: str = ""
    """A system message to put first. Empty: none."""


class PolicySettings(Section):
    """What is done with rows that are not as one would wish. `promptmill plan` counts what each of these
    changed or rejected; docs/formats.md has the reasons of rejects and what to do."""

    last_assistant: Literal["drop", "reject"] = "drop"
    """A conversation that ends with the assistant's turn: `drop` answers that turn anew."""
    empty_content: Literal["reject", "drop"] = "reject"
    """A message without content that calls no tool: the row is rejected, or with `drop` the message left out.
    The message that asks for an answer is never left out: where it is empty, the row is rejected."""
    unknown_role: Literal["reject", "drop"] = "reject"
    """A message of a role that is not known: the row is rejected, or the message left out."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """More names of roles, e.g. { bing = "assistant" }."""
    orphan_tool: Literal["reject", "keep", "drop"] = "reject"
    """A tool's result for the id of a call that was not made before it."""
    same_role: Literal["keep", "merge", "reject"] = "keep"
    """Consecutive messages of one role, tools' results aside: `merge` joins them with an empty line."""
    system_not_first: Literal["keep", "reject"] = "keep"
    """A system message behind the start of the conversation."""
    unsupported_modality: Literal["reject", "drop"] = "reject"
    """An image, a sound or the like: the row is rejected, or the part left out and the text asked alone."""
    control_tokens: Literal["reject", "keep"] = "reject"
    """Text that holds a token which the tokenizer has for control, such as <|im_end|>: it would become that
    very id. An assistant's earlier reasoning markers are left to the template."""
    surrogates: Literal["replace", "reject"] = "replace"
    """Half of a surrogate pair anywhere in the row, which no text can hold: it becomes U+FFFD."""
    nul: Literal["keep", "drop", "reject"] = "keep"
    """A NUL character in the text: kept, left out, or the row rejected."""
    too_long: Literal["reject", "shrink"] = "reject"
    """A prompt that leaves no room for max_new_tokens in the model's context: `shrink` asks it for as many as
    there is room for. Of a conversation with several turns that goes by the first."""
    shrink_to_at_least: int = Field(default=256, ge=1)
    """What `shrink` must leave for the answer; a row with less room is rejected."""
    duplicates: Literal["join", "reject"] = "join"
    """A row that asks what an earlier one of its partition asks: `join` answers once and gives the answer to
    each, `reject` leaves the later ones out."""


class FilterSettings(Section):
    """A condition on a column; rows that do not meet all of them are rejected as `filtered_out`."""

    column: str = Field(min_length=1)
    """Its name."""
    at_least: float | None = None
    """The value as a number, written as text or not, is this or more."""
    at_most: float | None = None
    """The value as a number is this or less."""
    one_of: list[str] = []
    """The value as text is one of these."""

    @model_validator(mode="after")
    def _asks_something(self) -> FilterSettings:
        if self.at_least is None and self.at_most is None and not self.one_of:
            raise ValueError("set at_least, at_most or one_of")
        return self


class PartitionSettings(Section):
    """One source of prompts and how it is answered."""

    name: Name
    """Stands in the release's file names and in overrides."""
    source: str = Field(min_length=1)
    """A file, a directory or a glob: .jsonl, .json, .parquet, also .gz and .zst. On a local disk, at
    s3://bucket/path, or in a data set of the hub at hf://datasets/owner/name[@revision][/path]."""
    format: Literal["auto", "messages", "sharegpt", "text", "turns", "glaive", "opencodeinstruct", "bfcl"] = (
        "auto"
    )
    """How a row is read: `messages` lists of role and content, `sharegpt` of from and value, `text` one user
    message, `turns` a list of user messages to be asked in turn, `glaive` a transcript, `opencodeinstruct`
    and `bfcl` as those data sets are. `auto` goes by the first row that tells, and plan says it."""
    columns: ColumnSettings = ColumnSettings()
    where: list[FilterSettings] = []
    length_class: str = Field(default="short", alias="class")
    """A name under [classes]."""
    weight: float = Field(default=1.0, gt=0)
    """All partitions are sent in step, by the share of each that is done. One of weight 2 goes at twice the
    pace of the others until it is through."""
    mode: Literal["last_turn", "rollout"] | None = None
    """`last_turn` answers the conversation as it stands, without a final assistant turn; `rollout` answers
    every turn anew on its own history. Default: rollout for `turns` and `bfcl`, else last_turn."""
    sampling: SamplingOverride = SamplingOverride()
    policies: PolicySettings = PolicySettings()
    """What is not set here is as in [policies]."""

    def mode_of(self, format: str) -> str:
        """The mode, of rows in this format where none is set."""
        return self.mode or ("rollout" if format in ROLLED_OUT else "last_turn")


class StoreSettings(Section):
    """Where answers are kept."""

    url: str = Field(default="data/store", min_length=1)
    """A directory or s3://bucket/prefix."""
    journal: str = ""
    """SQLite file on a local disk. Default: inside a local `url`, else data/journal-<hash of url>.sqlite."""


class ReleaseSettings(Section):
    """What is published, and where."""

    url: str = Field(default="data/release", min_length=1)
    """A directory or s3://bucket/prefix."""
    views: list[Literal["conversations", "turns"]] = Field(default=["conversations", "turns"], min_length=1)
    """Tables to publish; the first is the default one."""
    allow_incomplete: bool = False
    """Publish although rows are pending."""
    shard_mb: int = Field(default=256, ge=1)
    """Size of a Parquet shard, before compression, in MB."""


class ChaosSettings(Section):
    """Faults on purpose, for demonstrations."""

    kill_server_after_answers: int = Field(default=0, ge=0)
    """SIGKILL the server once, when this many answers have come in. 0: never."""


class Profile(BaseSettings):
    """A whole profile, resolved."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str = Field(min_length=1)
    """The weights' identity; also their path, unless model_path says another."""
    model_path: str = ""
    """Where the weights lie, if not at `model`."""
    model_revision: str = "main"
    """Resolved to a commit, or to a fingerprint of the local files, when a run starts."""
    trust_remote_code: bool = False
    """Allow a tokenizer that brings its own code."""
    server: ServerSettings = ServerSettings()
    chat: ChatSettings = ChatSettings()
    run: RunSettings = RunSettings()
    sampling: SamplingSettings = SamplingSettings()
    classes: dict[str, ClassSettings] = {"short": ClassSettings()}
    policies: PolicySettings = PolicySettings()
    partitions: list[PartitionSettings] = Field(min_length=1)
    store: StoreSettings = StoreSettings()
    release: ReleaseSettings = ReleaseSettings()
    chaos: ChaosSettings = ChaosSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The layers are merged in promptmill.profile, which knows partitions by name and guards the
        # environment; the library's own env source ignores a variable with a typo.
        return (init_settings,)

    @field_validator("partitions", mode="before")
    @classmethod
    def _partitions_by_name(cls, value: object) -> object:
        if isinstance(value, Mapping):
            return [{"name": name, **table} for name, table in value.items()]
        return value

    @model_validator(mode="before")
    @classmethod
    def _policies_of_all(cls, data: Any) -> Any:
        """Each partition's policies are the profile's and its own; what has another shape is told later."""
        shared, parts = data.get("policies"), data.get("partitions")
        try:
            PolicySettings.model_validate(shared)
        except ValidationError:  # it is told once, of the profile's own
            return data
        if not isinstance(shared, Mapping):
            return data
        if isinstance(parts, Mapping):
            return {
                **data,
                "partitions": {name: _with_policies(part, shared) for name, part in parts.items()},
            }
        if isinstance(parts, list):
            return {**data, "partitions": [_with_policies(part, shared) for part in parts]}
        return data

    @model_validator(mode="after")
    def _names_fit(self) -> Profile:
        twice = [name for name, n in Counter(p.name for p in self.partitions).items() if n > 1]
        if twice:
            raise ValueError(f"two partitions are named {twice[0]!r}")
        for part in self.partitions:
            if part.length_class not in self.classes:
                known = ", ".join(sorted(self.classes))
                raise ValueError(
                    f"partition {part.name!r} has class {part.length_class!r}; [classes] knows: {known}"
                )
        return self

    def partition(self, name: str) -> PartitionSettings:
        """The partition of that name. Raises KeyError."""
        for part in self.partitions:
            if part.name == name:
                return part
        raise KeyError(name)

    def sampling_for(self, part: PartitionSettings) -> SamplingSettings:
        """The sampling that `part` is answered with."""
        return self.sampling.model_copy(update=part.sampling.model_dump(exclude_none=True))

    def max_new_tokens(self, part: PartitionSettings) -> int:
        return self.classes[part.length_class].max_new_tokens

    def masked(self) -> dict[str, Any]:
        """The profile as plain data, with values that may be secret replaced by ***."""
        data = self.model_dump(mode="json", by_alias=True)
        for table in (data["server"]["env"], data["server"]["flags"]):
            for key in table:
                if _SECRET.search(key):
                    table[key] = "***"
        for name in ("command", "cleanup"):
            data["server"][name] = mask_command(data["server"][name])
        data["server"]["urls"] = [mask_url(url) for url in data["server"]["urls"]]
        return data


def is_secret_name(name: str) -> bool:
    """Whether the value under this name is none for other eyes."""
    return bool(_SECRET.search(name))


def mask_url(url: str) -> str:
    """An address to be shown, without the password in it."""
    return _URL_PASSWORD.sub("***@", url)


def mask_command(command: Sequence[str]) -> list[str]:
    """A command to be shown: the values of flags and variables that name a secret are ***."""
    return [_mask_argument(command, i) for i in range(len(command))]


def _mask_argument(command: Sequence[str], i: int) -> str:
    """Argument i, masked where it is the value of a flag that names a secret."""
    flag, eq, _ = command[i].partition("=")
    if eq and _SECRET.search(flag):
        return f"{flag}=***"
    before = command[i - 1] if i else ""
    return "***" if before.startswith("--") and "=" not in before and _SECRET.search(before) else command[i]


def _with_policies(part: Any, shared: Mapping[str, Any]) -> Any:
    own = part.get("policies", {}) if isinstance(part, Mapping) else None
    return {**part, "policies": {**shared, **own}} if isinstance(own, Mapping) else part
