"""XCCL: the papers' protocols that move bytes between dies. Knows only the hardware."""
