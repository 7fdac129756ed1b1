from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from corpus_tokenizer import SHARED, STOPS, TEMPLATES, marked, renderer, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from eagle3_train.corpus.account import CorpusError, Unusable
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.render import Renderer, rollout_sample
from eagle3_train.records import Generation, Prompt

OWN = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
REAL = sorted(path.stem for path in (SHARED / "templates").glob("*.jinja"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "Tide at a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "tide", "arguments": {"place": "Oban"}}}
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("Name a fruit."), assistant("Apple.")],
    "system": [
        {"role": "system", "content": "Be brief."},
        user("Name a fruit."),
        assistant("Apple."),
    ],
    "multi_turn": [
        user("Name a fruit."),
        assistant("Apple."),
        user("Another?"),
        assistant("Pear."),
    ],
    "tools": [
        user("Tide at Ayr?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "high at 4"},
        assistant("At four."),
    ],
    "thinking": [
        user("2 + 3?"),
        assistant("5", reasoning_content="Add them."),
        user("And 4 + 4?"),
        assistant("8", reasoning_content="Double it."),
    ],
}
# What each answer must contain, in order, whatever the template writes around it.
ANSWERS = {
    "plain": [["Apple."]],
    "system": [["Apple."]],
    "multi_turn": [["Apple."], ["Pear."]],
    "tools": [["tide", "Oban"], ["At four."]],
    "thinking": [["Add them.", "5"], ["Double it.", "8"]],
}
HEADER_STOPS = ("thinking_emptied", "glm-4.6")  # the next turn's header is the stop token
CANNOT = {  # (template, kind): the reason it is refused
    **{
        (name, "tools"): "answer_not_rendered"
        for name in ("plain", "alternating", "gemma-it", "glm-4.6")
    },
    **{
        (name, "tools"): "answer_not_rendered"
        for name in ("granite-3.0-instruct", "kimi-k2", "phi-3")
    },
    **{(name, "tools"): "answer_not_rendered" for name in ("llama-3-instruct", "mistral-instruct")},
    ("kimi-k2-thinking", "tools"): "template",  # it appends to a list, which transformers forbids
    **{
        (name, "thinking"): "answer_not_rendered"
        for name in STOPS
        if name not in ("thinking_dropped", "thinking_emptied", "glm-4.6")
    },
}


def conversation(kind: str) -> Conversation:
    return Conversation(KINDS[kind], TOOLS if kind == "tools" else None)


def golden() -> dict[tuple[str, str], list[str]]:
    """tests/templates/golden.txt: `== template / kind`, then one row per line with \\n escaped."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in (TEMPLATES / "golden.txt").read_text().splitlines():
        if line.startswith("== "):
            template, kind = line[3:].split(" / ")
            rows = found.setdefault((template, kind), [])
        elif line:
            rows.append(line.replace("\\n", "\n"))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", OWN)
def test_masks_are_the_golden_ones(template: str, kind: str) -> None:
    made = renderer(template)
    try:
        rows = made.answered_rows(conversation(kind), supervise_inserted=False)
        shown = [marked(made, ids, mask) for ids, mask in rows]
    except Unusable as problem:
        shown = [f"refused: {problem.reason}"]
    assert shown == golden()[template, kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [*OWN, *REAL])
def test_exactly_the_answers_are_supervised_and_the_rest_is_the_engines_prompt(
    template: str, kind: str
) -> None:
    made = renderer(template)
    talk = conversation(kind)
    if (template, kind) in CANNOT:
        with pytest.raises(Unusable) as refused:
            made.answered_rows(talk, supervise_inserted=False)
        assert refused.value.reason == CANNOT[template, kind]
        return
    answers = []
    for ids, mask in made.answered_rows(talk, supervise_inserted=False):
        text = marked(made, ids, mask)
        if template in HEADER_STOPS and text.endswith("]]"):
            text = f"{text[:-2]}<|user|>]]"  # no next turn, so no header that would end this one
        answers += re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)
    assert len(answers) == len(ANSWERS[kind])
    turns = [index for index, turn in enumerate(talk.messages) if turn["role"] == "assistant"]
    for answer, pieces in zip(answers, ANSWERS[kind], strict=True):
        assert all(piece in answer for piece in pieces)
        foreign = [t["content"] for t in talk.messages if t["role"] != "assistant"]
        assert not any(text in answer for text in foreign)
        assert sum(answer.count(stop) for stop in STOPS[template]) == 1
        assert answer.endswith(tuple(STOPS[template]))
    whole = made.tokenizer.apply_chat_template(talk.messages, tools=talk.tools, return_dict=False)
    assert ids == whole
    served = made.tokenizer.apply_chat_template(
        talk.messages[: turns[-1]], tools=talk.tools, add_generation_prompt=True, return_dict=False
    )
    assert made.prompt_ids(talk.messages[: turns[-1]], talk.tools) == served == ids[: len(served)]


@pytest.mark.parametrize("template", OWN)
def test_special_tokens_in_user_text_stay_text(template: str) -> None:
    made = renderer(template)
    stop = STOPS[template][0]
    clean = made.prompt_ids([user("Print X now.")])
    ids = made.prompt_ids([user(f"Print {stop}<s> now.")])
    control = set(made.tokenizer.all_special_ids) | made.stop_ids
    assert [id for id in ids if id in control] == [id for id in clean if id in control]
    text = made.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == made.tokenizer.decode(clean).replace("X", f"{stop}<s>")


def test_special_tokens_in_an_answer_do_not_end_it() -> None:
    made = renderer("plain")
    rows = made.answered_rows(
        Conversation([user("Mark?"), assistant("<|im_end|> is a marker.")]), False
    )
    assert marked(made, *rows[0]).endswith("[[<|im_end|> is a marker.<|im_end|>]]\n")
    stop = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    supervised = np.array(rows[0][0])[np.array(rows[0][1])]
    assert (supervised == stop).sum() == 1


def test_text_around_a_literal_special_token_is_encoded_as_without_it() -> None:
    made = renderer("default_system")
    history = [user("What is 2 + 3?"), assistant("word word 5"), user("Name a fruit.")]
    plain = made.prompt_ids(history[:1])
    mixed = made.prompt_ids([*history[:2], user("word </s> word")])
    assert mixed[: len(plain)] == plain


def test_a_sentencepiece_style_tokenizer_keeps_special_text_as_text() -> None:
    letters = {letter: 10 + n for n, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz<>/[].|_")}
    backend = Tokenizer(
        models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, [], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[q] {{ m.content }} [a]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    made = Renderer(fast, frozenset({2}))
    ids, mask = made.answered_rows(Conversation([user("say </s>"), assistant("ok")]), False)[0]
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert mask == [False] * (len(ids) - 4) + [True] * 4
    pieces = made.tokenizer.convert_ids_to_tokens(ids)
    assert pieces[1:] == [*"[q]▁say▁</s>▁[a]▁ok", "</s>"]


def test_an_empty_think_block_of_the_template_is_supervised_only_on_request() -> None:
    made = renderer("thinking_dropped")
    talk = conversation("plain")
    without, with_it = (marked(made, *made.answered_rows(talk, flag)[0]) for flag in (False, True))
    assert "[[Apple.<|im_end|>]]" in without
    assert "[[<think>\n\n</think>\n\nApple.<|im_end|>]]" in with_it
    given = Conversation([user("Hi"), assistant("<think></think>Yes.")])
    assert "[[<think>" in marked(made, *made.answered_rows(given, False)[0])


def test_template_arguments_reach_the_template() -> None:
    ids = renderer("thinking_dropped", enable_thinking=False).prompt_ids([user("Hi")])
    made = renderer("thinking_dropped")
    assert made.tokenizer.decode(ids).endswith("</think>\n\n")
    assert not made.tokenizer.decode(made.prompt_ids([user("Hi")])).endswith("</think>\n\n")
    assert made.fingerprint != renderer("thinking_dropped", enable_thinking=False).fingerprint


def test_reasoning_that_the_template_drops_refuses_the_row() -> None:
    talk = Conversation([user("2?"), assistant("<think>x</think>5"), user("3?"), assistant("6")])
    for template in ("thinking_emptied", "kimi-k2-thinking"):
        if template in (*OWN, *REAL):
            with pytest.raises(Unusable, match="answer_not_rendered"):
                renderer(template).answered_rows(talk, False)


def test_an_answer_cut_at_its_token_limit_gets_no_stop_token() -> None:
    made = renderer("plain")
    talk = Conversation(KINDS["multi_turn"], cut=True)
    ids, mask = made.answered_rows(talk, False)[0]
    assert marked(made, ids, mask).endswith("[[Pear.]]")
    assert "[[Apple.<|im_end|>]]" in marked(made, ids, mask)


def test_empty_answers_among_others_are_context_only() -> None:
    made = renderer("plain")
    talk = Conversation([user("Hi"), assistant("  "), user("Name a fruit."), assistant("Fig.")])
    text = marked(made, *made.answered_rows(talk, False)[0])
    assert re.findall(r"\[\[(.*?)\]\]", text) == ["Fig.<|im_end|>"]


def test_an_answer_of_weight_zero_is_context_only() -> None:
    chat = renderer("plain")
    turns = [user("a"), assistant("one", weight=0), user("b"), assistant("two")]
    plain = [{key: value for key, value in turn.items() if key != "weight"} for turn in turns]
    (weighted,) = chat.answered_rows(Conversation(turns), False)
    (every,) = chat.answered_rows(Conversation(plain), False)
    assert weighted[0] == every[0]
    assert sum(weighted[1]) < sum(every[1])
    spoken = chat.tokenizer.decode([i for i, on in zip(*weighted, strict=True) if on])
    assert "two" in spoken
    assert "one" not in spoken
    with pytest.raises(Unusable, match="nothing_supervised"):
        chat.answered_rows(Conversation(turns[:2]), False)


def test_a_template_whose_prompt_is_not_a_prefix_is_refused() -> None:
    made = renderer("plain", copy=True)
    made.tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(Unusable, match="not_append_only"):
        made.answered_rows(conversation("plain"), False)
    made.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(Unusable, match="token_boundary"):
        made.answered_rows(Conversation([user("say wo"), assistant("rd word")]), False)


def test_a_doubled_bos_is_refused() -> None:
    made = renderer("headers", bos_token="<s><s>")
    with pytest.raises(Unusable, match="doubled_bos"):
        made.prompt_ids([user("Hi")])


def test_the_mask_of_a_rollout_is_the_engines_generation_boundary() -> None:
    prompt = Prompt("p", "chat", np.array([5, 6, 7], dtype=np.int32), "null")
    generation = Generation("p", (5, 6, 7), (8, 9, 2), "stop", "")
    sample = rollout_sample(prompt, generation, max_len=16)
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9, 2]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert sample.finish_reason == "stop"
    cut = rollout_sample(prompt, generation, max_len=5)
    assert (cut.input_ids.tolist(), cut.finish_reason) == ([5, 6, 7, 8, 9], "length")
    with pytest.raises(Unusable, match="nothing_supervised"):
        rollout_sample(prompt, generation, max_len=4)
    doubled = Generation("p", (1, 5, 6, 7), (8, 9, 2), "stop", "")
    with pytest.raises(ValueError, match="prompt ids of p differ"):
        rollout_sample(prompt, doubled, max_len=16)


def test_control_and_tag_tokens_are_always_drafted_and_stops_are_read_from_the_files(
    tmp_path,
) -> None:
    made = Renderer.load(save(tmp_path, "headers"), trust_remote_code=False)
    names = made.tokenizer.convert_tokens_to_ids
    assert made.stop_ids == {names("<|stop|>"), names("<|call|>")}
    for token in ("<s>", "<|stop|>", "<|call|>", "<think>", "</tool_call>", "<|header|>"):
        assert names(token) in made.always_drafted
    assert names("a") not in made.always_drafted


def test_unusable_tokenizer_directories_are_named(tmp_path) -> None:
    with pytest.raises(CorpusError, match="no tokenizer directory"):
        Renderer.load(str(tmp_path / "absent"), trust_remote_code=False)
    with pytest.raises(CorpusError, match="no usable tokenizer"):
        Renderer.load(str(tmp_path), trust_remote_code=False)
    directory = save(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(CorpusError, match="no chat template"):
        Renderer.load(directory, trust_remote_code=False)


def test_a_tokenizers_own_code_runs_only_with_consent(tmp_path) -> None:
    save(tmp_path)
    (tmp_path / "own.py").write_text("raise RuntimeError('ran without consent')\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [null, "own.Own"]}}'
    )
    with pytest.raises(CorpusError, match="trust_remote_code"):
        Renderer.load(str(tmp_path), trust_remote_code=False)


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python, one token per character: what tiktoken-style remote code looks like."""

    vocab_size = 500

    def get_vocab(self) -> dict[str, int]:
        return {chr(n): n for n in range(self.vocab_size)}

    def _tokenize(self, text: str) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def test_a_tokenizer_without_fast_backend_works_but_refuses_literal_special_tokens() -> None:
    slow = Letters(
        eos_token="<end>", chat_template="{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    )
    made = Renderer(slow, frozenset({slow.eos_token_id}))
    ids, mask = made.answered_rows(Conversation([user("Hi"), assistant("Yes")]), False)[0]
    assert ids == [*map(ord, "Hi"), slow.eos_token_id, *map(ord, "Yes"), slow.eos_token_id]
    assert mask == [False] * 3 + [True] * 4
    with pytest.raises(Unusable, match="special_text"):
        made.prompt_ids([user("the <end> of it")])
