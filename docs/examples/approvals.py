"""Have a diff reviewed by an agent that must ask before it runs a command."""

import asyncio

from backplane import PolicyProfile
from backplane.providers import ProviderRegistry, SessionConfig, unified


async def main() -> None:
    config = SessionConfig(max_turns=5, policy=PolicyProfile(require_approval_for=("bash",)))
    async with ProviderRegistry() as providers, await providers.get().create_session(config) as session:
        diff = unified.GitDiff(content="-    return a - b\n+    return a + b\n")
        await session.send_input(unified.Prompt(text="Please review this code.", context=(diff,)))
        async for event in session.receive_events():
            match event:
                case unified.ExecApprovalRequest() | unified.PermissionRequest():
                    asked = event.command if isinstance(event, unified.ExecApprovalRequest) else event.input
                    print(f"[asked: {asked}]")
                    answer = unified.ToolApproval(request_id=event.request_id, approved=False, reason="not here")
                    await session.send_input(answer)
                case unified.TextDelta():
                    print(event.text, end="")
                case unified.TurnComplete():
                    print(f"\n[{event.stop_reason}]")
                case _:
                    pass
        used = session.get_usage()
        print(f"tokens: {used.total_tokens}, cost: {used.cost_usd_micros} millionths of a dollar")


asyncio.run(main())
