"""Fakes, strategies and contract suites for whoever writes a batch scheduler.

It knows no scheduler: what it tests is handed to it.
"""
