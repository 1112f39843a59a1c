"""A tokenizer that brings its own code, as Kimi's does: loaded where allowed, rendering in its own way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import make_preparation, make_profile, user, write_lines

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.model import is_own_code, load_tokenizer, resolve_model
from promptmill.prompts.manifest import prepare, read_prompts
from promptmill.settings import ChatSettings

REMOTE = Path(__file__).parent / "data" / "remote_tokenizer"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city"],
    },
}
SHOWN = """<|im_system|>tool_declare<|im_middle|>namespace functions {
// The weather in a city.
type get_weather = (_: { city: string, unit?: "C" | "F" }) => any;
}<|im_end|>"""
ASKS = "<|im_assistant|>assistant<|im_middle|><think>"


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code that it runs, and puts the copy on sys.path: not into the user's cache."""
    import sys

    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path.copy())


def load(folder: Path, trust: bool = True) -> Any:
    profile = make_profile(model=str(folder), trust_remote_code=trust)
    return load_tokenizer(profile, resolve_model(profile), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REMOTE, tmp_path / "model"))


@pytest.fixture
def renderer(folder: Path) -> ChatRenderer:
    return ChatRenderer(load(folder), ChatSettings())


def test_own_code_is_run_only_where_the_profile_allows_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"brings its own code.* trust_remote_code = true"):
        load(folder, trust=False)
    assert is_own_code(load(folder))


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_class_of_the_librarys_own_is_not_taken_in_silence(folder: Path, name: str) -> None:
    """transformers knows a class of that name, and takes it where remote code is not allowed."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
    with pytest.raises(ConfigError, match="trust_remote_code = true"):
        load(folder, trust=False)


@pytest.mark.parametrize("code", ["raise ValueError('no')", "import no_such_package", "def", "x = 1"])
def test_own_code_that_fails_is_a_configuration_error(folder: Path, code: str) -> None:
    (folder / "tokenization_bytes.py").write_text(code)
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load(folder)


def test_own_code_is_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    before = ChatRenderer(load(folder), ChatSettings()).fingerprint()
    other = Path(shutil.copytree(REMOTE, tmp_path / "other"))
    code = other / "tokenization_bytes.py"
    code.write_text(code.read_text().replace("=> any", "=> unknown"))
    assert ChatRenderer(load(other), ChatSettings()).fingerprint() != before


def test_own_class_renders_tools_and_not_plain_jinja(renderer: ChatRenderer) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    ids = renderer.render([user("Oslo?")], tools)
    assert renderer.decode_all(ids) == f"{SHOWN}<|im_user|>user<|im_middle|>Oslo?<|im_end|>{ASKS}"
    assert renderer.decode_all(ids) == renderer.render_text([user("Oslo?")], tools)


def test_answer_of_an_own_class_is_split_by_its_markers(renderer: ChatRenderer) -> None:
    prompt = renderer.render([user("Oslo?")], None)
    assert (renderer.markers.family, prompt[-1]) == ("kimi_k2", renderer.markers.open[0])
    ids = renderer._tokenizer("Föhn.</think>Mild 🦊<|im_end|>", add_special_tokens=False)["input_ids"]
    split = renderer.split(prompt, ids)
    assert (split.reasoning, split.content, split.flags) == ("Föhn.", "Mild 🦊", [])
    assert renderer.split(prompt, ids[:-2]).flags == ["cut_character"]


def test_row_of_functions_gives_its_golden_prompt(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Nested questions beside bare function schemas."""
    row = {"id": "b1", "question": [[user("Weather in Oslo?")]], "function": [WEATHER]}
    columns = {"prompt": "question", "tools": "function"}
    source = write_lines(tmp_path / "b1.jsonl", [row])
    manifest = prepare(make_preparation(source, renderer, {"columns": columns}))
    (prompt,) = read_prompts(manifest)
    assert renderer.decode_all(prompt.input_ids) == (
        f"{SHOWN}<|im_user|>user<|im_middle|>Weather in Oslo?<|im_end|>{ASKS}"
    )


def test_row_of_an_agent_gives_its_golden_prompt(renderer: ChatRenderer, tmp_path: Path) -> None:
    """A call with its arguments as JSON text, its result, and reasoning that the template drops."""
    arguments = '{"city":  "Tromsø"}'
    call = {
        "id": "functions.get_weather:0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    messages = [
        {"role": "system", "content": "You answer in one line."},
        user("Weather in Tromsø?"),
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": '{"t": -3}'},
    ]
    row = {"id": "b3", "messages": messages, "tools": json.dumps([{"type": "function", "function": WEATHER}])}
    manifest = prepare(make_preparation(write_lines(tmp_path / "b3.jsonl", [row]), renderer))
    (prompt,) = read_prompts(manifest)
    assert prompt.turns[0][2]["tool_calls"] == [call]
    assert renderer.decode_all(prompt.input_ids) == (
        f"{SHOWN}<|im_system|>system<|im_middle|>You answer in one line.<|im_end|>"
        "<|im_user|>user<|im_middle|>Weather in Tromsø?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.get_weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\n"
        f'{{"t": -3}}<|im_end|>{ASKS}'
    )
    assert renderer.shows_reasoning(prompt.turns[0], prompt.input_ids) == "none"
