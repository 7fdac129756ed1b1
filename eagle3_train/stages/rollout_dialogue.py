"""One conversation while the target answers it: turn after turn, into as few samples as the template allows.

If the template only appends, the answers of all turns share one sample; where it rewrites history (drops
earlier thinking, say), the next answer starts a sample of its own. Masks are the engine's boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from eagle3_train.corpus.account import Unusable
from eagle3_train.corpus.conversation import Conversation
from eagle3_train.corpus.render import Renderer, rollout_sample
from eagle3_train.records import Generation, Prompt, Sample


@dataclass(slots=True)
class Dialogue:
    """`asked` is the turn that waits for an answer; `supervised` marks its tokens that the target produced."""

    prompt: Prompt
    renderer: Renderer
    max_len: int
    asked: Prompt
    supervised: npt.NDArray[np.bool_]
    samples: list[Sample] = field(default_factory=list)

    @staticmethod
    def start(prompt: Prompt, renderer: Renderer, max_len: int) -> Dialogue:
        """The first turn of a prompt."""
        nothing = np.zeros(len(prompt.input_ids), dtype=np.bool_)
        return Dialogue(prompt, renderer, max_len, prompt, nothing)

    def take(self, generation: Generation) -> bool:
        """Add an answer; whether another turn is to be asked. Raises Unusable for an answer of no use."""
        sample = rollout_sample(self.asked, generation, self.max_len)
        mask = sample.loss_mask.copy()
        mask[: len(self.supervised)] |= self.supervised
        if self.supervised.any():  # the sample goes on
            self.samples.pop()
        self.samples.append(replace(sample, loss_mask=mask))
        return generation.finish_reason == "stop" and self._ask_next(generation)

    def _ask_next(self, generation: Generation) -> bool:
        """Render the next user turn after the answer; False when there is none or it does not fit."""
        if self.asked.messages_json == "null":
            return False
        said = Conversation.from_json(self.asked.messages_json)
        if not said.followups or not generation.text.strip():
            return False
        following = said.answered(generation.text)
        try:
            ids = np.array(self.renderer.prompt_ids(following.messages, said.tools), dtype=np.int32)
        except Unusable:
            return False
        if len(ids) + 1 >= self.max_len:
            return False
        done, name = self.samples[-1], f"{self.prompt.id}-t{len(self.samples)}"
        length = len(done.input_ids)
        self.supervised = np.zeros(len(ids), dtype=np.bool_)
        if length < len(ids) and np.array_equal(ids[:length], done.input_ids):
            self.supervised[:length] = done.loss_mask
            name = done.id
        self.asked = Prompt(name, self.prompt.domain, ids, following.to_json())
        return True
