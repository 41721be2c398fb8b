"""Sends all kinds of requests at once for minutes, and checks the process for leaks."""
