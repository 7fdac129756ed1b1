"""Train EAGLE-3 drafters on hidden states streamed from vLLM."""
