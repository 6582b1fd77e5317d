"""Models behind HTTP: four vendors' protocols as one endpoint, one failure and one stream of their JSON documents.

What the documents mean is a dialect's affair; `completion` takes one turn from the neutral conversation to events.
Nothing here loads the HTTP library before an `Upstream` is opened.
"""
