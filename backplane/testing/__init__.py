"""Peers for the tests of a client or host: a model server that says what a script says, and how.

One script is spoken in four wire formats at once, streaming or not, as each request asks.

The same script may be plain data (`[{"calls": [{"name": "read", "input": {…}}]}, {"text": "done"}]`); as a process,
`python -m backplane.testing SCRIPT.json` tells its port on the first line. Each turn may carry a `Fault`, and a `When`
that says which requests it answers; `SIDE_TURNS` answers what agents ask beside their work.

Examples:
    >>> import json, urllib.request
    >>> from backplane.testing import Call, ModelServer, Turn
    >>> with ModelServer([Turn(calls=(Call(name="read", input={"path": "a.txt"}),)), Turn(text="done")]) as server:
    ...     def ask(text: str) -> dict:
    ...         body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    ...         address = server.base_url("openai_compatible") + "/chat/completions"
    ...         request = urllib.request.Request(address, body, {"content-type": "application/json"})
    ...         with urllib.request.urlopen(request) as answer:
    ...             return json.load(answer)["choices"][0]
    ...     first, second = ask("read it"), ask("go on")
    ...     asked = [request.body["messages"][0]["content"] for request in server.requests]
    >>> first["message"]["tool_calls"][0]["function"]["arguments"], second["message"]["content"], asked
    ('{"path":"a.txt"}', 'done', ['read it', 'go on'])
"""

from backplane.testing.script import SIDE_TURNS, Call, Failure, Fault, Script, ScriptUsage, Turn, When, read_script
from backplane.testing.server import ModelServer, RecordedRequest
from backplane.upstream.endpoint import PROTOCOL_NAMES as PROTOCOLS
from backplane.upstream.endpoint import ProtocolName

__all__ = [
    "PROTOCOLS",
    "SIDE_TURNS",
    "Call",
    "Failure",
    "Fault",
    "ModelServer",
    "ProtocolName",
    "RecordedRequest",
    "Script",
    "ScriptUsage",
    "Turn",
    "When",
    "read_script",
]
