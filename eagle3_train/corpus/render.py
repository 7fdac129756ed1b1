"""Chat template -> token ids and loss mask.

Prompts are encoded as the engine would (`add_special_tokens=False`: the template owns BOS). Answers
that came with the data are masked by the append-only rule: rendering the turns before an answer plus
the generation prompt must give a prefix of rendering the answer too, in text and in tokens; the rest,
up to the stop token, is supervised. Anything else fails closed. Special-token strings inside message
text are text: a mark breaks them before the template runs, and a clone of the tokenizer whose normaliser
drops the mark, after special tokens were found, encodes the result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from eagle3_train.corpus.account import CorpusError, Unusable
from eagle3_train.corpus.conversation import Conversation, Message
from eagle3_train.records import Generation, Prompt, Sample
from eagle3_train.rundir import reading

MARK = "\ue0f1"
# What a target writes inside its own answer: never escaped there, always in the draft vocabulary.
STRUCTURE = re.compile(r"think|tool", re.IGNORECASE)
UNUSED = re.compile(r"reserved|unused", re.IGNORECASE)
EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
THINK_TAG = re.compile(r"</?think>")
Tokens = tuple[list[int], list[bool]]
"""Token ids and, for each, whether the target produced it."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Text `before` the answer, text `after` it, and the character where the target's own part begins."""

    before: str
    after: str
    begin: int


class Renderer:
    """The target's tokenizer and chat template.

    stop_ids: tokens that end an answer (generation_config.json and the tokenizer's EOS).
    fingerprint: hash of tokenizer, template and template arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int],
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise CorpusError("the tokenizer has no chat template; add chat_template.jinja to it")
        self.tokenizer = tokenizer
        self.tokenizer.model_max_length = int(1e12)  # silences a warning: max_len is ours to apply
        self.template_kwargs = template_kwargs or {}
        self.stop_ids = stop_ids
        self.vocab_size = len(tokenizer)
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        special = {str(t): id for id, t in added.items() if t.special and len(str(t)) > 1}
        self._control_ids = frozenset(special.values())
        longest_first = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.always_drafted = frozenset(
            id
            for id, token in added.items()
            if (token.special or STRUCTURE.search(str(token))) and not UNUSED.search(str(token))
        ) | frozenset(stop_ids)
        fast = tokenizer.is_fast
        vocabulary = (
            tokenizer.backend_tokenizer.to_str() if fast else sorted(tokenizer.get_vocab().items())
        )
        facts = [vocabulary, tokenizer.chat_template, sorted(stop_ids), self.template_kwargs]
        text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def load(
        cls, directory: str, trust_remote_code: bool, template_kwargs: dict[str, Any] | None = None
    ) -> Renderer:
        """Read the tokenizer in `directory`; its Python files run only with trust_remote_code."""
        tokenizer = load_tokenizer(directory, trust_remote_code)
        stop_ids = {tokenizer.eos_token_id} - {None}
        generation = Path(directory) / "generation_config.json"
        if generation.is_file():
            with reading(generation):
                declared = json.loads(generation.read_text()).get("eos_token_id")
                stop_ids.update(declared if isinstance(declared, list) else {declared} - {None})
                if not all(isinstance(id, int) for id in stop_ids):
                    raise ValueError(f"eos_token_id should be numbers, got {declared!r}")
        if not stop_ids:
            raise CorpusError(
                f"{directory} names no EOS token in tokenizer or generation_config.json"
            )
        return cls(tokenizer, frozenset(stop_ids), template_kwargs)

    def prompt_ids(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids up to and including the assistant header. Raises Unusable."""
        messages, tools = self._escaped(messages, tools)
        return self._encode(self._render(messages, tools, generation_prompt=True))

    def answered_rows(self, conversation: Conversation, supervise_inserted: bool) -> list[Tokens]:
        """One row with every answer supervised if the template only ever appends, else one per answer.

        Raises Unusable when any answer cannot be located exactly.
        """
        messages, tools = self._escaped(conversation.messages, conversation.tools)
        answers = [
            self._answer(messages[: index + 1], tools, supervise_inserted)
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and not _is_context(message)
        ]
        if not answers:
            raise Unusable("nothing_supervised", "no assistant turn with content and weight")
        if all(answers[-1].after.startswith(answer.after) for answer in answers):
            try:
                return [self._masked(answers, conversation.cut)]
            except Unusable:
                if len(answers) == 1:
                    raise
        return [self._masked([a], conversation.cut and a is answers[-1]) for a in answers]

    def _answer(self, messages: list[Message], tools: Any, supervise_inserted: bool) -> _Answer:
        """Locate the last message in its rendering. Raises Unusable when the template rewrites."""
        before = self._render(messages[:-1], tools, generation_prompt=True)
        after = self._render(messages, tools, generation_prompt=False)
        message, begin = messages[-1], len(before)
        if not after.startswith(before):
            turn = len(messages)
            raise Unusable("not_append_only", f"the template rewrites the prompt of turn {turn}")
        _check_complete(message, after[begin:])
        inserted = EMPTY_THINK.match(after, begin)
        if inserted and not EMPTY_THINK.match(message["content"]):
            if message.get("reasoning_content", "").strip() or "</think>" in message["content"]:
                raise Unusable("answer_not_rendered", "an empty think block precedes the reasoning")
            begin = begin if supervise_inserted else inserted.end()
        return _Answer(before, after, begin)

    def _masked(self, answers: list[_Answer], cut: bool) -> Tokens:
        """Ids up to the last answer, and the mask of all; `cut` ends the row before its stop."""
        full = answers[-1].after
        ids = self._encode(full)
        mask = [False] * len(ids)
        for answer in answers:
            start = self._boundary(ids, answer.before)
            if answer.begin > len(answer.before):
                start = self._boundary(ids, full[: answer.begin], full[: answer.begin].rstrip())
            end = len(ids) if answer.after == full else self._boundary(ids, answer.after)
            stop = self._end_of_answer(ids, start, end)
            mask[start:stop] = [True] * (stop - start)
        if cut:
            end = stop - 1 if ids[stop - 1] in self.stop_ids else stop
            ids, mask = ids[:end], mask[:end]
        return ids, mask

    def _boundary(self, ids: list[int], *prefixes: str) -> int:
        """Tokens of the first of `prefixes` that are the first ones of `ids`. Raises Unusable."""
        for prefix in prefixes:
            encoded = self._encode(prefix)
            if ids[: len(encoded)] == encoded:
                return len(encoded)
        raise Unusable("token_boundary", "tokens merge across the start or end of an answer")

    def _end_of_answer(self, ids: list[int], start: int, end: int) -> int:
        """One past the last token the target produced for the answer rendered in ids[start:end].

        That is the stop token, also when the next turn's header serves as one. Without any, the
        white space a template adds after a last control token is not the target's.
        """
        for position in range(start, min(end + 1, len(ids))):
            if ids[position] in self.stop_ids:
                return position + 1
        for position in range(end - 1, start, -1):
            if ids[position] in self._control_ids:
                return position + 1
            if str(self.tokenizer.decode([ids[position]])).strip():
                break
        return end

    def _render(self, messages: Sequence[Message], tools: Any, *, generation_prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self.template_kwargs,
                )
            )
        except Exception as error:  # a template is a user's program: this concerns one row
            raise Unusable("template", f"{type(error).__name__}: {error}") from error

    def _escaped(self, messages: Sequence[Message], tools: Any) -> tuple[list[Message], Any]:
        """Messages and tools in which special-token strings are broken by MARK."""
        said = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
        return [self._escape(m, m["role"] == "assistant") for m in said], self._escape(tools, False)

    def _escape(self, value: Any, by_target: bool) -> Any:
        if isinstance(value, str):

            def broken(match: re.Match[str]) -> str:
                token = match.group()
                if by_target and STRUCTURE.search(token):
                    return token
                return f"{token[0]}{MARK}{token[1:]}"

            if MARK in value:
                raise Unusable("private_use_text", "text holds U+E0F1, our own mark")
            return self._pattern.sub(broken, value)
        if isinstance(value, list):
            return [self._escape(item, by_target) for item in value]
        if isinstance(value, dict):
            return {key: self._escape(item, by_target) for key, item in value.items()}
        return value

    def _encode(self, text: str) -> list[int]:
        if MARK not in text:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = self._unmarking_backend.encode(text, add_special_tokens=False).ids
            control = self._control_ids - {self.tokenizer.unk_token_id}
            if sum(id in control for id in ids) > len(self._pattern.findall(text)):
                raise Unusable("special_text", "this tokenizer finds special tokens in plain text")
        if self.tokenizer.bos_token_id is not None and ids[:2] == [self.tokenizer.bos_token_id] * 2:
            raise Unusable("doubled_bos", "the prompt starts with two BOS tokens")
        return ids

    @cached_property
    def _unmarking_backend(self) -> Tokenizer:
        """The same tokenizer, but MARK is dropped from what is left when special tokens were found."""
        if not self.tokenizer.is_fast:
            raise Unusable("special_text", "this tokenizer cannot encode special tokens as text")
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in state["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        clone = Tokenizer.from_str(json.dumps(state))
        steps = [normalizers.Replace(MARK, ""), clone.normalizer]
        clone.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        return clone


def load_tokenizer(directory: str, trust_remote_code: bool) -> Any:
    """The tokenizer in `directory`. Raises CorpusError when it cannot be read."""
    if not Path(directory).is_dir():
        raise CorpusError(f"no tokenizer directory {directory}; see target.tokenizer")
    try:
        return AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever the files, or their Python, make it raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise CorpusError(f"no usable tokenizer in {directory}: {kind}{error}") from error


def rollout_sample(prompt: Prompt, generation: Generation, max_len: int) -> Sample:
    """The target's own answer as a sample: the mask is the engine's generation boundary.

    Raises ValueError when the engine saw other prompt ids than we sent (a doubled BOS, say), Unusable
    when max_len or an empty answer leaves nothing to supervise.
    """
    sent = prompt.input_ids.tolist()
    if list(generation.prompt_ids) != sent:
        raise ValueError(
            f"the engine's prompt ids of {prompt.id} differ from ours: {len(generation.prompt_ids)} "
            f"against {len(sent)}, starting {generation.prompt_ids[:3]} against {sent[:3]}"
        )
    ids = np.array([*sent, *generation.output_ids], dtype=np.int32)[:max_len]
    mask = np.arange(len(ids)) >= len(sent)
    if mask.sum() < 2:
        raise Unusable("nothing_supervised", f"{int(mask.sum())} tokens of answer within max_len")
    truncated = len(sent) + len(generation.output_ids) > max_len
    return Sample(
        prompt.id, prompt.domain, ids, mask, "length" if truncated else generation.finish_reason
    )


def _is_context(message: Message) -> bool:
    """Whether an assistant turn teaches nothing: it is empty, or the data says so."""
    said = message.get("reasoning_content", "") + message["content"]
    return not (said.strip() or message.get("tool_calls")) or message.get("weight") == 0


def _check_complete(message: Message, answer: str) -> None:
    """Refuse an answer that the template rendered only in part."""
    pieces = [message.get("reasoning_content", ""), *THINK_TAG.split(message["content"])]
    pieces += [call["function"]["name"] for call in message.get("tool_calls", [])]
    for piece in pieces:
        if piece.strip() not in answer:
            raise Unusable("answer_not_rendered", f"the template drops {piece.strip()!r:.80}")
