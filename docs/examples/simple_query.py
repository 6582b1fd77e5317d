"""Ask the configured backend one question."""

import asyncio

from backplane.providers import ProviderRegistry


async def main() -> None:
    async with ProviderRegistry() as providers, await providers.get().create_session() as session:
        print((await session.run("What is 2+2?")).check().text)


asyncio.run(main())
