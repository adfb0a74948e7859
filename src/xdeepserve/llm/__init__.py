"""Facade for users: a model on a pod, with vLLM's names and shapes."""

# First, from a shallow stack: a deep one of Python 3.11 ends now and then exactly where a loop of numba calls
# functions, and each call then takes new memory for its frame, which made starts a tenth slower.
import numba  # noqa: F401

from xdeepserve.llm.facade import LLM
from xdeepserve.llm.make_engine import build_engine
from xdeepserve.llm.request_outputs import CompletionOutput, Logprob, RequestOutput, digest

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "build_engine", "digest"]
