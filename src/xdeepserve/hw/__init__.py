"""The virtual SuperPod: clock, memory, dies and their engines. Knows nothing of models or serving."""
