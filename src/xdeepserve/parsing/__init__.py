"""Parsers of models' answers: reasoning and calls of tools, without an engine."""

from xdeepserve.parsing.stream_parser import parse_answer, parse_pieces

__all__ = ["parse_answer", "parse_pieces"]
