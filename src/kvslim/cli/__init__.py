"""The command line: parse, call, print."""

from kvslim.cli.app import app, main

__all__ = ["app", "main"]
