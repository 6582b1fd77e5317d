"""Drives Kimi's local server: a session, prompts, a hook before each tool, questions, an abort.

The agent's hook asks the control plane about every tool call, by the call's id. If the agent also requests an approval
for the call, the hook's verdict answers it. `start` writes the program's settings.
"""

from __future__ import annotations

from typing import Any, Final

import anyio

from backplane.agents import hook
from backplane.agents.agent import STOPPED, Ending, ended_by_itself, id_of
from backplane.agents.agent import Agent as BaseAgent
from backplane.agents.events import mapping, mappings
from backplane.agents.gate import ToolRequest
from backplane.agents.hooked import Hooked, hook_answer
from backplane.agents.kimi.reader import EventReader
from backplane.agents.kimi.server import KimiServer
from backplane.agents.kimi.start import MODEL, secrets_of
from backplane.agents.session import AgentRun
from backplane.agents.start import AgentStart
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.jsonrpc import Notification

SETTINGS: Final = ("thinking",)
"""Settings of an order under `config.vendor.kimi`; the session's settings have the same names."""
EVENTS_S: Final = 30.0
"""Seconds for the agent's server to confirm the subscription to its events."""
UNANSWERED: Final = "the turn was stopped"


class Agent(BaseAgent):
    """The agent of one run."""

    keeps_calls = False
    reader: EventReader

    def __init__(self, session: AgentRun, begun: AgentStart) -> None:
        super().__init__(session, EventReader(session.run.now, session.root))
        self.begun, self.server = begun, KimiServer(begun.child, self._take)
        self.hooked = Hooked(begun.env[hook.SOCKET], self._hook)
        own = {name: value for name, value in begun.settings(SETTINGS).items() if value is not None}
        self._config = {"model": MODEL, "permission_mode": "manual", **own}
        self._id = ""
        self._subscribed = anyio.Event()

    @staticmethod
    def image(media_type: str, data: str) -> Json:
        return {"type": "image", "source": {"kind": "base64", "media_type": media_type, "data": data}}

    async def run(self) -> None:
        try:
            await self.server.run()
        finally:
            await self.server.close()

    async def hear(self, message: Notification) -> None:
        kind, data = message.method, message.params
        if kind == "ack" and self._id in (data.get("accepted_subscriptions") or ()):
            self._subscribed.set()
        await self.session.hear(message)
        ask = {"permission.approval.requested": self._permit, "event.question.requested": self._people}.get(kind)
        if ask is not None:
            self.session.tasks.start_soon(ask, data)

    async def _take(self, line: bytes, said: dict[str, Any]) -> None:
        message = Notification(str(said.get("type")), mapping(said.get("payload")))
        await self.session.watch(line, message)
        await self.hear(message)

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the server, and open the session."""
        await self.session.tasks.start(self.hooked.run)
        await self.server.find()
        self.session.tasks.start_soon(self.server.drain)
        asked = self.begun.conversation
        if asked.wanted is None:
            body = {"metadata": {"cwd": self.session.root}, "agent_config": self._config}
            opened = await self.server.must("POST", "/sessions", body)
        elif asked.fork is not None:
            opened = await self.server.must("POST", f"/sessions/{asked.fork}:fork")
        else:
            opened = await self.server.must("GET", f"/sessions/{asked.wanted}")
        self._id = id_of(opened.get("id"), "/sessions", "session")
        await self.server.connect(self._id)
        with anyio.move_on_after(EVENTS_S):
            await self._subscribed.wait()
        if not self._subscribed.is_set():
            raise BackendError("backend_timeout", f"the agent sent no events of its session within {EVENTS_S:g} s")
        secrets_of(self.begun).unlink(missing_ok=True)  # The agent has read the model's key from it.
        self.begun.keep_name(self._id)
        await self.session.announce(self._id, model=MODEL, kept=asked.kept)

    # A turn -----------------------------------------------------------------------------------------------------------

    async def say(self, words: Json) -> Ending:
        self.reader.begin()
        await self._prompt(words)
        await self.until(lambda: self.reader.reason is not None)
        reason = self.reader.reason
        if reason == "cancelled":
            return STOPPED
        if self.reader.failure is None and reason != "completed":
            return ended_by_itself(reason)
        return self.judge()

    async def _prompt(self, words: Json) -> str:
        content = words if isinstance(words, list) else [{"type": "text", "text": words}]
        body = {"content": content, **self._config}
        return str((await self.server.must("POST", f"/sessions/{self._id}/prompts", body)).get("prompt_id"))

    async def add(self, text: str) -> bool:
        if self.reader.reason is not None:
            return False
        id = await self._prompt(text)
        code, *_ = await self.server.call("POST", f"/sessions/{self._id}/prompts:steer", {"prompt_ids": [id]})
        if code != 0:  # The turn has ended, so this input would begin another one, which the session must begin.
            await self.server.call("POST", f"/sessions/{self._id}/prompts/{id}:abort")
        return code == 0

    async def stop(self) -> bool:
        await self.server.call("POST", f"/sessions/{self._id}:abort")
        return True

    # Its questions ----------------------------------------------------------------------------------------------------

    async def _hook(self, said: dict[str, Any]) -> Json:
        """Decide about a call before it runs; None, which denies it, if the turn is stopped."""
        call = (str(said.get("tool_call_id")), str(said.get("tool_name")), said.get("tool_input"))
        refused = await self.session.attend(self._refusal(*call), UNANSWERED)
        return None if refused == UNANSWERED else hook_answer(refused)

    async def _refusal(self, id: str, tool: str, input: Json) -> str | None:
        """Report a call, and return why it may not run; None if it may."""
        request = ToolRequest(id=id, tool=tool, name=self.reader.name(tool), input=input)
        return (await self.decide(self.reader.call(id, tool, input), request)).refused

    async def _permit(self, asked: dict[str, Any]) -> None:
        """Answer an approval with the verdict of the call's hook; without one, ask the gate now."""
        call = (str(asked.get("toolCallId")), str(asked.get("toolName")), asked.get("toolInput"))
        refused = await self.session.attend(self._refusal(*call), UNANSWERED)
        body = {"decision": "approved"} if refused is None else {"decision": "rejected", "feedback": refused}
        await self.server.call("POST", f"/sessions/{self._id}/approvals/{asked.get('id')}", body)

    async def _people(self, asked: dict[str, Any]) -> None:
        """Ask the user the agent's questions, and send the answers."""
        answers: dict[str, Json] = {}
        for question in mappings(asked.get("questions")):
            labels = {str(one.get("label")): str(one.get("id")) for one in mappings(question.get("options"))}
            person = self.session.ask_person(question.get("question"), labels)
            _, said = await self.session.attend(person, (False, UNANSWERED))
            # A user may choose several, separated by commas.
            chosen = [labels[word.strip()] for word in said.split(",") if word.strip() in labels]
            answer: Json = {"kind": "other", "text": said}
            if said in labels:
                answer = {"kind": "single", "option_id": labels[said]}
            elif question.get("multi_select") and len(chosen) == said.count(",") + 1:
                answer = {"kind": "multi", "option_ids": chosen}
            answers[str(question.get("id"))] = answer
        path = f"/sessions/{self._id}/questions/{asked.get('question_id')}"
        await self.server.call("POST", path, {"answers": answers})

    def raw(self) -> dict[str, Json]:
        return {"session_id": self._id, "model": MODEL, "requests": self.reader.spent.requests}
