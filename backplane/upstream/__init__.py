"""Models behind HTTP: four vendors' protocols as one endpoint, one failure and one stream of their JSON documents.

What the documents mean is a dialect's affair; one turn from the neutral conversation to events is `turn`.
Nothing here loads the HTTP library before an `Upstream` is opened.
"""

from backplane.upstream.client import Reply, Upstream
from backplane.upstream.endpoint import PROTOCOLS, Endpoint
from backplane.upstream.failure import Failure, UpstreamError

__all__ = ["PROTOCOLS", "Endpoint", "Failure", "Reply", "Upstream", "UpstreamError"]
