"""Run the same code on any backend: the first argument names it, else `default_backend` of the configuration."""

import asyncio
import sys

from backplane.providers import ProviderRegistry, SessionConfig


async def main(name: str | None) -> None:
    async with ProviderRegistry() as providers:
        provider = providers.get(name)
        async with provider.create_session(SessionConfig(system_prompt="Be brief.")) as session:
            for words in ("My name is Ada.", "What is my name?"):
                print(f"{session.provider}: {(await session.run(words)).check().text}")
            print("not carried over:", ", ".join(session.losses) or "nothing")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
