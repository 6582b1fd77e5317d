"""Route by a strategy of your own: the backend with the widest context window of those that can take the task."""

import asyncio

from backplane import ControlPlane, TaskRouter
from backplane.routing import Option, TaskDescriptor


def widest(task: TaskDescriptor, options: tuple[Option, ...]) -> int | None:
    """Get the eligible options only; None would refuse the order."""
    return max(range(len(options)), key=lambda place: options[place].context_tokens or 0, default=None)


async def main() -> None:
    async with ControlPlane() as plane:
        run = (await TaskRouter(plane, widest).run("Summarise the whole log.")).check()
        print(f"{run.backend_id} by {run.receipt.backplane['route']['strategy']}: {run.text}")


asyncio.run(main())
