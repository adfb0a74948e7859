"""Facade for users: a model on a pod, with vLLM's names and shapes."""

from xdeepserve.llm.facade import LLM
from xdeepserve.llm.make_engine import build_engine
from xdeepserve.llm.request_outputs import CompletionOutput, Logprob, RequestOutput, digest

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "build_engine", "digest"]
