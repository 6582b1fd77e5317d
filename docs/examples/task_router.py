"""Run tasks by type, ask for a choice without a run, and talk to the chosen backend."""

import asyncio

from backplane import ControlPlane, TaskRouter
from backplane.routing import TaskDescriptor


async def main() -> None:
    async with ControlPlane() as plane:
        router = TaskRouter(plane)
        asked = await router.run("What is a mutex?", type="simple_query", preference="cost")
        print("asked:", asked.check().text)
        written = await router.run("Write a test for the parser.", type="code_generation")
        print("written:", written.check().text)
        reviewed = await router.run("Review the parser.", type="code_review", preference="quality", priority="high")
        print("reviewed:", reviewed.check().text)
        decision = await asyncio.to_thread(router.select_provider, TaskDescriptor(priority="high"))
        print("would take:", decision.chosen().name)
        session, provider = await router.create_session_for_task(TaskDescriptor(preference="cost"))
        async with session:
            print(f"{provider.name}: {(await session.run('Hello?')).check().text}")


asyncio.run(main())
