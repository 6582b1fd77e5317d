"""Calls models over HTTP, by four vendors' protocols, with one type for endpoints, failures and streams of documents.

A dialect interprets the documents; `completion` runs one turn, from the neutral conversation to events.
Nothing here loads the HTTP library before an `Upstream` is opened.
"""
