"""The page that says of every driven agent which shared case passes, is emulated, or is refused and why.

`python3 xtask.py vendors --table` prints it; `python -m tests.all.vendors.table --write` writes it anew. What it says
is what the agents' own tests hold: a case with a label is tested, too.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from backplane.agents.rows import read, rows_of
from backplane.contract.work import OF_AGENT, OF_HOST
from backplane.resources import find as find_shared
from hosts import api, mock, shell
from hosts.agent import host_of
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
ROWS = rows_of(str(find_shared("hosts")))
HEEDS = {
    "api": api.HOST.heeds, "shell": shell.HOST.heeds, "mock": mock.HEEDS,
    **{name: host_of(name, read(ROWS, name, {})).heeds for name in ("claude", "codex", "copilot", "kimi")},
    "acp": OF_AGENT,
}  # fmt: skip
NEEDLESS = dict.fromkeys(("shell", "mock"), "no effect needed")
HEAD = """# Agents, tested case by case

Each agent runs for real against a scripted model (`tests/all/vendors/`). `pass`: the agent or its host does this.
`emulated`: the host or the control plane does what the agent cannot. `refused`: an order that asks for it is refused.
`cut`: the agent shows its model less, and the host reports what the model was shown. `alike`: the same code does this
for other agents, and the case runs with one of them. Cases that look at the same run share it.

"""


SETTINGS = """
## Settings of an order, host by host

These settings only the host can carry out. `heeded`: the host does so, or refuses with a reason if its agent cannot
(see the other tables). `refused`: an order with this setting ends with `capability_unsupported` before anything is
sent (`heeds` in the host's hello). `no effect needed`: a host without a model has no turns and spends nothing.

The control plane carries out all other settings, for every host. Four need a part that may be missing; without it the
order is refused (`config_invalid`): `on_lost_worker` and `secrets` need a queue, `remote_root` another machine, and
`route` the router (its `type` and `priority` always count). A budget of tokens and a list of allowed tools are the
control plane's as well: they are tried with the other agents, not with Copilot CLI, Gemini CLI and Kimi again.

"""
ACP = """
## Agents behind the host `acp`

opencode and codex-acp are tested with the cases of the table below, Qwen Code with some of them, and Gemini CLI, which
is behind this host too, with all cases above. What the protocol cannot express is done by the host, or refused.

- Conversations of opencode and Qwen Code stay with the folder they began in, so an order that keeps one works in place.
- A budget needs `prices`, and the tokens of each request: reported (Qwen Code, Gemini CLI) or seen by a `key_proxy`.
  Otherwise it is refused, as are hooks after tools.

- After a tool's result, Gemini CLI takes a stream without a finish reason for a whole answer. The host lets the turn
  fail if the service had not counted tokens of that answer yet; otherwise the cut cannot be seen.
- opencode, Qwen Code and codex-acp repeat failed requests themselves, and only write them to their log. The host reads
  the log and reports each as a retry; four in a row without another sign of life end the run. After a stream that
  reports a rate limit, Qwen Code tries twice more, after 2 s and 4 s.
- If an answer broke after its first word and the agent asks for all of it again, the words of the broken answer are
  taken back. Two cases keep them, because the protocol does not show that the agent asks again: opencode after an error
  in the stream, and Qwen Code after that or after a stream without an end. After a stream without an end, opencode
  continues from the words so far.
- Codex behind codex-acp runs commands it considers harmless (`cat`, `ls`) without asking. They are recorded, and a rule
  that forbids them shows as violated. A denied tool ends the turn there and in Qwen Code.
- opencode talks to its own server at 127.0.0.1:4096, so network rules need a namespace for it, not only a port.
- Kimi uses no proxy for a model on its own machine. With network rules it only reaches models elsewhere, or a model
  behind a `key_proxy`. It does not ask about writes in a git folder; the hook of its host does.

These agents of the protocol's registry were tried by hand on 2026-11-24 against a scripted model, with an answer, a
command, a denied command and a refused key:

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

Not on npm or PyPI at that time: Autohand, DimCode, Dirac, GLM Agent, Nova, siGit. Auggie and Factory Droid
need their vendors' logins.

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


def instructions() -> str:
    """The names of the files with a project's instructions that each agent reads itself."""
    named = {name: row.get("instruction_files") for name, row in ROWS.items()}
    shown = [f"{name} ({', '.join(f'`{file}`' for file in files)})" for name, files in named.items() if files]
    text = (
        "Project instructions: a model behind `api` gets them from the control plane, which reads `AGENTS.md` or "
        "`CLAUDE.md` of each folder up to the repository's root. These agents read their own files themselves "
        f"(`instruction_files` in the host's hello): {', '.join(shown)}."
    )
    return f"\n{textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)}\n"


def page() -> str:
    """The whole page, with the versions it was found out with."""
    pins = found.pins()
    names = (*(agent.name for agent in (*agents(), *acp_agents())), "qwen")
    versions = ", ".join(f"{name} {found.version(pins[name])}" for name in names)
    parts = (table(agents()), SETTINGS, settings(), instructions(), ACP, table(acp_agents(), ORDERED))
    return f"{HEAD}Versions: {versions}.\n\n{''.join(parts)}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
