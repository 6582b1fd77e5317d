"""Begin a session, or resume one: `save_and_resume.py WORDS [BACKEND [SESSION]]`."""

import asyncio
import sys

from backplane.providers import ProviderRegistry, SessionConfig


async def main(words: str, name: str | None = None, id: str | None = None) -> None:
    async with ProviderRegistry() as providers:
        config = SessionConfig(session_id=id)
        async with providers.get(name).create_session(config) as session:
            turn = (await session.run(words)).check()
            print(turn.text)
            print(session.id, *session.losses, sep="\n")


if not 2 <= len(sys.argv) <= 4:
    sys.exit("usage: save_and_resume.py WORDS [BACKEND [SESSION]]")
asyncio.run(main(*sys.argv[1:]))
