"""A server of the Model Context Protocol with one tool: it answers with its word and what it was given.

The word is its argument, else the variable WORD.
"""

import json
import os
import sys

WORD = sys.argv[1] if len(sys.argv) > 1 else os.environ["WORD"]
TOOL = {"name": "word", "description": "the word", "inputSchema": {"type": "object", "properties": {}}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result: dict[str, object] = {}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "house", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        result = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        words = f"{WORD} {json.dumps(asked['params'].get('arguments'))}"
        result = {"content": [{"type": "text", "text": words}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
