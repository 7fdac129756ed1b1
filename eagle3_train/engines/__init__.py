"""The target behind vLLM: the only package that imports vllm."""
