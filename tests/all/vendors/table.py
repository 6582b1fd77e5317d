"""The page that says of every driven agent which shared case passes, is emulated, or is refused and why.

`python3 xtask.py vendors --table` prints it; `python -m tests.all.vendors.table --write` writes it anew. What it says
is what the agents' own tests hold: a case with a label is tested, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from backplane.contract.work import OF_HOST
from hosts import acp, api, claude, codex, copilot, kimi, mock, shell
from tests.all.vendors import found
from tests.all.vendors.cases import table
from tests.all.vendors.ground import Agent
from tests.all.vendors.test_acp_orders import ORDERED, CodexAcp, OpenCode
from tests.all.vendors.test_claude import Claude
from tests.all.vendors.test_codex import Codex
from tests.all.vendors.test_copilot import Copilot
from tests.all.vendors.test_gemini import Gemini
from tests.all.vendors.test_kimi import Kimi

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "agents-tested.md"
HEEDS = {
    "api": api.HOST.heeds, "claude": claude.HOST.heeds, "codex": codex.HOST.heeds, "copilot": copilot.HOST.heeds,
    "kimi": kimi.HOST.heeds, "acp": acp.HEEDS, "shell": shell.HOST.heeds, "mock": mock.HEEDS,
}  # fmt: skip
NEEDLESS = dict.fromkeys(("shell", "mock"), "no effect needed")
HEAD = """# Driven agents, case by case

Each agent is run for real against a scripted model (`tests/all/vendors/`). `pass`: it does so by itself or by its host.
`emulated`: the host or the control plane does what the agent cannot. `refused`: an order that asks for it is refused.
`cut`: the agent shows its model less, and the host tells what the model was shown. `alike`: what does it is the same
for every agent of the table, and is run with others of them.

"""


SETTINGS = """
## Settings of an order, host by host

What of an order only its host can do. `heeded`: its `work` does it, or refuses with the reason where its agent cannot
(the tables around this one). `refused`: an order with it ends with `capability_unsupported` before anything is sent
(`heeds` in the host's hello). `no effect needed`: a host without a model has no turns and spends nothing; a scenario
of `mock` says what it does. Everything else of an order the control plane does, for every host; four settings somebody
beside it: `on_lost_worker` and `secrets` a queue, `remote_root` another machine, `route` the router (its `type` and
`priority` count for everybody). Where that one is not there, the order is refused (`config_invalid`).

"""
ACP = """
## Agents behind the host `acp`

opencode and codex-acp are driven through the cases of the table below, Qwen Code through some of them; Gemini CLI,
which is behind this host, too, through all cases above. Whatever the protocol has no word for the host does, or the
order is refused.
Conversations of opencode and Qwen Code stay with the folder they began in, so an order that keeps one works in place.
A budget is held where `prices` are configured and each request's tokens are told (Qwen Code, Gemini CLI) or seen
(`key_proxy`); else it is refused, as are hooks after tools.

After a tool's result Gemini CLI takes a stream without a finish reason for a whole answer. The host lets the turn fail
if the service had not counted tokens of that answer yet; if it had, the cut cannot be seen.

opencode, Qwen Code and codex-acp repeat failed requests by themselves and write them to their log alone. The host reads
it: each is a retry on record with the service's words, and four in a row without a sign of life end the run. After a
stream that reports a rate limit Qwen Code tries twice more, after 2 s and 4 s; by itself it waits a minute ten times.

Where an answer broke after its first word and the agent asks for the whole of it again, the words of the broken one are
taken back, with two exceptions: opencode after an error in the stream, Qwen Code after that and after a stream without
an end. The protocol does not show that they ask again (opencode sends the broken words after it logged the failure, and
Qwen Code may also go on from them), so these words stand before the answer (`tests/all/vendors/test_cuts.py`). After a
stream without an end opencode goes on: it shows its model the words so far.

Codex behind codex-acp asks nobody about commands that it holds for harmless (`cat`, `ls`): they are on record, and a
rule that forbids them shows as violated. A denied tool ends the turn there and in Qwen Code. opencode talks to a server
of its own at 127.0.0.1:4096, so it runs where the network is held by a namespace, and not by a port alone.

Kimi takes no proxy to a model on the usual addresses of its own machine, so with rules on the network it reaches
models elsewhere alone, or by `key_proxy`. It asks nobody about writes in a folder of git; the hook of its host does.

Of the protocol's registry these were tried by hand on 2026-11-24 against a scripted model, with an answer, a command, a
denied command and a refused key:

| agent | version | what was seen |
| --- | --- | --- |
| claude-agent-acp | 0.101.0 | all four, without exit codes; a refused key after its own retries alone |
| Kilo Code (`kilo`) | 7.7.7 | all four; starts in 25 s here; no tokens of a turn with tools; a denied tool ends it |
| Mistral Vibe (`vibe`) | 3.0.2 | all four, without exit codes |
| Grok Build (`grok`) | 1.0.41 | all four, with exit codes and tokens; a denied tool ends it; `cat`, `ls` unasked |
| fast-agent | 0.10.46 | an answer; it offers its model no tools by itself, so it has no profile |
| pi (`pi-acp`) | 0.0.34 | opened no session within 50 s (pi 0.73.1, 1.5.2); it asks nobody about its tools |
| Cline | 3.0.65 | refuses a session without one of its vendors' logins, whatever service is configured |
| OpenHands | 1.16.0 | refuses a session without its vendor's login |

Not to be had from npm or PyPI when this was tried: Autohand, DimCode, Dirac, GLM Agent, Nova, siGit. Auggie and Factory
Droid answer nobody without their vendors' logins, as the registry's own probe says.

"""


def agents() -> Sequence[Agent]:
    return (Claude(), Codex(), Copilot(), Gemini(), Kimi())


def acp_agents() -> Sequence[Agent]:
    return (OpenCode(), CodexAcp())


def settings() -> str:
    """The table of settings and shipped hosts, as the hosts' hellos have it."""
    rows = [f"| setting | {' | '.join(HEEDS)} |", f"|{' --- |' * (len(HEEDS) + 1)}"]
    for name, place in OF_HOST.items():
        cells = [NEEDLESS.get(host, "heeded") if name in heeds else "refused" for host, heeds in HEEDS.items()]
        rows.append(f"| `{place}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with the versions it was found out with."""
    pins = found.pins()
    names = (*(agent.name for agent in (*agents(), *acp_agents())), "qwen")
    versions = ", ".join(f"{name} {found.version(pins[name])}" for name in names)
    return f"{HEAD}Versions: {versions}.\n\n{table(agents())}{SETTINGS}{settings()}{ACP}{table(acp_agents(), ORDERED)}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
