"""Calls models over HTTP, by four vendors' protocols; endpoints, failures and streams have the same types for all.

A dialect interprets the documents of a stream; `completion` runs one turn, from the neutral conversation to events.
Nothing here loads the HTTP library before an `Upstream` is opened.
"""
