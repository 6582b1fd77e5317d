"""Send a message, read the stream, and run a tool of your own."""

import asyncio

from backplane import AssistantDelta
from backplane.providers import (
    ProviderRegistry,
    SessionConfig,
    ToolDefinition,
    ToolResultMessage,
    TurnOutcome,
)


def read_note(name: str) -> str:
    """Read a note."""
    return {"hello": "Hello from the note."}[name]


ARTICLE = {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]}
PRICE = ToolDefinition(name="price", description="Look up a price.", parameters=ARTICLE)


async def main() -> None:
    config = SessionConfig(system_prompt="You are a helpful coding assistant.", tools=[read_note, PRICE])
    async with ProviderRegistry() as providers, await providers.get().create_session(config) as session:
        said: str | list[ToolResultMessage] = "Read the note hello, and what does a pump cost?"
        while said:
            stream, said = session.send_message(said), []
            async for event in stream:
                if isinstance(event, AssistantDelta):
                    print(event.text, end="")
                elif isinstance(event, TurnOutcome) and event.stop_reason == "tool_use":
                    # `price` has no handler: its calls are ours, and the turn waits for their results.
                    calls = [call for call in event.message.tool_calls if call.name == "price"]
                    said = [ToolResultMessage(tool_call_id=call.id, content="129 EUR") for call in calls]
                elif isinstance(event, TurnOutcome):
                    print(f"\n[{event.stop_reason}] {event.usage.total_tokens} tokens")


asyncio.run(main())
