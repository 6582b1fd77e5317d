"""Have a diff reviewed by an agent that must ask before it runs a command."""

import asyncio

from backplane import Approval, AssistantDelta, PolicyProfile
from backplane.providers import ProviderRegistry, SessionConfig, TurnOutcome, prompt

DIFF = "-    return a - b\n+    return a + b\n"


async def main() -> None:
    config = SessionConfig(max_turns=5, policy=PolicyProfile(require_approval_for=("bash",)), on_ask="stream")
    async with ProviderRegistry() as providers, await providers.get().create_session(config) as session:
        async for event in session.send_message(prompt("Please review this code.", diff=DIFF)):
            match event:
                case Approval() if session.awaits_answer(event.body["id"]):
                    print(f"[asked: {event.body.get('command') or event.input}]")
                    session.answer(event.body["id"], event.deny("not here"))
                case AssistantDelta():
                    print(event.text, end="")
                case TurnOutcome():
                    print(f"\n[{event.stop_reason}]")
                case _:
                    pass
        used = session.get_usage()
        print(f"tokens: {used.total_tokens}, cost: {used.cost_usd_micros} millionths of a dollar")


asyncio.run(main())
