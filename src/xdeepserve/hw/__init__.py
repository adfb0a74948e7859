"""The virtual SuperPod: clock, memory, dies and their engines. This package knows nothing of models or
serving."""
