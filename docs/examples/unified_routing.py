"""Run tasks of several kinds, each on the backend that the router chooses, and print why the others could not."""

import asyncio

from backplane import ControlPlane, TaskRouter
from backplane.routing import TaskType

TASKS: dict[TaskType, str] = {"simple_query": "What is in this folder?", "code_review": "Review the newest file."}


async def main() -> None:
    async with ControlPlane() as plane:
        router = TaskRouter(plane)
        for kind, task in TASKS.items():
            run = (await router.run(task, type=kind, preference="cost")).check()
            print(f"{kind}: {run.backend_id}: {run.text}")
            for other in run.receipt.backplane["route"]["considered"]:
                for obstacle in other["why_not"]:
                    print(f"  not {other['backend']}: {obstacle['fact']} -> {obstacle['change']}")


asyncio.run(main())
