"""Conversations in the shapes people store them, normalised to OpenAI messages.

A row that cannot be understood raises `Unusable`; nothing is guessed, and no turn of a kept row is
dropped unless the configuration says so.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eagle3_train.config import CorpusConfig
from eagle3_train.corpus.account import Unusable
from eagle3_train.records import Sample

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
KEYS = ("messages", "conversations")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """OpenAI messages with their tools.

    followups: user turns to ask after the target has answered `messages`. cut: the last answer ended
    at a token limit, so no stop token belongs to it. fixes: what normalising changed.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    domain: str = "general"
    followups: tuple[str, ...] = ()
    cut: bool = False
    fixes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Hash of the opening question, "-", hash of everything: stable across files and runs."""
        opening = itertools.takewhile(lambda m: m["role"] != "assistant", self.messages)
        questions = [
            " ".join(m["content"].casefold().split()) for m in opening if m["role"] == "user"
        ]
        everything = [self.messages, self.tools, self.followups]
        return f"{_digest(questions or self.messages)}-{_digest(everything)}"

    def to_json(self) -> str:
        """JSON text that `from_json` reads; what the `messages_json` column holds."""
        content = {"messages": self.messages, "tools": self.tools, "followups": self.followups}
        return json.dumps(content, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Conversation:
        """The conversation that `to_json` wrote (domain and fixes aside)."""
        content = json.loads(text)
        return Conversation(
            content["messages"], content["tools"], followups=tuple(content["followups"])
        )

    def answered(self, text: str) -> Conversation:
        """After this answer, with the first of `followups` asked."""
        turn = {"role": "user", "content": self.followups[0]}
        messages = [*self.messages, {"role": "assistant", "content": text}, turn]
        return replace(self, messages=messages, followups=self.followups[1:])


def parse_row(row: dict[str, Any], config: CorpusConfig) -> Conversation | Sample:
    """Normalise one row; an assistant turn of `weight` 0 is context. Raises Unusable.

    A row that was tokenised elsewhere is a Sample already; its mask is all False when it came with none.
    """
    domain = str(row.get("domain") or row.get("category") or "general")
    if row.get("input_ids") is not None:
        return _token_row(row, domain)
    if media := next((key for key in MEDIA if row.get(key)), None):
        raise Unusable("multimodal", f"column {media}: text only is supported")
    followups: tuple[str, ...] = ()
    if row.get("turns") and not any(key in row for key in KEYS):
        if not isinstance(row["turns"], list) or not all(isinstance(t, str) for t in row["turns"]):
            raise Unusable("malformed_turn", "turns must be a list of strings")
        messages = [{"role": "user", "content": row["turns"][0]}]
        followups = tuple(row["turns"][1:])
    else:
        messages = _messages(row, ROLES | config.roles)
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages = [{"role": "system", "content": row["system"]}, *messages]
    messages, fixes = _arrange(messages, config)
    if "conversations" in row:
        fixes.append("sharegpt")
    conversation = Conversation(
        messages,
        _tools(row.get("tools")),
        domain,
        followups,
        cut=row.get("finish_reason") == "length",
        fixes=tuple(fixes),
    )
    try:
        (conversation.to_json() + domain).encode()
    except UnicodeEncodeError as error:
        raise Unusable("lone_surrogate", str(error)) from error
    return conversation


def cut_for_answer(conversation: Conversation, history: str) -> Conversation:
    """The conversation up to the answer that the target shall write.

    history "given" keeps earlier answers and cuts the last; "regenerate" cuts the first and asks later
    user turns as follow-ups (conversations with tools keep their history). Raises Unusable.
    """
    messages = list(conversation.messages)
    followups = conversation.followups
    roles = [message["role"] for message in messages]
    if history == "regenerate" and "assistant" in roles and "tool" not in roles:
        first = roles.index("assistant")
        later = [m["content"] for m in messages[first:] if m["role"] == "user"]
        messages, followups = messages[:first], (*later, *followups)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        raise Unusable("no_prompt", "nothing is left to answer")
    if not messages[-1]["content"].strip():
        raise Unusable("empty_prompt", f"the last {messages[-1]['role']} turn is empty")
    return replace(conversation, messages=messages, followups=followups)


def _token_row(row: dict[str, Any], domain: str) -> Sample:
    ids, given = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
        raise Unusable("malformed_ids", "input_ids must be a non-empty list of integers")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise Unusable("id_out_of_range", f"ids run from {min(ids)} to {max(ids)}")
    mask = [0] * len(ids) if given is None else given
    if not isinstance(mask, list) or not all(flag in (0, 1) for flag in mask):
        raise Unusable("malformed_mask", "loss_mask must be a list of 0 and 1")
    if len(mask) != len(ids):
        raise Unusable("mask_length", f"{len(ids)} ids, {len(mask)} mask entries")
    sample = Sample("", domain, np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))
    everything = [ids, None if given is None else sample.loss_mask.tolist()]
    return replace(sample, id=f"{_digest(ids[: sample.prompt_tokens])}-{_digest(everything)}")


def _messages(row: dict[str, Any], roles: dict[str, str]) -> list[Message]:
    """The turns under `messages` or `conversations`; both may be there only if they agree."""
    found = {key: _decoded(row[key], "conversation") for key in KEYS if key in row}
    if not found:
        raise Unusable("no_conversation", f"columns {', '.join(list(row)[:10])}")
    given = {key: turns for key, turns in found.items() if turns is not None}
    if not given:
        raise Unusable("null_conversation", " and ".join(found))
    parsed: list[list[Message]] = []
    for key, turns in given.items():
        if not isinstance(turns, list):
            raise Unusable("malformed_conversation", f"{key} is a {type(turns).__name__}")
        if not turns:
            raise Unusable("empty_conversation", key)
        parsed.append([_message(turn, roles) for turn in turns])
    if len(parsed) == 2 and parsed[0] != parsed[1]:
        raise Unusable("ambiguous", "messages and conversations disagree")
    return parsed[0]


def _message(turn: Any, roles: dict[str, str]) -> Message:
    """One turn: role/content or from/value, text parts joined, tool calls as objects."""
    if not isinstance(turn, dict):
        raise Unusable("malformed_turn", f"got {type(turn).__name__}")
    label = turn.get("role") or turn.get("from")
    role = roles.get(label.strip().lower()) if isinstance(label, str) else None
    if role is None:
        raise Unusable("unknown_role", f"{label!r}; map it with corpus.roles")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    message: Message = {"role": role, "content": _text(content)}
    if reasoning := next((turn[key] for key in REASONING if turn.get(key)), None):
        message["reasoning_content"] = _text(reasoning)
    if calls := _decoded(turn.get("tool_calls"), "tool_calls"):
        message["tool_calls"] = _tool_calls(calls)
    message.update({key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)})
    if role == "assistant" and turn.get("weight") is not None:
        if turn["weight"] not in (0, 1):
            raise Unusable("turn_weight", f"weight {turn['weight']!r} is neither 0 nor 1")
        if not turn["weight"]:
            message["weight"] = 0
    return message


def _text(content: Any) -> str:
    """Text of a content field; parts are joined, anything that is not text is refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("malformed_content", f"content is a {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS:
            raise Unusable("multimodal", f"part of type {part.get('type')!r}")
        if not isinstance(text, str):
            raise Unusable("malformed_content", f"part {part!r:.80}")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, the form templates expect."""
    if not isinstance(calls, list):
        raise Unusable("bad_tool_call", f"tool_calls is a {type(calls).__name__}")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("bad_tool_call", f"no function name in {call!r:.80}")
        arguments = _decoded(function.get("arguments"), "tool_call")
        if not isinstance(arguments or {}, dict):
            raise Unusable("bad_tool_call", f"arguments {arguments!r:.80} are not an object")
        clean = {
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments or {}},
        }
        result.append({"id": call["id"], **clean} if call.get("id") else clean)
    return result


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas given as a list, as JSON text, or as a list of JSON texts."""
    tools = _decoded(tools, "tools") or None
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Unusable("bad_tools", f"tools is a {type(tools).__name__}")
    parsed = [_decoded(tool, "tools") for tool in tools]
    if not all(isinstance(tool, dict) for tool in parsed):
        raise Unusable("bad_tools", "a tool schema is not an object")
    return parsed


def _decoded(value: Any, what: str) -> Any:
    """JSON text decoded; anything else as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"bad_{what}", f"not JSON: {error}") from error


def _arrange(messages: list[Message], config: CorpusConfig) -> tuple[list[Message], list[str]]:
    """Apply the rules for system turns and for a leading assistant turn."""
    fixes: list[str] = []
    rest = list(itertools.dropwhile(lambda m: m["role"] == "system", messages))
    system = messages[: len(messages) - len(rest)]
    if len(system) > 1:
        if config.several_system_turns == "skip_row":
            raise Unusable("several_system_turns", f"{len(system)} system turns")
        merged = "\n\n".join(message["content"] for message in system)
        system = [{"role": "system", "content": merged}]
        fixes.append("merged_system_turns")
    if not system and config.system_prompt is not None:
        system = [{"role": "system", "content": config.system_prompt}]
        fixes.append("added_system_prompt")
    while rest and rest[0]["role"] == "assistant":
        if config.leading_assistant == "skip_row":
            raise Unusable("leading_assistant", "set corpus.leading_assistant=drop_turn to use it")
        rest = rest[1:]
        fixes.append("dropped_leading_assistant")
    return [*system, *rest], fixes


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
