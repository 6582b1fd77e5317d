"""Lines to messages and back, for both ends, without any I/O.

Bytes go in, checked messages come out; the tables say who may say what and when. Every
door uses the same strict reader: split at LF only, bounded, UTF-8, bounded depth, strict
JSON. Nothing here waits, reads a clock or knows a process. The control plane's end is in
`control`, which a host does not load.
"""

from backplane.protocol.host import HostEnd
from backplane.protocol.lines import (
    DEPTH_MAX,
    EVIDENCE_BYTES,
    LINE_BYTES_MAX,
    Lines,
    Overlong,
    bare,
    strict,
)
from backplane.protocol.messages import (
    MESSAGES,
    NEEDS_EXTENSION,
    NOISE_SHOWN,
    WRONG_SHAPE,
    Broken,
    Dropped,
    Events,
    Noise,
    Received,
    Unknown,
    describe_noise,
    version_compatible,
)

__all__ = [
    "DEPTH_MAX",
    "EVIDENCE_BYTES",
    "LINE_BYTES_MAX",
    "MESSAGES",
    "NEEDS_EXTENSION",
    "NOISE_SHOWN",
    "WRONG_SHAPE",
    "Broken",
    "Dropped",
    "Events",
    "HostEnd",
    "Lines",
    "Noise",
    "Overlong",
    "Received",
    "Unknown",
    "bare",
    "describe_noise",
    "strict",
    "version_compatible",
]
