"""Answers to clients: generation, streams of events, usage, log probabilities."""
