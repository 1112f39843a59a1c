"""Why a row is rejected, and what to do about it: one line a reason, as docs/formats.md has it too."""

from __future__ import annotations

REASONS = {
    # the file
    "bad_json": "mend the line, or the text of the column; where none is JSON, set format to what it holds",
    "cut_line": "fetch the file again: it ends inside a row",
    "not_an_object": "write each row as an object, {…}",
    # conditions
    "filtered_out": "nothing: a condition under `where` leaves the row out",
    "not_a_number": "mend the value, or take the condition on it out of `where`",
    # what is asked
    "no_prompt": "set columns.prompt to the column that holds the prompt",
    "not_text": "set columns.prompt to a column of text, or format to what the column holds",
    "no_messages": "mend the row, or set columns.prompt and format: there is no list where messages belong",
    "bad_message": "mend the message: an object with role and content, or from and value",
    "bad_content": "make the content text, or a list of parts of type text",
    "bad_transcript": "mend the transcript; roles start a line, behind an empty one in Glaive's v2",
    "bad_tools": "make tools a list of function schemas, or the JSON text of one",
    "bad_tool_calls": "make tool_calls a list of {function: {name, arguments}}, arguments as JSON",
    "nothing_to_answer": "end the conversation with a message of the user or a tool",
    "empty_prompt": "nothing, or fill the message: there is no question in it",
    # policies
    "no_content": 'mend the message, or leave such ones out with policies.empty_content = "drop"',
    "unknown_role": 'map the name with policies.roles, or drop such messages: policies.unknown_role = "drop"',
    "last_is_assistant": 'have the last turn answered anew with policies.last_assistant = "drop"',
    "orphan_tool_result": 'mend the ids, or set policies.orphan_tool to "keep" or "drop"',
    "same_role_twice": 'join such messages with policies.same_role = "merge", or "keep" them',
    "system_not_first": 'let the template see it with policies.system_not_first = "keep"',
    "unsupported_modality": 'ask the text alone with policies.unsupported_modality = "drop"',
    "control_token": 'take the token out of the text, or mean it: policies.control_tokens = "keep"',
    "lone_surrogate": 'mend the text, or take U+FFFD for it: policies.surrogates = "replace"',
    "nul": 'leave the character out with policies.nul = "drop", or "keep" it',
    "too_long": 'raise ctx-size or context-length, lower max_new_tokens, or set policies.too_long = "shrink"',
    "duplicate": 'give it the earlier row\'s answer with policies.duplicates = "join"',
    # the template
    "template_error": "read what the template says; policies.same_role or another chat.template may help",
    "bad_tool_arguments": "mend the arguments, or set chat.template to one that takes them as text",
    "tools_not_rendered": 'use a chat.template that shows them, or accept it: chat.ignored_tools = "keep"',
    "id_out_of_vocabulary": "see model_path: the tokenizer and the weights are not of one model",
}


def with_remedy(reason: str) -> str:
    """The reason and what to do about it, where that is known."""
    return f"{reason} ({REASONS[reason]})" if reason in REASONS else reason
