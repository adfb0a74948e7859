"""XCCL: protocols from the papers for moving bytes between dies. This package knows only the hardware."""
