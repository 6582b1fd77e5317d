"""Use the router's three short forms, ask for a choice without a run, and talk to the chosen backend."""

import asyncio

from backplane import ControlPlane
from backplane.routing import TaskDescriptor
from backplane.routing.driver import TaskRouter


async def main() -> None:
    async with ControlPlane() as plane:
        router = TaskRouter(plane)
        print("asked:", (await router.simple_query("What is a mutex?")).check().text)
        print("written:", (await router.generate_code("Write a test for the parser.")).check().text)
        print("reviewed:", (await router.review_code("Review the parser.")).check().text)
        decision = await asyncio.to_thread(router.select_provider, TaskDescriptor(priority="high"))
        print("would take:", decision.chosen().name)
        session, provider = await router.create_session_for_task(TaskDescriptor(preference="cost"))
        async with session:
            print(f"{provider.name}: {(await session.run('Hello?')).check().text}")


asyncio.run(main())
